"""Which configs of the fused attention kernels are worth compiling, and on what.

The shared memory that Triton will ask for is worked out from blocks, dtype,
stages and warps, so that no trial is spent on a config that cannot be launched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from ...cache.key import Config, Device, Problem
from ..op import Space
from ..pallas.triton import padded
from .problem import feature_axes

_BLOCKS = (32, 64, 128)
_WARPS = (4, 8)
_STAGES = (1, 2, 3, 4)
_MAX_DIM = 256
#: A thread has 255 registers; beyond this many for results, addresses are spilled.
_MAX_REGISTERS = 192
#: What gradients of heads above 128 take at least to change the layout of their results.
_CONVERSION = 2**14
_FEATURES = ("bias", "mask", "q_lengths", "kv_lengths", "residual", "precision")
#: By kernel and bytes of an element: own rows, rows walked over, warps and stages for
#: head sizes up to 64, 128 and 256. Chosen as the largest that spill no register on
#: compute capability 8.0, 8.6 and 9.0, with and without the causal rule.
_PREFERRED = {
    ("forward", 2): ((128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
    ("by_query", 2): ((64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    ("by_key", 2): ((64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    ("forward", 4): ((64, 32, 4, 3), (64, 32, 8, 2), (32, 32, 4, 1)),
    ("by_query", 4): ((32, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
    ("by_key", 4): ((32, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
}
#: The same where a bias or a mask takes registers and shared memory of its own.
_PREFERRED_ADDED = _PREFERRED | {
    ("forward", 2): ((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
    ("by_query", 2): ((64, 32, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    ("by_key", 2): ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    ("by_query", 4): ((32, 32, 4, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    ("by_key", 4): ((32, 32, 4, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
}
#: The forward kernel's for a window and heads up to 64, whose two edges take registers.
_PREFERRED_WINDOW = (128, 64, 4, 2)


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
    stage of the pipeline but one the pair of tiles of the axis it walks over, with
    the tile of the bias and of the mask.
    Where a result is an operand of the next product, Ampere passes it through
    shared memory unless a warp holds whole rows of both; Hopper's asynchronous
    products hold on to the tiles of one more stage.
    """
    own_rows, rows, _, stages = _values(kernel, config)
    item = 4 if problem.dtype == "float32" else 2
    dim, value_dim = padded(problem.dim), padded(problem.value_dim)
    # Keys and values, or queries and output gradients: the same two widths.
    own = own_rows * item * (dim if kernel.kind == "forward" else dim + value_dim)
    first, second = rows * item * dim, rows * item * value_dim
    forward = kernel.kind == "forward"
    width = value_dim if forward else dim
    passed = own_rows * rows * item if own_rows < width else 0
    if stages == 1:
        both = item == 2 and kernel.kind == "by_key"
        own += first + second if both else max(first, second)
        if item == 4 or _asynchronous(device, own_rows):
            return own
        return own + (passed if forward else _CONVERSION if width == _MAX_DIM else 0)
    own += (stages - 1) * _added_tiles(kernel, problem, own_rows, rows, item)
    pipelined = (stages - 1) * (first + second)
    statistics = (stages - 1) * 8 * rows if kernel.kind == "by_key" else 0
    if _asynchronous(device, own_rows):
        return own + pipelined + statistics + first + (second if item == 2 else 0)
    if item == 4 and kernel.kind == "by_query":  # keys are used twice, so not pipelined
        return own + (stages - 1) * second + first
    if item == 4 and kernel.kind == "by_key":
        return own + max(first, second) + statistics
    return own + pipelined + statistics + passed


def _added_tiles(kernel: Kernel, problem: Problem, own_rows: int, rows: int, item: int) -> int:
    """Bytes of what is added to a tile of scores: the bias, and a byte each for the mask."""
    own_axis, axis = ("s", "t") if kernel.kind == "by_key" else ("t", "s")
    total = 0
    for name, size in (("bias", item), ("mask", 1)):
        axes = feature_axes(problem, name) or ""
        if axis in axes and own_axis in axes:
            total += own_rows * rows * size
        elif axis in axes and size > 1:  # a row of single bytes is not worth a copy
            total += rows * size
    return total


def _asynchronous(device: Device, own_rows: int) -> bool:
    return device.capability.startswith("9.") and own_rows >= 64


def _values(kernel: Kernel, config: Config) -> tuple[int, int, int, int]:
    names = (kernel.block_own, kernel.block_other, kernel.warps, kernel.stages)
    own, other, warps, stages = (int(config[name]) for name in names)
    return own, other, warps, stages


def registers(kernel: Kernel, problem: Problem, config: Config) -> float:
    """32-bit registers that a thread needs for the running sums and the scores."""
    own_rows, rows, warps, _ = _values(kernel, config)
    dim, value_dim = padded(problem.dim), padded(problem.value_dim)
    width, tiles = {
        "forward": (value_dim, 1),
        "by_query": (dim, 2),
        "by_key": (dim + value_dim, 2),
    }[kernel.kind]
    return own_rows * (width + tiles * rows) / (32 * warps)


def supports(problem: Problem, device: Device) -> str | None:
    """Why the fused kernels cannot serve a problem on a device, or None."""
    if device.platform not in ("cuda", "cpu"):
        return f"it is written for NVIDIA GPUs, not for {device.platform}"
    if device.platform == "cuda" and _capability(device) < 8:
        return f"it needs compute capability 8.0, {device.name} has {device.capability}"
    for name in ("dim", "value_dim"):
        if getattr(problem, name) > _MAX_DIM:
            return f"{name} {getattr(problem, name)} is above {_MAX_DIM}"
    for word in problem.features:
        if word.split("[")[0] not in _FEATURES:
            return f"it does not know the feature {word}"
    if any(word.startswith("mask[") for word in problem.features) and _pairs(problem) >= 2**31:
        return "its mask may have 2^31 elements or more"
    if device.platform == "cuda" and next(iter(space(problem, device)), None) is None:
        return f"no tile fits the {device.shared_memory} bytes of shared memory"
    return None


def _capability(device: Device) -> int:
    major = device.capability.split(".")[0]
    return int(major) if major.isdigit() else 0


def _pairs(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.seq * problem.kv_seq


def space(problem: Problem, device: Device) -> Space:
    """The configs worth compiling: they fit shared memory and registers."""
    choices: dict[str, tuple[int, ...]] = {}
    where: list[Callable[[Config], bool]] = []
    queries, keys = _blocks(problem.seq), _blocks(problem.kv_seq)
    for kernel in kernels_of(problem):
        by_key = kernel.kind == "by_key"
        choices[kernel.block_own] = keys if by_key else queries
        choices[kernel.block_other] = queries if by_key else keys
        choices[kernel.warps] = _WARPS
        choices[kernel.stages] = _STAGES if kernel is FORWARD else _STAGES[:3]
        where.append(functools.partial(_fits, kernel, problem, device))
    return Space(choices, tuple(where))


def _blocks(seq: int) -> tuple[int, ...]:
    """Block sizes up to the first that holds the whole sequence."""
    return tuple(block for block in _BLOCKS if block <= padded(seq)) or (padded(seq),)


def _fits(kernel: Kernel, problem: Problem, device: Device, config: Config) -> bool:
    if registers(kernel, problem, config) >= _MAX_REGISTERS:
        return False
    limit = device.shared_memory
    return not limit or shared_memory(kernel, problem, device, config) <= limit


def default_config(problem: Problem, device: Device) -> Config:
    """Blocks that no register is spilled for, cut down to the problem and the device."""
    config: dict[str, int] = {}
    for kernel in kernels_of(problem):
        preferred = _preferred(kernel, problem)
        names = (kernel.block_own, kernel.block_other, kernel.warps, kernel.stages)
        config.update(zip(names, preferred, strict=True))
        own_seq, seq = problem.seq, problem.kv_seq
        if kernel.kind == "by_key":
            own_seq, seq = seq, own_seq
        config[kernel.block_own] = min(config[kernel.block_own], _blocks(own_seq)[-1])
        config[kernel.block_other] = min(config[kernel.block_other], _blocks(seq)[-1])
    if _programs(problem, config["block_q"]) < device.cores and config["block_q"] > 64:
        config["block_q"] = 64  # more programs, so that no core idles
    _shrink(problem, device, config)
    return config


def _preferred(kernel: Kernel, problem: Problem) -> tuple[int, int, int, int]:
    wide = max(padded(problem.dim), padded(problem.value_dim))
    item = 4 if problem.dtype == "float32" else 2
    added = any(feature_axes(problem, name) is not None for name in ("bias", "mask"))
    if kernel is FORWARD and problem.window is not None and wide <= 64 and item == 2 and not added:
        return _PREFERRED_WINDOW
    table = _PREFERRED_ADDED if added else _PREFERRED
    return table[kernel.kind, item][0 if wide <= 64 else 1 if wide <= 128 else 2]


def _programs(problem: Problem, block: int) -> int:
    return problem.batch * problem.heads * -(-problem.seq // block)


def _shrink(problem: Problem, device: Device, config: dict[str, int]) -> None:
    """Takes stages, then rows, off a config until it is in the space."""
    for kernel in kernels_of(problem):
        for name, low in ((kernel.stages, 1), (kernel.block_other, 32), (kernel.block_own, 32)):
            while config[name] > low and not _fits(kernel, problem, device, config):
                config[name] = config[name] - 1 if name == kernel.stages else config[name] // 2
