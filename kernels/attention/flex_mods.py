"""Score and mask functions for ``flex_attention``, and how they are combined.

A mask function ``(b, h, q, k) -> bool`` says whether query q sees key k; a score
function ``(score, b, h, q, k) -> score`` changes a score. Both are elementwise;
the conventions are those of FlexAttention (https://arxiv.org/abs/2412.05496).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...cache.errors import ProblemError
from ..arguments import check_integer
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

    def __post_init__(self) -> None:
        check_integer("left", self.left, 0)
        check_integer("right", self.right, 0)

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k - q <= self.right) & (q - k <= self.left)


@dataclasses.dataclass(frozen=True)
class prefix:
    """Every query sees the first ``length`` keys, and the keys up to its own position."""

    length: int

    def __post_init__(self) -> None:
        check_integer("length", self.length, 0)

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < self.length) | (k <= q)


@dataclasses.dataclass(frozen=True)
class alibi:
    """Adds a slope times k - q, steeper for later of ``heads`` heads (https://arxiv.org/abs/2108.12409)."""

    heads: int

    def __post_init__(self) -> None:
        check_integer("heads", self.heads, 1)

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        slope = jnp.exp2((h + 1) * jnp.float32(-8.0 / self.heads))
        return score + slope * (k - q).astype(jnp.float32)


def document(segment_ids: Array, key_segment_ids: Array | None = None) -> Mod:
    """A query sees the keys of its own document.

    Args:
        segment_ids: int32 [B, T], the document of each query.
        key_segment_ids: int32 [B, S]; that of the queries if None.

    Raises:
        ProblemError: One is no array of integers with two axes.
    """
    queries = _ids("segment_ids", segment_ids)
    keys = queries if key_segment_ids is None else _ids("key_segment_ids", key_segment_ids)
    return jax.tree_util.Partial(_same_document, queries, keys)


def _ids(name: str, ids: Any) -> Array:
    try:
        found = jnp.asarray(ids)
    except (TypeError, ValueError):
        raise ProblemError(f"{name} must be an array, got {type(ids).__name__}") from None
    if found.ndim != 2 or not jnp.issubdtype(found.dtype, jnp.integer):
        raise ProblemError(
            f"{name} must be integers [B, length], got {found.dtype}{list(found.shape)}"
        )
    return found


def document_ids(mask: Any) -> Iterator[tuple[Array, Array]]:
    """The ids of queries and of keys of every ``document`` in a mask."""
    if not isinstance(mask, jax.tree_util.Partial):
        return
    if mask.func is _same_document:
        yield mask.args[0], mask.args[1]
    elif mask.func in (_all_of, _any_of):
        for one in mask.args[0]:
            yield from document_ids(one)


def _same_document(queries: Any, keys: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return queries[b, q] == keys[b, k]


def both(*masks: Mod) -> Mod:
    """A query sees the keys that every mask shows it."""
    return jax.tree_util.Partial(_all_of, _masks("both", masks))


def either(*masks: Mod) -> Mod:
    """A query sees the keys that any mask shows it."""
    return jax.tree_util.Partial(_any_of, _masks("either", masks))


def _masks(name: str, masks: tuple[Mod, ...]) -> tuple[Mod, ...]:
    if not masks or not all(map(callable, masks)):
        raise ProblemError(f"{name} takes mask functions, one at least, got {masks!r:.80}")
    return masks


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

    @property
    def has_score_mod(self) -> bool:
        """Whether there is a score function."""
        return self.joined(leaf for leaf in self.leaves if leaf is _ARRAY)[0] is not None

    def __call__(self, refs: Mapping[str, Any]) -> Any:
        """The functions inside a kernel, which read the references ``mod0``, ``mod1``…"""
        return self.joined([_Lookup(ref) if ref.shape else ref[...] for ref in self._refs(refs)])

    def of_score(self, refs: Mapping[str, Any], score: Array, *position: Any) -> Mod | None:
        """The score function at some positions, as a function of the score alone.

        What it reads from arrays is read beforehand, since jax does not
        differentiate a function that loads.
        """
        reads: list[Array] = []
        recording = [_Lookup(r, reads) if r.shape else r[...] for r in self._refs(refs)]
        score_mod = self.joined(recording)[0]
        if score_mod is None:
            return None
        score_mod(score, *position)
        replay = iter(reads)
        ready = [_Replay(replay, r.shape) if r.shape else r[...] for r in self._refs(refs)]
        again = self.joined(ready)[0]
        return lambda score: again(score, *position)

    def _refs(self, refs: Mapping[str, Any]) -> list[Any]:
        return [refs[f"mod{i}"] for i in range(sum(leaf is _ARRAY for leaf in self.leaves))]


def same_functions(one: Mod, other: Mod) -> bool:
    """Whether two functions are the same, but for the arrays that they read."""
    return one is other or Mods.split(one)[0] == Mods.split(other)[0]


class _Lookup:
    """An array in a kernel, read elementwise by indices that broadcast together."""

    def __init__(self, ref: Any, reads: list[Array] | None = None):
        self._ref = ref
        self._reads = reads
        self.shape = ref.shape

    def __getitem__(self, index: Any) -> Array:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != len(self.shape):
            raise IndexError(f"index all {len(self.shape)} axes of the array, got {len(index)}")
        # Positions beyond the sequence are asked for too, at ragged edges.
        inside = [
            jnp.clip(jnp.asarray(part, jnp.int32), 0, size - 1)
            for part, size in zip(index, self.shape, strict=True)
        ]
        load = triton.load_flags if self._ref.dtype == jnp.bool_ else triton.load
        read = load(self._ref, tuple(jnp.broadcast_arrays(*inside)))
        if self._reads is not None:
            self._reads.append(read)
        return read


class _Replay:
    """Gives again, in order, what the lookups of a function have read."""

    def __init__(self, reads: Iterator[Array], shape: tuple[int, ...]):
        self._reads = reads
        self.shape = shape

    def __getitem__(self, index: Any) -> Array:
        return next(self._reads)
