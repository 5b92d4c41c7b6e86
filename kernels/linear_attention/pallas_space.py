"""Which configs of the linear attention kernels are worth compiling, and on what.

Shared memory is bounded from below by what Triton was seen to ask for, so that no
config that would compile is left out for it.
"""

from __future__ import annotations

from ...cache.key import Config, Device, Problem
from ..op import Space
from ..pallas.triton import padded
from .problem import window_of

#: Elements that a thread may hold at a time; somewhat more than it has registers.
_MAX_HELD = 384
#: Multiplications of a thread without tensor cores; the compiler unrolls them all.
_MAX_UNROLLED = 2**14

#: By the wider of the two head sizes: chunk, value tile and warps that leave the
#: kernels within 99 KiB of shared memory, and their states small.
_DEFAULTS = {
    ("float32", "fwd"): {32: (64, 32, 4), 64: (64, 64, 4), 128: (16, 32, 4)},
    ("float32", "fwd_bwd"): {32: (64, 32, 4), 64: (32, 64, 4), 128: (16, 32, 4)},
    ("tf32", "fwd"): {32: (64, 32, 4), 64: (128, 32, 8), 128: (64, 32, 8)},
    ("tf32", "fwd_bwd"): {32: (64, 32, 4), 64: (64, 64, 4), 128: (64, 32, 8)},
}
_WIDEST = (16, 16, 4)


def shared_memory(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that the hungriest of the kernels needs, at least.

    Products of full float32 read both factors from there, so all that meet in a
    kernel are there at once; tensor cores leave the scores and one half of the
    features. A loop over value tiles holds those of all its stages but one.
    """
    chunk, tile = int(config["chunk"]), int(config["value_tile"])
    dim, tiles = padded(problem.dim), padded(problem.value_dim) // tile
    exact = config["precision"] == "float32"
    rows, states, scores = chunk * tile, 2 * dim * tile, chunk * chunk
    held = 4 * chunk * dim + rows if exact else chunk * dim
    if config["variant"] == "fused" and exact:
        held += scores + states
    needed = 4 * held
    if problem.mode == "fwd_bwd":
        halves = 2 * chunk * dim if exact else 0
        both = 4 * chunk * dim + rows + states + scores if exact else scores + chunk * dim
        if tiles == 1:
            return max(needed, 4 * (both + (rows if exact else 0)))
        item = 4 if problem.dtype == "float32" else 2
        loaded = 2 * rows * item + 4 * states
        needed = max(needed, 4 * both, 4 * halves + (int(config["num_stages"]) - 1) * loaded)
    return needed


def _compiles_in_time(problem: Problem, config: Config) -> bool:
    """Whether a thread's share of a chunk is small enough to be unrolled into code."""
    chunk, tile = int(config["chunk"]), int(config["value_tile"])
    dim, threads = padded(problem.dim), 32 * int(config["num_warps"])
    held = 4 * chunk * dim + 2 * dim * tile + chunk * chunk
    products = chunk * (2 * chunk * dim + chunk * tile + 4 * dim * tile)
    exact = config["precision"] == "float32"
    return held <= _MAX_HELD * threads and not (exact and products > _MAX_UNROLLED * threads)


def space(problem: Problem, device: Device) -> Space:
    """The configs worth compiling: they fit shared memory, and are not mostly padding."""
    seen = max(problem.seq - window_of(problem) - 1, 1)
    widest = padded(problem.value_dim)
    precisions = ("float32", "tf32") if problem.dtype == "float32" else ("tf32", "float32")
    limit = device.shared_memory
    return Space(
        {
            "chunk": (16, 32, 64, 128),
            "value_tile": (16, 32, 64, 128),
            "variant": ("parallel", "fused"),
            "num_warps": (2, 4, 8),
            "num_stages": (1, 2, 3),
            "precision": precisions,
        },
        where=(
            lambda c: int(c["chunk"]) < max(2 * seen, 32),
            lambda c: int(c["value_tile"]) <= widest,
            lambda c: _compiles_in_time(problem, c),
            lambda c: not limit or shared_memory(problem, c) <= limit,
        ),
    )


def default_config(problem: Problem, device: Device) -> Config:
    """Tiles that fit any supported GPU; float32 products where the arrays are float32."""
    precision = "float32" if problem.dtype == "float32" else "tf32"
    widest = max(32, padded(problem.dim), padded(problem.value_dim))
    chunk, tile, warps = _DEFAULTS[precision, problem.mode].get(widest, _WIDEST)
    config: dict[str, int | str] = {
        "chunk": chunk,
        "value_tile": min(tile, padded(problem.value_dim)),
        "variant": "parallel",
        "num_warps": warps,
        "num_stages": 1,
        "precision": precision,
    }
    offered = space(problem, device)
    while offered.refusal(config) and chunk > 16:
        chunk //= 2
        config["chunk"] = chunk
    return config


def supports(problem: Problem, device: Device) -> str | None:
    """Heads of up to 256, on an NVIDIA GPU or interpreted on a CPU."""
    if device.platform not in ("cuda", "cpu"):
        return f"it needs an NVIDIA GPU, not {device.platform}"
    if max(problem.dim, problem.value_dim) > 256:
        return f"heads of up to 256 fit, not {max(problem.dim, problem.value_dim)}"
    return None
