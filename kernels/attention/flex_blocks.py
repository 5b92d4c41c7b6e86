"""Block masks: which tiles of scores a mask leaves empty, full or partly seen.

Computed once and used by every kernel of a call: empty tiles are never visited,
and full ones are not masked.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...cache.errors import ProblemError
from ..arguments import check_integer, is_integer
from .flex_check import check_mask
from .flex_mods import Mod, Mods

Array = jax.Array
#: A good size for a mask's blocks: kernels divide it by powers of two.
BLOCK = 128


class Lists(NamedTuple):
    """Which blocks each block row visits: counts [B, N, rows], indices [B, N, rows, columns].

    B and N are 1 where the mask does not depend on the batch entry or head.
    """

    partial_count: Any
    partial_index: Any
    full_count: Any
    full_index: Any


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A mask function and the blocks that it leaves; made by ``create_block_mask``.

    Attributes:
        keys: For each block of queries, the blocks of keys it visits.
        queries: For each block of keys, the blocks of queries that visit it.
        mask_mod: The mask function.
        seq: Queries.
        kv_seq: Keys.
        block_q: Queries of a block.
        block_k: Keys of a block.
    """

    keys: Lists
    queries: Lists
    mask_mod: Mod
    seq: int
    kv_seq: int
    block_q: int
    block_k: int

    @property
    def sparsity(self) -> Array:
        """The share of blocks that are never visited."""
        visited = jnp.sum(self.keys.partial_count) + jnp.sum(self.keys.full_count)
        return 1.0 - visited / self.keys.partial_index.size


def _flatten(mask: BlockMask) -> Any:
    mods, arrays = Mods.split(mask.mask_mod)
    static = (mods, mask.seq, mask.kv_seq, mask.block_q, mask.block_k)
    return (mask.keys, mask.queries, arrays), static


def _unflatten(static: Any, children: Any) -> BlockMask:
    keys, queries, arrays = children
    mods, *sizes = static
    return BlockMask(keys, queries, mods.joined(arrays)[0], *sizes)


jax.tree_util.register_pytree_node(BlockMask, _flatten, _unflatten)


def create_block_mask(
    mask_mod: Mod,
    batch: int | None,
    heads: int | None,
    seq: int,
    kv_seq: int,
    *,
    block_q: int = BLOCK,
    block_k: int = BLOCK,
) -> BlockMask:
    """Which blocks a mask leaves empty, full or partly seen.

    Memory is that of one row of blocks; a mask without arrays is worked out once
    and then a constant of the program.

    Args:
        mask_mod: ``(b, h, q, k) -> bool``, elementwise.
        batch: B, or None if the mask does not depend on it.
        heads: N, or None if the mask does not depend on it.
        seq: Queries, T.
        kv_seq: Keys, S.
        block_q: Queries of a block, a power of two of at least 16.
        block_k: Keys of a block, likewise.

    Raises:
        ProblemError: A size is not positive, a block not such a power of two, or the
            mask no elementwise function.
    """
    sizes = {"seq": seq, "kv_seq": kv_seq, "batch": batch, "heads": heads}
    for name, size in sizes.items():
        if size is None and name in ("batch", "heads"):
            continue
        check_integer(name, size, 1)
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if not is_integer(block) or block < 16 or block & (block - 1):
            raise ProblemError(f"{name} must be a power of two of at least 16, got {block!r}")
    if mask_mod is None:
        raise ProblemError("mask_mod must be a function (b, h, q, k) -> bool, got None")
    check_mask(mask_mod)
    mods, arrays = Mods.split(mask_mod)
    shape = (batch or 1, heads or 1, seq, kv_seq, block_q, block_k)
    if arrays:
        states = _states(mods, shape, arrays)
        keys, queries = _lists(states, jnp), _lists(states.swapaxes(-1, -2), jnp)
    else:
        keys, queries = _constant_lists(mods, shape)
    return BlockMask(keys, queries, mask_mod, seq, kv_seq, block_q, block_k)


@functools.lru_cache(maxsize=256)
def _constant_lists(mods: Mods, shape: tuple[int, ...]) -> tuple[Lists, Lists]:
    with jax.ensure_compile_time_eval():
        states = np.asarray(_states(mods, shape, []))
    return _lists(states, np), _lists(states.swapaxes(-1, -2), np)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _states(mods: Mods, shape: tuple[int, ...], arrays: list[Array]) -> Array:
    """For each block 0 if it is empty, 1 if partly seen, 2 if full: int8 [B, N, rows, columns]."""
    batch, heads, seq, kv_seq, block_q, block_k = shape
    (mask_mod,) = mods.joined(arrays)
    rows, columns = -(-seq // block_q), -(-kv_seq // block_k)
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    h = jnp.arange(heads, dtype=jnp.int32)[None, :, None, None]
    k = jnp.arange(columns * block_k, dtype=jnp.int32)[None, None, None, :]

    def row(i: Array) -> Array:
        q = (i * block_q + jnp.arange(block_q, dtype=jnp.int32))[None, None, :, None]
        inside = (q < seq) & (k < kv_seq)
        seen = mask_mod(b, h, jnp.minimum(q, seq - 1), jnp.minimum(k, kv_seq - 1)) & inside
        seen = jnp.broadcast_to(seen, (batch, heads, block_q, columns * block_k))
        blocks = seen.reshape(batch, heads, block_q, columns, block_k)
        # A block that reaches beyond the sequence is masked, so never full.
        return blocks.any((2, 4)).astype(jnp.int8) + blocks.all((2, 4)).astype(jnp.int8)

    states = lax.map(row, jnp.arange(rows, dtype=jnp.int32))
    return jnp.moveaxis(states, 0, 2)


def _lists(states: Any, xp: Any) -> Lists:
    lists = []
    for state in (1, 2):
        here = states == state
        order = xp.argsort(~here, axis=-1, stable=True)
        lists += [here.sum(-1).astype(np.int32), order.astype(np.int32)]
    return Lists(*lists)


def band_lists(
    seq: int, kv_seq: int, left: int | None, right: int | None, block_q: int, block_k: int
) -> tuple[Lists, Lists]:
    """The lists of a band of keys q - left … q + right, worked out without looking at each pair."""
    first_q = np.arange(-(-seq // block_q))[:, None] * block_q
    first_k = np.arange(-(-kv_seq // block_k))[None, :] * block_k
    last_q = np.minimum(first_q + block_q, seq) - 1
    last_k = np.minimum(first_k + block_k, kv_seq) - 1
    some = np.ones((first_q.size, first_k.size), bool)
    full = (first_q + block_q <= seq) & (first_k + block_k <= kv_seq)
    if right is not None:
        some &= first_k - last_q <= right
        full &= last_k - first_q <= right
    if left is not None:
        some &= first_q - last_k <= left
        full &= last_q - first_k <= left
    states = (some.astype(np.int8) + (some & full))[None, None]
    return _lists(states, np), _lists(states.swapaxes(-1, -2), np)
