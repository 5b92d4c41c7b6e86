"""The op `attention` and its implementations, one file each."""

from ...cache.key import Candidate, Device, Problem
from ..op import Op, register_op
from . import blockwise, cudnn, llvm, mosaic, pallas_flex, pallas_mha, tokamax, xla
from .api import attention
from .flex import flex_attention
from .problem import HARD_INPUTS, canonical, flops, make_inputs, shapes, static_arguments, traffic
from .reference import expect

__all__ = ["attention", "flex_attention"]

#: Scores of so many bytes (see ``xla.scores_bytes``) leave the caches, and blocks pay.
_BLOCKS_PAY_ON_CPU = 2**24
_BLOCKS_PAY_ON_GPU = 2**25
#: Our own kernels on a CPU pay sooner; below, XLA's are left, which forward mode goes through.
_KERNELS_PAY_ON_CPU = 2**20
#: With fewer queries than these most lanes of a panel are empty, and XLA is as fast.
_PANELS_PAY = 8


def _heuristic(problem: Problem, device: Device) -> Candidate:
    """The vendor's kernel where there is one; else plain XLA while the scores are
    small, and a kernel that never holds them all once they are not."""
    size = xla.scores_bytes(problem)
    large = size >= (_BLOCKS_PAY_ON_CPU if device.platform == "cpu" else _BLOCKS_PAY_ON_GPU)
    order = [cudnn]
    order += [llvm] if size >= _KERNELS_PAY_ON_CPU and problem.seq >= _PANELS_PAY else []
    order += [pallas_mha, blockwise, xla] if large else [xla, pallas_mha, blockwise]
    for module in order:
        one = module.IMPLEMENTATION
        if one.automatic(problem, device) and one.supports(problem, device) is None:
            return Candidate(one.name, one.default_config(problem, device))
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
for _module in (xla, blockwise, llvm, pallas_mha, pallas_flex, cudnn, mosaic, tokamax):
    ATTENTION.register(_module.IMPLEMENTATION)
