"""Pins: what a person has decided, above everything that was measured.

A pin is a record like any other, and so is its removal: each says which came
before it by a count, so that sets of records can be united in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgpack

from .envelope import SCHEMA, Head, record_id, unpack
from .errors import ProblemError, RecordError
from .fields import build, candidate_map
from .key import Candidate, Device, Problem

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
        body = {
            "problem": self.problem.to_map(),
            "device": self.device.to_map(),
            "pin": {
                "candidate": candidate_map(self.candidate),
                "active": self.active,
                "count": self.count,
                "time": self.time,
                "note": self.note,
            },
        }
        about = (self.device.key, self.problem.family, self.problem.key)
        return Head(SCHEMA, KIND, *about, msgpack.packb(body)).seal()

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
    problem, device, body = about(head, "pin")
    fields = build(_Fields, body)
    return Pin(problem, device, **{f.name: getattr(fields, f.name) for f in _fields()})


def _fields() -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(_Fields)


def about(head: Head, name: str) -> tuple[Problem, Device, object]:
    """The problem and the device of a body, and what it holds under ``name``; both as
    the head says.

    Raises:
        RecordError: They are not.
    """
    body = unpack(head.body)
    if not isinstance(body, dict) or set(body) != {"problem", "device", name}:
        raise RecordError(f"the body is not that of a record of kind {head.kind!r:.40}")
    try:
        problem, device = Problem.from_map(body["problem"]), Device.from_map(body["device"])
    except ProblemError as error:
        raise RecordError(str(error)) from error
    if (head.device_key, head.family, head.problem_key) != (
        device.key, problem.family, problem.key,
    ):  # fmt: skip
        raise RecordError("the head names another problem or device than the body")
    return problem, device, body[name]


def latest(pins: Iterable[Pin]) -> Pin | None:
    """The last word among the pins of one problem; it may be that nothing is pinned."""
    return max(pins, key=lambda pin: (pin.count, pin.time, pin.id), default=None)
