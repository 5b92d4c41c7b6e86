"""RAttention: attention in a sliding window, plus a recurrence over all that left it.

Pure functions over a dictionary of parameters (``init``, ``apply``), and a decode
step whose cost and memory do not grow with the sequence (``prefill``, ``decode``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..cache.errors import ProblemError
from .attention import attention
from .linear_attention import linear_attention
from .linear_attention.features import feature_map as phi
from .rattention_checks import (
    check_config,
    check_input,
    check_params,
    check_start,
    check_state,
    parameter_shapes,
    state_shapes,
)

Params = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class RAttentionConfig:
    """The static shape of a layer.

    Attributes:
        width: Size of the layer's input and output.
        heads: Query heads, N.
        head_dim: Size of a head, H; even.
        kv_heads: Key heads, K; N is a multiple of K. None for N.
        window: Positions before the own one that attention sees; the recurrence
            sees all before those.
        branches: ``"both"``, ``"local"`` for attention alone, or ``"global"``
            for the recurrence alone, which then leaves no position out.
        feature_map: Of the recurrence, as of ``linear_attention``.
        meta_tokens: Learned tokens that the recurrence saw before the first; 0
            starts it from zeros.
        qk_scales: Learned factors on the recurrence's queries and keys.
        rope_base: Base of the rotary embedding of the attention branch.
        eps: Added to the mean square in the norms.

    Raises:
        ProblemError: A field is out of range.
    """

    width: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    window: int = 128
    branches: str = "both"
    feature_map: str = "softmax"
    meta_tokens: int = 0
    qk_scales: bool = False
    rope_base: float = 10_000.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_config(self)

    @property
    def groups(self) -> int:
        """Key heads, K."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def left_out(self) -> int:
        """The window that the recurrence leaves out; -1 where no attention covers it."""
        return -1 if self.branches == "global" else self.window


class RAttentionState(NamedTuple):
    """What decoding needs of the past; its size does not depend on how long that is.

    Attributes:
        position: int32 scalar, how many tokens were seen.
        keys: [B, window + 1, K, H], the last keys; position p is in slot
            p mod (window + 1).
        rotated: The same keys with the rotary embedding.
        values: [B, window + 1, K, H].
        memory: float32 [B, N, 2H, H], the state of the recurrence.
    """

    position: jax.Array
    keys: jax.Array
    rotated: jax.Array
    values: jax.Array
    memory: jax.Array


def init(rng: jax.Array, cfg: RAttentionConfig) -> dict[str, jax.Array]:
    """Random parameters, float32.

    Returns:
        ``query`` [width, N, H], ``key`` and ``value`` [width, K, H], ``out``
        [N, H, width]; ``local_norm`` and ``global_norm`` [N, H] for the branches
        there are; ``meta`` [M, width]; ``query_scale`` [N, H], ``key_scale`` [K, H].
    """
    params = {}
    for name, shape in parameter_shapes(cfg).items():
        rng, own = jax.random.split(rng)
        if name.endswith(("norm", "scale")):
            params[name] = jnp.ones(shape)
            continue
        inputs = {"out": math.prod(shape[:2]), "meta": 1}.get(name, cfg.width)
        params[name] = jax.random.normal(own, shape) / math.sqrt(inputs)
    return params


def apply(
    params: Params, x: jax.Array, cfg: RAttentionConfig, *, implementation: str = "default"
) -> jax.Array:
    """The layer over whole sequences.

    Sliding-window attention and residual linear attention side by side, each
    normalised per head, then added: RAttention, https://arxiv.org/abs/2506.15545.

    Args:
        params: As from ``init``.
        x: [B, T, width], in the dtype to compute in.
        cfg: The layer's shape.
        implementation: Of the recurrence; the attention is always dispatched.

    Returns:
        [B, T, width], in the dtype of ``x``.

    Raises:
        ProblemError: ``x`` or ``params`` are not of the layer, or ``implementation``
            is named where there is no recurrence.
        UnknownNameError: There is no such implementation.
    """
    if cfg.branches == "local" and implementation != "default":
        raise ProblemError(
            f"implementation={implementation!r} is of the recurrence, which "
            'branches="local" leaves out'
        )
    return _forward(params, x, cfg, implementation)[0]


def prefill(
    params: Params, x: jax.Array, cfg: RAttentionConfig
) -> tuple[jax.Array, RAttentionState]:
    """``apply``, and the state from which ``decode`` goes on."""
    y, keys, rotated, values, memory = _forward(params, x, cfg, "default")
    slots, length = cfg.left_out + 1, x.shape[1]

    def last(rows: jax.Array) -> jax.Array:
        rows = rows[:, max(length - slots, 0) :]
        rows = jnp.pad(rows[:, :slots], ((0, 0), (max(slots - length, 0), 0), (0, 0), (0, 0)))
        return jnp.roll(rows, length % slots, axis=1) if slots else rows

    ring = (last(keys), last(rotated), last(values))
    return y, RAttentionState(jnp.int32(length), *ring, memory)


def start(
    params: Params, cfg: RAttentionConfig, batch: int, dtype: str = "float32"
) -> RAttentionState:
    """The state before the first token.

    Args:
        params: As from ``init``.
        cfg: The layer's shape.
        batch: B.
        dtype: To keep keys and values in; that of the inputs to come.

    Raises:
        ProblemError: One of them is of another type, or out of range.
    """
    check_start(batch, dtype)
    check_params(params, cfg)
    ring = jnp.zeros(state_shapes(cfg, batch)["keys"], dtype)
    return RAttentionState(jnp.int32(0), ring, ring, ring, _first_memory(params, cfg, batch))


def decode(
    params: Params, state: RAttentionState, x: jax.Array, cfg: RAttentionConfig
) -> tuple[jax.Array, RAttentionState]:
    """One token on from ``state``, equal to the last row of ``apply``.

    Args:
        params: As from ``init``.
        state: From ``start``, ``prefill`` or the step before.
        x: [B, width].
        cfg: The layer's shape.

    Returns:
        [B, width], and the state after the token.

    Raises:
        ProblemError: ``x``, ``params`` or ``state`` are not of the layer.
    """
    check_input(x, cfg, "B")
    check_params(params, cfg)
    check_state(state, RAttentionState, cfg, x.shape[0])
    q, k, v = _project(params, x[:, None])
    position = state.position
    rotated = _rotate(k, position[None], cfg)
    branches = []
    leaving: tuple[jax.Array, ...] = (k, v)
    keys, rotated_keys, values = state.keys, state.rotated, state.values
    if cfg.branches != "global":
        slots = cfg.window + 1
        slot = position % slots
        # The slot that the new token takes holds the one that now leaves the window.
        leaving = tuple(
            jax.lax.dynamic_slice_in_dim(a, slot, 1, axis=1) for a in (state.keys, state.values)
        )
        keys, rotated_keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), slot, axis=1)
            for old, new in zip((keys, rotated_keys, values), (k, rotated, v), strict=True)
        )
        filled = jnp.arange(slots) <= position
        seen = filled[None, None, None]
        rows = attention(_rotate(q, position[None], cfg), rotated_keys, values, mask=seen)
        branches.append(_normalised(rows, params["local_norm"], cfg))
    memory = state.memory
    if cfg.branches != "local":
        q, leaving_key = _scaled(params, q, leaving[0])
        rows, memory = linear_attention(
            q, leaving_key, leaving[1], memory, window_size=-1, feature_map=cfg.feature_map
        )
        branches.append(_normalised(rows, params["global_norm"], cfg))
    after = RAttentionState(position + 1, keys, rotated_keys, values, memory)
    return _joined(params, branches, x.dtype)[:, 0], after


def _forward(
    params: Params, x: jax.Array, cfg: RAttentionConfig, implementation: str
) -> tuple[jax.Array, ...]:
    """Outputs, keys, rotated keys, values, and the recurrence's final state."""
    check_input(x, cfg, "B, T")
    check_params(params, cfg)
    q, k, v = _project(params, x)
    positions = jnp.arange(x.shape[1])
    rotated, branches = k, []
    if cfg.branches != "global":
        rotated = _rotate(k, positions, cfg)
        window = (cfg.window, 0)
        rows = attention(
            _rotate(q, positions, cfg), rotated, v, is_causal=True, local_window_size=window
        )
        branches.append(_normalised(rows, params["local_norm"], cfg))
    memory = _first_memory(params, cfg, x.shape[0])
    if cfg.branches != "local":
        scaled_q, scaled_k = _scaled(params, q, k)
        rows, memory = linear_attention(
            scaled_q,
            scaled_k,
            v,
            memory if cfg.meta_tokens else None,
            window_size=cfg.left_out,
            feature_map=cfg.feature_map,
            implementation=implementation,
        )
        branches.append(_normalised(rows, params["global_norm"], cfg))
    return _joined(params, branches, x.dtype), k, rotated, v, memory


def _project(params: Params, x: jax.Array) -> tuple[jax.Array, ...]:
    """Queries [B, T, N, H], keys and values [B, T, K, H]."""
    return tuple(
        jnp.einsum("btd,dnh->btnh", x, params[name].astype(x.dtype))
        for name in ("query", "key", "value")
    )


def _rotate(x: jax.Array, positions: jax.Array, cfg: RAttentionConfig) -> jax.Array:
    """The rotary embedding of [B, T, heads, H] (https://arxiv.org/abs/2104.09864)."""
    half = cfg.head_dim // 2
    rates = cfg.rope_base ** (-jnp.arange(half) / half)
    angles = positions[:, None, None] * rates
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _scaled(params: Params, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    if "query_scale" not in params:
        return q, k
    return (
        q * params["query_scale"].astype(q.dtype),
        k * params["key_scale"].astype(k.dtype),
    )


def _first_memory(params: Params, cfg: RAttentionConfig, batch: int) -> jax.Array:
    """The recurrence's state once it has seen the meta tokens, [B, N, 2H, H]."""
    shape = state_shapes(cfg, batch)["memory"]
    if "meta" not in params:
        return jnp.zeros(shape, jnp.float32)
    q, k, v = _project(params, params["meta"][None])
    _, k = _scaled(params, q, k)
    seen = jnp.einsum("mkf,mkv->kfv", phi(k[0], cfg.feature_map), v[0])
    return jnp.broadcast_to(jnp.repeat(seen, cfg.heads // cfg.groups, axis=0), shape)


def _normalised(rows: jax.Array, weight: jax.Array, cfg: RAttentionConfig) -> jax.Array:
    """Root-mean-square norm per head, float32 [B, T, N, H]."""
    rows = rows.astype(jnp.float32)
    square = jnp.mean(rows * rows, axis=-1, keepdims=True)
    return rows * jax.lax.rsqrt(square + cfg.eps) * weight


def _joined(params: Params, branches: list[jax.Array], dtype: jnp.dtype) -> jax.Array:
    rows = sum(branches[1:], start=branches[0]).astype(dtype)
    return jnp.einsum("btnh,nhd->btd", rows, params["out"].astype(dtype))
