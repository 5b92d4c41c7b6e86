"""The worker process: holds a bench for one problem, and tries what it is told to.

It is started by ``process.py`` in a session of its own, imports the same
implementations, and may die of what a candidate does: that costs one trial.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import wire

#: jax's options that change what is compiled, handed on from the parent.
JAX_OPTIONS = (
    "jax_platforms",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(given: int, answers: int, parent: int) -> None:
    """Serves the run that started this process until it goes away.

    Args:
        given: File descriptor to read messages from.
        answers: File descriptor to write messages to.
        parent: Process id of the run.
    """
    _die_with(parent)
    _no_core_dump()
    faulthandler.enable(all_threads=False)
    inbox = wire.Inbox()
    hello = wire.receive(given, inbox)
    if hello is None:
        return
    try:
        ready = _prepare(hello[1])
    except Exception as error:  # whatever an import raises
        wire.send(answers, "failed", f"{type(error).__name__}: {error}"[:500])
        return
    wire.send(answers, "ready", *ready)
    server = _Server(lambda *message: wire.send(answers, *message))
    while (message := wire.receive(given, inbox)) is not None:
        wire.send(answers, "done", server.serve(message))


def _die_with(parent: int) -> None:
    """Has this process and its children killed when the run is gone, even if it hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="shapetune-parent").start()


def _no_core_dump() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _prepare(hello: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Sets jax up as the parent has it, and imports the implementations."""
    import jax

    for name, value in hello["jax"].items():
        jax.config.update(name, value)
    from ..kernels import current_device
    from ..kernels.op import ops

    for name in hello["modules"]:
        importlib.import_module(name)
    for name in hello["likely"]:
        with contextlib.suppress(Exception):  # what then is missing, the run says
            importlib.import_module(name)
    known = {
        op.name: {name: one.version for name, one in op.implementations.items()}
        for op in ops().values()
    }
    return current_device().to_map(), known


class _Server:
    """Does what messages ask for, on the bench of the problem at hand."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._bench: Any = None

    def serve(self, message: list[Any]) -> list[Any]:
        """The answer to a message: ``[tainted, value]``."""
        word, *values = message
        value = getattr(self, f"_on_{word}")(*values)
        return [bool(self._bench is not None and self._bench.tainted), value]

    def _on_open(self, problem: Any, seed: int, effort: list[Any], max_temp_mb: Any) -> None:
        from ..cache.key import Problem
        from ..kernels import current_device
        from ..kernels.op import get_op
        from .measure import Effort
        from .trial import Bench

        self._bench = None  # its inputs go before the next ones come
        about = Problem.from_map(problem)
        self._bench = Bench(
            get_op(about.op),
            about,
            current_device(),
            seed,
            Effort(*effort),
            max_temp_mb,
            lambda phase: self._tell("phase", phase),
        )
        self._bench.prepare()

    def _on_trial(self, candidate: Any, best: Any) -> list[Any]:
        from ..cache.fields import candidate as read_candidate
        from ..cache.record import read_trial

        known = None if best is None else read_trial(best)
        return wire.outcome_to_wire(self._bench.trial(read_candidate(candidate), known))

    def _on_verify_hard(self, candidate: Any) -> list[Any]:
        from ..cache.fields import candidate as read_candidate

        return wire.outcome_to_wire(self._bench.verify_hard(read_candidate(candidate)))

    def _on_race(self, candidates: list[Any], rounds: int, seed: int, anew: bool) -> list[Any]:
        from ..cache.fields import candidate as read_candidate
        from .outcome import TrialError

        try:
            times = self._bench.race([read_candidate(c) for c in candidates], rounds, seed, anew)
        except TrialError as error:
            return ["failed", error.status, error.note]
        return ["times", times.tolist()]

    def _on_compile(self, problem: Any, candidate: Any) -> None:
        """Compiles a candidate into the persistent cache, for another worker to find."""
        from ..cache.fields import candidate as read_candidate
        from ..cache.key import Problem
        from ..kernels.op import get_op
        from . import measure

        about = Problem.from_map(problem)
        op = get_op(about.op)
        shapes = op.abstract_inputs(about)
        try:
            function = measure.program(op, about, read_candidate(candidate), shapes)
            measure.compile_program(function, measure.arguments(about, shapes))
        except (Exception, SystemExit):  # its trial will tell
            return
