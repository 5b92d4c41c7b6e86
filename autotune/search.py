"""What to try next: Optuna proposes over implementation and parameters.

The heuristic comes first, then seeds, then Optuna; a space small enough is
searched whole. No candidate is proposed twice.

Optuna is imported when a study is made: workers, which try candidates, need none.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..cache.errors import StorageError, UnknownNameError
from ..cache.key import Candidate, Device, Problem, Value
from ..cache.record import Trial
from ..kernels.op import Op

if TYPE_CHECKING:
    import optuna

#: Proposals in a row that were measured before, after which one is drawn at random.
_PATIENCE = 20
_STORAGE_KINDS = "a database URL such as sqlite:///tuning.db, or the path of a journal file"


def candidates(
    op: Op, problem: Problem, device: Device, only: Sequence[str] = ()
) -> list[Candidate]:
    """Every candidate for a problem that is supported and feasible.

    Args:
        op: The op.
        problem: The problem.
        device: The device.
        only: Names of the implementations to consider; all usable ones if empty.

    Raises:
        UnknownNameError: ``only`` names no implementation.
    """
    usable = op.usable(problem, device)
    require_names(op, only)
    if only:
        named = {name: op.implementations[name] for name in only}
        usable = {n: one for n, one in named.items() if one.supports(problem, device) is None}
    return [
        Candidate(name, config)
        for name, one in usable.items()
        for config in one.space(problem, device)
    ]


def require_names(op: Op, only: Sequence[str]) -> None:
    """Makes sure that an op has these implementations.

    Raises:
        UnknownNameError: It lacks one of them.
    """
    for name in only:
        if name not in op.implementations:
            raise UnknownNameError(
                f"{op.name} has no implementation {name!r} to tune; "
                f"it has: {', '.join(sorted(op.implementations))}"
            )


class Search:
    """Proposes candidates of one problem, and learns from their trials.

    Args:
        pool: All candidates, without duplicates.
        seeds: To be proposed first, in order; those not in the pool are left out,
            but for the first, which is the heuristic and always measured.
        limit: Proposals at most.
        seed: Of the sampler.
        study: The Optuna study; one in memory by default.
        known: Trials that need not be made again. Each counts as one of the
            ``limit``, but for those of candidates outside the pool.
        objective: What to look for; see ``Options``.
    """

    def __init__(
        self,
        pool: Sequence[Candidate],
        seeds: Sequence[Candidate],
        limit: int,
        seed: int = 0,
        study: optuna.Study | None = None,
        known: Sequence[Trial] = (),
        objective: str = "time",
    ) -> None:
        self._pool = {candidate.key: candidate for candidate in pool}
        heuristic = seeds[0]
        self._first = [heuristic, *(s for s in seeds[1:] if s.key in self._pool)]
        self._first = list({c.key: c for c in self._first}.values())
        everything = len(self._pool) + (heuristic.key not in self._pool)
        self.total = min(max(1, limit), everything)
        self._whole = everything <= limit
        self._random = random.Random(seed)
        self._objective = objective
        self._study = study or new_study("in memory", seed, objective=objective)
        self._choices = _choices(pool)
        #: Values of what was told, and None for what failed or is under way.
        self._done: dict[str, list[float] | None] = {}
        self._asked: dict[str, optuna.trial.Trial] = {}
        #: Those of ``known`` that count.
        self.known: list[Trial] = []
        for trial in known:
            self._learn(trial, heuristic)

    def _learn(self, trial: Trial, heuristic: Candidate) -> None:
        key = trial.candidate.key
        if key in self._done or (key not in self._pool and key != heuristic.key):
            return
        self.known.append(trial)
        self._enqueue(trial.candidate)
        self.tell(trial.candidate, trial)

    def __iter__(self) -> Iterator[Candidate]:
        """Candidates to try; the next may be asked for before the last was told."""
        for candidate in self._first[: self.total]:
            if candidate.key not in self._done:
                self._enqueue(candidate)
                self._done[candidate.key] = None
                yield candidate
        if self._whole:
            rest = [c for key, c in self._pool.items() if key not in self._done]
            self._random.shuffle(rest)
            yield from rest
            return
        while len(self._done) < self.total:
            candidate = self._propose()
            self._done[candidate.key] = None
            yield candidate

    def tell(self, candidate: Candidate, trial: Trial) -> None:
        """Reports the outcome of a proposed candidate."""
        values = self._values(trial)
        self._done[candidate.key] = values
        asked = self._asked.pop(candidate.key, None)
        if asked is not None:
            asked.set_user_attr("status", trial.status)
            self._tell(asked, values)

    def _values(self, trial: Trial) -> list[float] | None:
        """What Optuna minimises, None for a trial that failed."""
        if trial.status != "ok" or trial.median_ms is None:
            return None
        return {
            "time": [trial.median_ms],
            "memory": [trial.temp_mb],
            "pareto": [trial.median_ms, trial.temp_mb],
        }[self._objective]

    def _tell(self, asked: optuna.trial.Trial, values: list[float] | None) -> None:
        if values is None:
            self._fail(asked)
        else:
            self._study.tell(asked, values)

    def _fail(self, asked: optuna.trial.Trial) -> None:
        from optuna.trial import TrialState

        self._study.tell(asked, state=TrialState.FAIL)

    def _enqueue(self, candidate: Candidate) -> None:
        """Has Optuna count a candidate that it did not propose itself."""
        if candidate.key not in self._pool:
            return  # a heuristic outside the space is measured, but teaches nothing
        self._study.enqueue_trial(_as_params(candidate))
        self._asked[candidate.key] = self._ask()[1]

    def _ask(self) -> tuple[Candidate, optuna.trial.Trial]:
        asked = self._study.ask()
        name = asked.suggest_categorical("implementation", list(self._choices))
        config: dict[str, Any] = {
            parameter: asked.suggest_categorical(f"{name}.{parameter}", values)
            for parameter, values in self._choices[name].items()
        }
        return Candidate(name, config), asked

    def _propose(self) -> Candidate:
        for _ in range(_PATIENCE):
            candidate, asked = self._ask()
            if candidate.key not in self._pool:  # a constraint of the space forbids it
                self._fail(asked)
            elif candidate.key in self._done:
                self._tell(asked, self._done[candidate.key])
            else:
                self._asked[candidate.key] = asked
                return candidate
        fresh = self._random.choice([c for key, c in self._pool.items() if key not in self._done])
        self._enqueue(fresh)
        return fresh


def _choices(pool: Sequence[Candidate]) -> dict[str, dict[str, list[Value]]]:
    """For each implementation the values that each parameter takes in the pool."""
    found: dict[str, dict[str, list[Value]]] = {}
    for candidate in pool:
        parameters = found.setdefault(candidate.implementation, {})
        for name, value in candidate.config.items():
            values = parameters.setdefault(name, [])
            if value not in values:
                values.append(value)
    return found


def _as_params(candidate: Candidate) -> dict[str, Value]:
    inside = {f"{candidate.implementation}.{n}": v for n, v in candidate.config.items()}
    return {"implementation": candidate.implementation, **inside}


def new_study(
    name: str, seed: int = 0, storage: str | None = None, objective: str = "time"
) -> optuna.Study:
    """An Optuna study for one problem.

    Args:
        name: Shown by dashboards.
        seed: Of the TPE sampler.
        storage: None for memory, a database URL, or the path of a journal file.
        objective: What is minimised: one figure, or for ``"pareto"`` two.

    Raises:
        StorageError: The storage cannot be opened.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    logging.getLogger("optuna").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Grouping, which conditional parameters need, is marked experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
    backend: optuna.storages.BaseStorage | str | None = storage
    try:
        if storage is not None and "://" not in storage:
            journal = JournalFileBackend(storage)
            backend = optuna.storages.JournalStorage(journal)
        return optuna.create_study(
            study_name=None if storage is None else name,
            storage=backend,
            sampler=sampler,
            directions=["minimize"] * (2 if objective == "pareto" else 1),
        )
    except Exception as error:  # every driver has its own family
        raise StorageError(
            f"storage={storage!r} cannot be opened ({type(error).__name__}: {error}); "
            f"give {_STORAGE_KINDS}"
        ) from error
