"""What `make gpu-check` does: tests, a short tuning run and timings on an NVIDIA GPU, in one JSON.

Run as ``python -m shapetune.bench.gpu_check OUTPUT.json [SECONDS]``. Each part has its
share of the time and stops at its end, and what it found is kept if a later one fails.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import attention
from ..autotune import Listener, Options, grid, measure
from ..autotune import tune as run_tuning
from ..autotune.measure import Effort
from ..cache.key import Candidate, Problem
from ..cache.record import Record
from ..kernels import current_device, default, get_op
from .machine import machine
from .side_by_side import side_by_side, value_and_gradients

TESTS = Path(__file__).resolve().parent.parent / "tests"
#: Positions that the recurrence leaves to a window of attention.
WINDOW = 64


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much to check.

    Attributes:
        seq: Lengths of the attention problems, ragged ones among them.
        dim: Their head sizes.
        dtype: Their dtype.
        recurrence_seq: Lengths of the linear attention problems.
        recurrence_dim: Their head sizes.
        batch: Batch size of all.
        heads: Heads of all.
        trials: Candidates tried for a problem, at most.
        effort: How long to time a trial.
        rounds: Samples of each program in a side-by-side timing.
        tests: Where the tests marked gpu are.
    """

    seq: tuple[int, ...] = (1024, 1500, 4096)
    dim: tuple[int, ...] = (64, 128)
    dtype: str = "bfloat16"
    recurrence_seq: tuple[int, ...] = (2048, 8192)
    recurrence_dim: tuple[int, ...] = (64, 128)
    batch: int = 4
    heads: int = 8
    trials: int = 40
    effort: Effort = dataclasses.field(default_factory=lambda: Effort(0.1, 5, 11))
    rounds: int = 9
    tests: Path = TESTS

    @property
    def attention(self) -> list[Problem]:
        """Aligned and ragged, causal and not, both modes."""
        return [
            *grid(
                "attention", seq=self.seq, dim=self.dim, dtype=[self.dtype], batch=[self.batch],
                heads=[self.heads], causal=[False, True], mode=["fwd", "fwd_bwd"],
            )
        ]  # fmt: skip

    @property
    def recurrence(self) -> list[Problem]:
        """float32, whose products the kernels may not round, and the dtype of the attention."""
        return [
            *grid(
                "linear_attention", seq=self.recurrence_seq, dim=self.recurrence_dim,
                dtype=sorted({"float32", self.dtype}), batch=[self.batch], heads=[self.heads],
                window=WINDOW, mode=["fwd", "fwd_bwd"],
            )
        ]  # fmt: skip


def tests(sizes: Sizes, seconds: float) -> dict[str, Any]:
    """The outcome of the tests marked gpu; several at once, since most of it is compiling."""
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", "auto", "--maxprocesses", "4"]
    command = [sys.executable, "-m", "pytest", *options, str(sizes.tests)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        tail = (late.output or b"").decode(errors="replace")[-3000:]
        return {"passed": False, "note": f"not done after {seconds:.0f} s", "tail": tail}
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


def tuning(problems: Sequence[Problem], sizes: Sizes, seconds: float) -> dict[str, Any]:
    """A short tuning run: what was chosen and gained, and what became of each trial."""
    heard = _Deadline(seconds)
    planned = _alternating(problems)
    share = max(2.0, 0.6 * seconds / len(planned))
    options = Options(trials=sizes.trials, budget=share, pairs=9, rounds=5, effort=sizes.effort)
    try:
        run_tuning(planned[0].op, planned, options=options, listener=heard)
    except TimeoutError:
        heard.failed.append(f"time was up after {len(heard.records)} of {len(planned)} problems")
    return {"problems": [_summary(r) for r in heard.records], "failed": heard.failed}


def _alternating(problems: Sequence[Problem]) -> list[Problem]:
    """In an order whose beginning has some of everything, should the time not suffice."""
    return [problem for start in range(5) for problem in problems[start::5]]


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


def timings(problems: Sequence[Problem], sizes: Sizes, seconds: float) -> list[dict[str, Any]]:
    """The tuned default in turns with its rivals, one row a problem."""
    until = time.monotonic() + seconds
    rivals = {"attention": _attention_rivals, "linear_attention": _recurrence_rivals}
    rows: list[dict[str, Any]] = []
    for problem in _alternating(problems):
        if time.monotonic() > until:
            rows.append({"note": f"time was up after {len(rows)} of {len(problems)} problems"})
            break
        row: dict[str, Any] = {"problem": problem.label}
        for name, call in rivals[problem.op](problem, sizes.rounds):
            try:
                row[name] = call()
            except Exception as error:  # a row that fails is a row
                row[name] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    return rows


def _attention_rivals(problem: Problem, rounds: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """XLA's, cuDNN's and, if installed, PyTorch's attention."""
    inputs = get_op("attention").make_inputs(problem, 0, "normal")
    arrays, weights = inputs.arrays[:3], inputs.weights[0]

    def against(implementation: str) -> dict[str, Any]:
        attend: Any = jax.nn.dot_product_attention
        both: Sequence[Callable[..., Any]] = [
            functools.partial(attend, is_causal=problem.causal, implementation=implementation),
            functools.partial(attention, is_causal=problem.causal),
        ]
        if problem.mode == "fwd_bwd":
            both = [value_and_gradients(one, weights) for one in both]
        times = side_by_side(both, arrays, rounds)
        ratio, low, high = measure.paired_ratio(times[:, 0], times[:, 1])
        theirs_ms, ours_ms = map(float, np.median(times, axis=0))
        return {"their_ms": theirs_ms, "our_ms": ours_ms, "ratio": [ratio, low, high]}

    yield "chosen", lambda: default.explain_problem(problem).candidate.key
    for name in ("xla", "cudnn"):
        yield name, functools.partial(against, name)
    if importlib.util.find_spec("torch") is not None:
        yield "torch_flash", lambda: _torch_flash(problem, rounds)


def _recurrence_rivals(problem: Problem, rounds: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The kernels, the chunks and the scan, each with its untuned config."""
    op, device = get_op("linear_attention"), current_device()
    inputs = op.make_inputs(problem, 0, "normal")
    given = measure.arguments(problem, inputs)
    chosen = default.explain_problem(problem).candidate

    def against(name: str) -> dict[str, Any]:
        rival = Candidate(name, op.implementation(name).default_config(problem, device))
        both = [measure.program(op, problem, one, inputs) for one in (rival, chosen)]
        times = side_by_side(both, given, rounds)
        theirs_ms, ours_ms = map(float, np.median(times, axis=0))
        ratio = measure.paired_ratio(times[:, 0], times[:, 1])
        return {"their_ms": theirs_ms, "our_ms": ours_ms, "ratio": list(ratio)}

    yield "chosen", lambda: chosen.key
    for name in ("pallas", "chunked", "scan"):
        yield name, functools.partial(against, name)


def _torch_flash(problem: Problem, rounds: int) -> dict[str, Any]:
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
    return {"their_ms": float(np.median([timed(inner) for _ in range(rounds)]))}


#: The parts in order, each with its share of the time; what one leaves is the next ones'.
_PARTS: dict[str, tuple[float, Callable[[Sizes, float], Any]]] = {
    "tests": (0.35, tests),
    "tuning": (0.25, lambda sizes, seconds: tuning(sizes.attention, sizes, seconds)),
    "recurrence_tuning": (0.12, lambda sizes, seconds: tuning(sizes.recurrence, sizes, seconds)),
    "timings": (0.18, lambda sizes, seconds: timings(sizes.attention, sizes, seconds)),
    "recurrence_timings": (0.1, lambda sizes, seconds: timings(sizes.recurrence, sizes, seconds)),
}


def check(sizes: Sizes, output: Path, seconds: float) -> dict[str, Any]:
    """Runs all parts, and writes what each found as soon as it has."""
    report: dict[str, Any] = machine()
    ended = time.monotonic() + seconds
    left = sum(share for share, _ in _PARTS.values())
    for name, (share, part) in _PARTS.items():
        started = time.monotonic()
        print(f"{name} …", flush=True)
        try:
            report[name] = part(sizes, max(1.0, (ended - started) * share / left))
        except Exception:  # the other parts are worth having
            report[name] = {"error": traceback.format_exc()[-3000:]}
        left -= share
        report[f"{name}_s"] = round(time.monotonic() - started, 1)
        output.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main(output: Path, seconds: float) -> int:
    """The full check; 0 if the tests passed."""
    if jax.default_backend() != "gpu":
        print("make gpu-check needs an NVIDIA GPU that jax can use; jax sees none", file=sys.stderr)
        return 1
    report = check(Sizes(), output, seconds)
    print({name: value for name, value in report.items() if name.endswith("_s")})
    return 0 if report["tests"].get("passed") else 1


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m shapetune.bench.gpu_check OUTPUT.json [SECONDS]")
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) == 3 else 420.0))
