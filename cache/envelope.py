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

#: One byte can become an object of 64 bytes: a record may cost no more than that.
MAX_RECORD_BYTES = 2**20
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


_HEAD_FIELDS = len(dataclasses.fields(Head))


def read_head(payload: bytes) -> Head:
    """The head of a record's bytes.

    Raises:
        RecordError: They are not a record.
    """
    parts = unpack(payload, longest=_HEAD_FIELDS)
    if not isinstance(parts, list) or len(parts) != _HEAD_FIELDS:
        raise RecordError("not a record: the outer list is missing")
    head = Head(*parts)
    if not (
        type(head.schema) is int
        and head.schema >= 1
        and isinstance(head.body, bytes)
        and _is_text(head.kind)
        and _is_text(head.device_key)
        and _is_text(head.family)
        and _is_text(head.problem_key)
    ):
        raise RecordError("not a record: the head has wrong types")
    return head


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_KEY


def unpack(data: bytes, longest: int = 64) -> Any:
    """The value of some msgpack bytes.

    Args:
        data: The bytes.
        longest: How many items a list or a map may declare: room for them is
            made before the first is read, at every depth.

    Raises:
        RecordError: They are too many, or not msgpack.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"{len(data)} bytes are more than a record may have")
    try:
        return msgpack.unpackb(
            data, strict_map_key=True, raw=False, max_array_len=longest, max_map_len=64
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError(f"not msgpack: {type(error).__name__}: {error}"[:200]) from error
