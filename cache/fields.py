"""Values from outside, checked: every type, size and range, before anything is built of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import RecordError
from .key import Candidate

_MAX_TEXT = 2000
_MAX_CONFIG = 32


def candidate_map(candidate: Candidate) -> dict[str, Any]:
    """A candidate as plain values."""
    return {
        "implementation": candidate.implementation,
        "config": {name: candidate.config[name] for name in sorted(candidate.config)},
    }


def candidate(value: object) -> Candidate:
    """The candidate that ``candidate_map`` described; anything else is refused."""
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


_known: dict[type[Any], tuple[dict[str, str], frozenset[str]]] = {}


def _declared(kind: type[Any]) -> tuple[dict[str, str], frozenset[str]]:
    """The fields of a dataclass with their types, and which of them must be there."""
    if kind not in _known:
        declared = dataclasses.fields(kind)
        # A field that came later has a default, and is missing in older records.
        needed = frozenset(f.name for f in declared if f.default is dataclasses.MISSING)
        _known[kind] = {f.name: str(f.type) for f in declared}, needed
    return _known[kind]


def build(kind: type[Any], fields: object) -> Any:
    """A dataclass from a map whose values are checked by the fields' annotations."""
    if not isinstance(fields, Mapping):
        raise RecordError(f"{kind.__name__.lower()} must be a map")
    types, needed = _declared(kind)
    if not needed <= fields.keys() <= types.keys():
        raise RecordError(f"{kind.__name__.lower()} has the wrong fields")
    values = dict(fields)
    for name, value in fields.items():
        wanted = types[name]
        if wanted == "Candidate":
            values[name] = candidate(value)
        elif wanted == "tuple[str, ...]":
            if not isinstance(value, list) or len(value) > 32 or not all(map(_text, value)):
                raise RecordError(f"{name} must be a short list of words")
            values[name] = tuple(value)
        elif not _CHECKS[wanted](value):
            raise RecordError(f"{kind.__name__.lower()}.{name} is out of range: {value!r:.80}")
    return kind(**values)
