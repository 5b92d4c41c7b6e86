"""The forward kernel of ``llvm``: a task is a block of queries of one head.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), algorithm 1.
"""

from __future__ import annotations

from llvmlite import ir

from ..exponential import LOG2_E
from ..llvm.code import F32, Code, Machine, Value
from ..llvm.ffi import Buffer, handler
from ..llvm.product import Sum
from ..llvm.vectors import exp2, lanes_below, pairs, store
from ._llvm_panels import (
    Panels,
    Part,
    Sizes,
    addresses,
    block_sizes,
    is_paired,
    padded,
    range_size,
)

#: Below every score that is a number; finite, so that its difference to itself is 0.
LOWEST = -3e38
#: Instead of a factor of 0, which would make -inf, the score of a hidden key, no number.
_LEAST_FACTOR = 1e-30


def parts(sizes: Sizes, machine: Machine) -> dict[str, Part]:
    """The parts of a thread's scratch memory."""
    width = machine.width
    dim, value_dim = padded(sizes.head_dim, machine), padded(sizes.value_dim, machine)
    of_word = 2 if is_paired(sizes, machine) else 1
    return {
        "ranges": Part(panel=range_size(machine)),
        "queries": Part(panel=dim * width // of_word),
        "keys": Part(key=dim // of_word),
        "values": Part(key=value_dim // of_word),
        "scores": Part(key=width),
        "sums": Part(panel=value_dim * width),
        "largest": Part(panel=width),
        "totals": Part(panel=width),
        # Of one block: its largest, then the factors of what was summed before.
        "factors": Part(rest=width),
    }


def write(sizes: Sizes, machine: Machine, name: str) -> ir.Module:
    """An LLVM module with the handler ``name``.

    Its arguments: query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], the factor of
    the scores [1], panels of a task and keys of a block, int32 [2], and of the keys that each
    query sees the first and the end, int32 [B, T].
    Its results: out [B, T, N, Hv]; the largest score and the sum of the exponentials
    beside it, [B, N, T]; and the workspace [threads, size].
    """
    module = ir.Module(name)

    def tasks(code: Code, buffers: list[Buffer]) -> Value:
        batch, length, heads, _ = buffers[0].dims
        block = code.mul(block_sizes(code, buffers[4])[0], machine.width)
        return code.mul(code.mul(batch, heads), code.ceil(length, block))

    def body(code: Code, buffers: list[Buffer], task: Value, thread: Value) -> None:
        _Forward(code, sizes, buffers, task, thread).write()

    handler(module, machine, name, ((4, 4, 4, 1, 1, 2, 2), (4, 3, 3, 2)), tasks, body)
    return module


class _Forward:
    """Writes the code of one task."""

    def __init__(
        self, code: Code, sizes: Sizes, buffers: list[Buffer], task: Value, thread: Value
    ) -> None:
        self.code, self.sizes, self.builder = code, sizes, code.builder
        self.query, self.key, self.value, factor, blocks, low, high = buffers[:7]
        self.out, self.largest, self.total, work = buffers[7:]
        _, length, heads, _ = self.query.dims
        _, kv_length, kv_heads, _ = self.key.dims
        self.most, self.block_k = block_sizes(code, blocks)
        base = code.at(work.data, code.mul(thread, work.dims[1]))
        named = parts(sizes, code.machine)
        self.scratch = addresses(code, base, named, self.most, self.block_k)
        block = code.mul(self.most, code.machine.width)
        blocks_of_head = code.ceil(length, block)
        # The last queries first: under a causal mask they see most keys.
        self.first = code.mul(
            code.sub(code.sub(blocks_of_head, 1), code.rem(task, blocks_of_head)), block
        )
        pair = code.div(task, blocks_of_head)
        batch, head = code.div(pair, heads), code.rem(pair, heads)
        self.panels = Panels(
            code, sizes, batch, head, code.div(head, code.div(heads, kv_heads)), low, high,
            length, kv_length, heads, kv_heads, self.scratch,
        )  # fmt: skip
        self.factor = code.splat(code.load(factor.data, F32))
        self.exponent, self.scale = code.constant(LOG2_E), None
        if self.panels.paired:
            # Pairs hold the queries as they are, but for the factor's sign; the rest of it
            # multiplies differences of scores.
            least = code.constant(_LEAST_FACTOR)
            self.scale = code.maximum(code.intrinsic("llvm.fabs", (self.factor,)), least)
            self.exponent = self.builder.fmul(self.scale, self.exponent)
            one = code.constant(1.0)
            self.factor = code.intrinsic("llvm.copysign", (one, self.factor))

    def write(self) -> None:
        code, sizes, panels = self.code, self.sizes, self.panels
        left = code.ceil(code.sub(panels.length, self.first), panels.width)
        count = code.least(left, self.most)

        def begin(panel: Value, carried: list[Value]) -> list[Value]:
            first, end = self._begin(panel)
            return [code.least(carried[0], first), code.most(carried[1], end)]

        limits = [panels.kv_length, code.index(0)]
        first, end = code.fold(0, count, 1, limits, begin)
        with code.loop(first, end, self.block_k) as start:
            keys = code.least(self.block_k, code.sub(end, start))
            for read, array, size, part in (
                (panels.load_rows, self.key, sizes.head_dim, "keys"),
                (panels.load_terms, self.value, sizes.value_dim, "values"),
            ):
                read(array, panels.key_place(start, size), keys, size, self.scratch[part])
            with code.loop(0, count) as panel:
                self._block(panel, start, keys)
        with code.loop(0, count) as panel:
            self._end(panel)

    def _of(self, part: str, panel: Value, size: int) -> Value:
        """Address of a panel's own ``size`` floats of a part of the memory."""
        return self.code.at(self.scratch[part], self.code.mul(panel, size))

    def _vectors(self, part: str, panel: Value) -> list[Value]:
        """Addresses of a panel's vectors of a statistic."""
        base = self._of(part, panel, self.panels.width)
        return [self.code.at(base, n * self.panels.lanes) for n in range(self.panels.vectors)]

    def _first_query(self, panel: Value) -> Value:
        return self.code.add(self.first, self.code.mul(panel, self.panels.width))

    def _begin(self, panel: Value) -> tuple[Value, Value]:
        """Reads the queries of a panel; which keys they see: the first and the end."""
        panels, width = self.panels, self.panels.width
        first = self._first_query(panel)
        queries = self._of("queries", panel, panels.words(panels.dim) * width)
        panels.load_panel(self.query, first, self.sizes.head_dim, queries, self.factor)
        panels.fill(
            self._of("sums", panel, panels.value_dim * width), panels.value_dim * width, 0.0
        )
        panels.fill(self._of("largest", panel, width), width, LOWEST)
        panels.fill(self._of("totals", panel, width), width, 0.0)
        return panels.load_ranges(first, self._of("ranges", panel, range_size(self.code.machine)))

    def _block(self, panel: Value, start: Value, count: Value) -> None:
        """A block of keys for a panel of queries."""
        code, panels, scratch = self.code, self.panels, self.scratch
        width, dim, value_dim = panels.width, panels.words(panels.dim), panels.value_dim
        ranges = self._of("ranges", panel, range_size(self.code.machine))
        skipped, rows, hidden = panels.visible(ranges, start, count)
        with code.when(self.builder.icmp_signed(">", rows, code.index(0))):
            keys = code.at(scratch["keys"], code.mul(skipped, dim))
            values = code.at(scratch["values"], code.mul(panels.words(skipped), value_dim))
            queries = self._of("queries", panel, dim * width)
            panels.fill(scratch["factors"], width, LOWEST)
            panels.multiply(
                Sum.MAXIMUM, (keys, dim, 1), (queries, width), scratch["scores"], rows,
                self.sizes.head_dim, width, scratch["factors"],
            )  # fmt: skip
            with code.when(hidden):
                self._hide(ranges, code.add(start, skipped), rows)
            self._softmax(panel, rows)
            sums = self._of("sums", panel, value_dim * width)
            panels.multiply(
                Sum.RESCALE, (values, 1, value_dim), (scratch["scores"], width), sums,
                self.sizes.value_dim, rows, width, scratch["factors"],
            )  # fmt: skip

    def _score(self, row: Value, vector: int) -> Value:
        """Address of the scores of a key with a vector of queries."""
        offset = self.code.mul(row, self.panels.width)
        return self.code.at(
            self.scratch["scores"], self.code.add(offset, vector * self.panels.lanes)
        )

    def _hide(self, ranges: Value, begin: Value, rows: Value) -> None:
        """Gives keys that a query does not see no weight, and finds the largest anew."""
        code, hidden = self.code, self.code.constant(float("-inf"))
        for vector in range(self.panels.vectors):

            def step(row: Value, found: list[Value], vector: int = vector) -> list[Value]:
                place = self._score(row, vector)
                seen = self.panels.seen(ranges, vector, code.add(begin, row))
                score = self.builder.select(seen, code.load_vector(place), hidden)
                code.store_vector(score, place)
                return [code.maximum(score, found[0])]

            (found,) = code.fold(0, rows, 1, [code.constant(LOWEST)], step)
            offset = vector * self.panels.lanes
            code.store_vector(found, code.at(self.scratch["factors"], offset))

    def _softmax(self, panel: Value, rows: Value) -> None:
        """Powers of the scores in place, their sums, and the factors of what was summed.

        Pairs of them, two by two keys, take the first half of the place.
        """
        code, builder = self.code, self.builder
        totals = self._vectors("totals", panel)
        largest, kept = [], []
        for vector, place in enumerate(self._vectors("largest", panel)):
            factors = code.at(self.scratch["factors"], vector * self.panels.lanes)
            before = code.load_vector(place)
            now = code.maximum(code.load_vector(factors), before)
            code.store_vector(now, place)
            factor = self._power(before, now)
            # Exactly 1 where it is: a rounding would add up over the blocks.
            same = builder.fcmp_ordered("==", before, now)
            factor = builder.select(same, code.constant(1.0), factor)
            code.store_vector(factor, factors)
            largest.append(now)
            kept.append(builder.fmul(code.load_vector(totals[vector]), factor))

        def power(place: Value, vector: int) -> Value:
            return self._power(code.load_vector(place), largest[vector])

        def step(row: Value, sums: list[Value]) -> list[Value]:
            found = []
            for vector, total in enumerate(sums):
                place = self._score(row, vector)
                one = power(place, vector)
                code.store_vector(one, place)
                found.append(builder.fadd(total, one))
            return found

        def pair_step(row: Value, sums: list[Value]) -> list[Value]:
            found = []
            for vector, total in enumerate(sums):
                places = [self._score(one, vector) for one in (row, code.add(row, 1))]
                both = [power(place, vector) for place in places]
                code.store_vector(pairs(code, *both), self._score(code.div(row, 2), vector))
                found.append(builder.fadd(total, builder.fadd(*both)))
            return found

        # A block's own sums first: beside a large power many small ones would be lost.
        every, body = (2, pair_step) if self.panels.paired else (1, step)
        sums = code.fold(0, rows, every, [code.constant(0.0)] * len(kept), body)
        for place, before, added in zip(totals, kept, sums, strict=True):
            code.store_vector(builder.fadd(before, added), place)

    def _power(self, score: Value, largest: Value) -> Value:
        """exp(score - largest). First the difference: that of the largest is exactly 0."""
        difference = self.builder.fsub(score, largest)
        return exp2(self.code, self.builder.fmul(difference, self.exponent))

    def _end(self, panel: Value) -> None:
        """Writes a panel's rows of out, divided by their sums, and its statistics."""
        code, builder, panels = self.code, self.builder, self.panels
        first = self._first_query(panel)
        shares = self.scratch["factors"]
        for vector, place in enumerate(self._vectors("totals", panel)):
            total = code.load_vector(place)
            none = builder.fcmp_ordered("==", total, code.constant(0.0))
            one = code.constant(1.0)
            share = builder.fdiv(one, builder.select(none, one, total))
            code.store_vector(share, code.at(shares, vector * panels.lanes))
        sums = self._of("sums", panel, panels.value_dim * panels.width)
        panels.store_panel(self.out, first, self.sizes.value_dim, sums, shares)
        for array, part in ((self.largest, "largest"), (self.total, "totals")):
            for vector, place in enumerate(self._vectors(part, panel)):
                row = code.add(first, vector * panels.lanes)
                mask = lanes_below(code, code.sub(panels.length, row))
                target = code.at(array.data, panels.statistic_row(row))
                vector = code.load_vector(place)
                if part == "largest" and self.scale is not None:
                    vector = builder.fmul(vector, self.scale)
                store(code, vector, target, "float32", mask)
