"""What the commands share: types of option values, and the options that span a grid of problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..cache.errors import CacheError
from ..cache.key import DTYPES, MODES
from ..cache.places import as_place, local


class Names(click.ParamType[Any]):
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


class Seconds(click.ParamType[Any]):
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


class WindowType(click.ParamType[Any]):
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


class PlaceType(click.ParamType[Any]):
    """A cache place: a folder, a .msgpack file, or where ``remote`` says so a URL."""

    def __init__(self, remote: bool = True) -> None:
        self._remote = remote
        self.name = "place" if remote else "folder"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            place = as_place(value)
            return place if self._remote else local(place)
        except CacheError as error:
            self.fail(str(error), param, ctx)


def op_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name of an op: a hyphen may stand for an underscore."""
    return value.replace("-", "_") if value else value


op_argument = click.argument("op", metavar="OP", callback=op_name)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
cache_option = click.option(
    "--cache",
    type=PlaceType(remote=False),
    help="Cache folder instead of SHAPETUNE_CACHE or the user's cache folder.",
)
place_option = click.option(
    "--cache",
    type=PlaceType(),
    help="Cache folder, file or URL instead of SHAPETUNE_CACHE or the user's cache folder.",
)


def _needed(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """An option that must be given, but where misses say what the problems are."""
    if value is None and not ctx.params.get("from_misses"):
        raise click.MissingParameter(ctx=ctx, param=param)
    return value


from_misses_option = click.option(
    "--from-misses", is_flag=True, is_eager=True,
    help="In place of a grid: what calls have missed, the costliest first; see misses.",
)  # fmt: skip


def problem_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that span the grid of problems."""
    options = [
        click.option("--seq", type=Names(int), callback=_needed, help="Query positions, T."),
        click.option("--dim", type=Names(int), callback=_needed, help="Size of a head."),
        click.option(
            "--dtype", type=Names(str, DTYPES), default="float32", show_default=True,
            help=f"Of {', '.join(DTYPES)}.",
        ),
        click.option(
            "--causal", type=click.Choice(["no", "yes", "both"]), default="no", show_default=True
        ),
        click.option(
            "--mode", type=Names(str, MODES), default="fwd", show_default=True,
            help="fwd, or fwd_bwd for the value and gradients.",
        ),
        click.option("--batch", type=Names(int), default="1", show_default=True),
        click.option("--heads", type=Names(int), default="8", show_default=True),
        click.option("--kv-heads", type=int, help="Key heads; as --heads if not given."),
        click.option("--kv-seq", type=int, help="Key positions; as --seq if not given."),
        click.option("--value-dim", type=int, help="Size of a value head; as --dim if not given."),
        click.option("--window", type=WindowType(), help="Local window."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def check_window(op: str, window: object) -> None:
    """Refuses to speak of the recurrence without its window: a call of it must give one."""
    if op == "linear_attention" and window is None:
        raise click.UsageError(
            "--window is needed: linear_attention has no default for it; -1 leaves out nothing"
        )


def problems_of(op: str, fields: dict[str, Any]) -> list[Any]:
    """The grid of problems that the options span."""
    from ..autotune import grid
    from ..kernels import get_op

    get_op(op)
    causal = {"no": (False,), "yes": (True,), "both": (False, True)}[fields.pop("causal")]
    return grid(op, causal=causal, **fields)


def missed_problems(op: str, cache: Any) -> list[Any]:
    """The problems that calls of an op have missed, the costliest first."""
    from ..cache import load
    from ..cache.places import read_path
    from ..kernels import current_device, get_op
    from ..kernels.checkup import missed

    get_op(op)
    places = [cache, *read_path()] if cache else read_path()
    device = current_device()
    found = missed(places, device, load(places, device))
    return [one.problem for one in found if one.problem.op == op]
