"""Timing one candidate of a search: screened, sampled in calm, taken again when in doubt.

What a neighbour on the machine does to a sample, what a clock that is still
ramping up does, and what no device can do, must not decide a ranking.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import measure
from .measure import Compiled, Effort, Reading

#: Samples fall into two groups if they leave a gap of this factor between them…
_GAP = 1.25
#: …with at least this part of them on either side.
_MINORITY = 0.2
#: Samples drift if their last third is off the first by this factor.
_DRIFT = 1.15
#: Seconds of a pause between samples on a machine that is busy in bursts…
SPREAD_S = 0.2
#: …as one is where fewer samples than this part are calm.
_MOSTLY = 0.75


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one program.

    Attributes:
        samples_ms: Milliseconds per call; of the samples that count.
        inner: Calls per sample.
        screened: Given up after the first samples.
        retaken: Taken a second time.
        disturbed: The machine was busy with something else meanwhile.
        note: What was unusual.
        screen_s: Seconds spent on the first samples.
        time_s: Seconds spent on the others.
    """

    samples_ms: tuple[float, ...]
    inner: int
    screened: bool = False
    retaken: bool = False
    disturbed: bool = False
    note: str = ""
    screen_s: float = 0.0
    time_s: float = 0.0

    @property
    def quartiles_ms(self) -> tuple[float, float, float]:
        """First quartile, median, third quartile."""
        q1, median, q3 = np.percentile(self.samples_ms, (25, 50, 75))
        return float(q1), float(median), float(q3)


@dataclasses.dataclass(frozen=True)
class Rival:
    """The best candidate so far.

    Attributes:
        median_ms: Its median.
        compiled: Its program, to be sampled next to the one that is timed; None if
            it is not at hand.
    """

    median_ms: float
    compiled: Compiled | None = None


def time_program(
    compiled: Compiled,
    args: Sequence[Any],
    rival: Rival | None,
    effort: Effort,
    floor_ms: float = 0.0,
    entered: Callable[[str], None] = lambda phase: None,
    beat: Callable[[], None] = lambda: None,
    spread: bool = False,
) -> Timing:
    """Times a program that has been called once.

    Args:
        compiled: The program.
        args: What to call it with.
        rival: The best so far, against which it is screened.
        effort: How long to time.
        floor_ms: Below this a reading is not believed, and taken again.
        entered: Called with ``"screen"`` and ``"time"`` as these phases begin.
        beat: Called before each sample.
        spread: Pause now and then, so that one burst of another process does not
            cover all samples.
    """
    entered("screen")
    started = time.perf_counter()
    measure.sample(compiled, args, 1)  # the second warm-up: interpreters compile again here
    first = measure.sample(compiled, args, 1)
    inner = measure.calibrate(first)
    slower = _screen(compiled, args, inner, first, rival, effort)
    screen_s = time.perf_counter() - started
    if slower is not None:
        times, ratio = slower
        note = (
            f"{ratio:.2f}× as slow as the best, or more, in each of its first {len(times)} samples"
        )
        return Timing(times, inner, screened=True, note=note, screen_s=screen_s)
    entered("time")
    started = time.perf_counter()
    count = _count(inner * first, effort)
    samples, disturbed = _samples(compiled, args, inner, count, beat, spread)
    doubt = _doubt(samples, floor_ms)
    note = doubt
    if doubt:
        again, _ = _samples(compiled, args, inner, count, beat, spread)
        still = _doubt(again, floor_ms)
        # In doubt a second time, all samples count: the spread is real.
        samples = np.concatenate([samples, again]) if still else again
        note = f"{doubt}, and again" if still else f"{doubt} at first"
    return Timing(
        tuple(map(float, samples)),
        inner,
        retaken=bool(doubt),
        disturbed=disturbed,
        note=note,
        screen_s=screen_s,
        time_s=time.perf_counter() - started,
    )


def _count(sample_ms: float, effort: Effort) -> int:
    wanted = effort.seconds * 1e3 / max(sample_ms, 1e-6)
    return int(min(effort.most, max(effort.least, wanted)))


def _screen(
    compiled: Compiled,
    args: Sequence[Any],
    inner: int,
    first_ms: float,
    rival: Rival | None,
    effort: Effort,
) -> tuple[tuple[float, ...], float] | None:
    """The first samples of a program that is clearly slower, and the least ratio; else None."""
    if rival is None or first_ms <= effort.give_up_ratio * rival.median_ms:
        return None
    times, ratios = [], []
    for _ in range(3):
        base = rival.median_ms
        if rival.compiled is not None:
            calls = measure.calibrate(base)
            base = max(base, measure.sample(rival.compiled, args, calls))
        times.append(measure.sample(compiled, args, inner))
        ratios.append(times[-1] / base)
        if ratios[-1] <= effort.give_up_ratio:
            return None
    return tuple(times), min(ratios)


def _samples(
    compiled: Compiled,
    args: Sequence[Any],
    inner: int,
    count: int,
    beat: Callable[[], None],
    spread: bool,
) -> tuple[np.ndarray, bool]:
    """Times of calm samples, or of the calmest where too few are; and whether many were not."""
    readings: list[Reading] = []
    while len(readings) < measure.PATIENCE * count:
        beat()
        if spread and readings and len(readings) % max(1, count // 3) == 0:
            time.sleep(SPREAD_S)
        readings.append(measure.read(compiled, args, inner))
        if len(readings) >= count:
            times = np.array([one.ms for one in readings])
            if not compiled.each_ready:  # a GPU: see measure.interleave
                return times, False
            kept = measure.calm(np.array([one.share for one in readings]))
            if kept.sum() >= count:
                return times[kept], bool(kept.mean() < _MOSTLY)
    # By what the program had of the processors, not by how fast it was.
    calmest = np.argsort([-one.share for one in readings], kind="stable")[:count]
    return np.array([one.ms for one in readings])[np.sort(calmest)], True


def _doubt(samples: np.ndarray, floor_ms: float) -> str:
    """Why these samples should be taken again, or nothing."""
    if np.median(samples) < floor_ms:
        return "too fast to believe"
    third = len(samples) // 3
    if third >= 2:
        first, last = np.median(samples[:third]), np.median(samples[-third:])
        if max(first, last) > _DRIFT * min(first, last) and _trend(samples):
            return f"drifting from {first:.3g} to {last:.3g} ms"
    ordered = np.sort(samples)
    gaps = ordered[1:] / ordered[:-1]
    at = int(np.argmax(gaps))
    fewer = min(at + 1, len(samples) - at - 1)
    if gaps[at] > _GAP and fewer >= max(2, _MINORITY * len(samples)):
        return f"in two groups, up to {ordered[at]:.3g} and from {ordered[at + 1]:.3g} ms"
    return ""


def _trend(samples: np.ndarray) -> bool:
    """Whether the order of samples says that they go one way (Mann, Econometrica 13, 1945)."""
    n = len(samples)
    i, j = np.triu_indices(n, 1)
    score = np.sign(samples[j] - samples[i]).sum()
    deviation = np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return bool(abs(score) > 2.58 * deviation)
