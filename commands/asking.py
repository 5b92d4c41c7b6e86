"""Commands that ask what is known: show, explain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .options import cache_option, json_option, op_argument, op_name, problem_options, problems_of
from .output import print_records


@click.command()
@click.argument("op", metavar="[OP]", required=False, callback=op_name)
@cache_option
@json_option
def show(op: str | None, cache: Path | None, as_json: bool) -> None:
    """Lists what is tuned."""
    from ..cache import default_places, load
    from ..kernels import get_op

    if op:
        get_op(op)
    places = [cache] if cache else default_places()
    records = [r for r in load(places) if op in (None, r.problem.op)]
    records.sort(key=lambda r: (r.device.key, r.problem.key, r.provenance.time))
    if not records and not as_json:
        click.echo(f"Nothing is tuned in {', '.join(map(str, places))}; see shapetune tune --help.")
        return
    print_records(records, as_json, None)


@click.command()
@op_argument
@problem_options
@cache_option
@json_option
def explain(op: str, cache: Path | None, as_json: bool, **fields: Any) -> None:
    """Says which candidate serves a call, and why."""
    from ..kernels import default

    if cache:
        default.load(cache)
    decisions = [default.explain_problem(problem) for problem in problems_of(op, fields)]
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
