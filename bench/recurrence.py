"""The tuned recurrence against its untuned forms, in turns in one run.

Run as ``python -m shapetune.bench.recurrence OUTPUT.json [SECONDS]``: tunes what
is not tuned yet, then times `default`, `chunked` with chunks of 128, and `scan`.
A run goes on where the last one stopped; no problem begins after SECONDS.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..autotune import Options, grid, measure, tune
from ..autotune.measure import Effort
from ..cache.key import Candidate, Problem
from ..kernels import current_device, default, get_op
from .machine import machine
from .side_by_side import side_by_side

WINDOW = 64
_ROUNDS = 7


def problems() -> list[Problem]:
    """Head sizes 32 to 128, lengths 512 to 8192, both modes."""
    return grid(
        "linear_attention", seq=[512, 2048, 8192], dim=[32, 64, 128], window=WINDOW,
        mode=["fwd", "fwd_bwd"],
    )  # fmt: skip


def row(problem: Problem) -> dict[str, Any]:
    """Median times on one problem, and the ratios of the two others to the default."""
    op = get_op("linear_attention")
    inputs = op.make_inputs(problem, 0, "normal")
    chosen = default.explain_problem(problem)
    plain = dict(op.implementation("chunked").default_config(problem, current_device()))
    rivals = {
        "default": chosen.candidate,
        "chunked_128": Candidate("chunked", {**plain, "chunk": 128, "span": 1}),
        "scan": Candidate("scan"),
    }
    programs: list[Callable[..., Any]] = [
        measure.program(op, problem, candidate, inputs) for candidate in rivals.values()
    ]
    times = side_by_side(programs, measure.arguments(problem, inputs), _ROUNDS)
    found: dict[str, Any] = {"problem": problem.to_map(), "chosen": chosen.candidate.key}
    for i, name in enumerate(rivals):
        found[f"{name}_ms"] = float(np.median(times[:, i]))
        if i:
            found[f"over_{name}"] = measure.paired_ratio(times[:, i], times[:, 0])
    return found


def main(output: Path, seconds: float = math.inf) -> None:
    """Tunes, measures, and writes the rows with the machine that they are from."""
    rows = json.loads(output.read_text())["results"] if output.exists() else []
    done = [one["problem"] for one in rows]
    effort = Effort(seconds=0.2, least=3, most=9)
    options = Options(trials=16, budget=8.0, pairs=9, rounds=5, effort=effort)
    end = time.monotonic() + seconds
    for problem in problems():
        if problem.to_map() in done or time.monotonic() > end:
            continue
        tune("linear_attention", [problem], options=options)
        rows.append(row(problem))
        print(json.dumps(rows[-1]), flush=True)
        output.write_text(json.dumps(_report(rows), indent=1) + "\n")


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows with the machine and the geometric means of the ratios."""
    means = {
        name: float(np.exp(np.mean(np.log([r[name][0] for r in rows]))))
        for name in ("over_chunked_128", "over_scan")
    }
    return {**machine(), "rounds": _ROUNDS, "geometric_means": means, "results": rows}


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m shapetune.bench.recurrence OUTPUT.json [SECONDS]")
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) == 3 else math.inf)
