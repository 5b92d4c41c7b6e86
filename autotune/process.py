"""The worker process of a run, and what it may take before it is killed.

It is spawned in a session of its own and killed with its children when it hangs, or
takes too much memory; the next one goes on with the next candidate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..cache.errors import IsolationError, ProblemError, ShapetuneError
from ..cache.key import Device
from . import wire
from .worker import JAX_OPTIONS

#: What to do where no worker can be had.
REMEDY = 'isolation="none" tries candidates in this process instead'
#: How often a worker's memory is looked at while it works.
_LOOK_S = 0.1
#: Starting a worker may take this long: importing jax, finding the device.
_START_S = 180.0
_TAIL = 400
_STDERR_KEPT = 2**20
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    f"from {__package__}.worker import main; main(*map(int, sys.argv[2:]))"
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a trial may take, before its worker is killed.

    Attributes:
        prepare_s: Seconds for the inputs and the float64 reference.
        compile_s: Seconds to compile.
        verify_s: Seconds to verify; counted anew for each set of inputs.
        time_s: Seconds to screen, to time, and for each phase of a comparison.
        memory_mb: Resident memory of the worker, MiB; 80% of what the machine had
            free when the worker was started if None.
    """

    prepare_s: float = 900.0
    compile_s: float = 180.0
    verify_s: float = 180.0
    time_s: float = 180.0
    memory_mb: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "memory_mb":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ShapetuneError(f"{field.name} must be a number above 0, got {value!r}")

    def of(self, phase: str) -> float:
        """Seconds for a phase."""
        found: dict[str, float] = {
            "prepare": self.prepare_s,
            "compile": self.compile_s,
            "verify": self.verify_s,
        }
        return found.get(phase, self.time_s)


class WorkerDied(Exception):
    """The worker is gone.

    Attributes:
        status: The trial status that stands for it.
        note: How, with the last lines that it wrote.
        phase: What it was doing.
        own_doing: False if someone else may have killed it.
    """

    def __init__(self, status: str, note: str, phase: str = "", own_doing: bool = True) -> None:
        super().__init__(note)
        self.status = status
        self.note = note
        self.phase = phase
        self.own_doing = own_doing


class Worker:
    """The worker process of a run; started when first needed, and again after it died.

    Args:
        modules: Modules to import, which register implementations.
        likely: Modules to import if they can be.
        limits: When to kill it.
        jax_options: Options of jax to set beside those of this process.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        likely: Sequence[str] = (),
        limits: Limits | None = None,
        jax_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._modules = {"modules": list(modules), "likely": list(likely)}
        self._limits = limits or Limits()
        self._jax_options = dict(jax_options or {})
        self._told_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._handles: tuple[int, int] = (-1, -1)
        self._inbox = wire.Inbox()
        self._memory_bytes = 0.0
        self.device: Device | None = None
        #: Versions of its implementations by op and name.
        self.known: dict[str, dict[str, int]] = {}
        #: How often it was started.
        self.starts = 0

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    def start(self) -> None:
        """Starts the process, if there is none.

        Raises:
            IsolationError: It does not come up.
        """
        if self._process is not None:
            return
        self._forget_output()
        options = {name: getattr(jax.config, name, None) for name in JAX_OPTIONS}
        options.update(self._jax_options)
        hello = {
            **self._modules,
            "jax": {name: value for name, value in options.items() if value is not None},
        }
        self._spawn()
        try:
            wire.send(self._handles[1], "hello", hello)
            answer = self._wait(lambda phase: _START_S, "start")
        except (WorkerDied, OSError) as error:
            note = error.note if isinstance(error, WorkerDied) else str(error)
            self.kill()
            raise IsolationError(f"the worker process did not start: {note}; {REMEDY}") from error
        if answer[0] != "ready":
            self.kill()
            raise IsolationError(f"the worker process did not start: {answer[1]}; {REMEDY}")
        try:
            self.device = Device.from_map(answer[1])
        except ProblemError as error:
            raise IsolationError(f"the worker process has an unknown device: {error}") from error
        self.known = answer[2]

    def _spawn(self) -> None:
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-c", _BOOT, json.dumps(sys.path),
                    str(read_there), str(write_there), str(os.getpid()),
                ],
                pass_fds=(read_there, write_there),
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env=environment,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(read_there)
            os.close(write_there)
        self._handles = (read_here, write_here)
        self._inbox = wire.Inbox()
        self._memory_bytes = _memory_limit(self._limits)
        self.starts += 1

    def ask(self, word: str, *values: Any, limit: Callable[[str], float] | None = None) -> Any:
        """Has the worker do something, and returns what it answers.

        Args:
            word: What to do.
            values: With what.
            limit: Seconds that each phase may take; those of ``Limits`` if None.

        Raises:
            WorkerDied: It is gone, of its own or because it was killed.
        """
        assert self._process is not None
        if os.fstat(self._stderr.fileno()).st_size > _STDERR_KEPT:
            self._forget_output()
        try:
            wire.send(self._handles[1], word, *values)
        except OSError:
            raise self._died() from None
        answer = self._wait(limit or self._limits.of, word)
        if answer[0] != "done":
            raise self._killed("crashed", f"it answered {answer[0]!r:.40}")
        tainted, value = answer[1]
        if tainted:
            # What it ran raised: its device may be broken, or hold on to memory.
            self.kill()
        return value

    def tell(self, word: str, *values: Any) -> None:
        """Has the worker do something without waiting for it; see ``heard``."""
        self._told_at = time.monotonic()
        with contextlib.suppress(OSError):
            wire.send(self._handles[1], word, *values)

    def heard(self, limit_s: float) -> bool:
        """Whether the worker has answered what it was told, or was killed over it."""
        if not self.alive:
            return True
        if time.monotonic() - self._told_at > limit_s:
            self.kill()
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self._handles[0], selectors.EVENT_READ)
            while selector.select(0):
                data = os.read(self._handles[0], 2**16)
                if not data:
                    self.kill()
                    return True
                self._inbox.feed(data)
        answered = False
        while (message := self._inbox.take()) is not None:
            answered = answered or message[0] == "done"
        return answered

    def _wait(self, limit: Callable[[str], float], phase: str) -> list[Any]:
        """The next answer, while the time of each phase and the memory are watched."""
        deadline = time.monotonic() + limit(phase)
        with selectors.DefaultSelector() as selector:
            selector.register(self._handles[0], selectors.EVENT_READ)
            while True:
                try:
                    message = self._inbox.take()
                except wire.WireError as error:
                    raise self._killed("crashed", f"it sent {error}") from error
                if message is not None and message[0] == "phase":
                    phase = str(message[1])
                    deadline = time.monotonic() + limit(phase)
                    continue
                if message is not None:
                    return message
                if selector.select(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
                    data = os.read(self._handles[0], 2**16)
                    if not data:
                        raise self._died(phase)
                    self._inbox.feed(data)
                self._watch(phase, deadline, limit(phase))

    def _watch(self, phase: str, deadline: float, seconds: float) -> None:
        assert self._process is not None
        held = _resident_bytes(self._process.pid)
        if held > self._memory_bytes:
            note = (
                f"in phase {phase} the worker held {held / 2**20:.0f} MiB, "
                f"more than the {self._memory_bytes / 2**20:.0f} MiB that it may"
            )
            raise self._killed("out_of_memory", note, phase)
        if time.monotonic() > deadline:
            raise self._killed("timed_out", f"phase {phase} took more than {seconds:g} s", phase)

    def _killed(self, status: str, note: str, phase: str = "") -> WorkerDied:
        self.kill()
        return WorkerDied(status, self._with_output(note), phase)

    def _died(self, phase: str = "") -> WorkerDied:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        self.kill()
        where = f" in phase {phase}" if phase else ""
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            # Nothing that a kernel does by mistake sends these to itself.
            outside = -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            note = f"the worker was killed by {name}{where}"
            return WorkerDied("crashed", self._with_output(note), phase, not outside)
        note = f"the worker exited with {code}{where}"
        return WorkerDied("crashed", self._with_output(note), phase)

    def _with_output(self, note: str) -> str:
        """A note with the last lines of the worker's standard error."""
        size = os.fstat(self._stderr.fileno()).st_size
        data = os.pread(self._stderr.fileno(), 2**14, max(0, size - 2**14))
        lines = [" ".join(line.split()) for line in data.decode(errors="replace").splitlines()]
        lines = [line for line in lines if line and not line.startswith("Extension modules")]
        fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
        # After a crash, what the kernel wrote last comes before Python's own report.
        kept = lines[max(0, fatal[-1] - 1) :][:5] if fatal else lines[-4:]
        text = " / ".join(kept)[:_TAIL]
        return f"{note}; it wrote: {text}" if text else note

    def _forget_output(self) -> None:
        self._stderr.truncate(0)
        self._stderr.seek(0)

    def kill(self) -> None:
        """Ends the process and its children, if there is one."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        for handle in self._handles:
            os.close(handle)

    def close(self) -> None:
        """Ends the process, and removes what it wrote."""
        self.kill()
        self._stderr.close()


def _resident_bytes(pid: int) -> int:
    """Memory that a process holds; 0 where that cannot be told."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _memory_limit(limits: Limits) -> float:
    if limits.memory_mb is not None:
        return limits.memory_mb * 2**20
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 0.8 * int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return float("inf")
