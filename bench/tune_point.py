"""The worker that tunes the problems behind a point before its rows are measured.

Run as ``python -m shapetune.bench.tune_point``, by the benchmark alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..autotune import Listener, Options, tune
from ..cache.errors import ShapetuneError
from ..cache.key import Problem
from ..cache.record import Record, Trial
from . import isolate


class _Teller(Listener):
    """Writes an event for each problem: what was chosen and its rivals, or why nothing was."""

    def __init__(self, told: Path) -> None:
        self._told = told

    def problem_done(self, index: int, record: Record, fresh: bool) -> None:
        self._tell({"tuned": record.chosen.key, "rivals": rivals(record)})

    def problem_failed(self, index: int, problem: Problem, reason: str) -> None:
        self._tell({"failed": problem.label, "reason": reason})

    def _tell(self, event: dict[str, Any]) -> None:
        with self._told.open("a", encoding="utf-8") as out:
            out.write(json.dumps(event) + "\n")


def rivals(record: Record) -> dict[str, dict[str, Any]]:
    """The config of each implementation's fastest trial, that of the choice itself left out."""
    found: dict[str, Trial] = {}
    for trial in record.trials:
        name = trial.candidate.implementation
        if trial.status != "ok" or trial.candidate == record.chosen:
            continue
        if name not in found or (trial.median_ms or 0.0) < (found[name].median_ms or 0.0):
            found[name] = trial
    return {name: dict(trial.candidate.config) for name, trial in found.items()}


def main() -> None:
    """Tunes what is not tuned as thoroughly already."""
    told, memory = Path(sys.argv[1]), float(sys.argv[2])
    isolate.limit_memory(memory)
    request = json.load(sys.stdin)
    options = Options(trials=request["trials"], budget=request["budget"])
    for fields in request["problems"]:
        problem = Problem.from_map(fields)
        cache = request["cache"]
        try:
            tune(problem.op, problem, cache=cache, options=options, listener=_Teller(told))
        except ShapetuneError as error:
            sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
