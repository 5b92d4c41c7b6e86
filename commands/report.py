"""The command that shows what is known: report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..cache.places import Place, check_there, read_path
from .options import json_option, place_option
from .progress import Steps, wide_console


@click.command()
@click.argument("files", metavar="[BENCH.json...]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("report.html"),
    show_default=True, help="The HTML file: everything inside, works offline.",
)  # fmt: skip
@click.option("--title", default="shapetune report", show_default=True)
@place_option
@json_option
def report(
    files: tuple[Path, ...], output: Path, title: str, cache: Place | None, as_json: bool
) -> None:
    """One page of what is tuned and measured: from caches, and files that bench made.

    shapetune report bench.json --output report.html
    """
    from ..bench import findings, page, schema
    from ..cache import load

    with Steps("steps") as steps:
        steps.begin(3)
        steps.doing("reading the cache and the files")
        if cache:
            check_there(cache)
        read = [schema.read(path) for path in files]
        schema.check_writable(output)
        _check_replaceable(output)
        found = findings.gather(load([cache] if cache else read_path()), read)
        steps.advance()
        steps.doing("drawing")
        text = page.render(found, title)
        steps.advance()
        steps.doing("writing")
        schema.write_whole(output, text)
        steps.advance()
    told = found.summary()
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    _print_summary(told)
    click.echo(f"{output}: {len(text) / 2**20:.1f} MiB")


def _check_replaceable(output: Path) -> None:
    """A page may take the place of a page, of nothing else."""
    from ..bench.schema import OutputError

    try:
        with output.open("rb") as file:
            start = file.read(15)
    except FileNotFoundError:
        return
    if start and start.lower() != b"<!doctype html>":
        raise OutputError(
            f"output={str(output)!r} exists and is not an HTML page, and would be lost; "
            "give another --output"
        )


def _print_summary(told: dict[str, Any]) -> None:
    from rich.table import Table

    shown = Table(show_header=False, box=None, pad_edge=False)
    mean, best = told["mean_gain"], told["best_gain"]
    kinds = ", ".join(f"{kind} {count}" for kind, count in told["failures_by_kind"].items())
    lines: list[tuple[str, str]] = [
        ("devices", ", ".join(told["devices"]) or "-"),
        ("problems tuned", str(told["problems_tuned"])),
        ("mean gain over the heuristic", "-" if mean is None else f"{mean:.2f}×"),
        ("largest gain", "-" if best is None else f"{best:.2f}×"),
        ("surely faster", f"{told['surely_faster']}"),
        ("the heuristic is best", f"{told['heuristic_is_best']}"),
        ("trials", f"{told['trials']}, {told['trials_failed']} failed"),
        ("failures by kind", kinds or "none"),
        ("seconds", ", ".join(f"{name} {spent:.0f}" for name, spent in told["seconds"].items())),
        *((name, str(told[name])) for name in ("stale", "quarantined", "damaged")),
    ]
    for file in told["files"]:
        about = f"{file['device']}; {file['rows']} rows, {file['errors']} errors"
        lines.append((file["name"], about))
        for name, mean in file["over_it"].items():
            lines.append((f"  time of {name} over {file['held_against']}'s", f"{mean:.2f}×"))
        for group, lost in file["regret"].items():
            if lost:
                text = f"{lost['mean']:.1%} on average, {lost['worst']:.1%} at worst"
                lines.append((f"  {file['held_against']} loses to the best of {group}", text))
    for name, value in lines:
        shown.add_row(name, value)
    wide_console().print(shown, highlight=False)
