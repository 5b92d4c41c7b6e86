"""Commands by which a person decides: cache pin, cache unpin."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

from ..cache.places import check_writable, read_path, write_place
from ..cache.record_set import RecordSet
from .options import (
    cache_option,
    check_window,
    json_option,
    op_argument,
    problem_options,
    problems_of,
)
from .output import print_values

#: No parameter of a config has more.
_MAX_DIGITS = 20


def _setting(text: str) -> tuple[str, int | str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE, such as block_q=128")
    if not re.fullmatch(r"-?[0-9]+", value):
        return name, value
    if len(value) > _MAX_DIGITS:
        raise click.BadParameter(f"{name}={value[:20]}… is no number that a parameter may be")
    return name, int(value)


def _check_text(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Refuses what is no text: arguments may hold any bytes, records only UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{value!r:.80} is not UTF-8; write it in UTF-8") from None
    return value


@click.command()
@op_argument
@problem_options
@click.option("--implementation", required=True, help="What to use for these problems.")
@click.option("--config", multiple=True, metavar="NAME=VALUE", help="A parameter of it.")
@click.option("--note", default="", callback=_check_text, help="Why, for those who find the pin.")
@cache_option
@json_option
def pin(
    op: str,
    implementation: str,
    config: tuple[str, ...],
    note: str,
    cache: Path | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Fixes what serves these problems on this device, above all measurements."""
    from ..kernels import default, get_op

    check_window(op, fields["window"])
    if implementation == "default":
        raise click.UsageError(
            "--implementation default stands for a choice, which a pin replaces; name another one, "
            "or take a pin back with shapetune cache unpin"
        )
    settings = dict(map(_setting, config))
    chosen = []
    for problem in problems_of(op, fields):
        candidate = default.forced(get_op(op), problem, implementation, settings)
        chosen.append((problem, candidate))
    _write_pins(chosen, True, note, cache, as_json)


@click.command()
@op_argument
@problem_options
@cache_option
@json_option
def unpin(op: str, cache: Path | None, as_json: bool, **fields: Any) -> None:
    """Takes back the pins of these problems on this device."""
    check_window(op, fields["window"])
    _write_pins([(problem, None) for problem in problems_of(op, fields)], False, "", cache, as_json)


def _write_pins(
    chosen: list[tuple[Any, Any]], active: bool, note: str, place: Path | None, as_json: bool
) -> None:
    from ..cache import pin as pins
    from ..cache import store
    from ..kernels import current_device, default

    target, device = place or write_place(), current_device()
    check_writable(target, device)
    known: RecordSet = store.load([target, *([] if place else read_path())], device)
    made = []
    for problem, candidate in chosen:
        last = pins.latest(known.about(pins.KIND, device, problem))
        if candidate is None:
            if last is None or not last.active:
                continue
            candidate = last.candidate
        made.append(
            pins.Pin(
                problem=problem,
                device=device,
                candidate=candidate,
                active=active,
                count=last.count + 1 if last else 1,
                time=round(time.time(), 3),
                note=note[:200],
            )
        )
    if made:
        store.publish(target, made)
        default.reload()
    word = "pinned" if active else "unpinned"
    values = [{"problem": p.problem.to_map(), word: p.candidate.key} for p in made]
    lines = [f"{word}: {p.problem.label}: {p.candidate.key}" for p in made]
    print_values({"changed": values}, as_json, *(lines or ["nothing was pinned there"]))
