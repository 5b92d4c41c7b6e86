"""Attention in plain JAX, which can be differentiated any number of times.

Kernels that are called by name cannot be, nor loops of a length known only when they run:
where a gradient is itself differentiated, this stands in for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_HIGHEST = lax.Precision.HIGHEST


def seen_keys(
    query: Array, key: Array, left: int | None, right: int | None, q_lengths: Any, kv_lengths: Any
) -> tuple[Array, Array]:
    """Of the keys that each query sees the first and the end, int32 [B, T]."""
    batch, rows, columns = query.shape[0], query.shape[1], key.shape[1]
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    low = jnp.zeros_like(row) if left is None else jnp.maximum(row - left, 0)
    high = jnp.full_like(row, columns)
    if right is not None:
        high = jnp.minimum(high, row + right + 1)
    if kv_lengths is not None:
        high = jnp.minimum(high, kv_lengths[:, None])
    if q_lengths is not None:
        high = jnp.where(row < q_lengths[:, None], high, 0)
    return jnp.broadcast_to(low, (batch, rows)), jnp.broadcast_to(high, (batch, rows))


def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    seen: tuple[Array, Array],
    scale: float,
) -> tuple[Array, Array]:
    """Attention, [B, T, N, Hv], and the log-sum-exp of the scores, float32 [B, N, T].

    Queries that share a head of keys are taken together, one such group after the other: of
    the scores no more than a group's are in memory, also in gradients. Sums are float32.

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        bias: Added to the scores, each axis 1 or full of [B, N, T, S], or None.
        mask: Boolean, True where a key is seen, shaped as the bias, or None.
        seen: What ``seen_keys`` gives.
        scale: Factor of the scores.
    """
    batch, rows, heads, _ = query.shape
    columns, kv_heads = key.shape[1:3]
    group = heads // kv_heads
    at = jnp.arange(columns)

    def of_group(extra: Array, n: Array) -> Array:
        """The group's part of a bias or a mask, each axis 1 or full of [G, T, S]."""
        row = lax.dynamic_index_in_dim(extra, jnp.minimum(n // kv_heads, len(extra) - 1), 0, False)
        if len(row) == 1:
            return row
        return lax.dynamic_slice_in_dim(row, n % kv_heads * group, group)

    @jax.checkpoint
    def one(n: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        scores = scale * jnp.einsum("gtd,sd->gts", q, k, precision=_HIGHEST)
        low, high = (end[n // kv_heads][:, None] for end in seen)
        visible = jnp.broadcast_to((at >= low) & (at < high), scores.shape)
        if bias is not None:
            scores = scores + of_group(bias, n).astype(jnp.float32)
            visible &= scores > -jnp.inf
        if mask is not None:
            visible &= of_group(mask, n)
        # Twice where: of what is not seen comes neither a value nor a gradient.
        scores = jnp.where(visible, scores, 0.0)
        largest = lax.stop_gradient(jnp.where(visible, scores, -jnp.inf).max(-1, initial=-1e30))
        p = jnp.where(visible, jnp.exp(scores - largest[..., None]), 0.0)
        total = p.sum(-1)
        some = total > 0
        total = jnp.where(some, total, 1.0)
        out = jnp.einsum("gts,sd->gtd", p, v, precision=_HIGHEST) / total[..., None]
        return out, jnp.where(some, jnp.log(total) + largest, -jnp.inf)

    def by_head(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(batch * kv_heads, columns, -1)

    queries = query.reshape(batch, rows, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(batch * kv_heads, group, rows, -1)
    each = (jnp.arange(batch * kv_heads), queries, by_head(key), by_head(value))
    out, lse = lax.map(lambda given: one(*given), each)
    out = out.reshape(batch, heads, rows, -1).swapaxes(1, 2)
    return out.astype(query.dtype), lse.reshape(batch, heads, rows)


def gradients_of_gradients(
    function: Callable[..., Any], arrays: tuple[Any, ...], saved: Any, grads_out: Any, grads: Any
) -> tuple[tuple[Any, ...], Any, Any]:
    """Gradients of arrays, saved outputs and their gradients, given those of the gradients.

    ``function(*arrays)`` gives what was saved, ``grads_out`` are its gradients, and
    ``grads`` those of the gradients that arose. What was saved follows from the arrays,
    by which it is differentiated here; its own are zero.
    """

    def first(arrays: tuple[Any, ...], grads_out: Any) -> Any:
        return jax.vjp(function, *arrays)[1](grads_out)

    _, back = jax.vjp(first, arrays, grads_out)
    of_arrays, of_grads = back(grads)
    return of_arrays, jax.tree.map(jnp.zeros_like, saved), of_grads
