"""The verdict on a problem: finalists raced, one of them compared with the heuristic.

Finalists are picked by one set of races and judged by another, so that luck in the
first does not count in the second; and the heuristic wins whenever it is not sure.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..cache.key import Candidate
from ..cache.record import Comparison, Trial, Verification
from .options import Listener, Options
from .outcome import TrialError
from .races import CALM, Standings, field_of
from .trial import Tester, compare

#: Seconds after which no further race begins; on a noisy machine's extra ones, nor after the budget.
_RACES_S = 60.0
#: Seconds of a race at most, by what the search found: fewer finalists run, but two do.
_RACE_S = _RACES_S / CALM.stages
_LEAST_FINALISTS = 2
#: A gain smaller than this is not worth another program than the heuristic's.
LEAST_GAIN = 1.01


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a problem's record says of its winner."""

    chosen: Candidate
    comparison: Comparison
    verification: Verification


def samples_at_most(options: Options) -> int:
    """Samples that a verdict takes, if nothing disturbs it: races, then two comparisons."""
    return CALM.stages * options.rounds * (CALM.finalists + 1) + 2 * 2 * options.pairs


class NoVerdict(Exception):
    """The problem cannot have a record; the message says why."""


class HeuristicFails(NoVerdict):
    """The heuristic is wrong on the harder inputs, or harms the process that runs it."""


def decide(
    tester: Tester,
    heuristic: Candidate,
    trials: list[Trial],
    options: Options,
    listener: Listener,
    failed: Callable[[Trial], None] = lambda trial: None,
) -> Verdict:
    """The winner against the heuristic, or the heuristic.

    Args:
        tester: What the trials were made with.
        heuristic: The heuristic.
        trials: All trials, the heuristic's first; those of finalists that fail
            are replaced by what they turn out to be.
        options: How to tune.
        listener: Hears what is under way.
        failed: Called with the trial of a finalist that fails.

    Raises:
        HeuristicFails: The heuristic itself is wrong; its trial then says so.
        NoVerdict: It is too large, and nothing else fits.
    """
    return _Final(tester, heuristic, trials, options, listener, failed).verdict()


class _Final:
    """The state of one decision."""

    def __init__(
        self,
        tester: Tester,
        heuristic: Candidate,
        trials: list[Trial],
        options: Options,
        listener: Listener,
        failed: Callable[[Trial], None],
    ) -> None:
        self._tester = tester
        self._heuristic = heuristic
        self._trials = trials
        self._options = options
        self._listener = listener
        self._failed = failed
        self._fallback = trials[0]
        self._field = field_of(trials)

    def verdict(self) -> Verdict:
        self._listener.stage("verifying the heuristic on harder inputs")
        verified = self._tester.verify_hard(self._heuristic)
        if isinstance(verified, Trial):
            self._drop(self._fallback, verified.status, verified.note, verified.rel_err)
            raise HeuristicFails(f"the heuristic {self._heuristic.key}: {verified.note}")
        even = Verdict(
            self._heuristic,
            _even(self._fallback.median_ms or 0.0, self._fallback.samples),
            verified,
        )
        fits = self._fits(self._fallback)
        finalists = self._finalists()
        while finalists:
            lead = self._race([trial for trial, _ in finalists])
            if lead is None:
                break
            verification = next(v for t, v in finalists if t.candidate == lead.candidate)
            try:
                found = self._compare(lead)
            except TrialError as error:
                self._drop(lead, error.status, error.note)
                finalists = [one for one in finalists if one[0] is not lead]
                continue
            if self._wins(lead, found) or not fits:
                return Verdict(lead.candidate, found, verification)
            return dataclasses.replace(even, comparison=_even(found.heuristic_ms, found.pairs))
        if not fits:
            raise NoVerdict(
                f"the heuristic {self._heuristic.key} needs {self._fallback.temp_mb:.4g} MiB of "
                f"temporary memory, and nothing that was tried fits max_temp_mb="
                f"{self._options.max_temp_mb:g}"
            )
        return even

    def _compare(self, lead: Trial) -> Comparison:
        """The comparison that counts: of a winner, a second one with programs compiled anew.

        An equal passes the first one time in forty, and a program that owes its
        speed to where it lies in memory passes it whenever it lies there.
        """
        chosen, pairs = lead.candidate, self._options.pairs
        self._listener.stage(f"comparing {chosen.key} with the heuristic in pairs")
        found = compare(self._tester, self._heuristic, chosen, pairs, seed=1)
        if not self._wins(lead, found):
            return found
        self._listener.stage(f"comparing {chosen.key} with the heuristic again, compiled anew")
        return compare(self._tester, self._heuristic, chosen, pairs, seed=99, anew=True)

    @property
    def _must_win(self) -> bool:
        """Whether only what is faster than the heuristic can be chosen."""
        return self._options.objective != "memory" and self._fits(self._fallback)

    def _fits(self, trial: Trial) -> bool:
        most = self._options.max_temp_mb
        return most is None or trial.temp_mb <= most

    def _wins(self, lead: Trial, found: Comparison) -> bool:
        if self._options.objective == "memory":
            return lead.temp_mb < self._fallback.temp_mb
        return found.low > 1.0 and found.ratio >= LEAST_GAIN

    def _finalists(self) -> list[tuple[Trial, Verification]]:
        """The most promising trials that also pass the harder inputs."""
        found: list[tuple[Trial, Verification]] = []
        for trial in self._promising():
            if len(found) == self._field.finalists:
                break
            best = _low(found[0][0] if found else trial)
            if self._must_win:
                best = min(best, _low(self._fallback))
            if self._options.objective != "memory" and _low(trial) > self._field.reach * best:
                break
            racing = [self._fallback, trial, *(other for other, _ in found)]
            if len(found) >= _LEAST_FINALISTS and self._race_s(racing) > _RACE_S:
                break
            self._listener.stage(f"verifying {trial.candidate.key} on harder inputs")
            verified = self._tester.verify_hard(trial.candidate)
            if isinstance(verified, Trial):
                self._drop(trial, verified.status, verified.note, verified.rel_err)
            else:
                found.append((trial, verified))
        return found

    def _race_s(self, racing: Sequence[Trial]) -> float:
        """Seconds that a race takes, about."""
        return self._options.rounds * sum(_ms(trial) for trial in racing) / 1e3

    def _promising(self) -> list[Trial]:
        timed = [
            t
            for t in self._trials
            if t.status == "ok" and t.candidate != self._heuristic and self._fits(t)
        ]
        if self._options.objective == "memory":
            timed = [t for t in timed if t.temp_mb < self._fallback.temp_mb]
            return sorted(timed, key=lambda t: (t.temp_mb, _ms(t)))
        return sorted(timed, key=_low)

    def _drop(self, trial: Trial, status: str, note: str, rel_err: float | None = None) -> None:
        """Notes that a trial that had passed failed after all."""
        now = dataclasses.replace(trial, status=status, note=note, rel_err=rel_err)
        self._trials[self._trials.index(trial)] = now
        self._failed(now)

    def _race(self, finalists: list[Trial]) -> Trial | None:
        """The one that wins the races against the heuristic; None if all fail, or surely lose."""
        self._listener.stage(f"racing {len(finalists)} finalists against the heuristic")
        if self._options.objective == "memory":
            least = min(t.temp_mb for t in finalists)
            finalists = [t for t in finalists if t.temp_mb <= least]
        running = list(finalists)
        standings = Standings(self._field)
        started = time.monotonic()
        for stage in range(self._field.stages):
            if not running or (stage and len(running) == 1):
                break
            extra = stage >= CALM.stages
            limit = min(_RACES_S, self._options.budget) if extra else _RACES_S
            if stage and time.monotonic() - started > limit:
                break
            try:
                found = self._run(running, stage)
            except TrialError as error:
                running = self._culprits_out(running, error)
                standings = Standings(self._field)
                continue
            standings.add(running, found)
            running = standings.left(running, stage + 1, self._must_win)
        if not running:
            return None
        return standings.best(running) if standings else running[0]

    def _run(self, running: Sequence[Trial], stage: int) -> np.ndarray:
        names = [self._heuristic, *(t.candidate for t in running)]
        return self._tester.race(names, self._options.rounds, seed=2 + stage)

    def _culprits_out(self, running: list[Trial], error: TrialError) -> list[Trial]:
        """Those that get through a race of their own."""
        if len(running) == 1:
            self._drop(running[0], error.status, error.note)
            return []
        kept = []
        for trial in running:
            try:
                self._run([trial], 0)
                kept.append(trial)
            except TrialError as again:
                self._drop(trial, again.status, again.note)
        return kept


def _ms(trial: Trial) -> float:
    return trial.median_ms or 0.0


def _low(trial: Trial) -> float:
    return trial.q1_ms or _ms(trial)


def front(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that none beats in both time and temporary memory, the fastest first."""
    timed = [t for t in trials if t.status == "ok" and t.median_ms is not None]
    found: list[Trial] = []
    for trial in sorted(timed, key=lambda t: (_ms(t), t.temp_mb)):
        if not found or trial.temp_mb < found[-1].temp_mb:
            found.append(trial)
    return found


def _even(median_ms: float, samples: int) -> Comparison:
    """The heuristic compared with itself."""
    return Comparison(1.0, 1.0, 1.0, samples, median_ms, median_ms)
