"""Passes made of kernels, which can be part of one differentiation only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax

from ...cache.errors import UnsupportedError


def differentiable_once(function: Callable[..., Any], what: str, instead: str) -> Any:
    """A part of a gradient, which says so when it is itself differentiated.

    Args:
        function: Calls kernels.
        what: The kernels, in words.
        instead: The implementation whose gradient can be differentiated.
    """
    once: Any = jax.custom_vjp(function)

    def again(saved: Any, gradients: Any) -> NoReturn:
        raise UnsupportedError(
            f"{what} have a gradient, but no gradient of that gradient; "
            f"pass implementation={instead!r} where one is taken"
        )

    once.defvjp(lambda *arrays: (function(*arrays), None), again)
    return once
