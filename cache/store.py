"""Cache places on disk: where they are, reading them into a set, adding to the first.

Reading never writes, and never fails on damage: what cannot be read is skipped
and listed. A place is a folder with one sub-folder per device, or a single
``.msgpack`` file.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from .errors import CacheError
from .key import Device
from .record import Record
from .record_set import Damage, RecordSet
from .segment import MAX_SEGMENT_BYTES, SUFFIX, is_segment, read_frames, write_segment

log = logging.getLogger("shapetune")


def default_places() -> list[Path]:
    """The places of ``SHAPETUNE_CACHE``, or the user's cache folder; the first is written to."""
    named = os.environ.get("SHAPETUNE_CACHE", "")
    places = [Path(part).expanduser() for part in named.split(os.pathsep) if part]
    if places:
        return places
    import platformdirs  # only where it is needed: the import of shapetune stays light

    return [Path(platformdirs.user_cache_dir("shapetune"))]


def load(places: Iterable[Path | str], device: Device | None = None) -> RecordSet:
    """All records in these places; with ``device``, only those of its folder.

    Places that do not exist hold nothing. What is damaged is skipped, logged
    once, and listed in ``RecordSet.damage``.

    Raises:
        CacheError: A place is a file of something else.
    """
    found = RecordSet()
    for place in map(Path, places):
        for path in _segments(place, device, found):
            _read_into(found, path)
    if found.damage:
        first = found.damage[0]
        log.warning(
            "skipped %d damaged part(s) of the cache; first: %s: %s",
            len(found.damage), first.path, first.reason,
        )  # fmt: skip
    return found


def check_place(place: Path) -> None:
    """Refuses a place that is a file of something else.

    Raises:
        CacheError: It is.
    """
    try:
        if place.is_file() and not is_segment(place):
            raise CacheError(
                f"cache place {str(place)!r} is a file, but not a shapetune cache; "
                "name a folder, or a .msgpack file made by shapetune"
            )
    except CacheError:
        raise
    except PermissionError:
        return
    except OSError as error:  # a name that is too long, a loop of links
        raise CacheError(f"cache place {str(place)!r} cannot be used: {error}") from error


def _segments(place: Path, device: Device | None, found: RecordSet) -> list[Path]:
    check_place(place)
    try:
        if place.is_file():
            return [place]
        folders = [place / device.folder] if device else [p for p in place.iterdir() if p.is_dir()]
    except FileNotFoundError:
        return []
    except (OSError, RuntimeError) as error:
        found.damage.append(Damage(place, f"cannot be read: {error}"))
        return []
    return [path for folder in folders for path in _segments_of(folder, found)]


def _segments_of(folder: Path, found: RecordSet) -> list[Path]:
    try:
        if not folder.is_dir():
            return []
        paths = sorted(folder.iterdir())
    except (OSError, RuntimeError) as error:
        found.damage.append(Damage(folder, f"cannot be read: {error}"))
        return []
    return [path for path in paths if path.suffix == SUFFIX and not path.name.startswith(".")]


def _read_into(found: RecordSet, path: Path) -> None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            found.damage.append(Damage(path, "is not a regular file"))
            return
        with path.open("rb") as file:
            data = file.read(MAX_SEGMENT_BYTES + 1)
        if len(data) > MAX_SEGMENT_BYTES:
            found.damage.append(Damage(path, "is larger than any segment may be"))
            return
    except OSError as error:
        # A segment may be folded into another between listing and reading.
        if not isinstance(error, FileNotFoundError):
            found.damage.append(Damage(path, f"cannot be read: {error.strerror or error}"))
        return
    for payload in read_frames(data):
        if payload is None:
            found.damage.append(Damage(path, "a damaged stretch"))
        else:
            found.add(payload, path)


def publish(place: Path, records: Sequence[Record]) -> Path:
    """Adds records of one device to a place, as a new segment, and returns its path.

    Raises:
        CacheError: The place is a file, or cannot be written.
    """
    check_place(place)
    if place.is_file():
        raise CacheError(
            f"cache place {str(place)!r} is a single file, which is read only; "
            "put a folder first in SHAPETUNE_CACHE (or give --cache a folder)"
        )
    (folder,) = {record.device.folder for record in records}
    return write_segment(place / folder, [record.to_bytes() for record in records])


def check_writable(place: Path, device: Device) -> None:
    """Makes sure, before hours of work, that a device's records can be published to a place.

    Raises:
        CacheError: They cannot.
    """
    check_place(place)
    probe = place / device.folder
    try:
        while not probe.exists() and probe != probe.parent:
            probe = probe.parent
        writable = probe.is_dir() and os.access(probe, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):
        writable = False
    if not writable:
        raise CacheError(
            f"the cache at {place} cannot be written; "
            "set SHAPETUNE_CACHE (or --cache) to a folder that you may write to"
        )
