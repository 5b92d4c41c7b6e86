"""The token recurrence: one step per position, the plainest way to compute the op.

Its own backward pass walks the sequence twice and keeps one state, where
automatic differentiation would keep one state per token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..op import Config, Implementation
from ..shardings import compiler_sharded, varying
from .features import feature_map as phi
from .features import feature_map_gradient, rows_before_any_key
from .tiles import OUTPUT_AXES

_HIGHEST = jax.lax.Precision.HIGHEST
Arrays = tuple[jax.Array, ...]


def scan(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    initial_state: jax.Array | None,
    *,
    window_size: int,
    feature_map: str,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Residual linear attention token by token; shapes as ``linear_attention``."""

    def lifted(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, state = varying(arrays)
        return _scan(q, k, v, state, window_size, feature_map)

    return compiler_sharded(lifted, (query, key, value, initial_state), OUTPUT_AXES)


def _scan(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    initial_state: jax.Array | None,
    window_size: int,
    feature_map: str,
) -> tuple[jax.Array, jax.Array]:
    batch, length, heads, dim = query.shape
    late = min(window_size + 1, length)
    if initial_state is None:
        shape = (batch, heads, 2 * dim, value.shape[-1])
        initial_state = varying(jnp.zeros(shape, jnp.float32), query)
    first = rows_before_any_key(query[:, :late], initial_state, feature_map)
    if late == length:
        return first.astype(value.dtype), initial_state
    seen = length - late
    rest, state = aligned(
        query[:, late:], key[:, :seen], value[:, :seen], initial_state, feature_map
    )
    return jnp.concatenate([first.astype(value.dtype), rest], axis=1), state


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def aligned(
    query: jax.Array, key: jax.Array, value: jax.Array, state: jax.Array, kind: str
) -> tuple[jax.Array, jax.Array]:
    """The recurrence where query t sees the keys up to t."""

    def step(h: jax.Array, row: Arrays) -> tuple[jax.Array, jax.Array]:
        q, k, v = row
        h = _updated(h, phi(k, kind), v)
        return h, _read(phi(q, kind), h).astype(value.dtype)

    h, rows = jax.lax.scan(step, _grouped(state, key), _rows(key, query, key, value))
    return _joined(rows, query.shape[2]), h.reshape(state.shape)


def _aligned_fwd(
    query: jax.Array, key: jax.Array, value: jax.Array, state: jax.Array, kind: str
) -> tuple[Any, Arrays]:
    return aligned(query, key, value, state, kind), (query, key, value, state)


def _aligned_bwd(kind: str, saved: Arrays, cotangents: Arrays) -> Arrays:
    query, key, value, state = saved
    d_output, d_end = cotangents

    def forward(h: jax.Array, row: Arrays) -> tuple[jax.Array, jax.Array]:
        q, k, v, do = row
        h = _updated(h, phi(k, kind), v)
        dq = jnp.einsum("bkgv,bkgfv->bkgf", do.astype(jnp.float32), h, precision=_HIGHEST)
        return h, feature_map_gradient(phi(q, kind), dq, kind).astype(query.dtype)

    def backward(dh: jax.Array, row: Arrays) -> tuple[jax.Array, Arrays]:
        q, k, v, do = row
        dh = dh + phi(q, kind)[..., None] * do.astype(jnp.float32)[..., None, :]
        shared, y = dh.sum(axis=2), phi(k, kind)
        dk = jnp.einsum("bkfv,bkv->bkf", shared, v.astype(jnp.float32), precision=_HIGHEST)
        dv = jnp.einsum("bkfv,bkf->bkv", shared, y, precision=_HIGHEST)
        dk = feature_map_gradient(y, dk, kind)
        return dh, (dk.astype(key.dtype), dv.astype(value.dtype))

    rows = _rows(key, query, key, value, d_output)
    _, dq = jax.lax.scan(forward, _grouped(state, key), rows)
    dh, (dk, dv) = jax.lax.scan(backward, _grouped(d_end, key), rows, reverse=True)
    return (
        _joined(dq, query.shape[2]),
        jnp.moveaxis(dk, 0, 1),
        jnp.moveaxis(dv, 0, 1),
        dh.reshape(state.shape),
    )


aligned.defvjp(_aligned_fwd, _aligned_bwd)


def _updated(h: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    return h + (y[..., None] * v.astype(jnp.float32)[..., None, :])[:, :, None]


def _read(y: jax.Array, h: jax.Array) -> jax.Array:
    return jnp.einsum("bkgf,bkgfv->bkgv", y, h, precision=_HIGHEST)


def _grouped(state: jax.Array, key: jax.Array) -> jax.Array:
    """[B, N, 2H, Hv] to [B, K, G, 2H, Hv]."""
    batch, heads, *rest = state.shape
    return state.reshape(batch, key.shape[2], heads // key.shape[2], *rest)


def _rows(key: jax.Array, *arrays: jax.Array) -> Arrays:
    """Time first; arrays with query heads get them as [K, G]."""
    kv_heads = key.shape[2]
    rows = []
    for index, x in enumerate(arrays):
        x = jnp.moveaxis(x, 1, 0)
        if index in (0, 3):
            x = x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])
        rows.append(x)
    return tuple(rows)


def _joined(rows: jax.Array, heads: int) -> jax.Array:
    """[T, B, K, G, X] to [B, T, N, X]."""
    return jnp.moveaxis(rows, 0, 1).reshape(rows.shape[1], rows.shape[0], heads, rows.shape[-1])


#: A longer loop over tokens is never the fastest choice.
_LONGEST = 64

IMPLEMENTATION = Implementation(
    name="scan",
    function=scan,
    own_gradient=True,
    automatic=lambda problem, device: problem.seq <= _LONGEST,
)
