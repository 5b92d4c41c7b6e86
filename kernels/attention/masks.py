"""Rows that may see no key, and biases of -inf: one meaning in every implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def window_ends(is_causal: bool, window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """How far to the left and to the right a query sees; None for as far as there are keys."""
    left, right = window if window is not None else (None, None)
    return left, 0 if is_causal else right


def finite_bias(bias: Array | None) -> Array | None:
    """The bias with -inf made finite: a row of -inf alone would be 0/0 in a softmax."""
    if bias is None or not jnp.issubdtype(bias.dtype, jnp.inexact):
        return bias
    return jnp.where(bias == -jnp.inf, jnp.asarray(-1e30, bias.dtype), bias)


def zero_blind_rows(
    result: Any,
    query: Array,
    key: Array,
    bias: Array | None,
    mask: Array | None,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> Any:
    """The result with zeros in rows that see no key, and -inf as their log-sum-exp.

    Args:
        result: ``[B, T, N, Hv]``, or a pair of that and the log-sum-exp ``[B, T, N]``.
        query: ``[B, T, N, H]``; the other arguments are those of the same call.
    """
    sees = _sees_a_key(
        query.shape[1], key.shape[1], bias, mask, query_seq_lengths, key_value_seq_lengths,
        is_causal, window,
    )  # fmt: skip
    if sees is None:
        return result
    out, residual = result if isinstance(result, tuple) else (result, None)
    out = jnp.where(sees[..., None], out, jnp.zeros((), out.dtype))
    return out if residual is None else (out, jnp.where(sees, residual, -jnp.inf))


def _sees_a_key(
    seq: int,
    kv_seq: int,
    bias: Array | None,
    mask: Array | None,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> Array | None:
    """Which query rows may see a key, [B|1, T, N|1]; None where all surely do."""
    beyond = window is not None and seq - 1 - window[0] >= kv_seq
    given = (bias, mask, query_seq_lengths, key_value_seq_lengths)
    if not beyond and all(array is None for array in given):
        return None
    rows = jnp.arange(seq)[:, None]
    columns = jnp.arange(kv_seq)[None, :]
    seen = jnp.ones((1, 1, seq, kv_seq), bool)
    if is_causal:
        seen &= columns <= rows
    if window is not None:
        seen &= (columns >= rows - window[0]) & (columns <= rows + window[1])
    if key_value_seq_lengths is not None:
        seen &= columns < key_value_seq_lengths[:, None, None, None]
    if query_seq_lengths is not None:
        seen &= rows < query_seq_lengths[:, None, None, None]
    if mask is not None:
        seen &= mask
    if bias is not None:
        seen &= bias != -jnp.inf
    return seen.any(-1).swapaxes(1, 2)
