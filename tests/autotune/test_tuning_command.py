"""The options of `shapetune tune` that say how candidates are tried."""

import json
import sys

import pytest
from click.testing import CliRunner

from shapetune.cache import load
from shapetune.cli import main
from shapetune.commands.output import display

TINY = ["attention", "--seq", "65", "--dim", "32", "--heads", "2", "--trials", "3"]


def run(*args):
    return CliRunner().invoke(main, ["tune", *TINY, *args])


def test_a_front_shows_what_less_memory_costs(own_cache):
    done = run("--objective", "pareto", "--isolation", "none")
    assert done.exit_code == 0, done.output
    assert "temporary MiB" in done.stdout
    assert "known from before" not in done.stderr
    # Another objective is another search, and what it measured serves again.
    again = run("--isolation", "none", "--json")
    assert again.exit_code == 0
    assert "known from before" in again.stderr
    (record,) = json.loads(again.stdout)
    assert "objective=time" in record["provenance"]["settings"]
    assert len(load([own_cache])) == 2


def test_a_run_says_what_became_of_its_trials_and_of_its_time(own_cache):
    done = run("--isolation", "none", "--max-temp-mb", "1000", "--memory-limit", "4000")
    assert "ok" in done.stderr
    for word in ("compile", "verify", "screen", "time", "compare", "search", "idle"):
        assert word in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--objective", "speed"], ["speed", "pareto"]),
        (["--isolation", "thread"], ["thread", "process"]),
        (["--max-temp-mb", "-3"], ["max_temp_mb", "-3"]),
        (["--modules", "no_such_module"], ["no_such_module"]),
        (["--compile-limit", "soon"], ["soon"]),
        (["--memory-limit", "0"], ["--memory-limit", "0"]),
    ],
)
def test_bad_options_are_named_without_a_traceback(own_cache, args, words):
    done = run(*args)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    for word in words:
        assert word in done.output


@pytest.mark.parametrize(
    ("text", "words"), [("raise OSError('no disk')", "no disk"), ("def (", "SyntaxError")]
)
def test_a_module_that_fails_is_named_with_what_it_raised(
    own_cache, tmp_path, monkeypatch, text, words
):
    (tmp_path / "fails_at_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    done = run("--modules", "fails_at_import")
    assert done.exit_code == 1
    for word in ("'fails_at_import'", words, "PYTHONPATH"):
        assert word in done.output


def test_a_grid_beside_misses_is_refused(own_cache):
    done = CliRunner().invoke(main, ["tune", "attention", "--from-misses", "--kv-seq", "64"])
    assert done.exit_code == 2
    assert "leave --kv-seq out" in done.output
    done = CliRunner().invoke(main, ["tune", "attention", "--from-misses"])
    assert done.exit_code == 0, done.output


def test_ctrl_c_ends_a_run_with_one_line(capsys, monkeypatch):
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as ended, display():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines() == [
        "Stopped. Every trial and every problem finished so far is kept; run again to go on."
    ]
