"""One trial: a candidate compiled, verified and timed, with a typed outcome.

A trial is a function of (problem, candidate); the bench holds what all trials of
a problem share: the inputs, the reference, and the plain implementation's error.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.errors import UnsupportedError
from ..cache.key import Candidate, Device, Problem
from ..cache.record import Comparison, Trial, Verification
from ..kernels.op import Expected, Inputs, Op
from . import measure, plausible, timing, verify
from .measure import Compiled, Effort
from .outcome import TrialError, Wrong, status_of, words

_SLICES = 2
#: Programs of the fastest candidates that are kept until the end of the search.
_LEADERS = 6
#: Seconds between two words that a phase goes on: rare enough to disturb no sample.
_BEAT_S = 2.0
#: Kinds of inputs beside those of the op: the ones that are timed, and others like
#: them, so that what an earlier run left in memory is wrong.
_TIMED, _FRESH = "normal", "fresh"


class Tester(Protocol):
    """Tries candidates of one problem: in this process, or in a worker."""

    problem: Problem

    def trial(self, candidate: Candidate, best: Trial | None = None) -> Trial:
        """Compiles, verifies and times a candidate; never raises for what it does."""

    def verify_hard(self, candidate: Candidate) -> Verification | Trial:
        """Checks a candidate on the harder inputs; the trial that it turned out to be
        if it fails."""

    def race(
        self, candidates: Sequence[Candidate], rounds: int, seed: int = 0, anew: bool = False
    ) -> np.ndarray:
        """Samples in turns, ms per call, [rounds, candidates].

        With ``anew`` each is compiled again, so that what one program owes to
        where it lies in memory does not last.

        Raises:
            TrialError: One of them failed.
        """


class Spent:
    """Seconds by phase, and word of each phase as it begins."""

    def __init__(self, entered: Callable[[str], None]) -> None:
        self._entered = entered
        self._phase = ""
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """Ends the phase under way and begins another; none if ``phase`` is empty."""
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        if phase:
            self._entered(phase)
        self._phase, self._since = phase, time.perf_counter()


@dataclasses.dataclass
class _Reference:
    """One set of inputs with the right answers and their tolerances."""

    inputs: Inputs
    expected: Sequence[Expected]
    tolerance: Sequence[float]

    @property
    def condition(self) -> float:
        return max((one.condition for one in self.expected), default=0.0)


class Bench:
    """What the trials of one problem share; tries candidates in this process.

    Args:
        op: The op.
        problem: The problem.
        device: The device that it runs on.
        seed: Of the inputs.
        effort: How long to time.
        max_temp_mb: Candidates that need more temporary memory are not run, but
            for the heuristic; None for no limit.
        entered: Called with the name of each phase as it begins: ``"prepare"``,
            ``"compile"``, ``"verify"``, ``"screen"``, ``"time"``, ``"race"``.
    """

    def __init__(
        self,
        op: Op,
        problem: Problem,
        device: Device,
        seed: int = 0,
        effort: Effort | None = None,
        max_temp_mb: float | None = None,
        entered: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.op = op
        self.problem = problem
        self.device = device
        self.effort = effort or Effort()
        #: Whether something raised while it ran: the device may not be sound any more.
        self.tainted = False
        self._seed = seed
        self._max_temp_mb = max_temp_mb
        self._entered = entered
        self._references: dict[str, _Reference] = {}
        self._kept: dict[Candidate, Compiled] = {}
        #: Whether another process disturbed a timing so far.
        self._busy = False
        self._beaten = time.monotonic()
        #: The fastest so far with their programs: finalists need no second compile.
        self._leaders: list[tuple[float, Candidate, Compiled]] = []

    def prepare(self) -> None:
        """Makes the inputs and the reference, which trials otherwise make when they need them."""
        self._entered("prepare")
        for kind in (_TIMED, _FRESH):
            self._reference(kind)
        plausible.floor_ms(self.op, self.problem, self.device)

    def trial(self, candidate: Candidate, best: Trial | None = None) -> Trial:
        """Compiles, verifies and times a candidate; never raises for what it does.

        ``best`` is the best trial so far, against which timing is cut short.
        """
        spent = Spent(self._entered)
        try:
            outcome = self._trial(candidate, best, spent)
        except Wrong as wrong:
            outcome = Trial(candidate, wrong.status, rel_err=wrong.rel_err, note=wrong.note)
        spent.enter("")
        one = self.op.implementations.get(candidate.implementation)
        return dataclasses.replace(
            outcome,
            version=one.version if one else 0,
            compile_s=spent.seconds.get("compile", 0.0),
            verify_s=spent.seconds.get("verify", 0.0),
            screen_s=spent.seconds.get("screen", 0.0),
            time_s=spent.seconds.get("time", 0.0),
        )

    def _trial(self, candidate: Candidate, best: Trial | None, spent: Spent) -> Trial:
        try:
            self.op.require(self.problem, self.device, candidate)
            spent.enter("prepare")
            inputs = self._reference(_TIMED).inputs
            spent.enter("compile")
            compiled = self._compile(candidate, inputs)
        except UnsupportedError as error:
            raise Wrong("unsupported", words(error)) from error
        except (Exception, SystemExit) as error:  # whatever a kernel raises at trace or compile
            raise Wrong(status_of(error, "compile_error"), words(error)) from error
        if self._too_large(candidate, compiled):
            note = f"{compiled.temp_mb:.4g} MiB of temporary memory, allowed {self._max_temp_mb:g}"
            return Trial(candidate, "over_limit", temp_mb=compiled.temp_mb, note=note)
        try:
            outcome = self._verify_and_time(candidate, compiled, best, spent)
        except Wrong as wrong:
            outcome = Trial(candidate, wrong.status, rel_err=wrong.rel_err, note=wrong.note)
        except (Exception, SystemExit) as error:  # whatever a kernel raises when it runs
            self.tainted = True
            outcome = Trial(candidate, status_of(error, "crashed"), note=words(error))
        return dataclasses.replace(outcome, temp_mb=compiled.temp_mb)

    def _too_large(self, candidate: Candidate, compiled: Compiled) -> bool:
        if self._max_temp_mb is None or compiled.temp_mb <= self._max_temp_mb:
            return False
        return candidate != self.op.heuristic(self.problem, self.device)

    def _verify_and_time(
        self, candidate: Candidate, compiled: Compiled, best: Trial | None, spent: Spent
    ) -> Trial:
        spent.enter("verify")
        before, checked = self._right(compiled, _TIMED)
        self._right(compiled, _FRESH)
        self._same(compiled, before)
        args = measure.arguments(self.problem, self._reference(_TIMED).inputs)
        found = timing.time_program(
            compiled, args, self._rival(best), self.effort, self._floor_ms(), spent.enter,
            lambda: self._beat("time"), self._busy,
        )  # fmt: skip
        spent.enter("verify")
        self._same(compiled, before)
        self._busy = self._busy or found.disturbed
        q1, median, q3 = found.quartiles_ms
        if median < self._floor_ms():
            plausible.measure_again(self.problem.dtype)
            if median < self._floor_ms():
                note = (
                    f"{median:.3g} ms, below the {self._floor_ms():.3g} ms that the device allows"
                )
                raise Wrong("implausible", note)
        self._leaders = sorted([*self._leaders, (median, candidate, compiled)], key=_median)[
            :_LEADERS
        ]
        return Trial(
            candidate,
            "ok",
            median_ms=median,
            q1_ms=q1,
            q3_ms=q3,
            samples=len(found.samples_ms),
            inner=found.inner,
            rel_err=checked.rel_err,
            screened=found.screened,
            note=found.note,
            retaken=found.retaken,
        )

    def _beat(self, phase: str) -> None:
        """Word now and then that a phase of many samples goes on."""
        now = time.monotonic()
        if now - self._beaten > _BEAT_S:
            self._beaten = now
            self._entered(phase)

    def _floor_ms(self) -> float:
        return plausible.floor_ms(self.op, self.problem, self.device)

    def _rival(self, best: Trial | None) -> timing.Rival | None:
        if best is None or best.median_ms is None:
            return None
        return timing.Rival(best.median_ms, self._at_hand(best.candidate))

    def _at_hand(self, candidate: Candidate) -> Compiled | None:
        return next((program for _, one, program in self._leaders if one == candidate), None)

    def verify_hard(self, candidate: Candidate) -> Verification | Trial:
        """Checks a candidate on the normal and the harder inputs, before it is published.

        Returns the verification, or the trial that it turned out to be.
        """
        kinds = (_TIMED, *self.op.hard_inputs)
        spent = Spent(self._entered)
        try:
            spent.enter("compile")
            compiled = self._keep(candidate)
            checks = []
            for kind in kinds:
                spent.enter("prepare")
                self._reference(kind)
                spent.enter("verify")
                checks.append(self._right(compiled, kind)[1])
        except Wrong as wrong:
            return Trial(candidate, wrong.status, rel_err=wrong.rel_err, note=wrong.note)
        except (Exception, SystemExit) as error:  # whatever a kernel raises
            self.tainted = True
            return Trial(candidate, status_of(error, "crashed"), note=words(error))
        worst = max(checks, key=lambda one: one.rel_err / one.tolerance)
        return Verification(worst.rel_err, worst.tolerance, kinds)

    def race(
        self, candidates: Sequence[Candidate], rounds: int, seed: int = 0, anew: bool = False
    ) -> np.ndarray:
        """Samples of several candidates in turns, ms per call, [rounds, candidates].

        With ``anew`` each is compiled again.

        Raises:
            TrialError: One of them failed.
        """
        self._entered("race")
        try:
            inputs = self._reference(_TIMED).inputs
            args = measure.arguments(self.problem, inputs)
            programs = []
            for candidate in candidates:
                compiled = self._compile(candidate, inputs) if anew else self._keep(candidate)
                measure.sample(compiled, args, 2)
                programs.append((compiled, measure.calibrate(measure.sample(compiled, args, 1))))
            return measure.interleave(
                programs, args, rounds, self._seed + seed, lambda: self._beat("race")
            )
        except (Exception, SystemExit) as error:  # whatever a kernel raises
            self.tainted = True
            raise TrialError(status_of(error, "crashed"), words(error)) from error

    def _compile(self, candidate: Candidate, inputs: Inputs) -> Compiled:
        function = measure.program(self.op, self.problem, candidate, inputs)
        return measure.compile_program(function, measure.arguments(self.problem, inputs))

    def _keep(self, candidate: Candidate, inputs: Inputs | None = None) -> Compiled:
        """The compiled program of a candidate that is needed more than once."""
        if candidate not in self._kept:
            inputs = inputs or self._reference(_TIMED).inputs
            self._kept[candidate] = self._at_hand(candidate) or self._compile(candidate, inputs)
        return self._kept[candidate]

    def _outputs(self, compiled: Compiled, inputs: Inputs) -> dict[str, np.ndarray]:
        """Results on freshly spoilt memory, so that what a kernel leaves unwritten shows."""
        spoilt = [jnp.full(one.shape, _spoiler(one.dtype), one.dtype) for one in compiled.outputs]
        jax.block_until_ready(spoilt)
        del spoilt
        result = jax.block_until_ready(compiled.call(*measure.arguments(self.problem, inputs)))
        return measure.named_outputs(self.op, self.problem, inputs, result)

    def _right(self, compiled: Compiled, kind: str) -> tuple[dict[str, np.ndarray], verify.Check]:
        """The outputs on inputs of a kind and how right they are; raises Wrong if not."""
        reference = self._reference(kind)
        outputs = self._outputs(compiled, reference.inputs)
        checked = verify.check(outputs, reference.expected, reference.tolerance)
        if checked.passed:
            return outputs, checked
        note = (
            f"{kind} inputs, {checked.where}: error {checked.rel_err:.3g}, "
            f"tolerance {checked.tolerance:.3g}"
        )
        again = self._outputs(compiled, reference.inputs)
        apart = verify.difference(self.problem, outputs, again, reference.condition)
        status = "nondeterministic" if apart else "wrong_result"
        note = f"{note}; {apart}" if apart else note
        raise Wrong(status, note, checked.rel_err if np.isfinite(checked.rel_err) else None)

    def _same(self, compiled: Compiled, before: dict[str, np.ndarray]) -> None:
        """Raises Wrong unless the timed inputs give what they gave before."""
        reference = self._reference(_TIMED)
        again = self._outputs(compiled, reference.inputs)
        apart = verify.difference(self.problem, before, again, reference.condition)
        if apart:
            raise Wrong("nondeterministic", apart)

    def _reference(self, kind: str) -> _Reference:
        found = self._references.get(kind)
        if found is None:
            fresh = kind == _FRESH
            inputs = self.op.make_inputs(
                self.problem, self._seed + fresh, _TIMED if fresh else kind
            )
            expected = self.op.expect(self.problem, inputs, 1 if fresh else _SLICES)
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


def compare(
    tester: Tester,
    heuristic: Candidate,
    chosen: Candidate,
    pairs: int,
    seed: int = 0,
    anew: bool = False,
) -> Comparison:
    """The paired comparison of a candidate with the heuristic.

    Raises:
        TrialError: One of them failed.
    """
    times = tester.race([heuristic, chosen], pairs, seed, anew)
    ratio, low, high = measure.paired_ratio(times[:, 0], times[:, 1])
    base_ms, chosen_ms = np.median(times, axis=0)
    return Comparison(ratio, low, high, len(times), float(base_ms), float(chosen_ms))


def _median(leader: tuple[float, Candidate, Compiled]) -> float:
    return leader[0]


def _spoiler(dtype: np.dtype) -> float:
    return float("nan") if jnp.issubdtype(dtype, jnp.floating) else 0.0
