"""What a cache costs: loading, deciding, merging, compacting.

Run as ``python -m shapetune.bench.cache [OUTPUT.json]``; prints JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..cache import merge, store
from ..cache.key import Candidate, Problem
from ..cache.record import Comparison, Provenance, Record, Trial, Verification
from ..cache.segment import write_segments
from ..kernels import current_device, default, get_op
from ..kernels.decision import decide
from .machine import machine

_RECORDS = 10_000
_CACHES, _RECORDS_EACH = 100, 1_000
_TRIALS = 12
_ROUNDS = 9


def records(count: int, first: int = 0) -> Iterator[Record]:
    """Records of different problems on this device, as a search of a dozen trials leaves them."""
    device = current_device()
    # What is chosen is supported everywhere; what it is compared with need not be.
    chosen, heuristic = Candidate("xla"), Candidate("blockwise", {"block_q": 512, "block_k": 512})
    made = Provenance("0.1.0", "0.10.2", "0.10.2", 1, 1, "00", 1.7e9, 10.0)
    tried = tuple(Trial(chosen, "ok", 2.0 + n, 1.9, 2.1, 5, 1, 0.1) for n in range(_TRIALS))
    for number in range(first, first + count):
        about = Problem.make("attention", seq=64 + number % 8192, dim=64, batch=1 + number // 8192)
        yield Record(
            problem=about,
            device=device,
            chosen=chosen,
            heuristic=heuristic,
            comparison=Comparison(1.5, 1.4, 1.6, 15, 3.0, 2.0),
            verification=Verification(1e-6, 1e-5, ("normal",)),
            provenance=made,
            trials=tried,
        )


def cache_costs(folder: Path) -> dict[str, Any]:
    """Seconds and microseconds of what users wait for."""
    device = current_device()
    one = folder / "one"
    payloads = [record.to_bytes() for record in records(_RECORDS)]
    write_segments(one / device.folder, payloads)
    load_s = [_seconds(lambda: store.load([one], device)) for _ in range(_ROUNDS)]
    sources = []
    for number in range(_CACHES):
        sources.append(folder / f"machine-{number}")
        made = records(_RECORDS_EACH, number * _RECORDS_EACH)
        write_segments(sources[-1] / device.folder, [record.to_bytes() for record in made])
    merge_s = _seconds(lambda: merge.merge(folder / "all", sources))
    many = folder / "many"
    for payload in payloads[:1000]:
        write_segments(many / device.folder, [payload])
    return {
        **machine(),
        "record_bytes": statistics.median(map(len, payloads)),
        "load_10000_records_s": _spread(load_s),
        "load_1000_segments_of_one_s": _seconds(lambda: store.load([many], device)),
        "merge_100_caches_of_1000_s": merge_s,
        "compact_1000_segments_s": _seconds(lambda: merge.compact(many)),
        "first_decision_us": _first_decisions(one, batch=1),
        "neighbour_decision_us": _first_decisions(one, batch=3),
        "known_decision_us": _known_decision(one),
    }


def _first_decisions(place: Path, batch: int) -> dict[str, float]:
    """Of problems that were not asked for before, a record decoded and checked for each.

    Batch 1 has records of its own; of others, thousands of neighbours are looked at.
    """
    op, device = get_op("attention"), current_device()
    with default.use_cache(place):
        found, settings = default.state().records, default.state().settings
        asked = [Problem.make("attention", seq=64 + 7 * n, dim=64, batch=batch) for n in range(200)]
        spent = [_seconds(lambda p=p: decide(op, p, device, found, settings)) for p in asked]  # type: ignore[misc]
    return _spread([1e6 * seconds for seconds in spent])


def _known_decision(place: Path) -> float:
    """Of a problem that was decided before: what a call of a new static form waits for."""
    op, asked = get_op("attention"), Problem.make("attention", seq=1024, dim=64)
    with default.use_cache(place):
        state = default.state()
        state.decide(op, asked)
        seconds = _seconds(lambda: [state.decide(op, asked) for _ in range(10_000)])
    return seconds / 10_000 * 1e6


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _spread(values: list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4)
    return {"median": median, "q1": q1, "q3": q3}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        text = json.dumps(cache_costs(Path(scratch)), indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
