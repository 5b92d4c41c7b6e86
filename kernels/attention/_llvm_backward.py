"""The backward kernel of ``llvm``: a task is a part of the queries of one head.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), algorithm 2: the scores
are computed again, block of keys by block of keys.
"""

from __future__ import annotations

from llvmlite import ir

from ..exponential import LOG2_E
from ..llvm.code import F32, Code, Machine, Value
from ..llvm.ffi import Buffer, handler
from ..llvm.product import Sum
from ..llvm.vectors import dot, exp2, pair_of_ones, pairs, side_by_side, store
from ._key_centre import is_centred
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


def parts(sizes: Sizes, machine: Machine) -> dict[str, Part]:
    """The parts of a thread's scratch memory."""
    width = machine.width
    dim, value_dim = padded(sizes.head_dim, machine), padded(sizes.value_dim, machine)
    paired = is_paired(sizes, machine)
    of_word = 2 if paired else 1
    of_pairs = {"key_pairs": Part(key=dim // 2), "slope_pairs": Part(key=width // 2)}
    return {
        "ranges": Part(rest=range_size(machine)),
        "statistics": Part(rest=2 * width),
        "queries": Part(rest=dim * width // of_word),
        "grad_outs": Part(rest=value_dim * width // of_word),
        "query_rows": Part(rest=width * dim // of_word),
        "grad_out_rows": Part(rest=width * value_dim // of_word),
        "keys": Part(key=dim // of_word),
        "values": Part(key=value_dim // of_word),
        # By pairs of keys, for sums over these.
        **(of_pairs if paired else {}),
        "grad_keys": Part(key=dim),
        "grad_values": Part(key=value_dim),
        "weights": Part(key=width),
        "slopes": Part(key=width),
        "grad_queries": Part(panel=dim * width),
        # Of the slopes of a query, and of all keys.
        "slope_sums": Part(panel=width),
        "centre": Part(rest=dim),
    }


def write(sizes: Sizes, machine: Machine, name: str) -> ir.Module:
    """An LLVM module with the handler ``name``.

    Its arguments: query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], the gradient of
    out [B, T, N, Hv], the log-sum-exp in base 2 and delta [B, N, T], the factor of the
    scores [1], panels of a task and keys of a block, int32 [2], and of the keys that each query
    sees the first and the end, int32 [B, T]. Its results: the gradient of query [B, T, N, H]; what
    each task adds to those of key and value, float32 [B, S, K, P, H] and [B, S, K, P, Hv];
    and the workspace [threads, size]. P / (N / K) tasks share the queries of a head, each
    has its panels at equal distances.
    """
    module = ir.Module(name)

    def tasks(code: Code, buffers: list[Buffer]) -> Value:
        batch, _, kv_heads, summands, _ = buffers[11].dims
        return code.mul(code.mul(batch, kv_heads), summands)

    def body(code: Code, buffers: list[Buffer], task: Value, thread: Value) -> None:
        _Backward(code, sizes, buffers, task, thread).write()

    ranks = ((4, 4, 4, 4, 3, 3, 1, 1, 2, 2), (4, 5, 5, 2))
    handler(module, machine, name, ranks, tasks, body)
    return module


class _Backward:
    """Writes the code of one task."""

    def __init__(
        self, code: Code, sizes: Sizes, buffers: list[Buffer], task: Value, thread: Value
    ) -> None:
        self.code, self.sizes, self.builder = code, sizes, code.builder
        self.query, self.key, self.value, self.grad_out = buffers[:4]
        self.lse, self.delta, factor, blocks, low, high = buffers[4:10]
        self.grad_query, self.grad_key, self.grad_value, work = buffers[10:]
        _, length, heads, _ = self.query.dims
        _, kv_length, kv_heads, _ = self.key.dims
        most, self.block_k = block_sizes(code, blocks)
        base = code.at(work.data, code.mul(thread, work.dims[1]))
        named = parts(sizes, code.machine)
        self.scratch = addresses(code, base, named, most, self.block_k)
        group = code.div(heads, kv_heads)
        self.parts = code.div(self.grad_key.dims[3], group)
        self.part = code.rem(task, self.parts)
        pair = code.div(task, self.parts)
        batch, head = code.div(pair, heads), code.rem(pair, heads)
        #: Which of the sums for a head of keys this task gives.
        self.summand = code.add(code.mul(code.rem(head, group), self.parts), self.part)
        self.panels = Panels(
            code, sizes, batch, head, code.div(head, group), low, high,
            length, kv_length, heads, kv_heads, self.scratch,
        )  # fmt: skip
        self.factor = code.splat(code.load(factor.data, F32))
        #: Of the scores: of pairs the queries are as they are, others have the factor.
        self.exponent = code.constant(LOG2_E)
        if self.panels.paired:
            self.exponent = self.builder.fmul(self.factor, self.exponent)
        self.centred = is_centred(sizes.dtype)

    def write(self) -> None:
        code, sizes, panels, scratch = self.code, self.sizes, self.panels, self.scratch
        all_panels = code.ceil(panels.length, panels.width)
        # Panels part, part + parts, …: under a causal mask all parts have as much to do.
        count = code.ceil(code.most(code.sub(all_panels, self.part), 0), self.parts)
        panel_size = panels.dim * panels.width
        panels.fill(scratch["grad_queries"], code.mul(count, panel_size), 0.0)
        if self.centred:
            panels.fill(scratch["slope_sums"], code.mul(count, panels.width), 0.0)
            panels.fill(scratch["centre"], panels.dim, 0.0)
        with code.loop(0, panels.kv_length, self.block_k) as start:
            keys = code.least(self.block_k, code.sub(panels.kv_length, start))
            for array, size, part in (
                (self.key, sizes.head_dim, "keys"), (self.value, sizes.value_dim, "values"),
            ):  # fmt: skip
                place = panels.key_place(start, size)
                panels.load_rows(array, place, keys, size, scratch[part])
            if panels.paired:
                place = panels.key_place(start, sizes.head_dim)
                panels.load_terms(self.key, place, keys, sizes.head_dim, scratch["key_pairs"])
            if self.centred:
                self._sum_rows(self._by_keys("keys"), keys, panels.dim, scratch["centre"])
            panels.fill(scratch["grad_keys"], code.mul(keys, panels.dim), 0.0)
            panels.fill(scratch["grad_values"], code.mul(keys, panels.value_dim), 0.0)
            with code.loop(0, count) as panel:
                self._tile(panel, start, keys)
            self._store_keys("grad_keys", self.grad_key, start, keys, sizes.head_dim, self.factor)
            self._store_keys("grad_values", self.grad_value, start, keys, sizes.value_dim, None)
        factors = scratch["statistics"]
        panels.fill(factors, panels.width, self.factor)
        if self.centred:
            self._mean_key()
        with code.loop(0, count) as panel:
            source = code.at(scratch["grad_queries"], code.mul(panel, panel_size))
            if self.centred:
                self._take_centre(panel, source)
            panels.store_panel(
                self.grad_query, self._first_query(panel), sizes.head_dim, source, factors
            )

    def _first_query(self, panel: Value) -> Value:
        code = self.code
        number = code.add(code.mul(panel, self.parts), self.part)
        return code.mul(number, self.panels.width)

    def _tile(self, panel: Value, start: Value, count: Value) -> None:
        """What a panel of queries and a block of keys add to the gradients."""
        code, panels, ranges = self.code, self.panels, self.scratch["ranges"]
        first = self._first_query(panel)
        panels.load_ranges(first, ranges)
        skipped, rows, hidden = panels.visible(ranges, start, count)
        with code.when(self.builder.icmp_signed(">", rows, code.index(0))):
            self._load_queries(first)
            self._weights(skipped, rows)
            with code.when(hidden):
                self._hide(ranges, code.add(start, skipped), rows)
            if panels.paired:
                self._pack(rows)
            if self.centred:
                sums = code.at(self.scratch["slope_sums"], code.mul(panel, panels.width))
                self._sum_rows(self._by_keys("slopes"), rows, panels.width, sums)
            self._add(panel, skipped, rows, self._valid(first))

    def _valid(self, first: Value) -> Value:
        """How many queries of a panel there are."""
        panels = self.panels
        return self.code.least(panels.width, self.code.sub(panels.length, first))

    def _by_keys(self, part: str) -> str:
        """The part that holds the same with keys as the terms of sums."""
        return {"keys": "key_pairs", "slopes": "slope_pairs"}[part] if self.panels.paired else part

    def _load_queries(self, first: Value) -> None:
        """Reads queries and gradients of out, with queries in the lanes and as rows."""
        code, sizes, panels, scratch = self.code, self.sizes, self.panels, self.scratch
        head_dim, value_dim = sizes.head_dim, sizes.value_dim
        factor = None if panels.paired else self.factor
        panels.load_panel(self.query, first, head_dim, scratch["queries"], factor)
        panels.load_panel(self.grad_out, first, value_dim, scratch["grad_outs"])
        # Of pairs no more than there are: the last one's partner must be nothing.
        count = self._valid(first) if panels.paired else code.index(panels.width)
        for array, size, part in (
            (self.query, head_dim, "query_rows"),
            (self.grad_out, value_dim, "grad_out_rows"),
        ):

            def place(n: Value, size: int = size) -> Value:
                return panels.query_row(panels.within(first, n), size)

            panels.load_terms(array, place, count, size, scratch[part])
        for array, offset in ((self.lse, 0), (self.delta, panels.width)):
            with code.loop(0, panels.width) as lane:
                source = code.at(array.data, panels.statistic_row(panels.within(first, lane)))
                target = code.at(scratch["statistics"], code.add(lane, offset))
                code.store(code.load(source, F32), target)

    def _weights(self, skipped: Value, rows: Value) -> None:
        """The softmax's weights, and how the loss changes with the scores, [keys, queries]."""
        code, builder, panels, scratch = self.code, self.builder, self.panels, self.scratch
        width = panels.width
        for part, against, size, target in (
            ("keys", "queries", self.sizes.head_dim, "weights"),
            ("values", "grad_outs", self.sizes.value_dim, "slopes"),
        ):
            row = panels.words(padded(size, code.machine))
            left = code.at(scratch[part], code.mul(skipped, row))
            panels.multiply(
                Sum.STORE, (left, row, 1), (scratch[against], width), scratch[target],
                rows, size, width,
            )  # fmt: skip
        places = [
            code.at(scratch["statistics"], n * panels.lanes) for n in range(2 * panels.vectors)
        ]
        kept = [code.load_vector(place) for place in places]
        with code.loop(0, rows) as row:
            for vector in range(panels.vectors):
                score, slope = self._places(row, vector)
                power = self._power(code.load_vector(score), kept[vector])
                code.store_vector(power, score)
                change = builder.fsub(code.load_vector(slope), kept[panels.vectors + vector])
                code.store_vector(builder.fmul(power, change), slope)

    def _places(self, row: Value, vector: int) -> tuple[Value, Value]:
        code, panels = self.code, self.panels
        offset = code.add(code.mul(row, panels.width), vector * panels.lanes)
        weights, slopes = (self.scratch[part] for part in ("weights", "slopes"))
        return code.at(weights, offset), code.at(slopes, offset)

    def _power(self, score: Value, base: Value) -> Value:
        """exp(score - base · ln 2), at most 1, which only a rounding of the base exceeds."""
        code, builder = self.code, self.builder
        x = code.fma(score, self.exponent, builder.fneg(base))
        none = code.constant(0.0)
        return exp2(code, builder.select(builder.fcmp_ordered(">", x, none), none, x))

    def _hide(self, ranges: Value, begin: Value, rows: Value) -> None:
        """Keys that a query does not see have no weight."""
        code, none = self.code, self.code.constant(0.0)
        with code.loop(0, rows) as row:
            for vector in range(self.panels.vectors):
                seen = self.panels.seen(ranges, vector, code.add(begin, row))
                for place in self._places(row, vector):
                    kept = self.builder.select(seen, code.load_vector(place), none)
                    code.store_vector(kept, place)

    def _pack(self, rows: Value) -> None:
        """Weights and slopes as words, in place as [keys, queries / 2]; slopes by keys as well."""
        code, panels = self.code, self.panels
        with code.loop(0, rows, 2) as row:
            # Both rows are read before their place is written over.
            both = [self._row_of(row), self._row_of(code.add(row, 1))]
            for number, parts_of_row in enumerate(both):
                start = code.mul(code.add(row, number), panels.width // 2)
                for name, line in parts_of_row.items():
                    for vector in range(0, panels.vectors, 2):
                        words = side_by_side(code, *line[vector : vector + 2])
                        offset = code.add(start, vector // 2 * panels.lanes)
                        code.store_vector(words, code.at(self.scratch[name], offset))
            start = code.mul(code.div(row, 2), panels.width)
            slopes = zip(*(one["slopes"] for one in both), strict=True)
            for vector, (low, high) in enumerate(slopes):
                place = code.at(self.scratch["slope_pairs"], code.add(start, vector * panels.lanes))
                code.store_vector(pairs(code, low, high), place)

    def _row_of(self, row: Value) -> dict[str, list[Value]]:
        """The weights and slopes of a key."""
        places = [self._places(row, vector) for vector in range(self.panels.vectors)]
        read = (
            [self.code.load_vector(place) for place in part] for part in zip(*places, strict=True)
        )
        return dict(zip(("weights", "slopes"), read, strict=True))

    def _add(self, panel: Value, skipped: Value, rows: Value, valid: Value) -> None:
        """Adds the products with the weights and their slopes to the gradients."""
        code, sizes, panels, scratch = self.code, self.sizes, self.panels, self.scratch
        width, dim, value_dim = panels.width, panels.dim, panels.value_dim
        for part, against, size, target in (
            ("weights", "grad_out_rows", value_dim, "grad_values"),
            ("slopes", "query_rows", dim, "grad_keys"),
        ):
            panels.multiply(
                Sum.ADD, (scratch[part], panels.words(width), 1), (scratch[against], size),
                code.at(scratch[target], code.mul(skipped, size)), rows, valid, size,
            )  # fmt: skip
        keys = code.at(scratch[self._by_keys("keys")], code.mul(panels.words(skipped), dim))
        target = code.at(scratch["grad_queries"], code.mul(panel, dim * width))
        panels.multiply(
            Sum.ADD, (keys, 1, dim), (scratch[self._by_keys("slopes")], width), target,
            sizes.head_dim, rows, width,
        )  # fmt: skip

    def _sum_rows(self, part: str, rows: Value, width: int, target: Value) -> None:
        """Adds the sum of some rows, each ``width`` numbers, to a row of floats.

        Pairs are of rows.
        """
        code, lanes = self.code, self.panels.lanes
        places = [code.at(target, column) for column in range(0, width, lanes)]

        def step(row: Value, sums: list[Value]) -> list[Value]:
            start = code.at(self.scratch[part], code.mul(row, width))
            places = [code.at(start, n * lanes) for n in range(len(sums))]
            if self.panels.paired:
                words = [code.load(place, code.integers, align=4) for place in places]
                ones = pair_of_ones(code)
                return [
                    dot(code, word, ones, total) for word, total in zip(words, sums, strict=True)
                ]
            vectors = [code.load_vector(place) for place in places]
            return [code.builder.fadd(*both) for both in zip(sums, vectors, strict=True)]

        count = self.panels.words(rows)
        sums = code.fold(0, count, 1, [code.load_vector(place) for place in places], step)
        for place, total in zip(places, sums, strict=True):
            code.store_vector(total, place)

    def _mean_key(self) -> None:
        """The mean of all keys out of their sum; 0 where it is not finite."""
        code, builder, centre = self.code, self.code.builder, self.scratch["centre"]
        none = code.constant(0.0)
        count = builder.sitofp(self.panels.kv_length, F32)
        share = code.splat(builder.fdiv(F32(1.0), count))
        with code.loop(0, self.panels.dim, self.panels.lanes) as n:
            mean = builder.fmul(code.load_vector(code.at(centre, n)), share)
            finite = builder.fcmp_ordered("==", builder.fsub(mean, mean), none)
            code.store_vector(builder.select(finite, mean, none), code.at(centre, n))

    def _take_centre(self, panel: Value, gradient: Value) -> None:
        """Takes the part of the mean key from a panel's gradient of the queries."""
        code, panels = self.code, self.panels
        sums = code.at(self.scratch["slope_sums"], code.mul(panel, panels.width))
        offsets = [n * panels.lanes for n in range(panels.vectors)]
        totals = [code.builder.fneg(code.load_vector(code.at(sums, n))) for n in offsets]
        with code.loop(0, self.sizes.head_dim) as row:
            shared = code.splat(code.load(code.at(self.scratch["centre"], row), F32))
            line = code.at(gradient, code.mul(row, panels.width))
            for offset, total in zip(offsets, totals, strict=True):
                place = code.at(line, offset)
                code.store_vector(code.fma(shared, total, code.load_vector(place)), place)

    def _store_keys(
        self, part: str, array: Buffer, start: Value, count: Value, size: int, factor: Value | None
    ) -> None:
        """Writes this task's sums for a block of keys or values."""
        code, panels = self.code, self.panels
        row = padded(size, code.machine)
        summands = array.dims[3]
        with code.loop(0, count) as n:
            place = panels.key_row(code.add(start, n), 1)
            place = code.mul(code.add(code.mul(place, summands), self.summand), size)
            for column in range(0, row, panels.lanes):
                source = code.at(self.scratch[part], code.add(code.mul(n, row), column))
                vector = code.load_vector(source)
                if factor is not None:
                    vector = self.builder.fmul(vector, factor)
                target = code.at(array.data, code.add(place, column))
                store(code, vector, target, "float32", panels.mask(column, size))
