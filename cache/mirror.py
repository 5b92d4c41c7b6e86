"""Local mirrors of remote places, so that a dispatch reads local files alone.

A mirror is refreshed when it is older than ``SHAPETUNE_MIRROR_AGE`` seconds (3600).
A place that is down costs a warning, and ``SHAPETUNE_REMOTE_TIMEOUT`` seconds (3).
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from . import remote
from .errors import CacheError, ConfigError
from .key import Device
from .places import Remote, user_place
from .segment import SUFFIX, write_file

log = logging.getLogger("shapetune")

#: A place that failed is not tried again for so long.
_PATIENCE_S = 60.0
#: Waits longer than this are no sign of intent, and some systems cannot time them.
_LONGEST_S = 1e9
_FETCHED, _FAILED = "fetched", "failed"
#: The file in a mirror that says what it mirrors.
_NAME = "place.txt"


def mirrored(place: Remote, device: Device | None) -> Path:
    """The local folder that mirrors a remote place, refreshed where it is too old.

    Never raises for a place that cannot be reached: what the mirror has counts.
    """
    folder = device.folder if device is not None else None
    mirror = _folder_of(place)
    stamps = mirror / ".stamps" / (folder or "all")
    age = _age(stamps / _FETCHED)
    if age < _seconds("SHAPETUNE_MIRROR_AGE", 3600.0):
        return mirror
    known = f"using its mirror of {age / 3600:.1f} h ago" if age < 1e9 else "it has no mirror yet"
    if _age(stamps / _FAILED) < _PATIENCE_S:
        log.warning("cache place %s failed a moment ago; %s", place, known)
        return mirror
    limit = _seconds("SHAPETUNE_REMOTE_TIMEOUT", 3.0)
    failure = _within(limit, lambda: _refresh(place, mirror, folder))
    if failure is None:
        _stamp(stamps / _FETCHED)
    else:
        _stamp(stamps / _FAILED)
        log.warning("cache place %s is left out: %s; %s", place, failure, known)
    return mirror


def fetched(place: Remote) -> Path:
    """The local folder that mirrors a remote place, brought up to date whatever its age.

    Raises:
        CacheError: The place cannot be reached.
    """
    mirror = _folder_of(place)
    _refresh(place, mirror, None)
    _stamp(mirror / ".stamps" / "all" / _FETCHED)
    return mirror


def out_of_reach(place: Remote, device: Device) -> bool:
    """Whether the last attempt to bring a device's mirror of a place up to date failed."""
    stamps = _folder_of(place) / ".stamps" / device.folder
    return _age(stamps / _FAILED) < _age(stamps / _FETCHED)


def _refresh(place: Remote, mirror: Path, folder: str | None) -> None:
    done = remote.pull(place, mirror, folder)
    for damage in done.refused:
        log.warning("skipped %s of %s: %s", damage.path, place, damage.reason)
    # What is gone there, because it was folded or taken back, goes here too.
    for path in mirror.glob(f"{folder or '*'}/*{SUFFIX}"):
        if f"{path.parent.name}/{path.name}" not in done.listed:
            path.unlink(missing_ok=True)


def _within(seconds: float, work: Callable[[], None]) -> str | None:
    """Runs some work, and waits for so long at most; why it failed, or None.

    A driver may be stuck in a connection: it is left to its thread, which ends
    with the process. What it still brings home is found the next time.
    """
    outcome: list[str | None] = [f"no answer within {seconds:g} s"]

    def run() -> None:
        try:
            work()
            outcome[0] = None
        except (CacheError, OSError) as error:
            outcome[0] = str(error)

    thread = threading.Thread(target=run, name="shapetune-mirror", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]


def _folder_of(place: Remote) -> Path:
    name = hashlib.blake2b(place.url.encode(), digest_size=10).hexdigest()
    named = os.environ.get("SHAPETUNE_MIRROR")
    user = user_place()
    roots = [Path(named).expanduser()] if named else []
    roots += [user.with_name("shapetune-mirrors")] if user is not None else []
    for root in roots:
        mirror = root / name
        try:
            if (mirror / _NAME).exists():
                return mirror
            write_file(mirror / _NAME, f"{place}\n".encode())
        except (CacheError, OSError):
            continue
        return mirror
    # Nowhere to keep it: this process has one of its own.
    return _own_mirrors() / name


def _own_mirrors() -> Path:
    global _own
    if _own is None:
        _own = tempfile.TemporaryDirectory(prefix="shapetune-mirror-", ignore_cleanup_errors=True)
    return Path(_own.name)


_own: tempfile.TemporaryDirectory[str] | None = None


def _age(stamp: Path) -> float:
    """Seconds since a stamp was set, infinite if never."""
    try:
        return max(time.time() - stamp.stat().st_mtime, 0.0)
    except OSError:
        return float("inf")


def _stamp(path: Path) -> None:
    try:
        write_file(path, b"")
    except CacheError:
        return  # it is then tried again the next time


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable) or default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= _LONGEST_S:
        raise ConfigError(
            f"{variable}={text!r} is not a number of seconds from 0 to {_LONGEST_S:.0f}"
        )
    return number
