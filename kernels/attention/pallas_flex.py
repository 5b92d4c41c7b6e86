"""`pallas_flex`: block-sparse fused attention with score and mask functions.

The kernels are those of `pallas_mha`; lists of blocks say which tiles they visit.
As an implementation of the op it serves plain, causal and windowed attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cache.key import Config, Device, Problem
from ..op import Implementation
from ..pallas import triton
from ..pallas.triton import Index
from . import pallas_mha_space as spaces
from .flex_blocks import BlockMask, Lists, band_lists
from .flex_mods import Mod, Mods
from .pallas_mha import finish, make_call, sizes_of
from .pallas_mha_band import Band
from .pallas_mha_calls import attend
from .pallas_mha_kernels import Blocks, Run
from .pallas_mha_scores import Refs, Scores

Array = jax.Array
_BLOCK_NAMES = ("block_q", "block_q_dq", "block_q_dkv"), ("block_k", "block_k_dq", "block_k_dkv")


@dataclasses.dataclass(frozen=True)
class Listed:
    """A schedule read from lists of blocks.

    Attributes:
        block_q: Queries of a block of the lists, a multiple of every kernel's.
        block_k: Keys of a block of the lists, likewise.
    """

    block_q: int
    block_k: int

    def granules(self, blocks: Blocks) -> tuple[int, int]:
        """The blocks of the lists, whose last may reach beyond the last of the kernel."""
        return self.block_q, self.block_k

    def keys(self, refs: Refs, blocks: Blocks, batch: Index, head: Index, i: Index) -> list[Run]:
        """The key blocks that the i-th query block visits."""
        row, _ = triton.divide(i, self.block_q // blocks.q)
        return _runs(refs, "keys", batch, head, row, self.block_k // blocks.k)

    def queries(self, refs: Refs, blocks: Blocks, batch: Index, head: Index, i: Index) -> list[Run]:
        """The query blocks that visit the i-th key block."""
        row, _ = triton.divide(i, self.block_k // blocks.k)
        return _runs(refs, "queries", batch, head, row, self.block_q // blocks.q)


def _runs(refs: Refs, side: str, batch: Index, head: Index, row: Index, split: int) -> list[Run]:
    """The blocks of a row of the lists, each cut into ``split`` blocks of the kernel."""
    lists = refs[f"{side}_lists"]
    b, h = (batch if lists.shape[0] > 1 else 0), (head if lists.shape[1] > 1 else 0)
    runs = []
    for kind, masked in enumerate((False, True)):

        def block(n: Index, kind: int = kind) -> Index:
            listed, part = triton.divide(n, split)
            return triton.load(lists, (b, h, row, kind, listed + 1)) * split + part

        stop = triton.load(lists, (b, h, row, kind, 0)) * split
        runs.append(Run(0, stop, masked, block))
    return runs


def _list_arrays(keys: Lists, queries: Lists) -> dict[str, Any]:
    return {"keys_lists": _packed(keys), "queries_lists": _packed(queries)}


def _packed(lists: Lists) -> Array:
    """Full, then partly seen blocks of each row, each behind its count.

    int32 [B, N, rows, 2, 1 + columns]. One array, since XLA makes the counts alone,
    which may all be equal, anew in each call, and in temporary memory.
    """
    xp = np if all(isinstance(array, np.ndarray) for array in lists) else jnp
    kinds = [
        xp.concatenate([count[..., None], index], axis=-1)
        for count, index in (
            (lists.full_count, lists.full_index),
            (lists.partial_count, lists.partial_index),
        )
    ]
    return jnp.asarray(xp.stack(kinds, axis=-2))


def pallas_flex(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None,
    return_residual: bool = False,
    config: Config,
) -> Any:
    """Attention over a list of the tiles that are seen. Shapes as ``shapetune.attention``.

    ``bias``, ``mask`` and the lengths must be None; ``flex_attention`` takes a
    function instead.
    """
    del bias, mask, query_seq_lengths, key_value_seq_lengths
    sizes = sizes_of(query, key, value)
    left, right = local_window_size if local_window_size is not None else (None, None)
    if is_causal:
        right = 0
    schedule: Band | Listed = Band(sizes.seq, sizes.kv_seq, None, None)
    arrays = {"query": query, "key": key, "value": value}
    if left is not None or right is not None:
        schedule = Listed(*(_largest(config, names) for names in _BLOCK_NAMES))
        lists = band_lists(sizes.seq, sizes.kv_seq, left, right, schedule.block_q, schedule.block_k)
        arrays |= _list_arrays(*lists)
    scores = Scores(sizes.seq, sizes.kv_seq, float(scale), left, right)
    call = make_call(sizes, scores, schedule, config, query.dtype)
    return finish(*attend(call, return_residual, arrays))


def _largest(config: Config, names: tuple[str, ...]) -> int:
    return max(int(config[name]) for name in names if name in config)


def attend_flexibly(
    query: Array,
    key: Array,
    value: Array,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    block_mask: BlockMask | None,
    *,
    scale: float,
    return_residual: bool,
    config: Config,
) -> Any:
    """Attention with a score and a mask function; a mask comes with its block mask."""
    sizes = sizes_of(query, key, value)
    mods, read = Mods.split(score_mod, mask_mod)
    arrays = {"query": query, "key": key, "value": value}
    arrays |= {f"mod{i}": jax.lax.stop_gradient(array) for i, array in enumerate(read)}
    schedule: Band | Listed = Band(sizes.seq, sizes.kv_seq, None, None)
    if block_mask is not None:
        schedule = Listed(block_mask.block_q, block_mask.block_k)
        arrays |= _list_arrays(block_mask.keys, block_mask.queries)
        config = _within(config, block_mask)
    scores = Scores(sizes.seq, sizes.kv_seq, float(scale), mods=mods)
    call = make_call(sizes, scores, schedule, config, query.dtype)
    return finish(*attend(call, return_residual, arrays))


def _within(config: Config, block_mask: BlockMask) -> Mapping[str, Any]:
    """The config with no block larger than those of the mask."""
    limits = dict.fromkeys(_BLOCK_NAMES[0], block_mask.block_q)
    limits |= dict.fromkeys(_BLOCK_NAMES[1], block_mask.block_k)
    return {
        name: min(int(value), limits[name]) if name in limits else value
        for name, value in config.items()
    }


def _supports(problem: Problem, device: Device) -> str | None:
    for word in problem.features:
        if word.split("[")[0] in ("bias", "mask", "q_lengths", "kv_lengths"):
            return f"it takes a function in place of {word}: see shapetune.flex_attention"
    return spaces.supports(problem, device)


def _default_config(problem: Problem, device: Device) -> Config:
    """That of `pallas_mha`; where lists of blocks take registers too, on more warps."""
    config = dict(spaces.default_config(problem, device))
    narrow = max(problem.dim, problem.value_dim) <= 64
    listed = problem.window is not None or (problem.causal and problem.dtype == "float32")
    return config | {"num_warps": 8} if narrow and listed else config


IMPLEMENTATION = Implementation(
    name="pallas_flex",
    function=pallas_flex,
    version=2,
    space=spaces.space,
    supports=_supports,
    default_config=_default_config,
    own_gradient=True,
    automatic=lambda problem, device: device.platform == "cuda",
)
