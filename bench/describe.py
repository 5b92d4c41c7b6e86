"""The worker that names the device and the versions, for the head of a benchmark file.

Run as ``python -m shapetune.bench.describe``, by the benchmark alone.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import jax

from ..kernels import current_device
from . import torch_peer


def device_fields() -> dict[str, Any]:
    """The device and the versions, as the head of a file names them."""
    device = current_device()
    found: dict[str, Any] = {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "devices": [str(one) for one in jax.devices()],
        "python": platform.python_version(),
        "device_kind": device.name if device.platform == "cpu" else jax.devices()[0].device_kind,
    }
    if device.platform == "cpu":
        found |= {"cores": device.cores, "memory_gb": round(device.memory / 2**30, 1)}
    else:
        found |= {
            "gpu": device.name,
            "driver": device.driver,
            "gpu_memory_gb": round(device.memory / 2**30, 1),
        }
    return found | torch_peer.versions()


def main() -> None:
    """Writes them to the file that it is given."""
    event = json.dumps({"device": device_fields()})
    Path(sys.argv[1]).write_text(event + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
