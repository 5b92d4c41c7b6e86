"""Backward pass of blockwise attention: scores are computed again, block by block.

FlashAttention-2, algorithm 2 (Dao 2023, https://arxiv.org/abs/2307.08691), in
one pass: the outer loop runs over blocks of keys, whose gradients stay in the
inner loop's carry while the gradient of the queries is added to in memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ._blockwise_forward import NEVER, masked, scaled_queries
from ._blockwise_tiles import (
    Index,
    Layout,
    add_extra,
    loop,
    matmul,
    put_bthd,
    row_lengths,
    take_bthd,
    unravel,
)

Grads = tuple[Array, Array, Array, Array | None]


def backward(
    layout: Layout,
    scale: float,
    compute: Any,
    arrays: tuple[Any, ...],
    saved: tuple[Array, Array],
    grad_out: Array,
) -> Grads:
    """Gradients of query, key, value and bias (None without one), in their dtypes.

    ``saved`` is what ``forward`` returned; ``grad_out`` is [B, T, N, Hv].
    """
    query, key, value, bias, *_ = arrays
    out, lse = saved
    delta = jnp.einsum(
        "btnd,btnd->bnt", out.astype(jnp.float32), grad_out.astype(jnp.float32)
    )
    # exp(score - inf) is 0: a row that saw no key gets no gradient.
    lse = jnp.where(lse == NEVER, jnp.inf, lse)
    sizes = (layout.batch, layout.kv_heads // layout.tile_kv_heads, layout.columns.count)

    def body(step: Index, grads: Grads) -> Grads:
        batch, unit, column_block = unravel(step, *sizes)
        kv_head = unit * layout.tile_kv_heads
        block = _KeyBlock(layout, scale, compute, arrays, lse, delta, grad_out)
        return block.add(grads, batch, kv_head, column_block)

    start = (
        jnp.zeros(query.shape, jnp.float32),
        jnp.zeros_like(key),
        jnp.zeros_like(value),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    dq, dk, dv, dbias = loop(sizes[0] * sizes[1] * sizes[2], body, start)
    if dbias is not None:
        dbias = dbias.astype(bias.dtype)
    return (dq * scale).astype(query.dtype), dk, dv, dbias


class _KeyBlock:
    """The gradients that one block of keys contributes."""

    def __init__(
        self,
        layout: Layout,
        scale: float,
        compute: Any,
        arrays: tuple[Any, ...],
        lse: Array,
        delta: Array,
        grad_out: Array,
    ) -> None:
        self.layout, self.scale, self.compute = layout, scale, compute
        self.query, self.key, self.value, self.bias, self.mask = arrays[:5]
        self.q_lengths, self.kv_lengths = arrays[5:]
        self.lse, self.delta, self.grad_out = lse, delta, grad_out

    def add(self, grads: Grads, batch: Index, kv_head: Index, column_block: Index) -> Grads:
        """``grads`` with those of a block of keys and its queries added."""
        layout = self.layout
        dq, dk, dv, dbias = grads
        kv_length = row_lengths(self.kv_lengths, batch)
        q_length = row_lengths(self.q_lengths, batch)
        start = (batch, kv_head, layout.columns.start(column_block))
        size = (layout.tile_kv_heads, layout.columns.block)
        k = take_bthd(self.key, start, (*size, self.key.shape[-1])).astype(self.compute)
        v = take_bthd(self.value, start, (*size, self.value.shape[-1])).astype(self.compute)
        seen_by = layout.rows_seeing(column_block, q_length, kv_length)
        subgroups = layout.group // layout.tile_group

        def step(head: Index, row_block: Index, carry: Any, partial: bool) -> Any:
            seen = layout.visible(row_block, column_block, kv_length) if partial else None
            return self._tile(carry, k, v, (batch, head), row_block, column_block, seen)

        def full(n: Index, carry: Any) -> Any:
            sub, n = _split(n, subgroups, seen_by.full)
            head = kv_head * layout.group + sub * layout.tile_group
            return step(head, seen_by.full_begin + n, carry, False)

        def partly(n: Index, carry: Any) -> Any:
            sub, n = _split(n, subgroups, seen_by.partial)
            head = kv_head * layout.group + sub * layout.tile_group
            return step(head, seen_by.nth_partial(n), carry, True)

        zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
        carry = (dq, *zeros, dbias)
        carry = loop(seen_by.full * subgroups, full, carry)
        carry = loop(seen_by.partial * subgroups, partly, carry)
        dq, dk_block, dv_block, dbias = carry
        if layout.columns.ragged:
            # The positions that the last block repeats have their gradients already.
            dk_block += take_bthd(dk, start, k.shape).astype(jnp.float32)
            dv_block += take_bthd(dv, start, v.shape).astype(jnp.float32)
        return dq, put_bthd(dk, dk_block, start), put_bthd(dv, dv_block, start), dbias

    def _tile(
        self,
        carry: Any,
        k: Array,
        v: Array,
        place: tuple[Index, Index],
        row_block: Index,
        column_block: Index,
        seen: Array | None,
    ) -> Any:
        """The gradients of one tile added to the carry (dq, dk, dv of the block, dbias)."""
        layout, compute = self.layout, self.compute
        dq, dk, dv, dbias = carry
        batch, head = place
        row, column = layout.rows.start(row_block), layout.columns.start(column_block)
        heads, block_q = layout.tile_heads, layout.rows.block
        tile_shape = (heads, block_q, layout.columns.block)
        flat = (layout.tile_kv_heads, layout.tile_group * block_q)
        start, size = (batch, head, row), (heads, block_q)

        q, after = scaled_queries(self.query, start, (*size, self.query.shape[-1]), self.scale, compute)
        q = q.reshape(*flat, -1)
        do = take_bthd(self.grad_out, start, (*size, v.shape[-1])).astype(compute).reshape(*flat, -1)
        lse = lax.dynamic_slice(self.lse, start, (1, *size)).reshape(size)
        delta = lax.dynamic_slice(self.delta, start, (1, *size)).reshape(flat)
        if layout.rows.ragged:
            fresh = row + jnp.arange(block_q) >= layout.rows.fresh(row_block)
            lse = jnp.where(fresh, lse, jnp.inf)

        scores = matmul(q, k, (2, 2)) * after
        scores = masked(scores, tile_shape, (batch, head, row, column), self.bias, self.mask, seen)
        weights = jnp.exp(scores - lse.reshape(*flat, 1))
        dv = dv + matmul(weights.astype(compute), do, (1, 1))
        slopes = weights * (matmul(do, v, (2, 2)) - delta[..., None])
        if dbias is not None:
            dbias = add_extra(dbias, slopes.reshape(tile_shape), (batch, head, row, column))
        slopes = slopes.astype(compute)
        dk = dk + matmul(slopes, q, (1, 1)) * after
        dq_tile = take_bthd(dq, start, (*size, k.shape[-1])).reshape(*flat, -1)
        dq_tile = dq_tile + matmul(slopes, k, (2, 1))
        return put_bthd(dq, dq_tile.reshape(*size, -1), start), dk, dv, dbias


def _split(n: Index, subgroups: int, count: Index) -> tuple[Index, Index]:
    """Which subgroup of heads, and which of ``count`` blocks, step n is."""
    return (0, n) if subgroups == 1 else (n // count, n % count)
