"""What rows of benchmark files are about: their points, names and groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..cache.errors import ShapetuneError
from ..kernels import get_op
from .schema import BenchFile, Row, suite_of
from .suites import RIVAL, window_of

#: What other files call implementations that have another name here.
ALIASES = {
    "probjax_mha": "pallas_mha",
    "probjax_flex": "pallas_flex",
    "probjax_default": "default",
}
#: Groups that `default` is held against: those of this package, all of jax, and all.
GROUPS = ("ours", "jax", "all")
_ALIGNED = 128
#: Fields of a row that grow with batch and heads.
_PER_CALL = ("median_ms", "q1_ms", "q3_ms", "peak_mb")


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """What rows have in common that may be compared with one another."""

    suite: str
    mode: str
    dtype: str
    dim: int
    causal: bool
    window: int
    batch: int
    heads: int
    seq: int

    @property
    def ragged(self) -> bool:
        """Whether no common block size divides the sequence."""
        return self.seq % _ALIGNED != 0

    @property
    def label(self) -> str:
        """A short text for tables."""
        causal = " causal" if self.suite == "attention" and self.causal else ""
        window = f" window {self.window}" if self.suite != "attention" else ""
        batch = f" {self.batch}×{self.heads}" if self.batch else ""  # none if any matches
        return (
            f"{self.suite} seq {self.seq} dim {self.dim} {self.dtype}{causal}{window}"
            f"{batch} {self.mode}"
        )

    @property
    def facets(self) -> dict[str, str]:
        """The values by which means are broken down."""
        found = {"mode": self.mode, "dtype": self.dtype, "dim": str(self.dim)}
        if self.suite == "attention":
            found["causal"] = "causal" if self.causal else "not causal"
        else:
            found["suite"] = self.suite
        found["length"] = "ragged" if self.ragged else "aligned"
        found["seq"] = str(self.seq)
        return found


def point_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> Point:
    """The point that a row is at."""
    suite = suite_of(row)
    window = window_of(row, config) if suite != "attention" else None
    return Point(
        suite=suite, mode=row["mode"], dtype=row["dtype"],
        dim=row["head_dim" if suite == "attention" else "dim"], causal=row.get("causal", True),
        window=-1 if window is None else window, batch=row["batch"], heads=row["heads"],
        seq=row["seq"],
    )  # fmt: skip


def name_of(row: Mapping[str, Any]) -> str:
    """The implementation of a row by its name here, with its tag if it has one."""
    name = ALIASES.get(row["impl"], row["impl"])
    return f"{name}:{row['tag']}" if row.get("tag") else str(name)


def named(file: BenchFile) -> list[tuple[str, Row]]:
    """The rows of a file by name, with the chunk where it alone tells some of a point apart."""
    chunks: dict[tuple[Point, str], set[Any]] = {}
    for row in file.results:
        at = point_of(row, file.config), name_of(row)
        chunks.setdefault(at, set()).add(row.get("chunk"))
    several = {name for (_, name), found in chunks.items() if len(found) > 1}
    return [
        (f"{name}:chunk {row['chunk']}" if name in several else name, row)
        for name, row in zip(map(name_of, file.results), file.results, strict=True)
    ]


def value_of(row: Mapping[str, Any]) -> float | None:
    """What a row is compared by: milliseconds, or MiB in suite ``peak``; None if it failed."""
    found = row.get("peak_mb" if suite_of(row) == "peak" else "median_ms")
    return None if "error" in row or found is None else float(found)


Table = dict[Point, dict[str, Row]]


def exactly(point: Point) -> Point:
    """Points match if all of them is equal."""
    return point


def any_batch(point: Point) -> Point:
    """Points match whatever their batch and heads."""
    return dataclasses.replace(point, batch=0, heads=0)


def by_point(file: BenchFile, match: Callable[[Point], Point] = exactly) -> Table:
    """The rows of a file by point and implementation; at `any_batch`, of one batch × head.

    Raises:
        ShapetuneError: Several rows of an implementation are at one point.
    """
    found: Table = {}
    for name, row in named(file):
        point = match(point_of(row, file.config))
        rows = found.setdefault(point, {})
        if name in rows:
            raise ShapetuneError(_clash(file, point, rows[name], row))
        rows[name] = _of_one_head(row) if match is any_batch else row
    return found


def _clash(file: BenchFile, point: Point, one: Row, other: Row) -> str:
    """What to say of two rows of an implementation at one point."""
    fields = ("impl", "batch", "heads")
    differ = [name for name in fields if one.get(name) != other.get(name)]
    told = ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in differ)
    remedy = "give one of them a --tag"
    if "batch" in differ or "heads" in differ:
        remedy = "leave out --any-batch, or give a file with one of them"
    return f"{file.name} has several rows of {name_of(one)} at {point.label} ({told}); {remedy}"


def _of_one_head(row: Row) -> Row:
    """A row with its times and memory divided by batch × heads."""
    share = row["batch"] * row["heads"]
    scaled: Row = {name: row[name] / share for name in _PER_CALL if name in row}
    if "samples_ms" in row:
        scaled["samples_ms"] = [[turn, ms / share] for turn, ms in row["samples_ms"]]
    return {**row, **scaled}


def group_of(name: str) -> str:
    """``"ours"``, ``"jax"`` or ``"torch"``: whose an implementation is."""
    name = name.partition(":")[0].removeprefix(RIVAL)
    if name.startswith("torch"):
        return "torch"
    own = any(name in get_op(op).implementations for op in ("attention", "linear_attention"))
    vendors = ("cudnn", "mosaic", "tokamax")
    return "ours" if name == "default" or (own and name not in vendors) else "jax"


def in_group(name: str, group: str) -> bool:
    """Whether an implementation is among those of a group of ``GROUPS``."""
    if group == "all":
        return True
    return group_of(name) == "ours" or (group == "jax" and group_of(name) == "jax")


def _common(sets: Sequence[set[Point]]) -> list[list[Point]]:
    return [sorted(sets[0] & other) for other in sets[1:]]


def common_points(files: Sequence[BenchFile], match: Callable[[Point], Point]) -> list[list[Point]]:
    """For each file after the first, the points at which both have a row.

    Raises:
        ShapetuneError: No file has one in common with the first.
    """
    sets = [set(by_point(file, match)) for file in files]
    found = _common(sets)
    if found and not any(found):
        wider = match is exactly and any(_common([{*by_point(f, any_batch)} for f in files]))
        raise ShapetuneError(
            f"{files[0].name} has no point in common with "
            f"{' or '.join(f.name for f in files[1:])}; they cover "
            + "; ".join(f"{f.name}: {len(s)} points, such as {min(s).label}" if s
                        else f"{f.name}: none" for f, s in zip(files, sets, strict=True))
            + ("; --any-batch compares points of different batch sizes" if wider
               else "; give files whose grids overlap")
        )  # fmt: skip
    return found
