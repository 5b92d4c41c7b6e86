import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shapetune.bench import compare, schema, tables
from shapetune.bench.schema import BenchFile
from shapetune.cache.errors import ShapetuneError
from shapetune.cli import main

from .test_schema import FILES, timed


def ours(file=FILES[0], theirs="probjax_mha", name="pallas_mha", **changes):
    """A file made here at points of an RTX 3090's, a tenth as fast there."""
    measured, rows = schema.read(file), []
    for row in measured.results:
        if row["impl"] == theirs and row["seq"] <= 1024:
            slower = {k: row[k] * 10 for k in ("median_ms", "q1_ms", "q3_ms") if row.get(k)}
            rows.append({**row, "impl": name, **slower, **changes})
    return BenchFile({"device_kind": "a CPU"}, measured.config, rows, "here")


def test_what_the_untuned_dispatcher_of_the_file_loses_is_found():
    found = compare.table(schema.read(FILES[0]))
    losses = compare.regret(found, "jax")
    worst = max(losses, key=lambda loss: loss.regret)
    assert worst.regret == pytest.approx(0.519, abs=0.001)
    assert worst.point.ragged
    assert worst.best == "jax_cudnn"
    assert len(losses) == 108
    assert sum(loss.best in ("jax_xla", "jax_cudnn") for loss in losses) == 39
    assert all(loss.regret >= 0 for loss in losses)


def test_the_chunked_recurrence_beats_the_kernel_of_the_file():
    found = compare.table(schema.read(FILES[1]))
    kernel = {p: rows for p, rows in found.items() if p.suite == "kernel"}
    (pallas,) = [s for s in compare.against(kernel, "chunked") if s.base == "pallas"]
    assert (pallas.points, pallas.wins) == (24, 24)


def test_our_file_goes_with_theirs_by_our_names():
    pairs = compare.across(ours(), schema.read(FILES[0]), compare.exactly)
    (pair,) = pairs
    assert pair.name == "pallas_mha"
    assert pair.summary.mean == pytest.approx(10.0)
    assert set(pair.summary.facets) >= {"mode fwd", "mode fwd_bwd", "length ragged", "dim 64"}


def test_a_tag_keeps_rows_apart():
    assert compare.name_of({"impl": "probjax_default", "tag": None}) == "default"
    assert compare.name_of({"impl": "default", "tag": "tuned"}) == "default:tuned"


def sampled(impl, times, rounds=None):
    rounds = rounds if rounds is not None else range(len(times))
    q1, median, q3 = np.percentile(times, (25, 50, 75))
    samples = [[r, t] for r, t in zip(rounds, times, strict=True)]
    return timed(impl=impl, median_ms=median, q1_ms=q1, q3_ms=q3, samples_ms=samples)


def test_rows_sampled_in_turns_give_a_paired_ratio_with_its_interval():
    drift = np.linspace(1, 3, 12)  # the machine slows down under both alike
    rows = [sampled("default", 2 * drift), sampled("xla", 3 * drift)]
    found = compare.table(BenchFile({}, {}, rows))
    ((point, both),) = found.items()
    one = compare.ratio_of(point, both["xla"], both["default"])
    assert one.ratio == pytest.approx(1.5)
    assert one.interval == pytest.approx((1.5, 1.5))
    few = compare.ratio_of(point, sampled("xla", [3.0] * 4), sampled("default", [2.0] * 4))
    assert few.interval is None


def test_the_rounds_that_both_have_are_paired():
    slow = sampled("jax_xla", [10.0] * 6, rounds=[0, 2, 4, 6, 8, 10])
    fast = sampled("default", [1.0, 2.0] * 6)
    point = compare.point_of(fast, {})
    assert compare.ratio_of(point, slow, fast).ratio == pytest.approx(10.0)


def test_a_failed_row_is_no_time():
    rows = [timed(impl="default"), timed(impl="blockwise", median_ms=1.0, q1_ms=1.0, q3_ms=1.0)]
    bad = {k: v for k, v in timed(impl="xla").items() if k in schema.IDENTITY["attention"]}
    found = compare.table(BenchFile({}, {}, [*rows, {**bad, "error": "OOM"}]))
    (loss,) = compare.regret(found, "ours")
    assert (loss.best, loss.regret) == ("blockwise", 1.0)


def test_one_candidate_under_two_names_loses_nothing_to_itself():
    rows = [sampled("default", [2.0] * 7), sampled("blockwise", [1.9] * 7)]
    for chosen, lost in (("blockwise(block_q=64)", 0.0), ("xla", pytest.approx(2.0 / 1.9 - 1))):
        for row, text in zip(rows, (chosen, "blockwise(block_q=64)"), strict=True):
            row["chosen"] = text
        (loss,) = compare.regret(compare.table(BenchFile({}, {}, rows)), "ours")
        assert loss.regret == lost
        assert loss.surely_above(0.02) == (chosen == "xla")


def test_any_implementation_may_be_held_against_a_group_that_lacks_it():
    rows = [timed(impl="torch_flash"), timed(impl="jax_xla", median_ms=1.0, q1_ms=1.0, q3_ms=1.0)]
    found = compare.table(BenchFile({}, {}, rows))
    (loss,) = compare.regret(found, "ours", "torch_flash")
    assert (loss.best, loss.regret) == ("torch_flash", 0.0)
    (loss,) = compare.regret(found, "jax", "torch_flash")
    assert (loss.best, loss.regret) == ("jax_xla", 1.0)


def test_a_loss_within_the_noise_is_not_a_sure_one():
    noise = [0.8, 1.3, 0.9, 1.2, 1.1, 0.7, 1.4]
    rows = [sampled("default", [1.1 * n for n in noise]), sampled("xla", noise[::-1])]
    (loss,) = compare.regret(compare.table(BenchFile({}, {}, rows)), "ours")
    assert loss.regret > 0.02
    assert not loss.surely_above(0.02)


def test_groups_are_ours_jax_and_torch():
    names = ("default", "blockwise", "pallas_mha", "jax_xla", "cudnn", "torch_flash")
    assert [compare.group_of(n) for n in names] == ["ours"] * 3 + ["jax"] * 2 + ["torch"]
    assert compare.in_group("jax_xla", "all")
    assert not compare.in_group("torch_math", "jax")
    assert compare.in_group("blockwise", "jax")


def test_files_without_a_common_point_say_what_they_cover():
    with pytest.raises(ShapetuneError, match=r"no point in common.*108 points"):
        tables.comparison([schema.read(path) for path in FILES], compare.exactly)
    with pytest.raises(ShapetuneError, match=r"seq 128 dim 64 bfloat16 fwd.*grids overlap"):
        tables.comparison([schema.read(path) for path in FILES], compare.any_batch)


def test_points_of_another_batch_match_if_asked(tmp_path):
    file = ours(batch=1)
    theirs = schema.read(FILES[0])
    with pytest.raises(ShapetuneError):
        compare.common_points([file, theirs], compare.exactly)
    assert compare.common_points([file, theirs], compare.any_batch)


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
