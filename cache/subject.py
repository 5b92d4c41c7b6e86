"""What every kind of record has in common: a problem and a device that it is about.

The head of a record names both for the index, and the body holds them whole; that
the two agree is checked here, for all kinds alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from .envelope import SCHEMA, Head, unpack
from .errors import ProblemError, RecordError
from .key import Device, Problem


def seal(kind: str, problem: Problem, device: Device, rest: Mapping[str, Any]) -> bytes:
    """The canonical bytes of a record: its head, and a body of the subject and the rest."""
    body = {"problem": problem.to_map(), "device": device.to_map(), **rest}
    about = (device.key, problem.family, problem.key)
    return Head(SCHEMA, kind, *about, msgpack.packb(body)).seal()


def opened(head: Head) -> tuple[Problem, Device, dict[str, Any]]:
    """The problem and the device that a record is about, and the rest of its body.

    Raises:
        RecordError: The body is no map, or of another problem or device than the head says.
    """
    body = unpack(head.body)
    if not isinstance(body, dict):
        raise RecordError("the body is not a map")
    try:
        problem = Problem.from_map(body.pop("problem", None))
        device = Device.from_map(body.pop("device", None))
    except ProblemError as error:
        raise RecordError(str(error)) from error
    if (head.device_key, head.family, head.problem_key) != (
        device.key, problem.family, problem.key,
    ):  # fmt: skip
        raise RecordError("the head names another problem or device than the body")
    return problem, device, body


def opened_part(head: Head, name: str) -> tuple[Problem, Device, Any]:
    """As ``opened``, of a body that holds beside its subject one part of this name."""
    problem, device, rest = opened(head)
    if set(rest) != {name}:
        raise RecordError(f"the body is not that of a record of kind {head.kind!r:.40}")
    return problem, device, rest[name]
