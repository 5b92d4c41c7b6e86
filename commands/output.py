"""What the commands print: the live view of a run, tables of records, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from .interrupts import Interrupts
from .progress import wide_console


@contextlib.contextmanager
def display() -> Iterator[tuple[Any, Any]]:
    """A listener that shows the run on standard error; Ctrl-C ends it with a word."""
    from rich.console import Console

    from ..autotune.display import LiveDisplay, PlainDisplay

    console = Console(stderr=True)
    try:
        with Interrupts() as interrupts:
            if console.is_terminal:
                with LiveDisplay(console, interrupts.check) as live:
                    yield console, live
            else:
                yield console, PlainDisplay(console, interrupts.check)
    except KeyboardInterrupt:
        console.print(
            "Stopped. Every trial and every problem finished so far is kept; run again to go on.",
            soft_wrap=True,  # one line in a pipe, whatever width it is taken to have
        )
        sys.stdout.flush()
        # XLA may still be running the interrupted call, and crashes if the
        # interpreter's orderly end frees what that call uses.
        os._exit(130)


def print_records(records: list[Any], as_json: bool, console: Any) -> None:
    """Prints records as a table, or as JSON."""
    if as_json:
        click.echo(json.dumps([record_map(record) for record in records], indent=2))
    elif records:
        from ..autotune.display import records_table

        wide_console().print(records_table(records))


def print_fronts(records: list[Any]) -> None:
    """Prints for each record what less temporary memory would cost in time."""
    from ..autotune.display import front_table

    out = wide_console()
    for record in records:
        out.print(front_table(record))


def record_map(record: Any) -> dict[str, Any]:
    """A record as plain values."""
    import dataclasses

    return {
        "id": record.id,
        "problem": record.problem.to_map(),
        "device": record.device.to_map(),
        "chosen": dataclasses.asdict(record.chosen),
        "heuristic": dataclasses.asdict(record.heuristic),
        "comparison": dataclasses.asdict(record.comparison),
        "verification": dataclasses.asdict(record.verification),
        "provenance": dataclasses.asdict(record.provenance),
        "trials": [dataclasses.asdict(trial) for trial in record.trials],
    }


def print_values(values: Mapping[str, Any], as_json: bool, *lines: str) -> None:
    """The result of a command: JSON, or lines for a person."""
    if as_json:
        click.echo(json.dumps(values, indent=2))
        return
    for line in lines:
        click.echo(line)
