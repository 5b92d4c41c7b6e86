"""Where caches are: the read path of user, site and shipped places, and what may be written.

A place is a local folder, a local ``.msgpack`` file, or the URL of a remote
folder or file. Nothing here reads a record.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .errors import CacheError
from .key import Device
from .segment import is_segment

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL | re.IGNORECASE)
#: A URL at the start of a list: what names the host may hold a colon, the rest may not.
_URL_IN_LIST = re.compile(
    rf"[a-z][a-z0-9+.-]+://([^/{os.pathsep}@]*(:[^/@]*)?@)?[^/{os.pathsep}]*(:\d+)?[^{os.pathsep}]*",
    re.IGNORECASE,
)
_MAX_PATH = 4000
_MAX_NAME = 255
_NAMED = "name a folder, a .msgpack file made by shapetune, or a URL such as s3://bucket/cache"

#: Records that a release brings along; there may be none.
SHIPPED = Path(__file__).resolve().parent.parent / "shipped"


def without_secrets(text: str) -> str:
    """A URL, or a list of places, without the user names and passwords in its URLs."""
    return re.sub(r"://[^/@]*@", "://***@", text)


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """A remote place: only read, through a local mirror."""

    url: str

    def __str__(self) -> str:
        return without_secrets(self.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.url.rstrip("/").rpartition("/")[2]


Place = Path | Remote


def as_place(value: object) -> Place:
    """A place from what a person names: a path, with ``~`` for a home, or a URL.

    Raises:
        CacheError: It is empty, of another type, too long, or of a user who is not there.
    """
    if isinstance(value, Remote):
        return value
    if not isinstance(value, str | os.PathLike):
        raise CacheError(f"a cache place must be a path or a URL, got {value!r:.80}; {_NAMED}")
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip():
        raise CacheError(f"a cache place is named by {text!r:.80}; {_NAMED}")
    url = _URL.fullmatch(text) if isinstance(value, str) else None
    named = text
    if url:
        scheme, named = url["scheme"].lower(), url["rest"]
        remote = scheme not in ("file", "local")
        if not (named.strip("/") if remote else named):
            raise CacheError(f"cache place {text!r:.80} names nothing after its scheme; {_NAMED}")
        if remote:
            return Remote(f"{scheme}://{named.rstrip('/')}")
        named = re.sub(r"^localhost(?=/)", "", named)
    path = Path(named)
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise CacheError(f"cache place {text!r:.80} cannot be found: {error}; {_NAMED}") from None
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > _MAX_NAME or len(str(path)) > _MAX_PATH or "\0" in text:
        raise CacheError(
            f"cache place {text[:60]!r}… is not a path that can be: a name in it is too long, "
            f"or holds a null character; {_NAMED}"
        )
    return path


def as_places(paths: object) -> list[Place]:
    """One place, or several of them, from what a person names.

    Raises:
        CacheError: See ``as_place``.
    """
    if isinstance(paths, Iterable) and not isinstance(paths, str | bytes | os.PathLike):
        return [as_place(path) for path in paths]
    return [as_place(paths)]


def split_places(text: str) -> list[Place]:
    """The places of a list that is separated like PATH; URLs may hold their colons."""
    found, at = [], 0
    while at < len(text):
        url = _URL_IN_LIST.match(text, at)
        end = url.end() if url else text.find(os.pathsep, at)
        end = len(text) if end < 0 else end
        if text[at:end].strip():
            found.append(as_place(text[at:end]))
        at = end + 1
    return found


def user_place() -> Path | None:
    """The user's own cache folder, or None where there is no home to hold it."""
    import platformdirs  # only where it is needed: the import of shapetune stays light

    try:
        path = Path(platformdirs.user_cache_dir("shapetune"))
    except RuntimeError:  # a user without a home
        return None
    return path if path.is_absolute() else None


def site_place() -> Path | None:
    """The cache that all users of a machine share: ``SHAPETUNE_SITE_CACHE``, or the system's.

    None where the variable is empty.

    Raises:
        CacheError: The variable names no place, or a remote one.
    """
    named = os.environ.get("SHAPETUNE_SITE_CACHE")
    if named is not None:
        place = as_place(named) if named.strip() else None
        if place is not None and not isinstance(place, Path):
            raise CacheError(
                f"SHAPETUNE_SITE_CACHE={named!r} is remote; name a folder of this machine, "
                "or name it in SHAPETUNE_CACHE, after a folder"
            )
        return place
    import platformdirs

    return Path(platformdirs.site_data_dir("shapetune")) / "cache"


def own_places() -> list[Place]:
    """The places of ``SHAPETUNE_CACHE``, or the user's cache folder."""
    named = split_places(os.environ.get("SHAPETUNE_CACHE", ""))
    user = None if named else user_place()
    return named or ([user] if user else [])


def read_path() -> list[Place]:
    """All places that are read, the first of which is written to.

    1. ``SHAPETUNE_CACHE``, or the user's cache folder,
    2. the machine's, if it is there,
    3. the records that the release brings along, if there are any.
    """
    shared = [place for place in (site_place(), SHIPPED) if place is not None and _is_dir(place)]
    return [*own_places(), *shared]


def is_gone(place: Place) -> bool:
    """Whether a path is certainly not there; one that may not be looked at is not."""
    try:
        return isinstance(place, Path) and not place.exists()
    except OSError:
        return False


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def write_place() -> Path:
    """The place that is written to: the first one.

    Raises:
        CacheError: There is none, or it is remote.
    """
    places = own_places()
    if not places:
        raise CacheError(
            "there is no home folder to keep a cache in; set SHAPETUNE_CACHE (or --cache) "
            "to a folder that you may write to"
        )
    return local(places[0])


def local(place: Place) -> Path:
    """A place as a path.

    Raises:
        CacheError: It is remote, which is read only.
    """
    if isinstance(place, Remote):
        raise CacheError(
            f"cache place {str(place)!r} is remote, which is read only; put a folder first in "
            "SHAPETUNE_CACHE (or give --cache a folder), and share it with shapetune cache push"
        )
    return place


def check_place(place: Place) -> None:
    """Refuses a place that is a file of something else.

    Raises:
        CacheError: It is.
    """
    if isinstance(place, Remote):
        return
    try:
        if place.is_file() and not is_segment(place):
            raise CacheError(
                f"cache place {str(place)!r} is a file, but not a shapetune cache; "
                "name a folder, or a .msgpack file made by shapetune"
            )
    except (CacheError, PermissionError) as error:
        if isinstance(error, CacheError):
            raise
    except (OSError, ValueError) as error:  # a loop of links, a share that is gone
        raise CacheError(f"cache place {str(place)!r:.200} cannot be used: {error}") from error


def check_there(place: Place, done: str = "read") -> None:
    """Refuses a place that was named to be read, and does not exist.

    Raises:
        CacheError: It does not.
    """
    if is_gone(place):
        raise CacheError(
            f"there is no cache at {str(place)!r:.200}; nothing was {done}. "
            "Name one that shapetune tune or shapetune cache made"
        )


def check_writable(place: Place, device: Device | None = None) -> None:
    """Makes sure, before hours of work, that a device's records can be published to a place.

    Without a device, only that its folder can be made there.

    Raises:
        CacheError: They cannot.
    """
    check_place(place)
    probe = local(place) / device.folder if device else local(place)
    try:
        while not probe.exists() and probe != probe.parent:
            probe = probe.parent
        writable = probe.is_dir() and os.access(probe, os.W_OK | os.X_OK)
    except (OSError, RuntimeError, ValueError):
        writable = False
    if not writable:
        raise CacheError(
            f"the cache at {place} cannot be written; "
            "set SHAPETUNE_CACHE (or --cache) to a folder that you may write to"
        )
