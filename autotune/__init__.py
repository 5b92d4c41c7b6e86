"""The search: plan, try, verify, compare, publish."""

from .isolated import Limits
from .options import Listener, Options
from .plan import grid
from .tune import tune

__all__ = ["Limits", "Listener", "Options", "grid", "tune"]
