"""A comparison of benchmark files as tables for a terminal, and as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from ..autotune.display import milliseconds
from ..cache.errors import ShapetuneError
from . import compare
from .compare import Loss, Pair, Point, Summary, Table
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
class Comparison:
    """Files by themselves, and the first against each other one.

    Attributes:
        within: For each file.
        points: The common points of all files.
        pairs: For each file after the first, the implementations that both share.
        tables: The rows at the common points, by file.
    """

    within: list[Within]
    points: list[Point]
    pairs: list[list[Pair]]
    tables: list[Table]

    def to_map(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "files": [
                {
                    "name": one.file.name,
                    "device": one.file.device_name,
                    "over": one.chooser,
                    "implementations": [s.to_map() for s in one.summaries],
                    "regret": {g: regret_map(losses) for g, losses in one.losses.items()},
                }
                for one in self.within
            ],
            "common_points": len(self.points),
            "across": [
                {
                    "name": pair.name,
                    "only_first": pair.only_first,
                    "only_second": pair.only_second,
                    "summary": pair.summary.to_map() if pair.summary else None,
                }
                for pairs in self.pairs
                for pair in pairs
            ],
        }


def within(file: BenchFile, chooser: str | None = None) -> Within:
    """What one file shows by itself; held against `default`, or what has the most times."""
    found = compare.table(file)
    chooser = chooser or usual_chooser(file)
    losses = {group: compare.regret(found, group, chooser) for group in compare.GROUPS}
    return Within(file, chooser, compare.against(found, chooser), losses)


def usual_chooser(file: BenchFile) -> str:
    """`default` if a file has times of it, else the implementation with the most times."""
    times: dict[str, int] = {"default": 0}
    for row in file.results:
        if compare.value_of(row) is not None:
            times[compare.name_of(row)] = times.get(compare.name_of(row), 0) + 1
    return "default" if times["default"] else max(times, key=lambda name: times[name])


def comparison(
    files: Sequence[BenchFile], match: Callable[[Point], Point], chooser: str | None = None
) -> Comparison:
    """Files side by side; ``chooser`` as in ``within``.

    Raises:
        ShapetuneError: They have no point in common, or ``chooser`` is in none of them.
    """
    points = compare.common_points(files, match)
    names = sorted({compare.name_of(row) for file in files for row in file.results})
    if chooser is not None and chooser not in names:
        raise ShapetuneError(
            f"to={chooser!r} is in none of the files; they have: {', '.join(names)}"
        )
    tables = [{match(p): rows for p, rows in compare.table(file).items()} for file in files]
    return Comparison(
        [within(file, chooser) for file in files],
        points,
        [compare.across(files[0], other, match) for other in files[1:]],
        tables,
    )


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
    if len(found.within) > 1:
        yield f"\n{len(found.points)} points in common"
    for other, pairs in zip(found.within[1:], found.pairs, strict=True):
        first = found.within[0].file
        title = f"{first.name} over {other.file.name} (above 1: {other.file.name} is faster)"
        yield summary_table(title, [pair.summary for pair in pairs if pair.summary])
        if first.device_name != other.file.device_name:
            yield f"Different devices: {first.device_name} and {other.file.device_name}."
        for pair in pairs:
            if pair.only_first or pair.only_second:
                yield (
                    f"{pair.name}: a time in {first.name} alone at {pair.only_first} of them, "
                    f"in {other.file.name} alone at {pair.only_second}"
                )
    if points:
        yield points_table(found)


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
                str(told["above_2_percent"]), str(told["surely_above_2_percent"]), at, often,
            )  # fmt: skip
    return shown


def points_table(found: Comparison) -> RichTable:
    """Every common point: what each implementation of each file takes there."""
    columns: list[tuple[int, str]] = []
    for i, one in enumerate(found.tables):
        names = {name for point in found.points for name in one[point]}
        columns += [(i, name) for name in sorted(names)]
    title = "Milliseconds at the common points (MiB in suite peak)"
    shown = RichTable(title=title, title_justify="left", header_style="bold")
    shown.add_column("point", no_wrap=True)
    for i, name in columns:
        several = len(found.tables) > 1
        shown.add_column(
            f"{name}@{found.within[i].file.name}" if several else name, justify="right"
        )
    for point in found.points:
        cells = []
        for i, name in columns:
            row = found.tables[i][point].get(name)
            value = compare.value_of(row) if row else None
            cells.append("error" if row and value is None else milliseconds(value))
        shown.add_row(point.label, *cells)
    return shown
