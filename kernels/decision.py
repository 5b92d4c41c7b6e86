"""Decisions: which candidate serves a problem, as a function of the records alone."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..cache import choice
from ..cache.errors import ConfigError
from ..cache.key import Candidate, Device, Problem, Value
from ..cache.record_set import RecordSet
from .op import Op
from .tiers import Case, Found, exact, imported, neighbour, other_device, pinned

log = logging.getLogger("shapetune")

_ON_MISS = ("heuristic", "warn", "error")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was chosen for a problem, and why.

    Attributes:
        problem: The problem.
        implementation: Name of the implementation.
        config: Its config.
        tier: ``"forced"`` (the caller's own), ``"pinned"`` (a person's), ``"exact"``
            (a record of this problem), ``"other-batch"`` (of another batch or number
            of heads), ``"nearest"`` (of a neighbouring sequence length),
            ``"other-device"`` (of a device of the same class), ``"imported"`` (others'
            figures) or ``"heuristic"``.
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

    @property
    def is_miss(self) -> bool:
        """Whether no record of the problem itself, and no person, decided it."""
        return self.tier not in ("forced", "pinned", "exact")

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
        imported: ``SHAPETUNE_IMPORTED=1``: what others measured counts, below
            everything that was measured here.
    """

    disabled: bool = False
    on_miss: str = "heuristic"
    stale: str = "warn"
    imported: bool = False

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings as the environment has them now."""
        return cls(
            disabled=_is_set("SHAPETUNE_DISABLE"),
            on_miss=_one_of("SHAPETUNE_ON_MISS", _ON_MISS, cls.on_miss),
            stale=_one_of("SHAPETUNE_STALE", choice.POLICIES, cls.stale),
            imported=_is_set("SHAPETUNE_IMPORTED"),
        )


def _is_set(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value.lower() in ("", "0", "false", "no"):
        return False
    if value.lower() in ("1", "true", "yes"):
        return True
    raise ConfigError(f"{variable}={value!r} is neither 1 nor 0")


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
    op: Op,
    problem: Problem,
    device: Device,
    records: RecordSet,
    settings: Settings,
    elsewhere: Callable[[], RecordSet] = RecordSet,
) -> Decision:
    """The decision for a problem, as a function of the record set alone.

    The tiers, first match wins:

    1. ``pinned``: what a person pinned for the problem.
    2. ``exact``: the best record of the problem itself.
    3. ``other-batch``: the best record of the problem with another batch or
       number of heads, the closest first.
    4. ``nearest``: the best record of a neighbour within a factor of two in
       seq and kv_seq, the closest first, its config fitted into the space.
    5. ``other-device``: the best record of the problem on a device of the same
       class (see ``choice.same_class``), its config fitted into the space here.
    6. ``imported``: what others measured, if ``settings`` ask for it.
    7. ``heuristic``: nothing is known.

    A candidate that its implementation does not support for this problem on
    this device, whose config is outside its space, or that is quarantined, is
    passed over.

    Args:
        op: The op of the problem.
        problem: The problem, canonical.
        device: The device at hand.
        records: The records of this device.
        settings: What the environment asks for.
        elsewhere: Gives the records of other devices; called only where those
            of this one do not decide.
    """
    case = Case(op, problem, device, versions(op), settings.stale)
    if settings.disabled:
        case.steps.append("SHAPETUNE_DISABLE is set: nothing was looked up")
        return _decision(case, Found(op.heuristic(problem, device), "heuristic"))
    case.learn_quarantines(records)
    found = (
        pinned(case, records)
        or exact(case, records)
        or neighbour(case, records)
        or other_device(case, elsewhere)
        or imported(case, records, asked=settings.imported)
    )
    if found is None:
        case.steps.append("nothing tuned fits: the heuristic")
        found = Found(case.heuristic(), "heuristic")
    for line in found.warnings:
        log.warning("%s", line)
    return _decision(case, found)


def _decision(case: Case, found: Found) -> Decision:
    record = found.record if found.tier == "exact" else None
    return Decision(
        case.problem,
        found.candidate.implementation,
        dict(found.candidate.config),
        found.tier,
        speedup=record.comparison.ratio if record else None,
        interval=(record.comparison.low, record.comparison.high) if record else None,
        record_ids=found.record_ids,
        steps=tuple(case.steps),
    )
