"""Trials in a worker process, so that what a candidate does to it costs one trial."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cache.errors import IsolationError
from ..cache.fields import candidate_map
from ..cache.key import Candidate, Device, Problem
from ..cache.record import Trial, Verification, trial_row
from ..kernels.op import Op
from . import wire
from .measure import Effort
from .outcome import TrialError
from .process import REMEDY, Limits, Worker, WorkerDied

_PHASES = ("compile", "verify", "screen", "time")


class IsolatedBench:
    """A bench whose trials happen in a worker; see ``trial.Tester``.

    Args:
        worker: The worker, which goes on to the next problem's bench.
        op: The op.
        problem: The problem.
        device: The device.
        seed: Of the inputs.
        effort: How long to time.
        max_temp_mb: As for ``trial.Bench``.
        limits: What a trial may take.

    Raises:
        IsolationError: No worker starts, or it has another device.
        TrialError: The inputs or the reference could not be made.
    """

    def __init__(
        self,
        worker: Worker,
        op: Op,
        problem: Problem,
        device: Device,
        seed: int = 0,
        effort: Effort | None = None,
        max_temp_mb: float | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.op = op
        self.problem = problem
        self.device = device
        self.limits = limits or Limits()
        self._worker = worker
        settings = dataclasses.astuple(effort or Effort())
        self._open = (problem.to_map(), seed, list(settings), max_temp_mb)
        #: Candidates whose worker someone else may have killed.
        self.unsure: set[Candidate] = set()
        self._opened_start = -1
        self._ready()

    def _ready(self) -> None:
        """Makes sure that there is a worker, and that it has the problem at hand."""
        if self._worker.alive and self._opened_start == self._worker.starts:
            return
        self._worker.start()
        if self._worker.device is None or self._worker.device.key != self.device.key:
            raise IsolationError(
                f"the worker process has the device {self._worker.device}, this one {self.device}; "
                "a GPU whose memory this process holds is not there for another: set "
                f"XLA_PYTHON_CLIENT_PREALLOCATE=false before jax starts; {REMEDY}"
            )
        try:
            self._worker.ask("open", *self._open)
        except WorkerDied as died:
            raise TrialError(died.status, f"the inputs could not be made: {died.note}") from died
        self._opened_start = self._worker.starts

    def trial(self, candidate: Candidate, best: Trial | None = None) -> Trial:
        """As ``trial.Bench.trial``; a worker that dies of it is an outcome too."""
        self._ready()
        known = None if best is None else trial_row(best)
        outcome = self._ask(candidate, "trial", candidate_map(candidate), known)
        if isinstance(outcome, Trial):
            return outcome
        return Trial(candidate, "crashed", note="the worker answered with a verification")

    def verify_hard(self, candidate: Candidate) -> Verification | Trial:
        """As ``trial.Bench.verify_hard``; a worker that dies of it is an outcome too."""
        self._ready()
        return self._ask(candidate, "verify_hard", candidate_map(candidate))

    def _ask(self, candidate: Candidate, word: str, *values: Any) -> Trial | Verification:
        started = time.perf_counter()
        try:
            return wire.outcome_from_wire(self._worker.ask(word, *values))
        except wire.WireError as error:
            self._worker.kill()
            died = WorkerDied("crashed", f"the worker answered {error}")
        except WorkerDied as error:
            died = error
        if not died.own_doing:
            self.unsure.add(candidate)
        one = self.op.implementations.get(candidate.implementation)
        phase = died.phase if died.phase in _PHASES else "time"
        spent: dict[str, Any] = {f"{phase}_s": time.perf_counter() - started}
        trial = Trial(
            candidate, died.status, note=died.note[:900], version=one.version if one else 0
        )
        return dataclasses.replace(trial, **spent)

    def race(
        self, candidates: Sequence[Candidate], rounds: int, seed: int = 0, anew: bool = False
    ) -> np.ndarray:
        """As ``trial.Bench.race``.

        Raises:
            TrialError: One of them failed, or the worker died.
        """
        self._ready()
        given = [candidate_map(candidate) for candidate in candidates]
        try:
            answer = self._worker.ask("race", given, rounds, seed, anew)
        except WorkerDied as died:
            raise TrialError(died.status, died.note) from died
        if answer[0] == "failed":
            raise TrialError(str(answer[1]), str(answer[2]))
        times = np.array(answer[1], dtype=float)
        if times.ndim != 2 or times.shape[1] != len(candidates) or not (times > 0).all():
            raise TrialError("crashed", "the worker answered with times that are none")
        return times
