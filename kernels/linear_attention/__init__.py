"""The op `linear_attention` and its implementations, one file each."""

from ...cache.key import Candidate, Device, Problem
from ..op import Op, register_op
from . import chunked, pallas, pallas_scanbwd, scan
from .api import linear_attention
from .problem import (
    HARD_INPUTS,
    canonical,
    expect,
    flops,
    make_inputs,
    shapes,
    static_arguments,
    traffic,
)

__all__ = ["linear_attention"]


def _heuristic(problem: Problem, device: Device) -> Candidate:
    """Chunks everywhere: the plain form is hard to beat untuned, on a GPU too."""
    one = chunked.IMPLEMENTATION
    return Candidate(one.name, one.default_config(problem, device))


LINEAR_ATTENTION = register_op(
    Op(
        name="linear_attention",
        outputs=("output", "final_state"),
        static=static_arguments,
        make_inputs=make_inputs,
        expect=expect,
        flops=flops,
        traffic=traffic,
        heuristic=_heuristic,
        baseline="scan",
        hard_inputs=tuple(HARD_INPUTS),
        canonical=canonical,
        shapes=shapes,
    )
)
for _module in (scan, chunked, pallas, pallas_scanbwd):
    LINEAR_ATTENTION.register(_module.IMPLEMENTATION)
