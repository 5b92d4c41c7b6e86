"""Tuned `shapetune.attention` against `jax.nn.dot_product_attention`, in turns in one run.

Run as ``python -m shapetune.bench.against_jax OUTPUT.json``: tunes what is not
tuned yet, then times both on each problem.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import attention
from ..autotune import Options, grid, measure, tune
from ..cache.key import Problem
from ..kernels import default, get_op
from .machine import machine
from .side_by_side import side_by_side, value_and_gradients

_ROUNDS = 15


def problems() -> list[Problem]:
    """Long float32 sequences, causal and not, forward and with gradients."""
    forward = grid("attention", seq=[2048, 4096], dim=[64], causal=[False, True])
    return forward + [p.replace(mode="fwd_bwd") for p in forward if p.seq == 2048]


def row(problem: Problem) -> dict[str, Any]:
    """Medians and quartiles of both on one problem, and their paired ratio."""
    inputs = get_op("attention").make_inputs(problem, 0, "normal")

    def causal(function: Callable[..., Any]) -> Callable[..., Any]:
        call = lambda q, k, v: function(q, k, v, is_causal=problem.causal)  # noqa: E731
        return call if problem.mode == "fwd" else value_and_gradients(call, inputs.weights[0])

    both = [causal(jax.nn.dot_product_attention), causal(attention)]
    times = side_by_side(both, inputs.arrays[:3], _ROUNDS)
    ratio, low, high = measure.paired_ratio(times[:, 0], times[:, 1])
    decision = default.explain_problem(problem)
    found: dict[str, Any] = {
        "problem": problem.to_map(),
        "chosen": decision.candidate.key,
        "tier": decision.tier,
        "ratio": ratio,
        "low": low,
        "high": high,
    }
    for name, samples in zip(("jax_nn", "shapetune"), times.T, strict=True):
        q1, median, q3 = np.percentile(samples, (25, 50, 75))
        found[name] = {"q1_ms": q1, "median_ms": median, "q3_ms": q3}
    return found


def main(output: Path) -> None:
    """Tunes, measures, and writes the rows with the machine that they are from."""
    planned = problems()
    tune("attention", planned, options=Options(trials=24, budget=20.0))
    rows = []
    for problem in planned:
        rows.append(row(problem))
        print(f"{problem.label}: {rows[-1]['ratio']:.2f}× jax.nn, {rows[-1]['chosen']}", flush=True)
    report = {**machine(), "rounds": _ROUNDS, "results": rows}
    output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m shapetune.bench.against_jax OUTPUT.json")
    main(Path(sys.argv[1]))
