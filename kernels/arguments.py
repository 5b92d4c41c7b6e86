"""Checks of call arguments that the ops share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

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


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, of Python or of numpy, and no truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(name: str, value: object, least: int) -> None:
    """Refuses what is no integer of at least ``least``.

    Raises:
        ProblemError: It is not.
    """
    if not is_integer(value) or value < least:
        raise ProblemError(f"{name} must be an integer of at least {least}, got {value!r}")


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
