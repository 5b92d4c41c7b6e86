"""A comparison of benchmark files as tables for a terminal, and as plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from ..autotune.display import milliseconds
from ..cache.errors import ShapetuneError
from . import compare
from .compare import Loss, Pair, Summary
from .points import GROUPS, Point, Table, any_batch, by_point, common_points, named, value_of
from .schema import BenchFile

#: `default` loses more than this at a point that is worth naming.
_NOTABLE = 0.02


@dataclasses.dataclass(frozen=True)
class Within:
    """What one file shows by itself.

    Attributes:
        file: The file.
        chooser: The implementation that others are held against.
        summaries: Each implementation over the chooser's.
        losses: By group, what the chooser loses to the best at each point.
    """

    file: BenchFile
    chooser: str
    summaries: list[Summary]
    losses: dict[str, list[Loss]]


@dataclasses.dataclass(frozen=True)
class Between:
    """Two files.

    Attributes:
        first, second: The files.
        points: The points that both have.
        pairs: The implementations that both have.
    """

    first: BenchFile
    second: BenchFile
    points: list[Point]
    pairs: list[Pair]

    @property
    def names(self) -> list[str]:
        """The names of both."""
        return [self.first.name, self.second.name]


@dataclasses.dataclass(frozen=True)
class Listing:
    """What each implementation takes at each of some points.

    Attributes:
        files: Names of the files.
        points: The points, with the values of each file by implementation; None if it failed.
    """

    files: list[str]
    points: list[tuple[Point, list[dict[str, float | None]]]]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Files by themselves, and the first against each other one.

    Attributes:
        within: For each file.
        between: The first file with each other one.
        listings: For each of these; for one file alone, of all its points.
        of_one_head: Points match whatever their batch and heads, and what is between files
            is divided by both.
    """

    within: list[Within]
    between: list[Between]
    listings: list[Listing]
    of_one_head: bool

    def to_map(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "files": [within_map(one) for one in self.within],
            "of_one_head": self.of_one_head,
            "across": [
                {
                    "files": one.names,
                    "name": pair.name,
                    "only_first": pair.only_first,
                    "only_second": pair.only_second,
                    "summary": pair.summary.to_map() if pair.summary else None,
                }
                for one in self.between
                for pair in one.pairs
            ],
            "points": [
                {
                    "files": one.files,
                    "at": [{"point": point.label, "values": v} for point, v in one.points],
                }
                for one in self.listings
            ],
        }


def within_map(one: Within) -> dict[str, Any]:
    """What one file shows by itself, as plain values."""
    return {
        "name": one.file.name,
        "device": one.file.device_name,
        "rows": len(one.file.results),
        "over": one.chooser,
        "implementations": [summary.to_map() for summary in one.summaries],
        "regret": {
            group: {**regret_map(losses), "at": [loss.to_map() for loss in losses]}
            for group, losses in one.losses.items()
        },
    }


def within(file: BenchFile, chooser: str | None = None) -> Within:
    """What one file shows by itself; held against `default`, or what has the most times."""
    found = by_point(file)
    chooser = chooser or usual_chooser(file)
    losses = {group: compare.regret(found, group, chooser) for group in GROUPS}
    return Within(file, chooser, compare.against(found, chooser), losses)


def usual_chooser(file: BenchFile) -> str:
    """`default` if a file has times of it, or `default` with a tag, or what has the most times."""
    times = Counter(name for name, row in named(file) if value_of(row) is not None)
    tagged = [name for name in times if name.startswith("default:")]
    if "default" in times:
        return "default"
    return max(tagged or times, key=times.__getitem__, default="default")


def comparison(
    files: Sequence[BenchFile], match: Callable[[Point], Point], chooser: str | None = None
) -> Comparison:
    """Files side by side; ``chooser`` as in ``within``.

    Raises:
        ShapetuneError: No file has a point in common with the first, or ``chooser`` is
            in none of them.
    """
    common = common_points(files, match)
    names = sorted({name for file in files for name, _ in named(file)})
    if chooser is not None and chooser not in names:
        raise ShapetuneError(
            f"to={chooser!r} is in none of the files; they have: {', '.join(names)}"
        )
    found = [by_point(file, match) for file in files]
    between = [
        Between(files[0], other, points, compare.across(files[0], other, match))
        for other, points in zip(files[1:], common, strict=True)
    ]
    listings = [
        listing(one.names, one.points, [found[0], theirs])
        for one, theirs in zip(between, found[1:], strict=True)
    ]
    return Comparison(
        [within(file, chooser) for file in files],
        between,
        listings or [listing([files[0].name], sorted(found[0]), found)],
        match is any_batch,
    )


def listing(names: list[str], points: Sequence[Point], found: Sequence[Table]) -> Listing:
    """What each implementation of some files takes at some points."""
    return Listing(names, [
        (point, [{n: value_of(row) for n, row in one[point].items()} for one in found])
        for point in points
    ])  # fmt: skip


def regret_map(losses: Sequence[Loss]) -> dict[str, Any]:
    """What the chooser loses to the best of a group, in figures; empty for no points."""
    if not losses:
        return {}
    worst = max(losses, key=lambda loss: loss.regret)
    wins: dict[str, int] = {}
    for loss in losses:
        wins[loss.best] = wins.get(loss.best, 0) + 1
    return {
        "points": len(losses),
        "mean": compare.geometric_mean(1 + loss.regret for loss in losses) - 1,
        "worst": worst.regret,
        "worst_point": worst.point.label,
        "worst_to": worst.best,
        "above_2_percent": sum(loss.regret > _NOTABLE for loss in losses),
        "surely_above_2_percent": sum(loss.surely_above(_NOTABLE) for loss in losses),
        "same_program": sum(loss.same_program for loss in losses),
        "best_by": dict(sorted(wins.items(), key=lambda item: -item[1])),
    }


def rendered(found: Comparison, points: bool) -> Iterator[Any]:
    """What a terminal shows of a comparison."""
    for one in found.within:
        about = f": {one.file.device_name}, {len(one.file.results)} rows"
        yield Text.assemble("\n", (one.file.name, "bold"), about)
        if one.summaries:
            title = f"Time of each over {one.chooser}'s (above 1: {one.chooser} is faster)"
            yield summary_table(title, one.summaries)
            if facet_names(one.summaries, by_length=True):
                yield length_table("The same by sequence length", one.summaries)
            yield regret_table(one.losses, one.chooser)
    for two in found.between:
        yield from _rendered_between(two, found.of_one_head)
    if points:
        yield from (points_table(one, found.of_one_head) for one in found.listings if one.points)


def _rendered_between(one: Between, of_one_head: bool) -> Iterator[Any]:
    first, second = one.names
    if not one.points:
        yield f"\n{first} and {second} have no point in common"
        return
    many = "1 point" if len(one.points) == 1 else f"{len(one.points)} points"
    yield f"\n{first} and {second} have {many} in common"
    divided = ", of one batch × head" if of_one_head else ""
    title = f"{first} over {second}{divided} (above 1: {second} is faster)"
    yield summary_table(title, [pair.summary for pair in one.pairs if pair.summary])
    if of_one_head:
        yield "Batch and heads may differ: times and memory are divided by batch × heads."
    if one.first.device_name != one.second.device_name:
        yield f"Different devices: {one.first.device_name} and {one.second.device_name}."
    for pair in one.pairs:
        if pair.only_first or pair.only_second:
            yield (
                f"{pair.name}: a time in {first} alone at {pair.only_first} of them, "
                f"in {second} alone at {pair.only_second}"
            )


def summary_table(title: str, summaries: Sequence[Summary]) -> RichTable:
    """Geometric means of ratios, in all and by facet."""
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    shown.add_column("implementation")
    for name in ("points", "mean", "worst", "best", "faster at"):
        shown.add_column(name, justify="right")
    return _with_facets(shown, summaries, lambda one: [
        str(one.points), f"{one.mean:.2f}×", f"{one.worst.ratio:.2f}", f"{one.best.ratio:.2f}",
        str(one.wins),
    ], by_length=False)  # fmt: skip


def length_table(title: str, summaries: Sequence[Summary]) -> RichTable:
    """Geometric means of ratios by sequence length."""
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    shown.add_column("implementation")
    return _with_facets(shown, summaries, lambda one: [], by_length=True)


def _with_facets(
    shown: RichTable,
    summaries: Sequence[Summary],
    first: Callable[[Summary], list[str]],
    *,
    by_length: bool,
) -> RichTable:
    names = facet_names(summaries, by_length=by_length)
    for name in names:
        shown.add_column(facet_title(name), justify="right")
    for one in summaries:
        shown.add_row(one.base.partition("@")[0], *first(one), *facet_cells(one, names))
    return shown


def facet_names(summaries: Sequence[Summary], *, by_length: bool) -> list[str]:
    """The facets of some summaries: the sequence lengths, in order, or all others."""
    names = {name for one in summaries for name in one.facets}
    if by_length:
        return sorted((n for n in names if n.startswith("seq ")), key=lambda n: int(n[4:]))
    return sorted(n for n in names if not n.startswith("seq "))


def facet_cells(one: Summary, names: Sequence[str]) -> list[str]:
    """The means of a summary by these facets; empty where it has none."""
    return [f"{one.facets[name]:.2f}" if name in one.facets else "" for name in names]


def facet_title(facet: str) -> str:
    """The head of the column of a facet: its value, where that says enough."""
    return facet if facet.startswith(("dim", "seq")) else facet.partition(" ")[2]


def regret_table(losses: dict[str, list[Loss]], chooser: str) -> RichTable:
    """What the chooser loses to the best of each group."""
    title = f"What {chooser} loses to the best of a group"
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    for name in (
        "group",
        "points",
        "mean",
        "worst",
        "above 2%",
        "surely",
        "same program",
        "worst at",
        "best how often",
    ):
        shown.add_column(name, justify="right" if name in ("points", "mean", "worst") else "left")
    for group, found in losses.items():
        told = regret_map(found)
        if told:
            often = ", ".join(f"{name} {count}" for name, count in told["best_by"].items())
            at = f"{told['worst_point']} (to {told['worst_to']})" if told["worst"] > 0 else "-"
            shown.add_row(
                group, str(told["points"]), f"{told['mean']:.1%}", f"{told['worst']:.1%}",
                str(told["above_2_percent"]), str(told["surely_above_2_percent"]),
                str(told["same_program"]), at, often,
            )  # fmt: skip
    return shown


def points_table(found: Listing, of_one_head: bool) -> RichTable:
    """Every point of a listing: what each implementation of each file takes there."""
    columns = [
        (i, name)
        for i in range(len(found.files))
        for name in sorted({name for _, values in found.points for name in values[i]})
    ]
    at = "the common points" if len(found.files) > 1 else "each point"
    divided = ", of one batch × head" if of_one_head else ""
    title = f"Milliseconds at {at} (MiB in suite peak){divided}"
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    shown.add_column("point", no_wrap=True)
    for i, name in columns:
        head = f"{name}@{found.files[i]}" if len(found.files) > 1 else name
        shown.add_column(head, justify="right", overflow="fold")
    for point, values in found.points:
        shown.add_row(point.label, *(_cell(values[i], name) for i, name in columns))
    return shown


def _cell(values: Mapping[str, float | None], name: str) -> str:
    return "error" if values.get(name, 0.0) is None else milliseconds(values.get(name))
