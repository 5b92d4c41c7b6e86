"""Residual linear attention in float64 NumPy: what every implementation must agree with.

``recurrence`` is the definition, token by token. ``group`` is the same in
chunks, with gradients, for one batch row and one group of heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Positions handled at once; only the speed of the reference depends on it.
_CHUNK = 128


def feature_map(x: Any, kind: str) -> Array:
    """phi(x) = [softmax(x), softmax(-x)] or [relu(x), relu(-x)], [..., H] to [..., 2H]."""
    x = np.asarray(x, np.float64)
    return np.concatenate([_half(x, kind), _half(-x, kind)], axis=-1)


def _half(x: Array, kind: str) -> Array:
    if kind == "relu":
        return np.maximum(x, 0.0)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def feature_map_gradient(y: Array, g: Array, kind: str) -> Array:
    """The gradient at x, from y = phi(x) and the gradient g at y."""
    half = y.shape[-1] // 2
    parts = []
    for a, b in ((y[..., :half], g[..., :half]), (y[..., half:], g[..., half:])):
        if kind == "relu":
            parts.append(np.where(a > 0, b, 0.0))
        else:
            parts.append(a * (b - (a * b).sum(axis=-1, keepdims=True)))
    return np.asarray(parts[0] - parts[1])


def recurrence(
    query: Any, key: Any, value: Any, initial_state: Any, *, window_size: int, kind: str
) -> tuple[Array, Array]:
    """The definition: h_t = h_{t-1} + phi(k_t) v_t^T and o_t = phi(q_t)^T h_t.

    Keys and values come window_size + 1 positions late, zeros before.

    Args:
        query: [B, T, N, H].
        key: [B, T, K, H].
        value: [B, T, K, Hv].
        initial_state: [B, N, 2H, Hv] or None for zeros.

    Returns:
        Output [B, T, N, Hv] and final state [B, N, 2H, Hv].
    """
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    q = feature_map(query, kind)
    k = np.repeat(feature_map(key, kind), group, axis=2)
    v = np.repeat(np.asarray(value, np.float64), group, axis=2)
    state = np.zeros((q.shape[0], heads, q.shape[-1], v.shape[-1]))
    if initial_state is not None:
        state += np.asarray(initial_state, np.float64)
    output = np.zeros((*q.shape[:3], v.shape[-1]))
    for t in range(q.shape[1]):
        source = t - window_size - 1
        if source >= 0:
            state = state + k[:, source, :, :, None] * v[:, source, :, None, :]
        output[:, t] = np.einsum("bnf,bnfv->bnv", q[:, t], state)
    return output, state


@dataclasses.dataclass
class Group:
    """Results for the G query heads that share one key head of one batch row.

    Attributes:
        output: [T, G, Hv].
        final_state: [G, 2H, Hv].
        grad_query: [T, G, H]; the gradients are None where none were asked for.
        grad_key: [T, H].
        grad_value: [T, Hv].
        grad_initial_state: [G, 2H, Hv].
    """

    output: Array
    final_state: Array
    grad_query: Array | None = None
    grad_key: Array | None = None
    grad_value: Array | None = None
    grad_initial_state: Array | None = None


def group(
    query: Any,
    key: Any,
    value: Any,
    initial_state: Any,
    *,
    window_size: int,
    kind: str,
    weights: tuple[Any, Any] | None = None,
) -> Group:
    """The outputs of one group, and the gradients of the weighted sum of the outputs.

    Args:
        query: [T, G, H].
        key: [T, H].
        value: [T, Hv].
        initial_state: [G, 2H, Hv] or None.
        weights: For gradients, the weights of the output [T, G, Hv] and of the
            final state [G, 2H, Hv].
    """
    late = window_size + 1
    seen = max(query.shape[0] - late, 0)
    q, k = feature_map(query, kind), feature_map(key[:seen], kind)
    v = np.asarray(value[:seen], np.float64)
    shape = (q.shape[1], q.shape[-1], np.shape(value)[-1])
    start = np.zeros(shape) if initial_state is None else np.asarray(initial_state, np.float64)
    total = np.zeros(shape[1:])
    output = np.einsum("tgf,gfv->tgv", q, start, optimize=True)
    before = []
    for a, b, mask in _chunks(seen):
        qc, kc, vc = q[late + a : late + b], k[a:b], v[a:b]
        scores = np.einsum("tgf,sf->gts", qc, kc, optimize=True) * mask
        output[late + a : late + b] += np.tensordot(qc, total, 1)
        output[late + a : late + b] += np.swapaxes(scores @ vc, 0, 1)
        before.append(total)
        total = total + kc.T @ vc
    result = Group(output, start + total)
    if weights is not None:
        _gradients(result, (q, k, v), start, before, weights, late, kind, len(query))
    return result


def _gradients(
    result: Group,
    qkv: tuple[Array, Array, Array],
    start: Array,
    before: list[Array],
    weights: tuple[Any, Any],
    late: int,
    kind: str,
    length: int,
) -> None:
    q, k, v = qkv
    d_out, d_end = (np.asarray(w, np.float64) for w in weights)
    dq = np.einsum("tgv,gfv->tgf", d_out, start, optimize=True)
    dk, dv = np.zeros((length, q.shape[-1])), np.zeros((length, start.shape[-1]))
    d_total = d_end.sum(axis=0)
    for (a, b, mask), total in zip(reversed(_chunks(len(k))), reversed(before), strict=True):
        qc, oc, kc, vc = q[late + a : late + b], d_out[late + a : late + b], k[a:b], v[a:b]
        scores = np.einsum("tgf,sf->gts", qc, kc, optimize=True) * mask
        d_scores = np.einsum("tgv,sv->gts", oc, vc, optimize=True) * mask
        dq[late + a : late + b] += np.tensordot(oc, total.T, 1)
        dq[late + a : late + b] += np.swapaxes(d_scores @ kc, 0, 1)
        dk[a:b] = np.einsum("gts,tgf->sf", d_scores, qc, optimize=True) + vc @ d_total.T
        dv[a:b] = np.einsum("gts,tgv->sv", scores, oc, optimize=True) + kc @ d_total
        d_total = d_total + np.tensordot(qc, oc, ((0, 1), (0, 1)))
    result.grad_query = feature_map_gradient(q, dq, kind)
    result.grad_key = np.zeros((length, q.shape[-1] // 2))
    result.grad_key[: len(k)] = feature_map_gradient(k, dk[: len(k)], kind)
    result.grad_value = dv
    result.grad_initial_state = d_end + np.einsum("tgf,tgv->gfv", q, d_out, optimize=True)


def _chunks(length: int) -> list[tuple[int, int, Array]]:
    bounds = [(a, min(a + _CHUNK, length)) for a in range(0, length, _CHUNK)]
    return [(a, b, np.tri(b - a)) for a, b in bounds]
