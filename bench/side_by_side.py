"""Two programs timed in turns on the same inputs, and their paired ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..autotune import measure


def speedups(
    base: Callable[..., Any], other: Callable[..., Any], args: Sequence[Any], pairs: int = 15
) -> tuple[float, float, float]:
    """How many times faster ``other`` is than ``base`` under ``jit``, with its 95% interval."""
    times = side_by_side([base, other], args, pairs)
    return measure.paired_ratio(times[:, 0], times[:, 1])


def side_by_side(
    functions: Sequence[Callable[..., Any]], args: Sequence[Any], rounds: int = 15, seed: int = 0
) -> Any:
    """Samples of several functions under ``jit``, in turns: ms per call, [rounds, functions]."""
    programs = []
    for function in functions:
        compiled = measure.compile_program(function, args)
        measure.sample(compiled, args, 2)
        programs.append((compiled, measure.calibrate(measure.sample(compiled, args, 1))))
    return measure.interleave(programs, args, rounds, seed)


def value_and_gradients(function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    """sum(function(q, k, v) · weights) with its gradients, as mode fwd_bwd times it."""

    def loss(*arrays: Any) -> Any:
        return (function(*arrays).astype(weights.dtype) * weights).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))
