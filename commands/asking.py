"""Commands that ask what is known: show, explain, doctor, misses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ..cache.key import DTYPES, MODES
from ..cache.places import Place, check_there, local, read_path, write_place
from .options import (
    Names,
    cache_option,
    check_window,
    json_option,
    op_argument,
    op_name,
    place_option,
    problem_options,
    problems_of,
)
from .output import print_records
from .progress import at_work


@click.command()
@click.argument("op", metavar="[OP]", required=False, callback=op_name)
@click.option("--seq", type=Names(int), help="Only these query positions.")
@click.option("--dim", type=Names(int), help="Only these sizes of a head.")
@click.option("--dtype", type=Names(str, DTYPES), help="Only these.")
@click.option("--mode", type=Names(str, MODES), help="Only these.")
@click.option("--implementation", type=Names(str), help="Only where one of these was chosen.")
@click.option("--device", help="Only devices whose name holds this.")
@click.option("--here", is_flag=True, help="Only this device.")
@click.option("--stale", is_flag=True, help="Only what was made with other versions.")
@place_option
@json_option
def show(op: str | None, cache: Place | None, as_json: bool, **filters: Any) -> None:
    """Lists what is tuned."""
    places = [cache] if cache else read_path()
    with at_work("reading the caches"):
        from ..cache import load
        from ..kernels import get_op

        if op:
            get_op(op)
        records = [r for r in load(places) if op in (None, r.problem.op) and _wanted(r, filters)]
    records.sort(key=lambda r: (r.device.key, r.problem.key, r.provenance.time))
    if not records and not as_json:
        such = "Nothing such" if any(filters.values()) else "Nothing"
        click.echo(f"{such} is tuned in {', '.join(map(str, places))}; see shapetune tune --help.")
        return
    print_records(records, as_json, None)


def _wanted(record: Any, filters: dict[str, Any]) -> bool:
    from ..kernels import current_device, ops
    from ..kernels.decision import versions

    about = record.problem
    for name in ("seq", "dim", "dtype", "mode"):
        if filters[name] and getattr(about, name) not in filters[name]:
            return False
    if filters["implementation"] and record.chosen.implementation not in filters["implementation"]:
        return False
    if filters["device"] and filters["device"].lower() not in record.device.name.lower():
        return False
    if filters["here"] and record.device.key != current_device().key:
        return False
    known = ops().get(about.op)
    return not filters["stale"] or known is None or versions(known).staleness(record) is not None


@click.command()
@op_argument
@problem_options
@place_option
@json_option
def explain(op: str, cache: Place | None, as_json: bool, **fields: Any) -> None:
    """Says which candidate serves a call, what was considered for it, and why."""
    with at_work("reading the caches"):
        from ..kernels import default

        check_window(op, fields["window"])
        if cache:
            check_there(cache)
            default.load([cache])
        decisions = [default.explain_problem(problem) for problem in problems_of(op, fields)]
        digest = default.state().records.digest
    if as_json:
        values = [{**decision.to_map(), "digest": digest} for decision in decisions]
        click.echo(json.dumps(values, indent=2))
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
    click.echo(f"digest of the records: {digest}")


#: Topics whose remedies are repairs, and not advice.
_AMISS = ("place", "settings", "damage")


@click.command()
@place_option
@json_option
def doctor(cache: Place | None, as_json: bool) -> None:
    """Looks at the caches in force, and says what to do; exit status 1 if anything is amiss."""
    with at_work("looking at the caches"):
        from ..kernels.checkup import check_up

        findings = check_up([cache] if cache else None)
    amiss = [one for one in findings if one.remedy and one.topic in _AMISS]
    if as_json:
        values = [{"topic": one.topic, "text": one.text, "remedy": one.remedy} for one in findings]
        click.echo(json.dumps(values, indent=2))
    else:
        for one in findings:
            click.echo(f"{'!' if one.remedy else ' '} {one.topic}: {one.text}")
            if one.remedy:
                click.echo(f"    → {one.remedy}")
    if amiss:
        sys.exit(1)


@click.command()
@click.argument("op", metavar="[OP]", required=False, callback=op_name)
@click.option("--clear", is_flag=True, help="Forget them, in the place that is written to.")
@cache_option
@json_option
def misses(op: str | None, clear: bool, cache: Path | None, as_json: bool) -> None:
    """Lists calls that had no record of their own, those that tuning would help most first."""
    if clear:
        _forget_misses(op, cache, as_json)
        return
    with at_work("reading the caches"):
        from ..cache import load
        from ..kernels import current_device, get_op
        from ..kernels.checkup import missed

        if op:
            get_op(op)
        device = current_device()
        places = [cache] if cache else read_path()
        found = missed(places, device, load(places, device))
        found = [one for one in found if op in (None, one.problem.op)]
    if as_json:
        click.echo(json.dumps([one.to_map() for one in found], indent=2))
        return
    if not found:
        click.echo("No call is known that had no record of its own.")
        return
    for one in found:
        click.echo(
            f"{one.problem.label}: {one.calls} call(s) in {one.processes} process(es), "
            f"tier {one.tier}, about {one.call_ms:.3g} ms a call; "
            f"tuning gains about {one.gain_ms:.3g} ms of them"
        )
    click.echo(f"shapetune tune {found[0].problem.op} --from-misses tunes them in this order.")


def _forget_misses(op: str | None, cache: Path | None, as_json: bool) -> None:
    from ..cache import miss as words
    from ..kernels import current_device, get_op

    if op:
        get_op(op)
    count = words.forget(local(cache) if cache else write_place(), current_device())
    click.echo(json.dumps({"removed": count}) if as_json else f"{count} file(s) removed")
