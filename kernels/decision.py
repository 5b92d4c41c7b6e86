"""Decisions: which candidate serves a problem, as a function of the records alone."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..cache import choice
from ..cache.errors import ConfigError
from ..cache.key import Candidate, Device, Problem, Value
from ..cache.record import Record
from ..cache.record_set import RecordSet
from .op import Op

log = logging.getLogger("shapetune")

_ON_MISS = ("heuristic", "warn", "error")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was chosen for a problem, and why.

    Attributes:
        problem: The problem.
        implementation: Name of the implementation.
        config: Its config.
        tier: ``"forced"`` (the caller's own), ``"exact"`` (a record of this
            problem), ``"other-batch"`` (of another batch or number of heads),
            ``"nearest"`` (of a neighbouring sequence length) or ``"heuristic"``.
        speedup: Measured gain over the heuristic, for the tier "exact".
        interval: Its 95% interval.
        record_ids: The records that it rests on.
        steps: What was considered, in order, and why it was passed over.
    """

    problem: Problem
    implementation: str
    config: Mapping[str, Value]
    tier: str
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    record_ids: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    @property
    def candidate(self) -> Candidate:
        """The implementation and its config."""
        return Candidate(self.implementation, self.config)

    def to_map(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "problem": self.problem.to_map(),
            "config": dict(self.config),
        }


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the environment asks of the dispatcher.

    Attributes:
        disabled: ``SHAPETUNE_DISABLE=1``: the heuristic for every call.
        on_miss: ``SHAPETUNE_ON_MISS``: where nothing is tuned, use the
            ``"heuristic"``, ``"warn"`` too, or raise an ``"error"``.
        stale: ``SHAPETUNE_STALE``: records of other versions are not used
            (``"strict"``), rank behind fresh ones (``"warn"``) or count in full (``"any"``).
    """

    disabled: bool = False
    on_miss: str = "heuristic"
    stale: str = "warn"

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings as the environment has them now."""
        return cls(
            disabled=os.environ.get("SHAPETUNE_DISABLE", "").lower()
            not in ("", "0", "false", "no"),
            on_miss=_one_of("SHAPETUNE_ON_MISS", _ON_MISS, cls.on_miss),
            stale=_one_of("SHAPETUNE_STALE", choice.POLICIES, cls.stale),
        )


def _one_of(variable: str, allowed: Sequence[str], default: str) -> str:
    value = os.environ.get(variable) or default
    if value not in allowed:
        raise ConfigError(f"{variable}={value!r} is not one of {', '.join(allowed)}")
    return value


def versions(op: Op) -> choice.Versions:
    """The versions in use of jax and of the implementations of an op."""

    def of(name: str) -> int | None:
        one = op.implementations.get(name)
        return one.version if one else None

    return choice.Versions(jax=jax.__version__, implementation=of)


def decide(
    op: Op, problem: Problem, device: Device, records: RecordSet, settings: Settings
) -> Decision:
    """The decision for a problem, as a function of the record set alone.

    The tiers, first match wins:

    1. ``exact``: the best record of the problem itself.
    2. ``other-batch``: the best record of the problem with another batch or
       number of heads, the closest first.
    3. ``nearest``: the best record of a neighbour within a factor of two in
       seq and kv_seq, the closest first, its config fitted into the space.
    4. ``heuristic``: nothing is known.

    A candidate that its implementation does not support for this problem on
    this device, or whose config is outside its space, is passed over.
    """
    steps: list[str] = []
    heuristic = op.heuristic(problem, device)
    if settings.disabled:
        steps.append("SHAPETUNE_DISABLE is set: nothing was looked up")
        return _decision(problem, heuristic, "heuristic", steps)
    now = versions(op)
    exact = choice.rank(records.exact(device, problem), now, settings.stale)
    steps.append(f"exact: {len(exact)} record(s)")
    for record in exact:
        candidate = _usable(op, problem, device, record, steps, fit=False)
        if candidate is not None:
            _warn_if_stale(record, now, settings)
            return _from_record(problem, candidate, "exact", record, steps)
    groups = choice.nearest(records.family(device, problem), problem)
    steps.append(f"neighbours: {len(groups)} problem(s) within a factor of two")
    for group in groups:
        for record in choice.rank(group, now, settings.stale):
            candidate = _usable(op, problem, device, record, steps, fit=True)
            if candidate is not None:
                same = (record.problem.seq, record.problem.kv_seq) == (problem.seq, problem.kv_seq)
                _warn_if_stale(record, now, settings)
                return _from_record(
                    problem, candidate, "other-batch" if same else "nearest", record, steps
                )
    steps.append("nothing tuned fits: the heuristic")
    return _decision(problem, heuristic, "heuristic", steps)


def _decision(
    problem: Problem, candidate: Candidate, tier: str, steps: list[str], **more: Any
) -> Decision:
    return Decision(
        problem, candidate.implementation, dict(candidate.config), tier, steps=tuple(steps), **more
    )


def _from_record(
    problem: Problem, candidate: Candidate, tier: str, record: Record, steps: list[str]
) -> Decision:
    found = record.comparison
    exact = tier == "exact"
    return _decision(
        problem,
        candidate,
        tier,
        steps,
        speedup=found.ratio if exact else None,
        interval=(found.low, found.high) if exact else None,
        record_ids=(record.id,),
    )


def _usable(
    op: Op, problem: Problem, device: Device, record: Record, steps: list[str], *, fit: bool
) -> Candidate | None:
    """The candidate that a record stands for, if it can serve the problem here."""
    if record.heuristic_is_best:
        # Of a neighbour as of itself: what was learnt is that the rule of thumb holds.
        return op.heuristic(problem, device)
    chosen = record.chosen
    one = op.implementations.get(chosen.implementation)
    if one is None:
        reason: str | None = "no such implementation here"
    elif not one.automatic(problem, device):
        reason = "not for automatic choice on this device"
    else:
        reason = one.supports(problem, device)
        if reason is None:
            space = one.space(problem, device)
            config = space.fit(chosen.config) if fit else chosen.config
            reason = space.refusal(config)
            if reason is None:
                return Candidate(chosen.implementation, config)
    steps.append(f"passed over {chosen.key} of {record.problem.label}: {reason}")
    return None


def _warn_if_stale(record: Record, now: choice.Versions, settings: Settings) -> None:
    reason = now.staleness(record) if settings.stale == "warn" else None
    if reason is not None:
        log.warning("using a stale record for %s: %s", record.problem.label, reason)
