"""The plots of the report, as plotly's own JSON: colours of text and grid come from the page."""

from __future__ import annotations

import collections
import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..autotune.display import milliseconds
from ..cache.record import Record, Trial
from . import findings
from .findings import Findings
from .points import Point, by_point, named
from .schema import Row
from .tables import Within

#: One plot, or several of which a menu shows one: label and figure.
Figure = dict[str, Any]
Choices = list[tuple[str, list[Figure]]]

#: Distinct in both themes, and to the colour-blind (after Okabe and Ito, 2008).
_COLOURS = (
    "#0f8fd6", "#e08a00", "#12a579", "#d9569f", "#8b6fe8", "#9a6a4f", "#e05a3c", "#5b8f22",
    "#2fb7c4", "#c9a400", "#7a8594", "#b04ac0", "#ef8fb0", "#7cc04a", "#4f6bd8", "#b5651d",
)  # fmt: skip
#: Ticks of an axis of ratios, far enough apart on a phone.
_RATIOS = (0.5, 0.7, 0.85, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 20, 40, 80)
_CLOSE_RATIOS = (0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5)
_GREY = "#8a8f98"
_ROW = 27
_MAX_MENU = 120
#: Characters of a failed trial's note in a hover.
_NOTE = 120


class Colours:
    """A colour for each implementation, the same in every plot."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(set(names), key=lambda name: (name != "default", name))
        self._of = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(ordered)}

    def __getitem__(self, name: str) -> str:
        return self._of.get(name, _GREY)


def colours(found: Findings) -> Colours:
    """The colours of the implementations that records and files name."""
    tried = [t.candidate.implementation for r in found.tuned for t in r.trials]
    chosen = [r.chosen.implementation for r in found.tuned]
    rows = [name for one in found.files for name, _ in named(one.file)]
    return Colours((*tried, *chosen, *rows))


def plain(text: object) -> str:
    """Text that plotly shows as it is: it reads tags in all that it shows.

    Names and notes are of others' files, and go where no ``%{…}`` is looked for.
    """
    return html.escape(str(text), quote=False)


def short(record: Record) -> str:
    """A problem without its op."""
    return record.problem.label.partition(" ")[2]


def gains(found: Findings, colour: Colours) -> Choices:
    """The gain of each tuned problem over the heuristic, with its interval, by op and mode."""
    groups: dict[str, list[Record]] = {}
    for record in found.tuned:
        groups.setdefault(f"{record.problem.op} {record.problem.mode}", []).append(record)
    choices: Choices = []
    for name, records in groups.items():
        # The first row of an axis is the lowest.
        figure = _gains_figure(records[::-1], colour)
        choices.append((f"{name}, {len(records)} problems", [figure]))
    return choices


def _gains_figure(records: Sequence[Record], colour: Colours) -> Figure:
    traces = []
    for name in sorted({r.chosen.implementation for r in records}):
        own = [r for r in records if r.chosen.implementation == name]
        found = [r.comparison for r in own]
        traces.append({
            "type": "scatter", "mode": "markers", "name": plain(name),
            "x": [c.ratio for c in found], "y": [_unique(r, records) for r in own],
            "error_x": {
                "type": "data", "symmetric": False, "thickness": 1.5, "width": 3,
                "array": [c.high - c.ratio for c in found],
                "arrayminus": [c.ratio - c.low for c in found], "color": colour[name],
            },
            "marker": {"color": colour[name], "size": 9},
            "customdata": [
                [plain(r.chosen.key), milliseconds(c.chosen_ms), plain(r.heuristic.key),
                 milliseconds(c.heuristic_ms), f"[{c.low:.2f}, {c.high:.2f}]"]
                for r, c in zip(own, found, strict=True)
            ],
            "hovertemplate": (
                "<b>%{x:.2f}×</b> %{customdata[4]}<br>%{y}<br>%{customdata[0]}: %{customdata[1]} ms"
                "<br>heuristic %{customdata[2]}: %{customdata[3]} ms<extra></extra>"
            ),
        })  # fmt: skip
    order = [_unique(record, records) for record in records]
    low = min(1.0, *(r.comparison.low for r in records))
    high = max(1.1, *(r.comparison.high for r in records))
    margin = 0.04 * math.log10(high / low)
    ratios = _RATIOS if high / low > 1.5 else _CLOSE_RATIOS
    layout = {
        "xaxis": {
            "title": {"text": "times as fast as the heuristic"},
            "type": "log",
            "range": [math.log10(low) - margin, math.log10(high) + margin],
            "tickmode": "array",
            "tickvals": (ticks := [v for v in ratios if low / 1.02 <= v <= high * 1.02]),
            "ticktext": [f"{v:g}×" for v in ticks],
        },
        "yaxis": {"categoryorder": "array", "categoryarray": order, "automargin": True,
                  "range": [-0.7, len(order) - 0.3], "ticks": ""},
        "height": 130 + _ROW * len(order), "rows": True,
        "shapes": [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1,
                    "line": {"width": 1, "dash": "dot", "color": _GREY}}],
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _unique(record: Record, records: Sequence[Record]) -> str:
    """A label that tells a record from the others, also of another device."""
    several = len({r.device.key for r in records}) > 1
    return plain(f"{short(record)} ({record.device.name})" if several else short(record))


def against_length(files: Sequence[Within], colour: Colours) -> Choices:
    """Time and memory against the sequence length, one line an implementation."""
    choices: Choices = []
    for one in files:
        series: dict[Point, dict[str, list[tuple[int, Row]]]] = {}
        for point, rows in by_point(one.file).items():
            for name, row in rows.items():
                lines = series.setdefault(dataclasses.replace(point, seq=0), {})
                lines.setdefault(name, []).append((point.seq, row))
        for point, lines in series.items():
            memory = _lines(lines, colour, _memory, "MiB")
            label = " · ".join((one.file.name, *_words(point, series)))
            if point.suite == "peak":
                choices.append((label, [memory]))
            else:
                choices.append((label, [_lines(lines, colour, _time, "ms"), memory]))
    return choices[:_MAX_MENU]


def _words(point: Point, others: Iterable[Point]) -> list[str]:
    """What tells the series of a point from the others of its file."""
    hidden = ("suite", "dim", "length", "seq")
    words = [point.suite, *(v for k, v in point.facets.items() if k not in hidden)]
    known = ("suite", "dim", "seq", *point.facets)
    alike = [one for one in others if one.suite == point.suite]
    for field in dataclasses.fields(Point):
        values = {getattr(one, field.name) for one in alike}
        if field.name not in known and len(values) > 1:
            words.append(f"{field.name} {getattr(point, field.name)}")
    return [*words, f"dim {point.dim}"]


def _time(row: Row) -> float | None:
    return row.get("median_ms")


def _memory(row: Row) -> float | None:
    if "peak_mb" in row:
        return float(row["peak_mb"])
    parts = [row.get(name) for name in ("xla_temp_mb", "xla_arg_mb", "xla_out_mb")]
    return None if None in parts else float(sum(filter(None, parts)))


def _lines(
    lines: Mapping[str, list[tuple[int, Row]]], colour: Colours, value: Any, unit: str
) -> Figure:
    """A line for each implementation, with a gap where it has a row without a value."""
    traces, lengths = [], set()
    for name in sorted(lines, key=lambda name: (name != "default", name)):
        found = sorted(lines[name], key=lambda pair: pair[0])
        values = [None if "error" in row else value(row) or None for _, row in found]
        if not any(values):
            continue
        lengths |= {seq for seq, _ in found}
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": plain(name),
            "x": [seq for seq, _ in found], "y": values,
            "line": {"color": colour[name], "width": 7 if name == "default" else 1.8},
            "marker": {"color": colour[name], "size": 10 if name == "default" else 6},
            "opacity": 0.55 if name == "default" else 1,
            "customdata": [
                [milliseconds(y), plain(row.get("chosen", ""))]
                for (_, row), y in zip(found, values, strict=True)
            ],
            "hovertemplate": f"<b>%{{fullData.name}}</b> at %{{x}}: %{{customdata[0]}} {unit}"
                             "<br>%{customdata[1]}<extra></extra>",
        })  # fmt: skip
    ticks = _sparse(sorted(lengths))
    title = "milliseconds of a call" if unit == "ms" else "memory of a call, MiB"
    layout = {
        "xaxis": {"title": {"text": "sequence length"}, "type": "log", "tickmode": "array",
                  "tickvals": ticks, "ticktext": [str(v) for v in ticks]},
        "yaxis": {"title": {"text": title}, "type": "log", "dtick": 1},
        "height": 430,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _sparse(values: Sequence[int]) -> list[int]:
    """Those of sorted values that leave room for their labels on a log axis."""
    kept: list[int] = []
    for value in values:
        if not kept or value / kept[-1] > 1.6:
            kept.append(value)
    return kept


def landscapes(found: Findings) -> Choices:
    """For each problem with one, the heat map over the two parameters that matter most."""
    choices: Choices = []
    for record in found.tuned[:_MAX_MENU]:
        land = findings.landscape(record)
        if land is None:
            continue
        least = min((t.median_ms for t in land.best.values() if t.status == "ok" and t.median_ms),
                    default=None)  # fmt: skip
        if least is None:
            continue
        choices.append((f"{record.problem.label}: {land.implementation}", [_heat(land, least)]))
    return choices


def _heat(land: findings.Landscape, least: float) -> Figure:
    """Times of the cells over the best, on a scale of doublings; grey where all failed."""
    cells = [[land.best.get((row, column)) for column in land.columns] for row in land.rows]
    ok = [[t.median_ms if t and t.status == "ok" else None for t in row] for row in cells]
    doublings = [[None if ms is None else math.log2(ms / least) for ms in row] for row in ok]
    failed = [[0 if t and t.status != "ok" else None for t in row] for row in cells]
    worst = max((v for row in doublings for v in row if v is not None), default=1.0)
    top = max(0.5, min(3.0, worst))
    steps = [v for v in (1, 1.25, 1.5, 2, 3, 4, 6, 8) if math.log2(v) <= top]
    shared = {
        "type": "heatmap", "x": [*map(plain, land.columns)], "y": [*map(plain, land.rows)],
        "customdata": [[_cell(t, least) for t in row] for row in cells], "texttemplate": "%{text}",
        "hovertemplate": "%{customdata}<extra></extra>", "xgap": 2, "ygap": 2,
    }  # fmt: skip
    times = {
        **shared, "z": doublings, "zmin": 0, "zmax": top,
        "text": [["" if ms is None else milliseconds(ms) for ms in row] for row in ok],
        "colorscale": [[0, "#0b7a5e"], [0.25, "#4bb082"], [0.5, "#e8d06a"], [0.75, "#e08a4a"],
                       [1, "#b8354a"]],
        "colorbar": {"title": {"text": "× best"}, "tickvals": [math.log2(v) for v in steps],
                     "ticktext": [f"{v:g}×" for v in steps], "thickness": 12, "len": 0.9},
    }  # fmt: skip
    failures = {
        **shared, "z": failed, "zmin": 0, "zmax": 1, "showscale": False,
        "text": [["" if v is None else "✕" for v in row] for row in failed],
        "colorscale": [[0, _GREY], [1, _GREY]],
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": plain(land.across)}, "type": "category", "showgrid": False},
        "yaxis": {"title": {"text": plain(land.down)}, "type": "category", "showgrid": False},
        "height": 150 + 46 * max(4, len(land.rows)),
        "showlegend": False,
    }
    return {"data": [times, failures], "layout": layout}


def _cell(trial: Trial | None, least: float) -> str:
    """What a cell says when it is pointed at."""
    if trial is None:
        return "not tried"
    ms = trial.median_ms
    over = f", {ms / least:.2f}× the best" if trial.status == "ok" and ms is not None else ""
    return _told(trial) + over


def _told(trial: Trial) -> str:
    """A trial, and its time or how it failed."""
    if trial.status != "ok" or trial.median_ms is None:
        about = plain(f"{trial.status}: {trial.note[:_NOTE]}")
    else:
        about = f"{milliseconds(trial.median_ms)} ms"
    return f"{plain(trial.candidate.key)}<br>{about}"


def convergence(found: Findings, colour: Colours) -> Choices:
    """Each trial in the order of the search, and the best so far."""
    return [(r.problem.label, [_search(r, colour)]) for r in found.tuned[:_MAX_MENU] if r.trials]


def _search(record: Record, colour: Colours) -> Figure:
    best, so_far = math.inf, []
    for trial in record.trials:
        if trial.status == "ok" and trial.median_ms is not None:
            best = min(best, trial.median_ms)
        so_far.append(best if best < math.inf else None)
    numbers = list(range(1, len(so_far) + 1))
    traces: list[dict[str, Any]] = [{
        "type": "scatter", "mode": "lines", "name": "best so far", "x": numbers, "y": so_far,
        "line": {"shape": "hv", "color": _GREY, "width": 2}, "hoverinfo": "skip",
    }]  # fmt: skip
    slowest = max((t.median_ms for t in record.trials if t.median_ms), default=1.0)
    by_name: dict[str, list[int]] = collections.defaultdict(list)
    for i, trial in enumerate(record.trials):
        by_name[trial.candidate.implementation if trial.status == "ok" else "failed"].append(i)
    for name, places in by_name.items():
        trials = [record.trials[i] for i in places]
        failed = name == "failed"
        traces.append({
            "type": "scatter", "mode": "markers", "name": plain(name), "x": [i + 1 for i in places],
            "y": [slowest if failed else t.median_ms for t in trials],
            "marker": {"color": _GREY if failed else colour[name], "size": 8,
                       "symbol": "x" if failed else "circle"},
            "customdata": [*map(_told, trials)],
            "hovertemplate": "trial %{x}: %{customdata}<extra></extra>",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "trial"}, **_whole(len(numbers))},
        "yaxis": {"title": {"text": "milliseconds of a call"}, "type": "log"},
        "height": 380,
    }
    return {"data": traces, "layout": layout}


def _whole(last: int) -> dict[str, Any]:
    """Keeps an axis of whole numbers from ticks between them."""
    return {"dtick": 1} if last <= 10 else {}


def wall_time(found: Findings, colour: Colours) -> Figure:
    """Where the seconds of tuning went, by implementation."""
    spent = findings.wall_time(found.tuned)
    names = sorted({name for by in spent.values() for name in by})
    kinds = list(spent)[::-1]
    traces = [
        {
            "type": "bar", "orientation": "h", "name": plain(name), "y": kinds,
            "x": [spent[kind].get(name, 0.0) for kind in kinds],
            "marker": {"color": colour[name]},
            "hovertemplate": "%{fullData.name}, %{y}: %{x:.1f} s<extra></extra>",
        }
        for name in names
    ]  # fmt: skip
    layout = {
        "barmode": "stack", "height": 130 + 36 * len(kinds),
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"automargin": True, "ticks": ""},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def failures(found: Findings, colour: Colours) -> Figure:
    """Failed trials by kind, and by implementation."""
    kinds = sorted({failure.status for failure in found.failures}, reverse=True)
    most = max(sum(f.count for f in found.failures if f.status == kind) for kind in kinds)
    traces = []
    for name in sorted({failure.implementation for failure in found.failures}):
        counts = [
            sum(f.count for f in found.failures if (f.status, f.implementation) == (kind, name))
            for kind in kinds
        ]
        traces.append({
            "type": "bar", "orientation": "h", "name": plain(name), "x": counts,
            "y": [plain(kind.replace("_", " ")) for kind in kinds], "marker": {"color": colour[name]},
            "hovertemplate": "%{fullData.name}, %{y}: %{x}<extra></extra>",
        })  # fmt: skip
    layout = {
        "barmode": "stack", "height": 150 + 44 * len(kinds),
        "xaxis": {"title": {"text": "trials"}, "rangemode": "tozero", **_whole(most)},
        "yaxis": {"automargin": True, "ticks": ""},
    }  # fmt: skip
    return {"data": traces, "layout": layout}
