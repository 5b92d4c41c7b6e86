"""The schedule of plain attention: every query sees a band of keys.

Causal rule, local window and sequence lengths leave a contiguous range of tiles
for each query block; the ones in its middle are wholly visible and need no mask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..pallas.triton import Index
from .pallas_mha_kernels import Blocks, Run
from .pallas_mha_scores import Refs


@dataclasses.dataclass(frozen=True)
class Band:
    """Query q sees the keys q - left … q + right; None leaves a side open.

    Attributes:
        seq: Queries.
        kv_seq: Keys.
        left: Keys seen before the own position.
        right: Keys seen after the own position.
    """

    seq: int
    kv_seq: int
    left: int | None
    right: int | None

    def granules(self, blocks: Blocks) -> tuple[int, int]:
        """No block beyond the last is visited."""
        return blocks.q, blocks.k

    def keys(self, refs: Refs, blocks: Blocks, batch: Index, head: Index, i: Index) -> list[Run]:
        """The key blocks that the i-th query block visits."""
        first, last = i * blocks.q, i * blocks.q + blocks.q - 1
        limit: Index = self.kv_seq
        if "kv_lengths" in refs:
            limit = _least(limit, refs["kv_lengths"][batch])
        low, inner_low, high, inner_high = 0, 0, limit, limit
        if self.left is not None:
            low, inner_low = _most(0, first - self.left), _most(0, last - self.left)
        if self.right is not None:
            high = _least(limit, last + self.right + 1)
            inner_high = _least(limit, first + self.right + 1)
        elif self.kv_seq % blocks.k:
            high = _not_static(limit, first)
        if "q_lengths" in refs:
            high = jnp.where(first < refs["q_lengths"][batch], high, 0)
        return _runs(low, inner_low, inner_high, high, blocks.k, "mask" in refs)

    def queries(self, refs: Refs, blocks: Blocks, batch: Index, head: Index, i: Index) -> list[Run]:
        """The query blocks that visit the i-th key block."""
        first, last = i * blocks.k, i * blocks.k + blocks.k - 1
        limit: Index = self.seq
        if "q_lengths" in refs:
            limit = _least(limit, refs["q_lengths"][batch])
        low, inner_low, high, inner_high = 0, 0, limit, self.seq
        if self.right is not None:
            low, inner_low = _most(0, first - self.right), _most(0, last - self.right)
        if self.left is not None:
            high = _least(limit, last + self.left + 1)
            inner_high = _least(self.seq, first + self.left + 1)
        elif self.seq % blocks.q:
            high = _not_static(limit, first)
        if "kv_lengths" in refs:
            high = jnp.where(first < refs["kv_lengths"][batch], high, 0)
        return _runs(low, inner_low, inner_high, high, blocks.q, "mask" in refs)


def _runs(
    low: Index, inner_low: Index, inner_high: Index, high: Index, block: int, all_masked: bool
) -> list[Run]:
    """The blocks of positions low … high - 1; those inside the inner range are not masked."""
    start, stop = _div(low, block), _most(_div(low, block), _up(high, block))
    if all_masked:
        return [Run(start, stop, True)]
    inner_start = _least(_up(inner_low, block), stop)
    inner_stop = _most(_least(_div(inner_high, block), stop), inner_start)
    runs = [
        Run(start, inner_start, True),
        Run(inner_start, inner_stop, False),
        Run(inner_stop, stop, True),
    ]
    return [run for run in runs if not _surely_empty(run)]


def _not_static(limit: Index, first: Index) -> Index:
    # A lone tile at the ragged edge would be unrolled out of its loop, its addresses
    # held in registers all through the main loop, and these spilled. So the compiler
    # is not to know that there is one.
    return _least(limit, limit + first)


def _surely_empty(run: Run) -> bool:
    same = run.start is run.stop
    return same or (
        isinstance(run.start, int) and isinstance(run.stop, int) and run.start >= run.stop
    )


def _div(value: Index, block: int) -> Index:
    return value // block if isinstance(value, int) else lax.div(value, np.int32(block))


def _up(value: Index, block: int) -> Index:
    return _div(value + (block - 1), block)


def _least(*values: Index) -> Index:
    return _reduce(min, jnp.minimum, values)


def _most(*values: Index) -> Index:
    return _reduce(max, jnp.maximum, values)


def _reduce(
    static: Callable[..., int], traced: Callable[..., Index], values: tuple[Index, ...]
) -> Index:
    if all(isinstance(value, int) for value in values):
        return static(values)
    return functools.reduce(traced, values)
