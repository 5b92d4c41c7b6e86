"""Tuning: for each problem, search, verify, compare with the heuristic, publish.

A run that is stopped at any moment loses the problem under way; every problem
before it is on disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._version import __version__
from ..cache import store
from ..cache.choice import rank
from ..cache.errors import ShapetuneError, UnsupportedError
from ..cache.key import Candidate, Device, Problem
from ..cache.record import Comparison, Provenance, Record, Trial, Verification
from ..cache.record_set import RecordSet
from ..kernels import default
from ..kernels.decision import versions
from ..kernels.device import current_device
from ..kernels.op import Op, get_op
from .aot import Guard, require_compiler
from .measure import Effort
from .search import Search, candidates, new_study
from .targets import target
from .trial import Bench, best_of

#: Candidates that go on from the search to the races against the heuristic.
FINALISTS = 3
_SUMMARY = re.compile(r"trials=(\d+) budget=([\d.e+]+)s seed=\d+ only=(\S+)")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to tune.

    Attributes:
        trials: Candidates tried for a problem, at most.
        budget: Seconds of search for a problem, about; the comparison comes on top.
        again: Tune also what a fresh record has already.
        implementations: Names to consider; all usable ones if empty.
        seed: Of the inputs and of the search.
        storage: Where Optuna keeps its studies; None for memory.
        target: Key of the target to compile each candidate for, apart from the
            GPU, before it is tried; None to try it at once.
        pairs: Paired samples in the final comparison.
        rounds: Samples of each finalist when one of them is picked.
        effort: How long to time a trial.
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

    @property
    def summary(self) -> str:
        """How thorough a search is, as a record keeps it."""
        only = ",".join(self.implementations) or "all"
        return f"trials={self.trials} budget={self.budget:g}s seed={self.seed} only={only}"

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ShapetuneError(f"trials must be at least 1, got {self.trials}")
        if not self.budget > 0:
            raise ShapetuneError(f"budget must be more than 0 seconds, got {self.budget}")
        if not 0 <= self.seed < 2**32:
            raise ShapetuneError(f"seed must be between 0 and 2^32 - 1, got {self.seed}")
        if self.pairs < 6:
            raise ShapetuneError(f"pairs must be at least 6 for a 95% interval, got {self.pairs}")


class Listener:
    """Hears how a run goes on; a display overrides what it shows."""

    def run_started(self, problems: Sequence[Problem], options: Options) -> None:
        """A run over these problems begins."""

    def problem_started(self, index: int, problem: Problem, total: int) -> None:
        """The search for a problem begins; at most ``total`` trials."""

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


def tune(
    op: str,
    problems: Problem | Mapping[str, Any] | Iterable[Problem | Mapping[str, Any]],
    *,
    cache: str | Path | None = None,
    options: Options | None = None,
    listener: Listener | None = None,
) -> list[Record]:
    """Tunes problems on this device and publishes a record of each as it is made.

    Args:
        op: Name of the op.
        problems: A problem, or several; a mapping stands for ``Problem.make`` of
            its fields.
        cache: Folder to write to; the first place of ``SHAPETUNE_CACHE`` if None.
        options: How to tune.
        listener: Hears how it goes.

    Returns:
        The records, in the order of the problems. A problem whose heuristic
        itself fails has none; the listener hears why.

    Raises:
        UnknownNameError: No such op or implementation.
        TargetError: No such target, or no compiler for it.
        ProblemError: A problem's field is out of range.
        CacheError: The folder cannot be written.

    Example:
        >>> shapetune.tune("attention", {"seq": 2048, "dim": 64, "causal": True})
    """
    found = get_op(op)
    options = options or Options()
    listener = listener or Listener()
    planned = [_problem(op, one) for one in _several(problems)]
    place = Path(cache).expanduser() if cache is not None else store.default_places()[0]
    device = current_device()
    store.check_writable(place, device)
    for name in options.implementations:
        found.implementation(name)
    if options.target is not None:
        target(options.target)
        require_compiler()
    listener.run_started(planned, options)
    known = store.load([place], device)
    records = []
    try:
        for index, problem in enumerate(planned):
            record = None if options.again else _known(found, known, device, problem, options)
            if record is None:
                record = _tune_one(found, problem, device, known, options, listener, index)
                if record is None:
                    continue
                store.publish(place, [record])
                known |= RecordSet([record.to_bytes()])
                listener.problem_done(index, record, True)
            else:
                listener.problem_done(index, record, False)
            records.append(record)
    finally:
        if place in default.state().places:
            default.reload()
    return records


def _several(problems: Any) -> list[Any]:
    return [problems] if isinstance(problems, Problem | Mapping) else list(problems)


def _problem(op: str, one: Problem | Mapping[str, Any]) -> Problem:
    if isinstance(one, Mapping):
        try:
            one = Problem.make(op, **one)
        except TypeError as error:
            raise ShapetuneError(f"a problem of {op}: {error}") from None
    if one.op != op:
        raise ShapetuneError(f"the problem {one.label} is not one of op {op!r}")
    return get_op(op).canonical(one)


def _known(
    op: Op, known: RecordSet, device: Device, problem: Problem, options: Options
) -> Record | None:
    """The record of a search at least as thorough, made with the versions in use."""
    for record in rank(known.exact(device, problem), versions(op), "strict"):
        found = _SUMMARY.match(record.provenance.settings)
        if found is None:
            continue
        only = {"all", ",".join(options.implementations) or "all"}
        thorough = int(found[1]) >= options.trials and float(found[2]) >= options.budget
        if thorough and found[3] in only:
            return record
    return None


def _tune_one(
    op: Op,
    problem: Problem,
    device: Device,
    known: RecordSet,
    options: Options,
    listener: Listener,
    index: int,
) -> Record | None:
    started = time.perf_counter()
    heuristic = op.heuristic(problem, device)
    seeds = [heuristic, *_seeds(op, known, device, problem)]
    pool = candidates(op, problem, device, options.implementations)
    if options.implementations and not pool:
        raise UnsupportedError(
            f"none of {', '.join(options.implementations)} supports {problem.label} here: "
            + "; ".join(
                str(op.implementation(n).supports(problem, device)) for n in options.implementations
            )
        )
    name = f"{problem.key} on {device.key} at {time.time():.0f}"
    study = new_study(name, options.seed, options.storage)
    search = Search(pool, seeds, options.trials, options.seed, study)
    listener.problem_started(index, problem, search.total)
    bench = Bench(op, problem, device, options.seed, options.effort)
    guard = Guard(target(options.target)) if options.target else None
    try:
        trials = _search(search, bench, options.budget, listener, guard)
    finally:
        if guard is not None:
            guard.close()
    if trials[0].status != "ok":
        listener.problem_failed(
            index, problem, f"the heuristic {heuristic.key}: {trials[0].status}, {trials[0].note}"
        )
        return None
    outcome = _decide(bench, heuristic, trials, options, listener)
    if isinstance(outcome, Trial):
        listener.problem_failed(index, problem, f"the heuristic {heuristic.key}: {outcome.note}")
        return None
    chosen, comparison, verification = outcome
    seconds = time.perf_counter() - started
    return Record(
        problem=problem,
        device=device,
        chosen=chosen,
        heuristic=heuristic,
        comparison=comparison,
        verification=verification,
        provenance=_provenance(op, chosen, heuristic, seconds, options),
        trials=tuple(trials),
    )


def _seeds(op: Op, known: RecordSet, device: Device, problem: Problem) -> list[Candidate]:
    """Every implementation's default, then the winners of problems of the same family."""
    seeds = [
        Candidate(name, one.default_config(problem, device))
        for name, one in op.usable(problem, device).items()
    ]
    for record in known.family(device, problem):
        one = op.implementations.get(record.chosen.implementation)
        if one is not None and one.supports(problem, device) is None:
            config = one.space(problem, device).fit(record.chosen.config)
            seeds.append(Candidate(record.chosen.implementation, config))
    return seeds


def _search(
    search: Search, bench: Bench, budget: float, listener: Listener, guard: Guard | None
) -> list[Trial]:
    trials: list[Trial] = []
    deadline = time.perf_counter() + budget
    for candidate in search:
        listener.trial_started(candidate)
        best = best_of(trials)
        failed = guard(bench.problem, candidate) if guard is not None else None
        trial = failed or bench.trial(candidate, best.median_ms if best else None)
        search.tell(candidate, trial)
        trials.append(trial)
        listener.trial_done(trial, best_of(trials))
        if time.perf_counter() > deadline:
            break
    return trials


def _decide(
    bench: Bench,
    heuristic: Candidate,
    trials: list[Trial],
    options: Options,
    listener: Listener,
) -> tuple[Candidate, Comparison, Verification] | Trial:
    """The winner against the heuristic, or the heuristic; a Trial if that one is wrong.

    Finalists are picked by one set of races and judged by another, so that luck
    in the first does not count in the second.
    """
    listener.stage("verifying the heuristic on harder inputs")
    fallback = bench.verify_hard(heuristic)
    if isinstance(fallback, Trial):
        return fallback
    timed = sorted(
        (t for t in trials if t.status == "ok" and t.candidate != heuristic),
        key=lambda t: t.median_ms or 0.0,
    )
    finalists = []
    for trial in timed:
        listener.stage(f"verifying {trial.candidate.key} on harder inputs")
        verified = bench.verify_hard(trial.candidate)
        if isinstance(verified, Trial):
            trials[trials.index(trial)] = dataclasses.replace(
                trial, status=verified.status, note=verified.note, rel_err=verified.rel_err
            )
            continue
        finalists.append((trial.candidate, verified))
        if len(finalists) == FINALISTS:
            break
    if not finalists:
        return heuristic, _even(trials[0].median_ms or 0.0, trials[0].samples), fallback
    listener.stage(f"racing {len(finalists)} finalists against the heuristic")
    names = [heuristic, *(candidate for candidate, _ in finalists)]
    times = bench.race(names, options.rounds)
    lead = int(np.argmin(np.median(times[:, 1:] / times[:, :1], axis=0)))
    chosen, verification = finalists[lead]
    listener.stage(f"comparing {chosen.key} with the heuristic in pairs")
    comparison = bench.compare(heuristic, chosen, options.pairs)
    if comparison.low <= 1.0:
        return heuristic, _even(comparison.heuristic_ms, comparison.pairs), fallback
    return chosen, comparison, verification


def _even(median_ms: float, samples: int) -> Comparison:
    """The heuristic compared with itself."""
    return Comparison(1.0, 1.0, 1.0, samples, median_ms, median_ms)


def _provenance(
    op: Op, chosen: Candidate, heuristic: Candidate, seconds: float, options: Options
) -> Provenance:
    return Provenance(
        shapetune=__version__,
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        chosen_version=op.implementation(chosen.implementation).version,
        heuristic_version=op.implementation(heuristic.implementation).version,
        host=hashlib.blake2b(platform.node().encode(), digest_size=6).hexdigest(),
        time=round(time.time(), 3),
        seconds=round(seconds, 3),
        settings=options.summary,
    )
