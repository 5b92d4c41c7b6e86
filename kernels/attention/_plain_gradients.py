"""The gradients of attention in plain JAX, which can be differentiated again.

Kernels that are called by name, and loops of a length known only when they run, cannot be.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

_HIGHEST = lax.Precision.HIGHEST


def gradients(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    grad_out: Array,
    grad_lse: Array,
    low: Array,
    high: Array,
    scale: float,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in their dtypes; sums are float32.

    Takes one group of heads, all queries that share a head of keys, at a time, so that of the
    scores no more than a group's are ever in memory, also when this is differentiated.

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        out: What attention gave, [B, T, N, Hv].
        lse: The natural log-sum-exp of the scaled scores, [B, N, T]; -inf where no key is seen.
        grad_out: The gradient of ``out``.
        grad_lse: That of ``lse``.
        low: The first key that each query sees, [B, T].
        high: The key after the last one, [B, T].
        scale: Of the scores.
    """
    batch, rows, heads, dim = query.shape
    columns, kv_heads = key.shape[1:3]

    def by_group(x: Array) -> Array:
        """[B, T, N, X] to [B K, G, T, X]."""
        x = x.reshape(batch, rows, kv_heads, heads // kv_heads, x.shape[-1])
        return x.transpose(0, 2, 3, 1, 4).reshape(-1, *x.shape[3:4], rows, x.shape[-1])

    def by_head(x: Array) -> Array:
        """[B, S, K, X] to [B K, S, X]."""
        return x.swapaxes(1, 2).reshape(-1, columns, x.shape[-1])

    def rowwise(x: Array) -> Array:
        """[B, N, T] to [B K, G, T]."""
        return x.reshape(batch * kv_heads, heads // kv_heads, rows)

    at = jnp.arange(columns)
    visible = (at >= low[..., None]) & (at < high[..., None])
    ahead = jnp.repeat(visible, kv_heads, axis=0)

    @jax.checkpoint
    def one(given: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        q, k, v, o, do, base, dbase, seen = given
        q, k, v, o, do = (x.astype(jnp.float32) for x in (q, k, v, o, do))
        scores = scale * jnp.einsum("gtd,sd->gts", q, k, precision=_HIGHEST)
        # Twice where: neither the value nor the gradient may come of what is not seen.
        shifted = jnp.where(seen, scores - jnp.where(base == -jnp.inf, 0.0, base)[..., None], 0.0)
        p = jnp.where(seen, jnp.exp(shifted), 0.0)
        dp = jnp.einsum("gtd,sd->gts", do, v, precision=_HIGHEST)
        delta = (o * do).sum(-1) - dbase
        ds = p * (dp - delta[..., None]) * scale
        return (
            jnp.einsum("gts,sd->gtd", ds, k, precision=_HIGHEST),
            jnp.einsum("gts,gtd->sd", ds, q, precision=_HIGHEST),
            jnp.einsum("gts,gtd->sd", p, do, precision=_HIGHEST),
        )

    dq, dk, dv = lax.map(
        one,
        (
            by_group(query), by_head(key), by_head(value), by_group(out), by_group(grad_out),
            rowwise(lse), rowwise(grad_lse), ahead,
        ),
    )  # fmt: skip
    dq = dq.reshape(batch, kv_heads, heads // kv_heads, rows, dim).transpose(0, 3, 1, 2, 4)

    def joined(x: Array, like: Array) -> Array:
        return x.reshape(batch, kv_heads, columns, -1).swapaxes(1, 2).astype(like.dtype)

    return dq.reshape(query.shape).astype(query.dtype), joined(dk, key), joined(dv, value)
