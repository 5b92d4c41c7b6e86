"""shapetune picks the fastest verified kernel and block sizes for every shape.

``shapetune.attention`` replaces ``jax.nn.dot_product_attention``; ``shapetune.tune``
(or the command of that name) finds what is fastest on this device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .cache.errors import ShapetuneError
from .cache.key import Problem

if TYPE_CHECKING:
    from .autotune import tune
    from .kernels.agreement import digest, require_agreement
    from .kernels.attention import attention, flex_attention
    from .kernels.decision import Decision
    from .kernels.default import explain, load, reload, use_cache
    from .kernels.linear_attention import linear_attention

__all__ = [
    "Decision",
    "Problem",
    "ShapetuneError",
    "__version__",
    "attention",
    "digest",
    "explain",
    "flex_attention",
    "linear_attention",
    "load",
    "reload",
    "require_agreement",
    "tune",
    "use_cache",
]

#: Loaded when first asked for: a tool that only moves records needs no jax, and a
#: program that only dispatches needs no optuna.
_HOME = {
    "Decision": ".kernels.decision",
    "attention": ".kernels.attention",
    "digest": ".kernels.agreement",
    "explain": ".kernels.default",
    "flex_attention": ".kernels.attention",
    "linear_attention": ".kernels.linear_attention",
    "load": ".kernels.default",
    "reload": ".kernels.default",
    "require_agreement": ".kernels.agreement",
    "tune": ".autotune",
    "use_cache": ".kernels.default",
}


def __getattr__(name: str) -> Any:
    if name in ("kernels", "autotune"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
