"""Gradients of gradients of attention, for kernels that cannot be differentiated again.

Kernels that are called by name cannot be, nor loops of a length known only when they run:
``xla`` stands in for them, a head of keys with its queries at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .xla import xla


def gradients_of_gradients(
    arrays: tuple[Array, Array, Array, Array | None],
    grad_out: Array,
    grads: tuple[Any, ...],
    seen: tuple[Array | None, Array | None, Array | None],
    scale: float,
    ends: tuple[int | None, int | None],
) -> tuple[tuple[Any, ...], Array]:
    """Gradients of the arrays and of the output's gradient, given those of the gradients.

    Args:
        arrays: Query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], and bias or None.
        grad_out: The output's gradient, [B, T, N, Hv].
        grads: The gradients of the gradients of ``arrays``.
        seen: The mask, and the lengths of queries and of keys; each may be None.
        scale: Factor of the scores.
        ends: How far to the left and to the right a query sees; None for all.
    """

    def plain(query: Array, key: Array, value: Array, bias: Array | None) -> Array:
        return _by_head(query, key, value, bias, *seen, scale=scale, ends=ends)

    def first(arrays: tuple[Any, ...], grad_out: Array) -> Any:
        return jax.vjp(plain, *arrays)[1](grad_out)

    of_arrays, of_grad_out = jax.vjp(first, arrays, grad_out)[1](grads)
    return of_arrays, of_grad_out


def _by_head(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    q_lengths: Array | None,
    kv_lengths: Array | None,
    *,
    scale: float,
    ends: tuple[int | None, int | None],
) -> Array:
    """Attention by ``xla``; of the scores no more than a head of keys' are in memory."""
    batch, rows, heads, _ = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    far = rows + key.shape[1]
    left, right = (far if end is None else end for end in ends)

    def part(array: Array | None, at: Array, axis: int, size: int) -> Any:
        """``size`` of an axis from ``at`` on, or all of it where it is 1 for all alike."""
        if array is None or array.shape[axis] == 1:
            return array
        return lax.dynamic_slice_in_dim(array, at, size, axis)

    @jax.checkpoint
    def one(n: Array) -> Array:
        row, head = n // kv_heads, n % kv_heads
        q, k, v, b, m, q_length, kv_length = (
            part(array, row, 0, 1)
            for array in (query, key, value, bias, mask, q_lengths, kv_lengths)
        )
        b, m = (part(array, head * group, 1, group) for array in (b, m))
        return xla(
            part(q, head * group, 2, group), part(k, head, 2, 1), part(v, head, 2, 1),
            b, m, q_length, kv_length, scale=scale, is_causal=False,
            local_window_size=None if ends == (None, None) else (left, right), config={},
        )  # fmt: skip

    out = lax.map(one, jnp.arange(batch * kv_heads))
    return (
        out.reshape(batch, kv_heads, rows, group, -1).swapaxes(1, 2).reshape(batch, rows, heads, -1)
    )
