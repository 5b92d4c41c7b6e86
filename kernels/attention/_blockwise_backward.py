"""Backward pass of blockwise attention: scores are computed again, block by block.

FlashAttention-2, algorithm 2 (Dao 2023, https://arxiv.org/abs/2307.08691), in
one pass: the outer loop runs over blocks of keys, whose gradients stay in the
inner loop's carry while the gradient of the queries is added to in memory.
Tiles have keys as rows, so that no product has a transposed left operand,
which takes XLA twice as long on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ._blockwise_forward import NEVER, Exp, scaled_queries
from ._blockwise_tiles import (
    Index,
    Layout,
    add_extra,
    loop,
    matmul,
    put_bthd,
    row_lengths,
    take_bthd,
    take_extra,
    unravel,
)
from ._key_centre import is_centred, key_centre

Grads = tuple[Array, Array, Array, Array | None]


def backward(
    layout: Layout,
    scale: float,
    compute: Any,
    exp: Exp,
    arrays: tuple[Any, ...],
    saved: tuple[Array, Array],
    grad_out: Array,
) -> Grads:
    """Gradients of query, key, value and bias (None without one), in their dtypes.

    ``saved`` is what ``forward`` returned, and ``grad_out`` the output's gradient.
    """
    query, key, value, bias, *_ = arrays
    out, lse = saved
    delta = jnp.einsum("btnd,btnd->bnt", out.astype(jnp.float32), grad_out.astype(jnp.float32))
    # exp(score - inf) is 0: a row that saw no key gets no gradient.
    lse = jnp.where(lse == NEVER, jnp.inf, lse)
    centre = key_centre(key) if is_centred(key.dtype) else None
    block = _KeyBlock(layout, scale, compute, exp, arrays, lse, delta, grad_out, centre)
    sizes = (layout.batch, layout.kv_heads // layout.tile_kv_heads, layout.columns.count)

    def body(step: Index, grads: Grads) -> Grads:
        batch, unit, column_block = unravel(step, *sizes)
        return block.add(grads, batch, unit * layout.tile_kv_heads, column_block)

    batch, rows, heads, dim = query.shape
    start = (
        jnp.zeros((batch, heads, dim, rows), jnp.float32),
        jnp.zeros_like(key),
        jnp.zeros_like(value),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    dq, dk, dv, dbias = loop(sizes[0] * sizes[1] * sizes[2], body, start, arrays)
    dq = (dq * scale).astype(query.dtype).transpose(0, 3, 1, 2)
    return dq, dk, dv, None if dbias is None else dbias.astype(bias.dtype)


@dataclasses.dataclass(frozen=True)
class _KeyBlock:
    """The gradients that one block of keys contributes.

    ``lse`` and ``delta`` are [B, N, T]; the gradient of the queries is kept as
    [B, N, H, T], the way its product comes out. ``centre`` is taken from its keys.
    """

    layout: Layout
    scale: float
    compute: Any
    exp: Exp
    arrays: tuple[Any, ...]
    lse: Array
    delta: Array
    grad_out: Array
    centre: Array | None

    def add(self, grads: Grads, batch: Index, kv_head: Index, column_block: Index) -> Grads:
        """``grads`` with those of a block of keys and its queries added."""
        layout = self.layout
        dq, dk, dv, dbias = grads
        key, value, *_, q_lengths, kv_lengths = self.arrays[1:]
        kv_length, q_length = row_lengths(kv_lengths, batch), row_lengths(q_lengths, batch)
        start = (batch, kv_head, layout.columns.start(column_block))
        size = (layout.tile_kv_heads, layout.columns.block)
        flat = (*layout.stack, layout.columns.block)
        taken = take_bthd(key, start, (*size, key.shape[-1])).reshape(*flat, -1)
        k = taken.astype(self.compute)
        v = (
            take_bthd(value, start, (*size, value.shape[-1]))
            .reshape(*flat, -1)
            .astype(self.compute)
        )
        kt = jnp.swapaxes(self._centred(taken, batch, kv_head).astype(self.compute), -1, -2)
        seen_by = layout.rows_seeing(column_block, q_length, kv_length)
        subgroups = layout.group // layout.tile_group

        def step(n: Index, carry: Any, partial: bool) -> Any:
            count = seen_by.partial if partial else seen_by.full
            sub, n = (0, n) if subgroups == 1 else (n // count, n % count)
            head = kv_head * layout.group + sub * layout.tile_group
            row_block = seen_by.nth_partial(n) if partial else seen_by.full_begin + n
            seen = None
            if partial:
                row = layout.rows.start(row_block)
                seen = layout.visible(row, layout.rows.block, column_block, kv_length)
            return self._tile(carry, (k, kt, v), (batch, head), row_block, column_block, seen)

        zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
        carry = (dq, *zeros, dbias)
        carry = loop(seen_by.full * subgroups, lambda n, c: step(n, c, False), carry, key)
        carry = loop(seen_by.partial * subgroups, lambda n, c: step(n, c, True), carry)
        dq, dk_block, dv_block, dbias = carry
        dk_block, dv_block = (x.reshape(*size, -1) for x in (dk_block, dv_block))
        if layout.columns.ragged:
            # The positions that the last block repeats have their gradients already.
            dk_block += take_bthd(dk, start, dk_block.shape).astype(jnp.float32)
            dv_block += take_bthd(dv, start, dv_block.shape).astype(jnp.float32)
        return dq, put_bthd(dk, dk_block, start), put_bthd(dv, dv_block, start), dbias

    def _centred(self, keys: Array, batch: Index, kv_head: Index) -> Array:
        """The keys of some heads without what all keys of a head share."""
        if self.centre is None:
            return keys
        size = (self.layout.tile_kv_heads, 1, keys.shape[-1])
        shared = take_bthd(self.centre, (batch, kv_head, 0), size)
        return keys.astype(jnp.float32) - shared.reshape(*self.layout.stack, 1, -1)

    def _tile(
        self,
        carry: Any,
        keys: tuple[Array, Array, Array],
        place: tuple[Index, Index],
        row_block: Index,
        column_block: Index,
        seen: Array | None,
    ) -> Any:
        """The gradients of one tile added to the carry (dq, dk, dv of the block, dbias)."""
        layout, compute = self.layout, self.compute
        query, _, _, bias, mask, *_ = self.arrays
        dq, dk, dv, dbias = carry
        k, kt, v = keys
        start = (*place, layout.rows.start(row_block))
        corner = (*start, layout.columns.start(column_block))
        heads, block_q = layout.tile_heads, layout.rows.block
        flat = (*layout.stack, layout.tile_group * block_q)

        q, after = scaled_queries(
            query, start, (heads, block_q, query.shape[-1]), self.scale, compute
        )
        q = q.reshape(*flat, -1)
        do = take_bthd(self.grad_out, start, (heads, block_q, v.shape[-1]))
        do = do.reshape(*flat, -1).astype(compute)
        lse, delta = self._row_terms(start, row_block, flat)

        scores = matmul(k, q, (1, 1)) * after
        scores = self._masked(scores, corner, bias, mask, seen)
        weights = self.exp(scores - lse)
        dv = dv + matmul(weights.astype(compute), do, (1, 0))
        slopes = weights * (matmul(v, do, (1, 1)) - delta)
        if dbias is not None:
            dbias = add_extra(dbias, self._rows_first(slopes), corner)
        slopes = slopes.astype(compute)
        dk = dk + matmul(slopes, q, (1, 0)) * after
        return self._add_queries(dq, matmul(kt, slopes, (1, 0)), start), dk, dv, dbias

    def _row_terms(
        self, start: tuple[Index, ...], row_block: Index, flat: tuple[int, ...]
    ) -> tuple[Array, Array]:
        """Log-sum-exp and delta of a block of queries, as the one row that a tile subtracts."""
        layout = self.layout
        size = (1, layout.tile_heads, layout.rows.block)
        lse = lax.dynamic_slice(self.lse, start, size)
        delta = lax.dynamic_slice(self.delta, start, size)
        if layout.rows.ragged:
            row = start[-1] + jnp.arange(layout.rows.block)
            lse = jnp.where(row >= layout.rows.fresh(row_block), lse, jnp.inf)
        shape = (*flat[:-1], 1, flat[-1])
        return lse.reshape(shape), delta.reshape(shape)

    def _masked(
        self,
        scores: Array,
        corner: tuple[Index, ...],
        bias: Array | None,
        mask: Array | None,
        seen: Array | None,
    ) -> Array:
        """Scores with the bias added, and -inf wherever a key is not to be seen."""
        if bias is None and mask is None and seen is None:
            return scores
        layout = self.layout
        size = (layout.tile_heads, layout.rows.block, layout.columns.block)
        shape = scores.shape
        scores = scores.reshape(self._by_head)
        if bias is not None:
            scores = scores + self._keys_first(take_extra(bias, corner, size)).astype(jnp.float32)
        if mask is not None:
            scores = jnp.where(self._keys_first(take_extra(mask, corner, size)), scores, NEVER)
        if seen is not None:
            scores = jnp.where(seen.T[:, None], scores, NEVER)
        return scores.reshape(shape)

    @property
    def _by_head(self) -> tuple[int, int, int, int]:
        """Shape of a tile with its heads apart: key heads, keys, heads of a group, queries."""
        one = self.layout
        return one.tile_kv_heads, one.columns.block, one.tile_group, one.rows.block

    def _keys_first(self, extra: Array) -> Array:
        """A tile of a bias or mask in the order of ``_by_head``."""
        kv, group = self.layout.tile_kv_heads, self.layout.tile_group
        lead = (1, 1) if extra.shape[0] == 1 else (kv, group)
        return extra.reshape(*lead, *extra.shape[1:]).transpose(0, 3, 1, 2)

    def _rows_first(self, tile: Array) -> Array:
        """A tile of gradients as [heads, block_q, block_k]."""
        kv, keys, group, rows = self._by_head
        return tile.reshape(self._by_head).transpose(0, 2, 3, 1).reshape(kv * group, rows, keys)

    def _add_queries(self, dq: Array, tile: Array, start: tuple[Index, ...]) -> Array:
        """``dq`` [B, N, H, T] with a tile [..., H, rows of all its heads] added."""
        kv, _, group, rows = self._by_head
        tile = (
            tile.reshape(kv, -1, group, rows).transpose(0, 2, 1, 3).reshape(1, kv * group, -1, rows)
        )
        batch, head, row = start
        place = (batch, head, 0, row)
        return lax.dynamic_update_slice(dq, lax.dynamic_slice(dq, place, tile.shape) + tile, place)
