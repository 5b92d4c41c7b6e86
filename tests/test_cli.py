import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from shapetune.cache import load, publish
from shapetune.cli import main

from .samples import problem, record

TINY = ["--seq", "65", "--dim", "32", "--heads", "2", "--trials", "4", "--budget", "20s"]


def run(*args):
    return CliRunner().invoke(main, list(args))


def test_tune_then_show_then_explain(own_cache):
    tuned = run("tune", "attention", *TINY, "--json")
    assert tuned.exit_code == 0, tuned.output
    (one,) = json.loads(tuned.stdout)
    assert load([own_cache]).ids == {one["id"]}
    assert [r["id"] for r in json.loads(run("show", "--json").stdout)] == [one["id"]]
    (why,) = json.loads(run("explain", "attention", *TINY[:6], "--json").stdout)
    assert (why["tier"], why["record_ids"]) == ("exact", [one["id"]])
    table = run("show").stdout
    for word in ("heuristic ms", "attention seq 65", "speedup"):
        assert word in table


def test_a_run_that_is_piped_prints_plain_lines(own_cache):
    tuned = run("tune", "attention", *TINY)
    assert "\x1b" not in tuned.output
    assert "[1/1] attention seq 65" in tuned.stderr
    assert "trials" in tuned.stdout


def test_another_cache_folder_can_be_named(own_cache, tmp_path):
    other = tmp_path / "elsewhere"
    assert run("tune", "attention", *TINY, "--cache", str(other)).exit_code == 0
    assert len(load([other])) == 1
    assert len(load([own_cache])) == 0
    assert "(tier: exact)" in run("explain", "attention", *TINY[:6], "--cache", str(other)).stdout


def test_show_can_be_asked_for_one_op_and_says_when_there_is_nothing(own_cache):
    assert "Nothing is tuned" in run("show").stdout
    publish(own_cache, [record(problem())])
    assert "attention" in run("show", "attention").stdout
    assert run("show", "nothing").exit_code == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["tune", "nothing", "--seq", "8", "--dim", "8"], ["nothing", "attention"]),
        (["tune", "attention", "--seq", "-8", "--dim", "8"], ["--seq", "-8"]),
        (["tune", "attention", "--seq", "8", "--dim", "0"], ["--dim", "0"]),
        (["tune", "attention", "--seq", "8,x", "--dim", "8"], ["--seq", "x", "512,2048"]),
        (["tune", "attention", "--dim", "8"], ["--seq"]),
        (
            ["tune", "attention", "--seq", "8", "--dim", "8", "--dtype", "int8"],
            ["int8", "bfloat16"],
        ),
        (["tune", "attention", "--seq", "8", "--dim", "8", "--budget", "soon"], ["soon", "90s"]),
        (["tune", "attention", "--seq", "8", "--dim", "8", "--budget", "-1s"], ["-1s"]),
        (["tune", "attention", "--seq", "8", "--dim", "8", "--kv-heads", "3"], ["kv_heads", "3"]),
        (["tune", "attention", "--seq", "8", "--dim", "8", "--window", "a"], ["window", "a"]),
        (["tune", "attention", "--seq", "8", "--dim", "8", "--trials", "0"], ["trials", "0"]),
        (
            ["tune", "attention", "--seq", "8", "--dim", "8", "--implementation", "zzz"],
            ["zzz", "xla"],
        ),
        (["tune", "attention", "--seq", "8", "--dim", "8", "--storage", "bad://x"], ["bad://x"]),
        (["tune", "attention", "--seq", "8", "--dim", "8", "--target", "b200"], ["b200", "h100"]),
        (["check", "attention", "--seq", "8", "--dim", "8", "--target", "b200"], ["b200", "h100"]),
        (["explain", "attention", "--seq", "8", "--dim", "8", "--mode", "bwd"], ["bwd", "fwd_bwd"]),
    ],
)
def test_bad_input_is_named_without_a_traceback(args, words):
    result = run(*args)
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    for word in words:
        assert word in result.output


def test_a_cache_that_is_something_else_is_refused(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    for command in (["tune", "attention", *TINY], ["show"], ["explain", "attention", *TINY[:6]]):
        result = run(*command, "--cache", str(other))
        assert result.exit_code == 1
        assert "notes.txt" in result.output
        assert "not a shapetune cache" in result.output


def test_ctrl_c_keeps_what_is_tuned(own_cache, sigint):
    command = [sys.executable, "-m", "shapetune.cli", "tune", "attention", "--seq", "65,2048"]
    child = subprocess.Popen(
        [*command, *TINY[2:]],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=dict(os.environ),
    )  # fmt: skip
    heard = []
    for line in child.stderr:
        heard.append(line)
        if line.startswith("[2/2]"):
            time.sleep(0.5)
            child.send_signal(signal.SIGINT)
            break
    rest = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) == 130, (heard, rest)
    assert "is kept" in rest
    assert "Traceback" not in rest
    assert [r.problem.seq for r in load([own_cache])] == [65]


def test_every_command_has_help():
    listed = re.findall(r"^  (\w+) ", run("--help").output.split("Commands:")[1], re.MULTILINE)
    assert set(listed) >= {"tune", "show", "explain"}
    for name in listed:
        assert run(name, "--help").exit_code == 0


def test_a_cache_that_is_not_there_is_refused_before_any_work(own_cache, tmp_path):
    gone, output = tmp_path / "gone", tmp_path / "out.json"
    bench = ("bench", "attention", *TINY[:4], "--output", str(output))
    for args in (
        ("explain", "attention", *TINY[:6]),
        ("report", str(output), "--output", str(tmp_path / "page.html")),
        bench,
    ):
        result = run(*args, "--cache", str(gone))
        assert result.exit_code != 0
        assert f"there is no cache at {str(gone)!r}" in result.stderr
    result = run(*bench, "--tune", "--cache", "/dev/null")
    assert result.exit_code != 0
    assert "/dev/null" in result.stderr
    assert not output.exists()
