"""What the compile check compiles: a seeded draw from the spaces, the defaults, the rows of a card.

Every part is a list of tasks, the same on each run, so that a run goes on where the
last one stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..autotune.targets import Target, target
from ..cache.key import Candidate, Device, Problem
from ..kernels import get_op
from ..kernels.op import Space
from .compile_programs import FLEX, LAYER, compile_one, compile_without_spills

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
TARGETS = ("rtx3090", "a100", "h100")
#: Candidates drawn for each target, and refused ones.
DRAWN, REFUSED = 200, 10
_DTYPES = ("bfloat16", "float16", "float32")
_DIMS = (32, 64, 128, 256)
_MODES = ("fwd", "fwd_bwd")
#: How often an implementation is drawn; the fused kernels have the large spaces.
_WEIGHTS = {
    "attention": {"pallas_mha": 5, "pallas_flex": 3, "blockwise": 1, "xla": 1, "mosaic": 1},
    "linear_attention": {"pallas": 5, "pallas_scanbwd": 1, "chunked": 1},
}
_WORDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "attention": ((), (), (), ("bias[ts]",), ("mask[bts]",), ("kv_lengths", "q_lengths"), ("residual",)),
    "linear_attention": ((), ("state",), ("state",), ("relu",)),
}  # fmt: skip
_NO_LIMIT = 2**30


@dataclasses.dataclass(frozen=True)
class Check:
    """One task of the compile check.

    Attributes:
        part: Name of the part that it belongs to.
        target: What to compile for.
        problem: The problem.
        candidate: The candidate.
        work: Compiles it.
        file: Figures of a real card to hold the outcome against.
    """

    part: str
    target: Target
    problem: Problem
    candidate: Candidate
    work: Callable[..., Any] = compile_one
    file: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the others of its part."""
        return self.target.key, self.problem.label, self.candidate.key


def plan(only: str = "") -> list[Check]:
    """Every task, or those of the parts whose names begin with ``only``."""
    found: list[Check] = []
    for name, part in PARTS.items():
        if name.startswith(only):
            tasks = [dataclasses.replace(one, part=name) for one in part()]
            # In turns, so that a run that was stopped has something of every target.
            of = {key: [one for one in tasks if one.target.key == key] for key in TARGETS}
            found += (one for turn in itertools.zip_longest(*of.values()) for one in turn if one)
    return found


def _drawn(op: str) -> Iterator[Check]:
    count = DRAWN if op == "attention" else DRAWN // 4
    for key in TARGETS:
        yield from _distinct(functools.partial(_draw, op, target(key), "drawn"), count)


def _refused(op: str) -> Iterator[Check]:
    """Configs that a space leaves out, and would not if shared memory had no limit."""
    for key in TARGETS:
        yield from _distinct(functools.partial(_draw, op, target(key), "refused"), REFUSED)


def _distinct(draw: Callable[[int], Check | None], count: int) -> Iterator[Check]:
    seen: dict[Any, Check] = {}
    for index in itertools.count():
        if len(seen) == count:
            break
        one = draw(index)
        if one is not None:
            seen.setdefault(one.key, one)
    yield from seen.values()


def _draw(op: str, card: Target, kind: str, index: int) -> Check | None:
    """A problem, an implementation and a config, from a seed of their own.

    So a change of a space changes no more of the draw than it has to.
    """
    rng = random.Random(f"{kind} {op} {card.key} {index}")
    problem = _draw_problem(op, rng)
    name = _draw_name(problem, card.device, rng)
    implementation, device = get_op(op).implementation(name), card.device
    if kind == "refused":
        device = dataclasses.replace(device, shared_memory=_NO_LIMIT)
    config = _draw_config(implementation.space(problem, device), rng)
    space = implementation.space(problem, card.device)
    if kind == "refused" and space.refusal(config) is None:
        return None
    return Check("", card, problem, Candidate(name, config))


def _draw_problem(op: str, rng: random.Random) -> Problem:
    heads = rng.choice((8, 8, 4))
    fields: dict[str, Any] = {
        "dim": rng.choice(_DIMS),
        "dtype": rng.choice(_DTYPES),
        "mode": rng.choice(_MODES),
        "batch": rng.choice((1, 4)),
        "heads": heads,
        "kv_heads": rng.choice((heads, heads, 2)),
        "features": rng.choice(_WORDS[op]),
    }
    if op == "linear_attention":
        seq = rng.choice((65, 512, 600, 2048))
        return Problem.make(op, seq=seq, window=rng.choice((-1, 64)), causal=True, **fields)
    seq = rng.choice((33, 128, 600, 1024, 1500, 2048))
    kv_seq = rng.choice((seq, seq, seq, 777))
    window = rng.choice((None, None, None, (200, 0), (64, 64)))
    causal = rng.random() < 0.5
    problem = Problem.make(op, seq=seq, kv_seq=kv_seq, causal=causal, window=window, **fields)
    return get_op(op).canonical(problem)


def _draw_name(problem: Problem, device: Device, rng: random.Random) -> str:
    op, weights = get_op(problem.op), _WEIGHTS[problem.op]
    able = {
        n: w for n, w in weights.items() if op.implementation(n).supports(problem, device) is None
    }
    return rng.choices(list(able), list(able.values()))[0]  # fmt: skip


def _draw_config(space: Space, rng: random.Random) -> dict[str, Any]:
    """A config of a space, each as likely; the space may be too large to list."""
    while True:
        config = {name: rng.choice(choices) for name, choices in space.choices.items()}
        if space.refusal(config) is None:
            return config


def _default(problem: Problem, name: str, card: Target) -> Candidate:
    one = get_op(problem.op).implementation(name)
    return Candidate(name, one.default_config(problem, card.device))


def _spills(**extra: Any) -> Iterator[Check]:
    """The defaults of the fused kernels: plain, causal and windowed, both modes."""
    for key in TARGETS:
        for problem in _base_problems(**extra):
            for name in ("pallas_mha", "pallas_flex"):
                card = target(key)
                if get_op("attention").implementation(name).supports(problem, card.device) is None:
                    candidate = _default(problem, name, card)
                    yield Check("", card, problem, candidate, compile_without_spills)


def _base_problems(
    words: tuple[tuple[str, ...], ...] = ((),), modes: tuple[str, ...] = _MODES, batch: int = 4
) -> Iterator[Problem]:
    rules: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": True, "window": (256, 0)})
    for features in words:
        for dim in (64, 128):
            for dtype in _DTYPES:
                for mode in modes:
                    for rule in rules if not features else rules[:2]:
                        yield Problem.make(
                            "attention", seq=2048, dim=dim, dtype=dtype, batch=batch, mode=mode,
                            features=features, **rule,
                        )  # fmt: skip


def _flex_spills() -> Iterator[Check]:
    for key in TARGETS:
        for dim in (64, 128):
            for dtype in _DTYPES:
                for word in FLEX:
                    problem = Problem.make(
                        "attention", seq=2048, dim=dim, dtype=dtype, batch=4, mode="fwd_bwd",
                        features=(word,),
                    )  # fmt: skip
                    plain = problem.replace(features=())
                    candidate = _default(plain, "pallas_flex", target(key))
                    yield Check("", target(key), problem, candidate, compile_without_spills)


def _attention_rows() -> Iterator[Check]:
    """Every row of the RTX 3090's file that has a figure for temporary memory."""
    ours = {"probjax_mha": "pallas_mha", "probjax_flex": "pallas_flex", "jax_xla": "xla"}
    card = target("rtx3090")
    for row in json.loads((DATA / "rtx3090_attention.json").read_text())["results"]:
        if row["impl"] not in ours or row.get("xla_temp_mb") is None:
            continue
        problem = Problem.make(
            "attention", seq=row["seq"], dim=row["head_dim"], dtype=row["dtype"],
            causal=row["causal"], mode=row["mode"], batch=row["batch"], heads=row["heads"],
        )  # fmt: skip
        candidate = _default(problem, ours[row["impl"]], card)
        yield Check("", card, problem, candidate, file={"temp_mb": row["xla_temp_mb"]})


def _linear_problem(row: Mapping[str, Any]) -> Problem:
    return Problem.make(
        "linear_attention", seq=row["seq"], dim=row["dim"], dtype=row["dtype"], causal=True,
        window=row.get("window", 64), batch=row["batch"], heads=row["heads"], mode=row["mode"],
        features=("layer",) if row["suite"] == "layer" else ("state",),
    )  # fmt: skip


def _linear_rows() -> Iterator[Check]:
    """Rows of the suite "kernel" for chunked and pallas; D = 128 has no figure for pallas."""
    card = target("rtx3090")
    for row in _linear_file("kernel"):
        if row["impl"] not in ("chunked", "pallas"):
            continue
        problem = _linear_problem(row)
        candidate = _default(problem, row["impl"], card)
        yield Check("", card, problem, candidate, file={"temp_mb": row["xla_temp_mb"]})
        if row["dim"] == 128:
            yield Check("", card, problem, _default(problem, "pallas", card))


def _linear_peak() -> Iterator[Check]:
    """The rows of the suites "peak" and "layer" at their longest, which ran out of memory."""
    card, longest = target("rtx3090"), {"peak": 131072, "layer": 8192}
    for row in _linear_file("peak"):
        if row["seq"] == longest["peak"] and row["impl"] in ("chunked", "pallas"):
            problem = _linear_problem(row)
            yield Check(
                "", card, problem, _default(problem, row["impl"], card), file={"all_mb": 20480}
            )
    for row in _linear_file("layer"):
        if row["seq"] == longest["layer"] and row["impl"] == "chunked":
            yield Check("", card, _linear_problem(row), LAYER, file={"temp_mb": 1536})


def _linear_file(suite: str) -> list[Any]:
    rows = json.loads((DATA / "rtx3090_linear_attention.json").read_text())["results"]
    return [row for row in rows if row["suite"] == suite]


def _linear_spills() -> Iterator[Check]:
    for key in TARGETS:
        for dim in _DIMS[:3]:
            for dtype in _DTYPES:
                for mode in _MODES:
                    problem = Problem.make(
                        "linear_attention", seq=2048, dim=dim, dtype=dtype, batch=2, heads=4,
                        causal=True, window=64, mode=mode, features=("state",),
                    )  # fmt: skip
                    candidate = _default(problem, "pallas", target(key))
                    yield Check("", target(key), problem, candidate, compile_without_spills)


#: The parts by name, in the order that they are compiled.
PARTS: dict[str, Callable[[], Iterator[Check]]] = {
    "attention-spills": _spills,
    "attention-candidates": functools.partial(_drawn, "attention"),
    "attention-refused": functools.partial(_refused, "attention"),
    "attention-memory": _attention_rows,
    "attention-spills-bias-mask": functools.partial(
        _spills, words=(("bias[ts]",), ("mask[ts]",)), modes=("fwd_bwd",)
    ),
    "attention-spills-flex": _flex_spills,
    "linear-peak": _linear_peak,
    "linear-memory": _linear_rows,
    "linear-candidates": functools.partial(_drawn, "linear_attention"),
    "linear-refused": functools.partial(_refused, "linear_attention"),
    "linear-spills": _linear_spills,
}
