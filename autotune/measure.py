"""Compiling a candidate and timing it honestly.

Times are of compiled programs, after warm-up, in samples long enough to stand
above the timer. Two candidates are compared in turns on the same inputs.
How one candidate is timed in a search is in ``timing.py``.
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
#: On a CPU, a sample is calm with at least this part of its program's best share of
#: the processors…
CALM_SHARE = 0.85
#: …and samples that are not are taken again, up to this many times as many in all.
PATIENCE = 3
#: …after a pause of so many seconds.
PAUSE_S = 0.03
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
        outputs: Shapes and dtypes of what it returns.
    """

    call: Callable[..., Any]
    compile_s: float
    temp_mb: float
    arg_mb: float
    out_mb: float
    each_ready: bool
    outputs: tuple[jax.ShapeDtypeStruct, ...] = ()


def compile_program(
    function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any] | None = None
) -> Compiled:
    """Traces, lowers and compiles a function for these arguments, with XLA's ``options``."""
    start = time.perf_counter()
    lowered = jax.jit(function).lower(*args)
    compiled = lowered.compile(options)
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
        outputs=tuple(
            jax.ShapeDtypeStruct(one.shape, one.dtype) for one in jax.tree.leaves(lowered.out_info)
        ),
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


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to time.

    Attributes:
        seconds: Spent on the samples of one candidate, about.
        least: Samples at least.
        most: Samples at most.
        give_up_ratio: A candidate is not timed further if each of its first three
            samples is slower by this factor than one of the best candidate taken
            next to it. Samples of one program that are next to each other differ
            by as much once in a while; three of them in a row, hardly ever.
    """

    seconds: float = 0.5
    least: int = 5
    most: int = 15
    give_up_ratio: float = 1.4


@dataclasses.dataclass(frozen=True)
class Reading:
    """One sample.

    Attributes:
        ms: Milliseconds per call.
        share: Processors that the process had meanwhile, on average.
    """

    ms: float
    share: float


def read(compiled: Compiled, args: Sequence[Any], inner: int) -> Reading:
    """A sample, with the processor time that the process got for it."""
    start, used = time.perf_counter(), time.process_time()
    ms = sample(compiled, args, inner)
    used, seconds = time.process_time() - used, time.perf_counter() - start
    return Reading(ms, used / max(seconds, 1e-9))


def calm(shares: np.ndarray) -> np.ndarray:
    """Which samples of a program on a CPU no other process disturbed, along the first axis.

    A program that has to wait for a processor gets a smaller share of them than
    it gets otherwise; that a sample is slow for any other reason is no ground to
    leave it out.
    """
    return np.asarray(shares >= CALM_SHARE * shares.max(axis=0))


def calibrate(call_ms: float) -> int:
    """Calls per sample, so that a sample lasts ``SAMPLE_S``."""
    return int(min(MAX_INNER, max(1, math.ceil(SAMPLE_S * 1e3 / max(call_ms, 1e-6)))))


def interleave(
    programs: Sequence[tuple[Compiled, int]],
    args: Sequence[Any],
    rounds: int,
    seed: int,
    beat: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Samples of several programs in turns, each round in a random order.

    On a CPU, a sample that another process disturbed is taken again after a
    pause, as long as there is patience; then whole rounds are, and the calmest
    of them count.

    Args:
        programs: Each with its calls per sample.
        args: Their common arguments.
        rounds: How often each is sampled.
        seed: Of the orders.
        beat: Called before each round.

    Returns:
        Milliseconds per call, [rounds, programs].
    """
    rng = np.random.default_rng(seed)
    # On a GPU the processors only wait, and their share means nothing.
    telling = programs[0][0].each_ready
    retakes = PATIENCE * rounds * len(programs) if telling else 0
    best = np.zeros(len(programs))
    times: list[list[float]] = []
    shares: list[list[float]] = []
    while len(times) < (1 + telling) * rounds:
        readings = [Reading(0.0, 0.0)] * len(programs)
        beat()
        for i in rng.permutation(len(programs)):
            compiled, inner = programs[i]
            readings[i] = read(compiled, args, inner)
            while readings[i].share < CALM_SHARE * best[i] and retakes > 0:
                retakes -= 1
                time.sleep(PAUSE_S)
                readings[i] = read(compiled, args, inner)
            best[i] = max(best[i], readings[i].share)
        times.append([one.ms for one in readings])
        shares.append([one.share for one in readings])
        if len(times) >= rounds and calm(np.array(shares)).all(axis=1).sum() >= rounds:
            break
    ease = np.minimum(np.array(shares) / np.maximum(best, 1e-9), CALM_SHARE).min(axis=1)
    calmest = np.argsort(-ease if telling else np.zeros(len(ease)), kind="stable")
    return np.array(times)[np.sort(calmest[:rounds])]


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
