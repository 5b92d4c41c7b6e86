import errno
import json
import os
from pathlib import Path

import pytest

from shapetune.bench import schema, suites
from shapetune.bench.schema import BenchFile, BenchFileError
from shapetune.kernels import get_op

DATA = Path(__file__).parent.parent / "data"
FILES = [DATA / "rtx3090_attention.json", DATA / "rtx3090_linear_attention.json"]
OURS = sorted((Path(__file__).parents[2] / "docs" / "benchmarks").glob("cpu_*.json"))


@pytest.mark.parametrize("path", FILES + OURS, ids=lambda path: path.stem)
def test_their_files_and_ours_keep_one_schema(path):
    file = schema.read(path)
    assert file.results
    assert file.device_name != "unknown"


def timed(**changes):
    row = {
        "impl": "xla", "dtype": "float32", "head_dim": 64, "seq": 512, "causal": False,
        "mode": "fwd", "batch": 1, "heads": 8, "tag": None, "max_abs_err": 0.1, "rel_err": 0.01,
        "xla_temp_mb": 1.0, "xla_arg_mb": 1.0, "xla_out_mb": 1.0, "compile_s": 0.1, "inner": 3,
        "median_ms": 2.0, "q1_ms": 1.9, "q3_ms": 2.1, "tflops": 0.1,
    }  # fmt: skip
    row.update(changes)
    return {name: value for name, value in row.items() if value != "gone"}


def _file(rows):
    return json.dumps({"device": {}, "config": {}, "results": rows})


def test_a_whole_row_has_no_faults():
    assert schema.faults(timed()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq": "512"}, "seq='512' is not int"),
        ({"seq": True}, "seq=True is not int"),
        ({"seq": 0}, "not above 0"),
        ({"median_ms": float("nan")}, "not finite"),
        ({"median_ms": 5.0}, "not between"),
        ({"median_ms": "gone"}, "lacks median_ms"),
        ({"xla_temp_mb": "gone"}, "neither"),
        ({"xla_temp_mb": "gone", "peak_mb": 3.0}, "neither"),
        ({"mode": "bwd"}, "not known"),
        ({"colour": 3}, "holds colour"),
        ({"suite": "speed"}, "not one of"),
        ({"seq": 10**400}, "larger than"),
        ({"samples_ms": ["a"]}, "samples_ms holds"),
        ({"samples_ms": [[0, -1.0]]}, "samples_ms holds"),
        ({"error": "it broke"}, "holds max_abs_err"),
    ],
)
def test_a_row_that_is_not_of_the_schema_says_what_is_wrong(change, words):
    assert any(words in fault for fault in schema.faults(timed(**change))), words


def test_a_file_survives_being_written_and_read(tmp_path):
    path = tmp_path / "deep" / "bench.json"
    file = BenchFile({"device_kind": "x"}, {"op": "attention"}, [timed(), timed(impl="default")])
    schema.write(path, file)
    again = schema.read(path)
    assert (again.device, again.config, again.results) == (file.device, file.config, file.results)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "not a JSON object"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("9" * 5_000, "cannot be read"),
        ('{"device": {}, "config": {"window": "64"}, "results": []}', "window='64' is not int"),
        ('{"device": {}, "config": {}}', "no results"),
        (_file([timed(), timed()]), "row 2 is there twice"),
        (_file([3]), "row 1 is not an object"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_benchmark_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "odd.json"
    path.write_text(content)
    with pytest.raises(BenchFileError, match=words):
        schema.read(path)


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(schema.OutputError, match="give another --output"):
        schema.check_writable(tmp_path / "file" / "out.json")
    for odd in (tmp_path, tmp_path / ("a" * 300), Path("/dev/null"), tmp_path / "a\0b"):
        with pytest.raises(schema.OutputError, match="give another --output"):
            schema.check_writable(odd)
    schema.check_writable(tmp_path / "new" / "out.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_the_suites_cover_the_points_of_their_files():
    attention = schema.read(FILES[0])
    planned = {schema.identity({**row, "impl": ""}) for row in suites.plan("attention").rows}
    assert {schema.identity({**row, "impl": ""}) for row in attention.results} <= planned
    linear = schema.read(FILES[1])

    def at(row, config):
        return (schema.suite_of(row), suites.window_of(row, config),
                *(row[k] for k in ("seq", "dim", "dtype", "mode", "batch", "heads")))  # fmt: skip

    plan = suites.plan("linear_attention")
    assert {at(r, linear.config) for r in linear.results} <= {at(r, plan.config) for r in plan.rows}


def test_their_teraflops_are_counted_as_ours_where_all_pairs_are_visible():
    file = schema.read(FILES[0])
    rows = [row for row in file.results if "error" not in row and not row["causal"]]
    for row in rows[::25]:
        flops = get_op("attention").flops(suites.problem_of(row, file.config))
        assert row["tflops"] * row["median_ms"] * 1e9 == pytest.approx(flops, rel=1e-6)


def test_a_name_may_be_as_long_as_names_can_be_and_a_failure_leaves_what_was_there(
    tmp_path, monkeypatch
):
    path = tmp_path / ("a" * 250 + ".json")
    schema.write_whole(path, "before")

    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(schema.OutputError, match="No space left"):
        schema.write_whole(path, "after")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["before"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples_ms": [[0, 10**20]]}, "samples_ms"),
        ({"samples_ms": [[0, 5e-324]]}, "samples_ms"),
        ({"samples_ms": [[10**400, 1.0]]}, "samples_ms"),
        ({"median_ms": 1e308, "q3_ms": 1e308}, "no time that a call can take"),
        ({"xla_temp_mb": -3.0}, "is negative"),
        ({"tflops": -1.0}, "is negative"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(change, words):
    assert any(words in fault for fault in schema.faults({**timed(), **change}))
