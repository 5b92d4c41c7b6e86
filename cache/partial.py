"""Trials of a problem whose tuning is under way, so that a run that is killed can be resumed.

Each is published when it was made; the record of the problem holds them all, and
then they are discarded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .choice import Versions, minor
from .envelope import Head, read_head, record_id
from .errors import RecordError
from .fields import build
from .key import Device, Problem
from .record import Trial, pack_trials, read_trials
from .segment import SUFFIX, read_frames
from .subject import opened, seal

#: The kind of record that this is.
KIND = "trials"

#: A segment of trials is far smaller than this; larger ones are not looked into.
_MAX_SEGMENT_BYTES = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class _Origin:
    shapetune: str
    jax: str
    jaxlib: str
    host: str
    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class Trials:
    """Some trials of one problem on one device.

    Attributes:
        problem: The problem.
        device: The device.
        trials: The trials; each knows its implementation's version.
        shapetune, jax, jaxlib: Versions.
        host: A hash of the host's name.
        time: Seconds since 1970, UTC.
    """

    problem: Problem
    device: Device
    trials: tuple[Trial, ...]
    shapetune: str
    jax: str
    jaxlib: str
    host: str
    time: float

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        rest = {
            "trials": pack_trials(self.trials),
            "origin": {f.name: getattr(self, f.name) for f in dataclasses.fields(_Origin)},
        }
        return seal(KIND, self.problem, self.device, rest)

    @property
    def id(self) -> str:
        """A hash of the bytes, 32 hexadecimal digits."""
        return record_id(self.to_bytes())

    def fresh(self, versions: Versions) -> tuple[Trial, ...]:
        """Those made with the versions in use."""
        return fresh(self.trials, self.jax, versions)


def fresh(trials: tuple[Trial, ...], jax: str, versions: Versions) -> tuple[Trial, ...]:
    """Those of some trials made with ``jax`` that the versions in use would repeat."""
    if minor(jax) != minor(versions.jax):
        return ()
    return tuple(
        t for t in trials if versions.implementation(t.candidate.implementation) == t.version
    )


def from_head(head: Head) -> Trials:
    """The trials that start with this head.

    Raises:
        RecordError: Something in them is missing, of a wrong type or out of range.
    """
    problem, device, rest = opened(head)
    origin = build(_Origin, rest.get("origin"))
    return Trials(
        problem=problem,
        device=device,
        trials=read_trials(rest.get("trials")),
        **{f.name: getattr(origin, f.name) for f in dataclasses.fields(_Origin)},
    )


def discard(place: Path, device: Device, problem: Problem) -> int:
    """Removes the segments of a place that hold nothing but trials of this problem.

    What they hold is in the problem's record. Returns how many there were; what
    cannot be read or removed stays.
    """
    removed = 0
    for path in sorted((place / device.folder).glob(f"*{SUFFIX}")):
        try:
            if path.stat().st_size > _MAX_SEGMENT_BYTES:
                continue
            if all(_is_of(frame, problem) for frame in read_frames(path.read_bytes())):
                path.unlink()
                removed += 1
        except (OSError, RecordError):
            continue
    return removed


def _is_of(frame: tuple[str, bytes] | None, problem: Problem) -> bool:
    if frame is None:
        return False
    head = read_head(frame[1])
    return head.kind == KIND and head.problem_key == problem.key
