"""Remote places: a real S3 API, a real web server, memory; copies, mirrors, and what is refused."""

import os
import socket
import threading
import time
import uuid

import pytest

import shapetune
from shapetune.cache import load, merge, publish
from shapetune.cache.errors import CacheError, ConfigError
from shapetune.cache.places import Remote, as_place
from shapetune.cache.remote import pull, push

from ..samples import problem, record
from .light import DEVICE
from .light import record as light
from .serving import served


@pytest.fixture(autouse=True)
def own_mirrors(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAPETUNE_MIRROR", str(tmp_path / "mirrors"))


@pytest.fixture(scope="module")
def s3():
    """An S3 API that speaks HTTP, as moto has it."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    port = server._server.socket.getsockname()[1]
    named = {
        "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    old = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    import fsspec.config

    fsspec.config.set_conf_env(fsspec.config.conf)
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("fleet")
    yield "s3://fleet"
    fsspec.config.conf.pop("s3", None)
    for name, value in old.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value
    server.stop()


@pytest.fixture(params=["memory", "s3", "folder"])
def writable(request, tmp_path):
    """A place that can be pushed to, empty."""
    if request.param == "folder":
        return as_place(tmp_path / "shared")
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory://fleet"
    return Remote(f"{root}/{uuid.uuid4().hex}/cache")


def _filled(place, numbers=range(1, 6)):
    for n in numbers:
        publish(place, [light(n)])
    return place


def test_push_and_pull_copy_what_is_missing_and_nothing_else(tmp_path, writable):
    mine = _filled(tmp_path / "mine")
    first, again = push(mine, writable), push(mine, writable)
    assert (first.copied, first.present, first.refused) == (5, 0, [])
    assert (again.copied, again.present) == (0, 5)
    publish(mine, [light(6)])
    assert push(mine, writable).copied == 1
    assert load([writable]).ids == load([mine]).ids
    if isinstance(writable, Remote):
        heard = []
        done = pull(writable, tmp_path / "yours", None, lambda *step: heard.append(step))
        assert (done.copied, done.present) == (6, 0)
        assert [step[:2] for step in heard] == [(n, 6) for n in range(7)]
        assert load([tmp_path / "yours"]).ids == load([mine]).ids
        assert pull(writable, tmp_path / "yours").present == 6


def test_two_machines_meet_in_one_bucket(tmp_path, s3):
    place = Remote(f"{s3}/{uuid.uuid4().hex}")
    push(_filled(tmp_path / "a", (1, 2)), place)
    push(_filled(tmp_path / "b", (2, 3)), place)
    pull(place, tmp_path / "a")
    assert load([tmp_path / "a"]).ids == {light(n).id for n in (1, 2, 3)}


def test_a_damaged_or_foreign_object_is_refused_and_the_rest_comes(tmp_path, writable):
    if not isinstance(writable, Remote):
        pytest.skip("a folder holds no objects; the stores under other parameters do")
    from shapetune.cache.remote import Store

    push(_filled(tmp_path / "mine"), writable)
    store = Store(writable)
    store.write(f"{DEVICE.folder}/{'0' * 32}.msgpack", b"not a segment")
    store.write(f"{DEVICE.folder}/notes.txt", b"hello")
    store.write("Strange Folder/x.msgpack", b"hello")
    done = pull(writable, tmp_path / "yours")
    assert (done.copied, len(done.refused)) == (5, 1)
    assert load([tmp_path / "yours"]).ids == load([tmp_path / "mine"]).ids
    assert sorted(p.name for p in (tmp_path / "yours").iterdir()) == [DEVICE.folder]


def test_damaged_segments_are_not_pushed(tmp_path):
    mine = _filled(tmp_path / "mine")
    hurt = sorted(mine.glob("*/*.msgpack"))[0]
    hurt.write_bytes(hurt.read_bytes()[:-3])
    done = push(mine, Remote(f"memory://fleet/{uuid.uuid4().hex}"))
    assert (done.copied, len(done.refused)) == (4, 1)


def test_a_web_server_is_read_and_not_written(tmp_path):
    pytest.importorskip("aiohttp")
    mine = _filled(tmp_path / "mine")
    merge.export([mine], tmp_path / "mine" / "all.msgpack")
    with served(mine) as url:
        assert pull(as_place(url), tmp_path / "yours").copied == 5
        assert load([as_place(f"{url}/all.msgpack")]).ids == load([mine]).ids
        with pytest.raises(CacheError, match="can only be read"):
            push(_filled(tmp_path / "more", (9,)), as_place(url))
    assert load([tmp_path / "yours"]).ids == load([mine]).ids


def test_a_remote_place_in_the_read_path_is_dispatched_from(tmp_path, own_cache, monkeypatch):
    place = f"memory://fleet/{uuid.uuid4().hex}"
    one = record(problem())
    publish(tmp_path / "mine", [one])
    push(tmp_path / "mine", Remote(place))
    monkeypatch.setenv("SHAPETUNE_CACHE", f"{own_cache}{os.pathsep}{place}")
    assert shapetune.reload() == 1
    assert shapetune.explain("attention", seq=1024, dim=64).record_ids == (one.id,)


def test_a_mirror_is_asked_again_only_when_it_is_old(tmp_path, monkeypatch):
    place = Remote(f"memory://fleet/{uuid.uuid4().hex}")
    mine = _filled(tmp_path / "mine", (1,))
    push(mine, place)
    assert len(load([place])) == 1
    publish(mine, [light(2)])
    push(mine, place)
    assert len(load([place])) == 1
    monkeypatch.setenv("SHAPETUNE_MIRROR_AGE", "0")
    assert len(load([place])) == 2


def test_a_mirror_follows_a_compaction(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAPETUNE_MIRROR_AGE", "0")
    pytest.importorskip("aiohttp")
    mine = _filled(tmp_path / "mine")
    with served(mine) as url:
        assert len(load([as_place(url)])) == 5
        merge.compact(mine)
        assert load([as_place(url)]).ids == load([mine]).ids
    segments = list((tmp_path / "mirrors").rglob("*.msgpack"))
    assert len(segments) == 1


def test_a_mirror_of_a_single_file_follows_what_is_put_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAPETUNE_MIRROR_AGE", "0")
    pytest.importorskip("aiohttp")
    (tmp_path / "web").mkdir()
    with served(tmp_path / "web") as url:
        for numbers in ((1, 2), (3,)):
            mine = _filled(tmp_path / f"mine{numbers[0]}", numbers)
            merge.export([mine], tmp_path / "web" / "all.msgpack")
            assert load([as_place(f"{url}/all.msgpack")]).ids == load([mine]).ids


def test_a_place_that_is_down_costs_a_warning_and_what_was_mirrored_counts(
    tmp_path, monkeypatch, caplog
):
    pytest.importorskip("aiohttp")
    mine = _filled(tmp_path / "mine")
    with served(mine) as url:
        assert len(load([as_place(url)])) == 5
    monkeypatch.setenv("SHAPETUNE_MIRROR_AGE", "0")
    assert len(load([as_place(url)])) == 5
    assert "left out" in caplog.text
    assert "using its mirror" in caplog.text
    caplog.clear()
    assert len(load([as_place(url)])) == 5
    assert "failed a moment ago" in caplog.text


@pytest.mark.parametrize("bad", ["abc", "-1", "inf", "nan", "1e300"])
@pytest.mark.parametrize("name", ["SHAPETUNE_MIRROR_AGE", "SHAPETUNE_REMOTE_TIMEOUT"])
def test_a_time_that_can_not_be_waited_is_refused(monkeypatch, name, bad):
    monkeypatch.setenv(name, bad)
    with pytest.raises(ConfigError, match=f"{name}='{bad}' is not a number of seconds"):
        load([Remote("http://127.0.0.1:9/x")])


def test_a_merge_takes_a_place_as_it_is_now_and_not_its_mirror(tmp_path):
    pytest.importorskip("aiohttp")
    mine = _filled(tmp_path / "mine")
    with served(mine) as url:
        assert merge.merge(tmp_path / "other", [as_place(url)]).added == 5
        publish(mine, [light(99)])
        assert merge.merge(tmp_path / "other", [as_place(url)]).added == 1
    with pytest.raises(CacheError, match="cannot list"):
        merge.merge(tmp_path / "other", [as_place(url)])


def test_a_place_that_never_answers_costs_no_more_than_the_timeout(monkeypatch, caplog):
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("SHAPETUNE_REMOTE_TIMEOUT", "0.3")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        done = threading.Event()
        start = time.monotonic()
        assert len(load([as_place(f"http://127.0.0.1:{silent.getsockname()[1]}/x")])) == 0
        waited = time.monotonic() - start
        done.set()
    assert "no answer within 0.3 s" in caplog.text
    assert waited < 30, "it waited for the driver's own timeout"


def test_a_place_without_a_driver_or_of_an_unknown_kind_says_what_to_do(tmp_path):
    with pytest.raises(CacheError, match="use file, s3, gs, http, https or sftp"):
        pull(Remote("teapot://x/y"), tmp_path)
    from shapetune.cache import remote as module

    def missing(remote):
        raise ImportError("no gcsfs")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsspec.core.url_to_fs", lambda *a, **k: missing(a))
        with pytest.raises(CacheError, match=r"shapetune\[gcs\]"):
            module.Store(Remote("gs://bucket"))
