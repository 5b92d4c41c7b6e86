import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapetune.cache import Device, Problem
from shapetune.cache.errors import ProblemError

from ..samples import problem

sizes = st.integers(1, 2**31 - 1)
problems = st.builds(
    lambda seq, kv_seq, dim, value_dim, dtype, causal, window, batch, group, kv_heads, mode, features: Problem(
        "attention", seq, kv_seq, dim, value_dim, dtype, causal, window, batch,
        group * kv_heads, kv_heads, mode, tuple(sorted(features)),
    ),
    sizes, sizes, sizes, sizes,
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.booleans(),
    st.none() | st.tuples(st.integers(0, 100), st.integers(0, 100)) | st.integers(-1, 100),
    sizes, st.integers(1, 100), st.integers(1, 100),
    st.sampled_from(["fwd", "fwd_bwd"]),
    st.sets(st.sampled_from(["bias[ts]", "mask[nts]", "kv_lengths", "relu"])),
)  # fmt: skip


@given(problems)
def test_a_problem_survives_its_map(one):
    assert Problem.from_map(one.to_map()) == one


@given(problems, problems)
def test_keys_are_equal_exactly_if_problems_are(a, b):
    assert (a.key == b.key) == (a == b)


@given(problems)
def test_a_change_of_any_field_changes_the_key(one):
    changed = {
        "seq": one.seq % 1000 + 1001, "dim": one.dim % 1000 + 1001, "causal": not one.causal,
        "mode": "fwd" if one.mode == "fwd_bwd" else "fwd_bwd", "features": ("other",),
    }  # fmt: skip
    for name, value in changed.items():
        if getattr(one, name) != value:
            assert one.replace(**{name: value}).key != one.key, name


def test_the_key_is_readable_and_fixed():
    assert problem(causal=True, window=(128, 0)).key == (
        "attention|mode=fwd|dtype=float32|seq=1024|kv_seq=1024|dim=64|value_dim=64|causal=1"
        "|window=128,0|batch=1|heads=8|kv_heads=8|features=-"
    )


def test_a_family_is_shared_by_other_sizes_and_by_nothing_else():
    base = problem(heads=8, kv_heads=2)
    assert base.family == problem(seq=77, kv_seq=9, batch=3, heads=4, kv_heads=1).family
    for other in ({"dim": 32}, {"causal": True}, {"mode": "fwd_bwd"}, {"dtype": "bfloat16"},
                  {"window": (3, 0)}, {"features": ("relu",)}, {"heads": 16}):  # fmt: skip
        assert base.family != problem(**{"heads": 8, "kv_heads": 2, **other}).family


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seq": -1}, ["seq", "-1"]),
        ({"seq": 0}, ["seq", "0"]),
        ({"dim": 0}, ["dim", "0"]),
        ({"seq": 2.5}, ["seq", "2.5"]),
        ({"batch": True}, ["batch", "True"]),
        ({"dtype": "float64"}, ["dtype", "float64", "cast"]),
        ({"heads": 8, "kv_heads": 3}, ["heads", "8", "3"]),
        ({"mode": "bwd"}, ["mode", "bwd"]),
        ({"window": (-1, 0)}, ["window"]),
        ({"window": (1, 2, 3)}, ["window"]),
        ({"causal": 1}, ["causal"]),
        ({"features": ("No Word",)}, ["No Word"]),
        ({"features": (["x"],)}, ["features", "['x']"]),
        ({"features": ("relu", "relu")}, ["features", "sorted"]),
    ],
)
def test_an_impossible_field_is_named_with_its_value(fields, words):
    with pytest.raises(ProblemError) as caught:
        problem(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("bad", [None, [], {}, {"op": "attention"}, "attention"])
def test_a_map_of_something_else_is_refused(bad):
    with pytest.raises(ProblemError):
        Problem.from_map(bad)
    with pytest.raises(ProblemError):
        Device.from_map(bad)


def test_device_folders_are_safe_and_differ_where_keys_do():
    one = Device("cuda", "NVIDIA H200 / ../../etc", "9.0", 132)
    assert "/" not in one.folder
    assert ".." not in one.folder
    assert one.folder != dataclasses.replace(one, cores=114).folder
    assert one.folder == dataclasses.replace(one, driver="600.1").folder
