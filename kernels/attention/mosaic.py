"""`mosaic`: jax's bundled FlashAttention-3 kernel for Hopper (Mosaic GPU), its blocks tunable."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax

from ...cache.key import Config, Device, Problem
from ..op import Implementation, Space

Array = jax.Array
_BLOCKS = (64, 128, 192, 256)
#: Bytes of shared memory for barriers, sums of rows and alignment; they took 3288.
_OVERHEAD = 4096
#: Warpgroups that compute, each on a block of queries.
_WARPGROUPS = 2


def mosaic(
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
    """Attention on Hopper (https://arxiv.org/abs/2407.08608). No bias, mask, length or window.

    The kernel has no scale of its own, so it goes into the query, in the query's
    dtype: exact where the scale is a power of two (head sizes 64 and 256).
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    blocks: dict[str, Any] = {}
    for name, size in config.items():
        if name.endswith("_bwd"):  # the kernel takes one for each of its two backward passes
            blocks |= {name.replace("_bwd", kernel): int(size) for kernel in ("_dq", "_dkv")}
        else:
            blocks[name] = int(size)
    tuning = attention_mgpu.TuningConfig(causal=is_causal, **blocks)
    return attention_mgpu.attention(
        query * jax.numpy.asarray(scale, query.dtype), key, value, tuning
    )


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("absl") is None:
        return "it needs the package absl-py"
    return None


def _supports(problem: Problem, device: Device) -> str | None:
    if device.platform != "cuda" or device.capability != "9.0":
        return f"it needs a Hopper GPU, the device is {device.name}"
    if problem.dtype != "float16":
        return f"it keeps its tiles in float16, so it multiplies no {problem.dtype}"
    if problem.features or problem.window is not None:
        return "it has no bias, mask, lengths, window, residual or precision"
    if problem.dim % 64 or problem.value_dim != problem.dim:
        return f"its head size must be a multiple of 64, got {problem.dim}, {problem.value_dim}"
    if problem.mode == "fwd_bwd" and problem.causal:
        return "it has no causal backward pass"
    if problem.seq % (_WARPGROUPS * 64) or problem.kv_seq % 64:
        return f"its lengths must be multiples of 128 and 64, got {problem.seq}, {problem.kv_seq}"
    return _missing()


def _held(dim: int, resident: int, passing: int, steps: int) -> int:
    """Bytes of the tiles in shared memory: rows that stay, and ``steps`` pairs of blocks
    of ``passing`` rows; two bytes an element."""
    return 2 * dim * (resident + 2 * steps * passing)


def _space(problem: Problem, device: Device) -> Space:
    choices: dict[str, tuple[int | str, ...]] = {
        "block_q": tuple(b for b in _BLOCKS if problem.seq % (_WARPGROUPS * b) == 0),
        "block_kv": tuple(b for b in _BLOCKS if problem.kv_seq % b == 0),
        "max_concurrent_steps": (2, 3, 4, 6),
    }
    if problem.mode == "fwd_bwd":
        choices["block_q_bwd"] = tuple(b for b in (64, 128) if problem.seq % b == 0)
        choices["block_kv_bwd"] = tuple(b for b in (64, 128) if problem.kv_seq % b == 0)

    def fits(config: Config) -> bool:
        steps = int(config["max_concurrent_steps"])
        block_q, block_kv = int(config["block_q"]), int(config["block_kv"])
        needs = [_held(problem.dim, _WARPGROUPS * block_q, block_kv, steps)]
        if "block_q_bwd" in config:  # one warpgroup, which keeps two blocks
            q, kv = int(config["block_q_bwd"]), int(config["block_kv_bwd"])
            needs.append(_held(problem.dim, 2 * q, kv, min(steps, problem.seq // q)))
            needs.append(_held(problem.dim, 2 * kv, q, min(steps, problem.kv_seq // kv)))
        return max(needs) + _OVERHEAD <= device.shared_memory

    def has_that_many_steps(config: Config) -> bool:
        return int(config["max_concurrent_steps"]) * int(config["block_kv"]) <= problem.kv_seq

    return Space(choices, (fits, has_that_many_steps))


def _default_config(problem: Problem, device: Device) -> Config:
    wanted = {"block_q": 64, "block_kv": 128, "max_concurrent_steps": 2,
              "block_q_bwd": 64, "block_kv_bwd": 64}  # fmt: skip
    space = _space(problem, device)
    config = space.fit({name: wanted[name] for name in space.choices})
    return config if space.refusal(config) is None else next(iter(space), config)


IMPLEMENTATION = Implementation(
    name="mosaic",
    function=mosaic,
    version=1,
    space=_space,
    supports=_supports,
    default_config=_default_config,
    own_gradient=True,
)
