"""What `make gpu-check` does: tests, a short tuning run and timings on an NVIDIA GPU, in one JSON.

Run as ``python -m shapetune.bench.gpu_check OUTPUT.json [SECONDS]``. Each part is
given a share of the time, and what it found is kept if a later one fails.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import attention
from ..autotune import Options, grid, measure
from ..autotune.measure import Effort
from ..autotune.tune import Listener
from ..autotune.tune import tune as run_tuning
from ..cache.key import Problem
from ..cache.record import Record
from ..kernels import default, get_op
from .machine import machine
from .side_by_side import side_by_side, value_and_gradients

TESTS = Path(__file__).resolve().parent.parent / "tests"
_ROUNDS = 11


def problems() -> list[Problem]:
    """bfloat16, aligned and ragged, causal and not, both modes, and the recurrence."""
    found: list[Problem] = []
    for mode in ("fwd", "fwd_bwd"):
        found += grid(
            "attention", seq=[1024, 1500, 4096], dim=[64, 128], dtype=["bfloat16"],
            causal=[False, True], mode=[mode], batch=[4],
        )  # fmt: skip
    return found


def tests(seconds: float) -> dict[str, Any]:
    """The outcome of the tests marked gpu."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        str(TESTS),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        return {
            "passed": False,
            "note": f"not done after {seconds:.0f} s",
            "tail": str(late.output)[-3000:],
        }
    return {"passed": done.returncode == 0, "tail": done.stdout[-3000:]}


class _Deadline(Listener):
    """Notes every outcome, and stops a run between problems once its time is up."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self.records: list[Record] = []
        self.failed: list[str] = []

    def problem_started(self, index: int, problem: Problem, total: int) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError

    def problem_done(self, index: int, record: Record, fresh: bool) -> None:
        self.records.append(record)

    def problem_failed(self, index: int, problem: Problem, reason: str) -> None:
        self.failed.append(f"{problem.label}: {reason}")


def tuning(seconds: float) -> dict[str, Any]:
    """A short tuning run: what was chosen and gained, and what became of each trial."""
    heard = _Deadline(seconds)
    planned = problems()
    share = max(3.0, seconds / len(planned) - 3.0)
    options = Options(trials=40, budget=share, pairs=9, rounds=5, effort=Effort(0.1, 5, 11))
    try:
        run_tuning("attention", planned, options=options, listener=heard)
    except TimeoutError:
        heard.failed.append(f"time was up after {len(heard.records)} of {len(planned)} problems")
    return {"problems": [_summary(r) for r in heard.records], "failed": heard.failed}


def _summary(record: Record) -> dict[str, Any]:
    found = record.comparison
    return {
        "problem": record.problem.label,
        "chosen": record.chosen.key,
        "heuristic": record.heuristic.key,
        "ratio": [found.ratio, found.low, found.high],
        "chosen_ms": found.chosen_ms,
        "rel_err": record.verification.rel_err,
        "trials": [[t.candidate.key, t.status, t.median_ms, t.note[:160]] for t in record.trials],
    }


def timings() -> list[dict[str, Any]]:
    """The tuned default in turns with jax's and, if installed, PyTorch's attention."""
    rows = []
    for problem in problems():
        row: dict[str, Any] = {"problem": problem.label}
        for name, call in _calls(problem).items():
            try:
                row[name] = call()
            except Exception as error:  # a row that fails is a row
                row[name] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    return rows


def _calls(problem: Problem) -> dict[str, Callable[[], Any]]:
    inputs = get_op("attention").make_inputs(problem, 0, "normal")
    arrays, weights = inputs.arrays[:3], inputs.weights[0]

    def against(function: Callable[..., Any]) -> dict[str, Any]:
        def ours(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, is_causal=problem.causal)

        def theirs(q: Any, k: Any, v: Any) -> Any:
            return function(q, k, v, is_causal=problem.causal)

        both: Sequence[Callable[..., Any]] = (theirs, ours)
        if problem.mode == "fwd_bwd":
            both = [value_and_gradients(one, weights) for one in both]
        times = side_by_side(both, arrays, _ROUNDS)
        ratio, low, high = measure.paired_ratio(times[:, 0], times[:, 1])
        theirs_ms, ours_ms = np.median(times, axis=0)
        return {"their_ms": theirs_ms, "our_ms": ours_ms, "ratio": [ratio, low, high]}

    def jax_nn(implementation: str) -> Callable[..., Any]:
        attend: Any = jax.nn.dot_product_attention
        return functools.partial(attend, implementation=implementation)

    return {
        "chosen": lambda: default.explain_problem(problem).candidate.key,
        "xla": lambda: against(jax_nn("xla")),
        "cudnn": lambda: against(jax_nn("cudnn")),
        "torch_flash": lambda: _torch_flash(problem),
    }


def _torch_flash(problem: Problem) -> dict[str, Any]:
    """PyTorch's flash kernel on the same shape: median ms over the rounds."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (problem.batch, problem.heads, problem.seq, problem.dim)
    dtype = getattr(torch, problem.dtype)
    training = problem.mode == "fwd_bwd"
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=dtype, requires_grad=training) for _ in range(3)
    )
    weights = torch.randn(shape, device="cuda")

    def call() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=problem.causal
            )
        if training:
            torch.autograd.grad((out.float() * weights).sum(), (query, key, value))

    def timed(inner: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / inner * 1e3

    timed(3)
    inner = measure.calibrate(timed(1))
    return {"their_ms": float(np.median([timed(inner) for _ in range(_ROUNDS)]))}


def main(output: Path, seconds: float) -> int:
    """Runs all parts, and writes what each found as soon as it has."""
    if jax.default_backend() != "gpu":
        print("make gpu-check needs an NVIDIA GPU that jax can use; jax sees none", file=sys.stderr)
        return 1
    report: dict[str, Any] = machine()
    ended = time.monotonic() + seconds
    parts: dict[str, Callable[[], Any]] = {
        "tests": lambda: tests(0.35 * seconds),
        "tuning": lambda: tuning(max(30.0, ended - time.monotonic() - 0.2 * seconds)),
        "timings": timings,
    }
    for name, part in parts.items():
        started = time.monotonic()
        print(f"{name} …", flush=True)
        try:
            report[name] = part()
        except Exception:  # the other parts are worth having
            report[name] = {"error": traceback.format_exc()[-3000:]}
        report[f"{name}_s"] = round(time.monotonic() - started, 1)
        output.write_text(json.dumps(report, indent=1) + "\n")
    print(re.sub(r"\s+", " ", json.dumps({k: v for k, v in report.items() if k.endswith("_s")})))
    return 0 if report["tests"].get("passed") else 1


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m shapetune.bench.gpu_check OUTPUT.json [SECONDS]")
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) == 3 else 440.0))
