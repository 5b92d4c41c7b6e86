"""Tuning: for each problem, search, verify, compare with the heuristic, publish.

A run that is stopped at any moment loses the trial under way; every problem
before it is on disk, and so are the trials of the problem at hand.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cache import quarantine, store
from ..cache.choice import rank
from ..cache.errors import ShapetuneError, UnsupportedError
from ..cache.key import Candidate, Device, Problem
from ..cache.places import as_place, local
from ..cache.record import Provenance, Record, Trial
from ..cache.record_set import RecordSet
from ..kernels import default
from ..kernels.decision import versions
from ..kernels.device import current_device
from ..kernels.op import Op, get_op
from .aot import Guard, require_compiler
from .final import HeuristicFails, NoVerdict, Verdict, decide
from .knowledge import Knowledge, origin
from .options import Listener, Options, covers
from .outcome import TrialError, best_of
from .search import Search, candidates, new_study, require_names
from .targets import target
from .testers import Testers
from .trial import Tester

__all__ = ["Listener", "Options", "tune"]


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
        IsolationError: The worker process that trials run in does not start.

    Example:
        >>> shapetune.tune("attention", {"seq": 2048, "dim": 64, "causal": True})
    """
    options = _of_type("options", options, Options)
    _import(options.modules)
    found = get_op(op)
    listener = _of_type("listener", listener, Listener)
    planned = [_problem(op, one) for one in _several(problems)]
    place = local(as_place(cache)) if cache is not None else store.default_places()[0]
    device = current_device()
    store.check_writable(place, device)
    require_names(found, options.implementations)
    if options.target is not None:
        target(options.target)
        require_compiler()
    listener.run_started(planned, options)
    run = _Run(found, device, place, options, listener)
    try:
        return [r for i, p in enumerate(planned) if (r := run.record(i, p)) is not None]
    finally:
        run.close()
        if place in default.state().places:
            default.reload()


def _import(modules: Sequence[str]) -> None:
    """Imports the modules that register implementations; a worker does as much."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a person's module raises
            raise ShapetuneError(
                f"modules holds {name!r}, which cannot be imported "
                f"({type(error).__name__}: {error}); name modules as import does, "
                "and put their folder on PYTHONPATH"
            ) from error


def _of_type(name: str, value: Any, kind: type) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ShapetuneError(f"{name} must be {kind.__name__}(...), got {value!r}")
    return value


def _several(problems: Any) -> list[Any]:
    if isinstance(problems, Problem | Mapping):
        return [problems]
    if isinstance(problems, str | bytes) or not isinstance(problems, Iterable):
        raise ShapetuneError(
            "problems must be a Problem, a mapping of its fields such as "
            f'{{"seq": 2048, "dim": 64}}, or a list of these, got {problems!r}'
        )
    return list(problems)


def _problem(op: str, one: Problem | Mapping[str, Any]) -> Problem:
    if isinstance(one, Mapping):
        try:
            one = Problem.make(op, **one)
        except TypeError as error:
            raise ShapetuneError(f"a problem of {op}: {error}") from None
    if not isinstance(one, Problem):
        raise ShapetuneError(f"problems holds {one!r}, which is neither a Problem nor its fields")
    if one.op != op:
        raise ShapetuneError(f"the problem {one.label} is not one of op {op!r}")
    return get_op(op).canonical(one)


@dataclasses.dataclass
class _Clock:
    """Seconds of a problem that its trials do not account for."""

    started: float = dataclasses.field(default_factory=time.perf_counter)
    search_s: float = 0.0
    compare_s: float = 0.0


class _Run:
    """What the problems of a run share."""

    def __init__(
        self, op: Op, device: Device, place: Path, options: Options, listener: Listener
    ) -> None:
        self._op = op
        self._device = device
        self._place = place
        self._options = options
        self._listener = listener
        self._known = store.load([place], device)
        self._versions = versions(op)
        self._testers = Testers(op, device, options)
        self._guard = Guard(target(options.target)) if options.target else None

    def close(self) -> None:
        """Ends the processes that it started."""
        self._testers.close()
        if self._guard is not None:
            self._guard.close()

    def record(self, index: int, problem: Problem) -> Record | None:
        """The record of a problem, from the cache or from a search; None if it has none."""
        if not self._options.again:
            before = self._from_before(problem)
            if before is not None:
                self._listener.problem_done(index, before, False)
                return before
        try:
            record = self._tune(index, problem)
        except (NoVerdict, TrialError) as error:
            self._listener.problem_failed(index, problem, str(error))
            return None
        self._known |= RecordSet([record.to_bytes()])
        self._listener.problem_done(index, record, True)
        return record

    def _from_before(self, problem: Problem) -> Record | None:
        """The record of a search at least as thorough, made with the versions in use.

        None also where candidates are quarantined that are to be tried again.
        """
        known = self._known
        if self._options.retry_quarantined and quarantine.in_force(
            known, self._device, problem, self._versions
        ):
            return None
        for record in rank(known.exact(self._device, problem), self._versions, "strict"):
            if covers(record.provenance.settings, self._options):
                return record
        return None

    def _tune(self, index: int, problem: Problem) -> Record:
        clock = _Clock()
        heuristic = self._op.heuristic(problem, self._device)
        pool = self._pool(problem)
        knowledge = Knowledge(
            self._place, self._known, self._device, problem, self._versions, self._options
        )
        search = self._new_search(problem, pool, heuristic, knowledge)
        self._listener.problem_started(index, problem, search.total)
        stand_ins = self._stand_ins(problem, heuristic, pool)
        needed = {c.implementation for c in [*pool, heuristic, *stand_ins]}
        tester = self._testers.of(problem, needed)
        known = search.known
        self._listener.trials_known(known)
        made = self._search(search, tester, known, knowledge, clock)
        trials = [*known, *made]
        began = time.perf_counter()
        base, verdict = self._verdict([heuristic, *stand_ins], tester, trials, knowledge)
        clock.compare_s = time.perf_counter() - began
        record = self._as_record(problem, base, verdict, trials, made, clock)
        store.publish(self._place, [record])
        knowledge.discard()
        return record

    def _stand_ins(
        self, problem: Problem, heuristic: Candidate, pool: list[Candidate]
    ) -> list[Candidate]:
        """What takes the heuristic's place if that fails: the baseline's default, then others'."""
        names = {c.implementation for c in pool} | {self._op.baseline}
        names.discard(heuristic.implementation)
        found = self._op.defaults(problem, self._device)
        return [one for one in found if one.implementation in names]

    def _verdict(
        self, bases: list[Candidate], tester: Tester, trials: list[Trial], knowledge: Knowledge
    ) -> tuple[Candidate, Verdict]:
        """The verdict, and what it is against: the first of ``bases`` that is right.

        Raises:
            NoVerdict: None is, or what is right is too large.
        """
        reasons: list[NoVerdict] = []
        for base in bases:
            if reasons:
                self._listener.stage(f"{reasons[-1]}; {base.key} takes its place")
            first = next((t for t in trials if t.candidate == base), None)
            if first is None or first.status == "screened":
                # However slow: what the others are measured against.
                first = tester.trial(base, None)
                knowledge.keep(first)
            trials[:] = [first, *(t for t in trials if t.candidate != base)]
            if first.status != "ok":
                hint = "; --retry-quarantined tries again" if "quarantined" in first.note else ""
                why = f"the heuristic {base.key}: {first.status}, {first.note}{hint}"
                reasons.append(HeuristicFails(why))
                continue
            try:
                found = decide(tester, base, trials, self._options, self._listener, knowledge.keep)
            except HeuristicFails as error:
                reasons.append(error)
            else:
                return base, found
        raise reasons[0]

    def _pool(self, problem: Problem) -> list[Candidate]:
        only = self._options.implementations
        pool = candidates(self._op, problem, self._device, only)
        if only and not pool:
            raise UnsupportedError(
                f"none of {', '.join(only)} supports {problem.label} here: "
                + "; ".join(
                    str(self._op.implementation(n).supports(problem, self._device)) for n in only
                )
            )
        return pool

    def _new_search(
        self, problem: Problem, pool: list[Candidate], heuristic: Candidate, knowledge: Knowledge
    ) -> Search:
        o = self._options
        name = f"{problem.key} on {self._device.key} at {time.time():.0f}"
        study = new_study(name, o.seed, o.storage, o.objective)
        seeds = [heuristic, *self._seeds(problem)]
        return Search(pool, seeds, o.trials, o.seed, study, knowledge.trials, o.objective)

    def _seeds(self, problem: Problem) -> list[Candidate]:
        """Every implementation's default, then the winners of problems of the same family."""
        op, device = self._op, self._device
        seeds = [
            Candidate(name, one.default_config(problem, device))
            for name, one in op.usable(problem, device).items()
        ]
        for record in self._known.family(device, problem):
            one = op.implementations.get(record.chosen.implementation)
            if one is not None and one.supports(problem, device) is None:
                config = one.space(problem, device).fit(record.chosen.config)
                seeds.append(Candidate(record.chosen.implementation, config))
        return seeds

    def _search(
        self,
        search: Search,
        tester: Tester,
        known: list[Trial],
        knowledge: Knowledge,
        clock: _Clock,
    ) -> list[Trial]:
        """The trials that the search asks for, each kept as it is made."""
        made: list[Trial] = []
        deadline = time.perf_counter() + self._options.budget
        proposals = iter(search)
        candidate = _next(proposals, clock)
        while candidate is not None:
            self._listener.trial_started(candidate)
            after = None
            if self._testers.looks_ahead:
                after = _next(proposals, clock)
                if after is not None:
                    self._testers.upcoming(tester.problem, after)
            best = best_of([*known, *made])
            failed = self._guard(tester.problem, candidate) if self._guard is not None else None
            trial = failed or tester.trial(candidate, best)
            search.tell(candidate, trial)
            made.append(trial)
            if failed is None:
                knowledge.keep(trial, candidate not in getattr(tester, "unsure", ()))
            self._listener.trial_done(trial, best_of([*known, *made]))
            if time.perf_counter() > deadline:
                break
            candidate = after if after is not None else _next(proposals, clock)
        return made

    def _as_record(
        self,
        problem: Problem,
        base: Candidate,
        verdict: Verdict,
        trials: list[Trial],
        made: list[Trial],
        clock: _Clock,
    ) -> Record:
        seconds = time.perf_counter() - clock.started
        parts = {
            name: round(sum(getattr(t, name) for t in made), 3)
            for name in ("compile_s", "verify_s", "screen_s", "time_s")
        }
        parts |= {"compare_s": round(clock.compare_s, 3), "search_s": round(clock.search_s, 3)}
        chosen = verdict.chosen
        return Record(
            problem=problem,
            device=self._device,
            chosen=chosen,
            heuristic=base,
            comparison=verdict.comparison,
            verification=verdict.verification,
            provenance=Provenance(
                **origin(),
                chosen_version=self._op.implementation(chosen.implementation).version,
                heuristic_version=self._op.implementation(base.implementation).version,
                seconds=round(seconds, 3),
                settings=self._options.summary,
                **parts,
                idle_s=round(max(0.0, seconds - sum(parts.values())), 3),
            ),
            trials=tuple(trials),
        )


def _next(proposals: Any, clock: _Clock) -> Candidate | None:
    started = time.perf_counter()
    found: Candidate | None = next(proposals, None)
    clock.search_s += time.perf_counter() - started
    return found
