"""Geometry of blockwise attention: which blocks a loop visits, and their slices.

A tile is the work of one step: some heads, a block of queries and a block of
keys. Blocks that no query may see are never visited, and blocks that every
query sees are visited without a positional mask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..shardings import varying

Index = int | Array
#: A loop over tiles on the diagonal is compiled for at most this many heights.
_MAX_TRIMS = 8


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
        if size % count == 0 and even % 4 == 0:
            return cls(size, even)
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

    @property
    def folded(self) -> tuple[int, ...]:
        """Axis of the query heads that share a key head; none for one head."""
        return () if self.tile_group == 1 else (self.tile_group,)

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
            seen_from // block,
            ceil_div(seen_to, block),
            ceil_div(full_from, block),
            full_to // block,
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

    @property
    def trims(self) -> tuple[int, ...]:
        """Numbers of rows that a tile on the diagonal may leave out at its top.

        Above the diagonal no key is seen, so a tall block of queries is cut to
        one of a few static heights.
        """
        if self.right is None:
            return (0,)
        unit = max(self.columns.block, -(-self.rows.block // _MAX_TRIMS))
        return tuple(range(0, self.rows.block, unit))

    def trim(self, row_block: Index, column_block: Index) -> Index:
        """Which of ``trims`` is the largest that leaves out no row seeing the block."""
        if len(self.trims) == 1 or self.right is None:
            return 0
        hidden = self.columns.fresh(column_block) - self.right - self.rows.start(row_block)
        return minimum(maximum(hidden // self.trims[1], 0), len(self.trims) - 1)

    def edge(self, kv_length: Array | None) -> int:
        """Rows at the top of a trimmed tile that need a mask; the others see all its keys."""
        if self.left is not None or kv_length is not None or self.columns.ragged:
            return self.rows.block
        if len(self.trims) == 1:
            return self.rows.block
        block, unit = self.columns.block, self.trims[1]
        aligned = self.right == 0 and unit == block and not self.rows.ragged
        aligned = aligned and (self.rows.count == 1 or self.rows.block % block == 0)
        return block if aligned else unit + block

    def visible(
        self, row: Index, rows: int, column_block: Index, kv_length: Array | None
    ) -> Array | None:
        """Boolean [rows, block_k]: which keys of a block the rows from ``row`` on see.

        None where they see all.
        """
        shape = (rows, self.columns.block)
        rows_at = row + lax.broadcasted_iota(jnp.int32, shape, 0)
        columns_at = self.columns.start(column_block) + lax.broadcasted_iota(jnp.int32, shape, 1)
        terms = []
        if self.columns.ragged:
            terms.append(columns_at >= self.columns.fresh(column_block))
        if self.right is not None:
            terms.append(columns_at <= rows_at + self.right)
        if self.left is not None:
            terms.append(columns_at >= rows_at - self.left)
        if kv_length is not None:
            terms.append(columns_at < kv_length)
        return functools.reduce(jnp.logical_and, terms) if terms else None


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


def loop(count: Index, body: Callable[[Index, Any], Any], carry: Any, like: Any = None) -> Any:
    """``body(i, carry)`` for i in range(count); no loop at all where count is 0 or 1.

    ``like`` are arrays that the body reads, whose manual mesh axes the carry takes on.
    """
    carry = varying(carry, like)
    if isinstance(count, int) and count <= 1:
        return body(0, carry) if count == 1 else carry
    return lax.fori_loop(0, count, body, carry)


def switch(index: Index, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """``branches[index](*operands)``; the plain call where the index is static."""
    if isinstance(index, int):
        return branches[index](*operands)
    return lax.switch(index, branches, *operands)


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
