"""Where the trials of a run happen: in a worker process, or in this one."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any

from ..cache.errors import IsolationError
from ..cache.fields import candidate_map
from ..cache.key import Candidate, Device, Problem
from ..kernels.op import Op
from .isolated import IsolatedBench
from .options import Options
from .process import Worker
from .trial import Bench, Tester

log = logging.getLogger("shapetune")

_PACKAGE = __package__.partition(".")[0]


class Testers:
    """Gives the tester of each problem of a run; holds the worker that they share.

    Args:
        op: The op.
        device: The device.
        options: How to tune.
    """

    def __init__(self, op: Op, device: Device, options: Options) -> None:
        self._op = op
        self._device = device
        self._options = options
        self._isolated = options.isolation != "none" and os.name == "posix"
        self._worker: Worker | None = None
        self._ahead: _Ahead | None = None
        self._folder = ""

    def of(self, problem: Problem, names: Iterable[str]) -> Tester:
        """The tester of a problem whose candidates are of these implementations.

        Raises:
            IsolationError: A worker is asked for and none can do this.
            TrialError: The inputs or the reference could not be made.
        """
        if self._isolated:
            try:
                return self._in_worker(problem, sorted(set(names)))
            except IsolationError as error:
                if self._options.isolation == "process":
                    raise
                log.warning("candidates are tried in this process, without isolation: %s", error)
                self.close()
                self._isolated = False
        o = self._options
        return Bench(self._op, problem, self._device, o.seed, o.effort, o.max_temp_mb)

    def _in_worker(self, problem: Problem, names: list[str]) -> Tester:
        o = self._options
        if self._worker is None:
            ahead = self._compile_ahead()
            self._worker = self._new_worker(ahead)
            self._ahead = _Ahead(self._new_worker(True), o.limits.compile_s) if ahead else None
        self._worker.start()
        known = self._worker.known.get(self._op.name, {})
        for name in names:
            here = self._op.implementations[name].version
            if known.get(name) != here:
                raise IsolationError(
                    f"implementation {name!r} (version {here}) is registered here, but "
                    f"{_in_worker(known.get(name))} in a worker process; register it when its "
                    "module is imported, and name that module in modules=(…) (or --modules); "
                    'isolation="none" tries candidates in this process instead'
                )
        return IsolatedBench(
            self._worker, self._op, problem, self._device, o.seed, o.effort, o.max_temp_mb, o.limits
        )

    def _compile_ahead(self) -> bool:
        asked = self._options.compile_ahead
        return self._device.platform != "cpu" if asked is None else asked

    def _new_worker(self, shares_programs: bool) -> Worker:
        options: dict[str, Any] = {}
        if shares_programs:
            self._folder = self._folder or tempfile.mkdtemp(prefix="shapetune-programs-")
            options = {
                "jax_compilation_cache_dir": self._folder,
                "jax_persistent_cache_min_compile_time_secs": 0.0,
                "jax_persistent_cache_min_entry_size_bytes": -1,
            }
        return Worker(self._options.modules, self._modules(), self._options.limits, options)

    def _modules(self) -> list[str]:
        """Where the implementations that are not the package's own are defined."""
        found = {getattr(one.function, "__module__", "") for one in _all(self._op)}
        return sorted(
            name
            for name in found
            if name and name != "__main__" and name.partition(".")[0] != _PACKAGE
        )

    @property
    def looks_ahead(self) -> bool:
        """Whether to ask for the next candidate while one is tried."""
        return self._ahead is not None

    def upcoming(self, problem: Problem, candidate: Candidate) -> None:
        """Has a candidate compiled that will be tried next."""
        if self._ahead is not None:
            self._ahead.compile(problem, candidate)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._worker is not None:
            self._worker.close()
        if self._ahead is not None:
            self._ahead.close()
        self._worker = self._ahead = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


class _Ahead:
    """Compiles candidates in a process of its own, into the cache that workers share."""

    def __init__(self, worker: Worker, limit_s: float) -> None:
        self._worker = worker
        self._limit_s = limit_s
        self._busy = False

    def compile(self, problem: Problem, candidate: Candidate) -> None:
        """Begins to compile a candidate, unless the one before is still under way."""
        if self._busy and not self._worker.heard(self._limit_s):
            return
        try:
            self._worker.start()
        except IsolationError:
            return  # trials compile for themselves then
        self._worker.tell("compile", problem.to_map(), candidate_map(candidate))
        self._busy = True

    def close(self) -> None:
        self._worker.close()


def _all(op: Op) -> list[Any]:
    return list(op.implementations.values())


def _in_worker(version: int | None) -> str:
    return "not" if version is None else f"as version {version}"
