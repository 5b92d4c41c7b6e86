"""Races of finalists: how many take part, who drops out, and who leads in the end.

On a calm machine finalists are compared round by round, and those surely behind
drop out; so do those surely slower than the heuristic, which it would win against. On one that is busy with something else, what disturbs a program makes
it slower, never faster, and hits the programs that use more processors harder; so
there the fastest tenth of each one's samples counts, of more samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..cache.key import Candidate
from ..cache.record import Trial
from . import measure

#: The machine is noisy if third quartiles are typically this much above first ones.
_NOISY_SPREAD = 1.1
#: A candidate this much slower than the lead, by the interval's near end, drops out.
_BEHIND = 1.02
#: Within the noise of the lead: no slower for sure, and no slower than this by estimate.
_NOISE = 1.02
#: On a noisy machine a candidate is as fast as its samples at this quantile.
_UNDISTURBED = 0.1


@dataclasses.dataclass(frozen=True)
class Field:
    """Which candidates go on from the search to the races, and how they race.

    Attributes:
        finalists: At most so many…
        reach: …and only those whose first quartile is within this factor of the
            best: what disturbs a program makes it slower, never faster.
        stages: Races at most, each of some rounds.
        patience: Candidates drop out each time that so many races are over.
        noisy: How they are judged.
    """

    finalists: int
    reach: float
    stages: int
    patience: int
    noisy: bool


CALM = Field(finalists=6, reach=1.3, stages=3, patience=1, noisy=False)
#: Where the search was disturbed, its times rank badly, and the races decide.
NOISY = Field(finalists=12, reach=2.0, stages=12, patience=3, noisy=True)


def field_of(trials: Sequence[Trial]) -> Field:
    """The field that suits the machine, by how far apart the quartiles of trials lie."""
    spreads = [t.q3_ms / t.q1_ms for t in trials if t.status == "ok" and t.q1_ms and t.q3_ms]
    return NOISY if spreads and float(np.median(spreads)) > _NOISY_SPREAD else CALM


class Standings:
    """The times of finalists so far.

    Args:
        field: How they are judged.
    """

    def __init__(self, field: Field) -> None:
        self._field = field
        #: Of each the rounds that it took part in: the heuristic's time and its own.
        self._times: dict[Candidate, np.ndarray] = {}

    def __bool__(self) -> bool:
        return bool(self._times)

    def add(self, running: Sequence[Trial], times: np.ndarray) -> None:
        """Adds the rounds of a race, [rounds, 1 + running], the heuristic's times first."""
        for i, trial in enumerate(running, 1):
            old = self._times.get(trial.candidate, np.empty((0, 2)))
            self._times[trial.candidate] = np.concatenate([old, times[:, [0, i]]])

    def left(self, running: Sequence[Trial], stages: int, must_win: bool = False) -> list[Trial]:
        """Those that race on after so many races; none that loses, if they must win."""
        if stages % self._field.patience:
            return list(running)
        if must_win:
            running = [trial for trial in running if not self._loses(trial)]
        if not running:
            return []
        if self._field.noisy:
            # Whoever leads after a few rounds is likelier lucky than good: the half
            # that is behind goes, however surely.
            best = sorted(running, key=self._score)
            return best[: max(2, -(-len(best) // 2))]
        lead = min(running, key=self._score)
        # Of two that took part in the same rounds, round by round.
        return [t for t in running if t is lead or self._against(lead, t)[2] * _BEHIND >= 1.0]

    def best(self, running: Sequence[Trial]) -> Trial:
        """Of those within the noise of the lead, the one with the least temporary memory."""
        lead = min(running, key=self._score)
        within = [t for t in running if t is not lead and self._as_fast(lead, t)]
        # The lead comes first in the list, and wins where none needs less.
        return min([lead, *within], key=lambda t: t.temp_mb)

    def _score(self, trial: Trial) -> float:
        """The less, the faster."""
        base, own = self._times[trial.candidate].T
        if self._field.noisy:
            return float(np.quantile(own, _UNDISTURBED))
        return float(np.median(own / base))

    def _loses(self, trial: Trial) -> bool:
        """Whether it is surely slower than the heuristic; by more than noise, if it is noisy."""
        base, own = self._times[trial.candidate].T
        if self._field.noisy:
            fastest = float(np.quantile(base, _UNDISTURBED))
            return self._score(trial) > _NOISY_SPREAD * fastest
        return measure.paired_ratio(base, own)[2] < 1.0

    def _as_fast(self, lead: Trial, trial: Trial) -> bool:
        if self._field.noisy:
            return self._score(trial) <= _NOISE * self._score(lead)
        ratio, _, high = self._against(lead, trial)
        return high >= 1.0 and ratio * _NOISE >= 1.0

    def _against(self, lead: Trial, trial: Trial) -> tuple[float, float, float]:
        """How many times faster than the lead a trial is, relative to the heuristic."""
        own, other = (self._times[t.candidate] for t in (lead, trial))
        return measure.paired_ratio(own[:, 1] / own[:, 0], other[:, 1] / other[:, 0])
