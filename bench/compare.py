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
from ..cache.errors import ShapetuneError
from ..kernels import get_op
from .schema import BenchFile, Row, suite_of
from .suites import RIVAL, window_of

#: What other files call implementations that have another name here.
ALIASES = {
    "probjax_mha": "pallas_mha",
    "probjax_flex": "pallas_flex",
    "probjax_default": "default",
}
#: Groups that `default` is held against: those of this package, all of jax, and all.
GROUPS = ("ours", "jax", "all")
_ALIGNED = 128
#: Fields of a row that grow with batch and heads.
_PER_CALL = ("median_ms", "q1_ms", "q3_ms", "peak_mb")
#: With fewer pairs there is no interval at 95%.
_LEAST_PAIRS = 6


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """What rows have in common that may be compared with one another."""

    suite: str
    mode: str
    dtype: str
    dim: int
    causal: bool
    window: int
    batch: int
    heads: int
    seq: int

    @property
    def ragged(self) -> bool:
        """Whether no common block size divides the sequence."""
        return self.seq % _ALIGNED != 0

    @property
    def label(self) -> str:
        """A short text for tables."""
        causal = " causal" if self.suite == "attention" and self.causal else ""
        window = f" window {self.window}" if self.suite != "attention" else ""
        batch = f" {self.batch}×{self.heads}" if self.batch else ""  # none if any matches
        return (
            f"{self.suite} seq {self.seq} dim {self.dim} {self.dtype}{causal}{window}"
            f"{batch} {self.mode}"
        )

    @property
    def facets(self) -> dict[str, str]:
        """The values by which means are broken down."""
        found = {"mode": self.mode, "dtype": self.dtype, "dim": str(self.dim)}
        if self.suite == "attention":
            found["causal"] = "causal" if self.causal else "not causal"
        else:
            found["suite"] = self.suite
        found["length"] = "ragged" if self.ragged else "aligned"
        found["seq"] = str(self.seq)
        return found


def point_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> Point:
    """The point that a row is at."""
    suite = suite_of(row)
    window = window_of(row, config) if suite != "attention" else None
    return Point(
        suite=suite, mode=row["mode"], dtype=row["dtype"],
        dim=row["head_dim" if suite == "attention" else "dim"], causal=row.get("causal", True),
        window=-1 if window is None else window, batch=row["batch"], heads=row["heads"],
        seq=row["seq"],
    )  # fmt: skip


def name_of(row: Mapping[str, Any]) -> str:
    """The implementation of a row by its name here, with its tag if it has one."""
    name = ALIASES.get(row["impl"], row["impl"])
    return f"{name}:{row['tag']}" if row.get("tag") else str(name)


def value_of(row: Mapping[str, Any]) -> float | None:
    """What a row is compared by: milliseconds, or MiB in suite ``peak``; None if it failed."""
    found = row.get("peak_mb" if suite_of(row) == "peak" else "median_ms")
    return None if "error" in row or found is None else float(found)


Table = dict[Point, dict[str, Row]]


def exactly(point: Point) -> Point:
    """Points match if all of them is equal."""
    return point


def any_batch(point: Point) -> Point:
    """Points match whatever their batch and heads."""
    return dataclasses.replace(point, batch=0, heads=0)


def table(file: BenchFile, match: Callable[[Point], Point] = exactly) -> Table:
    """The rows of a file by point and implementation; at `any_batch`, of one batch × head.

    Raises:
        ShapetuneError: Several rows of an implementation are at one point.
    """
    found: Table = {}
    for row in file.results:
        point = match(point_of(row, file.config))
        rows, name = found.setdefault(point, {}), name_of(row)
        if name in rows:
            raise ShapetuneError(_clash(file, point, rows[name], row))
        rows[name] = _of_one_head(row) if match is any_batch else row
    return found


def _clash(file: BenchFile, point: Point, one: Row, other: Row) -> str:
    """What to say of two rows of an implementation at one point."""
    fields = ("impl", "batch", "heads", "chunk", "window")
    differ = [name for name in fields if one.get(name) != other.get(name)]
    told = ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in differ)
    remedy = "give one of them a --tag"
    if "batch" in differ or "heads" in differ:
        remedy = "leave out --any-batch, or give a file with one of them"
    return f"{file.name} has several rows of {name_of(one)} at {point.label} ({told}); {remedy}"


def _of_one_head(row: Row) -> Row:
    """A row with its times and memory divided by batch × heads."""
    share = row["batch"] * row["heads"]
    scaled: Row = {name: row[name] / share for name in _PER_CALL if name in row}
    if "samples_ms" in row:
        scaled["samples_ms"] = [[turn, ms / share] for turn, ms in row["samples_ms"]]
    return {**row, **scaled}


def group_of(name: str) -> str:
    """``"ours"``, ``"jax"`` or ``"torch"``: whose an implementation is."""
    name = name.partition(":")[0].removeprefix(RIVAL)
    if name.startswith("torch"):
        return "torch"
    own = any(name in get_op(op).implementations for op in ("attention", "linear_attention"))
    vendors = ("cudnn", "mosaic", "tokamax")
    return "ours" if name == "default" or (own and name not in vendors) else "jax"


def in_group(name: str, group: str) -> bool:
    """Whether an implementation is among those of a group of ``GROUPS``."""
    if group == "all":
        return True
    return group_of(name) == "ours" or (group == "jax" and group_of(name) == "jax")


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
    tables = [table(file, match) for file in (first, second)]
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


def common_points(files: Sequence[BenchFile], match: Callable[[Point], Point]) -> list[list[Point]]:
    """For each file after the first, the points at which both have a row.

    Raises:
        ShapetuneError: No file has one in common with the first.
    """
    sets = [set(table(file, match)) for file in files]
    found = [sorted(sets[0] & other) for other in sets[1:]]
    if found and not any(found):
        raise ShapetuneError(
            f"{files[0].name} has no point in common with "
            f"{' or '.join(f.name for f in files[1:])}; they cover "
            + "; ".join(f"{f.name}: {len(s)} points, such as {min(s).label}" if s
                        else f"{f.name}: none" for f, s in zip(files, sets, strict=True))
            + ("; --any-batch compares points of different batch sizes" if match is exactly
               else "; give files whose grids overlap")
        )  # fmt: skip
    return found
