"""The command `shapetune`: thin commands, each of which calls one function."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ._version import __version__
from .cache.errors import ShapetuneError
from .cache.key import DTYPES, MODES


class _Group(click.Group):
    """Turns the package's own errors into one clear line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShapetuneError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shapetune")
def main() -> None:
    """Picks the fastest verified kernel and block sizes for every shape."""


class _List(click.ParamType[Any]):
    """Values separated by commas."""

    def __init__(self, kind: type[int] | type[str], allowed: tuple[str, ...] = ()) -> None:
        self._kind = kind
        self._allowed = allowed
        self.name = ",".join([kind.__name__.replace("str", "name")] * 2)

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        found: list[int | str] = []
        for part in str(value).split(","):
            word = part.strip()
            if self._kind is int:
                try:
                    number = int(word)
                except ValueError:
                    self.fail(
                        f"{word!r} is not an integer; give numbers such as 512,2048", param, ctx
                    )
                if number < 1:
                    self.fail(f"{number} is not at least 1", param, ctx)
                found.append(number)
            elif self._allowed and word not in self._allowed:
                self.fail(f"{word!r} is not one of {', '.join(self._allowed)}", param, ctx)
            else:
                found.append(word)
        return tuple(dict.fromkeys(found))


class _Seconds(click.ParamType[Any]):
    """A time such as 90, 90s, 2m or 1h."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip()
        unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
        try:
            number = float(text[:-1] if unit else text) * (unit or 1)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            self.fail(f"{value!r} is not a time; give one such as 90s, 2m or 1h", param, ctx)
        return number


class _Window(click.ParamType[Any]):
    """A window: N for both sides, or LEFT,RIGHT."""

    name = "n|left,right"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | tuple[int, int]:
        if isinstance(value, int | tuple):
            return value
        try:
            sides = [int(part) for part in str(value).split(",")]
        except ValueError:
            sides = []
        if len(sides) not in (1, 2):
            self.fail(f"{value!r} is not a window; give N or LEFT,RIGHT", param, ctx)
        return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _op_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return value.replace("-", "_") if value else value


_op_argument = click.argument("op", metavar="OP", callback=_op_name)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_cache_option = click.option(
    "--cache",
    type=click.Path(path_type=Path),
    help="Cache folder instead of SHAPETUNE_CACHE or the user's cache folder.",
)


def _problem_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that span the grid of problems."""
    options = [
        click.option("--seq", type=_List(int), required=True, help="Query positions, T."),
        click.option("--dim", type=_List(int), required=True, help="Size of a head."),
        click.option(
            "--dtype", type=_List(str, DTYPES), default="float32", show_default=True,
            help=f"Of {', '.join(DTYPES)}.",
        ),
        click.option(
            "--causal", type=click.Choice(["no", "yes", "both"]), default="no", show_default=True
        ),
        click.option(
            "--mode", type=_List(str, MODES), default="fwd", show_default=True,
            help="fwd, or fwd_bwd for the value and gradients.",
        ),
        click.option("--batch", type=_List(int), default="1", show_default=True),
        click.option("--heads", type=_List(int), default="8", show_default=True),
        click.option("--kv-heads", type=int, help="Key heads; as --heads if not given."),
        click.option("--kv-seq", type=int, help="Key positions; as --seq if not given."),
        click.option("--value-dim", type=int, help="Size of a value head; as --dim if not given."),
        click.option("--window", type=_Window(), help="Local window."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _problems(op: str, fields: dict[str, Any]) -> list[Any]:
    from .autotune import grid
    from .kernels import get_op

    get_op(op)
    causal = {"no": (False,), "yes": (True,), "both": (False, True)}[fields.pop("causal")]
    return grid(op, causal=causal, **fields)


@main.command()
@_op_argument
@_problem_options
@click.option("--trials", type=int, default=48, show_default=True, help="Candidates per problem.")
@click.option(
    "--budget", type=_Seconds(), default="60s", show_default=True,
    help="Search time per problem; comparing the finalists comes on top.",
)  # fmt: skip
@click.option("--implementation", type=_List(str), default=None, help="Consider only these.")
@click.option("--again", is_flag=True, help="Tune also what is tuned already.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--storage", help="Keep Optuna's studies: a database URL or a journal file.")
@click.option(
    "--target",
    help="Compile each candidate for this target before it may cost GPU time; see check.",
)
@_cache_option
@_json_option
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
    from .autotune import Options
    from .autotune.tune import tune as run

    problems = _problems(op, fields)
    options = Options(
        trials=trials,
        budget=budget,
        again=again,
        implementations=implementation or (),
        seed=seed,
        storage=storage,
        target=target,
    )
    with _display() as (console, listener):
        records = run(op, problems, cache=cache, options=options, listener=listener)
    _print_records(records, as_json, console)
    if len(records) < len(problems):
        sys.exit(1)


@contextlib.contextmanager
def _display() -> Iterator[tuple[Any, Any]]:
    """A listener that shows the run on standard error; Ctrl-C ends it with a word."""
    from rich.console import Console

    from .autotune.display import LiveDisplay, PlainDisplay

    console = Console(stderr=True)
    try:
        if console.is_terminal:
            with LiveDisplay(console) as live:
                yield console, live
        else:
            yield console, PlainDisplay(console)
    except KeyboardInterrupt:
        console.print("Stopped. Every problem finished so far is kept; run again to go on.")
        sys.stdout.flush()
        # XLA may still be running the interrupted call, and crashes if the
        # interpreter's orderly end frees what that call uses.
        os._exit(130)


def _print_records(records: list[Any], as_json: bool, console: Any) -> None:
    if as_json:
        click.echo(json.dumps([_record_map(record) for record in records], indent=2))
    elif records:
        from rich.console import Console

        from .autotune.display import records_table

        out = Console()
        # A pipe has no width of its own: leave each row whole.
        out = out if out.is_terminal else Console(width=160)
        out.print(records_table(records))


def _record_map(record: Any) -> dict[str, Any]:
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


@main.command()
def demo() -> None:
    """Tunes a handful of attention shapes on this machine, and shows the gain."""
    from .autotune.tune import tune as run
    from .bench import demo as first

    problems = first.problems()
    with _display() as (console, listener):
        records = run("attention", problems, options=first.OPTIONS, listener=listener)
    _print_records(records, False, console)
    click.echo("\nshapetune.attention(q, k, v) now, in turns with jax.nn.dot_product_attention:")
    for problem in problems:
        if problem.mode == "fwd":
            click.echo(f"  {first.gain(problem)}")


@main.command()
@_op_argument
@_problem_options
@click.option(
    "--target",
    "targets",
    type=_List(str),
    required=True,
    help="Of those in targets.toml: rtx3090, rtx4090, l4, a100, h100, h200, or of your own file.",
)
@click.option(
    "--targets-file",
    type=click.Path(path_type=Path),
    help="A TOML file that describes more targets.",
)
@click.option("--implementation", type=_List(str), default=None, help="Check only these.")
@click.option("--sample", type=int, help="Check this many candidates per target, drawn at random.")
@click.option("--jobs", type=int, help="Processes at once; one per processor if not given.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@_json_option
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
    from .autotune import check as checking

    problems = _problems(op, fields)
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


@main.command()
@click.argument("op", metavar="[OP]", required=False, callback=_op_name)
@_cache_option
@_json_option
def show(op: str | None, cache: Path | None, as_json: bool) -> None:
    """Lists what is tuned."""
    from .cache import default_places, load
    from .kernels import get_op

    if op:
        get_op(op)
    places = [cache] if cache else default_places()
    records = [r for r in load(places) if op in (None, r.problem.op)]
    records.sort(key=lambda r: (r.device.key, r.problem.key, r.provenance.time))
    if not records and not as_json:
        click.echo(f"Nothing is tuned in {', '.join(map(str, places))}; see shapetune tune --help.")
        return
    _print_records(records, as_json, None)


@main.command()
@_op_argument
@_problem_options
@_cache_option
@_json_option
def explain(op: str, cache: Path | None, as_json: bool, **fields: Any) -> None:
    """Says which candidate serves a call, and why."""
    from .kernels import default

    if cache:
        default.load(cache)
    decisions = [default.explain_problem(problem) for problem in _problems(op, fields)]
    if as_json:
        click.echo(json.dumps([decision.to_map() for decision in decisions], indent=2))
        return
    for decision in decisions:
        click.echo(decision.problem.label)
        click.echo(f"  {decision.candidate.key}  (tier: {decision.tier})")
        if decision.speedup is not None and decision.interval is not None:
            low, high = decision.interval
            click.echo(
                f"  {decision.speedup:.2f}× the heuristic, 95% interval [{low:.2f}, {high:.2f}]"
            )
        for step in decision.steps:
            click.echo(f"  - {step}")
        for identity in decision.record_ids:
            click.echo(f"  - rests on record {identity}")


if __name__ == "__main__":
    main()
