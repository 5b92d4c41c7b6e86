"""Records of what did harm, and of trials under way."""

import dataclasses

import msgpack
import pytest

from shapetune.cache import Candidate, RecordSet, Trial, load, publish
from shapetune.cache.choice import Versions
from shapetune.cache.envelope import read_head
from shapetune.cache.errors import RecordError
from shapetune.cache.partial import Trials, discard
from shapetune.cache.partial import from_head as read_trials
from shapetune.cache.quarantine import LIFTED, Quarantine, from_head, in_force
from shapetune.kernels import current_device

from ..samples import problem, record

NOW = Versions(jax="0.11.2", implementation=lambda name: 3)
CANDIDATE = Candidate("blockwise", {"block_q": 512, "block_k": 256})
ORIGIN = {"shapetune": "0.1.0", "jax": "0.11.0", "jaxlib": "0.11.0", "host": "00", "time": 1e9}


def word(**changes):
    fields = {
        "problem": problem(), "device": current_device(), "candidate": CANDIDATE,
        "status": "crashed", "note": "SIGSEGV", "version": 3, **ORIGIN,
    }  # fmt: skip
    return Quarantine(**{**fields, **changes})


def trials(**changes):
    fields = {
        "problem": problem(),
        "device": current_device(),
        "trials": (Trial(CANDIDATE, "ok", 2.0, 1.9, 2.1, version=3), Trial(CANDIDATE, "crashed")),
    }
    return Trials(**{**fields, **ORIGIN, **changes})


def warned(*words):
    return in_force(RecordSet([w.to_bytes() for w in words]), current_device(), problem(), NOW)


def test_they_come_back_from_their_bytes_as_they_were():
    for one, read in ((word(), from_head), (trials(), read_trials)):
        assert read(read_head(one.to_bytes())) == one


def test_a_quarantine_is_in_force_for_its_problem_device_and_versions():
    assert set(warned(word())) == {CANDIDATE}
    assert warned(word(problem=problem(seq=77))) == {}
    assert warned(word(version=2)) == {}
    assert warned(word(jax="0.10.2")) == {}
    driver = dataclasses.replace(current_device(), driver="580.1")
    ours = dataclasses.replace(current_device(), driver="570.0")
    assert word(device=driver).applies(driver, NOW)
    assert not word(device=driver).applies(ours, NOW)


def test_what_was_learnt_last_counts_in_whatever_order_it_comes():
    lifted = word(status=LIFTED, time=2e9)
    assert warned(word(), lifted) == warned(lifted, word()) == {}
    again = word(time=3e9)
    assert warned(lifted, again, word()) == {CANDIDATE: again}


def test_only_trials_of_the_versions_in_use_are_fresh():
    assert [t.status for t in trials().fresh(NOW)] == ["ok"]
    assert trials(jax="0.10.2").fresh(NOW) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"status": "ugly"},
        {"candidate": 3},
        {"note": None},
        {"time": -1},
        {"more": 1},
        {"device": {}},
    ],
)
def test_a_quarantine_with_something_wrong_is_refused(change):
    head = read_head(word().to_bytes())
    body = {**msgpack.unpackb(head.body), **change}
    with pytest.raises(RecordError):
        from_head(dataclasses.replace(head, body=msgpack.packb(body)))


def test_a_head_that_names_another_problem_is_refused():
    for one, read in ((word(), from_head), (trials(), read_trials)):
        head = read_head(one.to_bytes())
        with pytest.raises(RecordError, match="head"):
            read(dataclasses.replace(head, problem_key=problem(seq=3).key))


def test_discarding_takes_the_trials_of_a_problem_and_nothing_else(tmp_path):
    publish(tmp_path, [trials()])
    publish(tmp_path, [trials(problem=problem(seq=77))])
    publish(tmp_path, [word()])
    publish(tmp_path, [record()])
    assert discard(tmp_path, current_device(), problem()) == 1
    found = load([tmp_path])
    assert [t.problem.seq for t in found.of_kind("trials")] == [77]
    assert (len(found), len(found.of_kind("quarantine"))) == (3, 1)
