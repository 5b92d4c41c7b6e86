"""`shapetune check`: which candidates compile for which targets, and with what memory."""

from __future__ import annotations

import collections
import random
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from ..cache.errors import ShapetuneError, UnsupportedError
from ..cache.key import Problem
from ..kernels.op import get_op
from . import aot
from .aot import Compilation, Task
from .search import candidates
from .targets import target

_NUMBER = re.compile(r"\d+")


def plan(
    problems: Sequence[Problem],
    targets: Sequence[str],
    targets_file: Path | None = None,
    only: Sequence[str] = (),
    *,
    sample: int | None = None,
    seed: int = 0,
) -> list[Task]:
    """Every candidate of every problem for every target, or a random sample for each target.

    Raises:
        TargetError: A target is not known.
        UnknownNameError: ``only`` names no implementation.
        UnsupportedError: No candidate is left.
    """
    if sample is not None and sample < 1:
        raise ShapetuneError(f"sample must be at least 1, got {sample}")
    tasks: list[Task] = []
    for key in targets:
        one = target(key, targets_file)
        every = [
            (one, problem, candidate)
            for problem in problems
            for candidate in candidates(get_op(problem.op), problem, one.device, only)
        ]
        if sample is not None and sample < len(every):
            every = random.Random(seed).sample(every, sample)
        tasks.extend(every)
    if not tasks:
        asked = ", ".join(only) or "any implementation"
        raise UnsupportedError(
            f"no candidate of {asked} supports these problems on {', '.join(targets)}; "
            "shapetune explain says why"
        )
    return tasks


def run(
    tasks: Sequence[Task],
    jobs: int | None = None,
    heard: Callable[[Compilation], None] = lambda one: None,
) -> list[Compilation]:
    """Compiles the tasks in parallel; ``heard`` hears of each that is done.

    Raises:
        TargetError: The compiler is not installed.
    """
    if jobs is not None and jobs < 1:
        raise ShapetuneError(f"jobs must be at least 1, got {jobs}")
    return aot.compile_all(tasks, jobs or aot.default_jobs(), heard)


def table(found: Sequence[Compilation]) -> Table:
    """A row for each target and implementation."""
    out = Table(header_style="bold")
    for name in ("target", "implementation"):
        out.add_column(name)
    for name in ("compiled", "shared KiB", "temporary MiB", "seconds"):
        out.add_column(name, justify="right")
    groups: dict[tuple[str, str], list[Compilation]] = collections.defaultdict(list)
    for one in found:
        groups[one.target, one.candidate.implementation].append(one)
    for (target_key, implementation), group in groups.items():
        good = [one for one in group if one.status == "ok"]
        out.add_row(
            target_key,
            implementation,
            f"{len(good)} of {len(group)}",
            _spread([one.shared_bytes / 1024 for one in good if one.shared_bytes is not None]),
            _spread([one.temp_mb for one in good if one.temp_mb is not None]),
            f"{statistics.median(one.seconds for one in group):.1f}",
        )
    return out


def failures(found: Sequence[Compilation]) -> list[str]:
    """A line for each kind of failure: how often, why, and an example."""
    groups: dict[tuple[str, str, str], list[Compilation]] = collections.defaultdict(list)
    for one in found:
        if one.status != "ok":
            reason = _NUMBER.sub("…", one.note)
            groups[one.target, one.status, reason].append(one)
    return [
        f"{key}: {len(group)} × {status}: {group[0].note}\n"
        f"    such as {group[0].candidate.key} for {group[0].problem.label}"
        for (key, status, _), group in groups.items()
    ]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
