"""Linear attention in Pallas kernels for NVIDIA GPUs, parallel over chunks.

Three passes forward (sums of each chunk, running sums, outputs of each chunk) or
one fused pass that walks the chunks; the backward pass is always parallel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...cache.key import Device, Problem
from ..op import Config, Implementation
from ..pallas import triton
from ..pallas.once import differentiable_once
from . import pallas_kernels as kernels
from . import pallas_space
from .features import rows_before_any_key, rows_before_any_key_gradient
from .pallas_kernels import Kernel

Array = jax.Array
Arrays = dict[str, Array]
_ROWS = ("query", "key", "value", "output", "d_output", "d_query", "d_key", "d_value")
PRECISIONS = {"tf32": lax.Precision.DEFAULT, "float32": lax.Precision.HIGHEST}
#: Elements of a state that one program of the running sums handles.
_RUN = 256


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call; equal calls share one compiled program."""

    kernel: Kernel
    batch: int
    heads: int
    fused: bool
    num_warps: int
    num_stages: int

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.heads // self.kernel.group

    def run(
        self,
        body: Callable[[Kernel, Mapping[str, Any]], None],
        grid: tuple[int, int, int],
        inputs: Arrays,
        outputs: dict[str, Any],
    ) -> Arrays:
        """Launches one of the kernels."""
        return triton.call(
            functools.partial(body, self.kernel),
            name=f"linear_attention_{body.__name__}",
            grid=grid,
            inputs=inputs,
            outputs=outputs,
            padded_rows=_ROWS,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )

    def state_shape(self, heads: int, chunks: int | None = None) -> Any:
        """One state for each head, or for each head and chunk."""
        sizes = (triton.padded(self.kernel.dim), triton.padded(self.kernel.value_dim))
        many = () if chunks is None else (chunks,)
        return jax.ShapeDtypeStruct((self.batch, heads, *many, 2, *sizes), jnp.float32)


def pallas(
    query: Array,
    key: Array,
    value: Array,
    initial_state: Array | None,
    *,
    window_size: int,
    feature_map: str,
    config: Config,
) -> tuple[Array, Array]:
    """Residual linear attention in Pallas kernels; shapes as ``linear_attention``.

    Args:
        config: ``chunk`` positions share one state; ``value_tile`` columns of the
            values are handled by one program; ``variant`` is ``"parallel"`` or
            ``"fused"``; ``precision`` of float32 products is ``"float32"``, or
            ``"tf32"`` (10 bits of mantissa: errors near 1e-3 instead of 1e-6).
    """
    late = min(window_size + 1, query.shape[1])
    return _pallas(
        query, key, value, initial_state, late, _call(query, key, value, late, feature_map, config)
    )


def _call(
    query: Array, key: Array, value: Array, late: int, feature_map: str, config: Config
) -> Call:
    batch, length, heads, dim = query.shape
    value_dim = value.shape[3]
    kernel = Kernel(
        length=length,
        group=heads // key.shape[2],
        dim=dim,
        value_dim=value_dim,
        late=late,
        chunk=int(config["chunk"]),
        tile=min(int(config["value_tile"]), triton.padded(value_dim)),
        kind=feature_map,
        precision=PRECISIONS[str(config["precision"])],
    )
    return Call(
        kernel,
        batch,
        heads,
        config["variant"] == "fused",
        int(config["num_warps"]),
        int(config["num_stages"]),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _pallas(
    query: Array, key: Array, value: Array, initial: Array | None, late: int, call: Call
) -> tuple[Array, Array]:
    return forward(query, key, value, initial, call)[0]


def forward(
    query: Array, key: Array, value: Array, initial: Array | None, call: Call
) -> tuple[tuple[Array, Array], Array | None]:
    """The outputs, and the state before each chunk, [B, K, chunks, 2, Hp, Vp]."""
    late = call.kernel.late
    first = jnp.zeros((call.batch, late, call.heads, value.shape[3]), value.dtype)
    if initial is not None:
        first = rows_before_any_key(query[:, :late], initial, call.kernel.kind)
    if late == query.shape[1]:
        shape = (call.batch, call.heads, 2 * query.shape[3], value.shape[3])
        final = jnp.zeros(shape, jnp.float32) if initial is None else initial
        return (first.astype(value.dtype), final), None
    start, base = _start(initial, call)
    inputs = {"query": query, "key": key, "value": value, **base}
    found = (_fused if call.fused else _parallel)(call, inputs, start)
    total = jnp.repeat(found["total"], call.kernel.group, axis=1)
    final = _unpadded(total + base["base"] if base else total, call)
    output = found["output"].at[:, :late].set(first.astype(value.dtype))
    return (output, final), found["before"]


def _start(initial: Array | None, call: Call) -> tuple[Array, Arrays]:
    """The state that sums begin with, and what each head of a group adds to it."""
    shape = call.state_shape(call.kv_heads)
    if initial is None:
        return jnp.zeros(shape.shape, shape.dtype), {}
    padded = _padded(initial, call)
    if call.kernel.group == 1:
        return padded, {}
    return jnp.zeros(shape.shape, shape.dtype), {"base": padded}


def _padded(state: Array, call: Call) -> Array:
    """[B, N, 2H, Hv] to [B, N, 2, Hp, Vp]."""
    state = state.reshape(*state.shape[:2], 2, -1, state.shape[-1])
    *_, rows, columns = call.state_shape(1).shape
    beyond = ((0, rows - state.shape[3]), (0, columns - state.shape[4]))
    return jnp.pad(state, ((0, 0), (0, 0), (0, 0), *beyond))


def _unpadded(state: Array, call: Call) -> Array:
    """[B, N, 2, Hp, Vp] to [B, N, 2H, Hv]."""
    state = state[..., : call.kernel.dim, : call.kernel.value_dim]
    return state.reshape(*state.shape[:2], -1, state.shape[-1])


def _fused(call: Call, inputs: Arrays, start: Array) -> Arrays:
    kernel = call.kernel
    outputs = {
        "output": _rows_like(inputs["query"], inputs["value"]),
        "before": call.state_shape(call.kv_heads, kernel.chunks),
        "total": call.state_shape(call.kv_heads),
    }
    grid = (kernel.tiles, call.heads, call.batch)
    return call.run(kernels.fused_outputs, grid, {**inputs, "start": start}, outputs)


def _parallel(call: Call, inputs: Arrays, start: Array) -> Arrays:
    kernel = call.kernel
    keys = {"key": inputs["key"], "value": inputs["value"]}
    found = _running(call, kernels.chunk_sums, call.kv_heads, keys, start, reverse=False)
    grid = (kernel.tiles * kernel.chunks, call.heads, call.batch)
    inputs = {**inputs, "before": found["before"]}
    outputs = {"output": _rows_like(inputs["query"], inputs["value"])}
    return found | call.run(kernels.chunk_outputs, grid, inputs, outputs)


def _rows_like(query: Array, value: Array) -> Any:
    return jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), value.dtype)


def _running(
    call: Call,
    body: Callable[[Kernel, Mapping[str, Any]], None],
    heads: int,
    inputs: Arrays,
    start: Array,
    *,
    reverse: bool,
) -> Arrays:
    """The sums of each chunk by ``body``, then their running sums over the chunks."""
    count = call.kernel.chunks
    shape = call.state_shape(heads, count)
    grid = (call.kernel.tiles * count, heads, call.batch)
    sums = call.run(body, grid, inputs, {"sums": shape})["sums"]
    flat = (call.batch * heads, count, start[0, 0].size)
    block = min(_RUN, flat[2])
    found = triton.call(
        functools.partial(kernels.running_sums, count, block, reverse),
        name="linear_attention_running_sums",
        grid=(flat[2] // block, flat[0]),
        inputs={"sums": sums.reshape(flat), "start": start.reshape(flat[0], flat[2])},
        outputs={
            "before": jax.ShapeDtypeStruct(flat, jnp.float32),
            "total": jax.ShapeDtypeStruct((flat[0], flat[2]), jnp.float32),
        },
        num_warps=4,
        num_stages=1,
    )
    return {
        "before": found["before"].reshape(shape.shape),
        "total": found["total"].reshape(start.shape),
    }


def _once(function: Any) -> Any:
    return differentiable_once(function, "the Pallas kernels of the recurrence", "chunked")


def _pallas_fwd(
    query: Array, key: Array, value: Array, initial: Array | None, late: int, call: Call
) -> Any:
    once = _once(functools.partial(forward, call=call))
    outputs, before = once(query, key, value, initial)
    return outputs, (query, key, value, initial, before)


def _pallas_bwd(late: int, call: Call, saved: Any, cotangents: Any) -> Any:
    return _once(functools.partial(_gradients, call))(*saved, *cotangents)


def _gradients(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    initial: Array | None,
    before: Any,
    d_output: Array,
    d_final: Array,
) -> Any:
    d_output = d_output.astype(value.dtype)
    kernel = call.kernel
    seen, late = kernel.seen, kernel.late
    wanted = {"d_query": query, "d_key": key, "d_value": value}
    grads = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()}
    d_initial = d_final
    if seen:
        inputs = {"query": query, "key": key, "value": value, "d_output": d_output}
        sums_of = {"query": query, "d_output": d_output}
        d_start = _padded(d_final, call)
        later = _running(call, kernels.gradient_sums, call.heads, sums_of, d_start, reverse=True)
        d_initial = _unpadded(later["total"], call)
        _, base = _start(initial, call)
        dq = call.run(
            kernels.query_gradient,
            (kernel.chunks, call.heads, call.batch),
            {**inputs, **base, "before": before},
            {"d_query": grads["d_query"]},
        )["d_query"]
        found = _key_value_gradients(call, {**inputs, "after": later["before"]}, grads)
        dk, dv = (found[name].at[:, seen:].set(0) for name in ("d_key", "d_value"))
    else:
        dq, dk, dv = map(jnp.zeros_like, (query, key, value))
    if initial is None:
        return dq.at[:, :late].set(0), dk, dv, None
    first_dq, first_di = rows_before_any_key_gradient(
        query[:, :late], initial, d_output[:, :late], kernel.kind
    )
    return dq.at[:, :late].set(first_dq), dk, dv, d_initial + first_di


def _key_value_gradients(call: Call, inputs: Arrays, grads: dict[str, Any]) -> Arrays:
    """``d_key`` and ``d_value``: by one kernel, or by two where values have several tiles."""
    kernel = call.kernel
    dk, dv = ({name: grads[name]} for name in ("d_key", "d_value"))
    grid = (kernel.chunks, call.kv_heads, call.batch)
    if kernel.tiles == 1:
        return call.run(kernels.key_value_gradient, grid, inputs, dk | dv)
    tiled = (kernel.tiles * kernel.chunks, *grid[1:])
    without_value = {name: array for name, array in inputs.items() if name != "value"}
    return call.run(kernels.key_gradient, grid, inputs, dk) | call.run(
        kernels.value_gradient, tiled, without_value, dv
    )


_pallas.defvjp(_pallas_fwd, _pallas_bwd)


def automatic(problem: Problem, device: Device) -> bool:
    """On a CPU the kernels are interpreted, which only a test wants."""
    return device.platform == "cuda"


IMPLEMENTATION = Implementation(
    name="pallas",
    function=pallas,
    space=pallas_space.space,
    supports=pallas_space.supports,
    default_config=pallas_space.default_config,
    own_gradient=True,
    automatic=automatic,
)
