"""What long commands say in a pipe: what they are doing, on standard error, without a colour."""

import json

import pytest
from click.testing import CliRunner

from shapetune.autotune import aot
from shapetune.cache import publish
from shapetune.cli import main
from shapetune.commands import progress

from ..samples import problem, record


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What is said after seconds is said at once."""
    monkeypatch.setattr(progress, "_PLAIN_FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "_PLAIN_SHARE", 0.0)


def heard(*args):
    """What a command says on standard error; its JSON is alone on standard output."""
    result = CliRunner().invoke(main, [*map(str, args), "--json"])
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)
    assert "\x1b" not in result.stderr
    return result.stderr


def test_commands_that_move_records_say_what_they_are_doing(own_cache, tmp_path):
    for seq in (64, 128):
        publish(own_cache, [record(problem(seq=seq))])
    (folder,) = [path.name for path in own_cache.iterdir()]
    shared = tmp_path / "shared"
    told = heard("cache", "push", shared)
    assert f"[0/2] pushing {folder}/" in told
    assert f"[1/2] pushing {folder}/" in told
    assert "[0/2] pulling " in heard("cache", "pull", shared, "--cache", tmp_path / "other")
    told = heard("cache", "merge", shared, "--cache", tmp_path / "third")
    assert f"reading {shared}" in told
    assert f"merged {folder}" in told
    assert f"folded {folder}" in heard("cache", "compact")
    for command in (["verify"], ["export", tmp_path / "all.msgpack"]):
        assert f"reading every record of {own_cache}" in heard("cache", *command)
    assert f"[0/2] reading {own_cache}" in heard("cache", "info")


def test_repair_says_what_it_is_doing(own_cache):
    publish(own_cache, [record(problem()), record(problem(seq=77))])
    (path,) = own_cache.rglob("*.msgpack")
    path.write_bytes(path.read_bytes()[:-9])
    assert "moving what is damaged" in heard("cache", "verify", "--repair")


def test_the_report_says_what_it_is_doing(tmp_path):
    pytest.importorskip("plotly", reason="needs plotly")
    told = heard("report", "--output", tmp_path / "report.html")
    for words in ("[0/3] reading the cache", "[1/3] drawing", "[2/3] writing"):
        assert words in told


def test_a_check_says_how_far_it_is(monkeypatch):
    def compile_all(tasks, jobs, hear):
        found = [aot.Compilation(card.key, one, choice, "ok") for card, one, choice in tasks]
        for one in found:
            hear(one)
        return found

    monkeypatch.setattr(aot, "compile_all", compile_all)
    asked = ["--seq", "64", "--dim", "64", "--target", "rtx3090", "--sample", "3"]
    assert "[0/3] compiling" in heard("check", "attention", *asked)


def test_commands_that_ask_say_what_they_are_doing(own_cache):
    publish(own_cache, [record(problem())])
    for command in (["show"], ["explain", "attention", "--seq", 64, "--dim", 16], ["misses"]):
        assert "reading the caches" in heard(*command)
    assert "looking at the caches" in heard("doctor")
