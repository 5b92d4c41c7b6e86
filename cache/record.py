"""The stored outcome of tuning a problem, and its bytes.

A record is immutable and its id is a hash of its bytes. Bytes from disk are
data to be checked: every type, size and range is, before a record exists.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from .errors import ProblemError, RecordError
from .key import Candidate, Device, Problem

#: Raised when the layout below changes; older layouts stay readable.
SCHEMA = 1
#: The one kind of record so far: a problem tuned.
KIND = "tuning"

MAX_RECORD_BYTES = 4 * 2**20
_MAX_TEXT = 2000
_MAX_CONFIG = 32
_MAX_TRIALS = 20_000

STATUSES = (
    "ok",
    "unsupported",
    "compile_error",
    "out_of_memory",
    "wrong_result",
    "crashed",
    "timed_out",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One candidate compiled, verified and timed.

    Attributes:
        candidate: What was tried.
        status: One of ``STATUSES``.
        median_ms: Median time of a call, milliseconds; None unless timed.
        q1_ms: First quartile.
        q3_ms: Third quartile.
        samples: How many samples the three rest on.
        inner: Back-to-back calls per sample.
        compile_s: Seconds to trace, lower and compile.
        temp_mb: Temporary memory of the compiled program, MiB.
        rel_err: Largest error found, relative to the largest right value.
        screened: Timed only briefly, since it was clearly slower than the best.
        note: Why it failed, in the exception's own words.
    """

    candidate: Candidate
    status: str
    median_ms: float | None = None
    q1_ms: float | None = None
    q3_ms: float | None = None
    samples: int = 0
    inner: int = 0
    compile_s: float = 0.0
    temp_mb: float = 0.0
    rel_err: float | None = None
    screened: bool = False
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The chosen candidate against the heuristic, timed in turns on the same inputs.

    Attributes:
        ratio: Heuristic time over chosen time; above 1 is a gain.
        low: Lower end of its 95% interval.
        high: Upper end.
        pairs: Pairs of samples that it rests on.
        heuristic_ms: Median time of the heuristic in those pairs.
        chosen_ms: Median time of the chosen candidate in those pairs.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    heuristic_ms: float
    chosen_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """How the chosen candidate fared against the float64 reference.

    Attributes:
        rel_err: Largest error relative to the largest right value, over all inputs.
        tolerance: The tolerance where that error came closest to it.
        inputs: The kinds of inputs it was checked on.
    """

    rel_err: float
    tolerance: float
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Provenance:
    """What software made a record, where and when.

    Attributes:
        shapetune, jax, jaxlib: Versions.
        chosen_version: ``Implementation.version`` of the chosen one.
        heuristic_version: The same of the heuristic.
        host: A hash of the host's name, so that records of one machine can be told.
        time: Seconds since 1970, UTC.
        seconds: What the tuning took.
        settings: How it was searched: sampler, seed, trials allowed.
    """

    shapetune: str
    jax: str
    jaxlib: str
    chosen_version: int
    heuristic_version: int
    host: str
    time: float
    seconds: float
    settings: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The outcome of tuning one problem on one device."""

    problem: Problem
    device: Device
    chosen: Candidate
    heuristic: Candidate
    comparison: Comparison
    verification: Verification
    provenance: Provenance
    trials: tuple[Trial, ...] = ()

    @property
    def heuristic_is_best(self) -> bool:
        """Whether nothing was found that is surely faster than the heuristic."""
        return self.chosen == self.heuristic

    def to_bytes(self) -> bytes:
        """The canonical bytes: a short head for the index, then the body."""
        trials = msgpack.packb([_flat(t) for t in self.trials])
        body = {
            "problem": self.problem.to_map(),
            "device": self.device.to_map(),
            "chosen": _candidate_map(self.chosen),
            "heuristic": _candidate_map(self.heuristic),
            "comparison": dataclasses.asdict(self.comparison),
            "verification": {
                **dataclasses.asdict(self.verification),
                "inputs": list(self.verification.inputs),
            },
            "provenance": dataclasses.asdict(self.provenance),
            "trials": trials,
        }
        head = [SCHEMA, KIND, self.device.key, self.problem.family, self.problem.key]
        return bytes(msgpack.packb([*head, msgpack.packb(body)]))

    @property
    def id(self) -> str:
        """A hash of the bytes, 32 hexadecimal digits."""
        return record_id(self.to_bytes())


def record_id(payload: bytes) -> str:
    """The id of the record with these bytes."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The part of a record's bytes that the index needs, and the bytes of the rest."""

    device_key: str
    family: str
    problem_key: str
    body: bytes


def read_head(payload: bytes) -> Head:
    """The head of a record's bytes.

    Raises:
        RecordError: They are not a record of a schema and kind known here.
    """
    parts = _unpack(payload)
    if not isinstance(parts, list) or len(parts) != 6:
        raise RecordError("not a record: the outer list is missing")
    schema, kind, device_key, family, problem_key, body = parts
    if schema != SCHEMA or kind != KIND:
        raise RecordError(
            f"schema {schema!r:.20}, kind {kind!r:.40} is not known to this version of shapetune"
        )
    if not (
        isinstance(device_key, str)
        and isinstance(family, str)
        and isinstance(problem_key, str)
        and isinstance(body, bytes)
    ):
        raise RecordError("not a record: the head has wrong types")
    return Head(device_key, family, problem_key, body)


def read_record(payload: bytes) -> Record:
    """The record of these bytes, every part of it checked.

    Raises:
        RecordError: Something in them is missing, of a wrong type or out of range.
    """
    head = read_head(payload)
    body = _unpack(head.body)
    if not isinstance(body, dict):
        raise RecordError("the body is not a map")
    try:
        record = Record(
            problem=Problem.from_map(body.get("problem")),
            device=Device.from_map(body.get("device")),
            chosen=_candidate(body.get("chosen")),
            heuristic=_candidate(body.get("heuristic")),
            comparison=_build(Comparison, body.get("comparison")),
            verification=_build(Verification, body.get("verification")),
            provenance=_build(Provenance, body.get("provenance")),
            trials=_trials(body.get("trials")),
        )
    except ProblemError as error:
        raise RecordError(str(error)) from error
    told = (head.device_key, head.family, head.problem_key)
    if told != (record.device.key, record.problem.family, record.problem.key):
        raise RecordError("the head names another problem or device than the body")
    comparison = record.comparison
    if not 0 < comparison.low <= comparison.ratio <= comparison.high:
        raise RecordError(f"the comparison's interval does not hold its ratio: {comparison}")
    return record


def _unpack(data: bytes) -> Any:
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"{len(data)} bytes are more than a record may have")
    try:
        return msgpack.unpackb(data, strict_map_key=True, raw=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError(f"not msgpack: {type(error).__name__}: {error}"[:200]) from error


def _flat(trial: Trial) -> list[Any]:
    values = [getattr(trial, f.name) for f in dataclasses.fields(trial)]
    values[0] = _candidate_map(trial.candidate)
    return values


def _trials(blob: object) -> tuple[Trial, ...]:
    if not isinstance(blob, bytes):
        raise RecordError("trials must be bytes")
    rows = _unpack(blob)
    if not isinstance(rows, list) or len(rows) > _MAX_TRIALS:
        raise RecordError("trials must be a list of bounded length")
    names = [f.name for f in dataclasses.fields(Trial)]
    out = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(names):
            raise RecordError("a trial has the wrong number of fields")
        trial = _build(Trial, dict(zip(names, row, strict=True)))
        if trial.status not in STATUSES:
            raise RecordError(f"a trial has the unknown status {trial.status!r:.40}")
        out.append(trial)
    return tuple(out)


def _candidate_map(candidate: Candidate) -> dict[str, Any]:
    return {
        "implementation": candidate.implementation,
        "config": {name: candidate.config[name] for name in sorted(candidate.config)},
    }


def _candidate(value: object) -> Candidate:
    if not isinstance(value, Mapping) or set(value) != {"implementation", "config"}:
        raise RecordError("a candidate must be a map of implementation and config")
    name, config = value["implementation"], value["config"]
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise RecordError(f"an implementation's name is not one: {name!r:.80}")
    if not isinstance(config, dict) or len(config) > _MAX_CONFIG:
        raise RecordError("a config must be a small map")
    for key, setting in config.items():
        if not isinstance(key, str) or len(key) > 64 or type(setting) not in (int, str):
            raise RecordError(f"a config holds {key!r:.40}: {setting!r:.40}")
        if isinstance(setting, str) and len(setting) > 64:
            raise RecordError(f"a config's value is too long: {setting!r:.40}")
    return Candidate(name, config)


def _text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _real(value: object) -> bool:
    # A bool is an int by inheritance, and none of these.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 <= value < 1e15


_CHECKS: dict[str, Callable[[object], bool]] = {
    "str": _text,
    "int": _whole,
    "float": _real,
    "bool": lambda value: isinstance(value, bool),
    "float | None": lambda value: value is None or _real(value),
}


def _build(kind: type[Any], fields: object) -> Any:
    """A dataclass from a map whose values are checked by the fields' annotations."""
    if not isinstance(fields, Mapping):
        raise RecordError(f"{kind.__name__.lower()} must be a map")
    values = dict(fields)
    declared = dataclasses.fields(kind)
    if set(values) != {f.name for f in declared}:
        raise RecordError(f"{kind.__name__.lower()} has the wrong fields")
    for field in declared:
        value = values[field.name]
        if field.type == "Candidate":
            values[field.name] = _candidate(value)
        elif field.type == "tuple[str, ...]":
            if not isinstance(value, list) or len(value) > 32 or not all(map(_text, value)):
                raise RecordError(f"{field.name} must be a short list of words")
            values[field.name] = tuple(value)
        elif not _CHECKS[str(field.type)](value):
            raise RecordError(
                f"{kind.__name__.lower()}.{field.name} is out of range: {value!r:.80}"
            )
    return kind(**values)
