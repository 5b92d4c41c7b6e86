"""Reading cache places into a set of records, and adding to one.

Reading never writes, and never fails on damage: what cannot be read is skipped
and listed. A place is a folder with one sub-folder per device, or a single
``.msgpack`` file; a remote one is read through its mirror.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from .errors import CacheError
from .key import Device
from .places import Place, Remote, as_place, check_place, check_writable, local, write_place
from .record_set import Damage, RecordSet
from .segment import MAX_SEGMENT_BYTES, SUFFIX, read_frames, write_segment

__all__ = ["check_place", "check_writable", "default_places", "load", "publish", "write_place"]

log = logging.getLogger("shapetune")

#: How often a folder is listed again because a segment was folded away meanwhile.
_LOOKS = 100


class Publishable(Protocol):
    """Anything that a segment can hold: a record of any kind."""

    @property
    def device(self) -> Device:
        """What it is about."""

    def to_bytes(self) -> bytes:
        """Its canonical bytes."""


def default_places() -> list[Path]:
    """The place that is written to, as a list of one.

    Raises:
        CacheError: There is none, or it is remote.
    """
    return [write_place()]


def load(places: Iterable[Place | str], device: Device | None = None) -> RecordSet:
    """All records in these places; with ``device``, only those of its folder.

    Places that do not exist hold nothing. What is damaged is skipped, logged
    once, and listed in ``RecordSet.damage``.

    Raises:
        CacheError: A place is a file of something else.
    """
    wanted = None if device is None else device.folder
    return load_folders(places, lambda name: wanted in (None, name), device)


def load_folders(
    places: Iterable[Place | str], wanted: Callable[[str], bool], device: Device | None = None
) -> RecordSet:
    """As ``load``, of the device folders whose name is wanted."""
    found = RecordSet()
    for one in places:
        place = as_place(one)
        if isinstance(place, Remote):
            from .mirror import mirrored  # only where it is needed: it knows remote places

            place = mirrored(place, device)
        _load_place(place, wanted, found)
    if found.damage:
        first = found.damage[0]
        log.warning(
            "skipped %d damaged part(s) of the cache; first: %s: %s",
            len(found.damage), first.path, first.reason,
        )  # fmt: skip
    return found


def _load_place(place: Path, wanted: Callable[[str], bool], found: RecordSet) -> None:
    check_place(place)
    try:
        if place.is_file():
            _read_into(found, place)
            return
        names = sorted(path.name for path in place.iterdir() if not path.name.startswith("."))
        folders = [place / name for name in names if wanted(name) and (place / name).is_dir()]
    except FileNotFoundError:
        return
    except (OSError, RuntimeError, ValueError) as error:
        found.damage.append(Damage(place, f"cannot be read: {error}"))
        return
    for folder in folders:
        read_folder(folder, found)


def read_folder(folder: Path, found: RecordSet) -> list[Path]:
    """Reads every segment of a device folder into ``found``, and returns the whole ones.

    Segments may be folded into others meanwhile, whose names a listing may have
    passed already: the folder is listed again until nothing in it is new or gone.
    """
    read: dict[Path, bool] = {}
    for look in range(_LOOKS):
        new = [path for path in segments_of(folder, found) if path not in read]
        if look > 0 and not new:
            break
        for path in new:
            whole = _read_into(found, path)
            if whole is not None:
                read[path] = whole
    return [path for path, whole in read.items() if whole]


def segments_of(folder: Path, found: RecordSet) -> list[Path]:
    """The segments of a device folder, by name; a folder that is gone has none."""
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except (OSError, RuntimeError, ValueError) as error:
        found.damage.append(Damage(folder, f"cannot be read: {error}"))
        return []
    return [path for path in paths if path.suffix == SUFFIX and not path.name.startswith(".")]


def _read_into(found: RecordSet, path: Path) -> bool | None:
    """Whether a segment was read and is whole; None if it is not there any more."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            found.damage.append(Damage(path, "is not a regular file"))
            return False
        with path.open("rb") as file:
            data = file.read(MAX_SEGMENT_BYTES + 1)
    except FileNotFoundError:
        return None if not path.is_symlink() else False
    except OSError as error:
        if error.errno == errno.ESTALE:  # how NFS says that it is gone
            return None
        found.damage.append(Damage(path, f"cannot be read: {error.strerror or error}"))
        return False
    if len(data) > MAX_SEGMENT_BYTES:
        found.damage.append(Damage(path, "is larger than any segment may be"))
        return False
    return read_bytes(data, path, found)


def read_bytes(data: bytes, source: Path, found: RecordSet) -> bool:
    """Adds the records in a segment's bytes to ``found``; whether all of it is whole."""
    stretches = 0
    before = len(found.damage)
    for frame in read_frames(data):
        if frame is None:
            stretches += 1
        else:
            found.add(frame[1], source, frame[0])
    if stretches:
        found.damage.append(Damage(source, f"{stretches} damaged stretch(es)"))
    return len(found.damage) == before


def publish(place: Place, records: Sequence[Publishable]) -> Path:
    """Adds records of one device to a place, as a new segment, and returns its path.

    Raises:
        CacheError: The place is a file or remote, or cannot be written.
    """
    folder = check_folder(place)
    (name,) = {record.device.folder for record in records}
    return write_segment(folder / name, [record.to_bytes() for record in records])


def check_folder(place: Place) -> Path:
    """A place as the folder that can be added to.

    Raises:
        CacheError: It is a file, or remote.
    """
    check_place(place)
    path = local(place)
    try:
        single = path.is_file()
    except OSError:
        single = False
    if single:
        raise CacheError(
            f"cache place {str(path)!r} is a single file, which is read only; "
            "put a folder first in SHAPETUNE_CACHE (or give --cache a folder)"
        )
    return path
