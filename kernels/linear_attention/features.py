"""The feature map of linear attention in JAX, and its backward pass.

phi(x) = [softmax(x), softmax(-x)] over the head dimension, or with "relu"
[relu(x), relu(-x)]; always in float32, whatever the dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from ..exponential import EXPONENTIALS

FEATURE_MAPS: Final = ("softmax", "relu")


def feature_map(x: jax.Array, kind: str, exp: str = "native") -> jax.Array:
    """phi(x): [..., H] to float32 [..., 2H], by an exponential of ``EXPONENTIALS``."""
    x = x.astype(jnp.float32)
    if kind == "relu":
        return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)
    top = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    low = jax.lax.stop_gradient(jnp.min(x, axis=-1, keepdims=True))
    if exp != "native":
        return _softmaxes(x, top, low, EXPONENTIALS[exp])
    # Both softmaxes from one array: half as many passes over memory as two calls.
    e = jnp.exp(jnp.concatenate([x - top, low - x], axis=-1))
    # The exponentials are read twice, and XLA would compute them twice.
    e = _once(e).reshape(*x.shape[:-1], 2, x.shape[-1])
    y = e / jnp.sum(e, axis=-1, keepdims=True)
    return y.reshape(*x.shape[:-1], 2 * x.shape[-1])


def _softmaxes(
    x: jax.Array, top: jax.Array, low: jax.Array, exp: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Both softmaxes with every intermediate made once: XLA would make some for each reader."""
    top, low = _once((top, low))
    e = _once(exp(jnp.stack([x - top, low - x], axis=-2)))
    y = e * _once(1.0 / jnp.sum(e, axis=-1, keepdims=True))
    return y.reshape(*x.shape[:-1], 2 * x.shape[-1])


def _once(value: Any) -> Any:
    return jax.lax.optimization_barrier(value)


def feature_map_gradient(y: jax.Array, g: jax.Array, kind: str) -> jax.Array:
    """The gradient at x from y = phi(x) alone: [..., 2H] and [..., 2H] to [..., H].

    With y1, y2 the halves of y and sigma(y, g) = y * (g - <g, y>) it is
    sigma(y1, g1) - sigma(y2, g2).
    """
    dim = y.shape[-1] // 2
    y1, y2, g1, g2 = y[..., :dim], y[..., dim:], g[..., :dim], g[..., dim:]
    if kind == "relu":
        return jnp.where(y1 > 0, g1, 0.0) - jnp.where(y2 > 0, g2, 0.0)
    # One sum over both halves, which takes a processor a third of the time of two.
    dots = jnp.sum((g * y).reshape(*y.shape[:-1], 2, dim), axis=-1)
    return y1 * (g1 - dots[..., :1]) - y2 * (g2 - dots[..., 1:])


def rows_before_any_key(query: jax.Array, initial_state: jax.Array, kind: str) -> jax.Array:
    """The outputs of rows that see the initial state alone, float32 [B, t, N, Hv].

    Args:
        query: [B, t, N, H], the first window_size + 1 positions.
        initial_state: [B, N, 2H, Hv].
    """
    return jnp.einsum(
        "btnf,bnfv->btnv",
        feature_map(query, kind),
        initial_state,
        precision=jax.lax.Precision.HIGHEST,
    )


def rows_before_any_key_gradient(
    query: jax.Array, initial_state: jax.Array, d_rows: jax.Array, kind: str
) -> tuple[jax.Array, jax.Array]:
    """The gradients of ``rows_before_any_key`` at its query and its initial state."""
    rows, pull = jax.vjp(lambda q, state: rows_before_any_key(q, state, kind), query, initial_state)
    d_query, d_state = pull(d_rows.astype(rows.dtype))
    return d_query, d_state
