"""Others' benchmark files: they choose an implementation, below what was measured, when asked."""

import json
import statistics
from pathlib import Path

import pytest

from shapetune.autotune.targets import target
from shapetune.cache import RecordSet
from shapetune.cache.errors import CacheError
from shapetune.cache.imported import NAMES, read_benchmark
from shapetune.kernels import get_op
from shapetune.kernels.attention import cudnn
from shapetune.kernels.decision import Settings, decide

from ..samples import problem, record

DATA = Path(__file__).parent.parent / "data"
ATTENTION = DATA / "rtx3090_attention.json"
DEVICE = target("rtx3090").device
ASKED = Settings(imported=True)


@pytest.fixture
def with_cudnn(monkeypatch):
    """The library counts as installed, as on a machine with that card."""
    monkeypatch.setattr(cudnn, "_missing", lambda: None)


def _records(path=ATTENTION):
    found = read_benchmark(path).records(DEVICE, path.name, 1.0)
    return RecordSet([one.to_bytes() for one in found])


def _points():
    """Of each point of the file, the time of each JAX implementation and of its own dispatcher."""
    points = {}
    for row in json.loads(ATTENTION.read_text())["results"]:
        if "median_ms" in row and row["impl"].startswith(("probjax", "jax")):
            key = tuple(row[n] for n in ("mode", "dtype", "head_dim", "causal", "seq"))
            points.setdefault(key, {})[row["impl"]] = row["median_ms"]
    return points


def test_the_choice_is_the_best_implementation_at_every_point(with_cudnn):
    records, op = _records(), get_op("attention")
    regrets, theirs = [], []
    for (mode, dtype, dim, causal, seq), times in _points().items():
        about = problem(seq=seq, dim=dim, dtype=dtype, causal=causal, mode=mode, batch=4, heads=8)
        one = decide(op, about, DEVICE, records, ASKED)
        assert one.tier == "imported"
        own = {NAMES[name]: ms for name, ms in times.items() if name in NAMES}
        regrets.append(own[one.implementation] / min(own.values()))
        theirs.append(times["probjax_default"] / min(own.values()))
        default = op.implementation(one.implementation).default_config(about, DEVICE)
        assert one.config == default
    assert len(regrets) == 108
    assert set(regrets) == {1.0}
    # What an untuned dispatcher costs on the same points.
    assert statistics.mean(theirs) == pytest.approx(1.054, abs=0.0005)
    assert max(theirs) == pytest.approx(1.519, abs=0.0005)


def test_imports_count_only_when_asked_for_and_below_what_was_measured(with_cudnn):
    op = get_op("attention")
    about = problem(seq=1024, dim=64, dtype="bfloat16", batch=4, heads=8)
    unasked = decide(op, about, DEVICE, _records(), Settings())
    assert unasked.tier == "heuristic"
    assert any("SHAPETUNE_IMPORTED=1" in step for step in unasked.steps)
    measured = record(
        about.replace(seq=800, kv_seq=800), device=DEVICE, chosen=op.heuristic(about, DEVICE)
    )
    both = _records() | RecordSet([measured.to_bytes()])
    assert decide(op, about, DEVICE, both, ASKED).tier == "nearest"
    assert decide(op, about.replace(batch=9), DEVICE, _records(), ASKED).tier == "imported"


def test_the_recurrence_is_imported_too():
    found = read_benchmark(DATA / "rtx3090_linear_attention.json")
    assert {one.op for one in found.times} == {"linear_attention"}
    assert all(times[0].implementation == "chunked" for times in found.times.values())
    rows = json.loads((DATA / "rtx3090_linear_attention.json").read_text())["results"]
    times = sum(len(times) for times in found.times.values())
    assert times + sum(found.skipped.values()) == len(rows)
    assert found.skipped["not a kernel alone"] >= 28


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"device": 3, "results": []}', '{"device": {}, "results": []}',
     '{"device": {"gpu": "x", "jax": "1"}, "results": 3}', "[" * 100_000, "\x00"],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_by_name(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(CacheError, match=r"bench\.json"):
        read_benchmark(path)


def test_rows_that_cannot_be_believed_are_left_out_and_counted(tmp_path):
    good = {"impl": "jax_xla", "dtype": "float32", "head_dim": 64, "seq": 128, "causal": False,
            "mode": "fwd", "batch": 4, "heads": 8, "median_ms": 1.0, "rel_err": 1e-6}  # fmt: skip
    changes = [
        {}, {"median_ms": float("nan")}, {"median_ms": -1.0}, {"median_ms": True}, {"rel_err": 0.9},
        {"rel_err": None}, {"impl": "../xla"}, {"impl": 3}, {"seq": -5}, {"dtype": "int8"},
        {"causal": "yes"}, {"error": "out of memory"},
    ]  # fmt: skip
    rows = [{**good, **change} for change in changes]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"device": {"gpu": "x", "jax": "1"}, "results": [*rows, 7]}))
    found = read_benchmark(path)
    assert len(found.times) == 1
    assert sum(found.skipped.values()) == len(changes)
