"""Benchmark files side by side at their common points, and what `default` loses to the best.

Rows that were sampled in turns give a paired ratio with its interval; others, as
those of different runs or devices, the ratio of their medians.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..autotune.measure import paired_ratio
from .points import Point, Table, by_point, in_group, value_of
from .schema import BenchFile, Row

#: With fewer pairs there is no interval at 95%.
_LEAST_PAIRS = 6


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How an implementation fares against another at one point.

    Attributes:
        point: The point.
        ratio: Time of the base over time of the other; above 1, the other is faster.
        interval: Its 95% interval, where both were sampled in turns.
    """

    point: Point
    ratio: float
    interval: tuple[float, float] | None = None


def in_turns(one: Row, other: Row) -> bool:
    """Whether two rows of a file and a point are of one run, their equal rounds pairs.

    A process writes the same ``turns`` to all that it sampled in turns, and rows of
    several processes do not pair. Files older than that lack it; there an equal tag will do.
    """
    return one.get("turns") == other.get("turns") and one.get("tag") == other.get("tag")


def ratio_of(point: Point, base: Row, other: Row) -> Ratio | None:
    """Base over other, of one file; paired where it can be, None where one of them failed."""
    found = ratio_of_medians(point, base, other)
    if found is None or not in_turns(base, other):
        return found
    first, second = (dict(row.get("samples_ms", ())) for row in (base, other))
    rounds = sorted(set(first) & set(second))
    if len(rounds) < _LEAST_PAIRS:
        return found
    pairs = [np.array([samples[r] for r in rounds]) for samples in (first, second)]
    ratio, low, high = paired_ratio(*pairs)
    return Ratio(point, ratio, (low, high))


def ratio_of_medians(point: Point, base: Row, other: Row) -> Ratio | None:
    """Base over other, of any files; None where one of them failed."""
    ours, theirs = value_of(other), value_of(base)
    if ours is None or theirs is None or not ours > 0 or not theirs > 0:
        return None
    return Ratio(point, theirs / ours)


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean of the logarithms; not a number for none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


@dataclasses.dataclass(frozen=True)
class Summary:
    """Ratios put together.

    Attributes:
        base, other: What was compared, as "implementation" or "implementation@file".
        points: How many points.
        mean: Geometric mean of the ratios.
        worst, best: The smallest and the largest.
        wins: Points where the other is faster.
        facets: Geometric mean by value of a facet, such as ``"mode fwd"``.
    """

    base: str
    other: str
    points: int
    mean: float
    worst: Ratio
    best: Ratio
    wins: int
    facets: dict[str, float]

    def to_map(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **dataclasses.asdict(self),
            "worst": {"point": self.worst.point.label, "ratio": self.worst.ratio},
            "best": {"point": self.best.point.label, "ratio": self.best.ratio},
        }


def summarise(base: str, other: str, ratios: Sequence[Ratio]) -> Summary | None:
    """Ratios put together; None for none."""
    if not ratios:
        return None
    facets: dict[str, list[float]] = {}
    for one in ratios:
        for facet, value in one.point.facets.items():
            facets.setdefault(f"{facet} {value}", []).append(one.ratio)
    kinds: dict[str, int] = {}
    for name in facets:
        kinds[name.split(" ")[0]] = kinds.get(name.split(" ")[0], 0) + 1
    return Summary(
        base=base,
        other=other,
        points=len(ratios),
        mean=geometric_mean(one.ratio for one in ratios),
        worst=min(ratios, key=lambda one: one.ratio),
        best=max(ratios, key=lambda one: one.ratio),
        wins=sum(one.ratio > 1 for one in ratios),
        # A facet with one value says what the mean says.
        facets={
            name: geometric_mean(values)
            for name, values in sorted(facets.items())
            if kinds[name.split(" ")[0]] > 1
        },
    )


def against(found: Table, other: str = "default") -> list[Summary]:
    """Every implementation of a file over one of them, at their common points."""
    names = sorted({name for rows in found.values() for name in rows} - {other})
    summaries = []
    for base in names:
        ratios = [
            ratio_of(point, rows[base], rows[other])
            for point, rows in found.items()
            if base in rows and other in rows
        ]
        summaries.append(summarise(base, other, [one for one in ratios if one is not None]))
    return [one for one in summaries if one is not None]


@dataclasses.dataclass(frozen=True)
class Loss:
    """What `default` loses at a point to the best of a group.

    Attributes:
        point: The point.
        best: The fastest of the group, or `default` where none is faster.
        regret: Time of `default` over time of the best, less 1; 0 where it is the best.
        interval: The 95% interval of that, where another is the best and both were
            sampled in turns; below 0, `default` may be the faster one.
        same_program: The fastest was `default`'s own program under another name,
            which is no loss: the next one counts.
    """

    point: Point
    best: str
    regret: float
    interval: tuple[float, float] | None = None
    same_program: bool = False

    def surely_above(self, bound: float) -> bool:
        """Whether the whole interval of the loss is above a bound."""
        return self.interval is not None and self.interval[0] > bound

    def to_map(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "point": self.point.label}


def _same_program(one: Row, other: Row) -> bool:
    """Whether two rows ran one candidate in one run, so that their times differ by noise alone."""
    same = "chosen" in one and one["chosen"] == other.get("chosen")
    return same and in_turns(one, other)


def regret(found: Table, group: str, chooser: str = "default") -> list[Loss]:
    """What `default` loses to the best of a group, at each point where it has a time."""
    return [
        _loss(point, rows, group, chooser)
        for point, rows in sorted(found.items())
        if chooser in rows and value_of(rows[chooser]) is not None and point.suite != "peak"
    ]


def _loss(point: Point, rows: Mapping[str, Row], group: str, chooser: str) -> Loss:
    """What the chooser loses at one point."""
    own = rows[chooser]
    others = [name for name in rows if name != chooser and in_group(name, group)]
    ratios = {name: ratio_of(point, own, rows[name]) for name in others}
    faster = {name: one for name, one in ratios.items() if one is not None and one.ratio > 1}
    order = sorted(faster, key=lambda name: -faster[name].ratio)
    rivals = [name for name in order if not _same_program(own, rows[name])]
    same = order[:1] != rivals[:1]
    if not rivals:
        return Loss(point, chooser, 0.0, same_program=same)
    best = faster[rivals[0]]
    interval = None if best.interval is None else (best.interval[0] - 1, best.interval[1] - 1)
    return Loss(point, rivals[0], best.ratio - 1, interval, same)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One implementation in two files.

    Attributes:
        name: The implementation.
        summary: The first file's over the second file's.
        only_first, only_second: Points at which only that file has a time.
    """

    name: str
    summary: Summary | None
    only_first: int
    only_second: int


def across(first: BenchFile, second: BenchFile, match: Callable[[Point], Point]) -> list[Pair]:
    """Each implementation that two files share, at the points that ``match`` makes equal."""
    tables = [by_point(file, match) for file in (first, second)]
    names = [{name for rows in found.values() for name in rows} for found in tables]
    pairs = []
    for name in sorted(names[0] & names[1]):
        ratios, missing = [], [0, 0]
        for point in sorted(set(tables[0]) & set(tables[1])):
            rows = [found[point].get(name, {"error": ""}) for found in tables]
            have = [value_of(row) is not None for row in rows]
            if all(have):
                one = ratio_of_medians(point, rows[0], rows[1])
                ratios += [one] if one is not None else []
            elif have[0] != have[1]:
                missing[int(have[1])] += 1
        summary = summarise(f"{name}@{first.name}", f"{name}@{second.name}", ratios)
        pairs.append(Pair(name, summary, *missing))
    return pairs
