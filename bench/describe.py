"""The worker that names the device and the versions, for the head of a benchmark file.

Run as ``python -m shapetune.bench.describe``, by the benchmark alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from .._version import __version__
from ..kernels import current_device
from ..kernels.op import ops
from . import torch_peer

#: Seconds that `nvidia-smi` is waited for.
_PATIENCE_S = 10.0


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
            "gpu_memory_gb": None,
            "jax_memory_gb": round(device.memory / 2**30, 1),  # what its pool may grow to
        }
        if device.platform == "cuda":
            found |= card_fields(device.name)
    return found | _ours() | torch_peer.versions()


def _ours() -> dict[str, Any]:
    """What decides how fast our own kernels are: their versions, and their compiler's."""
    kernels = {
        name: {one.name: one.version for one in op.implementations.values()}
        for name, op in sorted(ops().items())
    }
    llvmlite = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        llvmlite = importlib.metadata.version("llvmlite")
    return {"shapetune": __version__, "implementations": kernels, "llvmlite": llvmlite}


def card_fields(name: str) -> dict[str, Any]:
    """The NVIDIA driver's version and the memory of the cards of a name, where known."""
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,name"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=_PATIENCE_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    cards = [line.split(", ", 2) for line in done.stdout.splitlines() if line.count(", ") >= 2]
    found: dict[str, Any] = {"driver": cards[0][0]} if cards else {}
    sizes = {size for _, size, other in cards if other.strip() == name}
    if len(sizes) == 1:
        with contextlib.suppress(ValueError):  # "[N/A]" where it has none of its own
            found["gpu_memory_gb"] = round(float(sizes.pop()) / 1024, 1)
    return found


def main() -> None:
    """Writes them to the file that it is given."""
    event = json.dumps({"device": device_fields()})
    Path(sys.argv[1]).write_text(event + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
