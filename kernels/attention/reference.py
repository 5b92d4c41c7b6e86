"""Attention in float64 NumPy: what every implementation is held to.

Written plainly from softmax(Q Kᵀ · scale + bias) V and its derivatives, one
(batch, key head) at a time and a stretch of query rows at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...cache.key import Problem
from ..op import Expected, Inputs, yardsticks

#: Query rows taken at once; bounds the memory at rows × kv_seq float64.
_STRETCH = 512
#: In mode fwd, at most about this many query rows are checked.
_SAMPLED_ROWS = 768


@dataclasses.dataclass
class _Slice:
    """Arrays of one (batch, query head), float64."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None
    mask: np.ndarray | None
    query_length: int
    key_value_length: int
    largest_score: float = 0.0


def expect(problem: Problem, inputs: Inputs, slices: int = 2) -> list[Expected]:
    """The right outputs, and in mode fwd_bwd gradients, of a few (batch, key head) slices.

    Args:
        problem: The problem.
        inputs: Its inputs; computed with as they are, in float64.
        slices: How many (batch, key head) pairs to check, spread over all.

    Returns:
        Values of ``out`` and of the gradients of query, key and value; that of a
        bias too where one slice determines it.
    """
    pairs = [(b, k) for b in range(problem.batch) for k in range(problem.kv_heads)]
    picked = [pairs[i] for i in sorted({round(x) for x in np.linspace(0, len(pairs) - 1, slices)})]
    inputs = inputs.on_host()
    found: list[Expected] = []
    for batch, kv_head in picked:
        found.extend(_expect_slice(problem, inputs, batch, kv_head))
    return found


def _expect_slice(problem: Problem, inputs: Inputs, batch: int, kv_head: int) -> list[Expected]:
    heads = range(kv_head * problem.group, (kv_head + 1) * problem.group)
    rows = _rows(problem)
    training = problem.mode == "fwd_bwd"
    found: list[_Found] = []
    key_gradient = _Sum((problem.kv_seq, problem.dim))
    value_gradient = np.zeros((problem.kv_seq, problem.value_dim))
    largest_score = 0.0
    scale = 1 / math.sqrt(problem.dim)
    for head in heads:
        one = _take(inputs, batch, head, kv_head)
        out = np.zeros((len(rows), problem.value_dim))
        query_gradient = _Sum((problem.seq, problem.dim))
        bias_gradient = (
            np.zeros((problem.seq, problem.kv_seq))
            if training and _own_bias(problem, inputs)
            else None
        )
        for start in range(0, len(rows), _STRETCH):
            at = rows[start : start + _STRETCH]
            weights = _softmax(problem, one, at)
            out[start : start + len(at)] = weights @ one.value
            if training:
                given = one.weight[at] * (at < one.query_length)[:, None]
                inner = (given * out[start : start + len(at)]).sum(-1, keepdims=True)
                outer = given @ one.value.T
                scores_gradient = weights * (outer - inner)
                # What is left of two terms that cancel carries the rounding of both.
                terms = weights * (np.abs(outer) + np.abs(inner))
                value_gradient += weights.T @ given
                key_gradient.add(..., scores_gradient.T, one.query[at] * scale, terms.T)
                query_gradient.add(at, scores_gradient, one.key * scale, terms)
                if bias_gradient is not None:
                    bias_gradient[at] = scores_gradient
        largest_score = max(largest_score, one.largest_score)
        where: Any = rows if len(rows) < problem.seq else slice(None)
        found.append((Expected("out", (batch, where, head), out), 0.0))
        if training:
            index = (batch, slice(None), head)
            found.append(
                (Expected("grad_query", index, query_gradient.value), query_gradient.largest_term)
            )
        if bias_gradient is not None:
            found.append((_bias_expected(inputs, batch, head, bias_gradient), 0.0))
    if training:
        index = (batch, slice(None), kv_head)
        found.append((Expected("grad_key", index, key_gradient.value), key_gradient.largest_term))
        found.append((Expected("grad_value", index, value_gradient), 0.0))
    return _conditioned(found, largest_score)


#: A slice, and the largest sum of the magnitudes that cancel in it.
_Found = tuple[Expected, float]


class _Sum:
    """A sum of products, and the same sum of the magnitudes of its terms."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.value = np.zeros(shape)
        self._terms = np.zeros(shape)

    def add(self, at: Any, left: np.ndarray, right: np.ndarray, terms: np.ndarray) -> None:
        self.value[at] += left @ right
        self._terms[at] += terms @ np.abs(right)

    @property
    def largest_term(self) -> float:
        return float(self._terms.max(initial=0.0))


def _conditioned(found: Sequence[_Found], largest_score: float) -> list[Expected]:
    """Slices with how much rounding is amplified in them."""
    relative_to = yardsticks([one for one, _ in found])
    return [
        dataclasses.replace(one, condition=largest_score + terms / yardstick)
        for (one, terms), yardstick in zip(found, relative_to, strict=True)
    ]


def _rows(problem: Problem) -> np.ndarray:
    """All query rows, or in mode fwd of a long problem a spread with both ends whole."""
    if problem.mode == "fwd_bwd" or problem.seq <= 2 * _SAMPLED_ROWS:
        return np.arange(problem.seq)
    ends = np.concatenate([np.arange(128), np.arange(problem.seq - 128, problem.seq)])
    inner = np.random.default_rng(0).integers(0, problem.seq, _SAMPLED_ROWS - 256)
    return np.unique(np.concatenate([ends, inner]))


def _take(inputs: Inputs, batch: int, head: int, kv_head: int) -> _Slice:
    query, key, value, bias, mask, query_lengths, key_value_lengths = inputs.arrays

    def pair(array: Any) -> np.ndarray | None:
        if array is None:
            return None
        return _wide(array[min(batch, array.shape[0] - 1), min(head, array.shape[1] - 1)])

    return _Slice(
        query=_wide(query[batch, :, head]),
        key=_wide(key[batch, :, kv_head]),
        value=_wide(value[batch, :, kv_head]),
        weight=_wide(inputs.weights[0][batch, :, head]),
        bias=pair(bias),
        mask=pair(mask),
        query_length=query.shape[1] if query_lengths is None else int(query_lengths[batch]),
        key_value_length=key.shape[1]
        if key_value_lengths is None
        else int(key_value_lengths[batch]),
    )


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _softmax(problem: Problem, one: _Slice, rows: np.ndarray) -> np.ndarray:
    """The attention weights of some rows, [rows, kv_seq]; zeros where no key is seen."""
    scores = one.query[rows] @ one.key.T / math.sqrt(problem.dim)
    if one.bias is not None:
        scores = scores + (one.bias if one.bias.shape[0] == 1 else one.bias[rows])
    scores = np.where(visible(problem, rows, one.key_value_length), scores, -np.inf)
    if one.mask is not None:
        scores = np.where(one.mask if one.mask.shape[0] == 1 else one.mask[rows], scores, -np.inf)
    scores[rows >= one.query_length] = -np.inf
    finite = np.abs(scores, where=np.isfinite(scores), out=np.zeros_like(scores))
    one.largest_score = max(one.largest_score, float(finite.max()))
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    return np.asarray(weights / np.where(total == 0, 1.0, total))


def visible(problem: Problem, rows: np.ndarray, key_value_length: int) -> np.ndarray:
    """Which keys these query rows see by the causal rule, the window and the length."""
    row = rows[:, None]
    column = np.arange(problem.kv_seq)[None, :]
    seen = column < key_value_length
    if problem.causal:
        seen = seen & (column <= row)
    if problem.window is not None:
        assert isinstance(problem.window, tuple)
        left, right = problem.window
        seen = seen & (column >= row - left) & (column <= row + right)
    return np.broadcast_to(seen, (len(rows), problem.kv_seq))


def _own_bias(problem: Problem, inputs: Inputs) -> bool:
    """Whether one (batch, head) determines the gradient of the bias there."""
    bias = inputs.arrays[3]
    return bias is not None and bias.shape[:2] == (problem.batch, problem.heads)


def _bias_expected(inputs: Inputs, batch: int, head: int, gradient: np.ndarray) -> Expected:
    shape: Sequence[int] = inputs.arrays[3].shape
    for axis in (0, 1):
        if shape[2 + axis] == 1:
            gradient = gradient.sum(axis, keepdims=True)
    return Expected("grad_bias", (batch, head), gradient)
