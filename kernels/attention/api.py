"""``shapetune.attention``: the arguments of ``jax.nn.dot_product_attention``, checked
once per shape and handed to the dispatcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cache.errors import ProblemError
from ...cache.key import Value
from .. import default
from ..arguments import as_arrays, check_config, typed
from ..op import get_op
from .problem import NAMES, problem_of


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str = "default",
    config: Mapping[str, Value] | None = None,
    return_residual: bool = False,
) -> Any:
    r"""Scaled dot-product attention by the fastest kernel known for the shape.

    Computes :math:`\mathrm{softmax}(Q K^T \cdot scale + B) V` for each head, as
    ``jax.nn.dot_product_attention`` does (https://arxiv.org/abs/1706.03762), with
    scores and softmax in float32. B is the batch size, T and S the query and key
    positions, N the query heads, K the key heads (N a multiple of K), H the size
    of a query head and Hv that of a value head.

    Args:
        query: ``[B, T, N, H]`` or ``[T, N, H]``; float32, bfloat16 or float16.
        key: ``[B, S, K, H]`` or ``[S, K, H]``, of the same dtype.
        value: ``[B, S, K, Hv]`` or ``[S, K, Hv]``, of the same dtype.
        bias: Added to the scores; each axis 1 or full of ``[B, N, T, S]``.
        mask: Boolean, True where a key is seen; each axis 1 or full of ``[B, N, T, S]``.
        scale: Factor on the scores; 1/√H if None.
        is_causal: Query t sees keys up to t.
        query_seq_lengths: int32 ``[B]``; rows from there on are zeros.
        key_value_seq_lengths: int32 ``[B]``; keys from there on are not seen.
        local_window_size: ``(left, right)`` positions seen beside the own one;
            an integer stands for both sides.
        implementation: ``"default"`` for the tuned choice, or a name.
        config: The parameters of a named implementation; what it leaves out
            takes the implementation's default.
        return_residual: Also return the log-sum-exp of the scores, ``[B, T, N]``
            or ``[T, N]``, in the query's dtype. No gradient passes through it.

    Returns:
        ``[B, T, N, Hv]`` or ``[T, N, Hv]``, of the query's dtype. A row that may
        see no key at all is zeros (``jax.nn`` gives the mean of all values).

    Raises:
        ProblemError: An argument has a wrong shape, dtype or value.
        UnknownNameError: No such implementation.
        UnsupportedError: The named implementation cannot do this call.
        ConfigError: The config is not in the implementation's space.
    """
    memo = default.state().memo
    try:
        static = (
            query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
            scale, is_causal, is_causal.__class__, implementation, return_residual,
            None if local_window_size is None else typed(local_window_size),
            None if config is None else typed(tuple(config.items())),
            None if bias is None else (bias.shape, bias.dtype),
            None if mask is None else (mask.shape, mask.dtype),
            None if query_seq_lengths is None else (query_seq_lengths.shape, query_seq_lengths.dtype),
            None
            if key_value_seq_lengths is None
            else (key_value_seq_lengths.shape, key_value_seq_lengths.dtype),
            jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        )  # fmt: skip
        served = memo.get(static)
    except (AttributeError, TypeError):  # an array that is a list, a scale that is traced…
        served = static = None
    arrays = (query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths)
    if served is None:
        arrays = as_arrays(NAMES, arrays)
        scale, arrays = as_number(scale, arrays)
        served = _prepare(
            arrays, scale, is_causal, local_window_size, implementation, config, return_residual
        )
        if static is not None:
            memo[static] = served
    return served(*arrays)


def as_number(scale: Any, arrays: tuple[Any, ...]) -> tuple[float | None, tuple[Any, ...]]:
    """The scale as a number; one that is traced goes into the query instead.

    Raises:
        ProblemError: It is not one finite number.
    """
    if scale is None:
        return None, arrays
    if np.ndim(scale):
        raise ProblemError(f"scale must be one number, got shape {list(np.shape(scale))}")
    if isinstance(scale, jax.core.Tracer):
        query = arrays[0]
        return 1.0, ((query.astype(jnp.float32) * scale).astype(query.dtype), *arrays[1:])
    try:
        number = math.nan if isinstance(scale, str) else float(scale)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ProblemError(f"scale must be a finite number, or None for 1/√H, got {scale!r:.60}")
    return number, arrays


def _prepare(
    arrays: tuple[Any, ...],
    scale: float | None,
    is_causal: Any,
    window: Any,
    implementation: str,
    config: Mapping[str, Value] | None,
    residual: bool,
) -> Callable[..., Any]:
    """The function of the arrays that serves calls of this shape."""
    window = _checked_window(window)
    if not isinstance(is_causal, bool | np.bool_):
        raise ProblemError(f"is_causal must be True or False, got {is_causal!r}")
    check_config(config)
    ranks = {name: a.ndim for name, a in zip(NAMES[:3], arrays, strict=False)}
    if set(ranks.values()) not in ({3}, {4}):
        raise ProblemError(
            f"query, key and value must all be [B, T, N, H] or all [T, N, H]; "
            f"their numbers of axes are {ranks}"
        )
    shapes = jax.eval_shape(_with_four_axes, arrays)
    problem = problem_of(shapes, is_causal=bool(is_causal), window=window, residual=bool(residual))
    static = {"scale": scale} if scale is not None else {}
    chosen = default.prepare(get_op("attention"), problem, implementation, config, static)
    unbatched = arrays[0].ndim == 3

    def attend(*arrays: Any) -> Any:
        result = chosen(*_with_four_axes(arrays))
        return jax.tree.map(lambda a: a[0], result) if unbatched else result

    return default.serve(attend, chosen)


def _with_four_axes(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays with the leading axes that [T, N, H] calls leave out."""

    def grow(array: Any) -> Any:
        if array is None or array.ndim >= 4:
            return array
        return array.reshape((1,) * (4 - array.ndim) + array.shape)

    return (*map(grow, arrays[:5]), *arrays[5:])


def _checked_window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    sides = (window, window) if isinstance(window, int | np.integer) else window
    if (
        isinstance(sides, tuple | list)
        and len(sides) == 2
        and all(isinstance(side, int | np.integer) and side >= 0 for side in sides)
    ):
        return int(sides[0]), int(sides[1])
    raise ProblemError(
        f"local_window_size must be an integer or (left, right), both at least 0, got {window!r}"
    )
