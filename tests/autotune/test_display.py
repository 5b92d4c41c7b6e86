"""What a person is told of the time that a run still takes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shapetune.autotune import Options, display
from shapetune.autotune.final import samples_at_most
from shapetune.cache.key import Candidate, Problem
from shapetune.cache.record import Trial

PROBLEM = Problem.make("attention", seq=64, dim=16)
OPTIONS = Options(trials=10, budget=100.0)


class _Now:
    def __init__(self):
        self.seconds = 1000.0

    def monotonic(self):
        return self.seconds


@pytest.fixture
def now(monkeypatch):
    clock = _Now()
    monkeypatch.setattr(display, "time", clock)
    return clock


@pytest.fixture
def shown(now):
    out = io.StringIO()
    view = display.PlainDisplay(Console(file=out, width=200))
    view.run_started([PROBLEM], OPTIONS)
    view.problem_started(0, PROBLEM, 10)
    view.text = out.getvalue
    return view


def _trial(milliseconds):
    return Trial(Candidate("xla"), "ok", median_ms=milliseconds)


def test_the_time_left_holds_the_trials_and_the_verdict(now, shown):
    now.seconds += 20
    shown.trial_done(_trial(500.0), _trial(500.0))
    verdict = samples_at_most(OPTIONS) * 0.5
    # Nine more trials at 20 s would take 180 s, and the budget ends in 80.
    assert f"about {display.duration(80 + verdict)} left" in shown.text()


def test_the_time_left_shrinks_as_the_budget_runs_out(now, shown):
    for _ in range(5):
        now.seconds += 19
        shown.trial_done(_trial(1.0), _trial(1.0))
    verdict = samples_at_most(OPTIONS) * display.SAMPLE_S
    assert f"about {display.duration(5 + verdict)} left" in shown.text().splitlines()[-1]


def test_the_verdict_says_what_is_under_way_and_how_long_it_takes(now, shown):
    shown.trial_done(_trial(500.0), _trial(500.0))
    now.seconds += 10
    shown.stage("racing")
    whole = samples_at_most(OPTIONS) * 0.5
    assert shown.text().splitlines()[-1] == f"[1/1] racing, about {display.duration(whole)} left"
    now.seconds += 2
    shown.stage("too soon for another line")
    now.seconds += 6
    shown.stage("comparing")
    left = display.duration(whole - 8)
    assert shown.text().splitlines()[-1] == f"[1/1] comparing, about {left} left"
    assert "too soon" not in shown.text()


def test_an_implementation_of_which_nothing_worked_has_a_line_of_its_own():
    trials = [
        _trial(1.0),
        Trial(Candidate("xla", {"block": 2}), "crashed", note="one of two"),
        Trial(Candidate("pallas_mha", {"block": 1}), "compile_error", note="no such\n  block"),
        Trial(Candidate("pallas_mha", {"block": 2}), "compile_error", note="another"),
        Trial(Candidate("cudnn"), "wrong_result", note="x" * 500),
    ]
    lines = display.failures(trials)
    assert lines[0] == "pallas_mha: 2 compile error; no such block"
    assert lines[1].startswith("cudnn: 1 wrong result; xxx")
    assert lines[1].endswith("…")
    assert len(lines) == 2
    assert len(lines[1]) < 200
