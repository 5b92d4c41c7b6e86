"""Uniting caches, folding many segments into few, and looking for damage.

No step here has a moment in which a reader could miss a record: what replaces
segments is in place before they go.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .errors import CacheError
from .key import Device
from .places import Place, Remote, is_gone
from .record_set import Damage, RecordSet
from .segment import MAX_SEGMENT_BYTES, pack_segment, write_file, write_segments
from .store import check_folder, load_folders, read_folder

#: Where damaged segments go, in their device's folder, when a cache is repaired.
ASIDE = "damaged"
#: A temporary file this old belongs to no writer that still lives.
_ABANDONED_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Change:
    """What a merge or a compaction did.

    Attributes:
        added: Records that are new in the place.
        present: Records that were there already, or are still.
        written: Segments that were written.
        removed: Segments that they replace.
        damage: What could not be read.
    """

    added: int
    present: int
    written: int
    removed: int
    damage: tuple[Damage, ...]


def device_folders(place: Path) -> list[Path]:
    """The device folders of a place."""
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and path.name[0] != ".")
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CacheError(
            f"cache place {str(place)!r} is a single file, or below one, where a folder is "
            "needed; shapetune cache merge and import read such files"
        ) from None
    except OSError as error:
        raise CacheError(f"cannot list the cache at {place}: {error.strerror}") from error


def merge(
    place: Place,
    sources: Sequence[Place],
    *,
    keep: Callable[[str], bool] = lambda device_key: True,
    tell: Callable[[str], None] = lambda name: None,
) -> Change:
    """Adds the records of other places to a place: set union, and nothing lost.

    Args:
        place: The folder that is added to.
        sources: Places to add.
        keep: Which devices' records to take, by the device's key.
        tell: Hears of each device folder that is done.

    Raises:
        CacheError: The place cannot be written, or a source is something else or not there.
    """
    target = check_folder(place)
    missing = [source for source in sources if is_gone(source)]
    if missing:
        raise CacheError(f"there is no cache at {', '.join(map(str, missing))}; nothing was merged")
    coming = load_folders([_at_hand(source) for source in sources], lambda name: True)
    added, present, written = 0, 0, 0
    for key, payloads in sorted(coming.by_device_key().items()):
        device = Device.from_key(key)
        if device is None or not keep(key):
            continue
        here = RecordSet()
        read_folder(target / device.folder, here)
        known = here.ids
        new = [payload for identity, payload in payloads.items() if identity not in known]
        added += len(new)
        present += len(payloads) - len(new)
        written += len(write_segments(target / device.folder, new))
        tell(device.folder)
    return Change(added, present, written, 0, tuple(coming.damage))


def _at_hand(source: Place) -> Place:
    """A source as it is now: one that was named to be merged may not be an old mirror of it."""
    if not isinstance(source, Remote):
        return source
    from .mirror import fetched  # only where it is needed: it knows remote places

    return fetched(source)


def compact(place: Place, tell: Callable[[str], None] = lambda name: None) -> Change:
    """Folds the segments of each device into as few as their size allows.

    Writers and readers may go on meanwhile; segments with damage stay.

    Raises:
        CacheError: The place cannot be written.
    """
    present, written, removed = 0, 0, 0
    damage: list[Damage] = []
    for folder in device_folders(check_folder(place)):
        found = RecordSet()
        whole = read_folder(folder, found)
        _sweep(folder)
        if len(whole) > 1:
            # Records that only a damaged segment holds are put down a second time.
            new = write_segments(folder, found.payloads)
            removed += _remove(path for path in whole if path not in new)
            written += len(new)
        present += len(found)
        damage += found.damage
        tell(folder.name)
    return Change(0, present, written, removed, tuple(damage))


def _remove(paths: Iterable[Path]) -> int:
    removed = 0
    for path in paths:
        try:
            path.unlink()
            removed += 1
        except FileNotFoundError:
            continue  # another compaction did
        except OSError as error:
            raise CacheError(
                f"cannot remove {path}, whose records are in another segment now: {error.strerror}"
            ) from error
    return removed


def _sweep(folder: Path) -> None:
    """Removes temporary files that writers left when they were killed."""
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()
        except OSError:
            continue


def export(places: Iterable[Place], path: Path, found: RecordSet | None = None) -> int:
    """Writes the records of these places as one file, and returns how many they are.

    Raises:
        CacheError: They do not fit one file, or it cannot be written.
    """
    if path.suffix != ".msgpack":
        raise CacheError(f"a cache in one file must be called NAME.msgpack, got {str(path)!r}")
    found = load_folders(places, lambda name: True) if found is None else found
    data = pack_segment(found.payloads)
    if len(data) > MAX_SEGMENT_BYTES:
        raise CacheError(
            f"{len(found)} records make {len(data) / 2**20:.0f} MiB, and one file holds "
            f"{MAX_SEGMENT_BYTES / 2**20:.0f}; export fewer, or merge into a folder"
        )
    try:
        write_file(path, data)
    except CacheError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise CacheError(
            f"cannot write {str(path)!r}: {reason}; name a file in a folder that you may write to"
        ) from error
    return len(found)


def verify(places: Iterable[Place]) -> RecordSet:
    """Reads these places, every record of them, and lists all damage."""
    found = load_folders(places, lambda name: True)
    found.decode_all()
    return found


def repair(place: Place) -> list[Path]:
    """Moves damaged segments aside, once their good records are in new ones; their new paths.

    Raises:
        CacheError: The place cannot be written.
    """
    moved = []
    for folder in device_folders(check_folder(place)):
        found = RecordSet()
        read_folder(folder, found)
        found.decode_all()
        hurt = sorted({one.path for one in found.damage if one.path.parent == folder})
        if hurt and found.sound_payloads:
            write_segments(folder, found.sound_payloads)
        for path in hurt:
            aside = folder / ASIDE / path.name
            try:
                aside.parent.mkdir(exist_ok=True)
                path.rename(aside)
            except OSError as error:
                raise CacheError(f"cannot move {path} aside: {error.strerror}") from error
            moved.append(aside)
    return moved
