"""Programs that the compile check builds for a GPU that is not there, beside those of the tuner.

Flexible attention under a mask, the recurrence at sizes whose arrays no one wants to
make, and the RAttention layer as it would be dispatched on the target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..autotune import aot, measure
from ..autotune.aot import Compilation
from ..autotune.targets import Target
from ..cache.key import Candidate, Device, Problem
from ..cache.record_set import RecordSet
from ..kernels import default, get_op, rattention
from ..kernels.attention import flex, pallas_flex
from ..kernels.decision import Decision, decide
from ..kernels.op import Op

#: Makes the compiler fail where a register is spilled, and name the kernel.
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
#: Mask and score functions of flexible attention, by the word that a problem has for them.
FLEX: dict[str, tuple[Any, Callable[[Problem, Any], Any]]] = {
    "flex[causal]": (None, lambda problem, ids: flex.causal),
    "flex[window]": (None, lambda problem, ids: flex.local_window(256, 0)),
    "flex[prefix]": (None, lambda problem, ids: flex.prefix(300)),
    "flex[document]": (None, lambda problem, ids: flex.document(ids)),
    "flex[alibi]": (flex.alibi(8), lambda problem, ids: flex.causal),
}
LAYER = Candidate("layer")
Program = tuple[Callable[..., Any], Sequence[Any]]


def compile_one(target: Target, problem: Problem, candidate: Candidate) -> Compilation:
    """Compiles a candidate, a flexible attention or a layer for a target."""
    return _compile(target, problem, candidate)


def compile_without_spills(target: Target, problem: Problem, candidate: Candidate) -> Compilation:
    """The same, and fails where the compiler spills a register."""
    return _compile(target, problem, candidate, **NO_SPILLS)


def _compile(target: Target, problem: Problem, candidate: Candidate, **options: Any) -> Compilation:
    programs: dict[str, Callable[[], Program]] = {
        "layer": lambda: _layer(problem),
        "flex": lambda: _flex(problem, candidate),
        "linear_attention": lambda: _linear(problem, candidate),
    }
    kind = problem.op
    if set(problem.features) & set(FLEX):
        kind = "flex"
    if candidate == LAYER:
        kind = "layer"
    if kind not in programs:
        return aot.compile_candidate(target, problem, candidate, **options)
    with _dispatching_for(target.device):
        return aot.compile_program(target, problem, candidate, programs[kind], **options)


def _flex(problem: Problem, candidate: Candidate) -> Program:
    """Flexible attention, its value and gradients; a block mask is part of the program."""
    (word,) = problem.features
    score_mod, mask_of = FLEX[word]
    plain = problem.replace(features=())
    inputs = get_op("attention").abstract_inputs(plain)
    ids = jax.ShapeDtypeStruct((problem.batch, problem.seq), jnp.int32)

    def loss(query: Any, key: Any, value: Any, weights: Any, ids: Any) -> Any:
        mask = mask_of(problem, ids)
        blocks = flex.create_block_mask(mask, problem.batch, None, problem.seq, problem.kv_seq)
        out = pallas_flex.attend_flexibly(
            query, key, value, score_mod, mask, blocks,
            scale=problem.dim**-0.5, return_residual=False, config=candidate.config,
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32) * weights)

    arguments = (*inputs.arrays[:3], *inputs.weights, ids)
    return jax.value_and_grad(loss, argnums=(0, 1, 2)), arguments


def _linear(problem: Problem, candidate: Candidate) -> Program:
    op = get_op("linear_attention")
    inputs = op.abstract_inputs(problem)
    return measure.program(op, problem, candidate, inputs), measure.arguments(problem, inputs)


def _layer(problem: Problem) -> Program:
    """The RAttention layer of ``heads`` × ``dim`` columns, plain or with its gradients."""
    assert isinstance(problem.window, int)
    cfg = rattention.RAttentionConfig(
        width=problem.heads * problem.dim,
        heads=problem.heads,
        head_dim=problem.dim,
        window=problem.window,
    )
    params = jax.eval_shape(lambda: rattention.init(jax.random.key(0), cfg))
    shape = (problem.batch, problem.seq, cfg.width)
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(problem.dtype))

    def plain(params: Any, x: Any) -> Any:
        return rattention.apply(params, x, cfg)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.square(plain(params, x).astype(jnp.float32)))

    function = plain if problem.mode == "fwd" else jax.value_and_grad(loss, argnums=(0, 1))
    return function, (params, x)


class _Untuned(default.State):
    """Decides as on a device that is not there, where nothing is tuned."""

    def __init__(self, device: Device) -> None:
        super().__init__([])
        self._device = device

    def decide(self, op: Op, problem: Problem) -> Decision:
        return decide(op, problem, self._device, RecordSet([]), self.settings)


@contextlib.contextmanager
def _dispatching_for(device: Device) -> Iterator[None]:
    token = default._scoped.set(_Untuned(device))
    try:
        yield
    finally:
        default._scoped.reset(token)
