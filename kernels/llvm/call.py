"""Kernels as functions of jax arrays: compiled and made known to XLA when first traced."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import threading
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["kernel_name", "missing"]

#: The oldest that the kernels were compiled with; before 0.45 pointers had types.
_LEAST_LLVMLITE = (0, 50)
_KNOWN: dict[Any, str] = {}
_LOCK = threading.Lock()
#: Stands for a kernel's name in its text until that is known.
_UNNAMED = "shapetune_kernel"


@functools.cache
def missing() -> str | None:
    """Why kernels cannot be compiled or run here, or None."""
    if importlib.util.find_spec("llvmlite") is None:
        return "the package llvmlite is not installed; pip install 'shapetune[cpu]'"
    version = importlib.metadata.version("llvmlite")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _LEAST_LLVMLITE:
        return f"llvmlite {version} is too old; pip install --upgrade 'shapetune[cpu]'"
    try:
        from . import jit

        return jit.refusal()
    except (ImportError, OSError, RuntimeError) as error:
        return f"llvmlite does not work here: {error}"


def kernel_name(write: Callable[..., Any], sizes: Any, machine: Any) -> str:
    """The name by which XLA calls the kernel that ``write(sizes, machine, name)`` writes.

    The first call compiles it, about half a second. Its name is made from its text: XLA's
    compilation cache may keep it, and never calls another version of it.
    """
    with _LOCK:
        known = (write, sizes, machine)
        if known not in _KNOWN:
            _KNOWN[known] = _register(str(write(sizes, machine, _UNNAMED)))
        return _KNOWN[known]


def _register(text: str) -> str:
    """Compiles a kernel and makes it known to XLA."""
    from . import jit

    name = f"shapetune_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    address = jit.compile_text(text.replace(_UNNAMED, name), name)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, capsule(address, None, None), platform="cpu")
    return name
