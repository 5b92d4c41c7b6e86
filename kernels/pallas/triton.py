"""The Triton back end of Pallas: the one place that knows how a kernel is called.

Kernels get their arrays by name, load and store tiles with their ragged edges
masked, and multiply with a stated precision. On a CPU the same kernel is
interpreted, so its numbers can be tested without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..device import matmul_precision

Index = Any  # a Python int where it is static, otherwise a traced int32

#: Tensor cores multiply tiles of at least this size along each axis.
MIN_TILE = 16


def padded(size: int) -> int:
    """The tile size that holds ``size`` elements: a power of two, at least 16."""
    return max(MIN_TILE, pl.next_power_of_2(size))


def call(
    kernel: Callable[[Mapping[str, Any]], None],
    *,
    name: str,
    grid: tuple[int, ...],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    padded_rows: Collection[str] = (),
    num_warps: int,
    num_stages: int,
) -> dict[str, jax.Array]:
    """Runs ``kernel`` once for each point of ``grid``.

    Args:
        kernel: Takes the references of all operands by name.
        name: What profilers and compiler dumps call it.
        grid: At most three sizes; neighbours along the first run together.
        inputs: The arrays by name; each program sees all of each.
        outputs: Shapes and dtypes of the results by name.
        padded_rows: Names of operands whose last axis is seen ``padded``; what
            lies beyond the array must be masked when loaded or stored.
        num_warps: Warps of 32 threads for each program.
        num_stages: Depth of the software pipeline of its loops.

    Returns:
        The outputs by name.
    """
    names = (*inputs, *outputs)

    def body(*refs: Any) -> None:
        kernel(dict(zip(names, refs, strict=True)))

    body.__name__ = body.__qualname__ = name
    build = functools.partial(
        pl.pallas_call,
        body,
        name=name,
        grid=grid,
        in_specs=[_whole(array, name in padded_rows) for name, array in inputs.items()],
        out_specs=[_whole(shape, name in padded_rows) for name, shape in outputs.items()],
        out_shape=list(outputs.values()),
        # The type of these parameters is what selects the back end.
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )
    # Decided when the program is lowered: a host with a GPU may run it on its
    # CPU, and a host without one may compile it for a GPU.
    results = lax.platform_dependent(
        *inputs.values(),
        cpu=lambda *arrays: build(interpret=True)(*map(_without_bool, arrays)),
        default=build(interpret=False),
    )
    return dict(zip(outputs, results, strict=True))


def _without_bool(array: jax.Array) -> jax.Array:
    # The interpreter takes booleans for int32 and then finds the types at odds.
    return array.astype(jnp.int8) if array.dtype == jnp.bool_ else array


def _whole(array: Any, padded_row: bool) -> pl.BlockSpec:
    shape = tuple(array.shape)
    if padded_row:
        shape = (*shape[:-1], padded(shape[-1]))
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def load(
    ref: Any,
    index: tuple[Any, ...],
    valid: jax.Array | None = None,
    other: float = 0,
) -> jax.Array:
    """The tile ``ref[index]``, with ``other`` where ``valid`` is False."""
    return plgpu.load(ref.at[_typed(index)], mask=valid, other=None if valid is None else other)


def load_flags(ref: Any, index: tuple[Any, ...], valid: jax.Array | None = None) -> jax.Array:
    """A tile of booleans, False where ``valid`` is False."""
    flags = load(ref, index, valid)
    return flags if flags.dtype == jnp.bool_ else flags != 0


def store(
    ref: Any, index: tuple[Any, ...], value: jax.Array, valid: jax.Array | None = None
) -> None:
    """Writes a tile to ``ref[index]``, cast to its type, where ``valid`` holds."""
    plgpu.store(ref.at[_typed(index)], value.astype(ref.dtype), mask=valid)


def _typed(index: tuple[Any, ...]) -> tuple[Any, ...]:
    # The interpreter of jax 0.10 asks each index for its shape.
    return tuple(np.int32(i) if isinstance(i, int) else i for i in index)


def span(start: Index, size: int) -> Any:
    """The ``size`` positions from ``start``, as an index."""
    return pl.ds(start, size)


def divide(n: Index, by: int) -> tuple[Index, Index]:
    """Quotient and remainder of an index that is not negative.

    ``//`` and ``%`` of jax.numpy do not lower in jax 0.10: they compare signs.
    """
    if isinstance(n, int):
        return divmod(n, by)
    # Never a constant: jax refuses a tile of constant start that reaches beyond the array.
    return (n, n * 0) if by == 1 else (lax.div(n, np.int32(by)), lax.rem(n, np.int32(by)))


def positions(start: Index, size: int, axis: int) -> jax.Array:
    """The ``size`` indices from ``start``, int32, along one axis of a tile."""
    return start + lax.broadcasted_iota(jnp.int32, (1, size) if axis else (size, 1), axis)


def dot(
    left: jax.Array,
    right: jax.Array,
    *,
    contract: tuple[int, int] = (1, 0),
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> jax.Array:
    """A float32 matrix product of two tiles over the axes in ``contract``.

    float32 tiles are multiplied as TF32, unless precision is HIGHEST.
    """
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def loop(start: Index, stop: Index, body: Callable[[Index, Any], Any], carry: Any) -> Any:
    """Runs ``body(i, carry)`` for i from ``start`` to ``stop``; pipelined by the compiler."""
    if isinstance(start, int) and isinstance(stop, int) and stop <= start:
        return carry
    return lax.fori_loop(start, stop, body, carry)


def program_ids(count: int) -> tuple[jax.Array, ...]:
    """Where in the grid this program is."""
    return tuple(pl.program_id(axis) for axis in range(count))


def every(conditions: Sequence[jax.Array | None]) -> jax.Array | None:
    """The conditions that are there, joined by and; None if there is none."""
    there = [condition for condition in conditions if condition is not None]
    return functools.reduce(jnp.logical_and, there) if there else None


def dot_precision() -> lax.Precision:
    """The precision that ``jax_default_matmul_precision`` asks for float32 tiles.

    What may use TF32 on a GPU does; whatever asks for more gets full float32.
    """
    fast = (None, "fastest", "high", "bfloat16", "tensorfloat32", "tf32_tf32_f32")
    return lax.Precision.DEFAULT if matmul_precision() in fast else lax.Precision.HIGHEST
