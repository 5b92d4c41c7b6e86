"""Linear attention in chunks, in plain JAX: matrix products instead of a token loop.

Within a chunk O = Q H + ((Q K^T) * M) V with M lower-triangular, and from chunk
to chunk H grows by K^T V. The backward pass recomputes all of it from one state
per span of chunks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...cache.key import Device, Problem
from ..op import Config, Implementation, Space
from ..shardings import compiler_sharded, varying
from .features import feature_map as phi
from .features import (
    feature_map_gradient,
    rows_before_any_key,
    rows_before_any_key_gradient,
)
from .problem import kind_of, window_of
from .tiles import OUTPUT_AXES, Plan, merged, product, sums_after, sums_before

Arrays = tuple[Any, ...]


def chunked(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    initial_state: jax.Array | None,
    *,
    window_size: int,
    feature_map: str,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Residual linear attention in chunks; shapes as ``linear_attention``.

    Args:
        config: ``chunk`` positions share one state, and ``span`` chunks are
            computed side by side; ``exp`` is the feature map's exponential.
    """
    batch, length, heads, _ = query.shape
    group = heads // key.shape[2]
    plan = Plan(
        batch=batch,
        length=length,
        kv_heads=key.shape[2],
        group=group,
        late=min(window_size + 1, length),
        chunk=int(config["chunk"]),
        span=int(config["span"]),
        kind=feature_map,
        exp=str(config["exp"]),
        per_head=group > 1 and initial_state is not None,
    )
    return compiler_sharded(
        lambda *arrays: _chunked(*varying(arrays), plan),
        (query, key, value, initial_state),
        OUTPUT_AXES,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, initial: jax.Array | None, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    return _forward(query, key, value, initial, plan)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, initial: jax.Array | None, plan: Plan
) -> tuple[tuple[jax.Array, jax.Array], Arrays]:
    """The outputs, and the state before each span."""
    shape = (plan.batch, plan.kv_heads, 2 * query.shape[-1], value.shape[-1])
    state, base = varying(jnp.zeros(shape, jnp.float32), query), None
    output = varying(jnp.zeros((*query.shape[:3], value.shape[-1]), value.dtype), query)
    if initial is not None:
        by_group = plan.by_group(initial)
        state, base = (state, by_group) if plan.per_head else (by_group[:, :, 0], None)
        first = rows_before_any_key(query[:, : plan.late], initial, plan.kind)
        output = output.at[:, : plan.late].set(first.astype(output.dtype))

    def step(carry: Arrays, start: Any, count: int) -> Arrays:
        output, state = carry
        q = phi(plan.queries(query, plan.late + start, count), plan.kind, plan.exp)
        k = phi(plan.keys(key, start, count), plan.kind, plan.exp)
        v = plan.keys(value, start, count)
        rows, state = _span(q, k, v, state, base, plan)
        return plan.put_queries(output, rows, plan.late + start, count), state

    size = plan.chunk * plan.span
    spans, rest = divmod(plan.seen, size)
    carry, states = (output, state), None
    if spans:
        carry, states = lax.scan(
            lambda carry, i: (step(carry, i * size, size), carry[1]), carry, jnp.arange(spans)
        )
    output, last = carry
    state = last
    if rest:
        output, state = step(carry, spans * size, rest)
    final = state[:, :, None] if base is None else state[:, :, None] + base
    final = jnp.broadcast_to(final, (*shape[:2], plan.group, *shape[2:]))
    final = final.reshape(shape[0], -1, *shape[2:])
    return (output, final), (states, last)


def _span(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: jax.Array,
    base: jax.Array | None,
    plan: Plan,
) -> tuple[jax.Array, jax.Array]:
    """Output rows of a span, and the state after it."""
    states, after = _states(k, v, state, base)
    scores = _triangle(product(merged(q), k, (-1, -1)), plan)
    rows = product(q, states, (-1, -2))
    return rows + product(scores, v, (-1, -2)).reshape(rows.shape), after


def _states(
    k: jax.Array, v: jax.Array, state: jax.Array, base: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The state before each chunk, [B, K, m, R, 2H, Hv], and the one after the last."""
    before, after = sums_before(product(k, v, (-2, -2)), state)
    before = before[:, :, :, None]
    return (before if base is None else before + base[:, :, None]), after


def _triangle(scores: jax.Array, plan: Plan) -> jax.Array:
    """Scores [..., G c, c] with those of later keys set to zero."""
    seen = jnp.tile(jnp.tri(plan.chunk, dtype=bool), (plan.group, 1))
    return jnp.where(seen, scores, 0.0)


def _chunked_fwd(
    query: jax.Array, key: jax.Array, value: jax.Array, initial: jax.Array | None, plan: Plan
) -> tuple[Arrays, Arrays]:
    outputs, states = _forward(query, key, value, initial, plan)
    return outputs, (query, key, value, initial, states)


def _chunked_bwd(plan: Plan, saved: Arrays, cotangents: Arrays) -> Arrays:
    query, key, value, initial, (states, last) = saved
    d_output, d_final = cotangents
    d_final = plan.by_group(d_final)
    base = plan.by_group(initial) if plan.per_head else None
    d_state = d_final if plan.per_head else d_final.sum(axis=2, keepdims=True)
    grads = varying(tuple(jnp.zeros_like(x) for x in (query, key, value)), query)

    def step(carry: Arrays, start: Any, count: int, state: jax.Array) -> Arrays:
        (dq, dk, dv), d_state = carry
        q = phi(plan.queries(query, plan.late + start, count), plan.kind, plan.exp)
        k = phi(plan.keys(key, start, count), plan.kind, plan.exp)
        v = plan.keys(value, start, count)
        do = plan.queries(d_output, plan.late + start, count)
        rows_q, rows_k, rows_v, d_state = _span_bwd((q, k, v, do), state, base, d_state, plan)
        grads = (
            plan.put_queries(dq, rows_q, plan.late + start, count),
            plan.put_keys(dk, rows_k, start, count),
            plan.put_keys(dv, rows_v, start, count),
        )
        return grads, d_state

    size = plan.chunk * plan.span
    spans, rest = divmod(plan.seen, size)
    carry = (grads, d_state)
    if rest:
        carry = step(carry, spans * size, rest, last)
    if spans:
        carry, _ = lax.scan(
            lambda carry, x: (step(carry, x[0] * size, size, x[1]), None),
            carry,
            (jnp.arange(spans), states),
            reverse=True,
        )
    (dq, dk, dv), d_state = carry
    if initial is None:
        return dq, dk, dv, None
    # Rows that see no key at all still reach the initial state.
    early = slice(0, plan.late)
    first_dq, first_di = rows_before_any_key_gradient(
        query[:, early], initial, d_output[:, early], plan.kind
    )
    dq = dq.at[:, early].set(first_dq)
    return dq, dk, dv, first_di + d_state.reshape(initial.shape)


def _span_bwd(
    tiles: Arrays, state: jax.Array, base: jax.Array | None, d_state: jax.Array, plan: Plan
) -> Arrays:
    """Gradients of the rows of a span, and of the state before it.

    dA = (dO V^T) * M, dQ = dO H^T + dA K, dK = dA^T Q + V dH^T,
    dV = ((Q K^T) * M)^T dO + K dH, and dH grows by Q^T dO.
    """
    q, k, v, do = tiles
    states, _ = _states(k, v, state, base)
    after, d_state = sums_after(product(q, do, (-2, -2)), d_state)
    d_shared = after.sum(axis=3)
    q_rows, do_rows = merged(q), merged(do)
    scores = _triangle(product(q_rows, k, (-1, -1)), plan)
    d_scores = _triangle(product(do_rows, v, (-1, -1)), plan)
    dq = product(do, states, (-1, -1))
    dq += product(d_scores, k, (-1, -2)).reshape(dq.shape)
    dk = product(d_scores, q_rows, (-2, -2)) + product(v, d_shared, (-1, -1))
    dv = product(scores, do_rows, (-2, -2)) + product(k, d_shared, (-1, -2))
    dq = feature_map_gradient(q, dq, plan.kind)
    dk = feature_map_gradient(k, dk, plan.kind)
    return dq, dk, dv, d_state


_chunked.defvjp(_chunked_fwd, _chunked_bwd)

_CHUNKS = (16, 32, 64, 128, 256)
_SPANS = (1, 2, 4, 8, 16)


def _space(problem: Problem, device: Device) -> Space:
    """Chunks and spans that are not mostly padding.

    A span longer than the sequence is shortened when it is used; a little room
    is left so that the config of a longer neighbour stays usable.
    """
    seen = max(problem.seq - window_of(problem) - 1, 1)
    return Space(
        {"chunk": _CHUNKS, "span": _SPANS, "exp": _exponentials(problem, device)},
        where=(
            lambda c: int(c["chunk"]) < max(2 * seen, 32),
            lambda c: c["span"] == 1 or int(c["chunk"]) * int(c["span"]) < 4 * seen,
        ),
    )


def _exponentials(problem: Problem, device: Device) -> tuple[str, ...]:
    """Which exponentials are worth a try: one of our own on processors alone."""
    softmax = kind_of(problem) == "softmax"
    return ("polynomial", "native") if softmax and device.platform == "cpu" else ("native",)


def default_config(problem: Problem, device: Device) -> Config:
    """Chunks of the size that is best or nearly so everywhere; on a GPU few at a time.

    On a CPU, what suits smaller heads takes up to a third longer with heads of 128.
    """
    if device.platform == "cpu":
        if max(problem.dim, problem.value_dim) < 128:
            return fitted(problem, device, 64, 4)
        return fitted(problem, device, *((64, 2) if problem.mode == "fwd" else (128, 1)))
    return fitted(problem, device, 128, 4 if problem.seq >= 1024 else 2)


def fitted(problem: Problem, device: Device, chunk: int, span: int) -> Config:
    """The config nearest to a wished one, halved until it is in the space."""
    space, exp = _space(problem, device), _exponentials(problem, device)[0]
    while space.refusal({"chunk": chunk, "span": span, "exp": exp}):
        chunk, span = (chunk, span // 2) if span > 1 else (chunk // 2, 1)
    return {"chunk": chunk, "span": span, "exp": exp}


IMPLEMENTATION = Implementation(
    name="chunked",
    function=chunked,
    space=_space,
    default_config=default_config,
    own_gradient=True,
)
