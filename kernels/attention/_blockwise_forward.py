"""Forward pass of blockwise attention: online softmax over blocks of keys.

FlashAttention-2, algorithm 1 (Dao 2023, https://arxiv.org/abs/2307.08691):
the running sum is divided out once per block of queries, not at every step.

A softmax subtracts the largest score of a row lest an exponential overflow. By
Cauchy-Schwarz no score is beyond scale · max‖q‖ · max‖k‖; where that is small
nothing can overflow, and a pass over the scores is saved.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._blockwise_tiles import (
    Index,
    Layout,
    loop,
    matmul,
    put_bthd,
    row_lengths,
    switch,
    take_bthd,
    take_extra,
    unravel,
)

State = tuple[Array, ...]
Exp = Callable[[Array], Array]
NEVER = float("-inf")
#: Scores up to this need no shift: their exponentials are within 1e-13 and 1e13…
_MOST_SCORE = 30.0
#: …and neither do sums of up to 2^24 of them overflow, times values up to this, nor are
#: products lost to underflow, times values that reach this.
_MOST_VALUE, _LEAST_VALUE = 1e17, 1e-20
#: Squares of norms below this vanish in float32.
_LEAST_NORM = 1e-18


def forward(
    layout: Layout, scale: float, compute: Any, exp: Exp, shift: str, arrays: tuple[Any, ...]
) -> tuple[Array, Array]:
    """Output [B, T, N, Hv] in the dtype of the query, and log-sum-exp [B, N, T], float32.

    ``arrays`` are query, key, value, bias, mask, query and key lengths. ``shift`` is
    ``"always"`` or ``"needed"``: whether the largest score is subtracted from a row even
    where no score is large, which is found out at run time.
    """
    query, key, value, bias, *_ = arrays
    run = functools.partial(_forward, layout, scale, compute, exp, arrays)
    # A bias is as large as the scores: reading it to bound it saves nothing. And in
    # float16 a weight overflows at a score of 11.
    if shift == "always" or bias is not None or compute != jnp.float32:
        return run(True)
    return lax.cond(_small(query, key, value, scale), lambda: run(False), lambda: run(True))


@jax.custom_batching.custom_vmap
def _small(query: Array, key: Array, value: Array, scale: float | Array) -> Array:
    """Whether no score needs a shift: a scalar, False where anything is not finite."""
    top = jnp.max(jnp.abs(value).astype(jnp.float32))
    weighable = (top <= _MOST_VALUE) & ((top >= _LEAST_VALUE) | (top == 0.0))
    return weighable & (jnp.abs(scale) * _largest_norm(query) * _largest_norm(key) <= _MOST_SCORE)


@_small.def_vmap
def _(axis_size: int, batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
    """One answer for the whole batch, so that a ``cond`` on it computes one branch only."""
    return _small(*arrays), False


def _largest_norm(vectors: Array) -> Array:
    """The largest norm over the last axis, or a little more where it is tiny."""
    x = vectors.astype(jnp.float32)
    return jnp.maximum(jnp.sqrt(jnp.max(jnp.sum(x * x, axis=-1))), _LEAST_NORM)


def _forward(
    layout: Layout,
    scale: float,
    compute: Any,
    exp: Exp,
    arrays: tuple[Any, ...],
    shifted: bool,
) -> tuple[Array, Array]:
    """``forward`` with the largest score of each row subtracted, or not."""
    query, _, value, *_ = arrays
    units = layout.heads // layout.tile_heads
    sizes = (layout.batch, units, layout.rows.count)
    block = _QueryBlock(layout, scale, compute, exp, arrays, shifted)

    def body(step: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = carry
        batch, unit, row_block = unravel(step, *sizes)
        head = unit * layout.tile_heads
        tile, tile_lse = block.attend(batch, head, row_block)
        row = layout.rows.start(row_block)
        out = put_bthd(out, tile, (batch, head, row))
        lse = lax.dynamic_update_slice(lse, tile_lse[None], (batch, head, row))
        return out, lse

    shape = (layout.batch, layout.rows.size, layout.heads)
    start = (
        jnp.zeros((*shape, value.shape[-1]), query.dtype),
        jnp.zeros((shape[0], shape[2], shape[1]), jnp.float32),
    )
    return loop(sizes[0] * sizes[1] * sizes[2], body, start, arrays)


@dataclasses.dataclass(frozen=True)
class _QueryBlock:
    """The output of one block of queries, and of the heads of a tile."""

    layout: Layout
    scale: float
    compute: Any
    exp: Exp
    arrays: tuple[Any, ...]
    shifted: bool

    def attend(self, batch: Index, head: Index, row_block: Index) -> tuple[Array, Array]:
        """Output [heads, block_q, Hv] and log-sum-exp [heads, block_q]."""
        layout = self.layout
        query, _, value, *_, q_lengths, kv_lengths = self.arrays
        kv_length = row_lengths(kv_lengths, batch)
        row, block_q = layout.rows.start(row_block), layout.rows.block
        size = (layout.tile_heads, block_q, query.shape[-1])
        q, after = scaled_queries(query, (batch, head, row), size, self.scale, self.compute)
        shape = (*layout.stack, *layout.folded, block_q)
        q = q.reshape(*shape, -1)

        def full(n: Index, carry: State) -> State:
            column_block = ranges.full_begin + n
            return self._tile(carry, q, after, (batch, head, row), 0, column_block, None)

        def partial(n: Index, carry: State) -> State:
            column_block = ranges.nth_partial(n)
            branches = [
                functools.partial(self._cut_tile, q, after, (batch, head, row), skip, kv_length)
                for skip in layout.trims
            ]
            return switch(layout.trim(row_block, column_block), branches, column_block, carry)

        ranges = layout.columns_seen(row_block, kv_length)
        carry: State = (
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, value.shape[-1]), jnp.float32),
        )
        if self.shifted:
            carry = (jnp.full(shape, NEVER, jnp.float32), *carry)
        carry = loop(ranges.full, full, carry, self.arrays)
        carry = loop(ranges.partial, partial, carry)
        *top, total, acc = (
            x.reshape(layout.tile_heads, block_q, *x.shape[len(shape) :]) for x in carry
        )
        empty = total == 0.0
        out = acc * jnp.where(empty, 0.0, 1.0 / total)[..., None]
        lse = jnp.where(empty, NEVER, sum(top, jnp.log(total)))
        q_length = row_lengths(q_lengths, batch)
        if q_length is not None:
            inside = row + jnp.arange(block_q) < q_length
            out = jnp.where(inside[None, :, None], out, 0.0)
            lse = jnp.where(inside, lse, NEVER)
        return out, lse

    def _cut_tile(
        self,
        q: Array,
        after: float,
        start: tuple[Index, ...],
        skip: int,
        kv_length: Array | None,
        column_block: Index,
        carry: State,
    ) -> State:
        """The carry with a block of keys that only rows from ``skip`` on see, and in part."""
        layout = self.layout
        batch, head, row = start
        seen = layout.visible(row + skip, layout.rows.block - skip, column_block, kv_length)
        cut = tuple(
            lax.slice_in_dim(x, skip, None, axis=len(layout.stack) + len(layout.folded))
            for x in (q, *carry)
        )
        place = (batch, head, row + skip)
        new = self._tile(
            cut[1:], cut[0], after, place, skip, column_block, seen, layout.edge(kv_length)
        )
        if skip == 0:
            return new
        axis = len(layout.stack) + len(layout.folded)
        return tuple(
            lax.dynamic_update_slice_in_dim(x, y, skip, axis)
            for x, y in zip(carry, new, strict=True)
        )

    def _tile(
        self,
        carry: State,
        q: Array,
        after: float,
        start: tuple[Index, ...],
        skip: int,
        column_block: Index,
        seen: Array | None,
        edge: int = 0,
    ) -> State:
        """One step of the online softmax; only the first ``edge`` rows do not see all keys.

        The carry is the largest score so far if the softmax is shifted, the sum of
        the weights, and the weighted sum of the values.
        """
        layout, compute = self.layout, self.compute
        _, key, value, bias, mask, *_ = self.arrays
        batch, head, _ = start
        block_k, column = layout.columns.block, layout.columns.start(column_block)
        corner = (batch, head // layout.group, column)
        size = (layout.tile_kv_heads, block_k)
        flat = (*layout.stack, block_k)
        k = take_bthd(key, corner, (*size, key.shape[-1])).reshape(*flat, -1).astype(compute)
        v = take_bthd(value, corner, (*size, value.shape[-1])).reshape(*flat, -1).astype(compute)
        shape, rows = carry[0].shape, layout.rows.block - skip
        *top, total, acc = (x.reshape(*layout.stack, -1, *x.shape[len(shape) :]) for x in carry)

        scores = matmul(q.reshape(*layout.stack, -1, q.shape[-1]), k, (1, 1)) * after
        scores = biased(scores, (layout.tile_heads, rows, block_k), (*start, column), bias, mask)
        if self.shifted:
            tops = _tops(scores.reshape(*shape, block_k), seen, edge).reshape(total.shape)
            new_top = jnp.maximum(top[0], tops)
            # A row that has seen nothing yet keeps -inf, which must not meet another -inf.
            base = jnp.where(new_top == NEVER, 0.0, new_top)
            scores = scores - base[..., None]
            fade = jnp.exp(top[0] - base)
            top, total, acc = [new_top], total * fade, acc * fade[..., None]
        weights = self.exp(scores)
        if seen is not None:
            weights = jnp.where(seen, weights.reshape(*shape, block_k), 0.0).reshape(scores.shape)
        total = total + jnp.sum(weights, axis=-1)
        acc = acc + matmul(weights.astype(compute), v, (1, 0))
        return (*(x.reshape(shape) for x in (*top, total)), acc.reshape(*shape, -1))


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


def biased(
    scores: Array,
    tile_shape: tuple[int, int, int],
    start: tuple[Index, ...],
    bias: Array | None,
    mask: Array | None,
) -> Array:
    """Scores with the bias added, and -inf where the mask hides a key."""
    if bias is None and mask is None:
        return scores
    shape = scores.shape
    scores = scores.reshape(tile_shape)
    if bias is not None:
        scores = scores + take_extra(bias, start, tile_shape).astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(take_extra(mask, start, tile_shape), scores, NEVER)
    return scores.reshape(shape)


def _tops(scores: Array, seen: Array | None, edge: int) -> Array:
    """Largest score of each row among the keys seen; rows from ``edge`` on see all."""
    if seen is None:
        return jnp.max(scores, axis=-1)
    if edge >= scores.shape[-2]:
        return jnp.max(jnp.where(seen, scores, NEVER), axis=-1)
    first = jnp.where(seen[:edge], lax.slice_in_dim(scores, 0, edge, axis=-2), NEVER)
    tops = jnp.max(scores, axis=-1)
    return lax.dynamic_update_slice_in_dim(tops, jnp.max(first, axis=-1), 0, axis=-1)
