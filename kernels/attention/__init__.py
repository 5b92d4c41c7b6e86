"""The op `attention` and its implementations, one file each."""

from ...cache.key import Candidate, Device, Problem
from ..op import Op, register_op
from . import blockwise, cudnn, mosaic, pallas_mha, tokamax, xla
from .api import attention
from .problem import HARD_INPUTS, canonical, flops, make_inputs, shapes, static_arguments, traffic
from .reference import expect

__all__ = ["attention"]

#: Scores of more bytes than this leave the processor's caches, and blocks pay.
_BLOCKS_PAY_BYTES = 2**25


def _heuristic(problem: Problem, device: Device) -> Candidate:
    """Plain XLA while the scores are small, blocks once they are not."""
    blocks = blockwise.IMPLEMENTATION
    too_large = xla.IMPLEMENTATION.supports(problem, device) is not None
    large = xla.scores_bytes(problem) > _BLOCKS_PAY_BYTES
    if (large or too_large) and blocks.supports(problem, device) is None:
        return Candidate(blocks.name, blocks.default_config(problem, device))
    return Candidate(xla.IMPLEMENTATION.name)


ATTENTION = register_op(
    Op(
        name="attention",
        outputs=("out",),
        static=static_arguments,
        make_inputs=make_inputs,
        shapes=shapes,
        expect=expect,
        flops=flops,
        traffic=traffic,
        heuristic=_heuristic,
        baseline="xla",
        hard_inputs=tuple(HARD_INPUTS),
        canonical=canonical,
    )
)
for _module in (xla, blockwise, pallas_mha, cudnn, mosaic, tokamax):
    ATTENTION.register(_module.IMPLEMENTATION)
