"""Commands that move records and look after them: cache info, merge, export, import…"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..cache import merge as merging
from ..cache.errors import CacheError
from ..cache.key import Device
from ..cache.merge import Change
from ..cache.places import (
    Place,
    Remote,
    check_there,
    check_writable,
    is_gone,
    read_path,
    write_place,
)
from ..cache.record_set import Damage, RecordSet
from . import pins
from .options import (
    PlaceType,
    cache_option,
    json_option,
    place_option,
)
from .output import print_values
from .progress import Steps


@click.group()
def cache() -> None:
    """Moves tuned records between machines, and looks after them."""


def _damage_lines(damage: list[Damage] | tuple[Damage, ...]) -> list[str]:
    shown = [f"  damaged: {one.path}: {one.reason}" for one in damage[:20]]
    return [*shown, *([f"  … and {len(damage) - 20} more"] if len(damage) > 20 else [])]


def _damage_maps(damage: list[Damage] | tuple[Damage, ...]) -> list[dict[str, str]]:
    return [{"path": str(one.path), "reason": one.reason} for one in damage]


@cache.command()
@place_option
@json_option
def info(cache: Place | None, as_json: bool) -> None:
    """Says which places are read, and what is in them."""
    places = [cache] if cache else read_path()
    rows: list[dict[str, Any]] = []
    with Steps("places") as steps:
        steps.begin(len(places) + 1)
        for place in places:
            steps.doing(f"reading {place}")
            rows.append(_place_map(place))
            steps.advance()
        steps.doing("reading them together")
        every = merging.verify(places)
    values = {"places": rows, "records": len(every), "digest": every.digest}
    lines: list[str] = []
    for row in rows:
        lines.append(f"{row['place']}: {row['what']}")
        lines += [f"  {name}: {count} record(s)" for name, count in row["devices"].items()]
        lines += [f"  {kind}: {count}" for kind, count in row["kinds"].items()]
    lines.append(f"together {len(every)} record(s), digest {every.digest}")
    print_values(values, as_json, *lines, *_damage_lines(every.damage))


def _place_map(place: Place) -> dict[str, Any]:
    found = merging.verify([place])
    if isinstance(place, Remote):
        what = "remote, read through a mirror"
    elif is_gone(place):
        what = "not there yet"
    elif not os.access(place, os.R_OK):
        what = "may not be read"
    elif place.is_file():
        what = f"a file of {len(found)} record(s)"
    elif place.is_dir():
        segments = sum(1 for folder in merging.device_folders(place) for _ in folder.glob("*.msg*"))
        what = f"a folder of {len(found)} record(s) in {segments} segment(s)"
    else:
        what = "neither a folder nor a file"
    return {
        "place": str(place),
        "what": what,
        "records": len(found),
        "devices": {f"{d.name} ({d.cores} cores)": found.count_of(d) for d in found.devices},
        "kinds": {
            **found.kinds,
            **({"of another version": found.unknown} if found.unknown else {}),
        },
        "damage": _damage_maps(found.damage),
    }


@cache.command()
@click.argument("sources", nargs=-1, required=True, type=PlaceType())
@cache_option
@json_option
def merge(sources: tuple[Place, ...], cache: Path | None, as_json: bool) -> None:
    """Adds the records of other caches to yours: folders, .msgpack files or URLs."""
    with Steps("devices") as steps:
        steps.doing(f"reading {', '.join(map(str, sources))}")
        change = merging.merge(cache or write_place(), sources, tell=_done_with(steps, "merged"))
    _changed("merged", change, as_json)


@cache.command()
@cache_option
@json_option
def compact(cache: Path | None, as_json: bool) -> None:
    """Folds many small segments into few; readers and writers may go on meanwhile."""
    place = cache or write_place()
    with Steps("devices") as steps:
        steps.doing(f"reading {place}")
        change = merging.compact(place, tell=_done_with(steps, "folded"))
    _changed("compacted", change, as_json)


def _done_with(steps: Steps, what: str) -> Callable[[str], None]:
    """What hears of each device folder that is done."""

    def heard(name: str) -> None:
        steps.advance()
        steps.doing(f"{what} {name}")

    return heard


def _verified(places: Sequence[Place], steps: Steps) -> RecordSet:
    """All records of these places, every one looked into."""
    steps.doing(f"reading every record of {', '.join(map(str, places))}")
    return merging.verify(places)


def _changed(what: str, change: Change, as_json: bool) -> None:
    values = {
        "added": change.added,
        "present": change.present,
        "segments_written": change.written,
        "segments_removed": change.removed,
        "damage": _damage_maps(change.damage),
    }
    line = (
        f"{what}: {change.added} new record(s), {change.present} there already; "
        f"{change.written} segment(s) written, {change.removed} removed"
    )
    print_values(values, as_json, line, *_damage_lines(change.damage))


@cache.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--op", help="Only records of this op.")
@click.option("--device", help="Only records of devices whose name holds this.")
@place_option
@json_option
def export(
    path: Path, op: str | None, device: str | None, cache: Place | None, as_json: bool
) -> None:
    """Writes records as one .msgpack file, which is a cache to read or to merge."""
    with Steps("places") as steps:
        found = _verified([cache] if cache else read_path(), steps)
    kept = found.where(
        lambda head: (
            (op is None or head.problem_key.startswith(f"{op}|"))
            and (device is None or device.lower() in head.device_key.lower())
        )
    )
    if not len(kept):
        raise CacheError(f"there are no such records; nothing was written to {path}")
    count = merging.export([], path, kept)
    print_values({"records": count, "path": str(path)}, as_json, f"{count} record(s) in {path}")


@cache.command(name="import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--target", help="The device that they are of, as a key of targets.toml.")
@cache_option
@json_option
def import_(files: tuple[Path, ...], target: str | None, cache: Path | None, as_json: bool) -> None:
    """Takes up caches in one file, and benchmark files of others.

    Figures of a benchmark file choose an implementation with its default config,
    below everything that was measured here, and only under SHAPETUNE_IMPORTED=1.
    """
    place = cache or write_place()
    results = [_import_one(path, place, target) for path in files]
    print_values(
        {"files": results},
        as_json,
        *(
            f"{one['path']}: {one['records']} new record(s), {one['what']}"
            + (f"; {len(one['damage'])} damaged part(s) skipped" if one.get("damage") else "")
            for one in results
        ),
    )


def _import_one(path: Path, place: Path, target: str | None) -> dict[str, Any]:
    from ..cache import imported, store

    if path.suffix == ".msgpack":
        change = merging.merge(place, [path])
        return {
            "path": str(path),
            "records": change.added,
            "what": "of a cache",
            "damage": _damage_maps(change.damage),
        }
    benchmark = imported.read_benchmark(path)
    device = _device_named(benchmark.device_name, target)
    records = benchmark.records(device, path.name, round(time.time(), 3))
    if not records:
        raise CacheError(
            f"{path} has no row that can be used; it skipped {dict(benchmark.skipped)}"
        )
    check_writable(place, device)
    known = store.load([place], device).of_kind(imported.KIND)
    records = imported.unknown(records, known)
    if records:
        store.publish(place, records)
    left = sum(benchmark.skipped.values())
    return {
        "path": str(path),
        "records": len(records),
        "what": f"measured by others on {device.name}; {left} row(s) left out",
        "device": device.to_map(),
        "skipped": dict(benchmark.skipped),
    }


def _device_named(name: str, target: str | None) -> Device:
    """The device that a benchmark file means: a target, or the one at hand."""
    from ..autotune import targets
    from ..kernels import current_device

    if target is not None:
        return targets.target(target).device
    for one in targets.targets().values():
        if one.name == name:
            return one.device
    here = current_device()
    if here.name == name:
        return here
    known = ", ".join(targets.targets())
    raise CacheError(
        f"the figures are of {name!r}, which is neither this device ({here.name}) nor a known "
        f"target; name one with --target: {known}"
    )


@contextmanager
def _copying(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Shows the segments that are copied, of which it hears."""

    def heard(done: int, total: int, name: str) -> None:
        if done:
            steps.advance()
        else:
            steps.begin(total)
        if name:
            steps.doing(f"{what} {name}")

    with Steps("segments") as steps:
        steps.doing(f"{what}: looking at what is there")
        yield heard


@cache.command()
@click.argument("url", type=PlaceType())
@cache_option
@json_option
def push(url: Place, cache: Path | None, as_json: bool) -> None:
    """Copies your segments to a remote place or another folder that lacks them."""
    from ..cache import remote

    with _copying("pushing") as progress:
        done = remote.push(cache or write_place(), url, progress)
    _transferred("pushed", done, as_json)


@cache.command()
@click.argument("url", type=PlaceType())
@cache_option
@json_option
def pull(url: Place, cache: Path | None, as_json: bool) -> None:
    """Copies the segments of a remote place or another folder that you lack."""
    from ..cache import remote

    place = cache or write_place()
    with _copying("pulling") as progress:
        if isinstance(url, Remote):
            done = remote.pull(url, place, None, progress)
        else:
            check_there(url, "pulled")
            done = remote.push(url, place, progress)
    _transferred("pulled", done, as_json, f"nothing of a cache is at {url}")


def _transferred(what: str, done: Any, as_json: bool, nothing: str = "") -> None:
    values = {
        "copied": done.copied,
        "present": done.present,
        "bytes": done.bytes,
        "refused": _damage_maps(done.refused),
    }
    line = (
        f"{what}: {done.copied} segment(s), {done.bytes / 2**20:.2f} MiB; "
        f"{done.present} there already"
    )
    if nothing and not (done.copied or done.present or done.refused):
        line = nothing
    print_values(values, as_json, line, *_damage_lines(done.refused))
    if done.refused:
        sys.exit(1)


@cache.command()
@click.option(
    "--repair", is_flag=True, help="Move damaged segments aside, their good records kept."
)
@place_option
@json_option
def verify(repair: bool, cache: Place | None, as_json: bool) -> None:
    """Reads every record, and lists what is damaged; exit status 1 if anything is."""
    places = [cache] if cache else read_path()
    moved: list[Path] = []
    with Steps("places") as steps:
        found = _verified(places, steps)
        if repair and found.damage:
            steps.doing(f"moving what is damaged in {places[0]} aside")
            moved = merging.repair(places[0])
    mended = {path.parent.parent / path.name for path in moved}
    left = [one for one in found.damage if one.path not in mended]
    values = {
        "records": len(found),
        "damage": _damage_maps(found.damage),
        "moved": [str(path) for path in moved],
    }
    state = f"{len(found.damage)} damaged part(s)" if found.damage else "nothing is damaged"
    lines = [f"{len(found)} record(s); {state}", *_damage_lines(found.damage)]
    lines += [f"  moved aside: {path}" for path in moved]
    if repair and left:
        lines.append(
            f"  {len(left)} left: only {places[0]} was repaired; name another with --cache"
        )
    print_values(values, as_json, *lines)
    if left:
        sys.exit(1)


for _command in (pins.pin, pins.unpin):
    cache.add_command(_command)
