import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapetune.cache import RecordSet, check_writable, load, publish
from shapetune.cache.envelope import read_head
from shapetune.cache.errors import CacheError
from shapetune.cache.segment import pack_segment, read_frames
from shapetune.kernels import current_device

from ..samples import problem, record

MANY = [record(problem(seq=64 * n)) for n in range(1, 9)]
PAYLOADS = [one.to_bytes() for one in MANY]


def test_what_is_published_is_loaded(tmp_path):
    for one in MANY:
        publish(tmp_path, [one])
    assert load([tmp_path]).ids == {one.id for one in MANY}
    assert load([tmp_path], current_device()).ids == {one.id for one in MANY}


def test_publishing_twice_changes_nothing(tmp_path):
    assert publish(tmp_path, MANY) == publish(tmp_path, MANY[::-1])
    assert len(load([tmp_path])) == len(MANY)


def test_several_places_are_one_set_and_the_missing_hold_nothing(tmp_path):
    publish(tmp_path / "a", MANY[:5])
    publish(tmp_path / "b", MANY[3:])
    assert len(load([tmp_path / "a", tmp_path / "none", tmp_path / "b"])) == len(MANY)


def test_records_of_a_later_version_are_carried_along_unread():
    head = read_head(PAYLOADS[0])
    later = dataclasses.replace(head, schema=head.schema + 1).seal()
    other = dataclasses.replace(head, kind="weather").seal()
    both = RecordSet([later]) | RecordSet([other, PAYLOADS[1]])
    assert set(both.payloads) == {later, other, PAYLOADS[1]}
    assert (both.unknown, len(list(both)), both.damage) == (2, 1, [])


def test_a_single_file_is_a_cache_to_read_and_not_to_write(tmp_path):
    path = publish(tmp_path, MANY)
    assert len(load([path])) == len(MANY)
    with pytest.raises(CacheError, match="single file"):
        publish(path, MANY)


def test_a_file_of_something_else_is_refused_by_name(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    for use in (
        lambda: load([other]),
        lambda: publish(other, MANY),
        lambda: check_writable(other, current_device()),
    ):
        with pytest.raises(CacheError, match=r"notes\.txt.*not a shapetune cache"):
            use()
    assert other.read_text() == "hello"


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    with pytest.raises(CacheError, match="SHAPETUNE_CACHE"):
        publish(blocker / "below", MANY)
    with pytest.raises(CacheError, match="SHAPETUNE_CACHE"):
        check_writable(blocker / "below", current_device())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_before_the_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CacheError):
        check_writable(tmp_path / "cache", current_device())


def test_no_temporary_file_is_left(tmp_path):
    publish(tmp_path, MANY)
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".tmp")]


def test_half_a_segment_yields_its_whole_records(tmp_path):
    path = publish(tmp_path, MANY)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    found = load([tmp_path])
    assert 0 < len(found) < len(MANY)
    assert found.damage


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bytes_never_raise_and_cost_only_the_records_they_hit(data):
    whole = pack_segment(PAYLOADS)
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = bytearray(whole)
    broken[at] ^= data.draw(st.integers(1, 255))
    read = {frame[1] for frame in read_frames(bytes(broken)) if frame is not None}
    assert read <= set(PAYLOADS)
    assert len(read) >= len(PAYLOADS) - 1


def test_a_record_whose_body_is_damage_is_left_out_and_listed():
    payload = bytearray(PAYLOADS[0])
    found = RecordSet([bytes(payload), b"garbage"])
    assert len(found) == 1
    assert len(found.damage) == 1


@given(
    st.lists(st.sampled_from(PAYLOADS)),
    st.lists(st.sampled_from(PAYLOADS)),
    st.lists(st.sampled_from(PAYLOADS)),
)
def test_union_is_commutative_associative_and_idempotent(a, b, c):
    x, y, z = RecordSet(a), RecordSet(b), RecordSet(c)
    assert (x | y).ids == (y | x).ids
    assert ((x | y) | z).ids == (x | (y | z)).ids
    assert (x | x).ids == x.ids


def test_writers_that_are_killed_leave_what_was_published(tmp_path):
    """A child publishes record after record until it is killed; every name it printed holds."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from shapetune.cache import publish, load\n"
        "source = list(load([Path(sys.argv[1])]))\n"
        "for one in source * 50:\n"
        "    publish(Path(sys.argv[2]), [one])\n"
        "    print(one.id, flush=True)\n"
    )
    publish(tmp_path / "source", MANY)
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "source"), str(tmp_path / "target")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    printed = [child.stdout.readline().strip() for _ in range(5)]
    child.kill()
    child.wait()
    child.stdout.close()
    assert set(printed) <= load([tmp_path / "target"]).ids


def test_what_is_no_regular_file_is_skipped_and_not_waited_for(tmp_path):
    publish(tmp_path, MANY)
    folder = tmp_path / current_device().folder
    os.mkfifo(folder / "pipe.msgpack")
    (folder / "endless.msgpack").symlink_to("/dev/zero")
    (folder / "loop.msgpack").symlink_to(folder / "loop.msgpack")
    found = load([tmp_path])
    assert len(found) == len(MANY)
    assert len(found.damage) == 3


def test_a_device_folder_that_is_a_file_is_refused_before_the_work(tmp_path):
    (tmp_path / current_device().folder).write_text("x")
    with pytest.raises(CacheError, match="cannot be written"):
        check_writable(tmp_path, current_device())
    publish(tmp_path, [record(device=current_device().__class__("cpu", "Other", cores=3))])
    assert len(load([tmp_path])) == 1
