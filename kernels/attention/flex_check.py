"""Checks of what is passed to ``flex_attention``, before anything is traced from it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...cache.errors import ProblemError
from ...cache.key import Problem
from ..arguments import as_arrays
from .flex_mods import Mods, alibi, document_ids
from .problem import problem_of

Array = jax.Array
_SCORE, _MASK = "(score, b, h, q, k) -> score", "(b, h, q, k) -> bool"
#: Sizes to try a function on, all different: what it returns must be of just these.
_TRIED = (2, 3, 5, 7)


def checked_arrays(query: Any, key: Any, value: Any) -> tuple[Problem, tuple[Any, ...]]:
    """The problem of a call, and its arrays.

    Raises:
        ProblemError: One is no array of four axes, or a shape or dtype does not fit.
    """
    names = ("query", "key", "value")
    arrays = as_arrays(names, (query, key, value))
    for name, axes, array in zip(names, ("T, N, H", "S, K, H", "S, K, Hv"), arrays, strict=True):
        if array.ndim != 4:
            raise ProblemError(
                f"{name} must be [B, {axes}], got shape {list(array.shape)}; "
                "add a batch axis of one where there is no batch"
            )
    seven = (*arrays, None, None, None, None)
    return problem_of(seven, is_causal=False, window=None, mode="fwd_bwd"), arrays


def check_score(score_mod: Any, problem: Problem) -> None:
    """Refuses a score function that cannot be called, or does not return a score for each.

    Raises:
        ProblemError: It cannot, or does not, or is ALiBi for another number of heads.
    """
    if score_mod is None:
        return
    if isinstance(score_mod, alibi) and score_mod.heads != problem.heads:
        raise ProblemError(
            f"score_mod is alibi({score_mod.heads}), this call has {problem.heads} heads; "
            f"pass alibi({problem.heads})"
        )
    _check_callable("score_mod", score_mod, 5, _SCORE)
    scores = jax.ShapeDtypeStruct(_TRIED, jnp.float32)
    found = _tried("score_mod", score_mod, (scores,), _SCORE)
    if found.shape != _TRIED or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ProblemError(
            f"score_mod must return a floating score for each that it is given: for scores "
            f"float32{list(_TRIED)} it returned {found.dtype}{list(found.shape)}; "
            "make it elementwise"
        )


def check_mask(mask_mod: Any, problem: Problem | None = None) -> None:
    """Refuses a mask function that cannot be called, or does not return booleans.

    Raises:
        ProblemError: It cannot, or does not, or its documents are not of the problem's size.
    """
    if mask_mod is None:
        return
    _check_callable("mask_mod", mask_mod, 4, _MASK)
    found = _tried("mask_mod", mask_mod, (), _MASK)
    if found.dtype != jnp.bool_:
        raise ProblemError(
            f"mask_mod must return booleans, got {found.dtype}; compare, or use score_mod to "
            "change scores"
        )
    if len(found.shape) > 4 or any(
        have not in (1, want) for have, want in zip(found.shape[::-1], _TRIED[::-1], strict=False)
    ):
        raise ProblemError(
            f"mask_mod must be elementwise: for positions that broadcast to {list(_TRIED)} it "
            f"returned shape {list(found.shape)}"
        )
    if problem is not None:
        for queries, keys in document_ids(mask_mod):
            _check_ids("segment_ids", queries, problem.batch, problem.seq)
            _check_ids("key_segment_ids", keys, problem.batch, problem.kv_seq)


def _check_ids(name: str, ids: Array, batch: int, length: int) -> None:
    if ids.shape != (batch, length):
        raise ProblemError(
            f"{name} of document has shape {list(ids.shape)}; for this call it must be "
            f"[{batch}, {length}]"
        )


def _check_callable(name: str, function: Any, count: int, form: str) -> None:
    if not callable(function):
        raise ProblemError(f"{name} must be a function {form} or None, got {function!r:.80}")
    try:
        inspect.signature(function).bind(*[None] * count)
    except ValueError:  # a builtin that does not tell
        return
    except TypeError as error:
        raise ProblemError(f"{name} must take {count} arguments, {form}: {error}") from None


def _tried(name: str, function: Any, first: Sequence[Any], form: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype that a function returns for positions that broadcast together."""
    positions = [
        jax.ShapeDtypeStruct(tuple(n if i == axis else 1 for i in range(4)), jnp.int32)
        for axis, n in enumerate(_TRIED)
    ]
    mods, arrays = Mods.split(function)

    def call(arrays: Sequence[Array], *given: Any) -> Any:
        return mods.joined(arrays)[0](*given)

    traced, found = jax.make_jaxpr(call, return_shape=True)(arrays, *first, *positions)
    if not isinstance(found, jax.ShapeDtypeStruct):
        raise ProblemError(f"{name} must return one array, {form}, got {type(found).__name__}")
    captured = next(_captured(traced), None)
    if captured is not None:
        raise ProblemError(
            f"{name} reads an array of shape {list(captured)} from outside, which no kernel can; "
            f"pass the array with it: jax.tree_util.Partial(f, array), where f takes it first, "
            "f(array, …), and indexes all of its axes, as array[b, q]"
        )
    return found


def _captured(traced: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of the arrays, but for single numbers, that a traced function holds."""
    held = [jnp.shape(one) for one in traced.consts]
    for equation in traced.jaxpr.eqns:
        held += [jnp.shape(v.val) for v in equation.invars if hasattr(v, "val")]
    return (shape for shape in held if shape)
