"""What a cache and benchmark files show, as numbers: the report and its summary are made of it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..cache import choice, quarantine
from ..cache.quarantine import Quarantine
from ..cache.record import Record, Trial
from ..cache.record_set import RecordSet
from ..kernels import ops
from ..kernels.decision import versions
from . import compare, tables
from .schema import BenchFile

#: Characters of a failure's words by which failures count as alike.
_ALIKE = 160
#: The phases of a trial, and the field of `Trial` that holds the seconds of each.
_PHASES = {
    "compiling": "compile_s",
    "verifying": "verify_s",
    "screening": "screen_s",
    "timing": "time_s",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """Trials that failed alike.

    Attributes:
        status: How they ended, such as ``"out_of_memory"``.
        implementation: Of the candidates.
        note: The exception's own words, cut short.
        count: How many.
    """

    status: str
    implementation: str
    note: str
    count: int


@dataclasses.dataclass(frozen=True)
class Findings:
    """What is known.

    Attributes:
        tuned: For each problem and device the record that decides, gains first.
        stale: Records of other versions, each with why it is stale.
        quarantined: Candidates that are not tried again.
        damage: Parts of the cache that could not be read, each with why.
        failures: Failed trials by kind, the most frequent first.
        files: What each benchmark file shows.
        made: Seconds since 1970, UTC.
    """

    tuned: list[Record]
    stale: list[tuple[Record, str]]
    quarantined: list[Quarantine]
    damage: list[tuple[str, str]]
    failures: list[Failure]
    files: list[tables.Within]
    made: float

    @property
    def gains(self) -> list[float]:
        """Ratio of the heuristic's time to the chosen one's, by problem."""
        return [record.comparison.ratio for record in self.tuned]

    @property
    def devices(self) -> list[str]:
        """The devices of the records and of the files."""
        names = [record.device.name for record in self.tuned]
        return list(dict.fromkeys(names + [one.file.device_name for one in self.files]))

    def summary(self) -> dict[str, Any]:
        """The numbers that the head of the report and the terminal show."""
        trials = [trial for record in self.tuned for trial in record.trials]
        spent = wall_time(self.tuned)
        return {
            "devices": self.devices,
            "problems_tuned": len(self.tuned),
            "mean_gain": compare.geometric_mean(self.gains) if self.tuned else None,
            "best_gain": max(self.gains, default=None),
            "surely_faster": sum(r.comparison.low > 1 for r in self.tuned),
            "heuristic_is_best": sum(r.heuristic_is_best for r in self.tuned),
            "trials": len(trials),
            "trials_failed": sum(trial.status != "ok" for trial in trials),
            "seconds": {name: round(sum(by.values()), 1) for name, by in spent.items()},
            "failures_by_kind": dict(Counter(t.status for t in trials if t.status != "ok")),
            "stale": len(self.stale),
            "quarantined": len(self.quarantined),
            "damaged": len(self.damage),
            "files": [
                {
                    "name": one.file.name,
                    "device": one.file.device_name,
                    "rows": len(one.file.results),
                    "errors": sum("error" in row for row in one.file.results),
                    "regret": {g: tables.regret_map(found) for g, found in one.losses.items()},
                    "held_against": one.chooser,
                    "over_it": {s.base: s.mean for s in one.summaries},
                }
                for one in self.files
            ],
        }


def gather(records: RecordSet, files: Sequence[BenchFile]) -> Findings:
    """What a cache and benchmark files show."""
    found = list(records)
    by_problem: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        by_problem.setdefault((record.device.key, record.problem.key), []).append(record)
    now = {name: versions(op) for name, op in ops().items()}
    plain = choice.Versions(jax="", implementation=lambda name: None)
    deciding = [
        choice.rank(several, now.get(several[0].problem.op, plain), "warn")[0]
        for several in by_problem.values()
    ]
    stale = [
        (record, reason)
        for record in sorted(found, key=_place)
        if record.problem.op in now
        and (reason := now[record.problem.op].staleness(record)) is not None
    ]
    return Findings(
        tuned=sorted(deciding, key=lambda r: (-r.comparison.ratio, *_place(r))),
        stale=stale,
        quarantined=_standing(records.of_kind(quarantine.KIND)),
        damage=[(str(one.path), one.reason) for one in records.damage],
        failures=_failures(trial for record in deciding for trial in record.trials),
        files=[tables.within(file) for file in files],
        made=time.time(),
    )


def _place(record: Record) -> tuple[Any, ...]:
    """Where a record stands among others: short sequences first."""
    about = record.problem
    return about.op, about.mode, about.seq, about.dim, about.key, record.device.key, record.id


def _failures(trials: Iterable[Trial]) -> list[Failure]:
    counts = Counter(
        (trial.status, trial.candidate.implementation, trial.note[:_ALIKE])
        for trial in trials
        if trial.status != "ok"
    )
    return [Failure(*about, count) for about, count in counts.most_common()]


def wall_time(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Seconds of tuning by what they went to, and by implementation where a trial took them.

    Older records tell less: what they do not is in the rest.
    """
    spent: dict[str, dict[str, float]] = {name: {} for name in _PHASES}
    total = 0.0
    for record in records:
        made = record.provenance
        total += made.seconds
        for trial in record.trials:
            for phase, field in _PHASES.items():
                by, name = spent[phase], trial.candidate.implementation
                by[name] = by.get(name, 0.0) + float(getattr(trial, field))
        for phase, seconds in (("comparing", made.compare_s), ("searching", made.search_s)):
            spent.setdefault(phase, {"all": 0.0})["all"] += seconds
    known = sum(sum(by.values()) for by in spent.values())
    return {**spent, "the rest": {"all": max(total - known, 0.0)}}


def _standing(quarantines: Iterable[Quarantine]) -> list[Quarantine]:
    """The quarantines that were not lifted, each candidate once for a device and its versions."""
    last: dict[tuple[Any, ...], Quarantine] = {}
    for one in sorted(quarantines, key=lambda q: (q.time, q.id)):
        about = (one.device.key, one.problem.key, one.candidate, one.version)
        last[(*about, choice.minor(one.jax))] = one
    return [one for one in last.values() if one.status != quarantine.LIFTED]


@dataclasses.dataclass(frozen=True)
class Landscape:
    """The trials of one implementation over the two parameters that matter most.

    Attributes:
        implementation: Its name.
        across, down: Names of the parameters.
        columns, rows: Their values, in order.
        best: By (row, column) the fastest trial there, or a failed one if all failed.
    """

    implementation: str
    across: str
    down: str
    columns: list[Any]
    rows: list[Any]
    best: dict[tuple[Any, Any], Trial]


def landscape(record: Record) -> Landscape | None:
    """The landscape of the implementation with the most trials over two parameters."""
    options = []
    for name in dict.fromkeys(t.candidate.implementation for t in record.trials):
        trials = [t for t in record.trials if t.candidate.implementation == name]
        values: dict[str, set[Any]] = {}
        for trial in trials:
            for parameter, value in trial.candidate.config.items():
                values.setdefault(parameter, set()).add(value)
        several = [p for p in values if len(values[p]) > 1]
        if len(several) >= 2:
            options.append((name == record.chosen.implementation, len(trials), name, values))
    if not options:
        return None
    _, _, name, values = max(options, key=lambda option: option[:3])
    # Blocks first: they are what a landscape is looked at for.
    order = sorted(values, key=lambda p: (_rank(p, record.problem.mode), -len(values[p]), p))
    down, across = [p for p in order if len(values[p]) > 1][:2]
    best: dict[tuple[Any, Any], Trial] = {}
    for trial in record.trials:
        if trial.candidate.implementation == name:
            at = (trial.candidate.config[down], trial.candidate.config[across])
            best[at] = min(best.get(at, trial), trial, key=_speed)
    return Landscape(name, across, down, _ordered(values[across]), _ordered(values[down]), best)


def _rank(parameter: str, mode: str) -> int:
    blocks = parameter.startswith(("block_", "chunk", "span", "value_tile"))
    backward = parameter.endswith("_bwd") and mode == "fwd_bwd"
    return 0 if blocks and not parameter.endswith("_bwd") else 1 if backward else 2


def _speed(trial: Trial) -> float:
    return float("inf") if trial.median_ms is None or trial.status != "ok" else trial.median_ms


def _ordered(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda v: (isinstance(v, str), v))
