"""Geometry of blockwise attention: which blocks a loop visits, and their slices.

A tile is the work of one step: some heads, a block of queries and a block of
keys. Blocks that no query may see are never visited, and blocks that every
query sees are visited without a positional mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

Index = int | Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An axis of ``size`` positions cut in blocks of one static size.

    The last block is moved back to end with the axis, so it may repeat some
    positions of the block before it: ``fresh`` is where its own ones begin.
    """

    size: int
    block: int

    @classmethod
    def cut(cls, size: int, wanted: int) -> Blocks:
        """Blocks of about ``wanted`` positions, evened out so that little is repeated."""
        count = -(-size // wanted)
        if count == 1:
            return cls(size, size)
        even = -(-size // count)
        return cls(size, min(size, -(-even // 16) * 16))

    @property
    def count(self) -> int:
        return -(-self.size // self.block)

    @property
    def ragged(self) -> bool:
        return self.size % self.block != 0

    def start(self, index: Index) -> Index:
        """First position of a block's slice."""
        if not self.ragged:
            return index * self.block
        return minimum(index * self.block, self.size - self.block)

    def fresh(self, index: Index) -> Index:
        """First position that no earlier block has."""
        return index * self.block


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static shape of the computation: sizes, blocks and heads of a tile.

    Attributes:
        batch: B.
        heads: Query heads, N.
        kv_heads: Key and value heads, K.
        tile_heads: Query heads in one tile, a divisor or a multiple of N / K.
        rows: Blocks of queries.
        columns: Blocks of keys.
        left: Positions a query sees before its own, or None for all.
        right: Positions a query sees after its own, or None for all.
    """

    batch: int
    heads: int
    kv_heads: int
    tile_heads: int
    rows: Blocks
    columns: Blocks
    left: int | None
    right: int | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tile_kv_heads(self) -> int:
        """Key heads in one tile."""
        return max(1, self.tile_heads // self.group)

    @property
    def tile_group(self) -> int:
        """Query heads in one tile that share a key head."""
        return min(self.tile_heads, self.group)

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes of a tile: none for one key head, so that XLA may work in place."""
        return () if self.tile_kv_heads == 1 else (self.tile_kv_heads,)

    def columns_seen(self, row_block: Index, kv_length: Array | None) -> Ranges:
        """Key blocks that a block of queries sees in part, and in full."""
        first = self.rows.start(row_block)
        last = first + self.rows.block - 1
        size: Index = self.columns.size if kv_length is None else kv_length
        seen_from: Index = 0 if self.left is None else maximum(first - self.left, 0)
        full_from: Index = 0 if self.left is None else maximum(last - self.left, 0)
        seen_to = size if self.right is None else minimum(size, last + self.right + 1)
        full_to = size if self.right is None else minimum(size, first + self.right + 1)
        block = self.columns.block
        return Ranges.of(
            seen_from // block, ceil_div(seen_to, block), ceil_div(full_from, block), full_to // block
        )

    def rows_seeing(
        self, column_block: Index, q_length: Array | None, kv_length: Array | None
    ) -> Ranges:
        """Query blocks that see a block of keys in part, and in full."""
        block, size = self.rows.block, self.rows.size
        first = self.columns.fresh(column_block)
        last = minimum(first + self.columns.block, self.columns.size) - 1
        seen_from: Index = 0 if self.right is None else maximum(first - self.right, 0)
        full_from: Index = 0 if self.right is None else maximum(last - self.right, 0)
        seen_to: Index = size if self.left is None else minimum(size, last + self.left + 1)
        full_to: Index = size if self.left is None else minimum(size, first + self.left + 1)
        begin, end = seen_from // block, ceil_div(seen_to, block)
        full_begin = ceil_div(full_from, block)
        # Rows that the last block repeats carry no weight, so only its end counts.
        full_end: Index = self.rows.count
        if self.left is not None:
            full_end = where(full_to >= size, self.rows.count, full_to // block)
        if q_length is not None:
            end = minimum(end, ceil_div(q_length, block))
        if self.columns.ragged:
            full_end = where(column_block == self.columns.count - 1, 0, full_end)
        if kv_length is not None:
            end = where(first < kv_length, end, 0)
            full_end = where(last < kv_length, full_end, 0)
        return Ranges.of(begin, end, full_begin, full_end)

    def visible(
        self, row_block: Index, column_block: Index, kv_length: Array | None
    ) -> Array | None:
        """Boolean [block_q, block_k] of the positions of a tile that count, or None for all."""
        shape = (self.rows.block, self.columns.block)
        row = self.rows.start(row_block) + lax.broadcasted_iota(jnp.int32, shape, 0)
        column = self.columns.start(column_block) + lax.broadcasted_iota(jnp.int32, shape, 1)
        terms = []
        if self.columns.ragged:
            terms.append(column >= self.columns.fresh(column_block))
        if self.right is not None:
            terms.append(column <= row + self.right)
        if self.left is not None:
            terms.append(column >= row - self.left)
        if kv_length is not None:
            terms.append(column < kv_length)
        if not terms:
            return None
        seen = terms[0]
        for term in terms[1:]:
            seen = seen & term
        return seen


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Blocks [begin, end) to visit, of which [full_begin, full_end) need no mask."""

    begin: Index
    end: Index
    full_begin: Index
    full_end: Index

    @classmethod
    def of(cls, begin: Index, end: Index, full_begin: Index, full_end: Index) -> Ranges:
        """Ranges with full inside seen; an empty one has no length, never a negative one."""
        end = maximum(begin, end)
        full_begin = minimum(maximum(full_begin, begin), end)
        full_end = minimum(maximum(full_end, full_begin), end)
        return cls(begin, end, full_begin, full_end)

    @property
    def full(self) -> Index:
        """How many blocks need no mask."""
        return self.full_end - self.full_begin

    @property
    def partial(self) -> Index:
        """How many blocks need one: those before the full ones, then those after."""
        return (self.end - self.begin) - self.full

    def nth_partial(self, n: Index) -> Index:
        """The block that comes n-th among those that need a mask."""
        before = self.full_begin - self.begin
        if isinstance(before, int) and before == 0:
            return self.full_end + n
        return where(n < before, self.begin + n, self.full_end + n - before)


def loop(count: Index, body: Callable[[Index, Any], Any], carry: Any) -> Any:
    """``body(i, carry)`` for i in range(count); no loop at all where count is 0 or 1."""
    if isinstance(count, int) and count <= 1:
        return body(0, carry) if count == 1 else carry
    return lax.fori_loop(0, count, body, carry)


def minimum(a: Index, b: Index) -> Index:
    """The smaller, static where both are."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a: Index, b: Index) -> Index:
    """The larger, static where both are."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def where(condition: bool | Array, a: Index, b: Index) -> Index:
    """``a`` or ``b``, static where the condition is."""
    if isinstance(condition, bool):
        return a if condition else b
    return jnp.where(condition, a, b)


def ceil_div(a: Index, b: int) -> Index:
    """The quotient, rounded up."""
    return (a + (b - 1)) // b


def take_bthd(array: Array, start: tuple[Index, ...], size: tuple[int, int, int]) -> Array:
    """Slice of one batch row of [B, T, N, D] as [heads, positions, D].

    ``start`` is (batch, head, position) and ``size`` (heads, positions, D).
    """
    batch, head, position = start
    heads, positions, dim = size
    tile = lax.dynamic_slice(array, (batch, position, head, 0), (1, positions, heads, dim))
    return tile.reshape(positions, heads, dim).transpose(1, 0, 2)


def put_bthd(array: Array, tile: Array, start: tuple[Index, ...]) -> Array:
    """``array`` [B, T, N, D] with the slice that ``take_bthd`` reads replaced."""
    batch, head, position = start
    update = tile.transpose(1, 0, 2)[None].astype(array.dtype)
    return lax.dynamic_update_slice(array, update, (batch, position, head, 0))


def take_extra(array: Array, start: tuple[Index, ...], size: tuple[int, ...]) -> Array:
    """A tile of a bias or mask, [heads or 1, block_q or 1, block_k or 1].

    ``array`` is 4-D, each axis 1 or full of [B, N, T, S]; ``start`` is (batch,
    head, row, column) and ``size`` (heads, block_q, block_k).
    """
    start, shape = _extra_slice(array, start, size)
    return lax.dynamic_slice(array, start, shape).reshape(shape[1:])


def add_extra(array: Array, tile: Array, start: tuple[Index, ...]) -> Array:
    """``array`` with a tile's sum over the axes that it broadcasts added to it."""
    start, shape = _extra_slice(array, start, tile.shape)
    axes = tuple(axis for axis in range(3) if shape[axis + 1] == 1)
    total = jnp.sum(tile, axis=axes, keepdims=True)[None]
    old = lax.dynamic_slice(array, start, shape)
    return lax.dynamic_update_slice(array, old + total.astype(array.dtype), start)


def _extra_slice(
    array: Array, start: tuple[Index, ...], size: tuple[int, ...]
) -> tuple[tuple[Index, ...], tuple[int, ...]]:
    full = [n != 1 for n in array.shape]
    begin = tuple(s if f else 0 for s, f in zip(start, full, strict=True))
    shape = tuple(n if f else 1 for n, f in zip((1, *size), full, strict=True))
    return begin, shape


def matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Product of tiles over the given axes of the last two, in float32.

    Tiles are [m, n], or [X, m, n] for X products.
    """
    batch = tuple(range(a.ndim - 2))
    over = (contract[0] + a.ndim - 2,), (contract[1] + b.ndim - 2,)
    return lax.dot_general(a, b, (over, (batch, batch)), preferred_element_type=jnp.float32)


def row_lengths(lengths: Array | None, batch: Index) -> Array | None:
    """The length of one batch row."""
    return None if lengths is None else lax.dynamic_index_in_dim(lengths, batch, keepdims=False)


def unravel(index: Index, *sizes: int) -> tuple[Index, ...]:
    """Indices along axes of the given sizes, last fastest; static along axes of one."""
    found: list[Index] = []
    for size in reversed(sizes[1:]):
        found.append(0 if size == 1 else index % size)
        index = index if size == 1 else index // size
    found.append(0 if sizes[0] == 1 else index)
    return tuple(reversed(found))


