"""What a device can do at most: a time below that is a mistake, not a discovery.

The bound is generous: three times the rate of the device's own matrix products and
copies as they are measured here, or the maker's figures where the card is known.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from ..cache.key import Device, Problem
from ..kernels.op import Op
from .targets import targets

#: Nothing is this many times as fast as what was measured or declared.
HEADROOM = 3.0
#: Matrix units over float32 units, at most: bfloat16 on the cards in ``targets.toml``.
_MATRIX_UNITS = 32.0
#: Caches over memory, at most.
_CACHES = 8.0


def floor_ms(op: Op, problem: Problem, device: Device) -> float:
    """Milliseconds that no implementation of a problem can beat on this device."""
    flops, traffic = _declared(device) or _measured(problem.dtype)
    seconds = max(op.flops(problem) / flops, op.traffic(problem) / traffic)
    return seconds / HEADROOM * 1e3


def _declared(device: Device) -> tuple[float, float] | None:
    """The rates of a card that is known: flop/s with matrix units, bytes/s with caches."""
    for one in targets().values():
        if device.platform == "cuda" and one.name == device.name:
            float32 = 2.0 * one.cores * one.fp32_per_core * one.clock_ghz * 1e9
            return float32 * _MATRIX_UNITS, one.bandwidth * _CACHES
    return None


_rates: dict[str, tuple[float, float]] = {}


def _measured(dtype: str) -> tuple[float, float]:
    """The best rates seen here so far of a product in this dtype or float32, and of a copy."""
    if dtype not in _rates:
        measure_again(dtype)
    return _rates[dtype]


def measure_again(dtype: str) -> None:
    """Takes the rates of this device anew; the better ones count, as a busy machine slows both."""
    size = 512 if jax.default_backend() == "cpu" else 4096
    products = []
    for one in {dtype, "float32"}:
        square = jnp.ones((size, size), one)
        products.append(2.0 * size**3 / _fastest(lambda x: x @ x, square))
    # Small enough for a CPU's second-level cache: no copy is faster than this.
    stretch = jnp.ones((2**16 if jax.default_backend() == "cpu" else 2**26,), jnp.float32)
    copied = 2.0 * stretch.nbytes / _fastest(lambda x: x + 1, stretch)
    known = _rates.get(dtype, (0.0, 0.0))
    _rates[dtype] = (max(known[0], *products), max(known[1], copied * _CACHES))


def _fastest(function: Any, argument: Any) -> float:
    compiled = jax.jit(function).lower(argument).compile()
    jax.block_until_ready(compiled(argument))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(compiled(argument))
        best = min(best, time.perf_counter() - start)
    return best
