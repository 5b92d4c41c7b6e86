"""What becomes of trials: the statuses that exceptions stand for, and which trial is best."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from ..cache.record import Trial

#: An exception's own words in a trial's note, at most.
_NOTE = 500


class TrialError(Exception):
    """A candidate failed where it is not alone under test.

    Attributes:
        status: The trial status that stands for it.
        note: What happened.
    """

    def __init__(self, status: str, note: str) -> None:
        super().__init__(note)
        self.status = status
        self.note = note


@dataclasses.dataclass
class Wrong(Exception):
    """What a check found; it ends a trial from several places, and never leaves it."""

    status: str
    note: str
    rel_err: float | None = None


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the smallest median among those that passed."""
    timed = [t for t in trials if t.status == "ok" and t.median_ms is not None]
    return min(timed, key=lambda t: t.median_ms or 0.0, default=None)


def words(error: BaseException) -> str:
    """An exception in its own words, in one line of bounded length."""
    return in_one_line(f"{type(error).__name__}: {error}", _NOTE)


def in_one_line(text: str, most: int) -> str:
    """A text in one line of at most so many characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def status_of(error: BaseException, otherwise: str) -> str:
    """The trial status that an exception stands for."""
    exhausted = isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError)
        and str(error).startswith("RESOURCE_EXHAUSTED")
    )
    return "out_of_memory" if exhausted else otherwise
