"""`tokamax`: attention by the package of that name, where it is installed.

Its public function chooses the block sizes itself; which of its kernels runs is
the parameter here.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from ...cache.key import Config, Device, Problem
from ..op import Implementation, Space
from .masks import finite_bias, zero_blind_rows

Array = jax.Array


def tokamax(
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
    """Attention by ``tokamax.dot_product_attention``. Shapes as in ``shapetune.attention``."""
    import tokamax as package

    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        bias = bias.astype(jnp.float32)
    out = package.dot_product_attention(
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
        implementation=config["kernel"],
    )
    return zero_blind_rows(
        out, query, key, bias, mask, query_seq_lengths, key_value_seq_lengths,
        is_causal, local_window_size,
    )  # fmt: skip


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "the package tokamax is not installed"
    return None


def _supports(problem: Problem, device: Device) -> str | None:
    if "residual" in problem.features:
        return "it does not return the residual"
    if device.platform == "cpu" and problem.dtype == "float16":
        return "its product of float16 arrays does not exist on a CPU"
    return _missing()


def _kernels(device: Device) -> tuple[str, ...]:
    if device.platform != "cuda":
        return ("xla_chunked",)
    newer = device.capability.partition(".")[0] in ("9", "10")
    return ("triton", "mosaic", "xla_chunked") if newer else ("triton", "xla_chunked")


def _space(problem: Problem, device: Device) -> Space:
    return Space({"kernel": _kernels(device)})


IMPLEMENTATION = Implementation(
    name="tokamax",
    function=tokamax,
    version=1,
    space=_space,
    supports=_supports,
    default_config=lambda problem, device: {"kernel": _kernels(device)[0]},
    own_gradient=True,
)
