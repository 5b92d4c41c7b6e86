"""Runs a plan: each point in a worker, each row on disk as soon as it is known.

A file that is there already is gone on with, so that a run may be stopped at any
moment, or made in pieces of a given time.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..cache.errors import ShapetuneError
from . import isolate, suites
from .schema import BenchFile, Row, check_writable, identity, read, suite_of, write
from .suites import Plan

#: What may differ between a file and the run that goes on with it.
_FREE = ("output", "append")
#: Settings on which no result depends.
_IDLE = ("stop_after", "retry_errors")
#: A worker is waited for this many times the seconds it should sample for, and…
_PATIENCE = 8.0
#: …at least this long: it imports, compiles and checks first.
_PATIENCE_S = 600.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to run a benchmark.

    Attributes:
        append: Add rows of another grid or tag to a file that is there.
        retry_errors: Measure again the rows of a file that failed.
        interleave: Sample the implementations of a point in turns, in one process;
            else each row has a process of its own.
        tune: Tune each point first, so that `default` is the tuned choice; not for
            suite ``peak``, whose lengths would take hours.
        trials: Candidates per problem, if tuned.
        budget: Seconds of search per problem, if tuned.
        seconds: About how long to sample a row; a point, if interleaved.
        rounds: Samples of a row at most.
        stop_after: Begin no more points after so many seconds; 0 for no end.
        memory_gb: GiB that a worker may take; 0 for no limit.
        interpret: Time interpreted kernels too.
        cache: Cache place of `default`; None for the usual ones.
    """

    append: bool = False
    retry_errors: bool = False
    interleave: bool = False
    tune: bool = False
    trials: int = 24
    budget: float = 20.0
    seconds: float = 10.0
    rounds: int = 15
    stop_after: float = 0.0
    memory_gb: float = 0.0
    interpret: bool = False
    cache: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.memory_gb < math.inf:
            raise ShapetuneError(
                f"memory={self.memory_gb} is not a size; give GiB such as 4, or 0 for no limit"
            )


class Watcher(Protocol):
    """Hears how a benchmark goes on."""

    def started(self, total: int, done: int) -> None:
        """Of ``total`` rows, ``done`` are in the file already."""

    def doing(self, text: str) -> None:
        """Something is under way."""

    def rows_done(self, rows: list[Row]) -> None:
        """These rows are in the file."""

    def noted(self, text: str) -> None:
        """Something that a person should know of."""


def run(plan: Plan, output: Path, settings: Settings, watcher: Watcher) -> tuple[BenchFile, bool]:
    """Measures the rows of a plan that a file does not have yet.

    Returns:
        The file as it now is, and whether it holds every row of the plan.

    Raises:
        BenchFileError: The file is there but is not one of ours.
        OutputError: The file cannot be written.
        ShapetuneError: It is of another device, or of another grid without ``append``;
            or rivals are wanted, but nothing is tuned.
    """
    rivals_wanted = sorted({row["impl"] for row in plan.rows if suites.is_rival(row)})
    if rivals_wanted and not settings.tune:
        raise ShapetuneError(f"impl {rivals_wanted[0]!r} is what --tune finds; pass --tune too")
    watcher.doing("looking at the device")
    file = _opened(plan, output, settings)
    if settings.retry_errors:
        wanted = {identity(row) for row in plan.rows}
        file.results[:] = [
            row for row in file.results if "error" not in row or identity(row) not in wanted
        ]
    have = {identity(row) for row in file.results}
    missing = [row for row in plan.rows if identity(row) not in have]
    watcher.started(len(plan.rows), len(plan.rows) - len(missing))
    todo = dataclasses.replace(plan, rows=missing)
    started = time.monotonic()
    left = len(missing)
    for point in todo.points():
        if settings.stop_after and time.monotonic() - started > settings.stop_after:
            break
        measures_memory = suite_of(point[0]) == "peak"
        chooses = any(row["impl"] == "default" or suites.is_rival(row) for row in point)
        rivals = {}
        if settings.tune and chooses and not measures_memory:
            rivals = _tune(point, plan.config, settings, watcher)
        together = settings.interleave and not measures_memory
        for rows in [point] if together else [[row] for row in point]:
            watcher.doing(_label(rows, plan.config))
            found = _in_order(rows, _measure(rows, plan.config, settings, rivals))
            file.results.extend(found)
            write(output, file)
            left -= len(found)
            watcher.rows_done(found)
    return file, left == 0


def _opened(plan: Plan, output: Path, settings: Settings) -> BenchFile:
    """The file to go on with, or a new one."""
    kept = dataclasses.asdict(settings)
    kept = {name: value for name, value in kept.items() if name not in _IDLE}
    config = {"output": output.name, **plan.config, **kept}
    check_writable(output)
    device = described()
    if not output.exists():
        return BenchFile(device, config, [], output.stem)
    file = read(output)
    same = ["device_kind", "jax", "torch", "backend", "cores"]
    # Files made before these were written lack them.
    same += [name for name in ("llvmlite", "implementations") if name in file.device]
    for name in same:
        if file.device.get(name) != device.get(name):
            raise ShapetuneError(
                f"{output} was made with {name}={file.device.get(name)!r}, this is "
                f"{device.get(name)!r}; give another --output"
            )
    known = {**dict.fromkeys(plan.config), "tag": None, **file.config}
    differ = [n for n in config if n not in _FREE and n in known and known[n] != config[n]]
    if differ and not settings.append:
        raise ShapetuneError(
            f"{output} is there, with another {differ[0]} ({file.config.get(differ[0])!r:.80}); "
            "pass --append to add these rows to it, or give another --output"
        )
    return file


def described() -> dict[str, Any]:
    """The device and the versions, told by a worker: this process holds no device memory.

    Raises:
        ShapetuneError: The worker could not tell.
    """
    events, reason = isolate.run("shapetune.bench.describe", {}, seconds=_PATIENCE_S)
    if not events:
        raise ShapetuneError(f"jax cannot be used here: {reason}")
    found: dict[str, Any] = events[0]["device"]
    return found


def _label(rows: list[Row], config: Mapping[str, Any]) -> str:
    names = ", ".join(row["impl"] for row in rows)
    prefix = "" if suite_of(rows[0]) == "attention" else f"{suite_of(rows[0])}: "
    return f"{prefix}{suites.problem_of(rows[0], config).label}: {names}"


def _in_order(rows: list[Row], found: list[Row]) -> list[Row]:
    place = {identity(row): i for i, row in enumerate(rows)}
    return sorted(found, key=lambda row: place[identity(row)])


def _tune(
    point: list[Row], config: Mapping[str, Any], settings: Settings, watcher: Watcher
) -> dict[str, Any]:
    """Tunes a point; gives the configs of the rivals, of a point that is one problem."""
    problems = suites.tunable(point[0], config)
    watcher.doing(f"tuning {problems[0].label}")
    request = {
        "problems": [problem.to_map() for problem in problems],
        "cache": settings.cache,
        "trials": settings.trials,
        "budget": settings.budget,
    }
    limit = _PATIENCE_S + _PATIENCE * settings.budget * len(problems)
    events, reason = isolate.run(
        "shapetune.bench.tune_point", request, seconds=limit, memory_gb=settings.memory_gb
    )
    for event in events:
        if "failed" in event:
            watcher.noted(f"{event['failed']} is not tuned: {event['reason']}")
    if reason is not None:
        watcher.noted(f"{problems[0].label} is not tuned: {reason}")
    told = [event["rivals"] for event in events if "rivals" in event]
    return told[0] if len(told) == len(problems) == 1 else {}


def _measure(
    rows: list[Row], config: Mapping[str, Any], settings: Settings, rivals: Mapping[str, Any]
) -> list[Row]:
    """The finished rows of a point; what a dying worker leaves is measured by another."""
    found: list[Row] = []
    pending = list(rows)
    while pending:
        request = {
            "rows": pending,
            "config": dict(config),
            "seconds": settings.seconds,
            "rounds": settings.rounds,
            "interpret": settings.interpret,
            "cache": settings.cache,
            "rivals": dict(rivals),
        }
        limit = _PATIENCE_S + _PATIENCE * settings.seconds
        events, reason = isolate.run(
            "shapetune.bench.row", request, seconds=limit, memory_gb=settings.memory_gb
        )
        told = [event["row"] for event in events if "row" in event]
        found += told
        done = {row["impl"] for row in found}
        pending = [row for row in pending if row["impl"] not in done]
        if pending:
            begun = [event["begin"] for event in events if "begin" in event]
            culprit = begun[-1] if begun and begun[-1] not in done else None
            why = reason or "Lost: the worker ended without this row"
            blamed = [row for row in pending if culprit in (None, row["impl"])]
            found += [{**row, "error": why} for row in blamed]
            pending = [row for row in pending if row not in blamed]
    return found
