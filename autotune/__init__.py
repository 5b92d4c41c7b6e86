"""The search: plan, try, verify, compare, publish."""

from .plan import grid
from .tune import Listener, Options, tune

__all__ = ["Listener", "Options", "grid", "tune"]
