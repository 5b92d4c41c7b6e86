"""Compiling candidates for a GPU that is not there: does it compile, and with what memory?

XLA's CUDA compiler runs on any machine, with a description of the card
(``targets.toml``) in place of the card. Each compile runs in a process of its
own pool, so that a compiler that crashes costs one candidate.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jax

from ..cache.errors import TargetError, UnsupportedError
from ..cache.key import Candidate, Problem
from ..cache.record import Trial
from ..kernels.op import get_op
from . import measure
from .targets import CARD_OF_CAPABILITY, Target

#: A compile that takes longer than this is given up.
TIMEOUT_S = 120.0
_SHARED = re.compile(r"shared_memory:\s*(\d+) bytes")
_EXCEEDED = re.compile(r"Shared memory size limit exceeded: requested (\d+), available: (\d+)")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """How a candidate compiled for a target.

    Attributes:
        target: Key of the target.
        problem: The problem.
        candidate: The candidate.
        status: ``"ok"``, or the trial status that stands for the failure;
            ``"out_of_memory"`` is too much shared memory.
        seconds: What it took.
        shared_bytes: Shared memory of its largest kernel, also of one that was
            refused for it; None where unknown.
        temp_mb: Temporary device memory, MiB; None where it did not compile.
        arg_mb: Arguments, MiB; likewise.
        out_mb: Outputs, MiB; likewise.
        note: Why it failed.
    """

    target: str
    problem: Problem
    candidate: Candidate
    status: str
    seconds: float = 0.0
    shared_bytes: int | None = None
    temp_mb: float | None = None
    arg_mb: float | None = None
    out_mb: float | None = None
    note: str = ""

    def to_map(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "problem": self.problem.to_map(),
            "candidate": dataclasses.asdict(self.candidate),
        }


def require_compiler() -> None:
    """Makes sure that XLA's CUDA compiler is installed.

    Raises:
        TargetError: It is not.
    """
    try:
        found = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:  # there is not even the package that it would be in
        found = None
    if found is None:
        raise TargetError(
            "compiling for a GPU needs XLA's CUDA plugin (no GPU and no CUDA libraries); "
            "install it with: pip install 'shapetune[aot]'"
        )


@contextlib.contextmanager
def targeting(target: Target) -> Iterator[Callable[..., Any]]:
    """Gives ``compile(function, arguments)`` for a GPU, from abstract arguments.

    The process must not use a GPU of its own: set ``JAX_PLATFORMS=cpu``.
    """
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        f"shapetune-{target.key}", "cuda", target_config=target.config_text, topology="1x1x1"
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    kind = jax.sharding.AbstractDevice(CARD_OF_CAPABILITY[target.capability], None, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)

    def compile_for(function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Any:
        jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
        return jitted.lower(*arguments).compile(compiler_options=options)

    with jax.sharding.use_abstract_mesh(mesh):
        yield compile_for


def compile_candidate(
    target: Target, problem: Problem, candidate: Candidate, **options: Any
) -> Compilation:
    """Compiles one candidate for a target, in this process; never raises for what it does.

    The config need not be in the implementation's space, so that the space's own
    rules can be checked. ``options`` are XLA's compiler options.
    """

    def program() -> tuple[Callable[..., Any], Sequence[Any]]:
        op = get_op(problem.op)
        reason = op.implementation(candidate.implementation).supports(problem, target.device)
        if reason is not None:
            raise UnsupportedError(reason)
        shapes = op.abstract_inputs(problem)
        function = measure.program(op, problem, candidate, shapes)
        return function, measure.arguments(problem, shapes)

    return compile_program(target, problem, candidate, program, **options)


def compile_program(
    target: Target,
    problem: Problem,
    candidate: Candidate,
    program: Callable[[], tuple[Callable[..., Any], Sequence[Any]]],
    **options: Any,
) -> Compilation:
    """Compiles what ``program`` makes, a function and its abstract arguments.

    ``problem`` and ``candidate`` name it in the outcome.
    """
    started = time.perf_counter()
    try:
        function, arguments = program()
        with targeting(target) as compile_for, tempfile.TemporaryDirectory() as folder:
            compiled = compile_for(function, arguments, xla_dump_to=folder, **options)
            shared = _largest_shared(Path(folder))
        memory = compiled.memory_analysis()
    except Exception as error:  # whatever the compiler raises
        found = _failure(error)
        return Compilation(
            target.key, problem, candidate, seconds=time.perf_counter() - started, **found
        )
    return Compilation(
        target.key,
        problem,
        candidate,
        "ok",
        time.perf_counter() - started,
        shared,
        memory.temp_size_in_bytes / measure.MIB,
        memory.argument_size_in_bytes / measure.MIB,
        memory.output_size_in_bytes / measure.MIB,
    )


def _largest_shared(folder: Path) -> int | None:
    """Shared memory of the largest kernel, as XLA's list of a program's steps gives it."""
    found = [
        int(size)
        for path in folder.glob("*thunk_sequence.txt")
        for size in _SHARED.findall(path.read_text(errors="replace"))
    ]
    return max(found, default=None)


def _failure(error: Exception) -> dict[str, Any]:
    words = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    exceeded = _EXCEEDED.search(words)
    if exceeded:
        return {"status": "out_of_memory", "shared_bytes": int(exceeded[1]), "note": words}
    unsupported = isinstance(error, UnsupportedError)
    return {"status": "unsupported" if unsupported else "compile_error", "note": words}


Task = tuple[Target, Problem, Candidate]
Work = Callable[..., Compilation]


def compile_all(
    tasks: Sequence[Any],
    jobs: int,
    heard: Callable[[Compilation], None] = lambda one: None,
    work: Work = compile_candidate,
) -> list[Compilation]:
    """Compiles tasks in parallel processes; the outcomes are in the order of the tasks.

    Args:
        tasks: What to compile for what: target, problem and candidate, and
            whatever else ``work`` takes.
        jobs: Processes at once.
        heard: Called with each outcome as it comes.
        work: Compiles one task, in a process of the pool.

    Raises:
        TargetError: The compiler is not installed.
    """
    require_compiler()
    found: dict[int, Compilation] = {}

    def hear(index: int, outcome: Compilation) -> None:
        found[index] = outcome
        heard(outcome)

    while left := [i for i in range(len(tasks)) if i not in found]:
        if _run_pool(work, tasks, left, jobs, hear):
            break
        # A compiler died or hung and took the pool along. The pool held the first
        # few that are left: one process each finds the culprit.
        for index in [i for i in left if i not in found][: 2 * jobs + 1]:
            if not _run_pool(work, tasks, [index], 1, hear):
                target, problem, candidate = tasks[index][:3]
                note = "the compiler died or hung"
                hear(index, Compilation(target.key, problem, candidate, "crashed", note=note))
    return [found[i] for i in range(len(tasks))]


def _run_pool(
    work: Work,
    tasks: Sequence[Any],
    indices: Sequence[int],
    jobs: int,
    hear: Callable[[int, Compilation], None],
) -> bool:
    """Runs tasks in a fresh pool; False if a process of it died, or none came to an end."""
    pool = _new_pool(min(jobs, len(indices)))
    try:
        futures = {pool.submit(work, *tasks[i]): i for i in indices}
        while futures:
            done, _ = concurrent.futures.wait(
                futures, TIMEOUT_S, concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                raise TimeoutError
            for future in done:
                hear(futures.pop(future), future.result())
    except (BrokenProcessPool, TimeoutError):
        return False
    finally:
        _end(pool)
    return True


def _new_pool(jobs: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )


def _end(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    # A compiler that hangs does not hear of a shutdown; and a pool whose thread still
    # runs at the interpreter's exit is woken through a pipe that is closed by then.
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


class Guard:
    """Keeps candidates that do not compile for a target from costing time on the GPU.

    Args:
        target: What to compile for; the card at hand, if it is known.

    Raises:
        TargetError: The compiler is not installed.
    """

    def __init__(self, target: Target) -> None:
        require_compiler()
        self._target = target
        self._pool = _new_pool(1)

    def __call__(self, problem: Problem, candidate: Candidate) -> Trial | None:
        """The trial that a candidate fails without being run, or None if it compiles."""
        task = (self._target, problem, candidate)
        try:
            found = self._pool.submit(compile_candidate, *task).result(timeout=TIMEOUT_S)
        except (BrokenProcessPool, TimeoutError) as error:
            _end(self._pool)
            self._pool = _new_pool(1)
            status = "timed_out" if isinstance(error, TimeoutError) else "crashed"
            return Trial(candidate, status, note=f"compiling for {self._target.key}: {status}")
        if found.status == "ok":
            return None
        note = f"compiling for {self._target.key}: {found.note}"
        return Trial(candidate, found.status, compile_s=found.seconds, note=note)

    def close(self) -> None:
        """Ends its process."""
        _end(self._pool)


def _start_worker() -> None:
    # Before jax starts a back end: the plugin must not look for a driver.
    jax.config.update("jax_platforms", "cpu")


@functools.cache
def default_jobs() -> int:
    """One process per processor that this one may use."""
    from ..kernels.device import usable_cores

    return usable_cores()
