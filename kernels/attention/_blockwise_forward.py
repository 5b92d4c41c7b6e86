"""Forward pass of blockwise attention: online softmax over blocks of keys.

FlashAttention-2, algorithm 1 (Dao 2023, https://arxiv.org/abs/2307.08691):
the running sum is divided out once per block of queries, not at every step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ._blockwise_tiles import (
    Index,
    Layout,
    loop,
    matmul,
    put_bthd,
    row_lengths,
    take_bthd,
    take_extra,
    unravel,
)

NEVER = float("-inf")


def forward(layout: Layout, scale: float, compute: Any, arrays: tuple[Any, ...]) -> tuple[Array, Array]:
    """Output [B, T, N, Hv] in the dtype of the query, and log-sum-exp [B, N, T], float32.

    ``arrays`` are query, key, value, bias, mask, query and key lengths.
    """
    query, key, value, *_ = arrays
    units = layout.heads // layout.tile_heads
    sizes = (layout.batch, units, layout.rows.count)

    def body(step: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = carry
        batch, unit, row_block = unravel(step, *sizes)
        head = unit * layout.tile_heads
        tile, tile_lse = _query_block(layout, scale, compute, arrays, batch, head, row_block)
        row = layout.rows.start(row_block)
        out = put_bthd(out, tile, (batch, head, row))
        lse = lax.dynamic_update_slice(lse, tile_lse[None], (batch, head, row))
        return out, lse

    shape = (layout.batch, layout.rows.size, layout.heads)
    start = (
        jnp.zeros((*shape, value.shape[-1]), query.dtype),
        jnp.zeros((shape[0], shape[2], shape[1]), jnp.float32),
    )
    return loop(sizes[0] * sizes[1] * sizes[2], body, start)


def _query_block(
    layout: Layout,
    scale: float,
    compute: Any,
    arrays: tuple[Any, ...],
    batch: Index,
    head: Index,
    row_block: Index,
) -> tuple[Array, Array]:
    """Output [heads, block_q, Hv] and log-sum-exp [heads, block_q] of a block of queries."""
    query, key, value, bias, mask, q_lengths, kv_lengths = arrays
    heads, kv_heads, rows = layout.tile_heads, layout.tile_kv_heads, layout.tile_group
    block_q, block_k = layout.rows.block, layout.columns.block
    row = layout.rows.start(row_block)
    kv_head = head // layout.group
    kv_length = row_lengths(kv_lengths, batch)

    q, after = scaled_queries(query, (batch, head, row), (heads, block_q, query.shape[-1]), scale, compute)
    q = q.reshape(*layout.stack, rows * block_q, -1)
    tile_shape = (heads, block_q, block_k)

    def step(column_block: Index, carry: tuple[Array, ...], partial: bool) -> tuple[Array, ...]:
        top, total, acc = carry
        column = layout.columns.start(column_block)
        k = take_bthd(key, (batch, kv_head, column), (kv_heads, block_k, key.shape[-1]))
        k = k.reshape(*layout.stack, block_k, -1).astype(compute)
        v = take_bthd(value, (batch, kv_head, column), (kv_heads, block_k, value.shape[-1]))
        v = v.reshape(*layout.stack, block_k, -1).astype(compute)
        scores = matmul(q, k, (1, 1)) * after
        seen = layout.visible(row_block, column_block, kv_length) if partial else None
        scores = masked(scores, tile_shape, (batch, head, row, column), bias, mask, seen)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        # A row that has seen nothing yet keeps -inf, which must not meet another -inf.
        base = jnp.where(new_top == NEVER, 0.0, new_top)
        weights = jnp.exp(scores - base[..., None])
        fade = jnp.exp(top - base)
        total = total * fade + jnp.sum(weights, axis=-1)
        acc = acc * fade[..., None] + matmul(weights.astype(compute), v, (1, 0))
        return new_top, total, acc

    ranges = layout.columns_seen(row_block, kv_length)
    carry = (
        jnp.full(q.shape[:-1], NEVER, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros((*q.shape[:-1], value.shape[-1]), jnp.float32),
    )
    carry = loop(ranges.full, lambda n, c: step(ranges.full_begin + n, c, False), carry)
    carry = loop(ranges.partial, lambda n, c: step(ranges.nth_partial(n), c, True), carry)
    top, total, acc = carry
    empty = total == 0.0
    out = acc * jnp.where(empty, 0.0, 1.0 / total)[..., None]
    lse = jnp.where(empty, NEVER, top + jnp.log(total))
    out, lse = out.reshape(heads, block_q, -1), lse.reshape(heads, block_q)
    if q_lengths is not None:
        inside = row + jnp.arange(block_q) < row_lengths(q_lengths, batch)
        out = jnp.where(inside[None, :, None], out, 0.0)
        lse = jnp.where(inside, lse, NEVER)
    return out, lse


def scaled_queries(
    query: Array, start: tuple[Index, ...], size: tuple[int, int, int], scale: float, compute: Any
) -> tuple[Array, float]:
    """A tile of queries in the compute dtype, and the factor that scores still need.

    In float32 the queries take the scale, which saves a pass over the scores;
    in 16 bits that would round them.
    """
    tile = take_bthd(query, start, size)
    if compute == jnp.float32:
        return tile.astype(jnp.float32) * scale, 1.0
    return tile.astype(compute), scale


def masked(
    scores: Array,
    tile_shape: tuple[int, int, int],
    start: tuple[Index, ...],
    bias: Array | None,
    mask: Array | None,
    seen: Array | None,
) -> Array:
    """Scores with the bias added, and -inf wherever a key is not to be seen."""
    if bias is None and mask is None and seen is None:
        return scores
    shape = scores.shape
    scores = scores.reshape(tile_shape)
    if bias is not None:
        scores = scores + take_extra(bias, start, tile_shape).astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(take_extra(mask, start, tile_shape), scores, NEVER)
    if seen is not None:
        scores = jnp.where(seen, scores, NEVER)
    return scores.reshape(shape)
