"""shapetune picks the fastest verified kernel and block sizes for every shape.

``shapetune.attention`` replaces ``jax.nn.dot_product_attention``; ``shapetune.tune``
(or the command of that name) finds what is fastest on this device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .cache.errors import ShapetuneError
from .cache.key import Problem
from .kernels.attention import attention, flex_attention
from .kernels.decision import Decision
from .kernels.default import explain, load, reload, use_cache
from .kernels.linear_attention import linear_attention

if TYPE_CHECKING:
    from .autotune import tune

__all__ = [
    "Decision",
    "Problem",
    "ShapetuneError",
    "__version__",
    "attention",
    "explain",
    "flex_attention",
    "linear_attention",
    "load",
    "reload",
    "tune",
    "use_cache",
]


def __getattr__(name: str) -> Any:
    # The search needs optuna, which a program that only dispatches does not.
    if name == "tune":
        from .autotune import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
