import dataclasses

import pytest

import shapetune
from shapetune.autotune import Listener, Options, grid
from shapetune.autotune.measure import Effort
from shapetune.cache import Candidate, load
from shapetune.cache.errors import (
    CacheError,
    ProblemError,
    ShapetuneError,
    UnknownNameError,
    UnsupportedError,
)
from shapetune.kernels import Implementation, Space, get_op

from ..samples import problem
from . import faulty

QUICK = Options(trials=6, budget=30, pairs=6, rounds=3, effort=Effort(0.02, 3, 4), isolation="none")
SMALL = {"seq": 65, "dim": 32, "heads": 2}


class Notes(Listener):
    """Remembers what it heard."""

    def __init__(self):
        self.trials, self.failed, self.fresh = [], [], []

    def trial_done(self, trial, best):
        self.trials.append(trial)

    def problem_done(self, index, record, fresh):
        self.fresh.append(fresh)

    def problem_failed(self, index, problem, reason):
        self.failed.append(reason)


def test_a_tuned_problem_is_on_disk_and_dispatched(own_cache):
    (one,) = shapetune.tune("attention", SMALL, options=QUICK)
    assert load([own_cache]).ids == {one.id}
    decision = shapetune.explain("attention", **SMALL)
    assert (decision.tier, decision.candidate) == ("exact", one.chosen)
    assert one.comparison.low <= one.comparison.ratio <= one.comparison.high
    assert one.verification.rel_err <= one.verification.tolerance


def test_the_heuristic_is_always_tried_and_nothing_twice(own_cache):
    notes = Notes()
    (one,) = shapetune.tune("attention", SMALL, options=QUICK, listener=notes)
    keys = [t.candidate.key for t in notes.trials]
    assert keys[0] == one.heuristic.key
    assert len(keys) == len(set(keys)) == len(one.trials)


def test_a_record_says_that_the_heuristic_is_best_unless_the_gain_is_sure():
    heuristic = get_op("attention").heuristic(problem(**SMALL), shapetune.kernels.current_device())
    (one,) = shapetune.tune(
        "attention", SMALL, options=dataclasses.replace(QUICK, implementations=("xla",), trials=3)
    )  # fmt: skip
    assert heuristic == Candidate("xla")
    assert one.heuristic_is_best
    assert (one.comparison.ratio, one.comparison.low) == (1.0, 1.0)


def test_a_tuned_problem_is_not_tuned_again_unless_asked(own_cache):
    (first,) = shapetune.tune("attention", SMALL, options=QUICK)
    notes = Notes()
    (second,) = shapetune.tune("attention", SMALL, options=QUICK, listener=notes)
    assert (second, notes.fresh, notes.trials) == (first, [False], [])
    shapetune.tune("attention", SMALL, options=dataclasses.replace(QUICK, again=True))
    assert len(load([own_cache])) == 2


def test_a_more_thorough_search_is_not_stopped_by_a_lesser_one(own_cache):
    lesser = dataclasses.replace(QUICK, trials=1, implementations=("xla",))
    shapetune.tune("attention", SMALL, options=lesser)
    (one,) = shapetune.tune("attention", SMALL, options=QUICK)
    assert len(one.trials) > 1


def test_an_implementation_that_cannot_serve_is_refused_by_its_reason(own_cache):
    options = dataclasses.replace(QUICK, implementations=("cudnn",))
    with pytest.raises(UnsupportedError, match="NVIDIA"):
        shapetune.tune("attention", SMALL, options=options)


def test_faulty_implementations_do_not_end_a_run_or_win(own_cache):
    names = [n for n in faulty.KINDS if n not in ("overflows", "dawdles", "changes_its_mind")]
    options = dataclasses.replace(QUICK, implementations=("xla", *names), trials=20)
    with faulty.registered(*names):
        notes = Notes()
        (one,) = shapetune.tune(
            "attention", {**SMALL, "mode": "fwd_bwd"}, options=options, listener=notes
        )
    assert one.chosen == Candidate("xla")
    found = {t.candidate.implementation: t.status for t in notes.trials}
    for name in set(names) - {"refuses"}:
        assert found[name] == faulty.KINDS[name][1]


def test_a_winner_that_fails_the_hard_inputs_does_not_win(own_cache, monkeypatch):
    op, slow = get_op("attention"), Candidate("dawdles")
    monkeypatch.setattr(op, "heuristic", lambda problem, device: slow)
    about = {**SMALL, "seq": 129, "dtype": "bfloat16"}
    options = dataclasses.replace(QUICK, implementations=("overflows",))
    with faulty.registered("overflows", "dawdles"):
        (one,) = shapetune.tune("attention", about, options=options)
    assert one.heuristic_is_best
    assert {t.candidate.implementation: t.status for t in one.trials}["overflows"] == "wrong_result"


@pytest.mark.parametrize(
    ("faulty_one", "about"),
    [("gives_nan", SMALL), ("overflows", {**SMALL, "seq": 257, "dtype": "bfloat16"})],
)
def test_another_takes_the_place_of_a_heuristic_that_fails(
    own_cache, monkeypatch, faulty_one, about
):
    """At once or on the harder inputs; and what is dispatched is not the heuristic then."""
    op, wrong = get_op("attention"), Candidate(faulty_one)
    notes = Notes()
    stages = []
    monkeypatch.setattr(notes, "stage", stages.append)
    with faulty.registered(faulty_one):
        monkeypatch.setattr(op, "heuristic", lambda problem, device: wrong)
        options = dataclasses.replace(QUICK, implementations=(faulty_one,))
        (one,) = shapetune.tune("attention", about, options=options, listener=notes)
        assert (one.heuristic, one.chosen) == (Candidate("xla"), Candidate("xla"))
        assert {t.candidate: t.status for t in one.trials}[wrong] == "wrong_result"
        assert any(f"{faulty_one}: " in text and "xla takes its place" in text for text in stages)
        explained = shapetune.explain("attention", **about)
        assert (explained.implementation, explained.tier) == ("xla", "exact")


def test_where_all_fail_there_is_no_record_and_the_first_reason_is_said(own_cache, monkeypatch):
    op = get_op("attention")
    notes = Notes()
    with faulty.registered("gives_nan"):
        monkeypatch.setattr(op, "heuristic", lambda problem, device: Candidate("gives_nan"))
        only = {"gives_nan": op.implementation("gives_nan")}
        monkeypatch.setattr(op, "usable", lambda problem, device: only)
        assert shapetune.tune("attention", SMALL, options=QUICK, listener=notes) == []
    assert "gives_nan: wrong_result" in notes.failed[0]


def test_what_is_tuned_stays_when_the_run_is_interrupted(own_cache):
    class Stop(Listener):
        def problem_started(self, index, problem, total):
            if index == 1:
                raise KeyboardInterrupt

    problems = [SMALL, {**SMALL, "seq": 40}]
    with pytest.raises(KeyboardInterrupt):
        shapetune.tune("attention", problems, options=QUICK, listener=Stop())
    assert [r.problem.seq for r in load([own_cache])] == [65]
    assert shapetune.explain("attention", **SMALL).tier == "exact"


def test_a_kernel_of_ones_own_is_tuned_and_dispatched(own_cache):
    op = get_op("attention")
    faster = Implementation(
        name="mine",
        function=op.implementation("xla").function,
        space=lambda problem, device: Space({"unused": (1, 2)}),
        default_config=lambda problem, device: {"unused": 1},
    )
    op.register(faster)
    try:
        options = dataclasses.replace(QUICK, implementations=("mine",))
        (one,) = shapetune.tune("attention", SMALL, options=options)
        assert {t.candidate.key for t in one.trials} == {"xla", "mine(unused=1)", "mine(unused=2)"}
    finally:
        del op.implementations["mine"]


def test_bad_requests_are_refused_before_anything_runs(own_cache, tmp_path):
    with pytest.raises(UnknownNameError, match="nothing"):
        shapetune.tune("nothing", SMALL)
    with pytest.raises(ProblemError, match="seq"):
        shapetune.tune("attention", {"seq": -1, "dim": 64})
    with pytest.raises(ShapetuneError, match="length"):
        shapetune.tune("attention", {"length": 1, "dim": 64})
    with pytest.raises(UnknownNameError, match="flash"):
        shapetune.tune("attention", SMALL, options=Options(implementations=("flash",)))
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(CacheError, match="file"):
        shapetune.tune("attention", SMALL, cache=blocker)
    with pytest.raises(ProblemError, match="zzz"):
        shapetune.tune("attention", {**SMALL, "features": ("zzz",)})


@pytest.mark.parametrize(
    "given",
    [
        {"trials": 0}, {"trials": "x"}, {"trials": True}, {"budget": -1}, {"budget": None},
        {"budget": float("nan")}, {"pairs": 2}, {"seed": -1}, {"rounds": 1.5},
        {"objective": "speed"}, {"isolation": True}, {"max_temp_mb": -1}, {"modules": "one"},
        {"implementations": (1,)}, {"effort": 3}, {"limits": None}, {"storage": 1}, {"target": 1},
    ],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_named_with_its_value(given):
    ((name, value),) = given.items()
    with pytest.raises(ShapetuneError, match=name) as caught:
        Options(**given)
    assert repr(value) in str(caught.value)


def test_arguments_of_the_wrong_type_are_named():
    for problems in (3, None, "attention"):
        with pytest.raises(ShapetuneError, match="problems must be"):
            shapetune.tune("attention", problems)
    with pytest.raises(ShapetuneError, match="problems holds 3"):
        shapetune.tune("attention", [3])
    with pytest.raises(UnknownNameError, match="None"):
        shapetune.tune(None, SMALL)
    with pytest.raises(ShapetuneError, match="options"):
        shapetune.tune("attention", SMALL, options={"trials": 3})
    with pytest.raises(ShapetuneError, match="cache"):
        shapetune.tune("attention", SMALL, cache=3)


def test_the_implementations_to_choose_from_are_those_that_can_be_tuned():
    with pytest.raises(UnknownNameError, match="xla") as caught:
        shapetune.tune("attention", SMALL, options=Options(implementations=("flash",)))
    assert "default" not in str(caught.value)


def test_a_grid_is_every_combination_once():
    problems = grid("attention", seq=[64, 128], dim=[32], causal=[False, True], window=(500, 0))
    assert len(problems) == 4
    # A causal window that hides nothing is none; without causal it hides what is to the right.
    assert {p.window for p in problems if p.causal} == {None}
