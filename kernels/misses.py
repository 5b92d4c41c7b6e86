"""Misses: which calls would gain from tuning, counted while a process runs.

A call whose decision rests on no record of its own adds one to a number; nothing
is written before the process ends, or asks for it.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from ..cache import miss
from ..cache.errors import CacheError, ShapetuneError
from ..cache.key import Device, Problem
from ..cache.places import Place
from ..cache.record_set import RecordSet
from .device import current_device
from .op import get_op

if TYPE_CHECKING:
    from .decision import Decision

log = logging.getLogger("shapetune")

#: Problems that a process counts; calls of further ones are not.
MAX_PROBLEMS = 4096
#: Sets of counts that are written at exit: one for each cache that was in force.
_MAX_KEPT = 64
#: What jax calls the values of a function that is being differentiated.
_DIFFERENTIATED = frozenset(("JVPTracer", "LinearizeTracer"))
#: Milliseconds for a floating-point operation, where nothing similar is measured.
_GUESSED_MS_PER_FLOP = 1e-9
#: Gain of a tuned candidate over the heuristic, where nothing similar is tuned.
_GUESSED_RATIO = 1.25

_kept: list[Counts] = []
_process = secrets.token_hex(6)


class Count:
    """How often a problem was called."""

    __slots__ = ("calls", "tier")

    def __init__(self, tier: str) -> None:
        self.calls = 0
        self.tier = tier


class Counts:
    """The misses of a process, for the caches in force.

    Args:
        places: Where they may be written to: the first of these that can be.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = [place for place in places if isinstance(place, Path)]
        self._counts: dict[Problem, Count] = {}
        self._lock = threading.Lock()

    def of(self, decision: Decision) -> Count | None:
        """The count of a decision's problem; None if it is no miss."""
        if not decision.is_miss:
            return None
        with self._lock:
            if not self._counts:
                _keep(self)
            if len(self._counts) >= MAX_PROBLEMS and decision.problem not in self._counts:
                return None
            return self._counts.setdefault(decision.problem, Count(decision.tier))

    def take(self) -> list[miss.Miss]:
        """The misses so far, which then count from zero again."""
        device, now = current_device(), round(time.time(), 3)
        with self._lock:
            counted = [(p, c) for p, c in self._counts.items() if c.calls]
            found = [
                miss.Miss(problem, device, count.calls, count.tier, _process, now)
                for problem, count in counted
            ]
            for _, count in counted:
                count.calls = 0
        return found

    def write(self) -> Path | None:
        """Writes the misses to the first place that can be written; None if there is none."""
        found = self.take()
        for place in self._places if found else ():
            try:
                miss.write(place, found)
            except CacheError as error:
                log.debug("misses are not written to %s: %s", place, error)
                continue
            return place
        return None


def _keep(counts: Counts) -> None:
    if not _kept:
        atexit.register(write_all)
    if counts not in _kept and len(_kept) < _MAX_KEPT:
        _kept.append(counts)


def write_all() -> None:
    """Writes the misses of this process; at its exit this happens by itself."""
    if os.environ.get("SHAPETUNE_MISSES", "").lower() in ("0", "false", "no"):
        return
    for counts in _kept:
        try:
            counts.write()
        except Exception as error:  # a program that ends well must not end with an error
            log.debug("misses are not written: %s", error)


def counted(
    function: Callable[..., Any], plain: Count | None, training: Count | None
) -> Callable[..., Any]:
    """The function, adding to ``training`` where it is differentiated and to ``plain`` elsewhere.

    What a compiled program calls is counted once, when it is traced.
    """
    if plain is None and training is None:
        return function

    concrete = type(jax.numpy.zeros(()))

    def call(*arrays: Any) -> Any:
        query, key, value = arrays[0].__class__, arrays[1].__class__, arrays[2].__class__
        if query is concrete and key is concrete and value is concrete:
            count = plain
        else:
            names = (query.__name__, key.__name__, value.__name__)
            count = plain if _DIFFERENTIATED.isdisjoint(names) else training
        if count is not None:
            count.calls += 1
        return function(*arrays)

    return call


@dataclasses.dataclass(frozen=True)
class Missed:
    """A problem that was called without a record of its own.

    Attributes:
        problem: The problem.
        calls: How often, by all processes that left word.
        processes: How many these are.
        tier: Where the last of them had its decision from.
        call_ms: About how long a call takes, milliseconds.
        ratio: About what tuning gains: time before over time after.
    """

    problem: Problem
    calls: int
    processes: int
    tier: str
    call_ms: float
    ratio: float

    @property
    def gain_ms(self) -> float:
        """What tuning it would have saved: calls × time × expected gain."""
        return self.calls * self.call_ms * (1 - 1 / self.ratio)

    def to_map(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "problem": self.problem.to_map(), "gain_ms": self.gain_ms}


def costliest(found: Sequence[miss.Miss], records: RecordSet, device: Device) -> list[Missed]:
    """The problems that were missed, those that cost most first; tuned ones are left out."""
    by_problem: dict[Problem, dict[str, miss.Miss]] = {}
    for one in found:
        by_problem.setdefault(one.problem, {})[one.id] = one
    missed = []
    for problem, words in by_problem.items():
        try:
            get_op(problem.op).canonical(problem)
        except ShapetuneError:  # of another version's op
            continue
        if records.exact(device, problem):
            continue
        last = max(words.values(), key=lambda one: (one.time, one.id))
        call_ms, ratio = _expected(problem, records, device)
        calls = sum(one.calls for one in words.values())
        processes = len({one.process for one in words.values()})
        missed.append(Missed(problem, calls, processes, last.tier, call_ms, ratio))
    return sorted(missed, key=lambda one: (-one.gain_ms, one.problem.key))


def _expected(problem: Problem, records: RecordSet, device: Device) -> tuple[float, float]:
    """About what a call takes, and what tuning gains, by the records that are most alike."""
    op = get_op(problem.op)
    alike = records.family(device, problem) or [
        one
        for one in records
        if (one.problem.op, one.problem.mode, one.device.key)
        == (problem.op, problem.mode, device.key)
    ]
    if not alike:
        return op.flops(problem) * _GUESSED_MS_PER_FLOP, _GUESSED_RATIO
    # Of the lengths nearest to this one, since the rate of work depends on them.
    nearest = sorted(alike, key=lambda one: (abs(math.log2(one.problem.seq / problem.seq)), one.id))
    close = nearest[:8]
    rate = statistics.median(one.comparison.heuristic_ms / op.flops(one.problem) for one in close)
    ratio = statistics.median(one.comparison.ratio for one in close)
    return op.flops(problem) * rate, max(ratio, 1.0)
