"""`cudnn`: attention by cuDNN's fused kernels, through ``jax.nn.dot_product_attention``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ...cache.key import Config, Device, Problem
from ..op import Implementation
from .masks import finite_bias, zero_blind_rows
from .problem import feature_axes

Array = jax.Array


def cudnn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None,
    return_residual: bool = False,
    config: Config,
) -> Any:
    """Attention by cuDNN. Shapes as in ``shapetune.attention``."""
    attend: Any = jax.nn.dot_product_attention  # its overloads do not name every call
    result = attend(
        query,
        key,
        value,
        finite_bias(bias),
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation="cudnn",
        return_residual=return_residual,
    )
    return zero_blind_rows(
        result, query, key, bias, mask, query_seq_lengths, key_value_seq_lengths,
        is_causal, local_window_size,
    )  # fmt: skip


@functools.cache
def _missing() -> str | None:
    """Why cuDNN cannot be used in this process, asked of jax once."""
    one = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, one, one, one)
    except Exception as error:  # jax has no type of its own for a missing library
        return f"cuDNN cannot be used here: {error}"
    return None


def _supports(problem: Problem, device: Device) -> str | None:
    if device.platform != "cuda":
        return f"it needs an NVIDIA GPU, the device is {device.platform}"
    hopper = _at_least(device, 9)
    if not _at_least(device, 8):
        return f"it needs compute capability 8.0, {device.name} has {device.capability}"
    if problem.dtype == "float32":
        return "it has no float32 kernel"
    if problem.dim % 8 or problem.value_dim % 8:
        return f"its head sizes must be multiples of 8, got {problem.dim}, {problem.value_dim}"
    widest = 256 if hopper else 128
    if max(problem.dim, problem.value_dim) > widest:
        return f"its head sizes go up to {widest} here, got {problem.dim}, {problem.value_dim}"
    if problem.dim != problem.value_dim and not hopper:
        return "values of another size than keys need compute capability 9.0"
    if problem.window is not None and not problem.causal:
        assert isinstance(problem.window, tuple)
        if problem.window[1] != 0:
            return "its window has a left side only"
    additive = [feature_axes(problem, name) is not None for name in ("bias", "mask")]
    if any(additive) and problem.mode == "fwd_bwd" and (problem.seq % 2 or problem.kv_seq % 2):
        return "its bias needs even lengths for gradients"
    return _missing()


def _at_least(device: Device, major: int) -> bool:
    head = device.capability.partition(".")[0]
    return head.isdigit() and int(head) >= major


IMPLEMENTATION = Implementation(
    name="cudnn", function=cudnn, version=1, supports=_supports, own_gradient=True
)
