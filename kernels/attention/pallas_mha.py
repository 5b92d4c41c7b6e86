"""`pallas_mha`: fused multi-head attention in Pallas, forward and backward.

Memory grows with seq + kv_seq: nothing but the output and the log-sum-exp is kept
for the gradients. Needs an NVIDIA GPU of compute capability 8.0 or later; on a
CPU it is interpreted, slowly, where it is asked for by name.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...cache.key import Config
from ..op import Implementation
from ..pallas import triton
from . import pallas_mha_space as spaces
from .masks import window_ends
from .pallas_mha_band import Band
from .pallas_mha_calls import Call, attend
from .pallas_mha_kernels import Blocks, Sizes
from .pallas_mha_scores import LN2, Scores

Array = jax.Array


def pallas_mha(
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
    """Attention in one fused kernel. Shapes and semantics as ``shapetune.attention``.

    A row that may see no key gives zeros, and -inf as its log-sum-exp.
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": mask,
        "q_lengths": query_seq_lengths,
        "kv_lengths": key_value_seq_lengths,
    }
    sizes = sizes_of(query, key, value)
    left, right = window_ends(is_causal, local_window_size)
    call = make_call(
        sizes,
        Scores(sizes.seq, sizes.kv_seq, float(scale), left, right),
        Band(sizes.seq, sizes.kv_seq, left, right),
        config,
        query.dtype,
    )
    there = {name: array for name, array in arrays.items() if array is not None}
    return finish(*attend(call, return_residual, there))


def sizes_of(query: Array, key: Array, value: Array) -> Sizes:
    """The sizes of a call with these arrays."""
    batch, seq, heads, dim = query.shape
    return Sizes(batch, seq, key.shape[1], heads, key.shape[2], dim, value.shape[3])


def make_call(sizes: Sizes, scores: Scores, schedule: Any, config: Config, dtype: Any) -> Call:
    """A call with the blocks of ``config``; those of the backward pass default to the forward's."""
    forward = Blocks(
        int(config["block_q"]),
        int(config["block_k"]),
        int(config["num_warps"]),
        int(config["num_stages"]),
    )
    warps = int(config.get("num_warps_bwd", forward.warps))
    stages = int(config.get("num_stages_bwd", 1))
    by_query, by_key = (
        Blocks(
            int(config.get(f"block_q_{name}", forward.q)),
            int(config.get(f"block_k_{name}", forward.k)),
            warps,
            stages,
        )
        for name in ("dq", "dkv")
    )
    precision = triton.dot_precision() if dtype == jnp.float32 else lax.Precision.DEFAULT
    return Call(sizes, scores, schedule, forward, by_query, by_key, precision)


def finish(out: Array, lse: Array | None) -> Any:
    """The result of a call: the output, with the log-sum-exp [B, T, N] if there is one."""
    if lse is None:
        return out
    return out, lax.stop_gradient((lse.swapaxes(1, 2) * LN2).astype(out.dtype))


IMPLEMENTATION = Implementation(
    name="pallas_mha",
    function=pallas_mha,
    version=2,
    space=spaces.space,
    supports=spaces.supports,
    default_config=spaces.default_config,
    own_gradient=True,
    automatic=lambda problem, device: device.platform == "cuda",
)
