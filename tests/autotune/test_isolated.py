"""Worker processes: whatever a candidate does to one, the run goes on."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shapetune
from shapetune.autotune import Limits, Listener, Options
from shapetune.autotune.isolated import IsolatedBench
from shapetune.autotune.measure import Effort
from shapetune.autotune.process import Worker, WorkerDied
from shapetune.cache import Candidate, load
from shapetune.cache.errors import IsolationError
from shapetune.kernels import Implementation, current_device, get_op

from ..samples import problem, record

SMALL = {"seq": 200, "dim": 32, "heads": 2}
QUICK = Options(
    trials=40,
    pairs=8,
    rounds=6,
    effort=Effort(0.02, 3, 4),
    isolation="process",
    modules=("malicious",),
    limits=Limits(compile_s=20, verify_s=20, time_s=20, memory_mb=2000),
)


@pytest.fixture
def malicious(monkeypatch):
    """The module of malicious implementations, where workers can import it too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(sys, "path", list(sys.path))
    import malicious

    malicious.register()
    yield malicious
    malicious.unregister()


class Notes(Listener):
    """Remembers what it heard."""

    def __init__(self):
        self.trials, self.known, self.failed = [], [], []

    def trial_done(self, trial, best):
        self.trials.append(trial)

    def trials_known(self, trials):
        self.known.extend(trials)

    def problem_failed(self, index, problem, reason):
        self.failed.append(reason)


@pytest.mark.slow
def test_malicious_candidates_get_their_outcomes_and_the_run_its_winner(
    malicious, own_cache, monkeypatch
):
    """One run over all of them: it ends with the right winner, and what was there stays."""
    slow = Candidate("slow")
    monkeypatch.setattr(get_op("attention"), "heuristic", lambda problem, device: slow)
    earlier = record(problem(seq=77))
    shapetune.cache.publish(own_cache, [earlier])
    notes = Notes()
    # What hangs is given up soon; nothing that works takes nearly as long.
    limits = Limits(compile_s=12, verify_s=8, time_s=8, memory_mb=1000)
    options = dataclasses.replace(
        QUICK, implementations=("slow", "xla", *malicious.KINDS), limits=limits, budget=400
    )
    about = {**SMALL, "mode": "fwd_bwd"}
    (one,) = shapetune.tune("attention", about, options=options, listener=notes)
    found = {t.candidate.implementation: t for t in notes.trials}
    wanted = {name: status for name, (_, status) in malicious.KINDS.items()}
    wanted |= {"slow": "ok", "xla": "ok"}
    assert {name: trial.status for name, trial in found.items()} == wanted
    assert one.chosen == Candidate("xla")
    assert one.heuristic == slow
    assert one.comparison.low > 1.0
    assert {earlier.id, one.id} <= load([own_cache]).ids
    assert "SIGSEGV" in found["segfaults"].note
    assert "about to read address 0" in found["segfaults"].note
    assert "exited with 3" in found["exits"].note
    assert "phase compile" in found["hangs_in_compile"].note
    assert "MiB" in found["eats_memory"].note
    # What did harm is not tried again, not even by a run that measures all anew.
    again = Notes()
    options = dataclasses.replace(options, again=True)
    shapetune.tune("attention", about, options=options, listener=again)
    harmful = {"crashed", "timed_out", "wrong_result", "nondeterministic"}
    avoided = {name for name, status in wanted.items() if status in harmful}
    assert {t.candidate.implementation for t in again.known} == avoided
    assert avoided.isdisjoint({t.candidate.implementation for t in again.trials})


def test_a_worker_is_killed_with_its_children(malicious, tmp_path, monkeypatch):
    told = tmp_path / "child"
    monkeypatch.setenv("SHAPETUNE_TEST_CHILD", str(told))
    worker = Worker(["malicious"])
    limits = Limits(compile_s=6)
    worker._limits = limits
    about = problem(**SMALL)
    bench = IsolatedBench(worker, get_op("attention"), about, current_device(), limits=limits)
    try:
        assert bench.trial(Candidate("sleeps_with_a_child")).status == "timed_out"
        child = int(told.read_text())
        for _ in range(50):
            if not _runs(child):
                break
            time.sleep(0.1)
        assert not _runs(child)
        # The next one goes on.
        assert bench.trial(Candidate("xla")).status == "ok"
        assert worker.starts == 2
    finally:
        worker.close()


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_dies_with_the_run(tmp_path):
    """The run is killed while its worker hangs: no process is left."""
    script = (
        "import os, sys\n"
        "from shapetune.autotune.process import Worker\n"
        "worker = Worker()\n"
        "worker.start()\n"
        "print(worker._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker = int(run.stdout.readline())
    assert _runs(worker)
    run.kill()
    run.wait()
    for stream in (run.stdin, run.stdout):
        stream.close()
    for _ in range(100):
        if not _runs(worker):
            return
        time.sleep(0.1)
    raise AssertionError("the worker outlives its run")


def test_a_candidate_whose_worker_someone_else_killed_is_not_quarantined(malicious, own_cache):
    notes = Notes()
    options = dataclasses.replace(QUICK, implementations=("terminated_by_someone",))
    shapetune.tune("attention", SMALL, options=options, listener=notes)
    assert {t.candidate.implementation: t.status for t in notes.trials} == {
        "xla": "ok",
        "terminated_by_someone": "crashed",
    }
    assert load([own_cache]).of_kind("quarantine") == []


def test_memory_does_not_grow_with_failed_trials(malicious):
    worker = Worker(["malicious"])
    about = problem(**SMALL)
    bench = IsolatedBench(worker, get_op("attention"), about, current_device())
    held = []
    try:
        for _ in range(18):
            assert bench.trial(Candidate("gives_nan")).status == "wrong_result"
            pages = Path(f"/proc/{worker._process.pid}/statm").read_text().split()[1]
            held.append(int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20)
        assert worker.starts == 1
    finally:
        worker.close()
    # Each holds 2 MiB of outputs and as much of programs while it is under way.
    assert held[-1] - held[9] < 20


def test_an_implementation_that_a_worker_lacks_is_named_or_tried_here(own_cache, caplog):
    op = get_op("attention")
    op.register(Implementation("here_only", lambda *a, config, **s: op.implementations["xla"].function(*a, config={}, **s)))  # fmt: skip
    options = dataclasses.replace(QUICK, implementations=("here_only",), modules=())
    try:
        with pytest.raises(IsolationError, match=r"here_only.*modules"):
            shapetune.tune("attention", SMALL, options=options)
        options = dataclasses.replace(options, isolation="auto")
        (one,) = shapetune.tune("attention", SMALL, options=options)
        assert "here_only" in {t.candidate.implementation for t in one.trials}
        assert "without isolation" in caplog.text
    finally:
        del op.implementations["here_only"]


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(IsolationError, match="no_such_module"):
        Worker(["no_such_module"]).start()


def test_a_worker_with_another_device_is_refused():
    worker = Worker()
    other = dataclasses.replace(current_device(), name="another")
    try:
        with pytest.raises(IsolationError, match="another"):
            IsolatedBench(worker, get_op("attention"), problem(**SMALL), other)
    finally:
        worker.close()


def test_what_a_worker_prints_does_not_disturb_the_talk(malicious):
    worker = Worker()
    worker.start()
    try:
        with pytest.raises(WorkerDied, match="exited with 1"):
            worker.ask("nothing")
        assert not worker.alive
    finally:
        worker.close()


def test_candidates_can_be_compiled_ahead(own_cache):
    """On a CPU only when asked for; the record is as without."""
    options = dataclasses.replace(QUICK, modules=(), trials=4, compile_ahead=True)
    (one,) = shapetune.tune("attention", SMALL, options=options)
    assert {t.status for t in one.trials} == {"ok"}
    spent = one.provenance
    parts = (spent.compile_s, spent.verify_s, spent.screen_s, spent.time_s)
    parts += (spent.compare_s, spent.search_s, spent.idle_s)
    assert sum(parts) == pytest.approx(spent.seconds, abs=0.02)
    assert spent.compile_s > 0
