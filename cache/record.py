"""The stored outcome of tuning a problem, and its bytes.

A record is immutable and its id is a hash of its bytes. Bytes from disk are
data to be checked: every type, size and range is, before a record exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgpack

from .envelope import MAX_RECORD_BYTES, SCHEMA, Head, read_head, record_id, unpack
from .errors import RecordError
from .fields import build, candidate, candidate_map
from .key import Candidate, Device, Problem
from .subject import opened, seal

#: The kind of record that this is: a problem tuned.
KIND = "tuning"

_MAX_TRIALS = 5_000
#: What a record without its trials fits into, with room to spare.
_MOST_TRIAL_BYTES = MAX_RECORD_BYTES - 2**16

STATUSES = (
    "ok",
    "unsupported",
    "compile_error",
    "out_of_memory",
    "wrong_result",
    "crashed",
    "timed_out",
    "nondeterministic",
    "implausible",
    "over_limit",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One candidate compiled, verified and timed.

    Attributes:
        candidate: What was tried.
        status: One of ``STATUSES``. ``"nondeterministic"``: two runs on the same
            inputs differ by more than rounding; ``"implausible"``: timed below what
            the device can do; ``"over_limit"``: compiled, but not run, since it
            needs more temporary memory than was allowed.
        median_ms: Median time of a call, milliseconds; None unless timed.
        q1_ms: First quartile.
        q3_ms: Third quartile.
        samples: How many samples the three rest on.
        inner: Back-to-back calls per sample.
        compile_s: Seconds to trace, lower and compile.
        temp_mb: Temporary memory of the compiled program, MiB.
        rel_err: Largest error found, relative to the largest right value.
        screened: Timed only briefly, since it was clearly slower than the best;
            the note says by how much.
        note: Why it failed, in the exception's own words.
        version: ``Implementation.version`` of what was tried.
        retaken: Timed a second time, since the first samples fell into two groups,
            drifted, or were too fast to believe.
        verify_s: Seconds spent on verifying it.
        screen_s: Seconds spent on its first samples.
        time_s: Seconds spent on the others.
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
    version: int = 0
    retaken: bool = False
    verify_s: float = 0.0
    screen_s: float = 0.0
    time_s: float = 0.0


_TRIAL_FIELDS = tuple(f.name for f in dataclasses.fields(Trial))


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
        compile_s, verify_s, screen_s, time_s: Of those seconds, the parts spent on
            each phase of the trials of this run.
        compare_s: The part spent on comparing the finalists with the heuristic.
        search_s: The part spent on choosing what to try.
        idle_s: The rest: starting workers, making inputs, waiting.
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
    compile_s: float = 0.0
    verify_s: float = 0.0
    screen_s: float = 0.0
    time_s: float = 0.0
    compare_s: float = 0.0
    search_s: float = 0.0
    idle_s: float = 0.0


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
    #: The id of the bytes that it was read from: those of an older layout are not
    #: the bytes that it would have now.
    stored_id: str = dataclasses.field(default="", init=False, compare=False, repr=False)

    @property
    def heuristic_is_best(self) -> bool:
        """Whether nothing was found that is surely faster than the heuristic."""
        return self.chosen == self.heuristic

    def to_bytes(self) -> bytes:
        """The canonical bytes: a short head for the index, then the body.

        Of trials that would make it larger than a record may be, the last are left out.
        """
        rest = {
            "chosen": candidate_map(self.chosen),
            "heuristic": candidate_map(self.heuristic),
            "comparison": dataclasses.asdict(self.comparison),
            "verification": {
                **dataclasses.asdict(self.verification),
                "inputs": list(self.verification.inputs),
            },
            "provenance": dataclasses.asdict(self.provenance),
            "trials": pack_trials(self.trials),
        }
        return seal(KIND, self.problem, self.device, rest)

    @property
    def id(self) -> str:
        """A hash of the bytes, 32 hexadecimal digits."""
        return self.stored_id or record_id(self.to_bytes())


def read_record(payload: bytes) -> Record:
    """The record of these bytes, every part of it checked.

    Raises:
        RecordError: Something in them is missing, of a wrong type or out of range.
    """
    return from_head(read_head(payload))


def from_head(head: Head) -> Record:
    """The record that starts with this head; as ``read_record``."""
    if head.schema != SCHEMA or head.kind != KIND:
        raise RecordError(f"schema {head.schema}, kind {head.kind!r:.40} is not a tuning record's")
    problem, device, rest = opened(head)
    record = Record(
        problem=problem,
        device=device,
        chosen=candidate(rest.get("chosen")),
        heuristic=candidate(rest.get("heuristic")),
        comparison=build(Comparison, rest.get("comparison")),
        verification=build(Verification, rest.get("verification")),
        provenance=build(Provenance, rest.get("provenance")),
        trials=read_trials(rest.get("trials")),
    )
    comparison = record.comparison
    if not 0 < comparison.low <= comparison.ratio <= comparison.high:
        raise RecordError(f"the comparison's interval does not hold its ratio: {comparison}")
    return record


def trial_row(trial: Trial) -> list[Any]:
    """A trial as plain values, in the order of its fields."""
    values = [getattr(trial, f.name) for f in dataclasses.fields(trial)]
    values[0] = candidate_map(trial.candidate)
    return values


def read_trial(row: object) -> Trial:
    """The trial that ``trial_row`` described; anything else is refused."""
    if not isinstance(row, list) or len(row) > len(_TRIAL_FIELDS):
        raise RecordError("a trial has the wrong number of fields")
    trial: Trial = build(Trial, dict(zip(_TRIAL_FIELDS, row, strict=False)))
    if trial.status not in STATUSES:
        raise RecordError(f"a trial has the unknown status {trial.status!r:.40}")
    return trial


def pack_trials(trials: Sequence[Trial]) -> bytes:
    """Trials as bytes, which a reader that needs none of them can leave alone.

    Of more than a record has room for, the last are left out.
    """
    rows = [trial_row(trial) for trial in trials[:_MAX_TRIALS]]
    while len(packed := bytes(msgpack.packb(rows))) > _MOST_TRIAL_BYTES:
        rows = rows[: len(rows) // 2]
    return packed


def read_trials(blob: object) -> tuple[Trial, ...]:
    """The trials that ``pack_trials`` packed; anything else is refused."""
    if not isinstance(blob, bytes):
        raise RecordError("trials must be bytes")
    rows = unpack(blob, longest=_MAX_TRIALS)
    if not isinstance(rows, list) or len(rows) > _MAX_TRIALS:
        raise RecordError("trials must be a list of bounded length")
    return tuple(map(read_trial, rows))
