"""The verdict: the heuristic unless it is surely beaten; memory among equals."""

import numpy as np
import pytest

from shapetune.autotune import final, races
from shapetune.autotune.final import LEAST_GAIN, HeuristicFails, NoVerdict, decide, front
from shapetune.autotune.options import Listener, Options
from shapetune.autotune.outcome import TrialError
from shapetune.cache import Candidate, Trial, Verification

from ..samples import problem

HEURISTIC = Candidate("plain")


@pytest.fixture(autouse=True)
def races_as_they_are(short_races, monkeypatch):
    """Here the field is chosen as outside of tests."""
    monkeypatch.setattr(final, "field_of", races.field_of)


GOOD = Verification(1e-7, 1e-6, ("normal",))


class Paper:
    """A tester of candidates whose true times are known; noise is drawn."""

    problem = problem()

    def __init__(self, times, noise=0.02, wrong=(), dies=()):
        self.times, self.noise, self.wrong, self.dies = times, noise, wrong, dies
        self.raced = []

    def trial(self, candidate, best=None):
        raise NotImplementedError

    def verify_hard(self, candidate):
        if candidate.implementation in self.wrong:
            return Trial(candidate, "wrong_result", note="hard inputs")
        return GOOD

    def race(self, candidates, rounds, seed=0, anew=False):
        names = [c.implementation for c in candidates]
        self.raced.append(names)
        if set(names) & set(self.dies):
            raise TrialError("crashed", "gone")
        rng = np.random.default_rng(seed)
        true = np.array([self.times[name] for name in names])
        return true * np.exp(rng.normal(0, self.noise, (rounds, len(names))))


def trials(times, memory=()):
    memory = dict(memory)
    return [
        Trial(Candidate(name), "ok", ms, ms, ms, 5, 1, temp_mb=memory.get(name, 10.0))
        for name, ms in times.items()
    ]


def verdict(times, memory=(), failed=None, **options):
    paper = options.pop("paper", None) or Paper(times)
    failed = [] if failed is None else failed
    return decide(
        paper, HEURISTIC, trials(times, memory), Options(**options), Listener(), failed.append
    )


def test_a_sure_gain_wins_with_its_interval():
    found = verdict({"plain": 10.0, "a": 5.0, "b": 5.6})
    assert found.chosen == Candidate("a")
    assert 1.0 < found.comparison.low <= found.comparison.ratio <= found.comparison.high


@pytest.mark.parametrize("other", [10.0, 9.95, 12.0])
def test_the_heuristic_wins_unless_it_is_surely_and_noticeably_beaten(other):
    times = {"plain": 10.0, "a": other}
    assert verdict(times).chosen == HEURISTIC
    found = verdict(times, paper=Paper(times, noise=1e-5))
    assert found.chosen == HEURISTIC
    assert found.comparison.ratio == 1.0
    assert LEAST_GAIN > 10 / 9.95


def test_among_equals_the_one_with_the_least_memory_is_chosen():
    times = {"plain": 10.0, "a": 5.0, "b": 5.005, "c": 5.6}
    memory = {"a": 30.0, "b": 4.0, "c": 0.0}
    assert verdict(times, memory).chosen == Candidate("b")


def test_memory_as_the_objective_takes_the_least_at_any_speed():
    times = {"plain": 10.0, "a": 5.0, "b": 12.0}
    memory = {"plain": 20.0, "a": 30.0, "b": 2.0}
    found = verdict(times, memory, objective="memory")
    assert found.chosen == Candidate("b")
    assert found.comparison.ratio < 1
    # Nothing needs less than the heuristic: it stays.
    assert verdict(times, {"plain": 1.0}, objective="memory").chosen == HEURISTIC


def test_what_needs_more_memory_than_allowed_is_not_chosen():
    times = {"plain": 10.0, "a": 5.0, "b": 7.0}
    memory = {"plain": 5.0, "a": 30.0, "b": 5.0}
    assert verdict(times, memory, max_temp_mb=8.0).chosen == Candidate("b")
    # A heuristic that is too large gives way even to what is slower.
    memory = {"plain": 50.0, "a": 30.0, "b": 5.0}
    slow = {"plain": 10.0, "a": 5.0, "b": 14.0}
    assert verdict(slow, memory, max_temp_mb=8.0).chosen == Candidate("b")
    with pytest.raises(NoVerdict, match="50 MiB"):
        verdict(times, {"plain": 50.0, "a": 30.0, "b": 30.0}, max_temp_mb=8.0)


def test_a_finalist_that_fails_the_hard_inputs_makes_room():
    times, failed = {"plain": 10.0, "a": 5.0, "b": 6.0}, []
    found = verdict(times, failed=failed, paper=Paper(times, wrong=("a",)))
    assert found.chosen == Candidate("b")
    assert [(t.candidate.key, t.status) for t in failed] == [("a", "wrong_result")]


def test_a_finalist_that_dies_in_the_races_is_found_out():
    times, failed = {"plain": 10.0, "a": 5.0, "b": 5.1}, []
    found = verdict(times, failed=failed, paper=Paper(times, dies=("a",)))
    assert found.chosen == Candidate("b")
    assert [(t.candidate.key, t.status) for t in failed] == [("a", "crashed")]


def test_those_that_fall_behind_drop_out_of_the_races():
    times = {"plain": 10.0, "a": 5.0, "b": 6.2}
    paper = Paper(times)
    verdict(times, paper=paper)
    assert paper.raced[0] == ["plain", "a", "b"]
    assert all("b" not in names for names in paper.raced[1:])


@pytest.mark.parametrize(("spread", "stages"), [(1.2, 12), (1.02, 3)])
def test_on_a_noisy_machine_races_find_what_the_search_ranked_badly(spread, stages):
    """The best one looked half as fast again as the others, which are 15% slower than it."""
    true = {"plain": 10.0, **{f"c{i}": 5.75 for i in range(7)}, "best": 5.0}
    seen = {name: 9.0 if name == "best" else ms for name, ms in true.items()}
    tried = [Trial(Candidate(n), "ok", ms, ms, ms * spread, 5, 1) for n, ms in seen.items()]
    paper = Paper(true, noise=0.15)
    found = decide(paper, HEURISTIC, tried, Options(), Listener())
    races = [names for names in paper.raced if len(names) > 2]
    assert 1 <= len(races) <= stages
    if spread > 1.1:
        assert "best" in races[0]
        assert found.chosen == Candidate("best")
    else:
        # On a calm machine the search is believed: as much as 1.3× off is out.
        assert "best" not in races[0]
        assert len(races[0]) == 7


def test_on_a_noisy_machine_what_disturbs_wide_programs_most_does_not_decide():
    """Disturbed more often than not, the best one is the slowest by median."""
    true = {"plain": 10.0, "wide": 5.0, "narrow": 5.9, "middle": 5.5}
    harm = {"plain": 1.0, "wide": 1.0, "narrow": 0.1, "middle": 0.6}

    class Busy(Paper):
        def race(self, candidates, rounds, seed=0, anew=False):
            calm = super().race(candidates, rounds, seed)
            rng = np.random.default_rng(1000 + seed)
            hit = rng.random(calm.shape) < 0.6
            return calm * (1 + hit * [harm[c.implementation] for c in candidates])

    tried = [Trial(Candidate(n), "ok", ms, ms, 1.5 * ms, 5, 1) for n, ms in true.items()]
    found = decide(Busy(true), HEURISTIC, tried, Options(), Listener())
    assert found.chosen == Candidate("wide")


def test_a_wrong_heuristic_has_no_verdict():
    times = {"plain": 10.0, "a": 5.0}
    with pytest.raises(HeuristicFails, match="hard inputs"):
        verdict(times, paper=Paper(times, wrong=("plain",)))


def test_a_gain_that_a_new_compile_takes_away_is_none():
    times = {"plain": 10.0, "a": 8.0}

    class Lucky(Paper):
        def race(self, candidates, rounds, seed=0, anew=False):
            found = super().race(candidates, rounds, seed)
            return found * (1.0, 1.25) if anew else found

    assert verdict(times, paper=Lucky(times)).chosen == HEURISTIC


def test_an_equal_is_rarely_declared_a_winner():
    times = {"plain": 10.0, "a": 10.0}
    won = 0
    for seed in range(200):

        class Shifted(Paper):
            def race(self, candidates, rounds, seed=0, anew=False, shift=100 * seed):
                return super().race(candidates, rounds, seed + shift, anew)

        won += verdict(times, paper=Shifted(times, noise=0.1)).chosen != HEURISTIC
    assert won / 200 <= 0.02


def test_the_front_is_what_none_beats_in_both():
    found = front(trials({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 9.0, "b": 9.5, "c": 1.0}))
    assert [t.candidate.implementation for t in found] == ["a", "c"]


class Slow(Paper):
    """One whose races take as long as they say, by a clock of its own."""

    def __init__(self, times, monkeypatch):
        super().__init__(times, noise=0.01)
        self.now = 0.0
        monkeypatch.setattr(final.time, "monotonic", lambda: self.now)

    def race(self, candidates, rounds, seed=0, anew=False):
        found = super().race(candidates, rounds, seed, anew)
        self.now += found.sum() / 1e3
        return found


def test_races_of_calls_that_take_long_stay_short(monkeypatch):
    """Seven rounds of seven candidates of 2 s would be 100 s, three times over."""
    times = {"plain": 2400.0, **{f"c{i}": 2000.0 + i for i in range(6)}}
    paper = Slow(times, monkeypatch)
    verdict(times, paper=paper)
    races = [names for names in paper.raced if len(names) > 2]
    assert [len(names) for names in races] == [3, 3]
    short = Slow({name: ms / 1e3 for name, ms in times.items()}, monkeypatch)
    verdict(short.times, paper=short)
    assert [len(names) for names in short.raced if len(names) > 2] == [7, 7, 7]


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_what_is_surely_slower_than_the_heuristic_is_not_raced_on(noise):
    times = {"plain": 10.0, "a": 12.0, "b": 12.5, "c": 13.5}
    paper = Paper(times, noise)
    found = verdict(times, paper=paper)
    assert found.chosen == HEURISTIC
    # The last is beyond reach of the heuristic; the others lose the first race.
    assert paper.raced == [["plain", "a", "b"]]
    # Memory is another matter: the least wins, however slow.
    found = verdict(times, {"plain": 5.0, "c": 1.0}, paper=paper, objective="memory")
    assert found.chosen == Candidate("c")


def test_a_heuristic_that_is_too_large_gives_way_to_what_is_slower():
    times = {"plain": 10.0, "a": 12.0, "b": 30.0}
    found = verdict(times, {"plain": 50.0, "a": 9.0, "b": 5.0}, max_temp_mb=9.0)
    assert found.chosen == Candidate("a")
    found = verdict(times, {"plain": 50.0, "a": 20.0, "b": 5.0}, max_temp_mb=9.0)
    assert found.chosen == Candidate("b")
