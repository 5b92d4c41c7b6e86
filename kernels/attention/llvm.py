"""`llvm`: attention on a CPU by kernels of its own, forward and backward.

They are written in LLVM's language by way of llvmlite, compiled for the processor at hand
when a program is traced, and called by XLA with its own threads. Memory grows with
seq + kv_seq: nothing but the output and the log-sum-exp is kept for the gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..device import usable_cores
from ..exponential import LOG2_E
from ..llvm.call import kernel_name, missing
from ..op import Config, Device, Implementation, Problem, Space
from ..shardings import compiler_sharded, shaped, varying
from ._plain import gradients_of_gradients
from .blockwise import block_choices
from .masks import window_ends

_LEAST_BLOCK, _MOST_BLOCK = 64, 512
#: Tasks of a backward pass for each thread, so that none waits long for the others.
_TASKS_PER_THREAD = 2
#: Tasks divide a head's queries while a head of keys gets no more sums than these, each as
#: large as the keys in float32; every head of queries makes one.
_MOST_SUMMANDS = 8


def llvm(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None,
    return_residual: bool = False,
    config: Config,
) -> Any:
    """Attention in fused kernels. Shapes and semantics as ``shapetune.attention``.

    It takes no bias and no mask. A row that may see no key gives zeros, and -inf as its
    log-sum-exp. Sums are float32 whatever the arrays are.
    """
    left, right = window_ends(is_causal, local_window_size)
    call = _Call(float(scale), left, right, tuple(sorted(config.items())))
    arrays = (query, key, value, query_seq_lengths, key_value_seq_lengths)
    attend = lambda *given: _attend(call, *varying(given))  # noqa: E731
    rows = ((0, 0), (0, 1), (0, 2), (2, 3))
    out, lse = compiler_sharded(attend, arrays, (rows, (rows[0], rows[2], rows[1])))
    if return_residual:
        lse = lse.transpose(0, 2, 1) * math.log(2)
        return out, lax.stop_gradient(lse.astype(query.dtype))
    return out


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in a call."""

    scale: float
    left: int | None
    right: int | None
    items: tuple[tuple[str, Any], ...]

    def ranges(self, query: Array, key: Array, q_lengths: Any, kv_lengths: Any) -> list[Array]:
        """Of the keys that each query sees the first and the end, int32 [B, T]."""
        batch, rows, columns = query.shape[0], query.shape[1], key.shape[1]
        row = jnp.arange(rows, dtype=jnp.int32)[None]
        low = jnp.zeros_like(row) if self.left is None else jnp.maximum(row - self.left, 0)
        high = jnp.full_like(row, columns)
        if self.right is not None:
            high = jnp.minimum(high, row + self.right + 1)
        if kv_lengths is not None:
            high = jnp.minimum(high, kv_lengths[:, None])
        if q_lengths is not None:
            high = jnp.where(row < q_lengths[:, None], high, 0)
        return [jnp.broadcast_to(ends, (batch, rows)) for ends in (low, high)]

    def panels(self, name: str, rows: int, width: int) -> int:
        """Panels of ``width`` queries that a block of ``rows`` queries takes."""
        return -(-min(int(dict(self.items)[name]), rows) // width)

    def numbers(self, blocks: tuple[int, int], like: Array) -> list[Array]:
        """The factor of the scores, and panels of a task and keys of a block, as arrays."""
        arrays = [jnp.full((1,), self.scale, jnp.float32), jnp.array(blocks, jnp.int32)]
        return varying(arrays, like)

    def block_k(self, name: str) -> int:
        """Keys of a block, an even number."""
        return -(-int(dict(self.items)[name]) // 2) * 2


def _over_batch(function: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """``function``, of arrays and to arrays whose first axis is the batch, under ``jax.vmap``."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def _rule(size: int, batched: list[bool], *arrays: Array) -> Any:
        given = [
            array if has else jnp.broadcast_to(array, (size, *array.shape))
            for array, has in zip(arrays, batched, strict=True)
        ]
        found = mapped(*(a.reshape(size * a.shape[1], *a.shape[2:]) for a in given))
        split = tuple(a.reshape(size, a.shape[0] // size, *a.shape[1:]) for a in found)
        return split, tuple(True for _ in split)

    return mapped


def _forward(call: _Call, query: Array, key: Array, value: Array, *ranges: Array) -> Any:
    from ..llvm import jit
    from . import _llvm_forward as kernel
    from ._llvm_panels import Sizes, workspace_size

    batch, rows, heads, dim = query.shape
    host = jit.machine()
    sizes = Sizes(head_dim=dim, value_dim=value.shape[3], dtype=str(query.dtype))
    blocks = (call.panels("block_q", rows, host.width), call.block_k("block_k"))
    scratch = workspace_size(kernel.parts(sizes, host), *blocks)
    tasks = batch * heads * -(-rows // (blocks[0] * host.width))
    statistic = shaped(query, (batch, heads, rows))
    outputs = (
        shaped(query, (*query.shape[:3], sizes.value_dim), query.dtype),
        statistic,
        statistic,
        shaped(query, (min(usable_cores(), tasks), scratch)),
    )
    name = kernel_name(kernel.write, sizes, host)
    out, largest, total, _ = jax.ffi.ffi_call(name, outputs)(
        query, key, value, *call.numbers(blocks, query), *ranges
    )
    return out, jnp.where(total == 0, -jnp.inf, largest * LOG2_E + jnp.log2(total))


def _backward(
    call: _Call, query: Array, key: Array, value: Array, out: Array, lse: Array,
    grad_out: Array, *ranges: Array,
) -> Any:  # fmt: skip
    from ..llvm import jit
    from . import _llvm_backward as kernel
    from ._llvm_panels import Sizes, workspace_size

    batch, rows, heads, dim = query.shape
    columns, kv_heads, value_dim = value.shape[1:]
    host = jit.machine()
    panels = -(-rows // host.width)
    threads = usable_cores()
    wanted = -(-threads * _TASKS_PER_THREAD // (batch * heads))
    parts = max(1, min(panels, wanted, _MOST_SUMMANDS * kv_heads // heads))
    sizes = Sizes(head_dim=dim, value_dim=value_dim, dtype=str(query.dtype))
    blocks = (-(-panels // parts), call.block_k("block_k_bwd"))
    scratch = workspace_size(kernel.parts(sizes, host), *blocks)
    summands = heads // kv_heads * parts
    outputs = (
        shaped(query, query.shape, query.dtype),
        shaped(query, (batch, columns, kv_heads, summands, dim)),
        shaped(query, (batch, columns, kv_heads, summands, value_dim)),
        shaped(query, (min(threads, batch * heads * parts), scratch)),
    )
    delta = jnp.einsum("btnd,btnd->bnt", out.astype(jnp.float32), grad_out.astype(jnp.float32))
    # 2^(score - inf) is 0: a row that saw no key gets no gradient.
    base = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    found = jax.ffi.ffi_call(kernel_name(kernel.write, sizes, host), outputs)(
        query, key, value, grad_out, base, delta, *call.numbers(blocks, query), *ranges
    )
    grad_key, grad_value = (summed.sum(3).astype(query.dtype) for summed in found[1:3])
    return found[0], grad_key, grad_value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    call: _Call, query: Array, key: Array, value: Array, q_lengths: Any, kv_lengths: Any
) -> tuple[Array, Array]:
    """Attention, and the log-sum-exp in base 2, [B, N, T]."""
    ranges = call.ranges(query, key, q_lengths, kv_lengths)
    function = _over_batch(functools.partial(_forward, call))
    out, lse = function(query, key, value, *ranges)
    return out, lse


def _attend_fwd(call: _Call, *arrays: Any) -> tuple[Any, Any]:
    saved = _attend(call, *arrays)
    return saved, (arrays, saved)


def _attend_bwd(call: _Call, residuals: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    # No gradient comes from the log-sum-exp: callers stop it, and so does _gradients_bwd.
    arrays, saved = residuals
    return (*_gradients(call, (*arrays[:3], *saved, grads[0]), arrays[3:]), None, None)


_attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    call: _Call, arrays: tuple[Array, ...], lengths: tuple[Any, Any]
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value from these, out, the log-sum-exp and out's gradient."""
    ranges = call.ranges(arrays[0], arrays[1], *lengths)
    function = _over_batch(functools.partial(_backward, call))
    grad_query, grad_key, grad_value = function(*arrays, *ranges)
    return grad_query, grad_key, grad_value


def _gradients_fwd(call: _Call, arrays: Any, lengths: Any) -> tuple[Any, Any]:
    return _gradients(call, arrays, lengths), (arrays, lengths)


def _gradients_bwd(call: _Call, residuals: Any, grads: Any) -> tuple[Any, None]:
    (*arrays, out, lse, grad_out), lengths = residuals
    found, of_grad_out = gradients_of_gradients(
        (*arrays, None), grad_out, (*grads, None), (None, *lengths), call.scale,
        (call.left, call.right),
    )  # fmt: skip
    # What was saved follows from the arrays, by which it is differentiated in there.
    return (*found[:3], jnp.zeros_like(out), jnp.zeros_like(lse), of_grad_out), None


_gradients.defvjp(_gradients_fwd, _gradients_bwd)


def _space(problem: Problem, device: Device) -> Space:
    choices: dict[str, tuple[Any, ...]] = {
        "block_q": block_choices(problem.seq, _LEAST_BLOCK, _MOST_BLOCK),
        "block_k": block_choices(problem.kv_seq, _LEAST_BLOCK, _MOST_BLOCK),
    }
    if problem.mode == "fwd_bwd":
        choices["block_k_bwd"] = choices["block_k"]
    return Space(choices)


def _supports(problem: Problem, device: Device) -> str | None:
    if device.platform != "cpu":
        return "its kernels are for CPUs"
    for word in problem.features:
        name = word.partition("[")[0]
        if name in ("bias", "mask"):
            return f"it takes no {name}"
        if word == "scale[array]":
            return "its scale must be a number, not an array"
    return missing()


def _default_config(problem: Problem, device: Device) -> Config:
    space = _space(problem, device)
    wished = {"block_q": 256, "block_k": 128, "block_k_bwd": 256}
    return space.fit({name: wished[name] for name in space.choices})


IMPLEMENTATION = Implementation(
    name="llvm",
    function=llvm,
    version=3,
    space=_space,
    supports=_supports,
    default_config=_default_config,
    own_gradient=True,
)
