import random

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapetune.cache import Versions, nearest, rank
from shapetune.cache.choice import distance
from shapetune.cache.key import Sizes

from ..samples import problem, record
from .test_key import problems

VERSIONS = Versions(
    jax=jax.__version__, implementation=lambda name: {"xla": 1, "blockwise": 1}.get(name)
)
FRESH = record(ratio=1.2, version=1)
FASTER = record(ratio=1.9, version=1)
NEWER = record(ratio=1.2, made=1_800_000_000.0, version=1)
STALE = record(ratio=3.0, jax_version="0.4.1", version=1)
OLD_KERNEL = record(ratio=3.0, version=7)
ALL = [FRESH, FASTER, NEWER, STALE, OLD_KERNEL]


def test_fresh_before_stale_then_ratio_then_newest():
    assert rank(ALL, VERSIONS)[:3] == [FASTER, NEWER, FRESH]


def test_strict_drops_the_stale_and_any_does_not_ask():
    assert {r.id for r in rank(ALL, VERSIONS, "strict")} == {FRESH.id, FASTER.id, NEWER.id}
    assert rank(ALL, VERSIONS, "any")[0] in (STALE, OLD_KERNEL)


@given(st.lists(st.sampled_from(ALL)), st.integers())
def test_order_of_arrival_does_not_matter(records, seed):
    shuffled = list(records)
    random.Random(seed).shuffle(shuffled)
    assert [r.id for r in rank(records, VERSIONS)] == [r.id for r in rank(shuffled, VERSIONS)]


@pytest.mark.parametrize(
    ("one", "word"),
    [
        (STALE, "jax 0.4.1"),
        (OLD_KERNEL, "version 7"),
        (record(jax_version="", version=1), "unknown"),
    ],
)
def test_staleness_says_why(one, word):
    assert word in VERSIONS.staleness(one)
    assert VERSIONS.staleness(FRESH) is None


def test_neighbours_come_by_distance_and_other_batches_first():
    asked = problem(seq=1024)
    order = [problem(seq=1024, batch=4), problem(seq=1200), problem(seq=2048)]
    keys = [one.key for one in (order[2], problem(seq=4096), order[0], order[1])]
    assert nearest(keys, asked) == [one.key for one in order]


def test_the_problem_itself_is_not_its_neighbour_nor_is_what_is_no_key():
    assert (
        nearest(
            [problem().key, "", "attention|seq=x", "a|seq=0|kv_seq=0||batch=0|heads=0|"], problem()
        )
        == []
    )


@given(problems, problems)
def test_a_key_tells_the_sizes_of_its_problem(one, other):
    sizes = Sizes.of_key(one.key)
    assert (sizes.seq, sizes.kv_seq, sizes.batch, sizes.heads) == (
        one.seq, one.kv_seq, one.batch, one.heads,
    )  # fmt: skip
    there = distance(sizes, other)
    back = distance(Sizes.of_key(other.key), one)
    assert (there is None) == (back is None)
    assert there is None or there == pytest.approx(back)
