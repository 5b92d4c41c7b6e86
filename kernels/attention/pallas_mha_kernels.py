"""Fused attention kernels: forward, and backward by query, by key and by bias.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): only the output and
the log-sum-exp are kept, scores are made again where they are needed. What a
score is says ``Scores``; which tiles are visited, and which of those need a
mask, says a ``Schedule``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ..pallas import triton
from .pallas_mha_scores import LOG2E, Index, Refs, Scores, Tile, pairs

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
    """Which tiles of scores are visited."""

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
            carry = triton.loop(
                run.start,
                run.stop,
                lambda i, carry, run=run: step(run.block(i), run.masked, carry),
                carry,
            )
        return carry

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
    ref: Any, start: Index, count: int, seq: int | None, dim: int, *lead: Index
) -> Array:
    """Rows of a [..., seq, dim] array as a [count, padded dim] tile, zero beyond its edges."""
    return triton.load(
        ref, _row_index(ref, start, count, lead), _inside(ref, start, count, seq, dim)
    )


def put_rows(
    ref: Any, value: Array, start: Index, seq: int | None, dim: int, *lead: Index
) -> None:
    """Writes a tile that ``rows_of`` would read."""
    count = value.shape[0]
    triton.store(
        ref, _row_index(ref, start, count, lead), value, _inside(ref, start, count, seq, dim)
    )


def _row_index(ref: Any, start: Index, count: int, lead: tuple[Index, ...]) -> tuple[Any, ...]:
    return (triton.span(start, count), *lead, slice(None))


def _inside(ref: Any, start: Index, count: int, seq: int | None, dim: int) -> Array | None:
    """Which elements of a tile exist; ``seq`` is None where all of its rows do."""
    width = ref.shape[-1]
    rows = None if seq is None else triton.positions(start, count, 0) < seq
    columns = None if width == dim else triton.positions(0, width, 1) < dim
    valid = triton.every([rows, columns])
    return None if valid is None else jnp.broadcast_to(valid, (count, width))


def statistics_of(ref: Any, start: Index, count: int, seq: int | None, *lead: Index) -> Array:
    """One float32 number for each of ``count`` queries."""
    valid = None if seq is None else start + lax.iota(jnp.int32, count) < seq
    return triton.load(ref, (*lead, triton.span(start, count)), valid)


def put_statistics(ref: Any, value: Array, start: Index, seq: int | None) -> None:
    """Writes what ``statistics_of`` would read."""
    count = value.shape[0]
    valid = None if seq is None else start + lax.iota(jnp.int32, count) < seq
    triton.store(ref, (triton.span(start, count),), value, valid)


def ragged(seq: int, block: int) -> int | None:
    """``seq`` where the last block is cut short, otherwise None."""
    return seq if seq % block else None


def forward(kernel: Kernel, refs: Refs) -> None:
    """Writes ``out``, and ``lse`` in base 2 where there is a reference for it."""
    sizes, scores, (bq, bk) = kernel.sizes, kernel.scores, (kernel.blocks.q, kernel.blocks.k)
    i, head, batch = kernel.programs()
    q_start = i * bq
    seq, kv_seq = ragged(sizes.seq, bq), ragged(sizes.kv_seq, bk)
    query = rows_of(refs["query"], q_start, bq, seq, sizes.dim)
    tile = Tile(batch, head, head, q_start, bq, 0, bk, False, bool(seq), False)

    def step(j: Index, masked: bool, carry: Any) -> Any:
        total, maximum, acc = carry
        edge = kv_seq if masked else None
        key = rows_of(refs["key"], j * bk, bk, edge, sizes.dim)
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
        value = rows_of(refs["value"], j * bk, bk, edge, sizes.value_dim)
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
        rows = q_start + lax.iota(jnp.int32, bq)
        empty = jnp.logical_or(empty, rows >= refs["q_lengths"][batch])
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    put_rows(refs["out"], acc * inverse[:, None], q_start, seq, sizes.value_dim)
    if "lse" in refs:
        lse = maximum + jnp.log(jnp.where(empty, 1.0, total)) * LOG2E
        put_statistics(refs["lse"], jnp.where(empty, -jnp.inf, lse), q_start, seq)


def _shift(refs: Refs, start: Index, count: int, seq: int | None, *lead: Index) -> Array:
    """The log-sum-exp of some queries; +inf, which makes every weight 0, for empty ones."""
    lse = statistics_of(refs["lse"], start, count, seq, *lead)
    empty = lse == -jnp.inf
    if seq is not None:
        empty = jnp.logical_or(empty, start + lax.iota(jnp.int32, count) >= seq)
    return jnp.where(empty, jnp.inf, lse)


def backward_query(kernel: Kernel, refs: Refs) -> None:
    """Writes ``grad_query``, and ``delta``, the sum of out · grad_out for each query."""
    sizes, scores, (bq, bk) = kernel.sizes, kernel.scores, (kernel.blocks.q, kernel.blocks.k)
    i, head, batch = kernel.programs()
    q_start = i * bq
    seq, kv_seq = ragged(sizes.seq, bq), ragged(sizes.kv_seq, bk)
    out = rows_of(refs["out"], q_start, bq, seq, sizes.value_dim)
    grad_out = rows_of(refs["grad_out"], q_start, bq, seq, sizes.value_dim)
    delta = jnp.sum(out.astype(jnp.float32) * grad_out.astype(jnp.float32), axis=1)
    put_statistics(refs["delta"], delta, q_start, seq)
    query = rows_of(refs["query"], q_start, bq, seq, sizes.dim)
    shift = _shift(refs, q_start, bq, seq)
    tile = Tile(batch, head, head, q_start, bq, 0, bk, False, bool(seq), False)

    def step(j: Index, masked: bool, acc: Array) -> Array:
        edge = kv_seq if masked else None
        key = rows_of(refs["key"], j * bk, bk, edge, sizes.dim)
        value = rows_of(refs["value"], j * bk, bk, edge, sizes.value_dim)
        here = dataclasses.replace(
            tile, column_start=j * bk, masked=masked, ragged_columns=bool(edge)
        )
        products = kernel.dot(query, key, (1, 1))
        raw, factor = scores.of(refs, products, here)
        weights = jnp.exp2(raw * factor - shift[:, None])
        slope = weights * (kernel.dot(grad_out, value, (1, 1)) - delta[:, None])
        slope = scores.gradient(refs, products, here, slope)
        return acc + kernel.dot(slope.astype(key.dtype), key)

    runs = kernel.schedule.keys(refs, kernel.blocks, batch, head, i)
    acc = kernel.visit(runs, step, jnp.zeros((bq, refs["query"].shape[-1]), jnp.float32))
    put_rows(refs["grad_query"], acc * scores.scale, q_start, seq, sizes.dim)


def backward_key(kernel: Kernel, refs: Refs) -> None:
    """Writes ``grad_key`` and ``grad_value``, summed over the query heads that share them."""
    sizes, (bq, bk) = kernel.sizes, (kernel.blocks.q, kernel.blocks.k)
    j, kv_head, batch = triton.program_ids(3)
    k_start = j * bk
    kv_seq = ragged(sizes.kv_seq, bk)
    key = rows_of(refs["key"], k_start, bk, kv_seq, sizes.dim)
    value = rows_of(refs["value"], k_start, bk, kv_seq, sizes.value_dim)

    def of_head(g: Index, carry: Any) -> Any:
        head = kv_head * sizes.group + g
        tile = Tile(batch, head, g, 0, bq, k_start, bk, False, False, bool(kv_seq), True)
        runs = kernel.schedule.queries(refs, kernel.blocks, batch, head, j)
        return kernel.visit(runs, lambda *step: _key_step(kernel, refs, tile, key, value, *step), carry)

    carry = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    if sizes.group == 1:
        grad_key, grad_value = of_head(0, carry)
    else:
        grad_key, grad_value = triton.loop(0, sizes.group, of_head, carry)
    if "kv_lengths" in refs:
        seen = triton.positions(k_start, bk, 0) < refs["kv_lengths"][batch]
        grad_key, grad_value = jnp.where(seen, grad_key, 0.0), jnp.where(seen, grad_value, 0.0)
    put_rows(refs["grad_key"], grad_key * kernel.scores.scale, k_start, kv_seq, sizes.dim)
    put_rows(refs["grad_value"], grad_value, k_start, kv_seq, sizes.value_dim)


def _key_step(
    kernel: Kernel, refs: Refs, tile: Tile, key: Array, value: Array, i: Index, masked: bool, carry: Any
) -> Any:
    sizes, scores, bq = kernel.sizes, kernel.scores, kernel.blocks.q
    grad_key, grad_value = carry
    start, g = i * bq, tile.local_head
    seq = ragged(sizes.seq, bq) if masked else None
    tile = dataclasses.replace(tile, row_start=start, masked=masked, ragged_rows=bool(seq))
    query = rows_of(refs["query"], start, bq, seq, sizes.dim, g)
    products = kernel.dot(key, query, (1, 1))
    raw, factor = scores.of(refs, products, tile)
    weights = jnp.exp2(raw * factor - _shift(refs, start, bq, seq, g)[None, :])
    grad_out = rows_of(refs["grad_out"], start, bq, seq, sizes.value_dim, g)
    grad_value += kernel.dot(weights.astype(grad_out.dtype), grad_out)
    delta = statistics_of(refs["delta"], start, bq, seq, g)
    slope = weights * (kernel.dot(value, grad_out, (1, 1)) - delta[None, :])
    slope = scores.gradient(refs, products, tile, slope)
    return grad_key + kernel.dot(slope.astype(query.dtype), query), grad_value
