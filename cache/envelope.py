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
    return Head(*head_fields(payload))


def head_fields(payload: bytes) -> list[Any]:
    """The fields of the head, for the index: thousands of records are read at once."""
    parts: Any = unpack(payload, longest=_HEAD_FIELDS)
    if type(parts) is not list or len(parts) != _HEAD_FIELDS:
        raise RecordError("not a record: the outer list is missing")
    schema, kind, device_key, family, problem_key, body = parts
    if not (
        type(schema) is int
        and schema >= 1
        and type(kind) is type(device_key) is type(family) is type(problem_key) is str
        and max(len(kind), len(device_key), len(family), len(problem_key)) <= _MAX_KEY
        and type(body) is bytes
    ):
        raise RecordError("not a record: the head has wrong types")
    return parts


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
