"""The commands that move records, look after them, and ask about them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shapetune.cache import load, miss, publish
from shapetune.cli import main
from shapetune.kernels import current_device

from ..samples import problem, record

DATA = Path(__file__).parent.parent / "data"
ASKED = ["attention", "--seq", "1024", "--dim", "64"]


def run(*args, code=0):
    result = CliRunner().invoke(main, list(map(str, args)))
    assert result.exit_code == code, result.output
    return result


def values(*args, code=0):
    return json.loads(run(*args, "--json", code=code).stdout)


def test_a_fleet_shares_through_a_folder(own_cache, tmp_path):
    one, shared, other = record(problem()), tmp_path / "shared", tmp_path / "other"
    publish(own_cache, [one])
    assert values("cache", "push", shared)["copied"] == 1
    assert values("cache", "pull", shared, "--cache", other)["copied"] == 1
    assert values("cache", "pull", shared, "--cache", other)["present"] == 1
    assert load([other]).ids == {one.id}
    assert values("cache", "merge", other, "--cache", tmp_path / "third")["added"] == 1


def test_export_and_import_of_one_file(own_cache, tmp_path):
    publish(own_cache, [record(problem()), record(problem(seq=77))])
    path = tmp_path / "all.msgpack"
    assert values("cache", "export", path)["records"] == 2
    imported = values("cache", "import", path, "--cache", tmp_path / "new")
    assert imported["files"][0]["records"] == 2
    run("cache", "export", tmp_path / "none.msgpack", "--device", "no such", code=1)


def test_a_benchmark_file_is_imported_for_its_device(own_cache):
    (one,) = values("cache", "import", DATA / "rtx3090_attention.json")["files"]
    assert one["records"] == 108
    assert one["device"]["name"] == "NVIDIA GeForce RTX 3090"
    assert values("cache", "info")["places"][0]["kinds"] == {"imported": 108}
    # Again it says nothing new, whatever the time.
    (again,) = values("cache", "import", DATA / "rtx3090_attention.json")["files"]
    assert again["records"] == 0
    assert values("cache", "info")["places"][0]["kinds"] == {"imported": 108}


def test_info_compact_and_verify(own_cache):
    for seq in (64, 128, 192):
        publish(own_cache, [record(problem(seq=seq))])
    assert values("cache", "compact")["segments_removed"] == 3
    told = values("cache", "info")
    assert told["records"] == 3
    assert len(told["digest"]) == 16
    assert values("cache", "verify")["damage"] == []
    (path,) = own_cache.rglob("*.msgpack")
    path.write_bytes(path.read_bytes()[:-9])
    assert len(values("cache", "verify", code=1)["damage"]) >= 1
    assert len(values("cache", "verify", "--repair")["moved"]) == 1
    assert values("cache", "verify") == {"records": 2, "damage": [], "moved": []}


def test_pin_and_unpin(own_cache):
    publish(own_cache, [record(problem())])
    run("cache", "pin", *ASKED, "--implementation", "xla", "--note", "for the paper")
    (why,) = values("explain", *ASKED)
    assert (why["tier"], why["implementation"]) == ("pinned", "xla")
    assert "for the paper" in " ".join(why["steps"])
    run("cache", "unpin", *ASKED)
    assert values("explain", *ASKED)[0]["tier"] == "exact"
    assert "nothing was pinned" in run("cache", "unpin", *ASKED).stdout
    run("cache", "pin", *ASKED, "--implementation", "blockwise", "--config", "block_q=5", code=1)
    run("cache", "pin", *ASKED, "--implementation", "blockwise", "--config", "block_q", code=2)


def test_explain_shows_every_tier_and_the_evidence(own_cache):
    publish(own_cache, [record(problem())])
    text = run("explain", *ASKED).stdout
    for word in ("pinned: no", "exact: 1 record(s)", "95% interval", "15 pairs", "digest"):
        assert word in text
    text = run("explain", "attention", "--seq", "9", "--dim", "64").stdout
    for word in ("exact: 0", "neighbours: 0", "other devices: 0", "imported: 0", "heuristic"):
        assert word in text or word == "imported: 0"


def test_explain_of_the_recurrence_asks_for_its_window():
    result = run("explain", "linear_attention", "--seq", "64", "--dim", "32", code=2)
    assert "--window is needed" in result.output
    run("explain", "linear_attention", "--seq", "64", "--dim", "32", "--window", "-1")


def test_a_pin_of_the_recurrence_asks_for_its_window(own_cache):
    asked = ["linear_attention", "--seq", "64", "--dim", "32"]
    told = run("cache", "pin", *asked, "--implementation", "scan", code=2)
    assert "--window is needed" in told.output
    assert "--window is needed" in run("cache", "unpin", *asked, code=2).output
    run("cache", "pin", *asked, "--window", "7", "--implementation", "scan")
    assert values("explain", *asked, "--window", "7")[0]["tier"] == "pinned"


@pytest.mark.parametrize("value", ["²", "--5", "٣", "9" * 5000, "-", "9" * 20])
def test_a_pin_with_a_parameter_that_is_no_number_is_refused(own_cache, value):
    result = CliRunner().invoke(
        main,
        ["cache", "pin", *ASKED, "--implementation", "blockwise", "--config", f"block_q={value}"],
    )
    assert result.exit_code in (1, 2)
    assert "Error:" in result.output
    assert "block_q=" in result.output


def test_a_choice_cannot_be_pinned_in_place_of_one(own_cache):
    told = run("cache", "pin", *ASKED, "--implementation", "default", code=2).output
    assert "name another one" in told
    assert not own_cache.exists()


def test_a_note_that_is_not_utf_8_is_refused(own_cache):
    told = run("cache", "pin", *ASKED, "--implementation", "xla", "--note", "caf\udce9", code=2)
    assert "'--note'" in told.output
    assert "UTF-8" in told.output
    assert not own_cache.exists()


def test_sources_that_are_not_there_are_an_error_and_not_nothing_new(own_cache, tmp_path):
    gone = tmp_path / "gone"
    assert "nothing was pulled" in run("cache", "pull", gone, code=1).output
    assert "nothing was merged" in run("cache", "merge", gone, code=1).output
    for url in ("foo://bar/x", "http://127.0.0.1:9/x"):
        assert url in run("cache", "merge", url, code=1).output


def test_a_single_file_where_a_folder_is_needed_is_named_as_such(own_cache, tmp_path):
    publish(own_cache, [record(problem()), record(problem(seq=77))])
    path, cut = tmp_path / "all.msgpack", tmp_path / "cut.msgpack"
    run("cache", "export", path)
    for command in ("push", "pull"):
        assert "single file" in run("cache", command, path, "--cache", tmp_path, code=1).output
    cut.write_bytes(path.read_bytes()[:-9])
    assert "single file" in run("cache", "verify", "--repair", "--cache", cut, code=1).output
    assert "1 damaged part(s) skipped" in run("cache", "import", cut).stdout


def test_an_export_that_cannot_be_written_names_the_file(own_cache, tmp_path):
    publish(own_cache, [record(problem())])
    (tmp_path / "dir.msgpack").mkdir()
    told = run("cache", "export", tmp_path / "dir.msgpack", code=1).output
    assert "dir.msgpack" in told
    assert "name a file" in told
    assert "SHAPETUNE_CACHE" not in told


def test_repair_says_what_it_leaves_in_other_places(own_cache, tmp_path, monkeypatch):
    for place in (own_cache, tmp_path / "second"):
        publish(place, [record(problem()), record(problem(seq=77))])
        (path,) = place.rglob("*.msgpack")
        path.write_bytes(path.read_bytes()[:-9])
    monkeypatch.setenv("SHAPETUNE_CACHE", f"{own_cache}{os.pathsep}{tmp_path / 'second'}")
    told = run("cache", "verify", "--repair", code=1).stdout
    assert f"1 left: only {own_cache} was repaired" in told
    run("cache", "verify", "--repair", "--cache", tmp_path / "second")
    run("cache", "verify")


def test_what_is_no_regular_file_is_not_read_as_a_benchmark(own_cache):
    assert "not a regular file" in run("cache", "import", "/dev/zero", code=1).output


def test_show_filters(own_cache):
    publish(own_cache, [record(problem()), record(problem(seq=77, mode="fwd_bwd"))])
    publish(own_cache, [record(problem(seq=78), jax_version="0.1.0")])

    def seqs(*filters):
        return sorted(one["problem"]["seq"] for one in values("show", *filters))

    assert seqs() == [77, 78, 1024]
    assert seqs("--seq", "77,78") == [77, 78]
    assert seqs("--mode", "fwd_bwd") == [77]
    assert seqs("--stale") == [78]
    assert seqs("--device", "no such") == []
    assert seqs("--here", "--implementation", "blockwise") == [77, 78, 1024]


def test_misses_and_doctor(own_cache):
    assert "No call is known" in run("misses").stdout
    assert "there is no op 'nope'" in run("misses", "nope", code=1).output
    miss.write(own_cache, [miss.Miss(problem(), current_device(), 7, "heuristic", "a", 1.0)])
    (one,) = values("misses")
    assert (one["calls"], one["problem"]["seq"]) == (7, 1024)
    publish(own_cache, [record(problem(seq=77), jax_version="0.1.0")])
    topics = {one["topic"]: one for one in values("doctor")}
    assert {"place", "versions", "device", "stale", "misses"} <= set(topics)
    assert "--from-misses" in topics["misses"]["remedy"]
    run("misses", "--clear")
    assert values("misses") == []
    (path,) = own_cache.glob("*/*.msgpack")
    path.write_bytes(path.read_bytes()[:-9])
    assert "→ shapetune cache verify --repair" in run("doctor", code=1).stdout


def test_tuning_from_misses_takes_the_costliest_first(own_cache):
    small, large = problem(seq=65, dim=32, heads=2), problem(seq=96, dim=32, heads=2)
    missed = [
        miss.Miss(p, current_device(), n, "heuristic", "a", 1.0)
        for p, n in ((small, 1), (large, 50))
    ]
    miss.write(own_cache, missed)
    told = run(
        "tune",
        "attention",
        "--from-misses",
        "--trials",
        "2",
        "--budget",
        "5s",
        "--isolation",
        "none",
        "--json",
    )
    assert [one["problem"]["seq"] for one in json.loads(told.stdout)] == [96, 65]
    assert values("misses") == []
    assert "has missed a record" in run("tune", "attention", "--from-misses").output


def test_doctor_shows_no_password_and_names_a_bad_variable(own_cache, monkeypatch):
    monkeypatch.setenv("SHAPETUNE_CACHE", f"{own_cache}{os.pathsep}http://me:s3cr3t@127.0.0.1:9/x")
    monkeypatch.setenv("SHAPETUNE_MIRROR_AGE", "abc")
    told = run("doctor", code=1).output
    assert "s3cr3t" not in told
    assert "! settings: SHAPETUNE_MIRROR_AGE='abc'" in told


def test_doctor_names_a_place_that_is_down(own_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("SHAPETUNE_MIRROR", str(tmp_path / "mirrors"))
    monkeypatch.setenv("SHAPETUNE_CACHE", f"{own_cache}{os.pathsep}http://127.0.0.1:9/x")
    assert "! place: http://127.0.0.1:9/x: cannot be reached" in run("doctor", code=1).output


@pytest.mark.parametrize(
    "command", [["show"], ["doctor"], ["explain", *ASKED], ["cache", "info"], ["misses"]]
)
@pytest.mark.parametrize("place", ["", "~no-such-user/x", "x" * 300])
def test_a_place_that_can_not_be_is_refused_with_what_to_name(command, place):
    result = run(*command, "--cache", place, code=2)
    assert "name a folder" in result.output


@pytest.mark.parametrize("encoding", ["utf-8:strict", "latin-1"])
def test_what_the_terminal_cannot_show_is_escaped(tmp_path, encoding):
    told = subprocess.run(
        [sys.executable, "-m", "shapetune.cli", "explain", *ASKED, "--cache", str(tmp_path)],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    place = os.fsencode(tmp_path) + b"/caf\xe9"
    told = subprocess.run(
        [sys.executable, "-m", "shapetune.cli", "cache", "info", "--cache", place],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert b"caf\\udce9: not there yet" in told.stdout


def test_a_platform_that_is_not_there_is_named_without_a_traceback():
    told = subprocess.run(
        [sys.executable, "-m", "shapetune.cli", "explain", *ASKED],
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "rubbish"},
    )  # fmt: skip
    assert told.returncode == 1
    assert "JAX_PLATFORMS='rubbish'" in told.stderr
    assert "Traceback" not in told.stderr
