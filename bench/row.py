"""The worker of a benchmark: measures the rows of one point, in a process of its own.

Run as ``python -m shapetune.bench.row``; a request comes in as JSON, and each row
goes to a file as it is known, so that what a crash leaves is not lost.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ..autotune import measure, verify
from ..autotune.outcome import in_one_line
from ..cache.errors import UnsupportedError
from ..cache.key import Candidate, Problem
from ..kernels import current_device, default, get_op, rattention
from ..kernels.op import Expected, Inputs, Op
from . import isolate, peers, suites
from .schema import Row, suite_of
from .torch_peer import TorchPeer

#: Characters kept of an exception's words.
_WORDS = 400
#: A pause before a sample: worker threads of what ran before stop spinning meanwhile.
_SETTLE_S = 0.01
#: A call longer than this, in ms, needs no third warm-up to have its length known.
_LONG_MS = 500.0
#: A call shorter than this, in ms, is made once untimed before each sample.
_SHORT_MS = 50.0
#: Slower than the fastest by this factor, an implementation is sampled less often…
_SLOW = 2.5
#: …so many times.
_SLOW_SAMPLES = 6


@dataclasses.dataclass(frozen=True)
class Request:
    """What a worker is asked for.

    Attributes:
        rows: What identifies the rows; one point, several implementations.
        config: The config of the file.
        seconds: About how long to sample them all.
        rounds: Samples of each, at most; at least `least` are taken.
        least: See there.
        interpret: Time interpreted kernels too.
        cache: Cache place of ``default``; None for the usual ones.
        rivals: By implementation the config of its row as a rival.
    """

    rows: list[Row]
    config: dict[str, Any]
    seconds: float = 10.0
    rounds: int = 15
    least: int = 7
    interpret: bool = False
    cache: str | None = None
    rivals: dict[str, Any] = dataclasses.field(default_factory=dict)


class Runner(Protocol):
    """An implementation at a point, ready to be compiled, run and timed."""

    @property
    def compile_s(self) -> float:
        """Seconds to compile; of an eager framework, those of the first call."""

    def first(self) -> Mapping[str, np.ndarray]:
        """Compiles and runs it once: its outputs by name."""

    def sample(self, inner: int) -> float:
        """Milliseconds per call over ``inner`` back-to-back calls."""

    def memory(self) -> dict[str, Any]:
        """The row's fields of memory."""


class JaxRunner:
    """A program of jax on the arguments of a point."""

    def __init__(self, function: Any, args: Sequence[Any], names: Any = None) -> None:
        self._function, self._args, self._names = function, tuple(args), names
        self._compiled: measure.Compiled | None = None

    @property
    def compiled(self) -> measure.Compiled:
        """The program, compiled when first asked for."""
        if self._compiled is None:
            self._compiled = measure.compile_program(self._function, self._args)
        return self._compiled

    @property
    def compile_s(self) -> float:
        """Seconds to trace, lower and compile."""
        return self.compiled.compile_s

    def first(self) -> Mapping[str, np.ndarray]:
        result = jax.block_until_ready(self.compiled.call(*self._args))
        if self._names is not None:
            named: Mapping[str, np.ndarray] = self._names(result)
            return named
        leaves = jax.tree.leaves(result)
        return {f"result_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}

    def sample(self, inner: int) -> float:
        return measure.sample(self.compiled, self._args, inner)

    def memory(self) -> dict[str, Any]:
        one = self.compiled
        return {"xla_temp_mb": one.temp_mb, "xla_arg_mb": one.arg_mb, "xla_out_mb": one.out_mb}


class Point:
    """What the implementations at one point share: the inputs, and the right answers."""

    def __init__(self, request: Request) -> None:
        row = request.rows[0]
        self.request = request
        self.suite = suite_of(row)
        self.problem: Problem = suites.problem_of(row, request.config)
        self.device = current_device()
        self.op: Op = peers.widened(get_op(self.problem.op))
        self.inputs: Inputs | None = None
        self.expected: Sequence[Expected] = ()
        if self.suite in ("attention", "kernel"):
            self.inputs = self.op.make_inputs(self.problem, 0, "normal")
            self.expected = self.op.expect(self.problem, self.inputs, 1)

    def runner(self, row: Row) -> tuple[Runner, Row]:
        """An implementation ready to run, and what its row says of the choice."""
        name = row["impl"]
        if name.startswith("torch_"):
            assert self.inputs is not None
            return TorchPeer(name, self.problem, self.inputs), {}
        one = self.op.implementation(name.removeprefix(suites.RIVAL))
        slow = peers.too_slow(one, self.device)
        if slow and not self.request.interpret:
            raise UnsupportedError(slow)
        # The layer takes the name of an implementation, and so its default config.
        chunk = None if self.suite == "layer" else row.get("chunk")
        if suites.is_rival(row):
            candidate = self._rival(one.name)
        else:
            candidate = peers.candidate_of(self.op, name, self.problem, self.device, chunk)
        self.op.require(self.problem, self.device, candidate)
        about: Row = {"chosen": candidate.key}
        if name == "default":
            decision = default.explain_problem(self.problem)
            about = {"chosen": decision.candidate.key, "tier": decision.tier}
        if self.suite == "layer":
            return _layer(row), about
        inputs = self.inputs or self._memory_inputs()
        function = measure.program(self.op, self.problem, candidate, inputs)
        args = measure.arguments(self.problem, inputs)
        name_them = functools.partial(measure.named_outputs, self.op, self.problem, inputs)
        return JaxRunner(function, args, name_them), about

    def _rival(self, name: str) -> Candidate:
        """What the tuning of this point found of an implementation, beside its choice."""
        if name not in self.request.rivals:
            raise UnsupportedError(
                f"the tuning of this point timed no {name} but what it chose; --tune does, one "
                "attention or recurrence at a time, and a longer --tune-budget more of them"
            )
        return Candidate(name, self.request.rivals[name])

    def _memory_inputs(self) -> Inputs:
        """Of suite ``peak``: what the program takes, and nothing else on the device.

        A CPU only compiles, which needs the shapes alone.
        """
        shapes = self.op.abstract_inputs(self.problem)
        if self.device.platform == "cpu":
            return shapes
        rng = np.random.default_rng(0)

        def placed(one: Any) -> Any:
            if one is None:
                return None
            return jax.device_put(rng.standard_normal(one.shape, np.float32).astype(one.dtype))

        weights = () if self.problem.mode == "fwd" else shapes.weights
        return dataclasses.replace(
            shapes, arrays=tuple(map(placed, shapes.arrays)), weights=tuple(map(placed, weights))
        )

    def errors(self, outputs: Mapping[str, np.ndarray]) -> Row:
        """How far outputs are from the right ones; raises where that is no finite number."""
        for name, array in outputs.items():
            if not np.isfinite(np.asarray(array, dtype=np.float32)).all():
                raise ArithmeticError(f"{name} holds values that are not finite")
        if not self.expected:
            return {}
        relative = verify.errors(outputs, self.expected)
        worst = int(np.argmax(relative))
        one = self.expected[worst]
        got = np.asarray(outputs[one.output][one.index]).astype(np.float64)
        if not math.isfinite(relative[worst]):
            raise ArithmeticError(
                f"{one.output} cannot be held against what is right: a slice of it has shape "
                f"{got.shape}, the right one {one.value.shape}"
            )
        found: Row = {"rel_err": relative[worst]}
        if self.suite == "attention":
            found = {"max_abs_err": float(np.abs(got - one.value).max()), **found}
        return found


def _layer(row: Row) -> JaxRunner:
    """The RAttention layer; with gradients of its input and parameters in mode fwd_bwd."""
    cfg = suites.layer_of(row)
    rng = jax.random.key(0)
    params = rattention.init(rng, cfg)
    x, weights = (
        jax.random.normal(key, (row["batch"], row["seq"], cfg.width))
        for key in jax.random.split(rng)
    )
    x = x.astype(row["dtype"])

    def forward(params: Any, x: Any) -> Any:
        return rattention.apply(params, x, cfg, implementation=row["impl"])

    def loss(params: Any, x: Any, weights: Any) -> Any:
        return (forward(params, x).astype(weights.dtype) * weights).sum()

    if row["mode"] == "fwd":
        return JaxRunner(forward, (params, x))
    return JaxRunner(jax.value_and_grad(loss, argnums=(0, 1)), (params, x, weights))


def peak(point: Point, row: Row) -> Row:
    """The row of suite ``peak``: measured on a GPU, the compiled program's on a CPU."""
    runner, about = point.runner(row)
    assert isinstance(runner, JaxRunner)
    one = runner.compiled
    found: Row = {"inputs_mb": one.arg_mb, **about}
    stats = jax.devices()[0].memory_stats() if point.device.platform != "cpu" else None
    if stats is None:
        total = one.arg_mb + one.temp_mb + one.out_mb
        note = "of the compiled program: arguments, outputs and temporary memory"
        return {"peak_mb": total, "memory_note": note, **found}
    runner.first()
    after = jax.devices()[0].memory_stats() or {}
    total = after.get("peak_bytes_in_use", 0) / measure.MIB
    note = "of the device since its process began: inputs, what compiling tried, one call"
    return {"peak_mb": total, "memory_note": note, **found}


class Session:
    """Times the implementations of a point in turns, and tells of each row as it is known."""

    def __init__(self, point: Point, tell: Any) -> None:
        self.point = point
        self._tell = tell
        self._ready: dict[str, tuple[Row, Runner, Row]] = {}
        self._inner: dict[str, int] = {}
        self._quick: dict[str, float] = {}
        self._samples: dict[str, list[tuple[int, float]]] = {}
        #: What the rows sampled here in turns have in common, and no others.
        self._turns = uuid.uuid4().hex[:12]

    def run(self) -> None:
        """Prepares each implementation, then samples them in turns."""
        for row in self.point.request.rows:
            self._guarded(row, self._prepare)
        if not self._ready:
            return
        self._sample()
        for name in list(self._ready):
            self._finish(name)

    def _guarded(self, row: Row, step: Any) -> None:
        self._tell({"begin": row["impl"]})
        try:
            step(row)
        except Exception as error:  # whatever an implementation raises is its row
            self._ready.pop(row["impl"], None)
            self._tell({"row": {**row, "error": words(error)}})

    def _prepare(self, row: Row) -> None:
        name = row["impl"]
        if self.point.suite == "peak":
            self._tell({"row": {**row, **peak(self.point, row)}})
            return
        runner, about = self.point.runner(row)
        outputs = runner.first()
        about |= self.point.errors(outputs)
        about |= runner.memory()
        self._quick[name] = runner.sample(1)  # the second warm-up, for a call of seconds too
        if self._quick[name] < _LONG_MS:
            self._quick[name] = runner.sample(1)
        self._inner[name] = measure.calibrate(self._quick[name])
        self._samples[name] = []
        self._ready[name] = (row, runner, about)

    def _sample(self) -> None:
        """Rounds over all implementations, each in a random order; the slow ones in some rounds."""
        request = self.point.request
        fastest = min(self._quick[name] for name in self._ready)
        cost = {name: self._quick[name] * self._inner[name] / 1e3 for name in self._ready}
        slow = {n for n in self._ready if self._quick[n] > _SLOW * fastest and len(self._ready) > 1}
        spent = sum(_SLOW_SAMPLES * cost[n] for n in slow)
        left = (request.seconds - spent) / max(sum(cost[n] for n in cost if n not in slow), 1e-9)
        rounds = int(min(request.rounds, max(request.least, left)))
        often = {int(r) for r in np.linspace(0, rounds - 1, min(_SLOW_SAMPLES, rounds))}
        # Another order at each point: who often comes after whom must not decide.
        rng = np.random.default_rng(int(self._turns, 16))
        for turn in range(rounds):
            for name in rng.permutation(sorted(self._ready)):
                if name in self._ready and (name not in slow or turn in often):
                    row = self._ready[name][0]
                    self._guarded(row, lambda row, turn=turn: self._one_sample(row["impl"], turn))

    def _one_sample(self, name: str, turn: int) -> None:
        runner, inner = self._ready[name][1], self._inner[name]
        time.sleep(_SETTLE_S)
        if self._quick[name] < _SHORT_MS:
            runner.sample(1)  # what ran before has taken the caches
        self._samples[name].append((turn, runner.sample(inner)))

    def _finish(self, name: str) -> None:
        row, runner, about = self._ready[name]
        found = self._samples[name]
        q1, median, q3 = np.percentile([ms for _, ms in found], (25, 50, 75))
        row = {
            **row,
            **about,
            "compile_s": runner.compile_s,
            "inner": self._inner[name],
            "median_ms": float(median),
            "q1_ms": float(q1),
            "q3_ms": float(q3),
        }
        if self.point.suite == "attention":
            row["tflops"] = self.point.op.flops(self.point.problem) / (float(median) * 1e9)
        if len(self._ready) > 1:
            row["turns"] = self._turns
            row["samples_ms"] = [[turn, float(f"{ms:.6g}")] for turn, ms in found]
        self._tell({"row": row})


def words(error: Exception) -> str:
    """An exception in its own words."""
    return in_one_line(f"{type(error).__name__}: {error}", _WORDS)


def main() -> None:
    """Serves one request: limits from the command line, the rest from standard input."""
    out_path, memory = sys.argv[1], float(sys.argv[2])
    isolate.limit_memory(memory)
    request = Request(**json.load(sys.stdin))
    with open(out_path, "a", encoding="utf-8") as out:

        def tell(event: Mapping[str, Any]) -> None:
            out.write(json.dumps(event) + "\n")
            out.flush()

        if request.cache is not None:
            default.load(request.cache)
        Session(Point(request), tell).run()


if __name__ == "__main__":
    main()
