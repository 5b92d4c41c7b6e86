import dataclasses
import json
import os
import re

import pytest
from click.testing import CliRunner

from shapetune.bench import figures, findings, page, schema, tables
from shapetune.cache import Candidate, Trial, load, publish
from shapetune.cache.quarantine import LIFTED, Quarantine
from shapetune.cache.record_set import RecordSet
from shapetune.cli import main

from ..samples import BLOCKS, problem, record
from .test_schema import FILES

#: A name that plotly would read tags in, and a value of the point where it reads a template.
HOSTILE = "<u>evil</u>%{x}"

go = pytest.importorskip("plotly.graph_objects", reason="needs plotly")


def searched(**fields):
    """A record whose trials cover a grid of two blocks, one of them failed."""
    made = record(problem(**fields), ratio=1.4)
    trials = [made.trials[0]]
    for q in (128, 256, 512):
        for k in (128, 256, 512):
            one = Candidate("blockwise", {"block_q": q, "block_k": k, "exp": "polynomial"})
            ms = 2.0 + abs(q - 256) / 256 + abs(k - 512) / 512
            trials.append(
                Trial(one, "ok", ms, ms * 0.98, ms * 1.02, 7, 3, 0.4, 8.0, 1e-6, time_s=0.5)
            )
    trials[3] = dataclasses.replace(
        trials[3], status="out_of_memory", median_ms=None, q1_ms=None, q3_ms=None,
        note="JaxRuntimeError: RESOURCE_EXHAUSTED: <b>no room</b></script>",
    )  # fmt: skip
    return dataclasses.replace(made, trials=tuple(trials))


def quarantined():
    made = record(problem(seq=2048))
    return Quarantine(
        made.problem, made.device, Candidate("blockwise", {"block_q": 64}), "wrong_result",
        "grad_key: error 0.3", 1, "0.1.0", "0.10.2", "0.10.2", "00", 1_700_000_000.0,
    )  # fmt: skip


@pytest.fixture
def records():
    several = [searched(seq=s, mode=m) for s in (512, 1024, 2048) for m in ("fwd", "fwd_bwd")]
    stale = record(problem(seq=4096), jax_version="0.1.0")
    found = RecordSet([one.to_bytes() for one in (*several, stale, quarantined())])
    found.add(b"not a record", FILES[0])
    return found


@pytest.fixture
def found(records):
    return findings.gather(records, [schema.read(path) for path in FILES])


def test_the_summary_counts_what_is_there(found):
    told = found.summary()
    assert told["problems_tuned"] == 7
    assert told["surely_faster"] == 7
    assert told["mean_gain"] == pytest.approx((1.4**6 * 1.5) ** (1 / 7))
    assert told["failures_by_kind"] == {"out_of_memory": 6, "compile_error": 1}
    assert (told["stale"], told["quarantined"], told["damaged"]) == (1, 1, 1)
    spent = told["seconds"]
    assert spent["compiling"] == pytest.approx(6 * (9 * 0.4 + 0.1) + 0.2, abs=0.06)
    assert spent["timing"] == pytest.approx(6 * 9 * 0.5, abs=0.06)
    assert sum(spent.values()) == pytest.approx(7 * 10.0, abs=0.3)
    assert [one["errors"] for one in told["files"]] == [12, 18]
    json.dumps(told)


def test_a_candidate_is_quarantined_once_and_until_that_is_lifted():
    first = quarantined()
    later = dataclasses.replace(first, time=first.time + 1, note="grad_key: error 0.4")
    lifted = dataclasses.replace(first, time=first.time + 2, status=LIFTED, note="")
    for several, standing in (([later, first], [later]), ([later, lifted, first], [])):
        told = findings.gather(RecordSet([one.to_bytes() for one in several]), [])
        assert told.quarantined == standing


def test_a_newer_record_of_a_problem_is_counted_once(records):
    again = record(problem(seq=512), ratio=1.9, made=1_800_000_000.0)
    told = findings.gather(records | RecordSet([again.to_bytes()]), []).summary()
    assert told["problems_tuned"] == 7


def test_the_landscape_is_over_the_two_blocks_and_keeps_what_failed():
    land = findings.landscape(searched())
    assert (land.across, land.down) == ("block_q", "block_k") or (land.down, land.across) == (
        "block_q",
        "block_k",
    )
    assert land.rows == land.columns == [128, 256, 512]
    assert len(land.best) == 9
    assert sum(trial.status == "out_of_memory" for trial in land.best.values()) == 1


def test_a_record_without_two_parameters_has_no_landscape():
    one = {**BLOCKS, "block_q": 2 * BLOCKS["block_q"]}
    assert findings.landscape(record(chosen=Candidate("blockwise", one))) is None


def test_every_figure_is_one_that_plotly_knows(found):
    colour = figures.colours(found)
    choices = [
        *figures.gains(found, colour), *figures.against_length(found.files, colour),
        *figures.landscapes(found), *figures.convergence(found, colour),
        ("", [figures.wall_time(found, colour), figures.failures(found, colour)]),
    ]  # fmt: skip
    drawn = [figure for _, several in choices for figure in several]
    assert len(drawn) > 20
    for figure in drawn:
        layout = {name: value for name, value in figure["layout"].items() if name != "rows"}
        assert go.Figure(data=figure["data"], layout=layout).data


def test_a_line_ends_where_an_implementation_failed(found):
    colour = figures.colours(found)
    label, (times, _) = next(
        (label, both)
        for label, both in figures.against_length(found.files, colour)
        if "fwd_bwd" in label and "bfloat16" in label and "dim 64" in label
    )
    assert label.startswith("rtx3090_attention")
    lengths = {
        trace["name"]: [x for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
        for trace in times["data"]
    }
    assert max(lengths["torch_math"]) == 3000
    assert max(lengths["default"]) == 8192


def lines(rows):
    """The plots against length of a file of such rows, by label."""
    file = schema.BenchFile({"device_kind": "a card"}, {}, rows, "some")
    found = findings.gather(RecordSet(), [file])
    return dict(figures.against_length(found.files, figures.colours(found)))


def row(seq, ms=1.0, **fields):
    about = {"impl": "xla", "dtype": "float32", "head_dim": 64, "seq": seq, "causal": False,
             "mode": "fwd", "batch": 1, "heads": 8}  # fmt: skip
    outcome = {"median_ms": ms} if ms else {"error": "RESOURCE_EXHAUSTED"}
    return {**about, **outcome, **fields}


def test_a_line_has_a_gap_where_an_implementation_failed():
    rows = [row(1024, None), row(512, 2.0), row(2048, 4.0)]
    ((times, memory),) = lines([*rows, row(512, None, impl="never")]).values()
    (trace,) = times["data"]
    assert (trace["x"], trace["y"]) == ([512, 1024, 2048], [2.0, None, 4.0])
    assert memory["data"] == []


def test_a_line_is_of_one_batch_and_one_number_of_heads():
    grids = [{}, {"batch": 4}, {"heads": 2}, {"head_dim": 128}]
    found = lines([row(seq, **fields) for fields in grids for seq in (512, 1024)])
    start = "some · attention · fwd · float32 · not causal"
    assert set(found) == {
        f"{start} · batch 1 · heads 8 · dim 64", f"{start} · batch 4 · heads 8 · dim 64",
        f"{start} · batch 1 · heads 2 · dim 64", f"{start} · batch 1 · heads 8 · dim 128",
    }  # fmt: skip
    for times, _ in found.values():
        assert [trace["x"] for trace in times["data"]] == [[512, 1024]]
    (label,) = lines([row(512), row(1024)])
    assert label == f"{start} · dim 64"


def test_a_line_of_the_recurrence_is_of_one_window():
    about = {"suite": "layer", "chunk": 64, "dim": 64}
    found = lines([row(s, **about, window=w) for w in (64, 128) for s in (512, 1024)])
    assert {label[-19:] for label in found} == {" window 64 · dim 64", "window 128 · dim 64"}


def hostile_findings():
    """What a cache and a file of others show that try to be markup wherever they can."""
    named = Candidate(HOSTILE, {f"block_{HOSTILE}": 1, "chunk": 2})
    one = record(chosen=named)
    tried = [
        Trial(Candidate(HOSTILE, {f"block_{HOSTILE}": i, "chunk": j}), "ok", 1.0, 1.0, 1.0, 7, 3, 9)
        for i in (1, 2) for j in (1, 2)
    ]  # fmt: skip
    failed = Trial(named, HOSTILE, note=HOSTILE)
    one = dataclasses.replace(one, trials=(*tried, failed))
    found = findings.gather(RecordSet(), [])
    rows = [row(512, impl=HOSTILE, chosen=HOSTILE), row(1024, None, impl=HOSTILE)]
    file = schema.BenchFile({"device_kind": HOSTILE}, {}, rows, HOSTILE)
    return dataclasses.replace(
        found, tuned=[one], failures=[findings.Failure(HOSTILE, HOSTILE, HOSTILE, 1)],
        files=[tables.within(file)],
    )  # fmt: skip


def words(value):
    """Every text in plain values."""
    if isinstance(value, dict):
        return [text for one in value.values() for text in words(one)]
    if isinstance(value, list):
        return [text for one in value for text in words(one)]
    return [value] if isinstance(value, str) else []


def test_names_of_others_are_text_in_every_plot():
    found = hostile_findings()
    colour = figures.colours(found)
    drawn = [
        *figures.gains(found, colour), *figures.against_length(found.files, colour),
        *figures.landscapes(found), *figures.convergence(found, colour),
        ("", [figures.wall_time(found, colour)]), ("", [figures.failures(found, colour)]),
    ]  # fmt: skip
    for _, several in drawn:
        shown = words(several)
        assert "<u>" not in "".join(shown)
        assert "&lt;u&gt;" in "".join(shown)
        assert not any("%{x}" in text for text in shown if "&lt;u&gt;" in text and "extra" in text)
    assert "<u>" not in re.sub(r"<script>.*?</script>", "", page.render(found), flags=re.S)


def test_the_page_is_whole_by_itself(found):
    text = page.render(found)
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", own)
    assert "connect-src" not in own
    assert "default-src 'none'" in own
    assert text.count("plotly.js v") <= 2
    # What an error says is text, never markup.
    assert "<b>no room" not in own
    assert "no room</b></script>" not in text
    for words in ("Gains", "Landscape", "optuna-dashboard", "stale: problem", "quarantined",
                  "damaged part", "Compared"):  # fmt: skip
        assert words in own


def test_an_empty_cache_gives_a_page_that_says_so():
    text = page.render(findings.gather(RecordSet(), []))
    assert "Nothing is tuned or measured yet." in text


def test_the_command_writes_the_page_and_prints_the_same_numbers(own_cache, tmp_path):
    publish(own_cache, [searched(), searched(seq=512)])
    path = tmp_path / "sub" / "report.html"
    shown = CliRunner().invoke(main, ["report", str(FILES[1]), "--output", str(path)])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"problems tuned +2", shown.stdout)
    assert "rtx3090_linear_attention" in shown.stdout
    assert "1.40×" in shown.stdout
    assert "\x1b" not in shown.output
    assert "1.40×" in path.read_text()
    told = json.loads(CliRunner().invoke(main, ["report", "--json", "--output", str(path)]).stdout)
    assert told["problems_tuned"] == len(load([own_cache])) == 2
    assert told["mean_gain"] == pytest.approx(1.4)


def test_the_terminal_has_each_mean_that_the_page_has(own_cache, tmp_path):
    path = tmp_path / "report.html"
    asked = ["report", *map(str, FILES), "--output", str(path)]
    shown = CliRunner().invoke(main, asked).stdout
    files = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)["files"]
    means = [
        (name, f"{mean:.2f}×", f"time of {name} over {file['held_against']}'s")
        for file in files
        for name, mean in file["over_it"].items()
    ]
    assert len(means) > 8
    for name, mean, about in means:
        assert re.search(rf"{re.escape(about)} +{re.escape(mean)}", shown), about
        assert re.search(rf"<code>{name}</code></td><td[^>]*>\d+</td><td[^>]*><b>{mean}",
                         path.read_text()), about  # fmt: skip


def test_it_reads_all_places_that_are_read(own_cache, tmp_path, monkeypatch):
    site = tmp_path / "site"
    publish(own_cache, [searched()])
    publish(site, [searched(seq=512)])
    asked = ["report", "--json", "--output", str(tmp_path / "report.html")]

    def tuned(*places, options=()):
        monkeypatch.setenv("SHAPETUNE_CACHE", os.pathsep.join(map(str, places)))
        result = CliRunner().invoke(main, [*asked, *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["problems_tuned"]

    assert tuned(own_cache, site) == 2
    assert tuned(own_cache) == 1
    monkeypatch.setenv("SHAPETUNE_MIRROR", str(tmp_path / "mirrors"))
    assert tuned("http://127.0.0.1:9/x", site) == 1
    assert tuned(own_cache, options=["--cache", f"file://{site}"]) == 1


def test_a_page_takes_the_place_of_a_page_and_of_nothing_else(tmp_path):
    path = tmp_path / "bench.json"
    path.write_bytes(FILES[1].read_bytes())
    shown = CliRunner().invoke(main, ["report", str(path), "--output", str(path)])
    assert shown.exit_code == 1
    assert "is not an HTML page" in shown.output
    assert path.read_bytes() == FILES[1].read_bytes()
    page_path = tmp_path / "report.html"
    for _ in range(2):
        shown = CliRunner().invoke(main, ["report", str(path), "--output", str(page_path)])
        assert shown.exit_code == 0, shown.output
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_file()) == [
        "bench.json", "report.html",
    ]  # fmt: skip
