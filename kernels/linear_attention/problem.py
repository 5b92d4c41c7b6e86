"""The problems of the op `linear_attention`: made from a call, and made into inputs.

One function makes the problem, for tuning and for dispatch alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cache.errors import ProblemError
from ...cache.key import DTYPES, Problem
from ..op import Expected, Inputs
from . import reference
from .features import FEATURE_MAPS

#: The arrays of a call, in the order that implementations take them.
NAMES = ("query", "key", "value", "initial_state")


def problem_of(
    arrays: Sequence[Any], *, window_size: int, feature_map: str, mode: str = "fwd"
) -> Problem:
    """The problem of a call with these arrays, or of their shapes and dtypes.

    Raises:
        ProblemError: A shape, dtype or argument does not fit.
    """
    query, key, value, initial_state = arrays
    _check_arrays(query, key, value)
    batch, seq, heads, dim = query.shape
    value_dim = value.shape[3]
    words = []
    if initial_state is not None:
        wanted = (batch, heads, 2 * dim, value_dim)
        if initial_state.shape != wanted or str(initial_state.dtype) != "float32":
            raise ProblemError(
                f"initial_state must be float32{list(wanted)} ([B, N, 2H, Hv]), "
                f"got {initial_state.dtype}{list(initial_state.shape)}"
            )
        words.append("state")
    if isinstance(window_size, bool) or not isinstance(window_size, int | np.integer):
        raise ProblemError(f"window_size must be an integer, got {window_size!r}")
    if window_size < -1:
        raise ProblemError(
            f"window_size must be -1 (the own position is seen) or larger, got {window_size}"
        )
    if feature_map not in FEATURE_MAPS:
        raise ProblemError(f"feature_map must be one of {FEATURE_MAPS}, got {feature_map!r}")
    if feature_map == "relu":
        words.append("relu")
    return Problem.make(
        "linear_attention",
        seq=seq,
        dim=dim,
        value_dim=value_dim,
        dtype=str(query.dtype),
        causal=True,
        # Every window that hides all keys is the same problem.
        window=int(min(window_size, seq - 1)),
        batch=batch,
        heads=heads,
        kv_heads=key.shape[2],
        mode=mode,
        features=tuple(words),
    )


def _check_arrays(query: Any, key: Any, value: Any) -> None:
    for name, array in zip(NAMES, (query, key, value), strict=False):
        if array.ndim != 4 or 0 in array.shape:
            raise ProblemError(
                f"{name} must be [B, T, heads, H] with no empty axis, got shape {list(array.shape)}"
            )
        if str(array.dtype) not in DTYPES:
            raise ProblemError(
                f"{name} has dtype {array.dtype}, which is not supported; "
                f"cast query, key and value to one of {', '.join(DTYPES)}"
            )
        if array.dtype != query.dtype:
            raise ProblemError(
                f"{name} has dtype {array.dtype} but query has {query.dtype}; cast them alike"
            )
    batch, seq, heads, dim = query.shape
    if key.shape[:2] != (batch, seq) or key.shape[3] != dim:
        raise ProblemError(
            f"key has shape {list(key.shape)}; to go with query {list(query.shape)} "
            f"it must be [{batch}, {seq}, K, {dim}]"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ProblemError(
            f"value has shape {list(value.shape)}; to go with key {list(key.shape)} "
            f"it must be {[*key.shape[:3], 'Hv']}"
        )
    if heads % key.shape[2]:
        raise ProblemError(
            f"query has {heads} heads, which is not a multiple of key's {key.shape[2]}"
        )


def canonical(problem: Problem) -> Problem:
    """The problem as a call makes it: causal, with one window that hides no more than all.

    Raises:
        ProblemError: kv_seq differs from seq, or the window has two sides.
    """
    if problem.kv_seq != problem.seq:
        raise ProblemError(
            f"kv_seq must equal seq in linear_attention, got {problem.kv_seq} and {problem.seq}"
        )
    unknown = set(problem.features) - {"relu", "state"}
    if unknown:
        raise ProblemError(
            f"features holds {sorted(unknown)}, which linear_attention does not know; "
            "it knows relu and state"
        )
    return problem.replace(causal=True, window=min(window_of(problem), problem.seq - 1))


def window_of(problem: Problem) -> int:
    """The window that the recurrence leaves out; -1, nothing, where none is given.

    Raises:
        ProblemError: The window has two sides, which this op does not know.
    """
    if isinstance(problem.window, tuple):
        raise ProblemError(
            f"window={problem.window} has two sides; linear_attention takes one integer"
        )
    return -1 if problem.window is None else problem.window


def kind_of(problem: Problem) -> str:
    """The feature map of a problem."""
    return "relu" if "relu" in problem.features else "softmax"


def static_arguments(problem: Problem) -> dict[str, Any]:
    """The static keyword arguments of a call of this problem."""
    return {"window_size": window_of(problem), "feature_map": kind_of(problem)}


def flops(problem: Problem) -> float:
    """Floating-point operations of the recurrence, which no chunk size changes.

    Per token and head, an update and a reading of the state [2H, Hv], two
    operations for each element; four more such products backward.
    """
    state = 2.0 * problem.dim * problem.value_dim
    seen = max(problem.seq - window_of(problem) - 1, 0)
    forward = 2 * state * problem.batch * problem.heads * (problem.seq + seen)
    return forward if problem.mode == "fwd" else 3 * forward


def traffic(problem: Problem) -> float:
    """Bytes that must move: the inputs once, the outputs once (and so their gradients)."""
    item = jnp.dtype(problem.dtype).itemsize
    rows = problem.batch * problem.seq
    arrays = item * rows * (problem.heads + problem.kv_heads) * (problem.dim + problem.value_dim)
    states = 2 if "state" in problem.features else 1
    states *= 4 * problem.batch * problem.heads * 2 * problem.dim * problem.value_dim
    return float((arrays + states) * (1 if problem.mode == "fwd" else 2))


def shapes(problem: Problem) -> Inputs:
    """What a call of this problem takes, as shapes and dtypes in place of arrays."""
    p = problem
    state = jax.ShapeDtypeStruct((p.batch, p.heads, 2 * p.dim, p.value_dim), jnp.float32)

    def rows(heads: int, dim: int, dtype: Any = p.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((p.batch, p.seq, heads, dim), jnp.dtype(dtype))

    given = state if "state" in p.features else None
    keys = rows(p.kv_heads, p.dim), rows(p.kv_heads, p.value_dim)
    arrays = (rows(p.heads, p.dim), *keys, given)
    weights = (rows(p.heads, p.value_dim, "float32"), state)
    differentiable = tuple(i for i in range(4) if arrays[i] is not None)
    return Inputs(arrays, NAMES, differentiable, weights)


def make_inputs(problem: Problem, seed: int = 0, kind: str = "normal") -> Inputs:
    """Random inputs for a problem.

    Args:
        problem: The problem.
        seed: Of the random numbers; equal seeds give equal arrays.
        kind: ``"normal"``, or a harder one of ``HARD_INPUTS``.

    Raises:
        ProblemError: ``kind`` is unknown.
    """
    if kind not in ("normal", *HARD_INPUTS):
        raise ProblemError(f"kind={kind!r} is not one of normal, {', '.join(HARD_INPUTS)}")
    rng = np.random.default_rng(seed)
    wanted = shapes(problem)

    def normal(one: Any) -> np.ndarray:
        return rng.standard_normal(one.shape, dtype=np.float32)

    query, key, value = map(normal, wanted.arrays[:3])
    state = None if wanted.arrays[3] is None else jnp.asarray(normal(wanted.arrays[3]))
    if kind != "normal":
        HARD_INPUTS[kind](query, key, value)
    dtype = jnp.dtype(problem.dtype)
    arrays = (*(jnp.asarray(a.astype(dtype)) for a in (query, key, value)), state)
    weights = tuple(jnp.asarray(normal(one)) for one in wanted.weights)
    return dataclasses.replace(wanted, arrays=arrays, weights=weights)


def _large_logits(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Feature maps near one-hot: a softmax without its maximum taken off overflows."""
    query *= 30.0
    key *= 30.0


def _constant_rows(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """All keys alike: the state has rank one and grows with every token."""
    key[:] = key[:, :1]


def _heavy_tail(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """The last positions decide the result: a ragged tail left out or read twice shows."""
    tail = max(1, key.shape[1] % 16)
    value[:, -tail:] *= 16.0


HARD_INPUTS = {
    "large_logits": _large_logits,
    "constant_rows": _constant_rows,
    "heavy_tail": _heavy_tail,
}


def expect(problem: Problem, inputs: Inputs, slices: int) -> list[Expected]:
    """What a few (batch row, key head) groups must give, in float64.

    Args:
        problem: The problem; in mode fwd_bwd the gradients are included.
        inputs: Its inputs.
        slices: How many groups, spread over batch and heads.
    """
    inputs = inputs.on_host()
    groups = problem.batch * problem.kv_heads
    picked = np.unique(np.linspace(0, groups - 1, max(1, min(slices, groups))).astype(int))
    found = []
    for flat in picked:
        found += _expected_group(problem, inputs, *divmod(int(flat), problem.kv_heads))
    return found


def _expected_group(problem: Problem, inputs: Inputs, row: int, head: int) -> list[Expected]:
    queries = slice(head * problem.group, (head + 1) * problem.group)
    query, key, value, state = inputs.arrays

    def plain(array: Any) -> np.ndarray:
        return np.asarray(array).astype(np.float64)

    weights = None
    if problem.mode == "fwd_bwd":
        weights = (
            plain(inputs.weights[0][row, :, queries]),
            plain(inputs.weights[1][row, queries]),
        )
    result = reference.group(
        plain(query[row, :, queries]),
        plain(key[row, :, head]),
        plain(value[row, :, head]),
        None if state is None else plain(state[row, queries]),
        window_size=window_of(problem),
        kind=kind_of(problem),
        weights=weights,
    )
    every = slice(None)
    found = [
        Expected("output", (row, every, queries), result.output),
        Expected("final_state", (row, queries), result.final_state),
    ]
    if weights is not None:
        found += [
            Expected("grad_query", (row, every, queries), result.grad_query),
            Expected("grad_key", (row, every, head), result.grad_key),
            Expected("grad_value", (row, every, head), result.grad_value),
        ]
        if state is not None:
            grad = result.grad_initial_state
            found.append(Expected("grad_initial_state", (row, queries), grad))
    return found
