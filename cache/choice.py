"""Which record counts for a problem: a pure function of the set of records.

Order of arrival, grouping into segments and duplicates change nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from .key import Device, Problem, Sizes
from .record import Record

#: A neighbour may differ by at most this factor in seq and in kv_seq.
NEAREST_FACTOR = 2.0

#: A device of the same class may differ by at most this factor in its cores.
CORES_FACTOR = 2.0

POLICIES = ("strict", "warn", "any")


@dataclasses.dataclass(frozen=True)
class Versions:
    """The versions in use, against which a record is fresh or stale.

    Attributes:
        jax: Version of jax.
        implementation: The version of an implementation by name, None if gone.
    """

    jax: str
    implementation: Callable[[str], int | None]

    def staleness(self, record: Record) -> str | None:
        """Why a record is stale, or None if it is fresh."""
        made_by = record.provenance
        if minor(made_by.jax) != minor(self.jax):
            return f"made with jax {made_by.jax or 'unknown'}, in use is {self.jax}"
        for candidate, version in (
            (record.chosen, made_by.chosen_version),
            (record.heuristic, made_by.heuristic_version),
        ):
            current = self.implementation(candidate.implementation)
            if current != version:
                now = "gone" if current is None else f"version {current}"
                return f"made with {candidate.implementation} version {version}, now {now}"
        return None


def minor(version: str) -> tuple[str, ...]:
    """Major and minor part of a version."""
    return tuple(version.split(".")[:2])


def rank(records: Iterable[Record], versions: Versions, policy: str = "warn") -> list[Record]:
    """Records of one problem, best first.

    1. fresh before stale (``strict`` drops the stale, ``any`` does not ask),
    2. the larger ratio to the heuristic, measured side by side in one run:
       times of different machines or days do not compare, ratios do,
    3. the newer,
    4. the smaller id.
    """
    stale = {record.id: versions.staleness(record) is not None for record in records}
    if policy == "any":
        stale = dict.fromkeys(stale, False)
    kept = [r for r in records if not (policy == "strict" and stale[r.id])]
    return sorted(kept, key=lambda r: (stale[r.id], -r.comparison.ratio, -r.provenance.time, r.id))


def nearest(keys: Iterable[str], problem: Problem) -> list[str]:
    """Of the keys of problems of one family, those of neighbours, the closest first.

    Problems that differ in batch and heads alone come before all others.
    """
    found = []
    for key in keys:
        sizes = Sizes.of_key(key)
        far = None if sizes is None or key == problem.key else distance(sizes, problem)
        if far is not None:
            found.append((far, key))
    return [key for _, key in sorted(found)]


def distance(a: Sizes, b: Problem) -> tuple[float, float] | None:
    """How far apart two problems of one family are, or None if too far.

    The first figure is of the sequence lengths, the second of batch × heads, in
    doublings.
    """
    if not (
        a.seq <= NEAREST_FACTOR * b.seq
        and b.seq <= NEAREST_FACTOR * a.seq
        and a.kv_seq <= NEAREST_FACTOR * b.kv_seq
        and b.kv_seq <= NEAREST_FACTOR * a.kv_seq
    ):
        return None
    lengths = abs(math.log2(a.seq / b.seq)) + abs(math.log2(a.kv_seq / b.kv_seq))
    return lengths, abs(math.log2(a.batch * a.heads / (b.batch * b.heads)))


def same_class(devices: Iterable[Device], here: Device) -> list[Device]:
    """The devices whose records may be used here for want of own ones, the most similar first.

    They are of the same platform, and of the same compute capability, or the same
    product where there is no such figure; their cores differ by a factor of two at
    most. Their configs are not trusted: they are fitted into the space here, and what
    the implementation does not support here is passed over.
    """
    kept = [
        one
        for one in devices
        if one.key != here.key
        and one.platform == here.platform
        and one.capability == here.capability
        and (one.capability or one.name == here.name)
        and max(one.cores, here.cores) <= CORES_FACTOR * min(one.cores, here.cores)
    ]
    return sorted(
        kept,
        key=lambda one: (one.name != here.name, abs(one.cores - here.cores), one.key),
    )
