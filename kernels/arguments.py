"""Checks of call arguments that the ops share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ..cache.errors import ConfigError, ProblemError


def as_arrays(names: Sequence[str], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments as arrays; None stays None, but for the first three.

    Raises:
        ProblemError: One cannot be made an array, or query, key or value is None.
    """
    out = []
    for position, (name, one) in enumerate(zip(names, arrays, strict=True)):
        if one is None and position < 3:
            raise ProblemError(f"{name} must be an array, got None")
        try:
            out.append(None if one is None else jnp.asarray(one))
        except (TypeError, ValueError) as error:
            raise ProblemError(
                f"{name} must be an array, got {type(one).__name__}: {error}"
            ) from None
    return tuple(out)


def check_config(config: Any) -> None:
    """Refuses a config that does not map names to values.

    Raises:
        ConfigError: It does not.
    """
    if config is None:
        return
    if not isinstance(config, Mapping) or not all(isinstance(name, str) for name in config):
        raise ConfigError(f"config must map parameter names to values, got {config!r}")


def typed(value: Any) -> Any:
    """A value for a table's key that is equal only to values of its own type.

    1 == True == 1.0, but a window of True, or a block of 1.0, is refused.
    """
    if isinstance(value, tuple):
        return tuple(map(typed, value))
    return value.__class__, value
