"""The search: plan, try, verify, compare, publish."""

from .options import Listener, Options
from .plan import grid
from .process import Limits
from .tune import tune

__all__ = ["Limits", "Listener", "Options", "grid", "tune"]
