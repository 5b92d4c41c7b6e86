"""Checks of what a person passes to the RAttention layer: its shape, parameters and state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ..cache.errors import ProblemError
from .arguments import check_integer
from .linear_attention.features import FEATURE_MAPS

if TYPE_CHECKING:
    from .rattention import RAttentionConfig

BRANCHES = ("both", "local", "global")
#: The least value of each field that counts something.
_LEAST = {"width": 1, "heads": 1, "head_dim": 1, "kv_heads": 1, "window": 0, "meta_tokens": 0}


def check_config(cfg: RAttentionConfig) -> None:
    """Refuses a layer that cannot be.

    Raises:
        ProblemError: A field is of another type, or out of range.
    """
    for name, least in _LEAST.items():
        value = getattr(cfg, name)
        if name == "kv_heads" and value is None:
            continue
        check_integer(name, value, least)
    for name in ("rope_base", "eps"):
        value = getattr(cfg, name)
        number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise ProblemError(f"{name} must be a number above 0, got {value!r}")
    if not isinstance(cfg.qk_scales, bool):
        raise ProblemError(f"qk_scales must be True or False, got {cfg.qk_scales!r}")
    for name, allowed in (("branches", BRANCHES), ("feature_map", tuple(FEATURE_MAPS))):
        if getattr(cfg, name) not in allowed:
            raise ProblemError(f"{name} must be one of {allowed}, got {getattr(cfg, name)!r}")
    if cfg.heads % cfg.groups:
        raise ProblemError(f"heads ({cfg.heads}) must be a multiple of kv_heads ({cfg.groups})")
    if cfg.head_dim % 2:
        raise ProblemError(f"head_dim must be even for the rotation, got {cfg.head_dim}")
    for name in ("meta_tokens", "qk_scales"):
        if cfg.branches == "local" and getattr(cfg, name):
            raise ProblemError(
                f'{name}={getattr(cfg, name)!r} belongs to the recurrence, which branches="local" '
                "leaves out"
            )


def parameter_shapes(cfg: RAttentionConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a layer, and their shapes."""
    shapes: dict[str, tuple[int, ...]] = {
        "query": (cfg.width, cfg.heads, cfg.head_dim),
        "key": (cfg.width, cfg.groups, cfg.head_dim),
        "value": (cfg.width, cfg.groups, cfg.head_dim),
        "out": (cfg.heads, cfg.head_dim, cfg.width),
    }
    if cfg.branches != "global":
        shapes["local_norm"] = (cfg.heads, cfg.head_dim)
    if cfg.branches != "local":
        shapes["global_norm"] = (cfg.heads, cfg.head_dim)
    if cfg.meta_tokens:
        shapes["meta"] = (cfg.meta_tokens, cfg.width)
    if cfg.qk_scales:
        shapes["query_scale"] = (cfg.heads, cfg.head_dim)
        shapes["key_scale"] = (cfg.groups, cfg.head_dim)
    return shapes


def check_params(params: Any, cfg: RAttentionConfig) -> None:
    """Refuses parameters of another layer.

    Raises:
        ProblemError: One is missing, too many, or of another shape.
    """
    wanted = parameter_shapes(cfg)
    if not isinstance(params, Mapping):
        raise ProblemError(
            f"params must be a mapping as init returns it, got {type(params).__name__}"
        )
    for problem, names in (
        ("lacks", wanted.keys() - params.keys()),
        ("has besides", params.keys() - wanted.keys()),
    ):
        if names:
            raise ProblemError(
                f"params {problem} {', '.join(sorted(map(str, names)))} for this config; "
                "use the config that init was called with"
            )
    for name, shape in wanted.items():
        have = tuple(jnp.shape(params[name]))
        if have != shape:
            raise ProblemError(
                f"params[{name!r}] has shape {list(have)}, for this config it must be "
                f"{list(shape)}; use the config that init was called with"
            )


def check_input(x: Any, cfg: RAttentionConfig, axes: str) -> None:
    """Refuses an input that is no floating array of these axes and the layer's width.

    Raises:
        ProblemError: It is not.
    """
    wanted = f"[{axes}, {cfg.width}]"
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ProblemError(f"x must be an array {wanted}, got {type(x).__name__}")
    if len(x.shape) != len(axes.split(",")) + 1 or x.shape[-1] != cfg.width or 0 in x.shape:
        raise ProblemError(f"x must be {wanted}, no axis empty, got shape {list(x.shape)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ProblemError(f"x must be floating, got {x.dtype}; cast it")


def check_start(batch: Any, dtype: Any) -> None:
    """Refuses what is no batch size or no dtype to keep keys in.

    Raises:
        ProblemError: It is not.
    """
    check_integer("batch", batch, 1)
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ProblemError(f"dtype must be a floating dtype such as 'float32', got {dtype!r}")


def state_shapes(cfg: RAttentionConfig, batch: int) -> dict[str, tuple[int, ...]]:
    """The parts of a decoding state, and their shapes."""
    ring = (batch, cfg.left_out + 1, cfg.groups, cfg.head_dim)
    memory = (batch, cfg.heads, 2 * cfg.head_dim, cfg.head_dim)
    return {"position": (), "keys": ring, "rotated": ring, "values": ring, "memory": memory}


def check_state(state: Any, kind: type, cfg: RAttentionConfig, batch: int) -> None:
    """Refuses a state that is not of this layer and batch.

    Args:
        state: What was passed.
        kind: The type of a state.
        cfg: The layer's shape.
        batch: The input's.

    Raises:
        ProblemError: It is not.
    """
    if not isinstance(state, kind):
        raise ProblemError(
            f"state must come from start, prefill or decode, got {type(state).__name__}"
        )
    for name, shape in state_shapes(cfg, batch).items():
        have = tuple(jnp.shape(getattr(state, name)))
        if have != shape:
            raise ProblemError(
                f"state.{name} has shape {list(have)}; for this config and x of batch {batch} it "
                f"must be {list(shape)}: start or prefill with the same config and batch"
            )
