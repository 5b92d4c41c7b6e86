"""What lets loops over blocks trace inside ``shard_map`` and on explicitly sharded arrays.

A loop's carry keeps one type, so what it starts from must vary over the mesh
axes that its inputs vary over; and a slice at a computed place has no sharding
of its own, so there the compiler chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def varying(tree: Any, *like: Any) -> Any:
    """``tree`` with its arrays varying over every manual mesh axis that ``like`` varies over."""
    axes = frozenset[Any]().union(*(_axes(x) for x in jax.tree.leaves((tree, like))))

    def lift(x: Any) -> Any:
        missing = tuple(sorted(axes - _axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(lift, tree) if axes else tree


def shaped(like: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A result's shape, which varies over the manual mesh axes that ``like`` varies over."""
    if not _axes(like):
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = jax.typeof(like)
    return jax.ShapeDtypeStruct(
        shape,
        dtype,
        sharding=NamedSharding(kind.sharding.mesh, PartitionSpec(*(None for _ in shape))),
        manual_axis_type=kind.manual_axis_type,
    )


def _axes(x: Any) -> frozenset[Any]:
    """Manual mesh axes that an array varies over."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def compiler_sharded(
    function: Callable[..., Any], arrays: tuple[Any, ...], outputs: tuple[tuple[Any, ...], ...]
) -> Any:
    """``function(*arrays)``, with the compiler to shard it where ``arrays`` are explicitly sharded.

    Args:
        function: Returns a tuple of arrays.
        arrays: Arrays and None.
        outputs: For each result a name for each axis, ``(array, axis)``: the
            result's axis is sharded as that axis of ``arrays[array]``; None for not.
    """
    mesh = _explicit_mesh(arrays)
    if mesh is None:
        return function(*arrays)
    shardings = tuple(
        NamedSharding(mesh, PartitionSpec(*(_axis_spec(arrays, name) for name in names)))
        for names in outputs
    )
    return jax.sharding.auto_axes(function, out_sharding=shardings)(*arrays)


def _explicit_mesh(arrays: tuple[Any, ...]) -> Any:
    """The mesh that some array is explicitly sharded over, or None."""
    for x in jax.tree.leaves(arrays):
        sharding = jax.typeof(x).sharding
        if AxisType.Explicit in sharding.mesh.axis_types and any(sharding.spec):
            return sharding.mesh
    return None


def _axis_spec(arrays: tuple[Any, ...], name: tuple[int, int] | None) -> Any:
    if name is None or arrays[name[0]] is None:
        return None
    array, axis = name
    return jax.typeof(arrays[array]).sharding.spec[axis]
