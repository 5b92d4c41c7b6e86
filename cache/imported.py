"""Benchmark files of others as records: they choose an implementation, but no config.

They rank below everything measured here, and count only where they are asked for.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .envelope import Head, record_id
from .errors import CacheError, ProblemError, RecordError
from .fields import build
from .key import Device, Problem
from .subject import opened_part, seal

KIND = "imported"

#: What implementations are called in the files of another project, and here.
NAMES = {
    "probjax_mha": "pallas_mha",
    "probjax_flex": "pallas_flex",
    "jax_xla": "xla",
    "jax_cudnn": "cudnn",
    **{n: n for n in ("xla", "cudnn", "blockwise", "pallas_mha", "pallas_flex", "mosaic")},
    **{n: n for n in ("scan", "chunked", "pallas", "pallas_scanbwd")},
}
#: A row whose result is further off than this, relative to the largest value, is not believed.
MAX_REL_ERR = 0.05
_MAX_BYTES = 64 * 2**20
_MAX_TIMES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Time:
    """What one implementation took.

    Attributes:
        implementation: Its name here.
        median_ms: Median time of a call, milliseconds.
        rel_err: Error relative to the largest right value.
    """

    implementation: str
    median_ms: float
    rel_err: float


@dataclasses.dataclass(frozen=True)
class _Fields:
    source: str
    jax: str
    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class Imported:
    """What others measured for one problem on one device.

    Attributes:
        problem: The problem.
        device: The device.
        times: Of each implementation, the fastest first.
        source: The file that it is from.
        jax: The version of jax that it was measured with.
        time: When it was imported, seconds since 1970, UTC.
    """

    problem: Problem
    device: Device
    times: tuple[Time, ...]
    source: str
    jax: str
    time: float

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        rest = {
            KIND: {
                "source": self.source,
                "jax": self.jax,
                "time": self.time,
                "times": [list(dataclasses.astuple(one)) for one in self.times],
            },
        }
        return seal(KIND, self.problem, self.device, rest)

    @property
    def id(self) -> str:
        """A hash of the bytes, 32 hexadecimal digits."""
        return record_id(self.to_bytes())


def from_head(head: Head) -> Imported:
    """The record that starts with this head.

    Raises:
        RecordError: Something in it is missing, of a wrong type or out of range.
    """
    problem, device, body = opened_part(head, KIND)
    if not isinstance(body, dict) or not isinstance(rows := body.pop("times", None), list):
        raise RecordError("an imported record must be a map with times")
    fields = build(_Fields, body)
    names = [f.name for f in dataclasses.fields(Time)]
    if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        raise RecordError("an imported time must be a list of three")
    times = tuple(build(Time, dict(zip(names, row, strict=True))) for row in rows)
    if not 0 < len(times) <= _MAX_TIMES or not all(one.median_ms > 0 for one in times):
        raise RecordError("an imported record must have times above 0")
    return Imported(problem, device, times, fields.source, fields.jax, fields.time)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark file that was read.

    Attributes:
        device_name: The product that it was measured on.
        jax: The version of jax.
        times: Of each problem, what each implementation took, the fastest first.
        skipped: Reasons why rows were left out, with how many.
    """

    device_name: str
    jax: str
    times: Mapping[Problem, tuple[Time, ...]]
    skipped: Mapping[str, int]

    def records(self, device: Device, source: str, time: float) -> list[Imported]:
        """Its records, as of a device."""
        return [
            Imported(problem, device, times, source[:200], self.jax, time)
            for problem, times in self.times.items()
        ]


def unknown(records: Iterable[Imported], known: Iterable[Imported]) -> list[Imported]:
    """Those of the records that say something else than all that are known, but for the time."""
    said = {dataclasses.replace(one, time=0.0) for one in known}
    return [one for one in records if dataclasses.replace(one, time=0.0) not in said]


def read_benchmark(path: Path) -> Benchmark:
    """The times in a benchmark file that implementations of this package can be held to.

    Raises:
        CacheError: It cannot be read, or is not such a file.
    """
    content = _content(path)
    device, config = content["device"], content.get("config") or {}
    name, version = device.get("device_kind") or device.get("gpu"), device.get("jax")
    if not _is_word(name) or not _is_word(version):
        raise CacheError(f"{path} does not name its device and its jax: {device!r:.100}")
    found: dict[Problem, dict[str, Time]] = {}
    skipped: dict[str, int] = {}
    for outcome in (_row(row, config) for row in content["results"]):
        if isinstance(outcome, str):
            skipped[outcome] = skipped.get(outcome, 0) + 1
            continue
        problem, time = outcome
        known = found.setdefault(problem, {}).get(time.implementation)
        if known is None or time.median_ms < known.median_ms:
            found[problem][time.implementation] = time
    ordered = {
        problem: tuple(sorted(times.values(), key=lambda t: (t.median_ms, t.implementation)))
        for problem, times in found.items()
    }
    return Benchmark(name, version, ordered, skipped)


def _content(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file() and path.exists():
            raise CacheError(
                f"benchmark file {str(path)!r} is not a regular file; name a .json file"
            )
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise CacheError(f"{path} is larger than any benchmark file is")
        content = json.loads(data.decode())
    except CacheError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CacheError(f"benchmark file {str(path)!r} cannot be read: {error}") from error
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("device"), dict)
        or not isinstance(content.get("config") or {}, dict)
        or not isinstance(content.get("results"), list)
    ):
        raise CacheError(
            f"{str(path)!r} is not a benchmark file: it must hold device, config and results"
        )
    return content


def _is_word(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


def _row(row: object, config: Mapping[str, Any]) -> tuple[Problem, Time] | str:
    """What a row says, or why it is left out."""
    if not isinstance(row, dict):
        return "not a row"
    if "error" in row:
        return "it failed there"
    name = NAMES.get(row["impl"]) if isinstance(row.get("impl"), str) else None
    if name is None:
        return "no implementation of ours"
    if row.get("suite", "kernel") != "kernel":
        return "not a kernel alone"
    median_ms, rel_err = _figure(row.get("median_ms")), _figure(row.get("rel_err"))
    if not median_ms or rel_err is None:
        return "no time or no error"
    if rel_err > MAX_REL_ERR:
        return "its result is too far off"
    try:
        return _problem(row, config), Time(name, median_ms, rel_err)
    except (KeyError, TypeError, ProblemError) as error:
        return f"not a problem: {error}"[:100]


def _figure(value: object) -> float | None:
    """A finite number that is not negative, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0 <= value < 1e12 else None


def _problem(row: Mapping[str, Any], config: Mapping[str, Any]) -> Problem:
    shared = {name: row[name] for name in ("seq", "dtype", "batch", "heads", "mode")}
    if "head_dim" in row:
        return Problem.make("attention", dim=row["head_dim"], causal=row["causal"], **shared)
    # The recurrence takes its first state as an argument, and leaves out a window.
    window = min(config["window"], row["seq"] - 1)
    return Problem.make(
        "linear_attention",
        dim=row["dim"],
        causal=True,
        window=window,
        features=("state",),
        **shared,
    )
