"""Misses: calls that no record of their own answered, counted by the processes that made them.

Each process leaves one record for each problem; united, they say what a fleet
would gain from tuning. They lie beside the other records and are read on request.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from .envelope import Head, read_head, record_id
from .errors import CacheError, RecordError
from .fields import build
from .key import Device, Problem
from .record_set import Damage, RecordSet
from .segment import write_segments
from .store import check_folder, read_folder, segments_of
from .subject import opened_part, seal

log = logging.getLogger("shapetune")

KIND = "miss"
FOLDER = "misses"
#: Processes of a fleet each leave a file; from this many on, the next one folds them.
_FOLD_AT = 64
#: So many are kept when files are folded: the newest.
MAX_KEPT = 20_000


@dataclasses.dataclass(frozen=True)
class _Fields:
    calls: int
    tier: str
    process: str
    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class Miss:
    """Calls of one problem in one process.

    Attributes:
        problem: The problem.
        device: The device.
        calls: How often it was called; a compiled program counts once, when it is traced.
        tier: Where the decision came from instead.
        process: What tells this process from others.
        time: When it was written, seconds since 1970, UTC.
    """

    problem: Problem
    device: Device
    calls: int
    tier: str
    process: str
    time: float

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(_Fields)}
        return seal(KIND, self.problem, self.device, {KIND: fields})

    @property
    def id(self) -> str:
        """A hash of the bytes, 32 hexadecimal digits."""
        return record_id(self.to_bytes())


def from_head(head: Head) -> Miss:
    """The miss that starts with this head.

    Raises:
        RecordError: Something in it is missing, of a wrong type or out of range.
    """
    problem, device, body = opened_part(head, KIND)
    fields = build(_Fields, body)
    return Miss(problem, device, fields.calls, fields.tier, fields.process, fields.time)


def write(place: Path, misses: Sequence[Miss]) -> None:
    """Leaves the misses of one process in a place.

    Raises:
        CacheError: It cannot be written.
    """
    (name,) = {miss.device.folder for miss in misses}
    folder = check_folder(place) / name / FOLDER
    write_segments(folder, [miss.to_bytes() for miss in misses])
    if len(segments_of(folder, RecordSet())) > _FOLD_AT:
        _fold(folder)


def _fold(folder: Path) -> None:
    """Puts many files of misses into one, of bounded size."""
    found = RecordSet()
    old = read_folder(folder, found)
    newest = sorted(_decoded(found), key=lambda miss: (miss.time, miss.id))[-MAX_KEPT:]
    new = write_segments(folder, [miss.to_bytes() for miss in newest])
    for path in old:
        if path not in new:
            path.unlink(missing_ok=True)


def read(places: Iterable[Path], device: Device) -> tuple[list[Miss], list[Damage]]:
    """The misses on a device in these places, and what could not be read."""
    found = RecordSet()
    for place in places:
        read_folder(place / device.folder / FOLDER, found)
    return _decoded(found), found.damage


def _decoded(found: RecordSet) -> list[Miss]:
    misses = []
    for payload in found.payloads:
        try:
            head = read_head(payload)
            if head.kind == KIND:
                misses.append(from_head(head))
        except RecordError as error:
            found.damage.append(Damage(Path("memory"), str(error)))
    return misses


def forget(place: Path, device: Device) -> int:
    """Removes the misses of a device from a place, and returns how many files there were.

    Raises:
        CacheError: They cannot be removed.
    """
    folder = place / device.folder / FOLDER
    paths = segments_of(folder, RecordSet())
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"cannot remove the misses in {folder}: {error.strerror}") from error
    return len(paths)
