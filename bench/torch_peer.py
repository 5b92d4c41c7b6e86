"""PyTorch's `scaled_dot_product_attention` as a peer: same numbers, same loss, same timing.

Only its arrays differ in layout: [B, N, T, H], contiguous, which is what its own
kernels like best.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ..cache.errors import UnsupportedError
from ..cache.key import Problem
from ..kernels.device import current_device, usable_cores
from ..kernels.op import Inputs

MIB = 2.0**20
_BACKENDS = {
    "torch_flash": "FLASH_ATTENTION",
    "torch_efficient": "EFFICIENT_ATTENTION",
    "torch_math": "MATH",
}


def versions() -> dict[str, str | None]:
    """PyTorch's version and that of its CUDA, for the head of a file; empty without it."""
    try:
        import torch
    except ImportError:
        return {}
    return {"torch": torch.__version__, "torch_cuda": torch.version.cuda}


class TorchPeer:
    """One back end of PyTorch's attention on one problem.

    Args:
        name: One of ``torch_flash``, ``torch_efficient``, ``torch_math``.
        problem: The problem.
        inputs: The arrays and weights that the others get.

    Raises:
        ImportError: PyTorch is not installed.
        UnsupportedError: It does not run on the device that jax runs on.
    """

    def __init__(self, name: str, problem: Problem, inputs: Inputs) -> None:
        import torch

        self._torch: Any = torch
        self._backend = getattr(torch.nn.attention.SDPBackend, _BACKENDS[name])
        self._problem = problem
        self._training = problem.mode == "fwd_bwd"
        self._device = device_for(current_device().platform, torch)
        torch.set_num_threads(usable_cores())
        self._arrays = [self._tensor(array) for array in inputs.arrays[:3]]
        for array in self._arrays:
            array.requires_grad_(self._training)
        self._weights = self._tensor(inputs.weights[0])
        self.compile_s = 0.0

    def _tensor(self, array: Any) -> Any:
        """[B, T, N, H] of jax as [B, N, T, H] of torch."""
        torch = self._torch
        host = np.asarray(array)
        if host.dtype.name == "bfloat16":
            tensor = torch.from_numpy(host.view(np.int16).copy()).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(host.copy())
        return tensor.transpose(1, 2).contiguous().to(self._device)

    def call(self) -> tuple[Any, ...]:
        """The output, and in mode fwd_bwd the three gradients after it."""
        attend = self._torch.nn.functional.scaled_dot_product_attention
        with self._only_backend():
            out = attend(*self._arrays, is_causal=self._problem.causal)
        if not self._training:
            return (out,)
        loss = (out.float() * self._weights).sum()
        return (out, *self._torch.autograd.grad(loss, self._arrays))

    def _only_backend(self) -> Any:
        return self._torch.nn.attention.sdpa_kernel(self._backend)

    def _wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def first(self) -> dict[str, np.ndarray]:
        """The first call: its results by name, in [B, T, N, H]."""
        started = time.perf_counter()
        found = self.call()
        self._wait()
        self.compile_s = time.perf_counter() - started
        names = ("out", "grad_query", "grad_key", "grad_value")
        return {
            name: tensor.detach().float().cpu().transpose(1, 2).numpy()
            for name, tensor in zip(names, found, strict=False)
        }

    def sample(self, inner: int) -> float:
        """Milliseconds per call over ``inner`` back-to-back calls."""
        self._wait()
        started = time.perf_counter()
        for _ in range(inner):
            self.call()
        self._wait()
        return (time.perf_counter() - started) / inner * 1e3

    def memory(self) -> dict[str, Any]:
        """The peak memory of a call, inputs included, MiB."""
        inputs = (*self._arrays, self._weights) if self._training else self._arrays
        on_gpu = self._device == "cuda"
        with allocated_growth(self._torch.cuda) if on_gpu else resident_growth() as grown:
            results = self.call()
            self._wait()
        peak = _bytes(inputs) + max(grown(), _bytes(results))
        where = "what PyTorch has allocated" if on_gpu else "resident memory"
        note = f"inputs, and what a call adds to {where}, its results at least"
        return {"peak_mb": peak / MIB, "memory_note": note}


def device_for(platform: str, torch: Any) -> str:
    """PyTorch's name of the kind of device that jax runs on.

    Raises:
        UnsupportedError: This PyTorch has none of that kind.
    """
    if platform == "cpu":
        return "cpu"
    built_for = {"cuda": torch.version.cuda, "rocm": torch.version.hip}.get(platform)
    if built_for is None or not torch.cuda.is_available():
        raise UnsupportedError(
            f"jax runs on {platform}, and PyTorch {torch.__version__} sees no such device; "
            f"install PyTorch for {platform}, or run jax on the CPU with JAX_PLATFORMS=cpu"
        )
    return "cuda"  # PyTorch's name of AMD's GPUs too


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


@contextlib.contextmanager
def allocated_growth(cuda: Any) -> Iterator[Callable[[], float]]:
    """Bytes by which ``torch.cuda`` had more allocated at its peak inside the block."""
    cuda.reset_peak_memory_stats()
    before = after = cuda.memory_allocated()

    yield lambda: float(after - before)
    after = cuda.max_memory_allocated()


@contextlib.contextmanager
def resident_growth() -> Iterator[Callable[[], float]]:
    """Bytes by which resident memory grew at its peak inside the block; 0 where unknown.

    Memory that glibc's allocator has kept free goes back to the system first, for
    what is made of it inside the block would not count.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here
    before, peak_before = _status("VmRSS"), _status("VmHWM")
    after = before

    yield lambda: max(after - before, 0.0)
    peak = _status("VmHWM")
    # A peak that could not be started again and was not passed tells nothing.
    after = peak if peak > peak_before else before


def _status(field: str) -> float:
    try:
        with open("/proc/self/status") as lines:
            for line in lines:
                if line.startswith(field + ":"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    return 0.0
