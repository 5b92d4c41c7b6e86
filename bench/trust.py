"""How far a tuning run can be trusted: killed, disturbed, or asked to tell equals apart.

Run as ``python -m shapetune.bench.trust OUTPUT.json [PART [COUNT]]``; PART is one of
overhead, kills, bursts, alias. A part that is run again adds to what the file has.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..autotune import Listener, Options, tune
from ..autotune.measure import Effort, paired_ratio
from ..autotune.trial import Bench
from ..cache import load
from ..cache.key import Candidate, Problem
from ..cache.record import Record, Trial
from ..kernels import current_device, get_op
from . import stand_ins
from .machine import machine

_MODULES = (stand_ins.__name__,)
_QUICK = Effort(seconds=0.05, least=3, most=5)


class _Overhead(Listener):
    """Notes what each trial took beyond its own phases."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._since = 0.0

    def trial_started(self, candidate: Candidate) -> None:
        self._since = time.perf_counter()

    def trial_done(self, trial: Trial, best: Trial | None) -> None:
        phases = trial.compile_s + trial.verify_s + trial.screen_s + trial.time_s
        self.ms.append((time.perf_counter() - self._since - phases) * 1e3)


def overhead(before: Any, trials: int = stand_ins.MANY) -> dict[str, Any]:
    """Milliseconds per trial for the worker, the talk with it, and keeping the outcome."""
    heard = _Overhead()
    options = Options(
        trials=trials + 1, budget=900.0, implementations=("many",), effort=_QUICK,
        isolation="process", modules=_MODULES,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        about = {"seq": 32, "dim": 16, "heads": 1}
        (record,) = tune("attention", about, cache=folder, options=options, listener=heard)
    spent = record.provenance
    return {
        "trials": len(heard.ms),
        "ms": {
            "mean": statistics.fmean(heard.ms),
            "median": statistics.median(heard.ms),
            "p95": float(np.quantile(heard.ms, 0.95)),
            "worst": max(heard.ms),
        },
        "seconds": spent.seconds,
        "split_s": {
            name: getattr(spent, f"{name}_s")
            for name in ("compile", "verify", "screen", "time", "compare", "search", "idle")
        },
    }


class _Log(Listener):
    """Writes each trial and each record as a line, for the process that will kill this one."""

    def trial_done(self, trial: Trial, best: Trial | None) -> None:
        print(json.dumps(["trial", self._about, trial.candidate.key]), flush=True)

    def problem_started(self, index: int, problem: Problem, total: int) -> None:
        self._about = problem.key

    def problem_done(self, index: int, record: Record, fresh: bool) -> None:
        print(json.dumps(["record", record.problem.key, record.id]), flush=True)


def victim(folder: str) -> None:
    """A short tuning run of three problems with eight trials each, to be killed."""
    options = Options(
        trials=8, pairs=6, rounds=6, effort=_QUICK, implementations=("many",),
        isolation="process", modules=_MODULES,
    )  # fmt: skip
    problems = [{"seq": n, "dim": 16, "heads": 1} for n in (40, 65, 90)]
    tune("attention", problems, cache=folder, options=options, listener=_Log())


def kills(before: Any, count: int = 50, seed: int = 0) -> dict[str, Any]:
    """Runs killed at random moments, restarted until they finish.

    Counts records that were published and are gone, damage that a reader sees,
    trials that were measured again, and workers that outlived their run.
    """
    found = Counter(before or {})
    rng = random.Random(seed + found["kills"])
    wanted = found["kills"] + count
    while found["kills"] < wanted:
        with tempfile.TemporaryDirectory() as folder:
            measured: Counter[str] = Counter()
            published: set[str] = set()
            finished = False
            while not finished:
                after = rng.uniform(0.5, 12.0) if found["kills"] < wanted else 600.0
                finished = _one_life(folder, after, measured, published)
                found["kills"] += not finished
                kept = load([folder])
                found["damaged"] += len(kept.damage)
                found["records_lost"] += len(published - kept.ids)
            found["runs_finished"] += 1
            found["records_published"] += len(published)
            found["trials_measured"] += len(measured)
            found["trials_measured_again"] += sum(n - 1 for n in measured.values())
            found["problems_left_out"] += 3 - len({r.problem for r in load([folder])})
    return dict(found)


def _one_life(folder: str, seconds: float, measured: Counter[str], published: set[str]) -> bool:
    """One run, killed after so long; True if it finished before."""
    code = f"from {__package__}.trust import victim; victim({folder!r})"
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        out, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(run.pid, signal.SIGKILL)
        out, _ = run.communicate()
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # a line cut short by the kill
            kind, about, what = json.loads(line)
            if kind == "trial":
                measured[f"{about} {what}"] += 1
            else:
                published.add(what)
    return run.returncode == 0


@contextlib.contextmanager
def load_in_bursts(seed: int = 0) -> Iterator[None]:
    """Two processes that load two processors in bursts of 0.1 to 0.8 seconds."""
    spawn = multiprocessing.get_context("spawn")
    ours = [spawn.Process(target=_burst, args=(seed,), daemon=True) for _ in range(2)]
    for one in ours:
        one.start()
    try:
        time.sleep(1.0)
        yield
    finally:
        for one in ours:
            one.kill()
            one.join()


def _burst(seed: int) -> None:
    # Both draw the same numbers, so that they burst together.
    rng = random.Random(seed)
    parent = os.getppid()
    while os.getppid() == parent:  # it does not outlive what it disturbs
        until = time.perf_counter() + rng.uniform(0.1, 0.8)
        while time.perf_counter() < until:
            pass
        time.sleep(rng.uniform(0.1, 0.8))


_DISTURBED = Problem.make("attention", seq=512, dim=64, causal=True)


def bursts(before: Any, count: int = 10) -> dict[str, Any]:
    """What runs choose while another process loads the machine in bursts."""
    found = before or {"problem": _DISTURBED.to_map(), "chosen": [], "ratios": [], "trials": []}
    for _ in range(count):
        seed = len(found["chosen"])
        options = Options(trials=24, budget=60.0, seed=seed, isolation="process")
        with tempfile.TemporaryDirectory() as folder, load_in_bursts(seed):
            (record,) = tune("attention", _DISTURBED, cache=folder, options=options)
        config = dict(record.chosen.config)
        found["chosen"].append([record.chosen.implementation, config])
        compared = record.comparison
        found["ratios"].append([compared.ratio, compared.low, compared.high])
        found["trials"].append(len(record.trials))
        print(f"bursts: {record.chosen.key}, {compared.ratio:.2f}×", flush=True)
    return found


def quietly(before: Any, rounds: int = 25) -> dict[str, Any]:
    """The true times of what the disturbed runs chose, in turns with the heuristic."""
    found = dict(before)
    op, device = get_op("attention"), current_device()
    heuristic = op.heuristic(_DISTURBED, device)
    every = {Candidate(name, config): None for name, config in found["chosen"]}
    others = [c for c in every if c != heuristic]
    times = Bench(op, _DISTURBED, device).race([heuristic, *others], rounds)
    relative = {heuristic.key: [1.0, 1.0, 1.0]}
    for i, candidate in enumerate(others, 1):
        relative[candidate.key] = list(paired_ratio(times[:, 0], times[:, i]))
    ratios = [relative[Candidate(n, c).key][0] for n, c in found["chosen"]]
    found["quiet"] = {
        "heuristic": heuristic.key,
        "rounds": rounds,
        "over_heuristic": relative,
        "median_ms": dict(
            zip([heuristic.key, *relative][1:], np.median(times, axis=0), strict=False)
        ),
        "slowest_over_fastest": max(ratios) / min(ratios),
        "slower_than_heuristic": sum(r < 1.0 for r in ratios),
    }
    return found


def alias(before: Any, count: int = 50) -> dict[str, Any]:
    """How often an implementation that is the heuristic under another name is declared a winner."""
    found = before or {"runs": 0, "declared_winner": 0, "ratios": []}
    problem = Problem.make("attention", seq=256, dim=32, heads=2)
    options = Options(
        trials=2, implementations=("alias",), effort=_QUICK, again=True, seed=found["runs"],
        isolation="process", modules=_MODULES,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for record in tune("attention", [problem] * count, cache=folder, options=options):
            found["runs"] += 1
            found["declared_winner"] += not record.heuristic_is_best
            compared = record.comparison
            if not record.heuristic_is_best:
                found["ratios"].append([compared.ratio, compared.low, compared.high])
    return found


#: Each part with its function, how often it is to be repeated in all, and how often
#: before what it found is written.
PARTS: dict[str, tuple[Callable[..., dict[str, Any]], int, int]] = {
    "overhead": (overhead, stand_ins.MANY, stand_ins.MANY),
    "kills": (kills, 50, 5),
    "bursts": (bursts, 10, 1),
    "quietly": (quietly, 25, 25),
    "alias": (alias, 50, 18),
}


def main(output: Path, parts: list[str], count: int | None) -> None:
    """Runs parts, and adds what they find to the file as they go."""
    for part in parts:
        function, usual, step = PARTS[part]
        left = usual if count is None else count
        while left > 0:
            report: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
            key = "bursts" if part == "quietly" else part
            found = function(report.get(key, {}).get("found"), min(step, left))
            report[key] = {**machine(), "found": found}
            output.write_text(json.dumps(report, indent=1) + "\n")
            left -= step
        print(part, json.dumps(found), flush=True)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4 or (len(sys.argv) > 2 and sys.argv[2] not in PARTS):
        sys.exit(f"usage: python -m shapetune.bench.trust OUTPUT.json [{'|'.join(PARTS)} [COUNT]]")
    asked = sys.argv[2:3] or list(PARTS)
    main(Path(sys.argv[1]), asked, int(sys.argv[3]) if len(sys.argv) == 4 else None)
