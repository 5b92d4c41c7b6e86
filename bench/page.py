"""The report as one HTML file that works offline: its plots, tables, style and script inside."""

from __future__ import annotations

import html
import json
import time
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

from .._version import __version__
from .._words import duration
from ..autotune.display import milliseconds, speedup
from ..cache.errors import ShapetuneError
from . import figures, tables
from .figures import Choices
from .findings import Findings
from .tables import Within

#: Cells of more characters than these get a width of their own, lest they wrap to a word a line.
_WIDTHS = ((120, 'class="text"'), (40, 'class="long"'))
#: Reasons that are told before a table of all.
_KINDS = 6

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="soft">{about}</p>{tiles}</header>
<nav aria-label="Sections"><div>{links}</div></nav>
<main>{sections}</main>
<footer>Made by shapetune {version} at {made} UTC.</footer>
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def render(found: Findings, title: str = "shapetune report") -> str:
    """The page.

    Raises:
        ShapetuneError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ShapetuneError(
            'the report needs plotly; install it with pip install "shapetune[report]"'
        ) from None
    colour = figures.colours(found)
    plots: dict[str, Choices] = {
        "gains": figures.gains(found, colour),
        "length": figures.against_length(found.files, colour),
        "landscape": figures.landscapes(found),
        "convergence": figures.convergence(found, colour),
        "time": [("", [figures.wall_time(found, colour)])] if found.tuned else [],
        "failures": [("", [figures.failures(found, colour)])] if found.failures else [],
    }
    plots = {name: choices for name, choices in plots.items() if choices}
    parts = _sections(found, plots)
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(found.made))
    return _PAGE.format(
        title=_text(title),
        style=_asset("style.css"),
        about=_text(", ".join(found.devices) or "Nothing is tuned or measured yet."),
        tiles=_tiles(found),
        links="".join(f'<a href="#{key}">{_text(name)}</a>' for key, name, _ in parts),
        sections="".join(
            f'<section id="{key}"><h2>{_text(name)}</h2>{body}</section>'
            for key, name, body in parts
        ),
        version=__version__,
        made=made,
        figures=_json({
            name: [{"label": label, "plots": specs} for label, specs in choices]
            for name, choices in plots.items()
        }),
        plotly=get_plotlyjs(),
        script=_asset("script.js"),
    )  # fmt: skip


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that no text inside can end the script element of."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(value: object) -> str:
    return html.escape(str(value))


def _code(value: object) -> str:
    return f"<code>{_text(value)}</code>"


def _tiles(found: Findings) -> str:
    told = found.summary()
    gain = "–" if told["mean_gain"] is None else f"{told['mean_gain']:.2f}×"
    best = "–" if told["best_gain"] is None else f"{told['best_gain']:.2f}×"
    tiles = [
        (told["problems_tuned"], "problems tuned", ""),
        (gain, "mean gain over the heuristic", _good(told["mean_gain"])),
        (best, "largest gain", _good(told["best_gain"])),
        (told["surely_faster"], "surely faster (95%)", ""),
        (f"{told['trials']:,}", "trials", ""),
        (told["trials_failed"], "of them failed", ""),
        (told["stale"], "stale records", "bad" if told["stale"] else ""),
        (told["quarantined"], "quarantined", "bad" if told["quarantined"] else ""),
    ]
    inside = "".join(
        f'<div class="tile"><b class="{kind}">{_text(value)}</b><span>{_text(name)}</span></div>'
        for value, name, kind in tiles
    )
    return f'<div class="tiles">{inside}</div>'


def _good(gain: float | None) -> str:
    """The class of a gain: one that can be seen is good."""
    return "good" if gain is not None and round(gain, 2) > 1 else ""


def _sections(found: Findings, plots: dict[str, Choices]) -> list[tuple[str, str, str]]:
    parts: list[tuple[str, str, str]] = []
    if found.tuned:
        text = _words("The time of the heuristic over that of the choice, in pairs on the same "
                      "inputs, with the 95% interval.")  # fmt: skip
        parts.append(("tuned", "Gains", text + _plot("gains", plots) + _tuned_table(found)))
    if "length" in plots:
        text = _words("Medians of compiled calls; both axes are logarithmic. A line has a gap "
                      "where an implementation failed.")  # fmt: skip
        parts.append(("length", "Time and memory by length", text + _plot("length", plots)))
    if found.files:
        parts.append(("compared", "Compared", "".join(map(_file, found.files))))
    if "landscape" in plots:
        text = _words(
            "The fastest trial in each cell, in milliseconds; ✕ failed, blank was not tried."
        )
        parts.append(("landscape", "Landscape", text + _plot("landscape", plots)))
    if "convergence" in plots:
        text = _words("Every trial in the order of the search.") + _plot("convergence", plots)
        parts.append(("convergence", "Search", text + _dashboard()))
    if found.tuned:
        seconds = sum(record.provenance.seconds for record in found.tuned)
        text = _words(f"{duration(seconds)} of tuning in all. The rest is starting workers, "
                      "making inputs and references, and waiting.")  # fmt: skip
        parts.append(("time", "Where time went", text + _plot("time", plots)))
    parts.append(("failures", "Failures", _failures(found, plots)))
    parts.append(("trust", "Stale and quarantined", _trust(found)))
    return parts


def _words(text: str) -> str:
    return f'<p class="soft">{_text(text)}</p>'


def _plot(name: str, plots: dict[str, Choices]) -> str:
    """The place of a plot, with a menu where there are several."""
    choices = plots[name]
    menu = ""
    if len(choices) > 1:
        options = "".join(f"<option>{_text(label)}</option>" for label, _ in choices)
        menu = f'<label class="menu">Show<select id="menu-{name}">{options}</select></label>'
    return f'{menu}<div class="plots" id="plots-{name}"></div>'


def _table(
    heads: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]], caption: str = ""
) -> str:
    """A table; heads are (text, is a number), cells are HTML."""

    def kind(cell: str, shown: str) -> str:
        wide = (name for least, name in _WIDTHS if not shown and len(cell) > least)
        return next(wide, shown)

    kinds = ['class="number"' if number else "" for _, number in heads]
    top = "".join(f"<th {k}>{_text(n)}</th>" for (n, _), k in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td {kind(c, k)}>{c}</td>" for c, k in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    about = f'<p class="caption">{_text(caption)}</p>' if caption else ""
    inside = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'{about}<div class="scroll"><table>{inside}</table></div>'


def _folded(summary: str, inside: str) -> str:
    """HTML that is shown when asked for."""
    return f"<details><summary>{_text(summary)}</summary>{inside}</details>"


def _tuned_table(found: Findings) -> str:
    heads = [("problem", False), ("chosen", False), ("ms", True), ("heuristic", False),
             ("ms", True), ("gain [95%]", True), ("trials", True), ("s", True)]  # fmt: skip
    rows = [
        [
            _text(record.problem.label), _code(record.chosen.key),
            milliseconds(record.comparison.chosen_ms), _code(record.heuristic.key),
            milliseconds(record.comparison.heuristic_ms), _text(speedup(record)),
            str(len(record.trials)), f"{record.provenance.seconds:.0f}",
        ]
        for record in found.tuned
    ]  # fmt: skip
    return _folded(f"All {len(rows)} as a table", _table(heads, rows))


def _file(one: Within) -> str:
    failed = sum("error" in row for row in one.file.results)
    text = f"<h3>{_text(one.file.name)}</h3>" + _words(
        f"{one.file.device_name}; {len(one.file.results)} rows, {failed} of them errors."
    )
    return text + _means(one) + _losses(one) + _errors(one)


def _means(one: Within) -> str:
    """Each implementation over the one that the others are held against."""
    if not one.summaries:
        return ""
    facets = tables.facet_names(one.summaries, by_length=False)
    numbers = ("points", "mean", "worst", "best", *map(tables.facet_title, facets))
    rows = [
        [
            _code(s.base), str(s.points), f"<b>{s.mean:.2f}×</b>", f"{s.worst.ratio:.2f}",
            f"{s.best.ratio:.2f}", *tables.facet_cells(s, facets),
        ]
        for s in one.summaries
    ]  # fmt: skip
    caption = f"Time over {one.chooser}'s: above 1, {one.chooser} is faster"
    heads = [("implementation", False), *((name, True) for name in numbers)]
    text = _table(heads, rows, caption)
    lengths = tables.facet_names(one.summaries, by_length=True)
    if lengths:
        heads = [("implementation", False), *((name, True) for name in lengths)]
        rows = [[_code(s.base), *tables.facet_cells(s, lengths)] for s in one.summaries]
        text += _table(heads, rows, "The same by sequence length")
    return text


def _losses(one: Within) -> str:
    """What it loses to the best of each group."""
    told = {group: tables.regret_map(losses) for group, losses in one.losses.items()}
    rows = [
        [
            _text(group), str(m["points"]), f"{m['mean']:.1%}", f"{m['worst']:.1%}",
            str(m["above_2_percent"]), str(m["surely_above_2_percent"]),
            _text(m["worst_point"]) if m["worst"] > 0 else "–",
            _text(", ".join(f"{name} {count}" for name, count in m["best_by"].items())),
        ]
        for group, m in told.items()
        if m
    ]  # fmt: skip
    heads = [("best of", False), ("points", True), ("mean", True), ("worst", True),
             ("above 2%", True), ("surely", True), ("worst at", False),
             ("best how often", False)]  # fmt: skip
    caption = f"What {one.chooser} loses to the best implementation of each point"
    return _table(heads, rows, caption) if rows else ""


def _errors(one: Within) -> str:
    about = ("suite", "seq", "head_dim", "dim", "dtype", "mode")
    rows = [
        [_code(row["impl"]), _text(" ".join(f"{k} {row[k]}" for k in about if k in row)),
         _text(row["error"])]
        for row in one.file.results
        if "error" in row
    ]  # fmt: skip
    if not rows:
        return ""
    inside = _table([("implementation", False), ("at", False), ("error", False)], rows)
    return _folded(f"{len(rows)} errors", inside)


def _failures(found: Findings, plots: dict[str, Choices]) -> str:
    if not found.failures:
        return _words("No trial failed.")
    heads = [("kind", False), ("implementation", False), ("trials", True), ("in its words", False)]
    rows = [
        [_text(f.status.replace("_", " ")), _code(f.implementation), str(f.count), _text(f.note)]
        for f in found.failures
    ]
    return _plot("failures", plots) + _folded("In their words", _table(heads, rows))


def _trust(found: Findings) -> str:
    text = ""
    if found.stale:
        rows = [[_text(r.problem.label), _code(r.chosen.key), _text(why)] for r, why in found.stale]
        heads = [("stale: problem", False), ("chosen", False), ("why", False)]
        whys = Counter(why for _, why in found.stale)
        text += "".join(_words(f"{count} stale: {why}.") for why, count in whys.most_common(_KINDS))
        text += _folded(f"All {len(rows)} stale records", _table(heads, rows))
    if found.quarantined:
        rows = [
            [_text(q.problem.label), _code(q.candidate.key), _text(q.status), _text(q.note)]
            for q in found.quarantined
        ]
        heads = [("quarantined: problem", False), ("candidate", False), ("why", False), ("", False)]
        text += _table(heads, rows)
    if found.damage:
        rows = [[_code(path), _text(reason)] for path, reason in found.damage]
        text += _table([("damaged part", False), ("why it was skipped", False)], rows)
    return text or _words("None.")


def _dashboard() -> str:
    return _folded(
        "The study in Optuna's own dashboard",
        "<p>A run with <code>shapetune tune … --storage sqlite:///tuning.db</code> keeps every "
        "study; open it with</p>"
        "<pre>pip install optuna-dashboard\noptuna-dashboard sqlite:///tuning.db</pre>"
        "<p>A journal file opens the same way: <code>optuna-dashboard tuning.journal</code>.</p>",
    )
