"""Ops, their implementations, and the dispatcher that chooses among them."""

from . import attention as _attention  # noqa: F401  (registers the op)
from . import linear_attention as _linear_attention  # noqa: F401  (likewise)
from .decision import Decision
from .default import explain, load, reload, use_cache
from .device import current_device
from .op import Expected, Implementation, Inputs, Op, Space, get_op, ops, register_op

__all__ = [
    "Decision",
    "Expected",
    "Implementation",
    "Inputs",
    "Op",
    "Space",
    "current_device",
    "explain",
    "get_op",
    "load",
    "ops",
    "register_op",
    "reload",
    "use_cache",
]
