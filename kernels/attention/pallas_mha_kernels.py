"""Fused attention kernels: forward, and backward by query, by key and by bias.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): only the output and
the log-sum-exp are kept, scores are made again where they are needed. What a
score is says ``Scores``; which tiles are visited, and which of those need a
mask, says a ``Schedule``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ..pallas import triton
from .pallas_mha_scores import LOG2E, Index, Refs, Scores, Tile

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How one kernel is cut up: queries and keys of a tile, warps and pipeline stages."""

    q: int
    k: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of a call, as in ``Problem``."""

    batch: int
    seq: int
    kv_seq: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of tiles: ``block(i)`` for i from ``start`` to ``stop``, all masked or none."""

    start: Index
    stop: Index
    masked: bool
    block: Callable[[Index], Index] = lambda i: i


class Schedule(Protocol):
    """Which tiles of scores are visited.

    Runs may name blocks beyond the last, up to the next multiple of a granule of
    positions; those are masked.
    """

    def granules(self, blocks: Blocks) -> tuple[int, int]:
        """The granules of queries and keys: multiples of the kernel's blocks."""

    def keys(self, refs: Refs, blocks: Blocks, batch: Index, head: Index, i: Index) -> list[Run]:
        """The key blocks that the i-th query block visits."""

    def queries(self, refs: Refs, blocks: Blocks, batch: Index, head: Index, i: Index) -> list[Run]:
        """The query blocks that visit the i-th key block."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What all four kernels of a call share."""

    sizes: Sizes
    scores: Scores
    schedule: Schedule
    blocks: Blocks
    precision: lax.Precision
    descending: bool = False

    def visit(self, runs: list[Run], step: Callable[..., Any], carry: Any) -> Any:
        """Runs ``step(block, masked, carry)`` over all tiles of the runs."""
        for run in runs:
            carry = triton.loop(run.start, run.stop, functools.partial(_visit, step, run), carry)
        return carry

    @property
    def edges(self) -> tuple[int | None, int | None]:
        """The end of the queries and of the keys; None where no tile reaches beyond it."""
        queries, keys = self.schedule.granules(self.blocks)
        return ragged(self.sizes.seq, queries), ragged(self.sizes.kv_seq, keys)

    def dot(self, left: Array, right: Array, contract: tuple[int, int] = (1, 0)) -> Array:
        """A float32 product of two tiles."""
        return triton.dot(left, right, contract=contract, precision=self.precision)

    def programs(self) -> tuple[Array, Array, Array]:
        """(block, head, batch) of this program; the longest rows of a triangle go first."""
        block, head, batch = triton.program_ids(3)
        if self.descending:
            block = -(-self.sizes.seq // self.blocks.q) - 1 - block
        return block, head, batch


def rows_of(
    ref: Any, batch: Index, start: Index, count: int, head: Index, seq: int | None, dim: int
) -> Array:
    """Rows of a [B, seq, heads, dim] array as a [count, padded dim] tile, zero beyond its edges."""
    index = (batch, triton.span(start, count), head, slice(None))
    return triton.load(ref, index, _inside(ref, start, count, seq, dim))


def put_rows(
    ref: Any, value: Array, batch: Index, start: Index, head: Index, seq: int | None, dim: int
) -> None:
    """Writes a tile that ``rows_of`` would read."""
    count = value.shape[0]
    index = (batch, triton.span(start, count), head, slice(None))
    triton.store(ref, index, value, _inside(ref, start, count, seq, dim))


def _inside(ref: Any, start: Index, count: int, seq: int | None, dim: int) -> Array | None:
    """Which elements of a tile exist; ``seq`` is None where all of its rows do."""
    width = ref.shape[-1]
    rows = None if seq is None else triton.positions(start, count, 0) < seq
    columns = None if width == dim else triton.positions(0, width, 1) < dim
    valid = triton.every([rows, columns])
    return None if valid is None else jnp.broadcast_to(valid, (count, width))


def _visit(step: Callable[..., Any], run: Run, i: Index, carry: Any) -> Any:
    return step(run.block(i), run.masked, carry)


def _below(start: Index, count: int, limit: Index | None) -> Array | None:
    """Which of ``count`` positions lie below a limit."""
    return None if limit is None else start + lax.iota(jnp.int32, count) < limit


def ragged(seq: int, block: int) -> int | None:
    """``seq`` where the last block is cut short, otherwise None."""
    return seq if seq % block else None


def forward(kernel: Kernel, refs: Refs) -> None:
    """Writes ``out``, and ``lse`` in base 2 where there is a reference for it."""
    sizes, scores, (bq, bk) = kernel.sizes, kernel.scores, (kernel.blocks.q, kernel.blocks.k)
    i, head, batch = kernel.programs()
    kv_head, q_start = head // sizes.group, i * bq
    seq, kv_seq = ragged(sizes.seq, bq), kernel.edges[1]
    query = rows_of(refs["query"], batch, q_start, bq, head, seq, sizes.dim)
    tile = Tile(batch, head, q_start, bq, 0, bk, False, bool(seq), False)

    def step(j: Index, masked: bool, carry: Any) -> Any:
        total, maximum, acc = carry
        edge = kv_seq if masked else None
        key = rows_of(refs["key"], batch, j * bk, bk, kv_head, edge, sizes.dim)
        here = dataclasses.replace(
            tile, column_start=j * bk, masked=masked, ragged_columns=bool(edge)
        )
        raw, factor = scores.of(refs, kernel.dot(query, key, (1, 1)), here)
        new = jnp.maximum(maximum, jnp.max(raw, axis=1) * factor)
        shift = new
        if masked or scores.may_be_empty(refs):  # -inf less -inf would be NaN
            shift = jnp.where(new == -jnp.inf, 0.0, new)
        weights = jnp.exp2(raw * factor - shift[:, None])
        shrink = jnp.exp2(maximum - shift)
        value = rows_of(refs["value"], batch, j * bk, bk, kv_head, edge, sizes.value_dim)
        acc = acc * shrink[:, None] + kernel.dot(weights.astype(value.dtype), value)
        return total * shrink + jnp.sum(weights, axis=1), new, acc

    carry = (
        jnp.zeros((bq,), jnp.float32),
        jnp.full((bq,), -jnp.inf, jnp.float32),
        jnp.zeros((bq, refs["value"].shape[-1]), jnp.float32),
    )
    runs = kernel.schedule.keys(refs, kernel.blocks, batch, head, i)
    total, maximum, acc = kernel.visit(runs, step, carry)
    empty = total == 0.0
    if "q_lengths" in refs:
        beyond = q_start + lax.iota(jnp.int32, bq) >= refs["q_lengths"][batch]
        empty = jnp.logical_or(empty, beyond)
    total = jnp.where(empty, 1.0, total)
    out = jnp.where(empty[:, None], 0.0, acc / total[:, None])
    put_rows(refs["out"], out, batch, q_start, head, seq, sizes.value_dim)
    if "lse" in refs:
        lse = jnp.where(empty, -jnp.inf, maximum + jnp.log(total) * LOG2E)
        index = (batch, head, triton.span(q_start, bq))
        triton.store(refs["lse"], index, lse, _below(q_start, bq, seq))


def _shift(
    refs: Refs, batch: Index, head: Index, start: Index, count: int, seq: int | None
) -> Array:
    """The log-sum-exp of some queries; +inf, which makes every weight 0, for empty ones."""
    index = (batch, head, triton.span(start, count))
    lse = triton.load(refs["lse"], index, _below(start, count, seq), other=-jnp.inf)
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def backward_delta(kernel: Kernel, refs: Refs) -> None:
    """Writes ``delta``, the sum of out · grad_out for each query."""
    sizes, count = kernel.sizes, kernel.blocks.q
    i, head, batch = triton.program_ids(3)
    start, seq = i * count, ragged(sizes.seq, count)
    out, grad_out = (
        rows_of(refs[name], batch, start, count, head, seq, sizes.value_dim).astype(jnp.float32)
        for name in ("out", "grad_out")
    )
    index = (batch, head, triton.span(start, count))
    triton.store(refs["delta"], index, jnp.sum(out * grad_out, axis=1), _below(start, count, seq))


def backward_query(kernel: Kernel, refs: Refs) -> None:
    """Writes ``grad_query``, less what all keys share where there is a ``key_centre``."""
    sizes, scores, (bq, bk) = kernel.sizes, kernel.scores, (kernel.blocks.q, kernel.blocks.k)
    i, head, batch = kernel.programs()
    kv_head, q_start = head // sizes.group, i * bq
    seq, kv_seq = ragged(sizes.seq, bq), kernel.edges[1]
    grad_out = rows_of(refs["grad_out"], batch, q_start, bq, head, seq, sizes.value_dim)
    query = rows_of(refs["query"], batch, q_start, bq, head, seq, sizes.dim)
    shift, delta = _statistics(refs, batch, head, q_start, bq, seq)
    tile = Tile(batch, head, q_start, bq, 0, bk, False, bool(seq), False)

    def step(j: Index, masked: bool, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc, *totals = carry
        edge = kv_seq if masked else None
        key = rows_of(refs["key"], batch, j * bk, bk, kv_head, edge, sizes.dim)
        value = rows_of(refs["value"], batch, j * bk, bk, kv_head, edge, sizes.value_dim)
        here = dataclasses.replace(
            tile, column_start=j * bk, masked=masked, ragged_columns=bool(edge)
        )
        slope, _ = _slope(kernel, refs, here, query, key, value, grad_out, shift, delta)
        slope = slope.astype(key.dtype)
        totals = [total + jnp.sum(slope.astype(jnp.float32), axis=1) for total in totals]
        return (acc + kernel.dot(slope, key), *totals)

    runs = kernel.schedule.keys(refs, kernel.blocks, batch, head, i)
    start = [jnp.zeros((bq, refs["query"].shape[-1]), jnp.float32)]
    if "key_centre" in refs:
        start.append(jnp.zeros((bq,), jnp.float32))
    acc, *totals = kernel.visit(runs, step, tuple(start))
    if totals:
        centre = rows_of(refs["key_centre"], batch, 0, 1, kv_head, None, sizes.dim)
        acc -= totals[0][:, None] * centre
    put_rows(refs["grad_query"], acc * scores.scale, batch, q_start, head, seq, sizes.dim)


def _slope(
    kernel: Kernel,
    refs: Refs,
    tile: Tile,
    query: Array,
    key: Array,
    value: Array,
    grad_out: Array,
    shift: Array,
    delta: Array,
) -> tuple[Array, Array]:
    """The gradient by the scaled products of a tile, and the tile's weights."""
    if tile.keys_first:
        query, key, grad_out, value = key, query, value, grad_out
        shift, delta = shift[None, :], delta[None, :]
    else:
        shift, delta = shift[:, None], delta[:, None]
    products = kernel.dot(query, key, (1, 1))
    raw, factor = kernel.scores.of(refs, products, tile)
    weights = jnp.exp2(raw * factor - shift)
    slope = weights * (kernel.dot(grad_out, value, (1, 1)) - delta)
    return kernel.scores.gradient(refs, products, tile, slope), weights


def backward_key(kernel: Kernel, refs: Refs) -> None:
    """Writes ``grad_key`` and ``grad_value``, summed over the query heads that share them."""
    sizes, (bq, bk) = kernel.sizes, (kernel.blocks.q, kernel.blocks.k)
    j, kv_head, batch = triton.program_ids(3)
    k_start = j * bk
    kv_seq = ragged(sizes.kv_seq, bk)
    key = rows_of(refs["key"], batch, k_start, bk, kv_head, kv_seq, sizes.dim)
    value = rows_of(refs["value"], batch, k_start, bk, kv_head, kv_seq, sizes.value_dim)

    def of_head(g: Index, carry: Any) -> Any:
        head = kv_head * sizes.group + g
        tile = Tile(batch, head, 0, bq, k_start, bk, False, False, bool(kv_seq), keys_first=True)

        def step(i: Index, masked: bool, carry: Any) -> Any:
            seq = kernel.edges[0] if masked else None
            here = dataclasses.replace(tile, row_start=i * bq, masked=masked, ragged_rows=bool(seq))
            query = rows_of(refs["query"], batch, i * bq, bq, head, seq, sizes.dim)
            grad_out = rows_of(refs["grad_out"], batch, i * bq, bq, head, seq, sizes.value_dim)
            shift, delta = _statistics(refs, batch, head, i * bq, bq, seq)
            slope, weights = _slope(kernel, refs, here, query, key, value, grad_out, shift, delta)
            grad_key, grad_value = carry
            grad_value += kernel.dot(weights.astype(grad_out.dtype), grad_out)
            return grad_key + kernel.dot(slope.astype(query.dtype), query), grad_value

        return kernel.visit(
            kernel.schedule.queries(refs, kernel.blocks, batch, head, j), step, carry
        )

    carry = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    carry = of_head(0, carry) if sizes.group == 1 else triton.loop(0, sizes.group, of_head, carry)
    if "kv_lengths" in refs:
        seen = triton.positions(k_start, bk, 0) < refs["kv_lengths"][batch]
        carry = jnp.where(seen, carry[0], 0.0), jnp.where(seen, carry[1], 0.0)
    grad_key, grad_value = carry
    grad_key *= kernel.scores.scale
    put_rows(refs["grad_key"], grad_key, batch, k_start, kv_head, kv_seq, sizes.dim)
    put_rows(refs["grad_value"], grad_value, batch, k_start, kv_head, kv_seq, sizes.value_dim)


def _statistics(
    refs: Refs, batch: Index, head: Index, start: Index, count: int, seq: int | None
) -> tuple[Array, Array]:
    """The shift and the delta of some queries."""
    index = (batch, head, triton.span(start, count))
    delta = triton.load(refs["delta"], index, _below(start, count, seq))
    return _shift(refs, batch, head, start, count, seq), delta


def backward_bias(kernel: Kernel, refs: Refs) -> None:
    """Writes ``grad_bias``, summed over the axes along which the bias is broadcast.

    A program owns one tile of the bias and walks over all that shares it, so
    nothing of size [B, N, T, S] is ever made for a smaller bias.
    """
    sizes, (bq, bk) = kernel.sizes, (kernel.blocks.q, kernel.blocks.k)
    x, bias_head, bias_batch = triton.program_ids(3)
    batches, heads, rows, _ = refs["bias"].shape
    key_blocks, query_blocks = -(-sizes.kv_seq // bk), -(-sizes.seq // bq)
    own, key_block = triton.divide(x, key_blocks)
    k_start = key_block * bk
    seq, kv_seq = ragged(sizes.seq, bq), ragged(sizes.kv_seq, bk)
    shared_heads = sizes.heads if heads == 1 else 1
    shared_blocks = query_blocks if rows == 1 else 1

    def step(n: Index, acc: Array) -> Array:
        n, block = triton.divide(n, shared_blocks)
        n, shared_head = triton.divide(n, shared_heads)
        i, head, batch = own + block, bias_head + shared_head, bias_batch + n
        kv_head, q_start = triton.divide(head, sizes.group)[0], i * bq
        query = rows_of(refs["query"], batch, q_start, bq, head, seq, sizes.dim)
        grad_out = rows_of(refs["grad_out"], batch, q_start, bq, head, seq, sizes.value_dim)
        key = rows_of(refs["key"], batch, k_start, bk, kv_head, kv_seq, sizes.dim)
        value = rows_of(refs["value"], batch, k_start, bk, kv_head, kv_seq, sizes.value_dim)
        shift, delta = _statistics(refs, batch, head, q_start, bq, seq)
        tile = Tile(batch, head, q_start, bq, k_start, bk, True, bool(seq), bool(kv_seq))
        return acc + _slope(kernel, refs, tile, query, key, value, grad_out, shift, delta)[0]

    count = shared_blocks * shared_heads * (sizes.batch if batches == 1 else 1)
    acc = triton.loop(0, count, step, jnp.zeros((bq, bk), jnp.float32))
    inside = _below(k_start, bk, kv_seq)
    columns = triton.span(k_start, bk)
    if rows == 1:
        index: tuple[Any, ...] = (bias_batch, bias_head, 0, columns)
        triton.store(refs["grad_bias"], index, jnp.sum(acc, axis=0), inside)
        return
    valid = triton.every(
        [
            None if seq is None else triton.positions(own * bq, bq, 0) < seq,
            None if kv_seq is None else triton.positions(k_start, bk, 1) < kv_seq,
        ]
    )
    valid = None if valid is None else jnp.broadcast_to(valid, (bq, bk))
    index = (bias_batch, bias_head, triton.span(own * bq, bq), columns)
    triton.store(refs["grad_bias"], index, acc, valid)
