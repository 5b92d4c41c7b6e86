"""Remote places through fsspec: what is there, and copying segments to and from it.

Segments are named by their content, so only missing ones are copied, a copy that
was interrupted is taken up again, and what arrives is checked against its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import CacheError
from .key import Device
from .merge import device_folders
from .places import Place, Remote, check_place
from .record_set import Damage, RecordSet
from .segment import (
    MAX_SEGMENT_BYTES,
    SUFFIX,
    is_segment_name,
    segment_name,
    write_file,
    write_segments,
)
from .store import read_bytes, segments_of

#: Drivers that are not part of fsspec, with the extra of this package that brings them.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_EXTRAS |= {"sftp": "sftp", "ssh": "sftp"}
_READ_ONLY = ("http", "https")
#: Stores in which a file appears whole or not at all; elsewhere it is renamed into place.
_WHOLE = ("s3", "s3a", "gs", "gcs")

_FOLDER = re.compile(r"[a-z0-9][a-z0-9-]{0,80}")


@dataclasses.dataclass
class Transfer:
    """What a copy did.

    Attributes:
        copied: Segments that were copied.
        present: Segments that were there already.
        bytes: Bytes that were copied.
        refused: Segments that did not arrive whole, or are none.
        listed: What a remote place that was pulled from has, as ``FOLDER/NAME``.
    """

    copied: int = 0
    present: int = 0
    bytes: int = 0
    refused: list[Damage] = dataclasses.field(default_factory=list)
    listed: set[str] = dataclasses.field(default_factory=set)


Progress = Callable[[int, int, str], None]


def _silent(done: int, total: int, name: str) -> None:
    """No progress."""


class Store:
    """A remote folder of segments: ``DEVICE/SEGMENT.msgpack`` below one URL.

    Raises:
        CacheError: No driver for such a URL.
    """

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.scheme = remote.url.partition("://")[0]
        with _failures(remote, "open"):
            self._fs, root = _filesystem(remote)
        self._root: str = root.rstrip("/")

    def names(self, folder: str | None = None) -> list[str]:
        """The segments as ``FOLDER/NAME``; with ``folder``, those of one device.

        Raises:
            CacheError: It cannot be listed.
        """
        with _failures(self.remote, "list"):
            folders = [folder] if folder else self._list("", _FOLDER.fullmatch)
            return [f"{one}/{name}" for one in folders for name in self._list(one, is_segment_name)]

    def _list(self, folder: str, wanted: Callable[[str], Any]) -> list[str]:
        path = f"{self._root}/{folder}".rstrip("/")
        # A page of links is asked for by its folder's name with a slash.
        asked = path + "/" if self.scheme in _READ_ONLY else path
        try:
            listed = self._fs.ls(asked, detail=False, refresh=True)
        except TypeError:
            listed = self._fs.ls(asked, detail=False)
        except FileNotFoundError:
            return []
        parents = (path, path.lstrip("/"))
        names = []
        for one in map(str, listed):
            parent, _, name = one.rstrip("/").rpartition("/")
            if wanted(name) and parent in parents:
                names.append(name)
        return sorted(set(names))

    def read(self, name: str) -> bytes:
        """The bytes of a segment, no more than one may have.

        Raises:
            CacheError: It cannot be read, or is too large.
        """
        path = f"{self._root}/{name}" if name else self._root
        with _failures(self.remote, "read"):
            options = {"block_size": 0} if self.scheme in _READ_ONLY else {}
            with self._fs.open(path, "rb", **options) as file:
                data = bytes(file.read(MAX_SEGMENT_BYTES + 1))
        if len(data) > MAX_SEGMENT_BYTES:
            raise CacheError(f"{self.remote}/{name} is larger than any segment may be")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Puts a segment in place, whole or not at all.

        Raises:
            CacheError: It cannot be written.
        """
        if self.scheme in _READ_ONLY:
            raise CacheError(f"{self.remote} can only be read: push to a bucket, sftp or a folder")
        path = f"{self._root}/{name}"
        with _failures(self.remote, "write to"):
            if self.scheme in _WHOLE:
                self._fs.pipe_file(path, data)
                return
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            temporary = f"{path.rpartition('/')[0]}/.{secrets.token_hex(8)}.tmp"
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, path)


def _filesystem(remote: Remote) -> tuple[Any, str]:
    scheme = remote.url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs  # only where a place is remote

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if scheme == "memory":
            options = {}
        if scheme in _READ_ONLY:
            # fsspec asks whatever a page links to: only our own names are looked at.
            options["simple_links"] = False
        fs, root = url_to_fs(remote.url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        remedy = f"pip install 'shapetune[{extra}]'" if extra else "install its fsspec driver"
        raise CacheError(f"{remote} needs a driver that is not installed: {remedy}") from error
    except ValueError as error:
        raise CacheError(
            f"{remote} is not a place that can be reached: {error}; "
            "use file, s3, gs, http, https or sftp"
        ) from error
    return fs, str(root)


@contextlib.contextmanager
def _failures(remote: Remote, what: str) -> Iterator[None]:
    """Turns whatever a driver raises into one clear error."""
    try:
        yield
    except CacheError:
        raise
    except Exception as error:  # drivers raise their own libraries' errors
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CacheError(f"cannot {what} {remote}: {text}") from error


def is_whole(name: str, data: bytes) -> bool:
    """Whether a segment's bytes are those that its name stands for."""
    return segment_name(data) == name.rpartition("/")[2]


def pull(
    remote: Remote, place: Path, folder: str | None = None, progress: Progress = _silent
) -> Transfer:
    """Copies what a remote place has and a folder lacks.

    Args:
        remote: The remote place; one that ends in ``.msgpack`` is a single file.
        place: The local folder.
        folder: The device folder to copy; all if None.
        progress: Hears how many are done, of how many, and which.

    Raises:
        CacheError: The one cannot be read, or the other not written.
    """
    store = Store(remote)
    done = Transfer()
    if remote.name.endswith(SUFFIX):
        _pull_file(store, place, folder, done)
        return done
    names = store.names(folder)
    done.listed = set(names)
    for index, name in enumerate(names):
        progress(index, len(names), name)
        target = place / name
        if target.exists():
            done.present += 1
            continue
        try:
            data = store.read(name)
        except CacheError as error:
            # It was folded into another one meanwhile; or the place has gone.
            if name in store.names(name.partition("/")[0]):
                raise
            done.refused.append(Damage(Path(name), str(error)))
            continue
        if not is_whole(name, data):
            done.refused.append(Damage(Path(name), "its bytes are not those of its name"))
            continue
        write_file(target, data)
        done.copied += 1
        done.bytes += len(data)
    progress(len(names), len(names), "")
    return done


def _pull_file(store: Store, place: Path, folder: str | None, done: Transfer) -> None:
    """Takes a single file apart into the device folders that its records belong to."""
    data = store.read("")
    found = RecordSet()
    read_bytes(data, Path(store.remote.name), found)
    done.refused += found.damage
    for key, payloads in found.by_device_key().items():
        device = Device.from_key(key)
        if device is not None and folder in (None, device.folder):
            written = write_segments(place / device.folder, payloads.values())
            done.listed |= {f"{device.folder}/{path.name}" for path in written}
            done.copied += len(written)
    done.bytes += len(data)


def push(place: Path, target: Place, progress: Progress = _silent) -> Transfer:
    """Copies what a folder has and a remote place, or another folder, lacks.

    Damaged segments stay where they are.

    Raises:
        CacheError: The one cannot be read, or the other not written.
    """
    check_place(place)
    done = Transfer()
    found = RecordSet()
    segments = [path for folder in device_folders(place) for path in segments_of(folder, found)]
    done.refused += found.damage
    there, write = _target(target)
    for index, path in enumerate(segments):
        name = f"{path.parent.name}/{path.name}"
        progress(index, len(segments), name)
        if name in there:
            done.present += 1
            continue
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # folded into another one, which the next push takes
            continue
        except OSError as error:
            done.refused.append(Damage(path, f"cannot be read: {error.strerror}"))
            continue
        if not is_whole(name, data):
            done.refused.append(Damage(path, "damaged, or not a segment"))
            continue
        write(name, data)
        done.copied += 1
        done.bytes += len(data)
    progress(len(segments), len(segments), "")
    return done


def _target(target: Place) -> tuple[set[str], Callable[[str, bytes], None]]:
    """The segments that a target has, and how to add one."""
    if isinstance(target, Remote):
        if target.name.endswith(SUFFIX):
            raise CacheError(f"{target} is a single file: push to a folder, or export one")
        store = Store(target)
        return set(store.names()), store.write
    check_place(target)
    names = {
        f"{folder.name}/{path.name}"
        for folder in device_folders(target)
        for path in segments_of(folder, RecordSet())
    }
    return names, lambda name, data: write_file(target / name, data)
