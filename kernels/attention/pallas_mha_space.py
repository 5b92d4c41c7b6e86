"""Which configs of the fused attention kernels are worth compiling, and on what.

The shared memory that Triton will ask for is worked out from blocks, dtype,
stages and warps, so that no trial is spent on a config that cannot be launched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from ...cache.key import Config, Device, Problem
from ..op import Space
from ..pallas.triton import padded

_BLOCKS = (32, 64, 128)
_WARPS = (4, 8)
_STAGES = (1, 2, 3, 4)
_MAX_DIM = 256
#: Grid axes 1 and 2, which heads and batch lie on, and 32-bit element offsets.
_MAX_GRID = 65535


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One of the kernels, as its tiles see it.

    A program keeps ``kept`` tiles of its own rows and walks over the other
    axis, whose tiles it loads in pairs.

    Attributes:
        block_own: Parameter that sizes the program's own rows.
        block_other: Parameter that sizes the tiles it walks over.
        warps: Parameter for the warps.
        stages: Parameter for the pipeline stages.
        kind: ``"forward"``, ``"by_query"`` or ``"by_key"``.
    """

    block_own: str
    block_other: str
    warps: str
    stages: str
    kind: str


FORWARD = Kernel("block_q", "block_k", "num_warps", "num_stages", "forward")
BY_QUERY = Kernel("block_q_dq", "block_k_dq", "num_warps_bwd", "num_stages_bwd", "by_query")
BY_KEY = Kernel("block_k_dkv", "block_q_dkv", "num_warps_bwd", "num_stages_bwd", "by_key")


def kernels_of(problem: Problem) -> tuple[Kernel, ...]:
    """The kernels whose parameters a problem's mode tunes."""
    return (FORWARD,) if problem.mode == "fwd" else (FORWARD, BY_QUERY, BY_KEY)


def shared_memory(kernel: Kernel, problem: Problem, device: Device, config: Config) -> int:
    """Bytes of shared memory that a program of a kernel needs, at least.

    Triton keeps a program's own tiles there for the tensor cores, and for each
    stage of the pipeline but one the pair of tiles of the axis it walks over.
    Where a result is an operand of the next product, Ampere passes it through
    shared memory unless a warp holds whole rows of both; Hopper's asynchronous
    products hold on to the tiles of one more stage.
    """
    own_rows, rows, warps, stages = _values(kernel, config)
    item = 2 if problem.dtype in ("bfloat16", "float16") else 4
    dim, value_dim = padded(problem.dim), padded(problem.value_dim)
    # Keys and values, or queries and output gradients: the same two widths.
    own = own_rows * item * (dim if kernel.kind == "forward" else dim + value_dim)
    first, second = rows * item * dim, rows * item * value_dim
    if stages == 1:
        both = item == 2 and kernel.kind == "by_key"
        return own + (first + second if both else max(first, second))
    pipelined = (stages - 1) * (first + second)
    statistics = (stages - 1) * 8 * rows if kernel.kind == "by_key" else 0
    if _asynchronous(device, own_rows):
        return own + pipelined + statistics + first + (second if item == 2 else 0)
    if item == 4 and kernel.kind == "by_query":  # keys are used twice, so not pipelined
        return own + (stages - 1) * second + first
    if item == 4 and kernel.kind == "by_key":
        return own + max(first, second) + statistics
    width = value_dim if kernel.kind == "forward" else dim
    passed = own_rows * rows * item if own_rows < width else 0
    return own + pipelined + statistics + passed


def _asynchronous(device: Device, own_rows: int) -> bool:
    return device.capability.startswith("9.") and own_rows >= 64


def _values(kernel: Kernel, config: Config) -> tuple[int, int, int, int]:
    names = (kernel.block_own, kernel.block_other, kernel.warps, kernel.stages)
    own, other, warps, stages = (int(config[name]) for name in names)
    return own, other, warps, stages


def supports(problem: Problem, device: Device) -> str | None:
    """Why the fused kernels cannot serve a problem, or None."""
    return None


def space(problem: Problem, device: Device) -> Space:
    return Space()


def default_config(problem: Problem, device: Device) -> Config:
    return {}
