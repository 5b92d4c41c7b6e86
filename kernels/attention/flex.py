"""``shapetune.flex_attention``: attention with a user's score and mask functions.

On a GPU it is one block-sparse fused kernel; elsewhere plain JAX, which holds all
scores at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...cache.errors import ConfigError, ProblemError, UnknownNameError
from ...cache.key import Problem, Value
from ..arguments import check_config
from ..device import current_device
from . import pallas_flex
from .api import as_number
from .flex_blocks import BlockMask, create_block_mask
from .flex_check import check_mask, check_score, checked_arrays
from .flex_mods import (
    Mod,
    Mods,
    alibi,
    both,
    causal,
    document,
    either,
    local_window,
    prefix,
    same_functions,
)

__all__ = [
    "BlockMask",
    "alibi",
    "both",
    "causal",
    "create_block_mask",
    "document",
    "either",
    "flex_attention",
    "local_window",
    "prefix",
]

Array = jax.Array


def flex_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    implementation: str = "default",
    config: Mapping[str, Value] | None = None,
    return_residual: bool = False,
) -> Any:
    """Attention with functions of scores and positions (FlexAttention, https://arxiv.org/abs/2412.05496).

    A function may use arithmetic of ``jax.numpy`` and Python numbers. One that
    reads arrays takes them first, ``f(array, b, h, q, k)``, indexes all of their
    axes, as ``array[b, q]``, and is passed as ``jax.tree_util.Partial(f, array)``.
    No gradient passes into such arrays. Functions must be elementwise: they get
    arrays of positions that broadcast together.

    Args:
        query: ``[B, T, N, H]``.
        key: ``[B, S, K, H]``; N is a multiple of K.
        value: ``[B, S, K, Hv]``.
        score_mod: ``(score, b, h, q, k) -> score``, after the scale.
        mask_mod: ``(b, h, q, k) -> bool``, True where query q sees key k.
        block_mask: The blocks of ``mask_mod``, from ``create_block_mask``; made
            here if None. It holds its mask function, so ``mask_mod`` may be left out.
        scale: Factor of the products; 1/√H if None.
        implementation: ``"pallas_flex"``, ``"xla"``, or ``"default"``: the first on
            a GPU, the second elsewhere.
        config: Blocks, warps and stages where ``implementation="pallas_flex"``;
            what it leaves out takes the default.
        return_residual: Also return the log-sum-exp, ``[B, T, N]``.

    Returns:
        ``[B, T, N, Hv]``; a row that sees no key is zeros.

    Raises:
        ProblemError: A shape or dtype does not fit, a function is not elementwise
            or reads an array from outside, or ``mask_mod`` is not that of ``block_mask``.
        ConfigError: ``config`` is not in the space of ``pallas_flex``, or is given
            without that implementation.
        UnknownNameError: There is no such implementation.
    """
    problem, (query, key, value) = checked_arrays(query, key, value)
    scale, (query, key, value) = as_number(scale, (query, key, value))
    scale = 1.0 / math.sqrt(problem.dim) if scale is None else scale
    mask_mod = _mask_of(mask_mod, block_mask, problem)
    check_score(score_mod, problem)
    check_mask(mask_mod, problem)
    if implementation not in ("default", "pallas_flex", "xla"):
        raise UnknownNameError(
            f"flex_attention has no implementation {implementation!r}; "
            "it has: default, pallas_flex, xla"
        )
    check_config(config)
    if config is not None and implementation != "pallas_flex":
        raise ConfigError(
            f"config={config!r} needs the implementation that it belongs to: "
            f'pass implementation="pallas_flex" with it, not {implementation!r}'
        )
    if implementation == "default":
        implementation = "pallas_flex" if jax.default_backend() == "gpu" else "xla"
    if implementation == "xla":
        return _plain(query, key, value, score_mod, mask_mod, scale, return_residual)
    chosen = _config(problem, config)
    if mask_mod is not None and block_mask is None:
        block_mask = _block_mask(problem, mask_mod)
    return pallas_flex.attend_flexibly(
        query,
        key,
        value,
        score_mod,
        mask_mod,
        block_mask,
        scale=scale,
        return_residual=return_residual,
        config=chosen,
    )


def _mask_of(mask_mod: Mod | None, block_mask: Any, problem: Problem) -> Mod | None:
    """The mask function of a call: that of its block mask if it has one.

    Raises:
        ProblemError: ``block_mask`` is none, or of another call's shape or function.
    """
    if block_mask is None:
        return mask_mod
    if not isinstance(block_mask, BlockMask):
        raise ProblemError(
            "block_mask must come from create_block_mask, got "
            f"{type(block_mask).__name__}; pass a mask function as mask_mod"
        )
    if (block_mask.seq, block_mask.kv_seq) != (problem.seq, problem.kv_seq):
        raise ProblemError(
            f"block_mask was made for {block_mask.seq} queries and {block_mask.kv_seq} keys, "
            f"this call has {problem.seq} and {problem.kv_seq}; make one for these"
        )
    for sizes in (block_mask.keys.full_count.shape[:2], block_mask.queries.full_count.shape[:2]):
        for axis, have, want in zip(
            ("batch", "heads"), sizes, (problem.batch, problem.heads), strict=True
        ):
            if have not in (1, want):
                raise ProblemError(
                    f"block_mask was made for {axis} {have}, this call has {want}; make one for "
                    f"these, or with {axis}=None if the mask does not depend on it"
                )
    made_from: Mod = block_mask.mask_mod
    if mask_mod is not None and not same_functions(mask_mod, made_from):
        raise ProblemError(
            f"block_mask was made from {made_from!r:.80}, mask_mod is {mask_mod!r:.80}; "
            "pass block_mask alone, or make it from mask_mod"
        )
    return made_from


def _config(problem: Problem, config: Mapping[str, Value] | None) -> Mapping[str, Value]:
    implementation, device = pallas_flex.IMPLEMENTATION, current_device()
    chosen = {**implementation.default_config(problem, device), **(config or {})}
    reason = implementation.refusal(problem, device, chosen)
    if reason is not None:
        raise ConfigError(f"config={dict(config or {})!r} does not fit pallas_flex: {reason}")
    return chosen


def _block_mask(problem: Problem, mask_mod: Mod) -> BlockMask:
    """The blocks of a mask, for each batch entry and head only where it depends on them."""
    batch, heads = _varying(problem, mask_mod)
    return create_block_mask(mask_mod, batch, heads, problem.seq, problem.kv_seq)


def _varying(problem: Problem, mask_mod: Mod) -> tuple[int | None, int | None]:
    """Batch and heads where a mask depends on them, otherwise None."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(mask_mod)(*[index] * 4).jaxpr
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    b, h = (id(v) in used for v in jaxpr.invars[:2])
    return (problem.batch if b else None), (problem.heads if h else None)


def _plain(
    query: Array,
    key: Array,
    value: Array,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    scale: float,
    return_residual: bool,
) -> Any:
    """The same with all scores in memory, as jax differentiates it."""
    (batch, seq, heads, _), (kv_seq, kv_heads) = query.shape, key.shape[1:3]
    mods, arrays = Mods.split(score_mod, mask_mod)
    score_mod, mask_mod = mods.joined(jax.lax.stop_gradient(arrays))
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    h = jnp.arange(heads, dtype=jnp.int32)[None, :, None, None]
    q = jnp.arange(seq, dtype=jnp.int32)[None, None, :, None]
    k = jnp.arange(kv_seq, dtype=jnp.int32)[None, None, None, :]
    key, value = (jnp.repeat(array, heads // kv_heads, axis=2) for array in (key, value))
    scores = scale * jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k).astype(jnp.float32)
    if mask_mod is not None:
        scores = jnp.where(mask_mod(b, h, q, k), scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    empty = top == -jnp.inf
    weights = jnp.exp(scores - jnp.where(empty, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(empty, 1.0, total)
    out = jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)
    if not return_residual:
        return out
    lse = jnp.where(empty, -jnp.inf, jnp.where(empty, 0.0, top) + jnp.log(total))
    return out, jax.lax.stop_gradient(lse[..., 0].swapaxes(1, 2).astype(out.dtype))
