"""The schema of benchmark files: one JSON object of device, config and results.

A result is one implementation at one point: what identifies it, then either an
``error`` in the exception's own words, or times and memory. Other people's files
of this schema are read as well as ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..cache.errors import ShapetuneError
from ..cache.key import DTYPES, MODES
from ..cache.segment import replace_file

Row = dict[str, Any]

#: What identifies a row, by suite; attention rows name no suite.
IDENTITY: dict[str, dict[str, tuple[type, ...]]] = {
    "attention": {
        "impl": (str,), "dtype": (str,), "head_dim": (int,), "seq": (int,), "causal": (bool,),
        "mode": (str,), "batch": (int,), "heads": (int,), "tag": (str, type(None)),
    },
    "kernel": {
        "suite": (str,), "impl": (str,), "mode": (str,), "chunk": (int,), "batch": (int,),
        "heads": (int,), "seq": (int,), "dim": (int,), "dtype": (str,),
    },
}  # fmt: skip
IDENTITY["layer"] = {**IDENTITY["kernel"], "window": (int,)}
IDENTITY["peak"] = IDENTITY["kernel"]

_NUMBER = (float, int)
_TIMES: dict[str, tuple[type, ...]] = {
    "compile_s": _NUMBER, "inner": (int,), "median_ms": _NUMBER, "q1_ms": _NUMBER,
    "q3_ms": _NUMBER,
}  # fmt: skip
#: Memory of a compiled program, or the peak that was measured.
_PROGRAM_MEMORY = ("xla_temp_mb", "xla_arg_mb", "xla_out_mb")
_OUTCOME: dict[str, dict[str, tuple[type, ...]]] = {
    "attention": {**_TIMES, "max_abs_err": _NUMBER, "rel_err": _NUMBER, "tflops": _NUMBER},
    "kernel": _TIMES,
    "layer": _TIMES,
    "peak": {"peak_mb": _NUMBER, "inputs_mb": _NUMBER},
}
#: What any row may hold beside.
_ABOUT: dict[str, tuple[type, ...]] = {
    "tag": (str, type(None)), "window": (int,), "chosen": (str,), "tier": (str,),
}  # fmt: skip
#: What a row with times may hold beside: of ours, how it was sampled.
_OPTIONAL: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_PROGRAM_MEMORY, "peak_mb", "inputs_mb"), _NUMBER),
    **dict.fromkeys(("max_abs_err", "rel_err", "tflops"), _NUMBER),
    **_ABOUT, "memory_note": (str,), "samples_ms": (list,), "turns": (str,),
}  # fmt: skip
_LARGEST = 2**63
_POSITIVE = ("seq", "head_dim", "dim", "batch", "heads", "inner")
#: Milliseconds that a call can take: from a picosecond to thirty years.
_SHORTEST_MS, _LONGEST_MS = 1e-9, 1e12


class BenchFileError(ShapetuneError, ValueError):
    """A file is not a benchmark file of this schema."""


class OutputError(ShapetuneError, OSError):
    """A file cannot be written."""


@dataclasses.dataclass(frozen=True)
class BenchFile:
    """A benchmark file.

    Attributes:
        device: What it was measured on: versions, device_kind, gpu…
        config: The grid that was asked for.
        results: Its rows.
        name: A short name for tables.
    """

    device: dict[str, Any]
    config: dict[str, Any]
    results: list[Row]
    name: str = ""

    @property
    def device_name(self) -> str:
        """The device as a person names it."""
        return str(self.device.get("device_kind") or self.device.get("backend") or "unknown")


def suite_of(row: Mapping[str, Any]) -> str:
    """The suite that a row belongs to."""
    return str(row.get("suite", "attention"))


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What no two rows of a file share."""
    names = IDENTITY[suite_of(row)]
    shared = (row.get("tag"), row.get("window"))
    return (suite_of(row), *(row.get(name) for name in names), *shared)


def faults(row: object) -> list[str]:
    """What keeps a row from being one of this schema; empty if nothing does."""
    if not isinstance(row, Mapping):
        return ["is not an object"]
    suite = suite_of(row)
    if suite not in IDENTITY:
        return [f"suite {suite!r} is not one of {', '.join(IDENTITY)}"]
    failed = "error" in row
    wanted: dict[str, tuple[type, ...]] = dict(IDENTITY[suite])
    wanted |= {"error": (str,)} if failed else _OUTCOME[suite]
    allowed = _ABOUT if failed else _OPTIONAL
    found = [f"lacks {name}" for name in wanted if name not in row]
    for name, value in row.items():
        kinds = wanted.get(name) or allowed.get(name)
        if kinds is None:
            found.append(f"holds {name}, which no row of suite {suite} has")
        elif not _is(value, kinds):
            found.append(f"{name}={value!r:.40} is not {' or '.join(k.__name__ for k in kinds)}")
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(f"{name}={value} is not finite")
        elif isinstance(value, int) and abs(value) > _LARGEST:
            found.append(f"{name} is larger than 2^63")
        elif name in _POSITIVE and not value > 0:
            found.append(f"{name}={value} is not above 0")
        elif name.endswith("_ms") and kinds is _NUMBER and not _is_time(value):
            found.append(f"{name}={value} is no time that a call can take")
        elif isinstance(value, _NUMBER) and value < (-1 if name == "window" else 0):
            found.append(f"{name}={value} is negative")
    if found:
        return found
    if row["mode"] not in MODES or row["dtype"] not in DTYPES:
        found.append(f"mode={row['mode']!r} or dtype={row['dtype']!r} is not known")
    if not failed and suite != "peak":
        program = [name in row for name in _PROGRAM_MEMORY]
        if not all(program) and ("peak_mb" not in row or any(program)):
            found.append(f"has neither {', '.join(_PROGRAM_MEMORY)} nor peak_mb")
        if not row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]:
            found.append("median_ms is not between q1_ms and q3_ms")
    if not all(_is_sample(one) for one in row.get("samples_ms", ())):
        found.append("samples_ms holds something else than [round, milliseconds]")
    return found


def _is_sample(one: object) -> bool:
    if not isinstance(one, list) or len(one) != 2:
        return False
    turn, spent = one
    return _is(turn, (int,)) and abs(turn) <= _LARGEST and _is(spent, _NUMBER) and _is_time(spent)


def _is_time(value: float) -> bool:
    return _SHORTEST_MS <= value <= _LONGEST_MS


def _is(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds)


def check(content: object, name: str) -> BenchFile:
    """The benchmark file that this JSON value is.

    Raises:
        BenchFileError: It is not one; the message names the first fault.
    """
    if not isinstance(content, Mapping):
        raise BenchFileError(f"{name} is not a benchmark file: not a JSON object")
    for part, kind in (("device", dict), ("config", dict), ("results", list)):
        if not isinstance(content.get(part), kind):
            raise BenchFileError(
                f"{name} is not a benchmark file: it has no {part} ({kind.__name__}); "
                "make one with shapetune bench"
            )
    window = content["config"].get("window")
    if window is not None and not _is(window, (int,)):
        raise BenchFileError(f"{name}: the config's window={window!r:.40} is not int")
    seen: set[tuple[Any, ...]] = set()
    for i, row in enumerate(content["results"]):
        wrong = faults(row)
        if not wrong and identity(row) in seen:
            wrong = ["is there twice"]
        if wrong:
            raise BenchFileError(f"{name}: row {i + 1} {wrong[0]}")
        seen.add(identity(row))
    return BenchFile(
        dict(content["device"]), dict(content["config"]), list(content["results"]), name
    )


def read(path: Path) -> BenchFile:
    """Reads and checks a benchmark file.

    Raises:
        BenchFileError: It cannot be read, or is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BenchFileError(
            f"{path} cannot be read as a benchmark file: {error}; "
            "name one that shapetune bench made"
        ) from None
    return dataclasses.replace(check(content, str(path)), name=path.stem)


def check_writable(path: Path) -> None:
    """Makes the folder of a file, and makes sure before hours of work that it takes this one.

    Raises:
        OutputError: It does not.
    """
    with _outputs(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError("not a regular file")
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all: one that is there stays until the new one is done.

    Raises:
        OutputError: It cannot be written.
    """
    check_writable(path)
    with _outputs(path):
        replace_file(path, text.encode())


@contextlib.contextmanager
def _outputs(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = path if len(str(path)) < 200 else f"{str(path)[:200]}…"
        raise OutputError(
            f"output={str(shown)!r} cannot be written ({reason}); give another --output"
        ) from None


def write(path: Path, file: BenchFile) -> None:
    """Writes a benchmark file whole or not at all, one row a line.

    Raises:
        OutputError: It cannot be written.
    """
    rows = ",\n".join(json.dumps(row) for row in file.results)
    text = (
        f'{{"device":{json.dumps(file.device)},\n"config":{json.dumps(file.config)},\n'
        f'"results":[\n{rows}\n]}}\n'
    )
    write_whole(path, text)
