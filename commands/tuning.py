"""Commands that try candidates: tune, demo, check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from .options import (
    Names,
    Seconds,
    cache_option,
    json_option,
    op_argument,
    problem_options,
    problems_of,
)
from .output import display, print_records


@click.command()
@op_argument
@problem_options
@click.option("--trials", type=int, default=48, show_default=True, help="Candidates per problem.")
@click.option(
    "--budget", type=Seconds(), default="60s", show_default=True,
    help="Search time per problem; comparing the finalists comes on top.",
)  # fmt: skip
@click.option("--implementation", type=Names(str), default=None, help="Consider only these.")
@click.option("--again", is_flag=True, help="Tune also what is tuned already.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--storage", help="Keep Optuna's studies: a database URL or a journal file.")
@click.option(
    "--target",
    help="Compile each candidate for this target before it may cost GPU time; see check.",
)
@cache_option
@json_option
def tune(
    op: str,
    trials: int,
    budget: float,
    implementation: tuple[str, ...] | None,
    again: bool,
    seed: int,
    storage: str | None,
    target: str | None,
    cache: Path | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Finds the fastest verified candidate for each problem and stores it.

    Options with several values, separated by commas, span a grid of problems:

      shapetune tune attention --seq 512,2048 --dim 64 --causal both
    """
    from ..autotune import Options
    from ..autotune.tune import tune as run

    problems = problems_of(op, fields)
    options = Options(
        trials=trials,
        budget=budget,
        again=again,
        implementations=implementation or (),
        seed=seed,
        storage=storage,
        target=target,
    )
    with display() as (console, listener):
        records = run(op, problems, cache=cache, options=options, listener=listener)
    print_records(records, as_json, console)
    if len(records) < len(problems):
        sys.exit(1)


@click.command()
def demo() -> None:
    """Tunes a handful of attention shapes on this machine, and shows the gain."""
    from ..autotune.tune import tune as run
    from ..bench import demo as first

    problems = first.problems()
    with display() as (console, listener):
        records = run("attention", problems, options=first.OPTIONS, listener=listener)
    print_records(records, False, console)
    click.echo("\nshapetune.attention(q, k, v) now, in turns with jax.nn.dot_product_attention:")
    for problem in problems:
        if problem.mode == "fwd":
            click.echo(f"  {first.gain(problem)}")


@click.command()
@op_argument
@problem_options
@click.option(
    "--target",
    "targets",
    type=Names(str),
    required=True,
    help="Of those in targets.toml: rtx3090, rtx4090, l4, a100, h100, h200, or of your own file.",
)
@click.option(
    "--targets-file",
    type=click.Path(path_type=Path),
    help="A TOML file that describes more targets.",
)
@click.option("--implementation", type=Names(str), default=None, help="Check only these.")
@click.option("--sample", type=int, help="Check this many candidates per target, drawn at random.")
@click.option("--jobs", type=int, help="Processes at once; one per processor if not given.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@json_option
def check(
    op: str,
    targets: tuple[str, ...],
    targets_file: Path | None,
    implementation: tuple[str, ...] | None,
    sample: int | None,
    jobs: int | None,
    seed: int,
    as_json: bool,
    **fields: Any,
) -> None:
    """Compiles candidates for GPUs that are not there."""
    from ..autotune import check as checking

    problems = problems_of(op, fields)
    tasks = checking.plan(
        problems, targets, targets_file, implementation or (), sample=sample, seed=seed
    )
    found = checking.run(tasks, jobs)
    if as_json:
        click.echo(json.dumps([one.to_map() for one in found], indent=2))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160).print(checking.table(found))
        for line in checking.failures(found):
            click.echo(line)
    if any(one.status != "ok" for one in found):
        sys.exit(1)
