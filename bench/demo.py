"""What `shapetune demo` does: tunes a handful of shapes on this machine, then uses them."""

from __future__ import annotations

from typing import Any

import jax

from .. import attention
from ..autotune import Options, grid
from ..autotune.measure import Effort
from ..cache.key import Problem
from ..kernels import default, get_op
from .side_by_side import speedups

#: Per platform the grid of a first run: small enough for three minutes.
_GRIDS: dict[str, dict[str, Any]] = {
    "cpu": {"seq": [512, 2048], "dim": [64], "dtype": ["float32"], "batch": [1], "heads": [8]},
    "gpu": {"seq": [1024, 4096], "dim": [128], "dtype": ["bfloat16"], "batch": [4], "heads": [16]},
}
OPTIONS = Options(trials=24, budget=12.0, effort=Effort(seconds=0.3))


def problems() -> list[Problem]:
    """The problems of a first run on this platform: forward, and gradients of the shorter."""
    fields = _GRIDS["cpu" if jax.default_backend() == "cpu" else "gpu"]
    forward = grid("attention", causal=[False, True], **fields)
    return forward + [p.replace(mode="fwd_bwd") for p in forward if p.seq == fields["seq"][0]]


def gain(problem: Problem) -> str:
    """One line: ``shapetune.attention`` timed in turns with ``jax.nn`` for a forward problem."""
    arrays = get_op("attention").make_inputs(problem, 0, "normal").arrays[:3]
    ratio, low, high = speedups(
        lambda *a: jax.nn.dot_product_attention(*a, is_causal=problem.causal),
        lambda *a: attention(*a, is_causal=problem.causal),
        arrays,
    )
    chosen = default.explain_problem(problem)
    return (
        f"{problem.label}: {ratio:.2f}× as fast [{low:.2f}, {high:.2f}], "
        f"by {chosen.candidate.key} (tier {chosen.tier})"
    )
