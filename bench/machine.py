"""The machine that a benchmark was made on, as its results name it."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import jax

from ..kernels import current_device


def machine() -> dict[str, Any]:
    """Device, versions, load and time, for the head of a results file."""
    return {
        "device": current_device().to_map(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "load_average": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
