"""Kernels as functions of jax arrays: compiled and made known to XLA when first traced."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["kernel_name", "missing"]


@functools.cache
def missing() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    if importlib.util.find_spec("llvmlite") is None:
        return "the package llvmlite is not installed; pip install 'shapetune[cpu]'"
    return None


@functools.cache
def kernel_name(write: Callable[..., Any], sizes: Any, machine: Any) -> str:
    """The name by which XLA calls the kernel that ``write(sizes, machine, name)`` writes.

    The first call compiles it, a second or less. Equal sizes give one kernel, whose
    name is the same in every process: XLA's compilation cache may keep it.
    """
    from . import jit

    mark = hashlib.sha256(repr((sizes, machine)).encode()).hexdigest()[:16]
    name = f"shapetune_{write.__module__.rpartition('.')[2].strip('_')}_{mark}"
    address = jit.compile_module(write(sizes, machine, name), name)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, new(address, None, None), platform="cpu")
    return name
