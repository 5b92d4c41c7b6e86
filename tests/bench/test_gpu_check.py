"""The code of `make gpu-check`, at sizes that a CPU is done with, and the plan of the compile check."""

import json

from shapetune.autotune.measure import Effort
from shapetune.bench import gpu_check
from shapetune.kernels import get_op

SMALL = gpu_check.Sizes(
    seq=(33,), dim=(16,), dtype="float32", recurrence_seq=(70,), recurrence_dim=(16,), batch=1,
    heads=1, trials=2, effort=Effort(0.01, 2, 2), rounds=2,
)  # fmt: skip


def test_every_part_is_run_and_kept_in_one_file(tmp_path, monkeypatch):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_some.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_it(): pass\ndef test_not_it(): assert False\n"
    )
    sizes = gpu_check.dataclasses.replace(SMALL, tests=folder)
    # On a CPU the kernels are interpreted, and the tuner leaves them out.
    output = tmp_path / "out.json"
    report = gpu_check.check(sizes, output, seconds=900.0)
    assert json.loads(output.read_text()).keys() == report.keys()
    assert report["tests"]["passed"], report["tests"]
    for name, problems in (("tuning", sizes.attention), ("recurrence_tuning", sizes.recurrence)):
        assert not report[name]["failed"], report[name]
        assert len(report[name]["problems"]) == len(problems)
    for row in report["timings"]:
        assert row["xla"]["ratio"][0] > 0
        assert "cudnn" in row
    for row in report["recurrence_timings"]:
        assert {row[name]["ratio"][0] > 0 for name in ("pallas", "chunked", "scan")} == {True}


def test_a_part_that_fails_or_has_no_time_leaves_the_others_theirs(tmp_path, monkeypatch):
    def broken(sizes, seconds):
        raise RuntimeError("no such device")

    def short(sizes, seconds):
        return gpu_check.timings(sizes.attention, sizes, -1.0)

    monkeypatch.setattr(gpu_check, "_PARTS", {"one": (0.5, broken), "two": (0.5, short)})
    report = gpu_check.check(SMALL, tmp_path / "out.json", seconds=1.0)
    assert "no such device" in report["one"]["error"]
    assert "time was up after 0 of 4" in report["two"][0]["note"]


def test_the_full_check_has_the_recurrence_and_ragged_lengths():
    full = gpu_check.Sizes()
    assert {p.seq for p in full.attention} == {1024, 1500, 4096}
    assert {(p.dim, p.mode) for p in full.recurrence} == {
        (dim, mode) for dim in (64, 128) for mode in ("fwd", "fwd_bwd")
    }
    canonical = get_op("linear_attention").canonical
    assert all(canonical(p) == p for p in full.recurrence)
