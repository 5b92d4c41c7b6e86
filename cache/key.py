"""What a record is about: the problem (one static shape of an op) and the device.

Both are frozen values with one canonical text each, the same bytes on every
machine and Python version, made by the same code for tuning and for dispatch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ProblemError

MODES = ("fwd", "fwd_bwd")
DTYPES = ("bfloat16", "float16", "float32")
#: No sane array is longer than this along one axis; larger is damage or a slip.
MAX_SIZE = 2**31 - 1

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FEATURE = re.compile(r"[a-z][a-z0-9_]{0,31}(\[[a-z0-9_.,:-]{0,48}\])?")

_SIZES = re.compile(
    r"\|seq=(\d{1,10})\|kv_seq=(\d{1,10})\|.*\|batch=(\d{1,10})\|heads=(\d{1,10})\|", re.ASCII
)

Window = int | tuple[int, int] | None
Value = int | str
Config = Mapping[str, Value]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One static shape of an op.

    Attributes:
        op: Name of the op, such as ``"attention"``.
        seq: Query positions, T.
        kv_seq: Key and value positions, S.
        dim: Size of a query and key head, H.
        value_dim: Size of a value head, Hv.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        causal: Whether position t sees only positions up to t.
        window: Attention: (left, right) positions seen beside the own one, or
            None. Linear attention: the window that the recurrence leaves out,
            -1 or larger.
        batch: B.
        heads: Query heads, N.
        kv_heads: Key and value heads, K; N is a multiple of K.
        mode: ``"fwd"``, or ``"fwd_bwd"`` for the value and the gradients.
        features: Everything else that changes the kernel, as sorted words:
            ``"bias[nts]"`` for a bias that varies over those axes, ``"mask[ts]"``,
            ``"kv_lengths"``, ``"precision[highest]"``…

    Raises:
        ProblemError: A field is out of range.
    """

    op: str
    seq: int
    kv_seq: int
    dim: int
    value_dim: int
    dtype: str
    causal: bool
    window: Window
    batch: int
    heads: int
    kv_heads: int
    mode: str
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.op, str) and _NAME.fullmatch(self.op)):
            raise ProblemError(f"op must be a lower-case name, got {self.op!r}")
        for name in ("seq", "kv_seq", "dim", "value_dim", "batch", "heads", "kv_heads"):
            _check_size(name, getattr(self, name))
        if self.dtype not in DTYPES:
            raise ProblemError(
                f"dtype {self.dtype!r} is not supported; cast the arrays to one of {', '.join(DTYPES)}"
            )
        if not isinstance(self.causal, bool):
            raise ProblemError(f"causal must be True or False, got {self.causal!r}")
        if self.mode not in MODES:
            raise ProblemError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.heads % self.kv_heads:
            raise ProblemError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        _check_window(self.window)
        if not isinstance(self.features, tuple):
            raise ProblemError(f"features must be a sorted tuple of words, got {self.features!r}")
        for word in self.features:
            if not (isinstance(word, str) and _FEATURE.fullmatch(word)):
                raise ProblemError(f"features holds {word!r}, which is not a feature word")
        if list(self.features) != sorted(set(self.features)):
            raise ProblemError(f"features must be a sorted tuple of words, got {self.features!r}")

    @classmethod
    def make(
        cls,
        op: str,
        *,
        seq: int,
        dim: int,
        dtype: str = "float32",
        kv_seq: int | None = None,
        value_dim: int | None = None,
        causal: bool = False,
        window: Window = None,
        batch: int = 1,
        heads: int = 8,
        kv_heads: int | None = None,
        mode: str = "fwd",
        features: Sequence[str] = (),
    ) -> Problem:
        """A problem from the fields a person gives; the rest follow from them.

        Raises:
            ProblemError: A field is out of range.
        """
        if isinstance(features, str):
            raise ProblemError(f"features must be a tuple of words, got {features!r}")
        return cls(
            op=op,
            seq=seq,
            kv_seq=seq if kv_seq is None else kv_seq,
            dim=dim,
            value_dim=dim if value_dim is None else value_dim,
            dtype=dtype,
            causal=causal,
            window=window,
            batch=batch,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            mode=mode,
            features=tuple(sorted(features)),
        )

    @property
    def key(self) -> str:
        """The canonical text; equal problems have equal keys, and no others."""
        window = self.window
        if window is None:
            shown = "-"
        elif isinstance(window, tuple):
            shown = f"{window[0]},{window[1]}"
        else:
            shown = str(window)
        return (
            f"{self.op}|mode={self.mode}|dtype={self.dtype}|seq={self.seq}|kv_seq={self.kv_seq}"
            f"|dim={self.dim}|value_dim={self.value_dim}|causal={int(self.causal)}|window={shown}"
            f"|batch={self.batch}|heads={self.heads}|kv_heads={self.kv_heads}"
            f"|features={'+'.join(self.features) or '-'}"
        )

    @property
    def family(self) -> str:
        """What problems share whose records may stand in for one another.

        It leaves out the sizes that a neighbour may differ in: seq, kv_seq,
        batch, and the number of heads (not how many share a key head).
        """
        same = self.replace(seq=1, kv_seq=1, batch=1, heads=self.group, kv_heads=1)
        return same.key

    @property
    def label(self) -> str:
        """A short text for tables: what differs from the usual is named."""
        parts = [f"seq {self.seq}"]
        if self.kv_seq != self.seq:
            parts.append(f"kv_seq {self.kv_seq}")
        parts.append(f"dim {self.dim}")
        if self.value_dim != self.dim:
            parts.append(f"value_dim {self.value_dim}")
        parts.append(self.dtype)
        if self.causal:
            parts.append("causal")
        if self.window is not None:
            parts.append(f"window {self.window}")
        parts.append(f"{self.batch}×{self.heads}")
        if self.kv_heads != self.heads:
            parts.append(f"kv_heads {self.kv_heads}")
        parts.extend(self.features)
        parts.append(self.mode)
        return f"{self.op} " + " ".join(parts)

    @property
    def group(self) -> int:
        """Query heads that share one key head, G = N / K."""
        return self.heads // self.kv_heads

    def replace(self, **changes: Any) -> Problem:
        """This problem with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_map(self) -> dict[str, Any]:
        """The fields as plain values, for a record or JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if isinstance(self.window, tuple):
            fields["window"] = list(self.window)
        fields["features"] = list(self.features)
        return fields

    @classmethod
    def from_map(cls, fields: object) -> Problem:
        """The problem that ``to_map`` described; anything else is refused."""
        if not isinstance(fields, Mapping):
            raise ProblemError(f"a problem must be a map, got {type(fields).__name__}")
        names = {f.name for f in dataclasses.fields(cls)}
        if set(fields) != names:
            raise ProblemError(
                f"a problem has the fields {sorted(names)}, got {sorted(map(str, fields))}"
            )
        values = dict(fields)
        if isinstance(values["window"], list):
            values["window"] = tuple(values["window"])
        if not isinstance(values["features"], list):
            raise ProblemError(f"features must be a list, got {values['features']!r}")
        values["features"] = tuple(values["features"])
        return cls(**values)


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ProblemError(f"{name} must be an integer, got {value!r}")
    if not 1 <= value <= MAX_SIZE:
        raise ProblemError(f"{name} must be between 1 and {MAX_SIZE}, got {value}")


def _check_window(window: object) -> None:
    if window is None:
        return
    sides = window if isinstance(window, tuple) else (window,)
    if isinstance(window, tuple) and len(window) != 2:
        raise ProblemError(f"window must be (left, right), got {window!r}")
    low = 0 if isinstance(window, tuple) else -1
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, int) or not low <= side <= MAX_SIZE:
            raise ProblemError(f"window must hold integers of at least {low}, got {window!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that problems of one family may differ in: see ``Problem``."""

    seq: int
    kv_seq: int
    batch: int
    heads: int

    @classmethod
    @functools.lru_cache(maxsize=2**17)
    def of_key(cls, key: str) -> Sizes | None:
        """Those that a ``Problem.key`` tells, so that no record need be read for them."""
        found = _SIZES.search(key)
        if found is None:
            return None
        values = tuple(map(int, found.groups()))
        return cls(*values) if min(values) > 0 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The fingerprint of the device that a record was measured on.

    Attributes:
        platform: ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"``.
        name: The product, such as ``"NVIDIA H200"`` or the processor's model.
        capability: Compute capability, ``"9.0"``; empty where there is none.
        cores: Multiprocessors of a GPU; processors that this process may use.
        shared_memory: Bytes of shared memory one block may use; 0 on a CPU.
        memory: Bytes of device memory; 0 where unknown. A CPU's is not part of
            its fingerprint, since it does not change which kernel is fastest.
        driver: Version of the driver or runtime; empty where there is none.
    """

    platform: str
    name: str
    capability: str = ""
    cores: int = 0
    shared_memory: int = 0
    memory: int = 0
    driver: str = ""

    @property
    def key(self) -> str:
        """Devices of one key exchange records as equals; the driver may differ."""
        return "|".join((self.platform, self.name, self.capability, str(self.cores)))

    @classmethod
    def from_key(cls, key: str) -> Device | None:
        """The device of a ``key``, as far as that tells: what is not in it is empty or 0."""
        platform, _, rest = key.partition("|")
        parts = rest.rsplit("|", 2)
        if len(parts) != 3 or not parts[2].isascii() or not parts[2].isdigit():
            return None
        return cls(platform, parts[0], parts[1], int(parts[2][:12]))

    @property
    def folder(self) -> str:
        """A folder name: readable, safe in any file system, unique per ``key``."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.platform} {self.name}".lower()).strip("-")
        return f"{words[:48].rstrip('-')}-{hashlib.blake2b(self.key.encode(), digest_size=5).hexdigest()}"

    def to_map(self) -> dict[str, Any]:
        """The fields as plain values, for a record or JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_map(cls, fields: object) -> Device:
        """The device that ``to_map`` described; anything else is refused."""
        if not isinstance(fields, Mapping):
            raise ProblemError(f"a device must be a map, got {type(fields).__name__}")
        kinds: dict[str, Any] = {
            f.name: (int if f.default == 0 else str) for f in dataclasses.fields(cls)
        }
        if set(fields) != set(kinds):
            raise ProblemError(
                f"a device has the fields {sorted(kinds)}, got {sorted(map(str, fields))}"
            )
        values: dict[str, Any] = dict(fields)
        for name, kind in kinds.items():
            value = values[name]
            if type(value) is not kind or (kind is str and len(value) > 200):
                raise ProblemError(f"device field {name} is not a {kind.__name__}: {value!r:.80}")
            if kind is int and not 0 <= value < 2**63:
                raise ProblemError(f"device field {name} is out of range: {value}")
        return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """An implementation with a config, for a problem."""

    implementation: str
    config: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """A canonical, readable text: ``blockwise(block_k=512, block_q=1024)``."""
        inside = ", ".join(f"{name}={self.config[name]}" for name in sorted(self.config))
        return f"{self.implementation}({inside})" if inside else self.implementation

    def __hash__(self) -> int:
        return hash(self.key)
