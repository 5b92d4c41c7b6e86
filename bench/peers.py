"""Implementations that a benchmark measures beside the registered ones.

`default` is the public function, as a user calls it; `jax_xla` and `jax_cudnn` are
`jax.nn.dot_product_attention`. They join a copy of the op, so that all are
compiled, checked and timed by the same code.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .. import attention, linear_attention
from ..cache.key import Candidate, Device, Problem
from ..kernels.op import Implementation, Op

Array = Any


def widened(op: Op) -> Op:
    """A copy of an op whose implementations include `default` and jax's own."""
    extra = _ATTENTION if op.name == "attention" else _LINEAR
    return dataclasses.replace(op, implementations={**op.implementations, **extra})


def candidate_of(
    op: Op, name: str, problem: Problem, device: Device, chunk: int | None
) -> Candidate:
    """An implementation as a benchmark runs it.

    That is with its default config, and `chunked` with the chunk of the suite: the
    other kernels of the recurrence do not fit every GPU at any chunk.
    """
    one = op.implementation(name)
    if one.supports(problem, device) is not None:
        return Candidate(name)  # refused with the reason once it is required
    config = dict(one.default_config(problem, device))
    if name == "chunked" and chunk is not None:
        wished = {**config, "chunk": chunk}
        config = wished if one.space(problem, device).refusal(wished) is None else config
    return Candidate(name, config)


def too_slow(one: Implementation, device: Device) -> str | None:
    """Why an implementation is not timed here unless asked for, or None."""
    interpreted = device.platform == "cpu" and one.name.startswith("pallas")
    if not interpreted:
        return None
    return (
        f"{one.name} runs interpreted on a CPU, hundreds of times slower than compiled; "
        "--interpret times it all the same"
    )


def _default_attention(
    query: Array, key: Array, value: Array, *rest: Array, is_causal: bool, **static: Any
) -> Array:
    return attention(query, key, value, is_causal=is_causal)


def _default_linear(
    query: Array, key: Array, value: Array, state: Array, *, window_size: int, **static: Any
) -> Array:
    return linear_attention(query, key, value, state, window_size=window_size)


def _jax_nn(implementation: str) -> Implementation:
    def call(
        query: Array, key: Array, value: Array, *rest: Array, is_causal: bool, **static: Any
    ) -> Array:
        attend: Any = jax.nn.dot_product_attention
        return attend(query, key, value, is_causal=is_causal, implementation=implementation)

    return Implementation(f"jax_{implementation}", call)


_ATTENTION = {
    "default": Implementation("default", _default_attention),
    **{one.name: one for one in (_jax_nn("xla"), _jax_nn("cudnn"))},
}
_LINEAR = {"default": Implementation("default", _default_linear)}
