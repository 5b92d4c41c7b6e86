"""The suites: which rows a benchmark has, and the problem behind each.

`attention` is one grid; `linear-attention` has the suites `kernel` (the recurrence),
`layer` (the RAttention layer around it) and `peak` (memory alone).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..cache.errors import ShapetuneError
from ..cache.key import Problem
from ..kernels import get_op
from ..kernels.rattention import RAttentionConfig
from .schema import Row, identity, suite_of

LINEAR_SUITES = ("kernel", "layer", "peak")
#: Implementations that are not shapetune's own, by op.
PEERS = {
    "attention": ("jax_xla", "jax_cudnn", "torch_flash", "torch_efficient", "torch_math"),
    "linear_attention": (),
}

#: Before the name of an implementation: its fastest config in the tuning of the point, but for
#: the one that was chosen.
RIVAL = "rival_"

#: The grids of the files that these suites are made after.
_GRIDS: dict[str, dict[str, Any]] = {
    "attention": {
        "seq": (128, 512, 600, 1024, 1500, 2048, 3000, 4096, 8192), "dim": (64, 128),
        "dtype": ("bfloat16", "float32"), "mode": ("fwd", "fwd_bwd"), "causal": (False, True),
        "batch": 4, "heads": 8,
    },
    "kernel": {
        "seq": (512, 2048, 8192), "dim": (32, 64, 128), "dtype": ("float32", "bfloat16"),
        "mode": ("fwd", "fwd_bwd"), "batch": 2, "heads": 4, "window": 64, "chunk": 128,
    },
    "layer": {
        "seq": (512, 2048, 8192), "dim": (64,), "dtype": ("float32",), "mode": ("fwd", "fwd_bwd"),
        "batch": 2, "heads": 8, "window": 128, "chunk": 128,
    },
    "peak": {
        "seq": (2048, 8192, 32768, 65536, 131072), "dim": (64,), "dtype": ("float32",),
        "mode": ("fwd", "fwd_bwd"), "batch": 4, "heads": 8, "window": 64, "chunk": 128,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows of a benchmark.

    Attributes:
        op: Name of the op.
        rows: What identifies each row, in order.
        config: The grid, as the file keeps it.
    """

    op: str
    rows: list[Row]
    config: dict[str, Any]

    def points(self) -> Iterator[list[Row]]:
        """The rows grouped by what they share but for the implementation."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            groups.setdefault(identity({**row, "impl": ""}), []).append(row)
        yield from groups.values()


def is_rival(row: Mapping[str, Any]) -> bool:
    """Whether a row is of what tuning found beside its choice."""
    return str(row["impl"]).startswith(RIVAL)


def implementations(op: str) -> list[str]:
    """The implementations that a benchmark of an op may have rows of, tuned or not."""
    own = get_op(op).implementations
    return ["default", *own, *PEERS[op], *(RIVAL + name for name in own)]


def usual(op: str) -> list[str]:
    """Those that it has rows of unless told otherwise: PyTorch's where it is installed."""
    left_out = [RIVAL]
    if importlib.util.find_spec("torch") is None:
        left_out.append("torch_")
    return [n for n in implementations(op) if not n.startswith(tuple(left_out))]


def plan(
    op: str,
    suites: Sequence[str] = (),
    *,
    impls: Sequence[str] = (),
    tag: str | None = None,
    grid: Mapping[str, Any] | None = None,
) -> Plan:
    """The rows of a benchmark.

    Args:
        op: ``"attention"`` or ``"linear_attention"``.
        suites: Of ``LINEAR_SUITES``, for linear attention; all of them if empty.
        impls: Names of implementations; all usual ones if empty.
        tag: A word that tells these rows from others of the same point.
        grid: Overrides of the suites' grids: seq, dim, dtype, mode, causal as
            sequences, batch, heads, window, chunk as numbers; None changes nothing.

    Raises:
        ShapetuneError: A suite or an implementation is not known.
    """
    if op not in PEERS:
        raise ShapetuneError(f"there is no benchmark of {op!r}; there are: {', '.join(PEERS)}")
    if op == "attention" and suites:
        raise ShapetuneError(f"suite={','.join(suites)} is of linear-attention; attention has one")
    for name in suites:
        if name not in LINEAR_SUITES:
            raise ShapetuneError(f"suite {name!r} is not one of {', '.join(LINEAR_SUITES)}")
    chosen = list(impls) or usual(op)
    for name in chosen:
        if name not in implementations(op):
            raise ShapetuneError(f"impl {name!r} is not one of {', '.join(implementations(op))}")
    foreign = ("window", "chunk") if op == "attention" else ("causal",)
    for name in foreign:
        if (grid or {}).get(name) is not None:
            raise ShapetuneError(
                f"{name} is not an axis of the benchmark of {op}; leave --{name} out"
            )
    changes = {name: value for name, value in (grid or {}).items() if value is not None}
    wanted = ("attention",) if op == "attention" else tuple(suites) or LINEAR_SUITES
    grids = {suite: {**_GRIDS[suite], **changes} for suite in wanted}
    rows = [row for suite in wanted for row in _rows(suite, grids[suite], chosen, tag)]
    shared = {"op": op, "impls": chosen, "tag": tag}
    if op == "attention":
        config = {**shared, **_listed(grids["attention"])}
    else:
        config = {**shared, "suites": list(wanted), "grids": {s: _listed(grids[s]) for s in wanted}}
        config |= {"window": grids[wanted[0]]["window"], "chunk": grids[wanted[0]]["chunk"]}
    for row in rows:
        problem_of(row, config)  # a field out of range is said before anything runs
    return Plan(op, rows, config)


def _listed(grid: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in grid.items()}


def _rows(
    suite: str, grid: Mapping[str, Any], impls: Sequence[str], tag: str | None
) -> Iterator[Row]:
    size = "head_dim" if suite == "attention" else "dim"
    axes = (grid["mode"], grid["dtype"], grid["dim"], grid.get("causal", (True,)), grid["seq"])
    for mode, dtype, dim, causal, seq in itertools.product(*axes):
        fixed: Row = {"dtype": dtype, size: dim, "seq": seq}
        if suite == "attention":
            fixed |= {"causal": causal}
        fixed |= {"mode": mode, "batch": grid["batch"], "heads": grid["heads"]}
        if suite == "attention" or tag is not None:
            fixed |= {"tag": tag}
        if suite != "attention":
            fixed |= {"suite": suite, "chunk": grid["chunk"], "window": grid["window"]}
        for impl in impls:
            yield {"impl": impl, **fixed}


def window_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """The window of a row: its own, or the one that its file gives for all."""
    found = row.get("window", config.get("window"))
    return None if found is None else int(found)


def problem_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> Problem:
    """The problem that a row is about; of a layer, that of its recurrence.

    Raises:
        ProblemError: A field is out of range.
    """
    suite = suite_of(row)
    op = "attention" if suite == "attention" else "linear_attention"
    own: dict[str, Any] = {"causal": row.get("causal", True)}
    if op == "linear_attention":
        # The recurrence of the layer starts from nothing; the suites give it a state.
        own |= {
            "window": window_of(row, config),
            "features": () if suite == "layer" else ("state",),
        }
    problem = Problem.make(
        op, seq=row["seq"], dim=row["head_dim" if suite == "attention" else "dim"],
        dtype=row["dtype"], batch=row["batch"], heads=row["heads"], mode=row["mode"], **own,
    )  # fmt: skip
    return get_op(op).canonical(problem)


def tunable(row: Mapping[str, Any], config: Mapping[str, Any]) -> list[Problem]:
    """The problems whose tuning decides what `default` does at a row's point."""
    problem = problem_of(row, config)
    if suite_of(row) != "layer":
        return [problem]
    local = problem.replace(op="attention", window=(window_of(row, config) or 0, 0))
    return [problem, get_op("attention").canonical(local)]


def layer_of(row: Mapping[str, Any]) -> RAttentionConfig:
    """The layer of a row of suite ``layer``: as wide as its heads together."""
    return RAttentionConfig(
        width=row["heads"] * row["dim"], heads=row["heads"], head_dim=row["dim"],
        window=row["window"],
    )  # fmt: skip
