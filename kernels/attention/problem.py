"""The problems of the op `attention`: made from a call, and made into inputs.

One function makes the problem, for tuning and for dispatch alike.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cache.errors import ProblemError
from ...cache.key import DTYPES, Problem
from ..device import matmul_precision
from ..op import Inputs

#: The arrays of a call, in the order that implementations take them.
NAMES = (
    "query",
    "key",
    "value",
    "bias",
    "mask",
    "query_seq_lengths",
    "key_value_seq_lengths",
)
_AXES = "bnts"
_WORD = re.compile(r"(bias|mask)\[b?n?t?s?\]|q_lengths|kv_lengths|residual|precision\[[a-z0-9_]+\]")


def canonical_window(
    window: int | tuple[int, int] | None, seq: int, kv_seq: int, causal: bool
) -> tuple[int, int] | None:
    """A window as (left, right), None where it hides nothing; causal calls see nothing right."""
    if window is None:
        return None
    left, right = (window, window) if isinstance(window, int) else window
    if causal:
        right = 0
    left, right = min(left, max(seq - 1, 0)), min(right, max(kv_seq - 1, 0))
    hides = left < seq - 1 or (not causal and right < kv_seq - 1)
    return (left, right) if hides else None


def canonical(problem: Problem) -> Problem:
    """The problem as a call makes it: a window that hides nothing is none.

    Raises:
        ProblemError: The window is not (left, right).
    """
    window = problem.window
    if isinstance(window, int):
        if window < 0:
            raise ProblemError(f"window must be at least 0, got {window}")
        window = (window, window)
    for word in problem.features:
        if not _WORD.fullmatch(word):
            raise ProblemError(
                f"features holds {word!r}, which attention does not know; it knows bias[axes] and "
                "mask[axes] with axes of bnts, q_lengths, kv_lengths, residual, precision[name]"
            )
    found = canonical_window(window, problem.seq, problem.kv_seq, problem.causal)
    return problem.replace(window=found)


def problem_of(
    arrays: tuple[Any, ...],
    *,
    is_causal: bool,
    window: tuple[int, int] | None,
    residual: bool = False,
    mode: str = "fwd",
) -> Problem:
    """The problem of a call with these 4-D arrays, or of their shapes and dtypes.

    Raises:
        ProblemError: A shape or dtype does not fit the others.
    """
    query, key, value, bias, mask, query_lengths, key_value_lengths = arrays
    _check_arrays(query, key, value)
    batch, seq, heads, dim = query.shape
    kv_seq, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    words = []
    full = (batch, heads, seq, kv_seq)
    if bias is not None:
        words.append(f"bias[{_varies('bias', bias, full)}]")
    if mask is not None:
        if mask.dtype != np.dtype(bool):
            raise ProblemError(
                f"mask must be boolean, got {mask.dtype}; pass an additive mask as bias"
            )
        words.append(f"mask[{_varies('mask', mask, full)}]")
    for name, word, lengths in (
        ("query_seq_lengths", "q_lengths", query_lengths),
        ("key_value_seq_lengths", "kv_lengths", key_value_lengths),
    ):
        if lengths is not None:
            if lengths.shape != (batch,) or lengths.dtype != np.dtype("int32"):
                raise ProblemError(
                    f"{name} must be int32 of shape [{batch}], "
                    f"got {lengths.dtype}{list(lengths.shape)}"
                )
            words.append(word)
    if residual:
        words.append("residual")
    precision = matmul_precision()
    if precision is not None:
        words.append(f"precision[{precision}]")
    return Problem(
        op="attention",
        seq=seq,
        kv_seq=kv_seq,
        dim=dim,
        value_dim=value_dim,
        dtype=str(query.dtype),
        causal=is_causal,
        window=canonical_window(window, seq, kv_seq, is_causal),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        mode=mode,
        features=tuple(sorted(words)),
    )


def _check_arrays(query: Any, key: Any, value: Any) -> None:
    if str(query.dtype) not in DTYPES:
        raise ProblemError(
            f"query has dtype {query.dtype}, which is not supported; "
            f"cast query, key and value to one of {', '.join(DTYPES)}"
        )
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            raise ProblemError(
                f"{name} has dtype {array.dtype} but query has {query.dtype}; cast them alike"
            )
    batch, _, heads, dim = query.shape
    if key.shape[0] != batch or key.shape[3] != dim:
        raise ProblemError(
            f"key has shape {list(key.shape)}; to go with query {list(query.shape)} "
            f"it must be [{batch}, S, K, {dim}]"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ProblemError(
            f"value has shape {list(value.shape)}; to go with key {list(key.shape)} "
            f"it must be {[*key.shape[:3], 'Hv']}"
        )
    for name, array in (("query", query), ("key", key), ("value", value)):
        if 0 in array.shape:
            raise ProblemError(f"{name} has shape {list(array.shape)}: no axis may be empty")
    if heads % key.shape[2]:
        raise ProblemError(
            f"query has {heads} heads, which is not a multiple of key's {key.shape[2]}"
        )


def _varies(name: str, array: Any, full: tuple[int, ...]) -> str:
    """The axes along which an array is not broadcast, as letters."""
    fits = len(array.shape) == 4 and all(
        have in (1, want) for have, want in zip(array.shape, full, strict=True)
    )
    if not fits:
        raise ProblemError(
            f"{name} has shape {list(array.shape)}; each axis must be 1 or that of "
            f"[B, N, T, S] = {list(full)}"
        )
    return "".join(axis for axis, have in zip(_AXES, array.shape, strict=True) if have > 1)


def feature_axes(problem: Problem, name: str) -> str | None:
    """The axes of the word ``name[axes]`` among the features, or None if absent."""
    for word in problem.features:
        if word.startswith(name + "["):
            return word[len(name) + 1 : -1]
    return None


def static_arguments(problem: Problem) -> dict[str, Any]:
    """The static keyword arguments of a call of this problem, at the default scale."""
    return {
        "scale": 1.0 / math.sqrt(problem.dim),
        "is_causal": problem.causal,
        "local_window_size": problem.window,
        "return_residual": "residual" in problem.features,
    }


def visible_pairs(problem: Problem) -> int:
    """Pairs of a query and a key that the causal rule and the window leave, per head."""
    if problem.window is None and not problem.causal:
        return problem.seq * problem.kv_seq
    rows = np.arange(problem.seq, dtype=np.int64)
    window = problem.window if isinstance(problem.window, tuple) else None
    left, right = window or (problem.seq, problem.kv_seq)
    first = np.maximum(rows - left, 0)
    last = np.minimum(rows + (0 if problem.causal else right), problem.kv_seq - 1)
    return int(np.maximum(last - first + 1, 0).sum())


def flops(problem: Problem) -> float:
    """Floating-point operations: two products of the visible pairs, five more backward.

    Counts of the FlashAttention-2 paper (https://arxiv.org/abs/2307.08691), section 4.1.
    """
    pairs = float(problem.batch * problem.heads * visible_pairs(problem))
    forward = 2 * pairs * (problem.dim + problem.value_dim)
    if problem.mode == "fwd":
        return forward
    return forward + 2 * pairs * (3 * problem.dim + 2 * problem.value_dim)


def traffic(problem: Problem) -> float:
    """Bytes that must move: the inputs once, the outputs once (and so their gradients)."""
    item = jnp.dtype(problem.dtype).itemsize
    query = problem.batch * problem.seq * problem.heads
    keys = problem.batch * problem.kv_seq * problem.kv_heads
    once = item * (query + keys) * (problem.dim + problem.value_dim)
    return float(once if problem.mode == "fwd" else 2 * once)


def shapes(problem: Problem) -> Inputs:
    """What a call of this problem takes, as shapes and dtypes in place of arrays."""
    p = problem
    dtype = jnp.dtype(p.dtype)
    full = (p.batch, p.heads, p.seq, p.kv_seq)

    def shaped(*shape: int, of: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, of)

    arrays: list[Any] = [
        shaped(p.batch, p.seq, p.heads, p.dim),
        shaped(p.batch, p.kv_seq, p.kv_heads, p.dim),
        shaped(p.batch, p.kv_seq, p.kv_heads, p.value_dim),
    ]
    for name, of in (("bias", dtype), ("mask", jnp.dtype(bool))):
        axes = feature_axes(p, name)
        sizes = [n if axis in (axes or "") else 1 for axis, n in zip(_AXES, full, strict=True)]
        arrays.append(None if axes is None else shaped(*sizes, of=of))
    for word in ("q_lengths", "kv_lengths"):
        arrays.append(shaped(p.batch, of=jnp.int32) if word in p.features else None)
    weights = [shaped(p.batch, p.seq, p.heads, p.value_dim, of=jnp.float32)]
    if "residual" in p.features:
        weights.append(shaped(p.batch, p.seq, p.heads, of=jnp.float32))
    differentiable = tuple(i for i in range(4) if arrays[i] is not None)
    return Inputs(tuple(arrays), NAMES, differentiable, tuple(weights))


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

    def normal(shape: Any) -> np.ndarray:
        return rng.standard_normal(shape.shape, dtype=np.float32)

    tensors = [normal(one) for one in wanted.arrays[:3]]
    if kind != "normal":
        HARD_INPUTS[kind](*tensors)
    drawn: list[Any] = [*tensors]
    for name, one in zip(NAMES[3:], wanted.arrays[3:], strict=True):
        if one is None:
            drawn.append(None)
        elif name.endswith("lengths"):
            size = problem.seq if name.startswith("query") else problem.kv_seq
            drawn.append(rng.integers((size + 1) // 2, size + 1, one.shape))
        else:
            drawn.append(normal(one) > -1.5 if name == "mask" else normal(one))
    arrays = [
        None if array is None else jnp.asarray(array.astype(one.dtype))
        for array, one in zip(drawn, wanted.arrays, strict=True)
    ]
    weights = [jnp.asarray(normal(wanted.weights[0]))]
    # No gradient passes through the residual, so it takes no part in the loss.
    weights += [jnp.asarray(np.zeros(one.shape, one.dtype)) for one in wanted.weights[1:]]
    return Inputs(tuple(arrays), NAMES, wanted.differentiable, tuple(weights))


def _large_logits(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """Scores in the hundreds: a softmax without its maximum taken off overflows."""
    query *= 20.0


def _similar_keys(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """All keys nearly alike: weights near 1/S, and gradients that cancel to an eighth."""
    key[:] = key[:, :1] + key / 8


def _heavy_tail(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    """The last positions decide the result: a ragged tail left out or read twice shows."""
    tail = max(1, key.shape[1] % 16)
    key[:, -tail:] *= 4.0
    value[:, -tail:] *= 16.0


HARD_INPUTS = {
    "large_logits": _large_logits,
    "similar_keys": _similar_keys,
    "heavy_tail": _heavy_tail,
}
