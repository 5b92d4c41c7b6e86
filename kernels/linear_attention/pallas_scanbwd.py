"""The Pallas forward pass with the token recurrence as its backward pass.

Kept for comparison: it shows what the parallel backward pass is worth.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from ..op import Config, Implementation
from . import pallas
from .scan import scan


def pallas_scanbwd(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    initial_state: jax.Array | None,
    *,
    window_size: int,
    feature_map: str,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Residual linear attention; shapes as ``linear_attention``, config as ``pallas``."""
    fixed = (("window_size", window_size), ("feature_map", feature_map))
    return _mixed(query, key, value, initial_state, fixed, tuple(config.items()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mixed(
    query: jax.Array, key: jax.Array, value: jax.Array, initial: Any, fixed: Any, config: Any
) -> tuple[jax.Array, jax.Array]:
    return pallas.pallas(query, key, value, initial, **dict(fixed), config=dict(config))


def _mixed_fwd(
    query: jax.Array, key: jax.Array, value: jax.Array, initial: Any, fixed: Any, config: Any
) -> Any:
    arrays = (query, key, value, initial)
    return _mixed(*arrays, fixed, config), arrays


def _mixed_bwd(fixed: Any, config: Any, arrays: Any, cotangents: Any) -> Any:
    plain = functools.partial(scan, **dict(fixed), config={})
    return jax.vjp(plain, *arrays)[1](cotangents)


_mixed.defvjp(_mixed_fwd, _mixed_bwd)


IMPLEMENTATION = Implementation(
    name="pallas_scanbwd",
    function=pallas_scanbwd,
    space=pallas.IMPLEMENTATION.space,
    supports=pallas.IMPLEMENTATION.supports,
    default_config=pallas.IMPLEMENTATION.default_config,
    own_gradient=True,
    automatic=lambda problem, device: False,
)
