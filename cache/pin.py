"""Pins: what a person has decided, above everything that was measured.

A pin is a record like any other, and so is its removal: each says which came
before it by a count, so that sets of records can be united in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .envelope import Head, record_id
from .fields import build, candidate_map
from .key import Candidate, Device, Problem
from .subject import opened_part, seal

KIND = "pin"


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A candidate that a person wants for a problem on a device, or no longer wants.

    Attributes:
        problem: The problem.
        device: The device.
        candidate: What is pinned, or was.
        active: False where the pin is taken back.
        count: One more than that of every pin of the problem known when it was made.
        time: Seconds since 1970, UTC.
        note: Why, in the person's own words.
    """

    problem: Problem
    device: Device
    candidate: Candidate
    active: bool
    count: int
    time: float
    note: str = ""

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        rest = {
            KIND: {
                "candidate": candidate_map(self.candidate),
                "active": self.active,
                "count": self.count,
                "time": self.time,
                "note": self.note,
            },
        }
        return seal(KIND, self.problem, self.device, rest)

    @property
    def id(self) -> str:
        """A hash of the bytes, 32 hexadecimal digits."""
        return record_id(self.to_bytes())


@dataclasses.dataclass(frozen=True)
class _Fields:
    candidate: Candidate
    active: bool
    count: int
    time: float
    note: str


def from_head(head: Head) -> Pin:
    """The pin that starts with this head.

    Raises:
        RecordError: Something in it is missing, of a wrong type or out of range.
    """
    problem, device, body = opened_part(head, KIND)
    fields = build(_Fields, body)
    return Pin(problem, device, **{f.name: getattr(fields, f.name) for f in _fields()})


def _fields() -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(_Fields)


def latest(pins: Iterable[Pin]) -> Pin | None:
    """The last word among the pins of one problem; it may be that nothing is pinned."""
    return max(pins, key=lambda pin: (pin.count, pin.time, pin.id), default=None)
