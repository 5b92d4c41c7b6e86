"""Every format that was ever released stays readable: one file of each, kept for ever."""

from pathlib import Path

import pytest

from shapetune.cache import Candidate, load, miss
from shapetune.cache.envelope import SCHEMA, read_head

FORMATS = Path(__file__).parent.parent / "data" / "formats"


@pytest.mark.parametrize(
    "path", sorted(FORMATS.glob("schema-*.msgpack")), ids=lambda path: path.stem
)
def test_a_file_of_every_released_format_is_read_whole(path):
    found = load([path])
    assert (len(found), len(list(found)), found.unknown, found.damage) == (3, 3, 0, [])
    by_seq = {one.problem.seq: one for one in found}
    first = by_seq[1024]
    assert first.chosen == Candidate("blockwise", {"block_q": 512, "block_k": 256})
    assert (first.comparison.ratio, first.comparison.pairs) == (1.25, 15)
    assert (first.device.name, first.device.cores) == ("NVIDIA Example 1", 82)
    assert [trial.status for trial in first.trials] == ["ok", "ok", "compile_error"]
    assert by_seq[600].problem.window == (128, 0)
    assert by_seq[77].problem.features == ("bias[ts]",)
    assert first.provenance.jax == "0.10.2"


@pytest.mark.parametrize(
    "path", sorted(FORMATS.glob("kinds-*.msgpack")), ids=lambda path: path.stem
)
def test_every_kind_of_record_of_every_released_format_is_read(path):
    found = load([path])
    found.decode_all()
    assert found.damage == []
    assert found.kinds == {"imported": 1, "pin": 1, "quarantine": 1, "trials": 1, "tuning": 1}
    (pinned,), (warned,), (partial,), (theirs,) = map(
        found.of_kind, ("pin", "quarantine", "trials", "imported")
    )
    assert (pinned.active, pinned.count, pinned.candidate) == (True, 1, warned.candidate)
    assert warned.status == "crashed"
    assert [trial.candidate.implementation for trial in partial.trials] == ["xla"]
    assert [one.implementation for one in theirs.times] == ["xla", "blockwise"]
    # Misses are read where they lie, apart from the other records.
    misses = [h for h in map(read_head, found.payloads) if h.kind == miss.KIND]
    assert [miss.from_head(head).calls for head in misses] == [3]


def test_the_format_in_use_has_its_files():
    assert (FORMATS / f"schema-{SCHEMA}.msgpack").exists()
    assert (FORMATS / f"kinds-{SCHEMA}.msgpack").exists()
