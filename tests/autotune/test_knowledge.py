"""What a run leaves for the next: trials on disk at once, and a quarantine."""

import dataclasses

import pytest

import shapetune
from shapetune.autotune import Listener, Options
from shapetune.autotune.measure import Effort
from shapetune.cache import Candidate, load
from shapetune.kernels import Implementation, Space, get_op

from . import faulty

SMALL = {"seq": 65, "dim": 32, "heads": 2}
QUICK = Options(
    trials=6, budget=60, pairs=6, rounds=2, effort=Effort(0.01, 3, 3), isolation="none",
    implementations=("many",),
)  # fmt: skip


@pytest.fixture
def many():
    """An implementation with five configs that are one and the same; a list widens it."""
    op = get_op("attention")
    plain = op.implementation("xla").function
    numbers = list(range(5))

    def register(version=1):
        op.register(
            Implementation(
                "many",
                lambda *arrays, config, **static: plain(*arrays, config={}, **static),
                version=version,
                space=lambda problem, device: Space({"number": tuple(numbers)}),
                automatic=lambda problem, device: False,
            )
        )

    register()
    numbers_and_register = (numbers, register)
    yield numbers_and_register
    del op.implementations["many"]


class Notes(Listener):
    """Remembers what it heard, and stops the run after so many trials."""

    def __init__(self, stop_after=None):
        self.made, self.known, self.failed = [], [], []
        self._stop_after = stop_after

    def trial_started(self, candidate):
        if len(self.made) == self._stop_after:
            raise KeyboardInterrupt

    def trial_done(self, trial, best):
        self.made.append(trial.candidate.key)

    def trials_known(self, trials):
        self.known = [t.candidate.key for t in trials]

    def problem_failed(self, index, problem, reason):
        self.failed.append(reason)


def tuned(notes, **changes):
    return shapetune.tune(
        "attention", SMALL, options=dataclasses.replace(QUICK, **changes), listener=notes
    )


def test_a_run_that_is_stopped_is_resumed_without_measuring_anything_twice(many, own_cache):
    first, second = Notes(stop_after=3), Notes()
    with pytest.raises(KeyboardInterrupt):
        tuned(first)
    assert len(load([own_cache]).of_kind("trials")) == 3
    (one,) = tuned(second)
    assert set(second.known) == set(first.made)
    assert len(second.made) == 3
    assert set(first.made).isdisjoint(second.made)
    assert {t.candidate.key for t in one.trials} == {*first.made, *second.made}
    assert one.trials[0].candidate == one.heuristic
    # The record holds them now.
    assert load([own_cache]).ids == {one.id}


def test_a_widened_space_measures_only_what_is_new(many, own_cache):
    numbers, _ = many
    tuned(Notes())
    numbers.extend((5, 6))
    notes = Notes()
    tuned(notes, trials=20)
    assert sorted(notes.made) == ["many(number=5)", "many(number=6)"]


def test_trials_of_another_version_are_measured_anew(many, own_cache):
    _, register = many
    with pytest.raises(KeyboardInterrupt):
        tuned(Notes(stop_after=3))
    register(version=2)
    notes = Notes()
    tuned(notes)
    assert notes.known == ["xla"]
    assert len(notes.made) == 5


def test_again_measures_all_anew(many, own_cache):
    tuned(Notes())
    notes = Notes()
    tuned(notes, again=True)
    assert notes.known == []
    assert len(notes.made) == 6


def test_what_was_wrong_is_quarantined_and_not_tried_again_until_asked(own_cache):
    with faulty.registered("wrong_tail"):
        asked = {"implementations": ("wrong_tail",), "again": True}
        tuned(Notes(), **asked)
        (word,) = load([own_cache]).of_kind("quarantine")
        assert (word.candidate, word.status) == (Candidate("wrong_tail"), "wrong_result")
        assert "tolerance" in word.note
        assert word.problem.seq == 65
        notes = Notes()
        (one,) = tuned(notes, **asked)
        assert (notes.known, notes.made) == (["wrong_tail"], ["xla"])
        by_name = {t.candidate.implementation: t for t in one.trials}
        assert by_name["wrong_tail"].status == "wrong_result"
        assert by_name["wrong_tail"].note.startswith("quarantined: ")
        notes = Notes()
        tuned(notes, retry_quarantined=True, **asked)
        assert "wrong_tail" in notes.made
        # Nor does a record of the problem keep it from being tried.
        notes = Notes()
        tuned(notes, retry_quarantined=True, implementations=("wrong_tail",))
        assert notes.made == ["wrong_tail"]


def test_a_candidate_that_passes_when_asked_again_leaves_quarantine(own_cache, monkeypatch):
    with faulty.registered("wrong_tail") as op:
        asked = {"implementations": ("wrong_tail",), "again": True}
        tuned(Notes(), **asked)
        mended = dataclasses.replace(
            op.implementations["wrong_tail"],
            function=lambda *a, config, **s: op.implementation("xla").function(*a, config={}, **s),
        )
        op.register(mended)
        tuned(Notes(), retry_quarantined=True, **asked)
        notes = Notes()
        (one,) = tuned(notes, **asked)
        assert notes.known == []
        assert {t.status for t in one.trials} == {"ok"}


def test_a_heuristic_in_quarantine_is_told_with_the_way_out(own_cache, monkeypatch):
    op = get_op("attention")
    notes, stages = Notes(), []
    monkeypatch.setattr(notes, "stage", stages.append)
    with faulty.registered("gives_nan"):
        monkeypatch.setattr(op, "heuristic", lambda problem, device: Candidate("gives_nan"))
        tuned(Notes(), implementations=("xla",))
        (one,) = tuned(notes, implementations=("xla",), again=True)
    assert one.heuristic == Candidate("xla")
    assert any("gives_nan" in text and "--retry-quarantined" in text for text in stages)
