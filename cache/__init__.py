"""Records of what was tuned: their keys, their bytes, their places, and the choice among them."""

from .choice import Versions, nearest, rank
from .key import Candidate, Config, Device, Problem
from .record import Comparison, Provenance, Record, Trial, Verification
from .record_set import Damage, RecordSet
from .store import check_writable, default_places, load, publish

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
    "check_writable",
    "default_places",
    "load",
    "nearest",
    "publish",
    "rank",
]
