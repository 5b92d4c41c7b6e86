"""Commands that measure and compare: bench, compare."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..cache.key import DTYPES, MODES
from ..cache.places import as_place, check_there, check_writable, local
from .options import Names, Seconds, json_option, op_argument

if TYPE_CHECKING:
    from ..bench.schema import Row
    from .progress import Steps

_CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}


@click.command()
@op_argument
@click.option("--suite", type=Names(str), help="For linear-attention: of kernel, layer, peak.")
@click.option("--impl", type=Names(str), help="Only these implementations; all if not given.")
@click.option("--seq", type=Names(int), help="Positions; as each suite has them if not given.")
@click.option("--dim", type=Names(int), help="Size of a head.")
@click.option("--dtype", type=Names(str, DTYPES), help=f"Of {', '.join(DTYPES)}.")
@click.option("--causal", type=click.Choice(list(_CAUSAL)), help="For attention.")
@click.option("--mode", type=Names(str, MODES), help="fwd, or fwd_bwd for value and gradients.")
@click.option("--batch", type=click.IntRange(min=1))
@click.option("--heads", type=click.IntRange(min=1))
@click.option("--window", type=click.IntRange(min=-1), help="For linear-attention.")
@click.option("--chunk", type=click.IntRange(min=1), help="Of the implementation chunked.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The file; one that is there is gone on with.",
)
@click.option("--append", is_flag=True, help="Add rows of another grid or tag to the file.")
@click.option("--tag", help="A word kept in each row, to tell it from others of its point.")
@click.option("--interleave", is_flag=True, help="Sample the rows of a point in turns.")
@click.option(
    "--tune", is_flag=True, help="Tune each point first, so that default is the tuned choice."
)
@click.option(
    "--trials", type=click.IntRange(min=1), default=24, show_default=True, help="With --tune."
)
@click.option(
    "--tune-budget", type=Seconds(), default="20s", show_default=True, help="Search per problem."
)
@click.option(
    "--seconds",
    type=Seconds(),
    default="10s",
    show_default=True,
    help="Sampling of a row; of a point with --interleave.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=15,
    show_default=True,
    help="Samples of a row at most; more narrow its interval, if --seconds allow.",
)
@click.option(
    "--retry-errors", is_flag=True, help="Measure the rows of the file that failed again."
)
@click.option("--stop-after", type=Seconds(), help="Begin no more points then; run again to go on.")
@click.option("--memory", type=click.FloatRange(min=0), default=0.0, help="GiB a row may take.")
@click.option("--interpret", is_flag=True, help="On a CPU: time the interpreted kernels too.")
@click.option(
    "--cache", type=click.Path(), help="Cache that default reads; a folder that --tune writes."
)
def bench(
    op: str,
    suite: tuple[str, ...] | None,
    impl: tuple[str, ...] | None,
    output: Path,
    tag: str | None,
    causal: str | None,
    stop_after: float | None,
    tune_budget: float,
    memory: float,
    cache: str | None,
    tune: bool,
    **rest: Any,
) -> None:
    """Measures implementations over a grid, into a file that compare and report read.

    Each row has a process of its own, so that an out-of-memory is a row. A run may be
    stopped at any moment; the same command goes on.

      shapetune bench attention --seq 512,2048 --dim 64 --output attention.json
      shapetune bench linear-attention --suite kernel,layer,peak --output linear.json
    """
    from ..bench import run as running
    from ..bench import suites
    from .progress import Steps

    grid = {
        name: rest.pop(name)
        for name in ("seq", "dim", "dtype", "mode", "batch", "heads", "window", "chunk")
    }
    grid["causal"] = _CAUSAL[causal] if causal else None
    plan = suites.plan(op, suite or (), impls=impl or (), tag=tag, grid=grid)
    if cache and tune:
        check_writable(local(as_place(cache)))
    elif cache:
        check_there(as_place(cache))
    settings = running.Settings(
        tune=tune,
        cache=cache,
        budget=tune_budget,
        stop_after=stop_after or 0.0,
        memory_gb=memory,
        **rest,
    )
    with Steps("rows") as steps:
        try:
            file, whole = running.run(plan, output, settings, _Shown(steps))
        except KeyboardInterrupt:
            steps.say(f"Stopped. What is done is in {output}; run again to go on.")
            sys.exit(130)
    failed = sum("error" in row for row in file.results)
    click.echo(f"{output}: {len(file.results)} rows, {failed} of them errors")
    if not whole:
        click.echo("Not all rows are there yet; run the same command again to go on.")


class _Shown:
    """Shows a benchmark on the way; a watcher of `bench.run`."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def started(self, total: int, done: int) -> None:
        self._steps.begin(total, done)

    def doing(self, text: str) -> None:
        self._steps.doing(text)

    def rows_done(self, rows: list[Row]) -> None:
        self._steps.advance(len(rows))

    def noted(self, text: str) -> None:
        self._steps.say(text)


@click.command()
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--any-batch",
    is_flag=True,
    help="Match points whatever their batch and heads; times are then of one batch × head.",
)
@click.option(
    "--points", is_flag=True, help="Also each common point, implementation by implementation."
)
@click.option(
    "--to",
    "chooser",
    help="The implementation that the others are held against; default if not given.",
)
@json_option
def compare(
    files: tuple[Path, ...], any_batch: bool, points: bool, chooser: str | None, as_json: bool
) -> None:
    """Benchmark files side by side: ratios, their means, and what default loses to the best.

    A ratio above 1 says that the second of two is faster. With several files, the first
    is held against each other at the points that both have. --json holds each point too.
    """
    from ..bench import points as pointing
    from ..bench import schema, tables
    from .progress import wide_console

    read = [schema.read(path) for path in files]
    match = pointing.any_batch if any_batch else pointing.exactly
    found = tables.comparison(read, match, chooser)
    if as_json:
        click.echo(json.dumps(found.to_map(), indent=2))
        return
    console = wide_console()
    for part in tables.rendered(found, points):
        console.print(part, highlight=False)
