"""Work in a process of its own: a crash, a hang or an out-of-memory ends that process alone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Idle threads of OpenMP sleep instead of spinning, else PyTorch's pool takes the
#: processors while jax is timed; and neither framework takes the whole GPU.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
#: jax may take nearly the whole GPU, as PyTorch may, instead of 75%; the rest is for
#: what lies outside its pool. A fraction that is set already holds: jax refuses two.
_FRACTION = "0.95"
_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PR_SET_PDEATHSIG = 1


def run(
    module: str,
    request: Mapping[str, Any],
    *,
    seconds: float,
    memory_gb: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Runs ``python -m module`` on a request, and gives the events that it told of.

    Args:
        module: A module whose ``main`` takes a file to write events to and a memory
            limit as arguments, and the request as JSON on standard input.
        request: The request.
        seconds: It is killed, with all that it started, after so many.
        memory_gb: GiB of memory that it may take; 0 for no limit.
        environment: Variables set for it, beside those that every worker gets.

    Returns:
        The events in order, and why it ended early, or None if it did not.
    """
    with tempfile.TemporaryDirectory(prefix="shapetune-") as folder:
        told, said = Path(folder, "events"), Path(folder, "stderr")
        told.touch()
        with said.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(told), str(memory_gb)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                env=_environment(environment or {}),
                start_new_session=True,
            )
            reason = _wait(process, json.dumps(request).encode(), seconds)
        events = [json.loads(line) for line in told.read_text().splitlines() if line.endswith("}")]
        if reason is not None and process.returncode > 0:
            reason = _last_words(said.read_text(errors="replace")) or reason
        return events, reason


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    found = {**os.environ, **_ENVIRONMENT, **given}
    if not any(found.get(name) for name in _FRACTION_NAMES):
        found[_FRACTION_NAMES[0]] = _FRACTION
    return found


def _wait(process: subprocess.Popen[bytes], text: bytes, seconds: float) -> str | None:
    """Why a process did not end well, or None."""
    try:
        process.communicate(text, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"TimedOut: not done after {seconds:.0f} s"
    finally:
        # Whatever it started goes with it, also when this process is interrupted.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    code = process.returncode
    if code == 0:
        return None
    if code > 0:
        return f"ExitStatus: {code}"
    name = signal.Signals(-code).name
    likely = " (the system was out of memory, most likely)" if name == "SIGKILL" else ""
    return f"Killed: by {name}{likely}"


def _last_words(text: str) -> str:
    """The line that names the exception at the end of a traceback."""
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:400] if lines else ""


def limit_memory(gib: float) -> None:
    """Bounds the memory of this process, which ends with its parent and is first to be
    ended where memory runs out."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if gib:
        size = int(gib * 2**30)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (size, size))
