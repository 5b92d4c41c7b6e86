import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from shapetune.bench import isolate, peers, run, schema, suites, tune_point
from shapetune.bench.run import Settings
from shapetune.cache import Candidate, Trial
from shapetune.cache.errors import ShapetuneError
from shapetune.cli import main
from shapetune.kernels import current_device, get_op

from .. import samples

TINY = {"seq": (40, 48), "dim": (16,), "dtype": ("float32",), "causal": (True,), "mode": ("fwd",),
        "batch": 1, "heads": 2}  # fmt: skip
DEVICE = {"device_kind": "a device", "jax": "0.0", "backend": "cpu"}


class Watcher:
    def __init__(self):
        self.lines = []

    def started(self, total, done):
        self.lines.append(("started", total, done))

    def doing(self, text):
        self.lines.append(("doing", text))

    def rows_done(self, rows):
        self.lines.append(("done", len(rows)))

    def noted(self, text):
        self.lines.append(("noted", text))


def plan(**changes):
    return suites.plan("attention", impls=("default", "xla"), grid={**TINY, **changes})


@pytest.fixture
def measured(monkeypatch):
    """Workers replaced by one that times every row at once; the requests that came."""
    asked = []

    def worker(module, request, **limits):
        if module.endswith("describe"):
            return [{"device": dict(DEVICE)}], None
        asked.append((module, request))
        rows = [{**row, **_outcome(row)} for row in request.get("rows", ())]
        return [{"row": row} for row in rows], None

    monkeypatch.setattr(isolate, "run", worker)
    return asked


def _outcome(row):
    return {
        "max_abs_err": 0.0, "rel_err": 0.0, "xla_temp_mb": 0.0, "xla_arg_mb": 1.0,
        "xla_out_mb": 1.0, "compile_s": 0.1, "inner": 1, "median_ms": 1.0, "q1_ms": 1.0,
        "q3_ms": 1.0, "tflops": 1.0,
    }  # fmt: skip


def test_each_row_has_a_worker_and_a_point_has_one_if_interleaved(measured, tmp_path):
    file, whole = run.run(plan(), tmp_path / "a.json", Settings(), Watcher())
    assert whole
    assert [len(request["rows"]) for _, request in measured] == [1] * 4
    measured.clear()
    run.run(plan(), tmp_path / "b.json", Settings(interleave=True), Watcher())
    assert [len(request["rows"]) for _, request in measured] == [2, 2]
    assert schema.read(tmp_path / "a.json").results == file.results


def test_a_run_goes_on_where_it_was_stopped(measured, tmp_path):
    path = tmp_path / "a.json"
    _, whole = run.run(plan(), path, Settings(stop_after=1e-9), Watcher())
    assert not whole
    before = len(measured)
    watcher = Watcher()
    file, whole = run.run(plan(), path, Settings(stop_after=60.0), watcher)
    assert whole
    assert len(file.results) == 4
    assert ("started", 4, before) in watcher.lines
    assert len(measured) == 4


def test_another_grid_is_added_only_if_asked(measured, tmp_path):
    path = tmp_path / "a.json"
    run.run(plan(), path, Settings(), Watcher())
    with pytest.raises(ShapetuneError, match="--append"):
        run.run(plan(seq=(56,)), path, Settings(), Watcher())
    file, _ = run.run(plan(seq=(56,)), path, Settings(append=True), Watcher())
    assert {row["seq"] for row in file.results} == {40, 48, 56}
    tagged = suites.plan("attention", impls=("default",), tag="again", grid=TINY)
    file, _ = run.run(tagged, path, Settings(append=True), Watcher())
    assert [row["tag"] for row in file.results].count("again") == 2


@pytest.mark.parametrize("settings", [{"seconds": 3.0}, {"rounds": 5}, {"cache": "elsewhere"}])
def test_rows_measured_in_another_way_are_added_only_if_asked(measured, tmp_path, settings):
    path = tmp_path / "a.json"
    run.run(plan(), path, Settings(), Watcher())
    (name,) = settings
    with pytest.raises(ShapetuneError, match=f"another {name} "):
        run.run(plan(), path, Settings(**settings), Watcher())
    tagged = suites.plan("attention", impls=("default", "xla"), tag="again", grid=TINY)
    with pytest.raises(ShapetuneError, match="another tag"):
        run.run(tagged, path, Settings(), Watcher())
    file, _ = run.run(tagged, path, Settings(append=True, **settings), Watcher())
    assert len(file.results) == 8


def test_rows_that_failed_are_measured_again_if_asked(measured, tmp_path):
    path = tmp_path / "a.json"
    file, _ = run.run(plan(), path, Settings(), Watcher())
    failed = {k: v for k, v in file.results[1].items() if k not in _outcome({})}
    file.results[1] = {**failed, "error": "RESOURCE_EXHAUSTED: a neighbour"}
    schema.write(path, file)
    measured.clear()
    file, _ = run.run(plan(), path, Settings(), Watcher())
    assert not measured
    file, whole = run.run(plan(), path, Settings(retry_errors=True), Watcher())
    assert whole
    assert [request["rows"] for _, request in measured] == [[failed]]
    assert not any("error" in row for row in file.results)


def test_a_point_that_is_not_tuned_is_told_with_the_reason(monkeypatch, tmp_path):
    def worker(module, request, **limits):
        if module.endswith("describe"):
            return [{"device": dict(DEVICE)}], None
        if module.endswith("tune_point"):
            return [{"failed": "a problem", "reason": "the heuristic is wrong"}], None
        return [{"row": {**row, **_outcome(row)}} for row in request["rows"]], None

    monkeypatch.setattr(isolate, "run", worker)
    watcher = Watcher()
    run.run(plan(seq=(40,)), tmp_path / "a.json", Settings(tune=True), watcher)
    assert ("noted", "a problem is not tuned: the heuristic is wrong") in watcher.lines


def test_rows_of_another_device_are_not_mixed(measured, tmp_path):
    path = tmp_path / "a.json"
    file, _ = run.run(plan(), path, Settings(), Watcher())
    file.device["device_kind"] = "another"
    schema.write(path, file)
    with pytest.raises(ShapetuneError, match="device_kind='another'"):
        run.run(plan(), path, Settings(), Watcher())


def test_a_machine_where_jax_fails_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(isolate, "run", lambda *a, **k: ([], "RuntimeError: no device"))
    with pytest.raises(ShapetuneError, match="RuntimeError: no device"):
        run.run(plan(), tmp_path / "a.json", Settings(), Watcher())


def test_tuning_comes_before_the_rows_of_default(measured, tmp_path):
    run.run(plan(), tmp_path / "a.json", Settings(tune=True, interleave=True), Watcher())
    assert [module.rpartition(".")[2] for module, _ in measured] == ["tune_point", "row"] * 2
    (problem,) = measured[0][1]["problems"]
    assert (problem["seq"], problem["causal"]) == (40, True)
    measured.clear()
    only = suites.plan("attention", impls=("xla",), grid=TINY)
    run.run(only, tmp_path / "b.json", Settings(tune=True), Watcher())
    assert {module.rpartition(".")[2] for module, _ in measured} == {"row"}


def test_rivals_run_with_what_the_tuning_of_their_point_found(measured, monkeypatch, tmp_path):
    only = suites.plan("attention", impls=("default", "rival_xla"), grid=TINY)
    with pytest.raises(ShapetuneError, match=r"'rival_xla'.*--tune"):
        run.run(only, tmp_path / "a.json", Settings(), Watcher())
    assert not measured
    plain, found = isolate.run, iter(({"xla": {"block": 1}}, {"xla": {"block": 2}}))

    def worker(module, request, **limits):
        if module.endswith("tune_point"):
            return [{"tuned": "llvm", "rivals": next(found)}], None
        return plain(module, request, **limits)

    monkeypatch.setattr(isolate, "run", worker)
    run.run(only, tmp_path / "a.json", Settings(tune=True, interleave=True), Watcher())
    assert [request["rivals"] for _, request in measured] == [
        {"xla": {"block": 1}},
        {"xla": {"block": 2}},
    ]


def test_memory_alone_is_neither_tuned_nor_measured_together(measured, tmp_path):
    memory = suites.plan(
        "linear_attention", ("peak",), impls=("default", "chunked"), grid={"seq": (64,)}
    )
    run.run(memory, tmp_path / "a.json", Settings(tune=True, interleave=True), Watcher())
    assert {module.rpartition(".")[2] for module, _ in measured} == {"row"}
    assert {len(request["rows"]) for _, request in measured} == {1}


def test_a_worker_that_dies_costs_the_row_it_was_at(monkeypatch, tmp_path):
    asked = []

    def worker(module, request, **limits):
        if module.endswith("describe"):
            return [{"device": dict(DEVICE)}], None
        names = [row["impl"] for row in request["rows"]]
        asked.append(names)
        if "xla" in names:
            return [{"begin": "default"}, {"begin": "xla"}], "Killed: by SIGSEGV"
        rows = [{**row, **_outcome(row)} for row in request["rows"]]
        return [{"row": row} for row in rows], None

    monkeypatch.setattr(isolate, "run", worker)
    file, whole = run.run(
        plan(seq=(40,)), tmp_path / "a.json", Settings(interleave=True), Watcher()
    )
    assert whole
    assert asked == [["default", "xla"], ["default"]]
    errors = {row["impl"]: row.get("error") for row in file.results}
    assert errors == {"default": None, "xla": "Killed: by SIGSEGV"}


def test_a_worker_that_never_begins_costs_all_its_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "described", lambda: dict(DEVICE))
    monkeypatch.setattr(isolate, "run", lambda *a, **k: ([], "ImportError: no"))
    file, whole = run.run(plan(), tmp_path / "a.json", Settings(interleave=True), Watcher())
    assert whole
    assert {row["error"] for row in file.results} == {"ImportError: no"}


WORKER = """
import json, os, sys, time
told = open(sys.argv[1], "a")
request = json.load(sys.stdin)
told.write(json.dumps({"got": request}) + "\\n"); told.flush()
told.write('{"half a line'); told.flush()
kind = request["kind"]
if kind == "hang":
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(request["file"], "w").write(str(child.pid))
    time.sleep(60)
if kind == "crash":
    os.abort()
if kind == "raise":
    raise ValueError("this is wrong")
"""


@pytest.fixture
def crooked(tmp_path, monkeypatch):
    (tmp_path / "crooked.py").write_text(WORKER)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    return lambda kind, seconds=30.0, **more: isolate.run(
        "crooked", {"kind": kind, **more}, seconds=seconds, environment={"PYTHONPATH": path}
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("crash", "Killed: by SIGABRT"), ("raise", "ValueError: this is wrong"), ("none", None)],
)
def test_how_a_worker_ended_is_told_with_what_it_did_before(crooked, kind, reason):
    events, why = crooked(kind)
    assert why == reason
    assert events[0]["got"]["kind"] == kind


def test_a_worker_that_hangs_is_killed_with_what_it_started(crooked, tmp_path):
    note = tmp_path / "pid"
    started = time.monotonic()
    _, why = crooked("hang", seconds=3.0, file=str(note))
    assert why.startswith("TimedOut")
    assert time.monotonic() - started < 30
    child = int(note.read_text())
    for _ in range(50):
        try:
            state = Path(f"/proc/{child}/stat").read_text().split()[2]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the grandchild is still running")


EATER = """
from shapetune.bench import isolate
isolate.limit_memory(2.0)
kept = bytearray(2**29)
try:
    more = bytearray(4 * 2**30)
except MemoryError:
    print("refused")
"""


def test_a_worker_gets_no_more_memory_than_it_may_take():
    done = subprocess.run([sys.executable, "-c", EATER], capture_output=True, text=True)
    assert done.stdout.strip() == "refused", done.stderr


def test_unknown_names_are_refused_before_anything_runs():
    for arguments, words in (
        ({"impls": ("fastest",)}, "fastest"),
        ({"suites": ("kernel",)}, "suite"),
        ({"grid": {"heads": 0}}, "heads"),
        ({"grid": {"window": 3}}, "window is not an axis"),
    ):
        with pytest.raises(ShapetuneError, match=words):
            suites.plan("attention", **arguments)
    with pytest.raises(ShapetuneError, match="speed"):
        suites.plan("linear_attention", ("speed",))
    with pytest.raises(ShapetuneError, match="causal is not an axis"):
        suites.plan("linear_attention", grid={"causal": (True,)})
    with pytest.raises(ShapetuneError, match="memory=nan"):
        Settings(memory_gb=float("nan"))


def test_interpreted_kernels_are_rows_that_say_so_on_a_cpu():
    op, device = peers.widened(get_op("attention")), current_device()
    assert "interpreted" in peers.too_slow(op.implementation("pallas_mha"), device)
    assert peers.too_slow(op.implementation("blockwise"), device) is None
    assert peers.too_slow(get_op("linear_attention").implementation("scan"), device) is None


def test_the_command_measures_all_suites_into_one_file(tmp_path):
    path = tmp_path / "linear.json"
    shown = CliRunner().invoke(
        main,
        ["bench", "linear-attention", "--suite", "kernel,layer,peak", "--seq", "40", "--dim", "8",
         "--dtype", "float32", "--batch", "1", "--heads", "2", "--mode", "fwd_bwd",
         "--impl", "default,scan,pallas", "--interleave", "--seconds", "1s", "--rounds", "4",
         "--output", str(path)],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "\x1b" not in shown.output
    file = schema.read(path)
    assert file.device["cores"] == current_device().cores
    rows = {(row.get("suite"), row["impl"]): row for row in file.results}
    assert set(rows) == {
        (s, i) for s in suites.LINEAR_SUITES for i in ("default", "scan", "pallas")
    }
    for suite in ("kernel", "layer"):
        assert rows[suite, "default"]["median_ms"] > 0
        assert rows[suite, "default"]["tier"] == "heuristic"
        assert len(rows[suite, "default"]["samples_ms"]) == 4
    assert rows["kernel", "default"]["rel_err"] < 1e-3
    assert "compiled program" in rows["peak", "default"]["memory_note"]
    assert "interpreted" in rows["kernel", "pallas"]["error"]
    assert json.loads(path.read_text())["config"]["suites"] == list(suites.LINEAR_SUITES)


def test_a_rival_is_the_fastest_trial_of_its_implementation_but_for_the_choice():
    trials = [
        Trial(Candidate(name, {"block": block}), status, median_ms=ms)
        for name, block, status, ms in (
            ("a", 1, "ok", 3.0), ("a", 2, "ok", 2.0), ("a", 3, "wrong_result", None),
            ("b", 1, "ok", 1.0), ("b", 2, "ok", 1.5), ("c", 1, "ok", 1.0),
        )
    ]  # fmt: skip
    found = dataclasses.replace(
        samples.record(), chosen=Candidate("b", {"block": 1}), trials=tuple(trials)
    )
    assert tune_point.rivals(found) == {"a": {"block": 2}, "b": {"block": 2}, "c": {"block": 1}}
