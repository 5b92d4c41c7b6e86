import pytest

from shapetune.autotune.search import Search, candidates, new_study
from shapetune.cache import Candidate, Trial
from shapetune.cache.errors import StorageError, UnknownNameError
from shapetune.kernels import current_device, get_op

from ..samples import problem

POOL = [Candidate("plain")] + [
    Candidate("blocks", {"q": q, "k": k}) for q in (1, 2, 4, 8) for k in (1, 2, 4, 8) if q >= k
]
HEURISTIC = POOL[0]


def cost(candidate):
    """Best at q=4, k=2."""
    if candidate.implementation == "plain":
        return 9.0
    return 1 + abs(candidate.config["q"] - 4) + abs(candidate.config["k"] - 2)


def run(search, fails=()):
    proposed = []
    for candidate in search:
        proposed.append(candidate)
        failed = candidate.key in fails
        outcome = Trial(candidate, "crashed") if failed else Trial(candidate, "ok", cost(candidate))
        search.tell(candidate, outcome)
    return proposed


def test_a_small_space_is_searched_whole_and_once():
    proposed = run(Search(POOL, [HEURISTIC], limit=100))
    assert sorted(c.key for c in proposed) == sorted(c.key for c in POOL)


def test_no_candidate_is_proposed_twice_and_the_limit_holds():
    for seed in range(3):
        proposed = run(Search(POOL, [HEURISTIC], limit=8, seed=seed))
        assert len(proposed) == len({c.key for c in proposed}) == 8
        assert set(proposed) <= set(POOL)


def test_the_heuristic_comes_first_then_the_seeds():
    seeds = [HEURISTIC, POOL[3], Candidate("blocks", {"q": 1, "k": 8}), POOL[3]]
    proposed = run(Search(POOL, seeds, limit=5))
    assert proposed[:2] == [HEURISTIC, POOL[3]]
    assert seeds[2] not in proposed


def test_a_heuristic_outside_the_pool_is_measured_all_the_same():
    outside = Candidate("blocks", {"q": 3, "k": 3})
    proposed = run(Search(POOL, [outside], limit=100))
    assert proposed[0] == outside
    assert len(proposed) == len(POOL) + 1


def test_failures_do_not_stop_the_search():
    proposed = run(Search(POOL, [HEURISTIC], limit=9), fails={c.key for c in POOL[:6]})
    assert len(proposed) == 9


def test_a_large_space_is_learnt_from():
    pool = [Candidate("blocks", {"q": q, "k": k}) for q in range(1, 30) for k in range(1, 30)]
    costs = []
    for seed in range(4):
        proposed = run(Search(pool, [pool[-1]], limit=50, seed=seed))
        costs.append(min(map(cost, proposed)))
    # 50 draws at random reach a cost of 4 or less in about 3 of 4 runs, and 3 in half of them.
    assert sorted(costs)[1] <= 3


def test_every_candidate_of_a_problem_is_supported_and_in_its_space():
    about, device, op = problem(seq=600), current_device(), get_op("attention")
    pool = candidates(op, about, device)
    assert {c.implementation for c in pool} >= {"xla", "blockwise"}
    assert len({c.key for c in pool}) == len(pool)
    for candidate in pool:
        op.require(about, device, candidate)


def test_only_some_implementations_can_be_asked_for():
    about, device, op = problem(seq=600), current_device(), get_op("attention")
    assert {c.implementation for c in candidates(op, about, device, ["xla"])} == {"xla"}
    with pytest.raises(UnknownNameError, match="flash"):
        candidates(op, about, device, ["flash"])


@pytest.mark.parametrize("name", ["study.log", "sqlite"])
def test_a_study_can_be_kept(tmp_path, name):
    path = tmp_path / name
    storage = f"sqlite:///{path}" if name == "sqlite" else str(path)
    search = Search(POOL, [HEURISTIC], limit=6, study=new_study("kept", storage=storage))
    run(search)
    assert path.exists()


def test_a_storage_that_cannot_be_opened_is_named():
    with pytest.raises(StorageError, match="nosuchdb://x"):
        new_study("a", storage="nosuchdb://x")
