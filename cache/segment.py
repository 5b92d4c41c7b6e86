"""Segments: files of framed, checksummed records with a single writer, ever.

A segment is written to a temporary file, synced and renamed, and named by its
content, so no lock is needed. A reader takes every frame whose checksum holds
and looks for the next frame after one that is damaged.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from .envelope import MAX_RECORD_BYTES
from .errors import CacheError

#: First bytes of every segment: a name, and the version of the framing.
MAGIC = b"shapetune-cache\x001\n"
SUFFIX = ".msgpack"
#: Starts a frame. Never part of msgpack (0xc1 is unused there), so a reader can
#: find the next frame after damage.
_MARK = b"\xc1rec"
_DIGEST = 16
_HEAD = struct.Struct(f"<4sI{_DIGEST}s")
_COUNT = struct.Struct("<I")
#: A segment larger than this is not read: nothing here writes one.
MAX_SEGMENT_BYTES = 64 * 2**20
#: Records are put into segments of about this size, where there are many.
FULL_SEGMENT_BYTES = 16 * 2**20
#: Frames that fail their checksum may cost this many bytes of hashing, and four
#: times the file: bytes made of nothing but marks would else take hours.
_WASTE_BYTES = 4 * 2**20
_WASTE_OF_A_TRY = 1024

_NAME = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))


def pack_segment(payloads: Iterable[bytes]) -> bytes:
    """The bytes of a segment that holds these records, sorted, without duplicates."""
    return _pack(sorted(set(payloads)))


def _pack(unique: list[bytes]) -> bytes:
    parts = [MAGIC, _COUNT.pack(len(unique))]
    for payload in unique:
        parts.append(_HEAD.pack(_MARK, len(payload), _digest(payload)))
        parts.append(payload)
    return b"".join(parts)


def read_frames(data: bytes) -> Iterator[tuple[str, bytes] | None]:
    """The records in a segment's bytes, each with its id, which is its checksum.

    None stands for each damaged stretch, and for a lost end.
    """
    at, missing = 0, 0
    waste = 4 * len(data) + _WASTE_BYTES
    if data.startswith(MAGIC) and len(data) >= len(MAGIC) + _COUNT.size:
        (missing,) = _COUNT.unpack_from(data, len(MAGIC))
        at = len(MAGIC) + _COUNT.size
    else:
        yield None
    while at < len(data):
        claimed, payload, digest = _frame_at(data, at)
        if payload is None:
            yield None
            waste -= claimed + _WASTE_OF_A_TRY
            found = data.find(_MARK, at + 1) if waste > 0 else -1
            at = len(data) if found < 0 else found
        else:
            yield digest, payload
            missing -= 1
            at += _HEAD.size + claimed
    if missing > 0:
        yield None


def _frame_at(data: bytes, at: int) -> tuple[int, bytes | None, str]:
    """The bytes that a frame claims, and its payload and digest if it is whole."""
    if len(data) - at < _HEAD.size:
        return 0, None, ""
    mark, length, digest = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    if mark != _MARK or length > MAX_RECORD_BYTES or start + length > len(data):
        return 0, None, ""
    payload = data[start : start + length]
    whole = _digest(payload) == digest
    return length, payload if whole else None, digest.hex()


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST).digest()


def is_segment(path: Path) -> bool:
    """Whether a file begins as a segment does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def segment_name(data: bytes) -> str:
    """The name of the segment with these bytes: a hash of them."""
    return hashlib.blake2b(data, digest_size=16).hexdigest() + SUFFIX


def is_segment_name(name: str) -> bool:
    """Whether a file's name is one that a segment may have, and nothing more."""
    return _NAME.fullmatch(name) is not None


def write_segment(folder: Path, payloads: Iterable[bytes]) -> Path:
    """Writes a new segment into a folder, whole or not at all, and returns its path.

    Raises:
        CacheError: The folder cannot be made or written.
    """
    return _put(folder, pack_segment(payloads))


def _put(folder: Path, data: bytes) -> Path:
    path = folder / segment_name(data)
    write_file(path, data)
    return path


def write_segments(folder: Path, payloads: Iterable[bytes]) -> list[Path]:
    """As ``write_segment``, in as many segments as their size asks for."""
    batches: list[list[bytes]] = []
    room = 0
    for payload in sorted(set(payloads)):
        room -= len(payload) + _HEAD.size
        if room < 0 or not batches:
            batches.append([])
            room = FULL_SEGMENT_BYTES - len(payload)
        batches[-1].append(payload)
    return [_put(folder, _pack(batch)) for batch in batches]


def replace_file(path: Path, data: bytes) -> None:
    """Puts a file in place by rename: what was there stays until the new one is whole.

    Raises:
        OSError: It cannot be written.
        ValueError: The name holds a null character.
    """
    # Of its own name nothing, which may be as long as names can be.
    temporary = path.parent / f".{os.getpid()}-{secrets.token_hex(4)}.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """``replace_file`` in a cache.

    Raises:
        CacheError: The folder cannot be made or written.
    """
    try:
        replace_file(path, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CacheError(
            f"cannot write to the cache at {path.parent}: {reason}; "
            "set SHAPETUNE_CACHE (or --cache) to a folder that you may write to"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems refuse; the rename itself stands
    finally:
        os.close(handle)
