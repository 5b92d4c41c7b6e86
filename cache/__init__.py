"""Records of what was tuned: their keys, their bytes, their places, and the choice among them."""

from .choice import Versions, nearest, rank
from .key import Candidate, Config, Device, Problem
from .places import as_place, as_places, check_writable, read_path, write_place
from .record import Comparison, Provenance, Record, Trial, Verification
from .record_set import Damage, RecordSet
from .store import default_places, load, publish

__all__ = [
    "Candidate",
    "Comparison",
    "Config",
    "Damage",
    "Device",
    "Problem",
    "Provenance",
    "Record",
    "RecordSet",
    "Trial",
    "Verification",
    "Versions",
    "as_place",
    "as_places",
    "check_writable",
    "default_places",
    "load",
    "nearest",
    "publish",
    "rank",
    "read_path",
    "write_place",
]
