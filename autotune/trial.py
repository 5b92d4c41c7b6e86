"""One trial: a candidate compiled, verified and timed, with a typed outcome.

A trial is a function of (problem, candidate); the bench holds what all trials of
a problem share: the inputs, the reference, and the plain implementation's error.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from ..cache.errors import UnsupportedError
from ..cache.key import Candidate, Device, Problem
from ..cache.record import Comparison, Trial, Verification
from ..kernels.op import Expected, Inputs, Op
from . import measure, verify
from .measure import Compiled, Effort

_SLICES = 2
_NOTE = 500


@dataclasses.dataclass
class _Reference:
    """One set of inputs with the right answers and their tolerances."""

    inputs: Inputs
    expected: Sequence[Expected]
    tolerance: Sequence[float]


class Bench:
    """What the trials of one problem share.

    Args:
        op: The op.
        problem: The problem.
        device: The device that it runs on.
        seed: Of the inputs.
        effort: How long to time.
    """

    def __init__(
        self, op: Op, problem: Problem, device: Device, seed: int = 0, effort: Effort | None = None
    ) -> None:
        self.op = op
        self.problem = problem
        self.device = device
        self.effort = effort or Effort()
        self._seed = seed
        self._references: dict[str, _Reference] = {}
        self._kept: dict[Candidate, Compiled] = {}

    def trial(self, candidate: Candidate, best_ms: float | None = None) -> Trial:
        """Compiles, verifies and times a candidate; never raises for what it does.

        ``best_ms`` is the best median so far, beyond which timing is cut short.
        """
        started = time.perf_counter()
        try:
            self.op.require(self.problem, self.device, candidate)
            reference = self._reference("normal")
            started = time.perf_counter()
            compiled = self._compile(candidate, reference.inputs)
        except UnsupportedError as error:
            return _failed(candidate, "unsupported", error, started)
        except Exception as error:  # whatever a kernel raises at trace or compile time
            return _failed(candidate, _kind(error, "compile_error"), error, started)
        outcome = Trial(candidate, "ok", compile_s=compiled.compile_s, temp_mb=compiled.temp_mb)
        try:
            checked = self._check(compiled, reference)
            if not checked.passed:
                note = f"{checked.where}: error {checked.rel_err:.3g}, tolerance {checked.tolerance:.3g}"
                return dataclasses.replace(
                    outcome, status="wrong_result", rel_err=_finite(checked.rel_err), note=note
                )
            args = measure.arguments(self.problem, reference.inputs)
            timing, given_up = measure.time_program(compiled, args, best_ms, self.effort)
        except Exception as error:  # whatever a kernel raises when it runs
            return dataclasses.replace(outcome, status=_kind(error, "crashed"), note=_words(error))
        q1, median, q3 = timing.quartiles_ms
        return dataclasses.replace(
            outcome,
            median_ms=median,
            q1_ms=q1,
            q3_ms=q3,
            samples=len(timing.samples_ms),
            inner=timing.inner,
            rel_err=checked.rel_err,
            screened=given_up,
        )

    def verify_hard(self, candidate: Candidate) -> Verification | Trial:
        """Checks a candidate on the normal and the harder inputs, before it is published.

        Returns the verification, or the trial that it turned out to be.
        """
        kinds = ("normal", *self.op.hard_inputs)
        worst: verify.Check | None = None
        try:
            compiled = self._keep(candidate)
            for kind in kinds:
                checked = self._check(compiled, self._reference(kind))
                if (
                    worst is None
                    or checked.rel_err / checked.tolerance > worst.rel_err / worst.tolerance
                ):
                    worst = checked
                if not checked.passed:
                    note = (
                        f"{kind} inputs, {checked.where}: error {checked.rel_err:.3g}, "
                        f"tolerance {checked.tolerance:.3g}"
                    )
                    return Trial(
                        candidate, "wrong_result", rel_err=_finite(checked.rel_err), note=note
                    )
        except Exception as error:  # whatever a kernel raises
            return Trial(candidate, _kind(error, "crashed"), note=_words(error))
        assert worst is not None
        return Verification(worst.rel_err, worst.tolerance, kinds)

    def race(self, candidates: Sequence[Candidate], rounds: int) -> np.ndarray:
        """Samples of several candidates in turns, ms per call, [rounds, candidates]."""
        inputs = self._reference("normal").inputs
        args = measure.arguments(self.problem, inputs)
        programs = []
        for candidate in candidates:
            compiled = self._keep(candidate)
            measure.sample(compiled, args, 2)
            programs.append((compiled, measure.calibrate(measure.sample(compiled, args, 1))))
        return measure.interleave(programs, args, rounds, self._seed)

    def compare(self, heuristic: Candidate, chosen: Candidate, pairs: int) -> Comparison:
        """The paired comparison of a candidate with the heuristic."""
        times = self.race([heuristic, chosen], pairs)
        ratio, low, high = measure.paired_ratio(times[:, 0], times[:, 1])
        base_ms, chosen_ms = np.median(times, axis=0)
        return Comparison(ratio, low, high, pairs, float(base_ms), float(chosen_ms))

    def _compile(self, candidate: Candidate, inputs: Inputs) -> Compiled:
        function = measure.program(self.op, self.problem, candidate, inputs)
        return measure.compile_program(function, measure.arguments(self.problem, inputs))

    def _keep(self, candidate: Candidate, inputs: Inputs | None = None) -> Compiled:
        """The compiled program of a candidate that is needed more than once."""
        if candidate not in self._kept:
            inputs = inputs or self._reference("normal").inputs
            self._kept[candidate] = self._compile(candidate, inputs)
        return self._kept[candidate]

    def _outputs(self, compiled: Compiled, inputs: Inputs) -> dict[str, np.ndarray]:
        result = jax.block_until_ready(compiled.call(*measure.arguments(self.problem, inputs)))
        return measure.named_outputs(self.op, self.problem, inputs, result)

    def _check(self, compiled: Compiled, reference: _Reference) -> verify.Check:
        outputs = self._outputs(compiled, reference.inputs)
        return verify.check(outputs, reference.expected, reference.tolerance)

    def _reference(self, kind: str) -> _Reference:
        found = self._references.get(kind)
        if found is None:
            inputs = self.op.make_inputs(self.problem, self._seed, kind)
            expected = self.op.expect(self.problem, inputs, _SLICES)
            own = self._baseline_errors(inputs, expected)
            found = _Reference(inputs, expected, verify.tolerances(self.problem, own, expected))
            self._references[kind] = found
        return found

    def _baseline_errors(self, inputs: Inputs, expected: Sequence[Expected]) -> list[float] | None:
        """The plain implementation's own errors, None where it cannot run here."""
        plain = self.op.implementation(self.op.baseline)
        if plain.supports(self.problem, self.device) is not None:
            return None
        candidate = Candidate(plain.name, plain.default_config(self.problem, self.device))
        try:
            return verify.errors(self._outputs(self._keep(candidate, inputs), inputs), expected)
        except jax.errors.JaxRuntimeError:  # too large for this device after all
            return None


def _failed(candidate: Candidate, status: str, error: Exception, started: float) -> Trial:
    return Trial(candidate, status, compile_s=time.perf_counter() - started, note=_words(error))


def _kind(error: Exception, otherwise: str) -> str:
    """The trial status that an exception stands for."""
    exhausted = isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError)
        and str(error).startswith("RESOURCE_EXHAUSTED")
    )
    return "out_of_memory" if exhausted else otherwise


def _words(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _NOTE else text[: _NOTE - 1] + "…"


def _finite(value: float) -> float | None:
    """A value that a record can hold."""
    return value if np.isfinite(value) else None


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the smallest median among those that passed."""
    timed = [t for t in trials if t.status == "ok" and t.median_ms is not None]
    return min(timed, key=lambda t: t.median_ms or 0.0, default=None)
