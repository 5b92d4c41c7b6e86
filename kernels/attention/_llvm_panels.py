"""What the kernels of ``llvm`` share: panels of queries, blocks of keys, who sees what.

A panel is as many queries as a tile of a product is wide, one in each lane. In the
kernels it is kept as [head_dim, queries], and its scores as [keys, queries]: then the
softmax's largest and sums need no sums across lanes, and keys, values and gradients are
read in the order in which they lie in memory.

Where the processor multiplies pairs of bfloat16 and the arrays are such, all that is
multiplied is kept in words of two neighbours among the terms of the sums: queries as
[head_dim / 2, queries], the weights that multiply values as [keys / 2, queries]. Sums,
scores and the softmax stay float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..llvm.code import F32, I16, I32, I64, Code, Machine, Value
from ..llvm.ffi import Buffer
from ..llvm.product import Sum, product
from ..llvm.vectors import element, lanes_below, load, load_raw, pairs, store, transpose

#: Beyond every key.
_NO_KEY = 2**31 - 1
#: Numbers kept of a panel: its least first key and largest end, largest first and least end.
_LIMITS = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for.

    Attributes:
        head_dim: Of queries and keys.
        value_dim: Of values.
        dtype: Of the arrays.
    """

    head_dim: int
    value_dim: int
    dtype: str


def padded(size: int, machine: Machine) -> int:
    """``size`` rounded up to whole vectors."""
    return -(-size // machine.lanes) * machine.lanes


def is_paired(sizes: Sizes, machine: Machine) -> bool:
    """Whether products are of pairs of bfloat16."""
    return sizes.dtype == "bfloat16" and machine.dots is not None


def range_size(machine: Machine) -> int:
    """Floats that ``Panels.load_ranges`` writes: two ranks of int32, and int64 limits."""
    return 2 * machine.width + 2 * _LIMITS


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a thread's scratch memory: floats for each panel, for each key of a block,
    and besides."""

    panel: int = 0
    key: int = 0
    rest: int = 0


Parts = Mapping[str, Part]


def workspace_size(parts: Parts, panels: int, block_k: int) -> int:
    """Floats of a thread's scratch memory; a multiple of 16."""
    size = sum(one.panel * panels + one.key * block_k + one.rest for one in parts.values())
    return -(-size // 16) * 16


def addresses(
    code: Code, base: Value, parts: Parts, panels: Value, block_k: Value
) -> dict[str, Value]:
    """Where each part begins."""
    found, offset = {}, code.index(0)
    for name, part in parts.items():
        found[name] = code.at(base, offset)
        size = code.add(code.mul(panels, part.panel), code.mul(block_k, part.key))
        offset = code.add(offset, code.add(size, part.rest))
    return found


def block_sizes(code: Code, blocks: Buffer) -> tuple[Value, Value]:
    """Panels of a task and keys of a block, from the int32 array [2] that holds them."""
    first, second = (
        code.builder.sext(code.load(code.at(blocks.data, n, I32), I32), I64) for n in range(2)
    )
    return first, second


@dataclasses.dataclass
class Panels:
    """Writes what both kernels do with panels of the queries of one head.

    Attributes:
        code: The function being written.
        sizes: What it is compiled for.
        batch: Number of the batch.
        head: Number of the head.
        kv_head: Of its keys.
        low: First key that each query sees, int32 [B, T].
        high: End of them.
        length: Of the queries.
        kv_length: Of the keys.
        heads: Of the queries.
        kv_heads: Of the keys.
        scratch: Address of each part of the thread's memory.
    """

    code: Code
    sizes: Sizes
    batch: Value
    head: Value
    kv_head: Value
    low: Buffer
    high: Buffer
    length: Value
    kv_length: Value
    heads: Value
    kv_heads: Value
    scratch: Mapping[str, Value]

    @property
    def lanes(self) -> int:
        return self.code.machine.lanes

    @property
    def vectors(self) -> int:
        return self.code.machine.vectors

    @property
    def width(self) -> int:
        """Queries of a panel."""
        return self.vectors * self.lanes

    @property
    def paired(self) -> bool:
        return is_paired(self.sizes, self.code.machine)

    def words(self, count: Any) -> Any:
        """Words that hold ``count`` terms of a sum: floats, or pairs."""
        if not self.paired:
            return count
        return -(-count // 2) if isinstance(count, int) else self.code.ceil(count, 2)

    @property
    def dim(self) -> int:
        return padded(self.sizes.head_dim, self.code.machine)

    @property
    def value_dim(self) -> int:
        return padded(self.sizes.value_dim, self.code.machine)

    # Places in the arrays.

    def query_row(self, row: Value, size: int) -> Value:
        """Index in an array [B, T, N, size] of a query of this head."""
        return self._row(self.length, row, self.heads, self.head, size)

    def key_row(self, row: Value, size: int) -> Value:
        """Index in an array [B, S, K, size] of a key of this head."""
        return self._row(self.kv_length, row, self.kv_heads, self.kv_head, size)

    def _row(self, length: Value, row: Value, heads: Value, head: Value, size: int) -> Value:
        code = self.code
        place = code.add(code.mul(self.batch, length), row)
        return code.mul(code.add(code.mul(place, heads), head), size)

    def statistic_row(self, row: Value) -> Value:
        """Index in an array [B, N, T] of a query of this head."""
        code = self.code
        place = code.add(code.mul(self.batch, self.heads), self.head)
        return code.add(code.mul(place, self.length), row)

    def within(self, first: Value, number: Any) -> Value:
        """Query ``first`` + ``number``; the last one beyond the end."""
        code = self.code
        return code.least(code.add(first, number), code.sub(self.length, 1))

    def mask(self, column: Any, size: int) -> Value | None:
        """Lanes of a vector at ``column`` that lie within ``size``; None where all surely do."""
        if size % self.lanes == 0:
            return None
        return lanes_below(self.code, self.code.sub(size, column))

    # Reading and writing.

    def load_panel(
        self,
        array: Buffer,
        first: Value,
        size: int,
        target: Value,
        factor: Value | None = None,
    ) -> None:
        """Writes queries ``first`` … of an array [B, T, N, size] as words of [size, queries].

        Pairs are exact only where ``factor`` is a power of two.
        """
        code, kind = self.code, element(self.sizes.dtype)
        with (
            code.loop(0, self.width, self.lanes) as group,
            code.loop(0, padded(size, code.machine), self.lanes) as column,
        ):
            mask = self.mask(column, size)
            rows = []
            for lane in range(self.lanes):
                place = self.query_row(self.within(first, code.add(group, lane)), size)
                source = code.at(array.data, code.add(place, column), kind)
                vector = load(code, source, self.sizes.dtype, mask)
                rows.append(vector if factor is None else code.builder.fmul(vector, factor))
            lines, row = transpose(code, rows), column
            if self.paired:
                lines = [pairs(code, *lines[n : n + 2]) for n in range(0, len(lines), 2)]
                row = code.div(column, 2)
            for number, vector in enumerate(lines):
                offset = code.add(code.mul(code.add(row, number), self.width), group)
                code.store_vector(vector, code.at(target, offset))

    def store_panel(
        self, array: Buffer, first: Value, size: int, source: Value, factors: Value
    ) -> None:
        """Writes a panel [size, queries] to an array [B, T, N, size].

        ``factors`` is the address of a factor for each query.
        """
        code, builder, kind = self.code, self.code.builder, element(self.sizes.dtype)
        valid = code.sub(self.length, first)
        with (
            code.loop(0, self.width, self.lanes) as group,
            code.loop(0, padded(size, code.machine), self.lanes) as column,
        ):
            mask = self.mask(column, size)
            factor = code.load_vector(code.at(factors, group))
            lines = []
            for lane in range(self.lanes):
                offset = code.add(code.mul(code.add(column, lane), self.width), group)
                line = code.load_vector(code.at(source, offset))
                lines.append(builder.fmul(line, factor))
            for lane, line in enumerate(transpose(code, lines)):
                number = code.add(group, lane)
                with code.when(builder.icmp_signed("<", number, valid)):
                    place = self.query_row(code.add(first, number), size)
                    target = code.at(array.data, code.add(place, column), kind)
                    store(code, line, target, self.sizes.dtype, mask)

    def load_rows(self, array: Buffer, place: Any, count: Value, size: int, target: Value) -> None:
        """Copies ``count`` rows of an array, as words [count, size], side by side.

        ``place`` gives the index of a row by its number.
        """
        code, kind = self.code, element(self.sizes.dtype)
        row = padded(size, code.machine)
        read, into = (load_raw, I16) if self.paired else (load, F32)
        with code.loop(0, count) as n:
            start = place(n)
            for column in range(0, row, self.lanes):
                mask = self.mask(column, size)
                source = code.at(array.data, code.add(start, column), kind)
                vector = read(code, source, self.sizes.dtype, mask)
                offset = code.add(code.mul(n, row), column)
                code.store(vector, code.at(target, offset, into), align=4)

    def load_terms(self, array: Buffer, place: Any, count: Value, size: int, target: Value) -> None:
        """The same of rows that are the terms of a sum: as words of [count, size] by pairs of
        rows, the partner of a last odd one zeros."""
        if not self.paired:
            self.load_rows(array, place, count, size, target)
            return
        code, builder, kind = self.code, self.code.builder, element(self.sizes.dtype)
        row = padded(size, code.machine)
        with code.loop(0, count, 2) as n:
            following = code.add(n, 1)
            there = builder.icmp_signed("<", following, count)
            starts = [place(n), place(builder.select(there, following, n))]
            for column in range(0, row, self.lanes):
                mask = self.mask(column, size)
                low, high = (
                    builder.zext(load_raw(code, source, self.sizes.dtype, mask), code.integers)
                    for source in (
                        code.at(array.data, code.add(start, column), kind) for start in starts
                    )
                )
                high = builder.select(there, builder.shl(high, code.integer(16)), code.integer(0))
                offset = code.add(code.mul(code.div(n, 2), row), column)
                code.store_vector(builder.or_(low, high), code.at(target, offset))

    def key_place(self, start: Value, size: int) -> Any:
        """Where keys or values ``start`` … of this head lie, by their number."""
        return lambda n: self.key_row(self.code.add(start, n), size)

    def fill(self, target: Value, count: Any, number: float | Value) -> None:
        """Sets ``count`` floats, a multiple of the lanes, to a number or to a vector."""
        code = self.code
        vector = code.constant(number) if isinstance(number, float) else number
        with code.loop(0, count, self.lanes) as n:
            code.store_vector(vector, code.at(target, n))

    # Which keys are seen.

    def load_ranges(self, first: Value, target: Value) -> tuple[Value, Value]:
        """Keeps in ``target`` which keys the queries of a panel see.

        First keys, ends, then the panel's limits. Returns the least first and the largest end.
        """
        code, builder = self.code, self.code.builder

        def step(lane: Value, found: list[Value]) -> list[Value]:
            place = code.add(code.mul(self.batch, self.length), self.within(first, lane))
            begin = code.load(code.at(self.low.data, place, I32), I32)
            end = code.load(code.at(self.high.data, place, I32), I32)
            code.store(begin, code.at(target, lane, I32))
            code.store(end, code.at(target, code.add(lane, self.width), I32))
            begin, end = (builder.sext(number, I64) for number in (begin, end))
            return [
                code.least(found[0], begin),
                code.most(found[1], end),
                code.most(found[2], begin),
                code.least(found[3], end),
            ]

        far, near = code.index(_NO_KEY), code.index(0)
        found = code.fold(0, self.width, 1, [far, near, near, far], step)
        limits = code.at(target, 2 * self.width)
        for n, value in enumerate(found):
            code.store(value, code.at(limits, n, I64))
        return found[0], found[1]

    def visible(self, ranges: Value, start: Value, count: Value) -> tuple[Value, Value, Value]:
        """Of keys ``start`` … those that some query of a panel sees.

        Returns:
            How many of them come first that none sees, the count of the others, and
            whether some of these are hidden from some query. Of pairs whole ones: the
            first and the last of the others may be hidden from all.
        """
        code, builder = self.code, self.code.builder
        limits = code.at(ranges, 2 * self.width)
        first, end, last_first, first_end = (
            code.load(code.at(limits, n, I64), I64) for n in range(_LIMITS)
        )
        skipped = code.most(code.sub(first, start), 0)
        stop = code.least(count, code.sub(end, start))
        if self.paired:
            skipped = builder.and_(skipped, I64(-2))
            # One beyond the keys is beyond what any query sees: hidden.
            stop = builder.and_(code.add(stop, 1), I64(-2))
        hidden = builder.or_(
            builder.icmp_signed("<", code.add(start, skipped), last_first),
            builder.icmp_signed(">", code.add(start, stop), first_end),
        )
        return skipped, code.sub(stop, skipped), hidden

    def seen(self, ranges: Value, vector: int, key: Value) -> Value:
        """Which queries of a vector see ``key``."""
        code, builder = self.code, self.code.builder
        low, high = (
            code.load(code.at(ranges, offset + vector * self.lanes), code.integers, align=4)
            for offset in (0, self.width)
        )
        keys = code.splat(builder.trunc(key, I32))
        return builder.and_(
            builder.icmp_signed(">=", keys, low), builder.icmp_signed("<", keys, high)
        )

    # Products.

    def multiply(
        self, kind: Sum, a: tuple[Value, Any, Any], b: tuple[Value, int], c: Value, rows: Any,
        terms: Any, columns: int, extra: Value | None = None,
    ) -> None:  # fmt: skip
        """C[i, :] (+)= Σ_r A[i, r] B[r, :], ``columns`` wide; C has rows like B.

        ``a`` is an address with the strides of rows and terms, ``b`` one with its stride,
        in words.
        """
        code = self.code
        start = 0
        while start < columns:
            vectors = min(self.vectors, (columns - start) // self.lanes)
            address = code.at(b[0], start)
            code.builder.call(
                product(code.module, code.machine, vectors, kind, self.paired),
                [a[0], address, code.at(c, start), c if extra is None else extra,
                 *(code.index(n) for n in (a[1], a[2], b[1], b[1], rows, self.words(terms)))],
            )  # fmt: skip
            start += vectors * self.lanes
