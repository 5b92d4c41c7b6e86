"""The tiers of a decision: where a candidate may come from, the surest source first.

Each tier looks for one candidate, and notes in the case's steps what it passed
over and why; ``decision.decide`` tries them in turn.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from ..cache import choice, pin, quarantine
from ..cache import imported as imports
from ..cache.key import Candidate, Device, Problem
from ..cache.record import KIND as TUNING
from ..cache.record import Record
from ..cache.record_set import RecordSet
from .op import Op


@dataclasses.dataclass(frozen=True)
class Found:
    """A candidate, and the tier that it is from.

    Attributes:
        candidate: The candidate, as it may be called here.
        tier: Name of the tier.
        record_ids: The records that it rests on.
        record: The tuning record, where it is one of the problem itself.
        warnings: What a user must hear, once for each problem.
    """

    candidate: Candidate
    tier: str
    record_ids: tuple[str, ...] = ()
    record: Record | None = None
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass
class Case:
    """A problem that is being decided, and the steps so far.

    Attributes:
        op: The op.
        problem: The problem.
        device: The device at hand.
        versions: The versions in use.
        stale: The policy on stale records.
        steps: What was considered, in order.
        quarantined: Candidates that did harm, with the word that is in force.
    """

    op: Op
    problem: Problem
    device: Device
    versions: choice.Versions
    stale: str
    steps: list[str] = dataclasses.field(default_factory=list)
    quarantined: dict[Candidate, Any] = dataclasses.field(default_factory=dict)

    def learn_quarantines(self, records: RecordSet) -> None:
        """Takes up the quarantines of the problem that are in force."""
        self.quarantined = quarantine.in_force(records, self.device, self.problem, self.versions)

    def usable(self, chosen: Candidate, whose: str, *, fit: bool) -> Candidate | None:
        """A candidate as it may serve here, its config fitted if asked; None if it may not."""
        reason, candidate = self._examine(chosen, fit)
        if reason is None:
            return candidate
        self.steps.append(f"passed over {chosen.key} of {whose}: {reason}")
        return None

    def _examine(self, chosen: Candidate, fit: bool) -> tuple[str | None, Candidate]:
        one = self.op.implementations.get(chosen.implementation)
        if one is None:
            return "no such implementation here", chosen
        if not one.automatic(self.problem, self.device):
            return "not for automatic choice on this device", chosen
        reason = one.supports(self.problem, self.device)
        if reason is not None:
            return reason, chosen
        space = one.space(self.problem, self.device)
        config = space.completed(chosen.config)
        config = space.fit(config) if fit else config
        candidate = Candidate(chosen.implementation, config)
        return space.refusal(config) or self.harm(candidate), candidate

    def harm(self, candidate: Candidate) -> str | None:
        """What a candidate did, if it is quarantined."""
        word = self.quarantined.get(candidate)
        return None if word is None else f"quarantined, {word.status}: {word.note}"[:300]

    def of_record(self, record: Record, *, fit: bool) -> Candidate | None:
        """The candidate that a record stands for, if it can serve the problem here."""
        if record.heuristic_is_best and not self._stood_in(record):
            # Of a neighbour as of itself: what was learnt is that the rule of thumb holds.
            return self.heuristic()
        return self.usable(record.chosen, record.problem.label, fit=fit)

    def _stood_in(self, record: Record) -> bool:
        """Whether the heuristic failed when the record was made, and another took its place."""
        first = self.op.heuristic(record.problem, self.device)
        return record.heuristic != first and any(
            trial.candidate == first and trial.status != "ok" for trial in record.trials
        )

    def heuristic(self) -> Candidate:
        """The candidate used where nothing is known; another one if that did harm."""
        first = self.op.heuristic(self.problem, self.device)
        if self.harm(first) is None:
            return first
        self.steps.append(f"passed over the heuristic {first.key}: {self.harm(first)}")
        for other in self.op.defaults(self.problem, self.device):
            if self.harm(other) is None:
                return other
        return first

    def ranked(self, records: list[Record]) -> list[Record]:
        """Records of one problem, best first."""
        kept = choice.rank(records, self.versions, self.stale)
        if len(kept) < len(records):
            self.steps.append(
                f"passed over {len(records) - len(kept)} stale record(s): SHAPETUNE_STALE=strict"
            )
        return kept

    def warnings(self, record: Record) -> tuple[str, ...]:
        """What is to be said of a record that is used although it is stale."""
        reason = self.versions.staleness(record) if self.stale == "warn" else None
        if reason is None:
            return ()
        return (f"using a stale record for {record.problem.label}: {reason}",)


def pinned(case: Case, records: RecordSet) -> Found | None:
    """What a person pinned for the problem, if the last word is not that it is unpinned."""
    last = pin.latest(records.about(pin.KIND, case.device, case.problem))
    if last is None or not last.active:
        case.steps.append("pinned: no")
        return None
    case.steps.append(f"pinned: {last.candidate.key} since {_date(last.time)} {last.note}".rstrip())
    harm = case.harm(last.candidate)
    case.quarantined.pop(last.candidate, None)
    candidate = case.usable(last.candidate, "a pin", fit=False)
    if candidate is None:
        return None
    warnings = (f"{candidate.key} is pinned for {case.problem.label}, though {harm}",)
    return Found(candidate, "pinned", (last.id,), None, warnings if harm else ())


def exact(case: Case, records: RecordSet) -> Found | None:
    """The best record of the problem itself."""
    known = case.ranked(records.exact(case.device, case.problem))
    case.steps.append(f"exact: {len(known)} record(s)")
    for record in known:
        candidate = case.of_record(record, fit=False)
        if candidate is not None:
            case.steps.append(evidence(record))
            return Found(candidate, "exact", (record.id,), record, case.warnings(record))
    return None


def neighbour(case: Case, records: RecordSet) -> Found | None:
    """The best record of the closest problem that differs in sizes alone."""
    keys = records.near(TUNING, case.device, case.problem)
    case.steps.append(f"neighbours: {len(keys)} problem(s) within a factor of two")
    for key in keys:
        for record in case.ranked(records.of_key(TUNING, case.device, key)):
            candidate = case.of_record(record, fit=True)
            if candidate is not None:
                case.steps.append(evidence(record))
                tier = "other-batch" if _same_lengths(record.problem, case.problem) else "nearest"
                return Found(candidate, tier, (record.id,), None, case.warnings(record))
    return None


def _same_lengths(a: Problem, b: Problem) -> bool:
    return (a.seq, a.kv_seq) == (b.seq, b.kv_seq)


def other_device(case: Case, elsewhere: Callable[[], RecordSet]) -> Found | None:
    """The best record of the problem on the most similar device of the same class."""
    records = elsewhere()
    devices = choice.same_class(records.devices, case.device)
    case.steps.append(f"other devices: {len(devices)} of the same class with records")
    for device in devices:
        for record in case.ranked(records.exact(device, case.problem)):
            candidate = case.of_record(record, fit=True)
            if candidate is not None:
                case.steps.append(f"{evidence(record)}, on {device.name}")
                warning = (
                    f"using a record of {device.name} ({device.cores} cores) for "
                    f"{case.problem.label}; nothing of it is tuned on {case.device.name}"
                )
                said = (warning, *case.warnings(record))
                return Found(candidate, "other-device", (record.id,), None, said)
    return None


def imported(case: Case, records: RecordSet, *, asked: bool) -> Found | None:
    """The fastest implementation that others measured, with its own default config."""
    exact = records.about(imports.KIND, case.device, case.problem)
    keys = records.near(imports.KIND, case.device, case.problem)
    if not asked:
        if exact or keys:
            case.steps.append(
                f"imported: {len(keys) + bool(exact)} problem(s), not asked for; "
                "SHAPETUNE_IMPORTED=1 does"
            )
        return None
    case.steps.append(f"imported: {len(exact)} record(s), {len(keys)} neighbour(s)")
    for group in (exact, *(records.of_key(imports.KIND, case.device, key) for key in keys)):
        for one in sorted(group, key=lambda one: (-one.time, one.id)):
            for timed in one.times:
                candidate = _default_of(case, timed.implementation, one)
                if candidate is not None:
                    case.steps.append(
                        f"{timed.implementation}: {timed.median_ms:.4g} ms for "
                        f"{one.problem.label} in {one.source}, not measured here"
                    )
                    return Found(candidate, "imported", (one.id,))
    return None


def _default_of(case: Case, name: str, one: imports.Imported) -> Candidate | None:
    implementation = case.op.implementations.get(name)
    config = (
        implementation.default_config(case.problem, case.device)
        if implementation is not None and implementation.supports(case.problem, case.device) is None
        else {}
    )
    whose = f"{one.source}, {one.problem.label}"
    return case.usable(Candidate(name, dict(config)), whose, fit=False)


def evidence(record: Record) -> str:
    """What a record rests on, in one line."""
    c, v, p = record.comparison, record.verification, record.provenance
    verdict = (
        "the heuristic is the best"
        if record.heuristic_is_best
        else f"{record.chosen.key} {c.ratio:.2f}× the heuristic [{c.low:.2f}, {c.high:.2f}]"
    )
    return (
        f"record {record.id[:12]} of {record.problem.label}: {verdict}, {c.pairs} pairs, "
        f"error {v.rel_err:.1e} of {v.tolerance:.1e} allowed, {_date(p.time)}, jax {p.jax}"
    )


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # times from a cache are any number
        return "an unknown day"
