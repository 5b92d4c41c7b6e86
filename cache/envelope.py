"""The bytes that every record shares: a short head for the index, then its body.

What a version of shapetune does not know (a later schema, another kind) it does
not use, but carries along unchanged when caches are merged.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import msgpack

from .errors import RecordError

#: Raised when the layout of a record changes; older layouts stay readable.
SCHEMA = 1

MAX_RECORD_BYTES = 4 * 2**20
_MAX_KEY = 2000


def record_id(payload: bytes) -> str:
    """The id of the record with these bytes: a hash of them, 32 hexadecimal digits."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The part of a record's bytes that the index needs, and the bytes of the rest.

    Attributes:
        schema: The layout of the body.
        kind: What sort of record it is: ``"tuning"``, …
        device_key: ``Device.key`` of what it is about.
        family: ``Problem.family`` of what it is about.
        problem_key: ``Problem.key`` of what it is about.
        body: The bytes of the rest.
    """

    schema: int
    kind: str
    device_key: str
    family: str
    problem_key: str
    body: bytes

    def seal(self) -> bytes:
        """The canonical bytes."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return bytes(msgpack.packb(values))


def read_head(payload: bytes) -> Head:
    """The head of a record's bytes.

    Raises:
        RecordError: They are not a record.
    """
    parts = unpack(payload)
    names = dataclasses.fields(Head)
    if not isinstance(parts, list) or len(parts) != len(names):
        raise RecordError("not a record: the outer list is missing")
    head = Head(*parts)
    texts = (head.kind, head.device_key, head.family, head.problem_key)
    if not (
        type(head.schema) is int
        and head.schema >= 1
        and isinstance(head.body, bytes)
        and all(isinstance(text, str) and len(text) <= _MAX_KEY for text in texts)
    ):
        raise RecordError("not a record: the head has wrong types")
    return head


def unpack(data: bytes) -> Any:
    """The value of some msgpack bytes.

    Raises:
        RecordError: They are too many, or not msgpack.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"{len(data)} bytes are more than a record may have")
    try:
        return msgpack.unpackb(data, strict_map_key=True, raw=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError(f"not msgpack: {type(error).__name__}: {error}"[:200]) from error
