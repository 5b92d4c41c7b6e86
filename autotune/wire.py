"""What a tuning run and its worker say to each other: framed msgpack, and nothing that runs.

A frame is a length and a msgpack list, whose first item is a word. Candidates,
trials and verifications travel as the plain values that records hold, and are
checked as those are.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import msgpack

from ..cache.errors import RecordError
from ..cache.fields import build
from ..cache.record import Trial, Verification, read_trial, trial_row

_LENGTH = struct.Struct("<I")
#: No message is larger: a race of hundreds of rounds has a few kilobytes.
MAX_BYTES = 2**24


class WireError(Exception):
    """The other side sent something that is not a message."""


def send(handle: int, word: str, *values: Any) -> None:
    """Writes a message whole.

    Raises:
        OSError: The other side is gone.
    """
    body = bytes(msgpack.packb([word, *values]))
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(handle, data) :]


class Inbox:
    """Puts what is read of a pipe together to messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds bytes that were read."""
        self._data += data

    def take(self) -> list[Any] | None:
        """The next message if it is there whole.

        Raises:
            WireError: The bytes are not a message.
        """
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > MAX_BYTES:
            raise WireError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        try:
            message = msgpack.unpackb(body, strict_map_key=True, raw=False)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise WireError(f"not msgpack: {error}") from error
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise WireError("not a list that begins with a word")
        return message


def receive(handle: int, inbox: Inbox) -> list[Any] | None:
    """The next message, waiting for it; None when the other side is gone."""
    while (message := inbox.take()) is None:
        data = os.read(handle, 2**16)
        if not data:
            return None
        inbox.feed(data)
    return message


def outcome_to_wire(outcome: Trial | Verification) -> list[Any]:
    """A trial or a verification as plain values."""
    if isinstance(outcome, Trial):
        return ["trial", trial_row(outcome)]
    inputs = list(outcome.inputs)
    return ["verification", [outcome.rel_err, outcome.tolerance, inputs]]


def outcome_from_wire(value: Any) -> Trial | Verification:
    """The outcome that ``outcome_to_wire`` described.

    Raises:
        WireError: It is none.
    """
    try:
        kind, body = value
        if kind == "trial":
            return read_trial(body)
        if kind == "verification":
            names = ("rel_err", "tolerance", "inputs")
            verified: Verification = build(Verification, dict(zip(names, body, strict=True)))
            return verified
    except (RecordError, TypeError, ValueError) as error:
        raise WireError(f"not an outcome: {error}") from error
    raise WireError(f"not an outcome: {kind!r:.40}")
