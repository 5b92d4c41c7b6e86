"""Score and mask functions for ``flex_attention``, and how they are combined.

A mask function ``(b, h, q, k) -> bool`` says whether query q sees key k; a score
function ``(score, b, h, q, k) -> score`` changes a score. Both are elementwise;
the conventions are those of FlexAttention (https://arxiv.org/abs/2412.05496).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ..pallas import triton

Array = jax.Array
Mod = Callable[..., Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A query sees the keys up to its own position."""
    return k <= q


@dataclasses.dataclass(frozen=True)
class local_window:
    """A query sees ``left`` keys before its own position and ``right`` after it."""

    left: int
    right: int

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k - q <= self.right) & (q - k <= self.left)


@dataclasses.dataclass(frozen=True)
class prefix:
    """Every query sees the first ``length`` keys, and the keys up to its own position."""

    length: int

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < self.length) | (k <= q)


@dataclasses.dataclass(frozen=True)
class alibi:
    """Adds a slope times k - q, steeper for later of ``heads`` heads (https://arxiv.org/abs/2108.12409)."""

    heads: int

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        slope = jnp.exp2((h + 1) * jnp.float32(-8.0 / self.heads))
        return score + slope * (k - q).astype(jnp.float32)


def document(segment_ids: Array, key_segment_ids: Array | None = None) -> Mod:
    """A query sees the keys of its own document.

    Args:
        segment_ids: int32 [B, T], the document of each query.
        key_segment_ids: int32 [B, S]; that of the queries if None.
    """
    keys = segment_ids if key_segment_ids is None else key_segment_ids
    return jax.tree_util.Partial(_same_document, segment_ids, keys)


def _same_document(queries: Any, keys: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return queries[b, q] == keys[b, k]


def both(*masks: Mod) -> Mod:
    """A query sees the keys that every mask shows it."""
    return jax.tree_util.Partial(_all_of, masks)


def either(*masks: Mod) -> Mod:
    """A query sees the keys that any mask shows it."""
    return jax.tree_util.Partial(_any_of, masks)


def _all_of(masks: tuple[Mod, ...], *position: Any) -> Any:
    return functools.reduce(jnp.logical_and, [mask(*position) for mask in masks])


def _any_of(masks: tuple[Mod, ...], *position: Any) -> Any:
    return functools.reduce(jnp.logical_or, [mask(*position) for mask in masks])


class _Array:
    """Stands for an array in the static part of some mods."""


_ARRAY = _Array()


@dataclasses.dataclass(frozen=True)
class Mods:
    """The static part of a (score_mod, mask_mod) pair, apart from the arrays they read."""

    structure: Any
    leaves: tuple[Any, ...]

    @classmethod
    def split(cls, *mods: Mod | None) -> tuple[Mods, list[Array]]:
        """The static part of some functions, and the arrays that they read."""
        leaves, structure = jax.tree_util.tree_flatten(mods)
        arrays = [jnp.asarray(leaf) for leaf in leaves if not callable(leaf)]
        static = tuple(leaf if callable(leaf) else _ARRAY for leaf in leaves)
        return cls(structure, static), arrays

    def joined(self, arrays: Any) -> Any:
        """The functions again, which read ``arrays``."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is _ARRAY else leaf for leaf in self.leaves]
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def __call__(self, refs: Mapping[str, Any]) -> Any:
        """The functions inside a kernel, which read the references ``mod0``, ``mod1``…"""
        count = sum(leaf is _ARRAY for leaf in self.leaves)
        return self.joined([_readable(refs[f"mod{i}"]) for i in range(count)])


def _readable(ref: Any) -> Any:
    return _Lookup(ref) if ref.shape else ref[...]


class _Lookup:
    """An array in a kernel, read elementwise by indices that broadcast together."""

    def __init__(self, ref: Any):
        self._ref = ref
        self.shape = ref.shape

    def __getitem__(self, index: Any) -> Array:
        index = index if isinstance(index, tuple) else (index,)
        parts = [jnp.asarray(part, jnp.int32) for part in index]
        if len(parts) != len(self.shape):
            raise IndexError(f"index all {len(self.shape)} axes of the array, got {len(parts)}")
        # Positions beyond the sequence are asked for too, at ragged edges.
        inside = [jnp.clip(p, 0, n - 1) for p, n in zip(parts, self.shape, strict=True)]
        read = triton.load_flags if self._ref.dtype == jnp.bool_ else triton.load
        return read(self._ref, tuple(map(_position, jnp.broadcast_arrays(*inside))))


def _position(index: Any) -> Any:
    # A position has no derivative, but jax hands it in with a zero one, which
    # loads do not take.
    while isinstance(index, ad.JVPTracer):
        index = index.primal
    return index
