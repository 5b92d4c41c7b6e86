"""Compiling a candidate and timing it honestly.

Times are of compiled programs, after warm-up, in samples long enough to stand
above the timer. Two candidates are compared in turns on the same inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.key import Candidate, Problem
from ..kernels.op import Inputs, Op

#: A sample lasts at least this long, if need be by several calls…
SAMPLE_S = 0.01
#: …but never more of them than this.
MAX_INNER = 200
MIB = 2.0**20


def program(op: Op, problem: Problem, candidate: Candidate, inputs: Inputs) -> Callable[..., Any]:
    """The function that is timed: of the present arrays, then the weights.

    Mode fwd returns the outputs. Mode fwd_bwd returns ``((loss, outputs),
    gradients)``, with the loss the sum over outputs of sum(output · weight).
    """
    call = op.bind(problem, candidate)
    present = [i for i, array in enumerate(inputs.arrays) if array is not None]

    def forward(*given: Any) -> tuple[Any, ...]:
        arrays: list[Any] = [None] * len(inputs.arrays)
        for position, array in zip(present, given, strict=True):
            arrays[position] = array
        outputs = call(*arrays)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    if problem.mode == "fwd":
        return lambda *given: forward(*given[: len(present)])

    def loss(*given: Any) -> tuple[Any, tuple[Any, ...]]:
        outputs = forward(*given[: len(present)])
        weights = given[len(present) :]
        total = jnp.float32(0)
        for output, weight in zip(outputs, weights, strict=True):
            total += jnp.sum(output.astype(jnp.float32) * weight)
        return total, outputs

    wanted = tuple(present.index(i) for i in inputs.differentiable)
    return jax.value_and_grad(loss, argnums=wanted, has_aux=True)


def arguments(problem: Problem, inputs: Inputs) -> tuple[Any, ...]:
    """What the program of a problem is called with."""
    present = tuple(array for array in inputs.arrays if array is not None)
    return present if problem.mode == "fwd" else (*present, *inputs.weights)


def named_outputs(op: Op, problem: Problem, inputs: Inputs, result: Any) -> dict[str, np.ndarray]:
    """The program's results by the names that ``Expected.output`` uses, on the host."""
    if problem.mode == "fwd":
        return dict(zip(op.outputs, map(np.asarray, result), strict=False))
    (_, outputs), gradients = result
    named = dict(zip(op.outputs, map(np.asarray, outputs), strict=False))
    for position, gradient in zip(inputs.differentiable, gradients, strict=True):
        named[f"grad_{inputs.names[position]}"] = np.asarray(gradient)
    return named


@dataclasses.dataclass
class Compiled:
    """A compiled program.

    Attributes:
        call: Runs it.
        compile_s: Seconds to trace, lower and compile.
        temp_mb: Temporary memory, MiB; ``xla_temp_mb`` of the benchmark files.
        arg_mb: Arguments, MiB.
        out_mb: Outputs, MiB.
        each_ready: Wait for each call of a sample, not for the last alone.
    """

    call: Callable[..., Any]
    compile_s: float
    temp_mb: float
    arg_mb: float
    out_mb: float
    each_ready: bool


def compile_program(function: Callable[..., Any], args: Sequence[Any]) -> Compiled:
    """Traces, lowers and compiles a function for these arguments."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()

    def size(name: str) -> float:
        return float(getattr(memory, f"{name}_size_in_bytes", 0) or 0) / MIB

    return Compiled(
        call=compiled,
        compile_s=seconds,
        temp_mb=size("temp"),
        arg_mb=size("argument"),
        out_mb=size("output"),
        # A CPU runs independent calls side by side, so they would overlap.
        each_ready=jax.default_backend() == "cpu",
    )


def sample(compiled: Compiled, args: Sequence[Any], inner: int) -> float:
    """Milliseconds per call over ``inner`` back-to-back calls."""
    start = time.perf_counter()
    result = None
    for _ in range(inner):
        result = compiled.call(*args)
        if compiled.each_ready:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / inner * 1e3


def calibrate(call_ms: float) -> int:
    """Calls per sample, so that a sample lasts ``SAMPLE_S``."""
    return int(min(MAX_INNER, max(1, math.ceil(SAMPLE_S * 1e3 / max(call_ms, 1e-6)))))


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one program, milliseconds per call."""

    samples_ms: tuple[float, ...]
    inner: int

    @property
    def quartiles_ms(self) -> tuple[float, float, float]:
        """First quartile, median, third quartile."""
        q1, median, q3 = np.percentile(self.samples_ms, (25, 50, 75))
        return float(q1), float(median), float(q3)


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to time.

    Attributes:
        seconds: Spent on the samples of one candidate, about.
        least: Samples at least.
        most: Samples at most.
        give_up_ratio: A candidate whose first samples are all slower than the
            best by this factor is not timed further. Samples of one program
            rarely differ by as much: the risk is that of a machine that is
            busy during all of them, and a finalist is never lost by it alone.
    """

    seconds: float = 0.5
    least: int = 5
    most: int = 15
    give_up_ratio: float = 1.4


def time_program(
    compiled: Compiled, args: Sequence[Any], best_ms: float | None, effort: Effort
) -> tuple[Timing, bool]:
    """Times a program that has been called once; True if it was given up early.

    ``best_ms`` is the median of the best candidate so far.
    """
    sample(compiled, args, 1)  # the second warm-up: interpreters compile again here
    quick = [sample(compiled, args, 1)]
    inner = calibrate(quick[0])
    if best_ms is not None and quick[0] > effort.give_up_ratio * best_ms:
        quick += [sample(compiled, args, inner) for _ in range(2)]
        if min(quick) > effort.give_up_ratio * best_ms:
            return Timing(tuple(quick), inner), True
    wanted = effort.seconds * 1e3 / max(inner * quick[0], 1e-6)
    count = int(min(effort.most, max(effort.least, wanted)))
    return Timing(tuple(sample(compiled, args, inner) for _ in range(count)), inner), False


def interleave(
    programs: Sequence[tuple[Compiled, int]], args: Sequence[Any], rounds: int, seed: int
) -> np.ndarray:
    """Samples of several programs in turns, each round in a random order.

    Args:
        programs: Each with its calls per sample.
        args: Their common arguments.
        rounds: How often each is sampled.
        seed: Of the orders.

    Returns:
        Milliseconds per call, [rounds, programs].
    """
    rng = np.random.default_rng(seed)
    times = np.empty((rounds, len(programs)))
    for row in times:
        for i in rng.permutation(len(programs)):
            compiled, inner = programs[i]
            row[i] = sample(compiled, args, inner)
    return times


def paired_ratio(base_ms: np.ndarray, other_ms: np.ndarray) -> tuple[float, float, float]:
    """How many times faster ``other`` is than ``base``, with its 95% interval.

    The Hodges–Lehmann estimate of the logarithm of the paired ratios, and the
    interval that inverts Wilcoxon's signed-rank test: exact for any noise that
    is as likely to favour one of a pair as the other (Hollander and Wolfe,
    Nonparametric Statistical Methods, section 3.2–3.3). With fewer than six
    pairs no such interval exists at 95%, and the widest possible is given.
    """
    steps = np.log(np.asarray(base_ms) / np.asarray(other_ms))
    i, j = np.triu_indices(len(steps))
    walsh = np.sort((steps[i] + steps[j]) / 2)
    cut = _signed_rank_cut(len(steps))
    low, high = walsh[cut], walsh[len(walsh) - 1 - cut]
    ratio, low, high = np.exp([np.median(walsh), low, high])
    return float(ratio), float(low), float(high)


@functools.cache
def _signed_rank_cut(n: int, level: float = 0.025) -> int:
    """The largest c such that the signed-rank sum of n pairs is at most c with chance ≤ level."""
    ways = np.zeros(n * (n + 1) // 2 + 1)
    ways[0] = 1
    for rank in range(1, n + 1):
        ways[rank:] += ways[:-rank].copy()
    below = np.cumsum(ways) / 2.0**n
    return max(0, int(np.searchsorted(below, level, side="right")) - 1)
