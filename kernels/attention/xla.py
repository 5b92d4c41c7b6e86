"""`xla`: attention by ``jax.nn.dot_product_attention``, the plain implementation.

It holds all scores at once, so its memory grows with seq × kv_seq.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...cache.key import Config, Device, Problem
from ..op import Implementation
from .masks import finite_bias, zero_blind_rows

Array = jax.Array


def xla(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None,
    return_residual: bool = False,
    config: Config,
) -> Any:
    """Attention with all scores in memory. Shapes as in ``shapetune.attention``."""
    value_dim = value.shape[-1]
    width = max(query.shape[-1], value_dim)
    attend = functools.partial(
        jax.nn.dot_product_attention,
        bias=finite_bias(bias),
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation="xla",
        return_residual=return_residual,
    )
    widened = [_widen(array, width) for array in (query, key, value)]
    if query.dtype == jnp.float16:
        # XLA's CPU backend refuses the float16 product that jax.nn asks for.
        result = jax.lax.platform_dependent(*widened, cpu=_in_float32(attend), default=attend)
    else:
        result = attend(*widened)
    result = jax.tree.map(lambda r: r[..., :value_dim] if r.ndim == 4 else r, result)
    return zero_blind_rows(
        result, query, key, bias, mask, query_seq_lengths, key_value_seq_lengths,
        is_causal, local_window_size,
    )  # fmt: skip


def _in_float32(attend: Callable[..., Any]) -> Callable[..., Any]:
    """The call with its arrays in float32, its results back in their dtype."""

    def wide(*arrays: Array) -> Any:
        result = attend(*(array.astype(jnp.float32) for array in arrays))
        return jax.tree.map(lambda r: r.astype(arrays[0].dtype), result)

    return wide


def _widen(array: Array, width: int) -> Array:
    """Pads the last axis with zeros, which change no score and no sum."""
    missing = width - array.shape[-1]
    return jnp.pad(array, ((0, 0),) * 3 + ((0, missing),)) if missing else array


def scores_bytes(problem: Problem) -> float:
    """Temporary memory for the scores: float32, twice or more under gradients."""
    copies = 2 if problem.mode == "fwd" else 3
    return 4.0 * copies * problem.batch * problem.heads * problem.seq * problem.kv_seq


def _supports(problem: Problem, device: Device) -> str | None:
    needed = scores_bytes(problem)
    if device.memory and needed > 0.8 * device.memory:
        return (
            f"its scores need about {needed / 2**30:.0f} GiB, "
            f"the device has {device.memory / 2**30:.0f}"
        )
    return None


IMPLEMENTATION = Implementation(name="xla", function=xla, version=1, supports=_supports)
