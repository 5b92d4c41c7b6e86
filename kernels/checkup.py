"""A check-up of the caches in force: places, damage, stale and quarantined records, misses.

Each finding comes with what to do about it; nothing is changed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from .._version import __version__
from ..cache import miss, pin, quarantine, store
from ..cache.errors import CacheError, ShapetuneError
from ..cache.key import Device
from ..cache.places import (
    Place,
    Remote,
    check_place,
    check_writable,
    read_path,
    without_secrets,
)
from ..cache.record_set import RecordSet
from .decision import Settings, decide, versions
from .device import current_device
from .llvm.call import missing as llvm_missing
from .misses import Missed, costliest
from .op import get_op, ops

#: More segments than this in one device folder are worth folding.
MANY_SEGMENTS = 256


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes:
        topic: What: ``"place"``, ``"damage"``, ``"stale"``…
        text: What was found.
        remedy: What to do about it; empty where all is well.
    """

    topic: str
    text: str
    remedy: str = ""


def check_up(places: Sequence[Place] | None = None) -> list[Finding]:
    """Everything worth knowing of the caches in force, the good and the bad."""
    device = current_device()
    found = [
        Finding("versions", f"shapetune {__version__}, jax {jax.__version__}"),
        Finding("device", f"{device.name}, {device.platform} {device.capability}".rstrip()),
    ]
    found += _kernels(device)
    try:
        places = read_path() if places is None else places
        settings = Settings.from_environment()
    except ShapetuneError as error:
        return [*found, Finding("settings", str(error), "set the variable as it says")]
    found += _environment()
    for index, place in enumerate(places):
        found += _place(place, device, first=index == 0)
    if not places:
        found.append(Finding("place", "there is no cache place", "set SHAPETUNE_CACHE to a folder"))
    try:
        records = store.load(places, device)
    except CacheError as error:
        return [*found, Finding("place", str(error), "name another place")]
    except ShapetuneError as error:  # a variable that only a mirror reads
        return [*found, Finding("settings", str(error), "set the variable as it says")]
    found += _out_of_reach(places, device)
    found += _damage(records)
    found += _records(records, device, settings)
    found += _misses(places, records, device)
    return found


def _kernels(device: Device) -> list[Finding]:
    """Kernels for this kind of device that are not to be had."""
    reason = llvm_missing() if device.platform == "cpu" else None
    if reason is None:
        return []
    remedy = "pip install 'shapetune[cpu]'" if "not installed" in reason else ""
    text = f"attention goes without its fastest kernels for CPUs: {reason.partition(';')[0]}"
    return [Finding("kernels", text, remedy)]


def _environment() -> list[Finding]:
    named = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("SHAPETUNE_")
    }
    return [Finding("setting", f"{name}={without_secrets(v)}") for name, v in named.items()]


def _place(place: Place, device: Device, first: bool) -> list[Finding]:
    role = "written to and read" if first else "read"
    if not isinstance(place, Path):
        return [Finding("place", f"{place}: remote, read through its mirror")]
    try:
        check_place(place)
        if first and not place.is_file():
            check_writable(place, device)
        there = place.exists()
    except (CacheError, OSError) as error:
        return [Finding("place", str(error), "tuning cannot be kept there; dispatch goes on")]
    if not there:
        made = ", it is made when something is tuned" if first else ""
        return [Finding("place", f"{place}: not there yet{made}")]
    if not os.access(place, os.R_OK):
        return [Finding("place", f"{place}: may not be read", "ask its owner for permission")]
    if place.is_file():
        remedy = "put a folder first in SHAPETUNE_CACHE to tune" if first else ""
        return [Finding("place", f"{place}: a file, read only", remedy)]
    count = len(store.segments_of(place / device.folder, RecordSet()))
    remedy = "shapetune cache compact" if count > MANY_SEGMENTS else ""
    return [Finding("place", f"{place}: {role}, {count} segment(s) of this device", remedy)]


def _out_of_reach(places: Sequence[Place], device: Device) -> list[Finding]:
    remote = [place for place in places if isinstance(place, Remote)]
    if not remote:
        return []
    from ..cache.mirror import out_of_reach  # only where it is needed: it knows remote places

    remedy = "check the URL, the network and the credentials; shapetune cache pull shows the error"
    text = "cannot be reached; what its mirror has is used"
    return [
        Finding("place", f"{place}: {text}", remedy)
        for place in remote
        if out_of_reach(place, device)
    ]


def _damage(records: RecordSet) -> list[Finding]:
    records.decode_all()
    if not records.damage:
        return []
    first = records.damage[0]
    return [
        Finding(
            "damage",
            f"{len(records.damage)} damaged part(s), which are not used; "
            f"first: {first.path}: {first.reason}",
            "shapetune cache verify --repair, and pull or tune again what is missing",
        )
    ]


def _records(records: RecordSet, device: Device, settings: Settings) -> list[Finding]:
    stale: list[str] = []
    fallen: list[str] = []
    harmful = 0
    known = {one.problem: one for one in records if one.device.key == device.key}
    for problem, one in known.items():
        if problem.op not in ops():
            continue
        op = get_op(problem.op)
        reason = versions(op).staleness(one)
        if reason is not None:
            stale.append(reason)
        harmful += len(quarantine.in_force(records, device, problem, versions(op)))
        decision = decide(op, problem, device, records, settings)
        if decision.is_miss:
            passed = [step for step in decision.steps if step.startswith("passed over")]
            fallen.append(f"{problem.label}: {passed[0] if passed else decision.tier}")
    count = len(known)
    found = [Finding("records", f"{count} problem(s) tuned on this device")]
    if not count:
        found = [Finding("records", "nothing is tuned on this device", "shapetune tune --help")]
    if stale:
        what = "are not used" if settings.stale == "strict" else "are used behind fresh ones"
        text = f"{len(stale)} of them stale, which {what}; first: {stale[0]}"
        found.append(Finding("stale", text, "shapetune tune the same problems again"))
    if harmful:
        found.append(Finding("quarantine", f"{harmful} candidate(s) did harm and are passed over"))
    active = _pins(records, device)
    if active:
        found.append(Finding("pins", f"{active} problem(s) pinned"))
    if fallen:
        text = f"{len(fallen)} tuned problem(s) fall back all the same; first: {fallen[0]}"
        found.append(Finding("fallback", text, "shapetune explain says why; tune them again"))
    if records.unknown:
        text = f"{records.unknown} record(s) of a later version, carried along unread"
        found.append(Finding("records", text, "update shapetune to use them"))
    return found


def _pins(records: RecordSet, device: Device) -> int:
    problems = {one.problem for one in records.of_kind(pin.KIND) if one.device.key == device.key}
    last = [pin.latest(records.about(pin.KIND, device, problem)) for problem in problems]
    return sum(one is not None and one.active for one in last)


def missed(places: Sequence[Place], device: Device, records: RecordSet) -> list[Missed]:
    """What processes missed in these places, the costliest first."""
    local: list[Path] = [place for place in places if isinstance(place, Path)]
    found, _ = miss.read(local, device)
    return costliest(found, records, device)


def _misses(places: Sequence[Place], records: RecordSet, device: Device) -> list[Finding]:
    lost = missed(places, device, records)
    if not lost:
        return []
    first = lost[0]
    return [
        Finding(
            "misses",
            f"{len(lost)} problem(s) were called without a record of their own, "
            f"the costliest: {first.problem.label}, {first.calls} call(s), tier {first.tier}",
            "shapetune misses shows them, shapetune tune OP --from-misses tunes them",
        )
    ]
