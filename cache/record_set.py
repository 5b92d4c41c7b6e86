"""A set of records in memory: what merging, choosing and dispatching work on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import imported, partial, pin, quarantine, record
from .choice import nearest
from .envelope import SCHEMA, Head, head_fields, read_head, record_id
from .errors import RecordError
from .key import Device, Problem
from .record import Record

#: What makes an object of a record's head, by kind.
_READERS: dict[str, Callable[[Head], Any]] = {
    record.KIND: record.from_head,
    quarantine.KIND: quarantine.from_head,
    partial.KIND: partial.from_head,
    pin.KIND: pin.from_head,
    imported.KIND: imported.from_head,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """Something in a cache that was skipped."""

    path: Path
    reason: str


class RecordSet:
    """A set of records, indexed by problem and by family, decoded when first asked for.

    Union with ``|`` is commutative, associative and idempotent. Records of a
    later schema, or of a kind that is not known here, are carried along unread.
    """

    def __init__(self, payloads: Iterable[bytes] = (), damage: Sequence[Damage] = ()) -> None:
        self.damage = list(damage)
        self._payloads: dict[str, bytes] = {}
        self._kinds: dict[str, list[str]] = {}
        self._exact: dict[tuple[str, str, str], list[str]] = {}
        self._family: dict[tuple[str, str, str], dict[str, None]] = {}
        self._devices: set[str] = set()
        self._device_of: dict[str, str] = {}
        self._sources: dict[str, Path] = {}
        self._decoded: dict[str, Any] = {}
        for payload in payloads:
            self.add(payload, Path("memory"))

    def add(self, payload: bytes, source: Path, identity: str | None = None) -> None:
        """Adds the bytes of a record; what is not one is listed as damage of ``source``.

        ``identity`` is its id, where a reader of segments has it already.
        """
        identity = identity or record_id(payload)
        if identity in self._payloads:
            return
        try:
            schema, kind, device_key, family, problem_key, _ = head_fields(payload)
        except RecordError as error:
            self.damage.append(Damage(source, str(error)))
            return
        self._payloads[identity] = payload
        self._sources[identity] = source
        self._device_of[identity] = device_key
        if schema > SCHEMA or kind not in _READERS:
            return
        self._kinds.setdefault(kind, []).append(identity)
        self._devices.add(device_key)
        self._exact.setdefault((kind, device_key, problem_key), []).append(identity)
        self._family.setdefault((kind, device_key, family), {})[problem_key] = None

    def __len__(self) -> int:
        return len(self._payloads)

    def __or__(self, other: RecordSet) -> RecordSet:
        union = RecordSet((), [*self.damage, *other.damage])
        for one in (self, other):
            for identity, payload in one._payloads.items():
                union.add(payload, one._sources[identity], identity)
        return union

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all records."""
        return frozenset(self._payloads)

    @property
    def digest(self) -> str:
        """A hash of the set, 16 hexadecimal digits: equal for equal sets, and no others."""
        every = "".join(sorted(self._payloads)).encode()
        return hashlib.blake2b(every, digest_size=8).hexdigest()

    @property
    def payloads(self) -> list[bytes]:
        """The bytes of all records."""
        return list(self._payloads.values())

    def by_device_key(self) -> dict[str, dict[str, bytes]]:
        """The bytes of all records by id, apart by ``Device.key``, those unread too."""
        apart: dict[str, dict[str, bytes]] = {}
        for identity, payload in self._payloads.items():
            apart.setdefault(self._device_of[identity], {})[identity] = payload
        return apart

    def decode_all(self) -> None:
        """Looks into every record that can be read, and lists those that are damaged."""
        for kind in list(self._kinds):
            self.of_kind(kind)

    @property
    def sound_payloads(self) -> list[bytes]:
        """The bytes of all records but those that were looked into and are damaged."""
        return [p for i, p in self._payloads.items() if self._decoded.get(i, p) is not None]

    def where(self, wanted: Callable[[Head], bool]) -> RecordSet:
        """The records whose head is wanted."""
        return RecordSet(p for p in self._payloads.values() if wanted(read_head(p)))

    def count_of(self, device: Device) -> int:
        """How many records there are of such a device."""
        return sum(
            len(ids) for (_, device_key, _), ids in self._exact.items() if device_key == device.key
        )

    @property
    def kinds(self) -> dict[str, int]:
        """How many records there are of each kind that can be read."""
        return {kind: len(ids) for kind, ids in sorted(self._kinds.items())}

    @property
    def unknown(self) -> int:
        """How many records this version of shapetune carries along unread."""
        return len(self._payloads) - sum(map(len, self._kinds.values()))

    def exact(self, device: Device, problem: Problem) -> list[Record]:
        """The tuning records of this very problem on such a device."""
        return self.about(record.KIND, device, problem)

    def family(self, device: Device, problem: Problem) -> list[Record]:
        """The tuning records of problems that differ from this one in sizes alone."""
        return self.of_family(record.KIND, device, problem)

    def of_family(self, kind: str, device: Device, problem: Problem) -> list[Any]:
        """The records of one kind about problems that differ from this one in sizes alone."""
        keys = sorted(self._family.get((kind, device.key, problem.family), ()))
        return [one for key in keys for one in self.of_key(kind, device, key)]

    def near(self, kind: str, device: Device, problem: Problem) -> list[str]:
        """The keys of neighbouring problems that have records of one kind, the closest first."""
        return nearest(self._family.get((kind, device.key, problem.family), ()), problem)

    def of_key(self, kind: str, device: Device, problem_key: str) -> list[Any]:
        """The records of one kind about the problem of this key on such a device."""
        return self._read(self._exact.get((kind, device.key, problem_key), ()))

    def about(self, kind: str, device: Device, problem: Problem) -> list[Any]:
        """The records of one kind about this very problem on such a device."""
        return self.of_key(kind, device, problem.key)

    @property
    def devices(self) -> list[Device]:
        """The devices of its records, as far as their keys tell."""
        return [d for d in map(Device.from_key, sorted(self._devices)) if d is not None]

    def of_kind(self, kind: str) -> list[Any]:
        """All records of one kind."""
        return self._read(self._kinds.get(kind, ()))

    def __iter__(self) -> Iterator[Record]:
        """The tuning records."""
        return iter(self.of_kind(record.KIND))

    def _read(self, ids: Iterable[str]) -> list[Any]:
        return [one for one in map(self._one, sorted(ids)) if one is not None]

    def _one(self, identity: str) -> Any:
        if identity not in self._decoded:
            head = read_head(self._payloads[identity])
            try:
                one = _READERS[head.kind](head)
                if isinstance(one, Record):
                    object.__setattr__(one, "stored_id", identity)
                self._decoded[identity] = one
            except RecordError as error:
                self._decoded[identity] = None
                self.damage.append(Damage(self._sources[identity], f"record {identity}: {error}"))
        return self._decoded[identity]
