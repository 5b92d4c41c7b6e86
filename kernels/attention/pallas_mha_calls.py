"""A fused attention call: its kernels launched, and tied into differentiation.

Shared by the plain and the flexible attention; they differ in their schedule of
tiles and in what a score is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..pallas import triton
from ..pallas.once import differentiable_once
from . import pallas_mha_kernels as kernels
from ._key_centre import is_centred, key_centre
from .pallas_mha_kernels import Blocks, Schedule, Sizes
from .pallas_mha_scores import Scores

Array = jax.Array
#: The arrays of a call by name: query, key, value, bias, mask, q_lengths,
#: kv_lengths, and whatever the schedule and the mods read.
Arrays = dict[str, Array]

_ROWS = (
    "query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value",
    "key_centre",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call; equal calls share one compiled program."""

    sizes: Sizes
    scores: Scores
    schedule: Schedule
    forward: Blocks
    by_query: Blocks
    by_key: Blocks
    precision: lax.Precision

    def launch(
        self,
        body: Callable[[kernels.Kernel, Any], None],
        blocks: Blocks,
        grid: tuple[int, int, int],
        inputs: Arrays,
        outputs: Mapping[str, jax.ShapeDtypeStruct],
    ) -> Arrays:
        """Runs one of the kernels over a grid of (block, head, batch)."""
        kernel = kernels.Kernel(self.sizes, self.scores, self.schedule, blocks, self.precision)
        return triton.call(
            functools.partial(body, kernel),
            name=f"attention_{body.__name__}",
            grid=grid,
            inputs=inputs,
            outputs=outputs,
            padded_rows=_ROWS,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(call: Call, with_lse: bool, arrays: Arrays) -> tuple[Array, Array | None]:
    """Attention, and the log-sum-exp [B, N, T] in base 2 if asked for.

    No gradient passes through the log-sum-exp.
    """
    return _attend(call, with_lse, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(call: Call, with_lse: bool, arrays: Arrays) -> tuple[Array, Array | None]:
    sizes, query = call.sizes, arrays["query"]
    outputs = {
        "out": jax.ShapeDtypeStruct((*query.shape[:-1], sizes.value_dim), query.dtype),
    }
    if with_lse:
        shape = (sizes.batch, sizes.heads, sizes.seq)
        outputs["lse"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    grid = (-(-sizes.seq // call.forward.q), sizes.heads, sizes.batch)
    results = call.launch(kernels.forward, call.forward, grid, arrays, outputs)
    return results["out"], results.get("lse")


def _attend_forward(call: Call, with_lse: bool, arrays: Arrays) -> Any:
    out, lse = _attend(call, True, arrays)
    return (out, lse if with_lse else None), (arrays, out, lse)


def _attend_backward(call: Call, with_lse: bool, saved: Any, gradients: Any) -> Any:
    backward = functools.partial(_gradients, call)
    once = differentiable_once(backward, "the Pallas kernels of attention", "xla")
    return (once(*saved, gradients[0]),)


def _gradients(call: Call, arrays: Arrays, out: Array, lse: Array, grad_out: Array) -> Arrays:
    sizes = call.sizes
    by_query = (-(-sizes.seq // call.by_query.q), sizes.heads, sizes.batch)
    by_key = (-(-sizes.kv_seq // call.by_key.k), sizes.kv_heads, sizes.batch)
    grad_out = grad_out.astype(out.dtype)
    delta = call.launch(
        kernels.backward_delta,
        call.by_query,
        by_query,
        {"out": out, "grad_out": grad_out},
        {"delta": jax.ShapeDtypeStruct(lse.shape, jnp.float32)},
    )
    inputs = {**arrays, **delta, "lse": lse, "grad_out": grad_out}
    gradient = {f"grad_{name}": _like(arrays[name]) for name in ("query", "key", "value")}
    of_query = inputs
    # A score function's slopes do not sum to zero.
    if is_centred(arrays["key"].dtype) and not call.scores.has_score_mod:
        of_query = {**inputs, "key_centre": key_centre(arrays["key"])}
    found = call.launch(
        kernels.backward_query, call.by_query, by_query, of_query, _only(gradient, "grad_query")
    ) | call.launch(
        kernels.backward_key, call.by_key, by_key, inputs, _only(gradient, "grad_key", "grad_value")
    )
    result: dict[str, Any] = dict.fromkeys(arrays)
    result.update((name, found[f"grad_{name}"]) for name in ("query", "key", "value"))
    if "bias" in arrays:
        result["bias"] = _bias_gradient(call, inputs)
    return result


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _only(shapes: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: shapes[name] for name in names}


def _bias_gradient(call: Call, inputs: Arrays) -> Array:
    bias, sizes, blocks = inputs["bias"], call.sizes, call.by_query
    batches, heads, rows, columns = bias.shape
    if columns == 1:  # softmax does not change when a whole row is shifted
        return jnp.zeros_like(bias)
    row_blocks = 1 if rows == 1 else -(-sizes.seq // blocks.q)
    grid = (row_blocks * -(-sizes.kv_seq // blocks.k), heads, batches)
    outputs = {"grad_bias": _like(bias)}
    return call.launch(kernels.backward_bias, blocks, grid, inputs, outputs)["grad_bias"]


_attend.defvjp(_attend_forward, _attend_backward)
