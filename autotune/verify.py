"""Is what a candidate computes right? Slices of its outputs against float64.

The tolerance is not a constant: it follows from the dtype, from the length of
the sums, and from the plain implementation's own error on the same inputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from ..cache.key import Problem
from ..kernels.op import Expected, yardsticks

#: A candidate may err this many times as much as the plain implementation does.
BASELINE_FACTOR = 3.0


@dataclasses.dataclass(frozen=True)
class Check:
    """The outcome of comparing outputs with what they should be.

    Attributes:
        rel_err: The error, relative to the largest right value of the output,
            where it was largest against its tolerance; infinite if not finite.
        tolerance: The tolerance there.
        where: The output there.
    """

    rel_err: float
    tolerance: float
    where: str

    @property
    def passed(self) -> bool:
        """Whether every slice is within its tolerance."""
        return self.rel_err <= self.tolerance


def errors(outputs: Mapping[str, np.ndarray], expected: Sequence[Expected]) -> list[float]:
    """The relative error of each slice: its largest deviation over its yardstick."""
    found = []
    for one, yardstick in zip(expected, yardsticks(expected), strict=True):
        got = np.asarray(outputs[one.output][one.index]).astype(np.float64)
        if got.shape != one.value.shape or not np.isfinite(got).all():
            found.append(math.inf)
            continue
        found.append(float(np.abs(got - one.value).max()) / yardstick)
    return found


def rounding_floor(problem: Problem, condition: float = 0.0) -> float:
    """The relative error that rounding alone explains.

    Two roundings to the dtype (of an input or weight, and of the output), float32
    sums over kv_seq terms, whose error grows like a random walk, and the rounding
    of a float32 intermediate amplified by ``condition``.
    """
    dtype_eps = float(ml_dtypes.finfo(problem.dtype).eps)
    float32_eps = float(np.finfo(np.float32).eps)
    return 2 * dtype_eps + (math.sqrt(problem.kv_seq) + condition) * float32_eps


def tolerances(
    problem: Problem, baseline_errors: Sequence[float] | None, expected: Sequence[Expected]
) -> list[float]:
    """The tolerance of each slice.

    ``baseline_errors`` are the plain implementation's on the same inputs, None
    where it cannot run; then its error is taken to be the rounding floor.
    """
    found = []
    for i, one in enumerate(expected):
        floor = rounding_floor(problem, one.condition)
        own = floor if baseline_errors is None else baseline_errors[i]
        found.append(max(floor, BASELINE_FACTOR * (own if math.isfinite(own) else floor)))
    return found


def check(
    outputs: Mapping[str, np.ndarray],
    expected: Sequence[Expected],
    tolerance: Sequence[float],
) -> Check:
    """Compares outputs with the expected slices, each at its tolerance."""
    found = errors(outputs, expected)
    worst = max(range(len(found)), key=lambda i: found[i] / tolerance[i])
    return Check(found[worst], tolerance[worst], expected[worst].output)


def difference(
    problem: Problem,
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    condition: float = 0.0,
) -> str:
    """How two runs on the same inputs differ by more than rounding, or nothing.

    Sums taken in another order may differ as their rounding does; NaN equals NaN.
    """
    allowed = rounding_floor(problem, condition)
    for name, one in first.items():
        other = second[name]
        if one.shape == other.shape and one.tobytes() == other.tobytes():
            continue
        a, b = one.astype(np.float64), other.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        largest = np.abs(a, where=np.isfinite(a), out=np.zeros_like(a)).max(initial=0.0)
        off = float(np.where(np.isfinite(apart), apart, np.inf).max(initial=0.0))
        if not off <= allowed * (largest or 1.0):
            return f"{name}: two runs on the same inputs differ by {off / (largest or 1.0):.3g}"
    return ""
