"""``shapetune.linear_attention``: its arguments checked once per shape, and handed
to the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ...cache.key import Value
from .. import default
from ..arguments import as_arrays, check_config, typed
from ..op import get_op
from .problem import NAMES, problem_of


def linear_attention(
    query: Any,
    key: Any,
    value: Any,
    initial_state: Any = None,
    *,
    window_size: int,
    feature_map: str = "softmax",
    implementation: str = "default",
    config: Mapping[str, Value] | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Residual linear attention: what a sliding window of attention leaves out.

    With the feature map :math:`\phi(x) = [\mathrm{softmax}(x), \mathrm{softmax}(-x)]`
    over the head dimension, it computes for each head

    .. math:: h_t = h_{t-1} + \phi(k_{t-w-1}) v_{t-w-1}^T, \quad o_t = \phi(q_t)^T h_t

    where w is ``window_size``, keys before the first are nothing, and there is no
    normaliser, scale or decay. The recurrence is that of linear transformers
    (https://arxiv.org/abs/2006.16236), beside a sliding window as in RAttention
    (https://arxiv.org/abs/2506.15545). Feature map, sums and state are float32.
    B is the batch size, T the positions, N the query heads, K the key heads (N a
    multiple of K), H the size of a query head and Hv that of a value head.

    Args:
        query: ``[B, T, N, H]``; float32, bfloat16 or float16.
        key: ``[B, T, K, H]``, of the same dtype.
        value: ``[B, T, K, Hv]``, of the same dtype.
        initial_state: float32 ``[B, N, 2H, Hv]``, h before the first position;
            zeros if None.
        window_size: How many positions before the own one are left out, beside
            it; -1 leaves out none, so that a position sees itself.
        feature_map: ``"softmax"``, or ``"relu"`` for [relu(x), relu(-x)].
        implementation: ``"default"`` for the tuned choice, or a name.
        config: The parameters of a named implementation; what it leaves out
            takes the implementation's default.

    Returns:
        The output ``[B, T, N, Hv]`` in the dtype of ``value``, and the final state
        float32 ``[B, N, 2H, Hv]``. Gradients flow from both to all four arrays.

    Raises:
        ProblemError: An argument has a wrong shape, dtype or value.
        UnknownNameError: No such implementation.
        UnsupportedError: The named implementation cannot do this call.
        ConfigError: The config is not in the implementation's space.
    """
    memo = default.state().memo
    try:
        static = (
            "linear_attention",
            query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
            window_size, window_size.__class__, feature_map, implementation,
            None if config is None else typed(tuple(config.items())),
            None if initial_state is None else (initial_state.shape, initial_state.dtype),
        )  # fmt: skip
        served = memo.get(static)
    except (AttributeError, TypeError):  # an array that is a list, a window that is one…
        served = static = None
    arrays = (query, key, value, initial_state)
    if served is None:
        arrays = as_arrays(NAMES, arrays)
        served = _prepare(arrays, window_size, feature_map, implementation, config)
        if static is not None:
            memo[static] = served
    return served(*arrays)


def _prepare(
    arrays: tuple[Any, ...],
    window_size: int,
    feature_map: str,
    implementation: str,
    config: Mapping[str, Value] | None,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The function of the arrays that serves calls of this shape."""
    check_config(config)
    problem = problem_of(arrays, window_size=window_size, feature_map=feature_map)
    chosen = default.prepare(get_op("linear_attention"), problem, implementation, config)
    return default.serve(chosen, chosen)
