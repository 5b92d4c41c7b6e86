"""Candidates that did harm: remembered with the cache, and not tried again unasked.

A candidate that crashed, hung or was wrong is quarantined for its problem, on such
a device and with these versions. Being a record, the warning is shared as records are.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .choice import Versions, minor
from .envelope import Head, record_id
from .errors import RecordError
from .fields import build, candidate_map
from .key import Candidate, Device, Problem
from .subject import opened, seal

if TYPE_CHECKING:
    from .record_set import RecordSet

#: The kind of record that this is.
KIND = "quarantine"

#: Outcomes of a trial for which its candidate is quarantined.
HARMFUL = frozenset(("crashed", "timed_out", "wrong_result", "nondeterministic", "implausible"))
#: The status of a record that lifts a quarantine: asked to try again, it passed.
LIFTED = "ok"


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    candidate: Candidate
    status: str
    note: str
    version: int
    shapetune: str
    jax: str
    jaxlib: str
    host: str
    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class Quarantine:
    """A warning about one candidate for one problem on one device.

    Attributes:
        problem: The problem.
        device: The device.
        candidate: What to keep away from.
        status: One of ``HARMFUL``, or ``LIFTED``.
        note: What it did.
        version: ``Implementation.version`` at that time.
        shapetune, jax, jaxlib: Versions at that time.
        host: A hash of the host's name.
        time: Seconds since 1970, UTC.
    """

    problem: Problem
    device: Device
    candidate: Candidate
    status: str
    note: str
    version: int
    shapetune: str
    jax: str
    jaxlib: str
    host: str
    time: float

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        inner = {f.name: getattr(self, f.name) for f in dataclasses.fields(_Body)}
        rest = {**inner, "candidate": candidate_map(self.candidate)}
        return seal(KIND, self.problem, self.device, rest)

    @property
    def id(self) -> str:
        """A hash of the bytes, 32 hexadecimal digits."""
        return record_id(self.to_bytes())

    def applies(self, device: Device, versions: Versions) -> bool:
        """Whether it was learnt with the versions in use: jax's minor one, the
        implementation's, and the driver's where both are known."""
        drivers = {self.device.driver, device.driver} - {""}
        return (
            minor(self.jax) == minor(versions.jax)
            and self.version == versions.implementation(self.candidate.implementation)
            and len(drivers) < 2
        )


def from_head(head: Head) -> Quarantine:
    """The quarantine that starts with this head.

    Raises:
        RecordError: Something in it is missing, of a wrong type or out of range.
    """
    problem, device, rest = opened(head)
    inner = build(_Body, rest)
    if inner.status not in HARMFUL | {LIFTED}:
        raise RecordError(f"a quarantine has the unknown status {inner.status!r:.40}")
    fields = {f.name: getattr(inner, f.name) for f in dataclasses.fields(_Body)}
    return Quarantine(problem=problem, device=device, **fields)


def in_force(
    records: RecordSet, device: Device, problem: Problem, versions: Versions
) -> dict[Candidate, Quarantine]:
    """The quarantined candidates of a problem: of each, what was learnt last counts."""
    last: dict[Candidate, Quarantine] = {}
    for one in records.about(KIND, device, problem):
        if one.applies(device, versions):
            known = last.get(one.candidate)
            if known is None or (known.time, known.id) < (one.time, one.id):
                last[one.candidate] = one
    return {candidate: one for candidate, one in last.items() if one.status != LIFTED}
