"""Commands that try candidates: tune, demo, check."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .options import (
    Names,
    Seconds,
    cache_option,
    from_misses_option,
    json_option,
    missed_problems,
    op_argument,
    problem_options,
    problems_of,
)
from .output import display, print_fronts, print_records


def trial_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how candidates are tried."""
    options = [
        click.option(
            "--objective", type=click.Choice(["time", "memory", "pareto"]), default="time",
            show_default=True,
            help="The fastest; the least temporary memory; or the fastest, and what less memory costs.",
        ),
        click.option(
            "--max-temp-mb", type=float, help="Leave out what needs more temporary memory, in MiB."
        ),
        click.option(
            "--isolation", type=click.Choice(["process", "auto", "none"]), default="process",
            show_default=True, help="Try candidates in a worker process, or for debugging in this one.",
        ),
        click.option(
            "--modules", type=Names(str), help="Import these, which register implementations."
        ),
        click.option(
            "--retry-quarantined", is_flag=True, help="Try also what crashed, hung or was wrong."
        ),
        click.option("--compile-limit", type=Seconds(), help="Give up a compile after this time."),
        click.option("--verify-limit", type=Seconds(), help="Give up a verification after this time."),
        click.option("--time-limit", type=Seconds(), help="Give up a timing after this time."),
        click.option(
            "--memory-limit", type=click.FloatRange(min=0, min_open=True),
            help="Give up a candidate whose process holds more MiB.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def options_of(fields: dict[str, Any]) -> Any:
    """How to tune, of the options of the command; those it takes leave ``fields``."""
    from ..autotune import Limits, Options

    limits = {
        "compile_s": fields.pop("compile_limit"),
        "verify_s": fields.pop("verify_limit"),
        "time_s": fields.pop("time_limit"),
        "memory_mb": fields.pop("memory_limit"),
    }
    names = (
        "trials", "budget", "again", "seed", "storage", "target", "objective", "max_temp_mb",
        "isolation", "retry_quarantined",
    )  # fmt: skip
    return Options(
        **{name: fields.pop(name) for name in names},
        implementations=fields.pop("implementation") or (),
        modules=fields.pop("modules") or (),
        limits=Limits(**{name: value for name, value in limits.items() if value is not None}),
    )


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
@trial_options
@from_misses_option
@cache_option
@json_option
def tune(op: str, from_misses: bool, cache: Path | None, as_json: bool, **fields: Any) -> None:
    """Finds the fastest verified candidate for each problem and stores it.

    Options with several values, separated by commas, span a grid of problems:

      shapetune tune attention --seq 512,2048 --dim 64 --causal both
    """
    # The worker needs the memory of a GPU; this process only looks at it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from ..autotune.tune import tune as run

    if from_misses:
        _refuse_grid()
    options = options_of(fields)
    problems = missed_problems(op, cache) if from_misses else problems_of(op, fields)
    if not problems:
        click.echo(f"No call of {op} has missed a record.", err=True)
    with display() as (console, listener):
        records = run(op, problems, cache=cache, options=options, listener=listener)
    print_records(records, as_json, console)
    if options.objective == "pareto" and not as_json:
        print_fronts(records)
    if len(records) < len(problems):
        sys.exit(1)


#: The options that span a grid of problems.
_GRID = (
    "seq", "dim", "dtype", "causal", "mode", "batch", "heads", "kv_heads", "kv_seq", "value_dim",
    "window",
)  # fmt: skip


def _refuse_grid() -> None:
    """No option of a grid may stand beside --from-misses, which would pass over it."""
    ctx = click.get_current_context()
    for name in _GRID:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = name.replace("_", "-")
            raise click.UsageError(
                f"--from-misses says what the problems are; leave --{option} out"
            )


@click.command()
def demo() -> None:
    """Tunes a handful of attention shapes on this machine, and shows the gain."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as for tune
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
    from .progress import Steps, wide_console

    problems = problems_of(op, fields)
    tasks = checking.plan(
        problems, targets, targets_file, implementation or (), sample=sample, seed=seed
    )
    with Steps("candidates") as steps:
        steps.begin(len(tasks))
        steps.doing("compiling")
        found = checking.run(tasks, jobs, lambda one: steps.advance())
    if as_json:
        click.echo(json.dumps([one.to_map() for one in found], indent=2))
    else:
        wide_console().print(checking.table(found))
        for line in checking.failures(found):
            click.echo(line)
    if any(one.status != "ok" for one in found):
        sys.exit(1)
