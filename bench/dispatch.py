"""What a dispatch costs: `shapetune.attention` against the call it chooses, eagerly.

Run as ``python -m shapetune.bench.dispatch``; prints JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import attention
from ..kernels import default, misses
from .machine import machine

_CALLS = 2000
_ROUNDS = 15


def dispatch_cost() -> dict[str, Any]:
    """Microseconds that the dispatcher adds to an eager call, in paired rounds.

    The call is tiny (one position of one head), so that its own time is small
    beside the dispatch. ``count_us`` is what counting a call that no record answers
    takes; it is part of ``call_us``.
    """
    arrays = tuple(jnp.ones((1, 1, 1, 8), jnp.float32) for _ in range(3))
    attention(*arrays)
    (served,) = default.state().memo.values()
    padded = (*arrays, None, None, None, None)
    through, direct = [], []
    for _ in range(_ROUNDS):
        through.append(_per_call(lambda: attention(*arrays)))
        direct.append(_per_call(lambda: served(*padded)))
    counting = misses.counted(_idle, misses.Count("heuristic"), None)
    counts = [
        _per_call(lambda: counting(*padded)) - _per_call(lambda: _idle(*padded))
        for _ in range(_ROUNDS)
    ]
    added = sorted(t - d for t, d in zip(through, direct, strict=True))
    q1, median, q3 = statistics.quantiles(added, n=4)
    return {
        **machine(),
        "call_us": statistics.median(direct),
        "added_us": {"median": median, "q1": q1, "q3": q3},
        "count_us": statistics.median(counts),
        "rounds": _ROUNDS,
        "calls_per_round": _CALLS,
    }


def _idle(*arrays: Any) -> None:
    """Does nothing, at the cost of a call."""


def _per_call(call: Callable[[], Any]) -> float:
    for _ in range(100):
        call()
    start = time.perf_counter()
    for _ in range(_CALLS):
        result = call()
    seconds = time.perf_counter() - start
    jax.block_until_ready(result)
    return seconds / _CALLS * 1e6


if __name__ == "__main__":
    with default.use_cache([]):
        print(json.dumps(dispatch_cost(), indent=2))
