"""Where caches are: what a person may name, and what is refused with the remedy."""

import os
from pathlib import Path

import pytest

import shapetune
from shapetune.cache import places
from shapetune.cache.errors import CacheError
from shapetune.cache.places import (
    Remote,
    as_place,
    read_path,
    site_place,
    split_places,
    write_place,
)


@pytest.mark.parametrize("bad", ["", "  ", None, 3, b"x", 1.5, {"a": 1}, "~no-such-user/cache", "x" * 300,
                                 "a/" * 3000, "nul\0l"])  # fmt: skip
def test_what_is_no_place_is_refused_with_what_to_name(bad):
    with pytest.raises(CacheError, match=r"name a folder, a \.msgpack file"):
        as_place(bad)


@pytest.mark.parametrize(
    "bad", [None, 3, [1, 2], [None], "", ["a", ""], "~no-such-user", "y" * 300]
)
def test_load_and_use_cache_refuse_what_is_no_place(bad):
    with pytest.raises(CacheError, match="name a folder"):
        shapetune.load(bad)
    with pytest.raises(CacheError, match="name a folder"), shapetune.use_cache(bad):
        pass


def test_a_list_is_split_like_path_and_urls_keep_their_colons():
    text = os.pathsep.join(
        [
            "/a/b",
            "s3://bucket/x",
            "http://host:8080/y",
            "",
            "gs://c",
            "sftp://me:word@h:22/z",
            "~/c",
        ]
    )
    assert split_places(text) == [
        Path("/a/b"),
        Remote("s3://bucket/x"),
        Remote("http://host:8080/y"),
        Remote("gs://c"),
        Remote("sftp://me:word@h:22/z"),
        Path("~/c").expanduser(),
    ]
    assert "word" not in str(Remote("sftp://me:word@h:22/z"))


def test_a_file_url_is_a_path():
    assert as_place("file:///a/b") == Path("/a/b")
    assert as_place("file://localhost/a/b") == Path("/a/b")
    assert as_place("file:///") == Path("/")


@pytest.mark.parametrize("bad", ["s3://", "s3:///", "file://", "S3://"])
def test_a_url_without_a_place_is_refused(bad):
    with pytest.raises(CacheError, match=r"names nothing after its scheme.*name a folder"):
        as_place(bad)


def test_the_scheme_of_a_url_may_be_in_capitals():
    assert as_place("S3://Bucket/X/") == Remote("s3://Bucket/X")
    assert split_places("/a:HTTP://h:80/x:/b") == [Path("/a"), Remote("http://h:80/x"), Path("/b")]


def test_the_read_path_is_own_then_site_then_shipped(tmp_path, monkeypatch):
    site, shipped = tmp_path / "site", tmp_path / "shipped"
    monkeypatch.setenv("SHAPETUNE_CACHE", f"{tmp_path / 'one'}{os.pathsep}{tmp_path / 'two'}")
    monkeypatch.setenv("SHAPETUNE_SITE_CACHE", str(site))
    monkeypatch.setattr(places, "SHIPPED", shipped)
    own = [tmp_path / "one", tmp_path / "two"]
    assert read_path() == own
    site.mkdir()
    shipped.mkdir()
    assert read_path() == [*own, site, shipped]
    assert write_place() == own[0]


def test_the_machine_s_own_cache_cannot_be_remote(monkeypatch):
    monkeypatch.setenv("SHAPETUNE_SITE_CACHE", "s3://bucket/cache")
    with pytest.raises(CacheError, match="SHAPETUNE_SITE_CACHE='s3://bucket/cache' is remote"):
        read_path()
    monkeypatch.setenv("SHAPETUNE_SITE_CACHE", " ")
    assert site_place() is None


def test_a_remote_place_is_never_written_to(monkeypatch):
    monkeypatch.setenv("SHAPETUNE_CACHE", "s3://bucket/cache")
    with pytest.raises(CacheError, match="remote, which is read only; put a folder first"):
        write_place()


def test_without_a_home_nothing_is_made_up(monkeypatch):
    monkeypatch.delenv("SHAPETUNE_CACHE")
    monkeypatch.setattr(places, "user_place", lambda: None)
    assert read_path() == [] or all(path.is_absolute() for path in read_path())
    with pytest.raises(CacheError, match=r"no home folder.*SHAPETUNE_CACHE"):
        write_place()
