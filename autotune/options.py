"""How a person asks for a tuning run, and how they hear of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..cache.errors import ShapetuneError
from ..cache.key import Candidate, Problem
from ..cache.record import Record, Trial
from .measure import Effort
from .process import Limits

OBJECTIVES = ("time", "memory", "pareto")
ISOLATIONS = ("auto", "process", "none")
_SETTING = re.compile(r"(\w+)=(\S+)")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to tune.

    Attributes:
        trials: Candidates tried for a problem, at most.
        budget: Seconds of search for a problem, about; the comparison comes on top.
        again: Tune also what a fresh record has already, and measure all anew.
        implementations: Names to consider; all usable ones if empty.
        seed: Of the inputs and of the search.
        storage: Where Optuna keeps its studies; None for memory.
        target: Key of the target to compile each candidate for, apart from the
            GPU, before it is tried; None to try it at once.
        pairs: Paired samples in the final comparison.
        rounds: Samples of each finalist when one of them is picked.
        effort: How long to time a trial.
        objective: ``"time"``: the fastest; of those within the noise of it, the one
            with the least temporary memory. ``"memory"``: the least temporary
            memory, at whatever speed. ``"pareto"``: search for both, choose the
            fastest, and show what less memory would cost.
        max_temp_mb: Candidates that need more temporary memory than this many MiB
            are neither run nor chosen.
        isolation: ``"process"``: trials happen in a worker process; ``"none"``: in
            this one, where a candidate can take the run along; ``"auto"``: in a
            worker unless an implementation is registered that it cannot import.
        modules: Modules that register implementations, imported here and in workers;
            those where the implementations' functions are defined come by themselves.
        limits: What a trial may take before its worker is killed.
        retry_quarantined: Try also what crashed, hung or was wrong before.
        compile_ahead: Compile the next candidate in another process while one is
            timed; on GPUs alone if None, since on a CPU it would disturb the timing.

    Raises:
        ShapetuneError: A value is of a wrong type or out of range.
    """

    trials: int = 48
    budget: float = 60.0
    again: bool = False
    implementations: tuple[str, ...] = ()
    seed: int = 0
    storage: str | None = None
    target: str | None = None
    pairs: int = 15
    rounds: int = 7
    effort: Effort = dataclasses.field(default_factory=Effort)
    objective: str = "time"
    max_temp_mb: float | None = None
    isolation: str = "auto"
    modules: tuple[str, ...] = ()
    limits: Limits = dataclasses.field(default_factory=Limits)
    retry_quarantined: bool = False
    compile_ahead: bool | None = None

    @property
    def summary(self) -> str:
        """How thorough a search is, as a record keeps it."""
        only = ",".join(self.implementations) or "all"
        most = "any" if self.max_temp_mb is None else f"{self.max_temp_mb:g}"
        return (
            f"trials={self.trials} budget={self.budget:g}s seed={self.seed} only={only} "
            f"objective={self.objective} max_temp_mb={most}"
        )

    def __post_init__(self) -> None:
        _check_number("trials", self.trials, int, lambda n: n >= 1, "at least 1")
        _check_number("budget", self.budget, float, lambda n: n > 0, "more than 0 seconds")
        _check_number("seed", self.seed, int, lambda n: 0 <= n < 2**32, "between 0 and 2^32 - 1")
        _check_number("pairs", self.pairs, int, lambda n: n >= 6, "at least 6 for a 95% interval")
        _check_number("rounds", self.rounds, int, lambda n: n >= 1, "at least 1")
        if self.max_temp_mb is not None:
            _check_number("max_temp_mb", self.max_temp_mb, float, lambda n: n >= 0, "0 or more MiB")
        for name, allowed in (("objective", OBJECTIVES), ("isolation", ISOLATIONS)):
            if getattr(self, name) not in allowed:
                raise ShapetuneError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        for name in ("implementations", "modules"):
            words = getattr(self, name)
            if not isinstance(words, list | tuple) or not all(isinstance(w, str) for w in words):
                raise ShapetuneError(f"{name} must be a tuple of names, got {words!r}")
            object.__setattr__(self, name, tuple(words))
        for name in ("storage", "target"):
            if not isinstance(getattr(self, name), str | None):
                raise ShapetuneError(f"{name} must be a string, got {getattr(self, name)!r}")
        for name, kind in (("effort", Effort), ("limits", Limits)):
            if not isinstance(getattr(self, name), kind):
                raise ShapetuneError(
                    f"{name} must be {kind.__name__}(...), got {getattr(self, name)!r}"
                )


def _check_number(
    name: str, value: Any, kind: type, holds: Callable[[Any], bool], wanted: str
) -> None:
    kinds: tuple[type, ...] = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not holds(value):
        what = "an integer" if kind is int else "a number"
        raise ShapetuneError(f"{name} must be {what}, {wanted}, got {value!r}")


def covers(settings: str, options: Options) -> bool:
    """Whether a search with these settings, a ``summary``, was as thorough as asked for."""
    found = dict(_SETTING.findall(settings))
    asked = dict(_SETTING.findall(options.summary))
    try:
        enough = int(found["trials"]) >= options.trials
        enough &= float(found["budget"].rstrip("s")) >= options.budget
    except (KeyError, ValueError):
        return False
    same = all(
        found.get(name, default) == asked[name]
        for name, default in (("objective", "time"), ("max_temp_mb", "any"))
    )
    return enough and same and found.get("only") in ("all", asked["only"])


class Listener:
    """Hears how a run goes on; a display overrides what it shows."""

    def run_started(self, problems: Sequence[Problem], options: Options) -> None:
        """A run over these problems begins."""

    def problem_started(self, index: int, problem: Problem, total: int) -> None:
        """The search for a problem begins; at most ``total`` trials."""

    def trials_known(self, trials: Sequence[Trial]) -> None:
        """These were measured before, or are quarantined, and are not tried again."""

    def trial_started(self, candidate: Candidate) -> None:
        """A candidate is about to be tried."""

    def trial_done(self, trial: Trial, best: Trial | None) -> None:
        """It was; ``best`` is the best so far."""

    def stage(self, text: str) -> None:
        """Something else is under way: verifying, comparing."""

    def problem_done(self, index: int, record: Record, fresh: bool) -> None:
        """A problem has its record; ``fresh`` is False if it had it before."""

    def problem_failed(self, index: int, problem: Problem, reason: str) -> None:
        """A problem could not be tuned."""
