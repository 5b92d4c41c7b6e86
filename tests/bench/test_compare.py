import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shapetune.bench import compare, points, schema, tables
from shapetune.bench.schema import BenchFile
from shapetune.cache.errors import ShapetuneError
from shapetune.cli import main

from .test_schema import FILES, OURS, timed

CPU = next(path for path in OURS if path.stem == "cpu_attention")


def ours(file=FILES[0], theirs="probjax_mha", name="pallas_mha", **changes):
    """A file made here at points of an RTX 3090's, a tenth as fast there."""
    measured, rows = schema.read(file), []
    for row in measured.results:
        if row["impl"] == theirs and row["seq"] <= 1024:
            slower = {k: row[k] * 10 for k in ("median_ms", "q1_ms", "q3_ms") if row.get(k)}
            rows.append({**row, "impl": name, **slower, **changes})
    return BenchFile({"device_kind": "a CPU"}, measured.config, rows, "here")


def test_what_the_untuned_dispatcher_of_the_file_loses_is_found():
    found = points.by_point(schema.read(FILES[0]))
    losses = compare.regret(found, "jax")
    worst = max(losses, key=lambda loss: loss.regret)
    assert worst.regret == pytest.approx(0.519, abs=0.001)
    assert worst.point.ragged
    assert worst.best == "jax_cudnn"
    assert len(losses) == 108
    assert sum(loss.best in ("jax_xla", "jax_cudnn") for loss in losses) == 39
    assert all(loss.regret >= 0 for loss in losses)


def test_the_chunked_recurrence_beats_the_kernel_of_the_file():
    found = points.by_point(schema.read(FILES[1]))
    kernel = {p: rows for p, rows in found.items() if p.suite == "kernel"}
    (pallas,) = [s for s in compare.against(kernel, "chunked") if s.base == "pallas"]
    assert (pallas.points, pallas.wins) == (24, 24)


def test_our_file_goes_with_theirs_by_our_names():
    pairs = compare.across(ours(), schema.read(FILES[0]), points.exactly)
    (pair,) = pairs
    assert pair.name == "pallas_mha"
    assert pair.summary.mean == pytest.approx(10.0)
    assert set(pair.summary.facets) >= {"mode fwd", "mode fwd_bwd", "length ragged", "dim 64"}


def test_a_tag_keeps_rows_apart():
    assert points.name_of({"impl": "probjax_default", "tag": None}) == "default"
    assert points.name_of({"impl": "default", "tag": "tuned"}) == "default:tuned"


def sampled(impl, times, rounds=None, **more):
    rounds = rounds if rounds is not None else range(len(times))
    q1, median, q3 = np.percentile(times, (25, 50, 75))
    samples = [[r, t] for r, t in zip(rounds, times, strict=True)]
    return timed(impl=impl, median_ms=median, q1_ms=q1, q3_ms=q3, samples_ms=samples, **more)


def test_rows_sampled_in_turns_give_a_paired_ratio_with_its_interval():
    drift = np.linspace(1, 3, 12)  # the machine slows down under both alike
    rows = [sampled("default", 2 * drift), sampled("xla", 3 * drift)]
    found = points.by_point(BenchFile({}, {}, rows))
    ((point, both),) = found.items()
    one = compare.ratio_of(point, both["xla"], both["default"])
    assert one.ratio == pytest.approx(1.5)
    assert one.interval == pytest.approx((1.5, 1.5))
    few = compare.ratio_of(point, sampled("xla", [3.0] * 4), sampled("default", [2.0] * 4))
    assert few.interval is None


def test_the_rounds_that_both_have_are_paired():
    slow = sampled("jax_xla", [10.0] * 6, rounds=[0, 2, 4, 6, 8, 10])
    fast = sampled("default", [1.0, 2.0] * 6)
    point = points.point_of(fast, {})
    assert compare.ratio_of(point, slow, fast).ratio == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("base", "other", "paired"),
    [
        ({"turns": "a"}, {"turns": "a"}, True),
        ({"turns": "a"}, {"turns": "b"}, False),
        ({"turns": "a"}, {}, False),
        ({}, {}, True),
        ({"tag": "before"}, {"tag": "before"}, True),
        ({"tag": "before"}, {"tag": "after"}, False),
        ({"tag": "before"}, {}, False),
    ],
)
def test_rows_of_several_runs_are_not_paired(base, other, paired):
    rows = [sampled("xla", [3.0, 9.0] * 4, **base), sampled("default", [2.0] * 8, **other)]
    assert schema.faults(rows[0]) == []
    one = compare.ratio_of(points.point_of(rows[0], {}), *rows)
    assert (one.interval is not None) == paired
    if not paired:
        assert one.ratio == rows[0]["median_ms"] / rows[1]["median_ms"]


def test_rows_of_two_files_are_not_paired():
    files = [BenchFile({}, {}, [sampled("xla", [2.0] * 8)], name) for name in "ab"]
    (pair,) = compare.across(*files, points.exactly)
    assert pair.summary.worst.interval is None


def test_a_loss_without_an_interval_is_not_a_sure_one():
    rows = [sampled("default", [2.0] * 8, turns="a"), sampled("xla", [1.0] * 8, turns="b")]
    (loss,) = compare.regret(points.by_point(BenchFile({}, {}, rows)), "ours")
    assert (loss.regret, loss.interval) == (1.0, None)
    assert not loss.surely_above(0.02)
    rows[1]["turns"] = "a"
    (loss,) = compare.regret(points.by_point(BenchFile({}, {}, rows)), "ours")
    assert loss.surely_above(0.02)


def test_a_failed_row_is_no_time():
    rows = [timed(impl="default"), timed(impl="blockwise", median_ms=1.0, q1_ms=1.0, q3_ms=1.0)]
    bad = {k: v for k, v in timed(impl="xla").items() if k in schema.IDENTITY["attention"]}
    found = points.by_point(BenchFile({}, {}, [*rows, {**bad, "error": "OOM"}]))
    (loss,) = compare.regret(found, "ours")
    assert (loss.best, loss.regret) == ("blockwise", 1.0)


def test_one_candidate_under_two_names_loses_nothing_to_itself():
    rows = [sampled("default", [2.0] * 7), sampled("blockwise", [1.9] * 7)]
    for chosen, lost in (("blockwise(block_q=64)", 0.0), ("xla", pytest.approx(2.0 / 1.9 - 1))):
        for row, text in zip(rows, (chosen, "blockwise(block_q=64)"), strict=True):
            row["chosen"] = text
        (loss,) = compare.regret(points.by_point(BenchFile({}, {}, rows)), "ours")
        assert loss.regret == lost
        assert loss.surely_above(0.02) == (chosen == "xla")


@pytest.mark.parametrize(
    ("other", "same"),
    [({"turns": "a"}, True), ({"turns": "b"}, False), ({}, False), ({"tag": "again"}, False)],
)
def test_one_candidate_in_two_runs_is_not_one_program(other, same):
    rows = [sampled("default", [2.0] * 7, turns="a"), sampled("blockwise", [1.0] * 7, **other)]
    for row in rows:
        row["chosen"] = "blockwise(block_q=64)"
    (loss,) = compare.regret(points.by_point(BenchFile({}, {}, rows)), "ours")
    assert (loss.same_program, loss.regret) == (same, 0.0 if same else 1.0)


def test_points_decided_by_the_same_program_are_counted_and_others_still_count():
    rows = [
        sampled("default", [2.0] * 7),
        sampled("blockwise", [1.0] * 7),
        sampled("xla", [1.6] * 7),
    ]
    for row in rows:
        row["chosen"] = "xla" if row["impl"] == "xla" else "blockwise(block_q=64)"
    file = BenchFile({}, {}, rows)
    (loss,) = compare.regret(points.by_point(file), "ours")
    assert (loss.best, loss.same_program) == ("xla", True)
    assert loss.regret == pytest.approx(0.25)
    assert tables.regret_map([loss])["same_program"] == 1
    found = tables.comparison([file], points.exactly)
    (*_, shown) = tables.rendered(found, points=False)
    (column,) = [one for one in shown.columns if one.header == "same program"]
    assert list(column.cells) == ["1"] * 3


def test_no_loss_is_negative_where_the_median_and_the_pairs_disagree():
    own = [1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    theirs = [1.2, 1.2, 1.2, 1.2, 4.9, 6.0, 6.0, 6.0, 6.0]
    rows = [sampled("default", own), sampled("xla", theirs)]
    assert rows[1]["median_ms"] < rows[0]["median_ms"]
    (loss,) = compare.regret(points.by_point(BenchFile({}, {}, rows)), "ours")
    assert (loss.best, loss.regret, loss.interval) == ("default", 0.0, None)


def test_a_default_with_a_tag_is_found():
    def chooser(*names):
        rows = [timed(impl=name, tag=tag, seq=seq) for name, tag, seq in names]
        return tables.usual_chooser(BenchFile({}, {}, rows))

    many = [("xla", None, seq) for seq in (128, 256, 512)]
    assert chooser(*many) == "xla"
    assert chooser(*many, ("default", "tuned", 128)) == "default:tuned"
    assert chooser(*many, ("default", "tuned", 128), ("default", None, 128)) == "default"
    tags = [("default", "old", 128), ("default", "new", 128), ("default", "new", 256)]
    assert chooser(*many, *tags) == "default:new"
    assert tables.usual_chooser(BenchFile({}, {}, [])) == "default"


def test_any_implementation_may_be_held_against_a_group_that_lacks_it():
    rows = [timed(impl="torch_flash"), timed(impl="jax_xla", median_ms=1.0, q1_ms=1.0, q3_ms=1.0)]
    found = points.by_point(BenchFile({}, {}, rows))
    (loss,) = compare.regret(found, "ours", "torch_flash")
    assert (loss.best, loss.regret) == ("torch_flash", 0.0)
    (loss,) = compare.regret(found, "jax", "torch_flash")
    assert (loss.best, loss.regret) == ("jax_xla", 1.0)


def test_a_loss_within_the_noise_is_not_a_sure_one():
    noise = [0.8, 1.3, 0.9, 1.2, 1.1, 0.7, 1.4]
    rows = [sampled("default", [1.1 * n for n in noise]), sampled("xla", noise[::-1])]
    (loss,) = compare.regret(points.by_point(BenchFile({}, {}, rows)), "ours")
    assert loss.regret > 0.02
    assert not loss.surely_above(0.02)


def test_groups_are_ours_jax_and_torch():
    names = ("default", "blockwise", "rival_llvm", "jax_xla", "cudnn", "torch_flash")
    assert [points.group_of(n) for n in names] == ["ours"] * 3 + ["jax"] * 2 + ["torch"]
    assert points.in_group("jax_xla", "all")
    assert not points.in_group("torch_math", "jax")
    assert points.in_group("blockwise", "jax")


def test_files_without_a_common_point_say_what_they_cover():
    with pytest.raises(ShapetuneError, match=r"no point in common.*108 points"):
        tables.comparison([schema.read(path) for path in FILES], points.exactly)
    with pytest.raises(ShapetuneError, match=r"seq 128 dim 64 bfloat16 fwd.*grids overlap"):
        tables.comparison([schema.read(path) for path in FILES], points.any_batch)


def test_the_first_of_several_files_is_held_against_each_other_one(tmp_path):
    here = ours()
    files = [here, *map(schema.read, FILES)]
    found = tables.comparison(files, points.exactly)
    assert [len(one.points) for one in found.between] == [len(here.results), 0]
    path = tmp_path / "here.json"
    schema.write(path, here)
    shown = CliRunner().invoke(main, ["compare", str(path), *map(str, FILES), "--points"])
    assert shown.exit_code == 0, shown.output
    assert "here and rtx3090_attention have 48 points in common" in shown.output
    assert "here and rtx3090_linear_attention have no point in common" in shown.output


def test_points_of_another_batch_match_if_asked(tmp_path):
    file = ours(batch=1)
    theirs = schema.read(FILES[0])
    with pytest.raises(ShapetuneError):
        points.common_points([file, theirs], points.exactly)
    assert points.common_points([file, theirs], points.any_batch)


def test_times_of_different_batches_are_of_one_batch_and_head(tmp_path):
    file = ours(batch=1, heads=2)  # an RTX 3090's of 4 × 8, ten times as slow
    (pair,) = compare.across(file, schema.read(FILES[0]), points.any_batch)
    assert pair.summary.mean == pytest.approx(10.0 * (4 * 8) / 2)
    found = tables.comparison([file, schema.read(FILES[0])], points.any_batch)
    (listing,) = found.listings
    here, there = listing.points[0][1]
    assert here["pallas_mha"] / there["pallas_mha"] == pytest.approx(160.0)
    path = tmp_path / "here.json"
    schema.write(path, file)
    shown = CliRunner().invoke(
        main, ["compare", str(path), str(FILES[0]), "--any-batch", "--points"]
    )
    assert shown.output.count("of one batch × head") == 2
    assert "Batch and heads may differ" in shown.output


def test_all_that_a_row_tells_of_a_call_is_of_one_batch_and_head():
    row = sampled("xla", [8.0, 16.0, 24.0])
    ((_, rows),) = points.by_point(BenchFile({}, {}, [row]), points.any_batch).items()
    assert [rows["xla"][name] for name in ("q1_ms", "median_ms", "q3_ms")] == [1.5, 2.0, 2.5]
    assert rows["xla"]["samples_ms"] == [[0, 1.0], [1, 2.0], [2, 3.0]]
    assert row["median_ms"] == 16.0


def test_several_rows_at_one_point_are_refused():
    rows = [timed(), timed(batch=2), timed(batch=2, heads=4, seq=1024)]
    file = BenchFile({}, {}, rows, "here")
    assert len(points.by_point(file)) == 3
    words = (
        r"here has several rows of xla at attention seq 512 dim 64 float32 fwd \(batch 1 and 2\)"
    )
    with pytest.raises(ShapetuneError, match=words + "; leave out --any-batch"):
        tables.comparison([file], points.any_batch)
    rows = [timed(impl=name) for name in ("default", "probjax_default")]
    with pytest.raises(ShapetuneError, match=r"\(impl default and probjax_default\)"):
        points.by_point(BenchFile({}, {}, rows, "here"))


def test_rows_that_only_the_chunk_tells_apart_are_named_by_it():
    """Those of a file whose rows differ nowhere but in the chunk keep their plain names."""
    kernel = [r for r in schema.read(FILES[1]).results if r["suite"] == "kernel"][:6]
    halved = [{**row, "chunk": 64, "median_ms": row["median_ms"] / 2} for row in kernel]
    one = next(row for row in kernel if "error" not in row)
    file = BenchFile({}, {"window": 64}, [*kernel, *halved], "here")
    rows = points.by_point(file)[points.point_of(one, file.config)]
    assert {f"{one['impl']}:chunk 128", f"{one['impl']}:chunk 64"} <= set(rows)
    assert {name for name, _ in points.named(BenchFile({}, {"window": 64}, halved))} == {
        row["impl"] for row in kernel
    }
    assert tables.comparison([file], points.exactly).within


def test_the_command_takes_our_file_with_theirs(tmp_path):
    path = tmp_path / "here.json"
    schema.write(path, ours())
    shown = CliRunner().invoke(main, ["compare", str(path), str(FILES[0]), "--points"])
    assert shown.exit_code == 0, shown.output
    for words in ("pallas_mha", "in common", "Different devices", "What default loses", "ragged"):
        assert words in shown.stdout
    assert "\x1b" not in shown.output
    told = CliRunner().invoke(main, ["compare", str(path), str(FILES[0]), "--json"])
    found = json.loads(told.stdout)
    assert found["across"][0]["summary"]["mean"] == pytest.approx(10.0)
    assert found["files"][1]["regret"]["jax"]["worst"] == pytest.approx(0.519, abs=0.001)


def test_json_holds_each_point_and_each_loss():
    told = CliRunner().invoke(main, ["compare", str(CPU), "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    file = schema.read(CPU)
    (listing,) = found["points"]
    assert listing["files"] == ["cpu_attention"]
    shown = [ms for one in listing["at"] for ms in one["values"][0].values()]
    values = [ms for ms in shown if ms is not None]
    measured = [row["median_ms"] for row in file.results if "error" not in row]
    assert 0 < len(measured) < len(file.results) == len(shown)
    assert sorted(values) == sorted(measured)
    for group in points.GROUPS:
        regret = found["files"][0]["regret"][group]
        assert len(regret["at"]) == regret["points"] == len(listing["at"])
        assert sum(one["same_program"] for one in regret["at"]) == regret["same_program"]
        assert max(one["regret"] for one in regret["at"]) == regret["worst"]
    rows = [sampled("default", [3.0] * 9), sampled("xla", [2.0] * 9)]
    (loss,) = compare.regret(points.by_point(BenchFile({}, {}, rows)), "ours")
    assert loss.to_map() == {
        "point": loss.point.label, "best": "xla", "regret": pytest.approx(0.5),
        "interval": pytest.approx((0.5, 0.5)), "same_program": False,
    }  # fmt: skip


def test_a_failed_row_has_no_value_in_json():
    told = CliRunner().invoke(main, ["compare", str(FILES[0]), str(FILES[0]), "--json"])
    (listing,) = json.loads(told.stdout)["points"]
    failed = sum("error" in row for row in schema.read(FILES[0]).results)
    for i in range(2):
        values = [ms for one in listing["at"] for ms in one["values"][i].values()]
        assert values.count(None) == failed > 0


GRIDS = {
    FILES[0]: ["attention", "--seq", "32,128", "--dim", "64", "--causal", "no", "--batch", "4",
               "--heads", "8", "--impl", "default,xla,jax_xla"],
    FILES[1]: ["linear-attention", "--suite", "kernel", "--seq", "32,512", "--dim", "32",
               "--batch", "2", "--heads", "4", "--impl", "default,chunked"],
}  # fmt: skip


@pytest.mark.parametrize("theirs", FILES, ids=lambda path: path.stem)
def test_a_file_of_the_bench_command_goes_with_those_that_are_here(theirs, tmp_path):
    path = tmp_path / "made.json"
    measure = ["bench", *GRIDS[theirs], "--dtype", "float32", "--mode", "fwd", "--interleave",
               "--seconds", "0.2s", "--output", str(path)]  # fmt: skip
    made = CliRunner().invoke(main, measure)
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(main, ["compare", str(path), str(CPU), str(theirs), "--points"])
    assert shown.exit_code == 0, shown.output
    assert "made and cpu_attention have no point in common" in shown.output
    assert f"made and {theirs.stem} have 1 point in common" in shown.output
    told = CliRunner().invoke(main, ["compare", str(path), str(CPU), str(theirs), "--json"])
    found = json.loads(told.stdout)
    assert [len(one["at"]) for one in found["points"]] == [0, 1]
    at = found["files"][0]["regret"]["all"]["at"]
    assert len(at) == 2
    assert all(one["interval"] or one["best"] == "default" for one in at)


def test_the_cpu_file_goes_with_each_of_theirs():
    for extra, count in (([], 0), (["--any-batch"], 60)):
        shown = CliRunner().invoke(main, ["compare", str(CPU), str(FILES[0]), *extra, "--points"])
        assert shown.exit_code == (0 if count else 1), shown.output
        assert ("have 60 points in common" if count else "--any-batch compares") in shown.output
    shown = CliRunner().invoke(main, ["compare", str(CPU), str(FILES[1]), "--any-batch"])
    assert shown.exit_code == 1
    assert "cpu_attention has no point in common with rtx3090_linear_attention" in shown.output


def test_the_command_takes_our_recurrence_with_theirs(tmp_path):
    path = tmp_path / "here.json"
    schema.write(path, ours(FILES[1], "chunked", "chunked"))
    told = CliRunner().invoke(main, ["compare", str(path), str(FILES[1]), "--json"])
    assert told.exit_code == 0, told.output
    (across,) = [one for one in json.loads(told.stdout)["across"] if one["name"] == "chunked"]
    assert across["summary"]["mean"] == pytest.approx(10.0)
    assert across["summary"]["points"] == len(ours(FILES[1], "chunked", "chunked").results)


def test_the_command_says_what_is_wrong_with_a_file(tmp_path):
    path = tmp_path / "odd.json"
    path.write_text("{}")
    shown = CliRunner().invoke(main, ["compare", str(path)])
    assert shown.exit_code == 1
    assert "not a benchmark file" in shown.output
    assert Path(path).exists()


def test_the_command_knows_what_others_may_be_held_against():
    shown = CliRunner().invoke(main, ["compare", str(FILES[0]), "--to", "fastest"])
    assert shown.exit_code == 1
    assert "to='fastest' is in none of the files; they have: default" in shown.output


def test_names_in_files_are_shown_as_they_are(tmp_path):
    path = tmp_path / "[red]here.json"
    rows = [timed(impl="xla", tag="[bold]before"), timed(impl="xla", tag="[/x]after")]
    schema.write(path, BenchFile({"device_kind": "[blue]x"}, {}, rows))
    shown = CliRunner().invoke(main, ["compare", str(path), "--points"])
    assert shown.exit_code == 0, shown.output
    for word in ("[red]here: [blue]x, 2 rows", "xla:[bold]before", "xla:[/x]after"):
        assert word in shown.output


def test_a_remedy_is_named_only_where_it_helps():
    told = CliRunner().invoke(main, ["compare", str(FILES[0]), str(FILES[1])])
    assert told.exit_code == 1
    assert "give files whose grids overlap" in told.output
    assert "--any-batch" not in told.output
