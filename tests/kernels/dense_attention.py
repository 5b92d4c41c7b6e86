"""Attention and its gradients in float64, all scores at once: what kernels are held to."""

from __future__ import annotations

import numpy as np


def visible(shape, *, causal=False, window=None, mask=None, q_lengths=None, kv_lengths=None):
    """Which keys each query sees, boolean [B, N, T, S]."""
    rows, columns = np.arange(shape[2])[:, None], np.arange(shape[3])[None, :]
    seen = np.ones(shape, bool)
    if causal:
        seen &= columns <= rows
    if window is not None:
        seen &= (columns >= rows - window[0]) & (columns <= rows + window[1])
    if mask is not None:
        seen &= np.asarray(mask)
    if q_lengths is not None:
        seen &= rows < np.asarray(q_lengths)[:, None, None, None]
    if kv_lengths is not None:
        seen &= columns < np.asarray(kv_lengths)[:, None, None, None]
    return seen


def attention(query, key, value, grad_out, *, scale, seen, bias=None):
    """Returns out, log-sum-exp [B, T, N], and the gradients of query, key, value and bias."""
    query, key, value, grad_out = (
        np.asarray(array).astype(np.float64) for array in (query, key, value, grad_out)
    )
    group = query.shape[2] // key.shape[2]
    keys, values = np.repeat(key, group, 2), np.repeat(value, group, 2)
    scores = np.einsum("btnh,bsnh->bnts", query, keys) * scale
    if bias is not None:
        scores = scores + np.asarray(bias).astype(np.float64)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isinf(top), 0.0, top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0].swapaxes(1, 2)
    weights = weights / np.where(total == 0, 1.0, total)
    out = np.einsum("bnts,bsnh->btnh", weights, values)
    upstream = np.einsum("btnh,bsnh->bnts", grad_out, values)
    slope = weights * (upstream - (weights * upstream).sum(-1, keepdims=True))

    def grouped(array):
        return array.reshape(*array.shape[:2], key.shape[2], group, -1).sum(3)

    grad_bias = slope
    for axis, size in enumerate(() if bias is None else bias.shape):
        if size == 1:
            grad_bias = grad_bias.sum(axis, keepdims=True)
    gradients = (
        np.einsum("bnts,bsnh->btnh", slope, keys) * scale,
        grouped(np.einsum("bnts,btnh->bsnh", slope, query) * scale),
        grouped(np.einsum("bnts,btnh->bsnh", weights, grad_out)),
        None if bias is None else grad_bias,
    )
    return out, lse, gradients
