"""The scores of one tile of queries and keys, inside a fused attention kernel.

One place says what a score is: scaled, biased, or passed through a user's
function, and which keys a query may see. All kernels, forward and backward,
plain and flexible, ask it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..pallas import triton
from .flex_mods import Mod, Mods

Array = jax.Array
Index = triton.Index
Refs = Mapping[str, Any]

#: exp(x) = exp2(x · log2 e); the hardware has exp2 alone.
LOG2E = math.log2(math.e)
LN2 = math.log(2)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Which scores: the rows are queries and the columns keys, or the reverse.

    Attributes:
        batch: Index of the batch entry.
        head: Index of the query head.
        row_start: The first query.
        row_count: Queries.
        column_start: The first key.
        column_count: Keys.
        masked: Whether a key of the tile may be hidden from a query of it.
        ragged_rows: Whether a query may lie beyond the last.
        ragged_columns: Whether a key may lie beyond the last.
        keys_first: Whether keys are rows of the arrays.
    """

    batch: Index
    head: Index
    row_start: Index
    row_count: int
    column_start: Index
    column_count: int
    masked: bool
    ragged_rows: bool
    ragged_columns: bool
    keys_first: bool = False

    @property
    def rows(self) -> Array:
        """Index of each query, int32 [rows, 1], or [1, rows] where keys come first."""
        return triton.positions(self.row_start, self.row_count, int(self.keys_first))

    @property
    def columns(self) -> Array:
        """Index of each key, int32 [1, columns], or [columns, 1] where keys come first."""
        return triton.positions(self.column_start, self.column_count, int(not self.keys_first))


@dataclasses.dataclass(frozen=True)
class Scores:
    """What is static about the scores of a call.

    Attributes:
        seq: Queries.
        kv_seq: Keys.
        scale: Factor of the products of queries and keys.
        left: Keys that a query sees before its own position; None for all.
        right: Keys that a query sees after its own position; None for all.
        mods: The score and the mask function; None where there is neither.
    """

    seq: int
    kv_seq: int
    scale: float
    left: int | None = None
    right: int | None = None
    mods: Mods | None = None

    @property
    def has_score_mod(self) -> bool:
        """Whether a user's function changes the scores."""
        return self.mods is not None and self.mods.has_score_mod

    def of(self, refs: Refs, products: Array, tile: Tile) -> tuple[Array, float]:
        """Scores from the products of queries and keys.

        Returns:
            Scores and a positive factor that takes them to base 2, so that a
            probability is exp2(score · factor - maximum). Hidden keys get -inf.
        """
        score_mod, _ = self._mods(refs)
        factor = self.scale * LOG2E
        if score_mod is not None or "bias" in refs or self.scale <= 0:
            scores, factor = self._changed(refs, products, tile, score_mod), 1.0
        else:
            scores = products
        seen = self._seen(refs, tile)
        return (scores if seen is None else jnp.where(seen, scores, -jnp.inf)), factor

    def gradient(self, refs: Refs, products: Array, tile: Tile, upstream: Array) -> Array:
        """The gradient by the scaled products, from that by the scores."""
        if self.mods is None:
            return upstream
        scaled = products * self.scale
        position = (tile.batch, tile.head, tile.rows, tile.columns)
        score_mod = self.mods.of_score(refs, scaled, *position)
        if score_mod is None:
            return upstream
        # Each score depends on its own product alone, so a directional
        # derivative is the gradient.
        return jax.jvp(score_mod, (scaled,), (upstream,))[1]

    def may_be_empty(self, refs: Refs) -> bool:
        """Whether a row of a tile that is not masked may be all -inf."""
        return "bias" in refs or self._mods(refs)[0] is not None

    def _mods(self, refs: Refs) -> tuple[Mod | None, Mod | None]:
        return (None, None) if self.mods is None else self.mods(refs)

    def _changed(self, refs: Refs, products: Array, tile: Tile, score_mod: Any) -> Array:
        if score_mod is not None:
            scores = score_mod(
                products * self.scale, tile.batch, tile.head, tile.rows, tile.columns
            )
            return scores.astype(jnp.float32) * LOG2E
        scores = products * (self.scale * LOG2E)
        if "bias" in refs:
            scores += pairs(refs["bias"], tile, self).astype(jnp.float32) * LOG2E
        return scores

    def _seen(self, refs: Refs, tile: Tile) -> Array | None:
        """Which keys of a tile are seen; None for all."""
        if not tile.masked:
            return None
        conditions: list[Array | None] = []
        if not tile.keys_first:  # where keys are rows, hidden ones are never stored
            if "kv_lengths" in refs:
                conditions.append(tile.columns < refs["kv_lengths"][tile.batch])
            if tile.ragged_columns:
                conditions.append(tile.columns < self.kv_seq)
        if self.right is not None:
            conditions.append(tile.columns - tile.rows <= self.right)
        if self.left is not None:
            conditions.append(tile.rows - tile.columns <= self.left)
        if "mask" in refs:
            conditions.append(pairs(refs["mask"], tile, self))
        _, mask_mod = self._mods(refs)
        if mask_mod is not None:
            conditions.append(mask_mod(tile.batch, tile.head, tile.rows, tile.columns))
        return triton.every(conditions)


def pairs(ref: Any, tile: Tile, scores: Scores) -> Array:
    """A tile of a bias or mask, each axis 1 or full of [B, N, T, S], to broadcast with scores."""
    full = (ref.shape[2] > 1, ref.shape[3] > 1)
    index = [
        tile.batch if ref.shape[0] > 1 else 0,
        tile.head if ref.shape[1] > 1 else 0,
        triton.span(tile.row_start, tile.row_count) if full[0] else 0,
        triton.span(tile.column_start, tile.column_count) if full[1] else 0,
    ]
    shape = (tile.row_count if full[0] else 1, tile.column_count if full[1] else 1)
    valid = []
    if full[0] and tile.ragged_rows:
        valid.append(triton.positions(tile.row_start, tile.row_count, 0) < scores.seq)
    if full[1] and tile.ragged_columns:
        valid.append(triton.positions(tile.column_start, tile.column_count, 1) < scores.kv_seq)
    inside = triton.every(valid)
    if inside is not None:
        loaded = tuple(size for size, varies in zip(shape, full, strict=True) if varies)
        inside = jnp.broadcast_to(inside, shape).reshape(loaded)
    read = triton.load if jnp.issubdtype(ref.dtype, jnp.floating) else triton.load_flags
    block = read(ref, tuple(index), inside).reshape(shape)
    return block.T if tile.keys_first else block
