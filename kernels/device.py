"""The device at hand, as the fingerprint that records carry."""

from __future__ import annotations

import functools
import os
import platform

import jax

from ..cache.errors import DeviceError
from ..cache.key import Device


@functools.cache
def current_device() -> Device:
    """The fingerprint of jax's default device.

    Raises:
        DeviceError: jax finds none that it can use.
    """
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        named = os.environ.get("JAX_PLATFORMS")
        remedy = "unset it, or set it to cpu, cuda or tpu" if named else "install jax for it"
        raise DeviceError(
            f"jax finds no device to run on (JAX_PLATFORMS={named!r}); {remedy}. "
            f"It says: {' '.join(str(error).split())[:300]}"
        ) from error
    if device.platform == "cpu":
        return _cpu()
    stats = device.memory_stats() or {}
    return Device(
        platform=_gpu_platform(device),
        name=str(device.device_kind)[:200],
        capability=str(getattr(device, "compute_capability", "")),
        cores=int(getattr(device, "core_count", 0) or 0),
        shared_memory=int(getattr(device, "shared_memory_per_block_optin", 0) or 0),
        memory=int(stats.get("bytes_limit", 0)),
        driver=_backend_version(device),
    )


def _gpu_platform(device: jax.Device) -> str:
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in _backend_version(device).lower() else "cuda"


def _backend_version(device: jax.Device) -> str:
    return " ".join(str(getattr(device.client, "platform_version", "")).split())[:200]


def _cpu() -> Device:
    return Device(
        platform="cpu",
        name=_cpu_model()[:200],
        capability="",
        cores=usable_cores(),
        memory=_physical_memory(),
        driver="",
    )


def matmul_precision() -> str | None:
    """The default precision of matrix products that a user set in jax, None if none is set."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return None if precision in (None, "default") else str(precision).lower()


def usable_cores() -> int:
    """Processors that this process may run on, as its affinity mask says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                field, _, value = line.partition(":")
                if field.strip() in ("model name", "Model"):
                    return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
