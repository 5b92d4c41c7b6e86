"""Flexible attention: its kernels, interpreted, against attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapetune.cache.errors import ConfigError, ProblemError, UnknownNameError
from shapetune.kernels.attention import flex
from shapetune.kernels.attention.pallas_flex import pallas_flex

from . import dense_attention as dense
from .agree import interpreted

SMALL = {
    "block_q": 32, "block_k": 32, "block_q_dq": 32, "block_k_dq": 64,
    "block_q_dkv": 32, "block_k_dkv": 32, "num_warps": 4, "num_stages": 2,
    "num_warps_bwd": 4, "num_stages_bwd": 1,
}  # fmt: skip
IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (2, 150)), -1), jnp.int32)
SLOPES = jnp.asarray([0.5, 0.25])


def soft_cap(score, b, h, q, k):
    return 5 * jnp.tanh(score / 5)


def from_table(table, score, b, h, q, k):
    return score + table[h, jnp.clip(k - q + 10, 0, 20)]


def few_see_any(b, h, q, k):
    return (q > 40) & (k < h * 30 + 20)


def arrays(batch, seq, kv_seq, heads, kv_heads, dim, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, seq, heads, dim),
        (batch, kv_seq, kv_heads, dim),
        (batch, kv_seq, kv_heads, dim),
    )
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (*shapes, shapes[0])]


def value_and_gradients(call, query, key, value, grad_out):
    def all_of(query, key, value, grad_out):
        out, pull = jax.vjp(call, query, key, value)
        return (out, *pull(grad_out))

    return interpreted(all_of, query, key, value, grad_out)


def assert_close(got, want):
    for one, other in zip(got, want, strict=True):
        other = np.asarray(other, np.float64)
        error = np.abs(np.asarray(one, np.float64) - other).max()
        assert error <= 1e-5 * max(1.0, np.abs(other).max())


@pytest.mark.parametrize(
    ("mask", "block"),
    [
        (flex.causal, (64, 64)),
        (flex.local_window(20, 5), (64, 128)),
        (flex.prefix(40), (128, 64)),
        (flex.document(IDS), (64, 64)),
        (flex.both(flex.document(IDS), flex.causal), (64, 64)),
        (few_see_any, (64, 64)),
    ],
    ids=["causal", "window", "prefix", "document", "document-causal", "empty-rows"],
)
def test_masked_attention_and_its_gradients_are_right(mask, block):
    query, key, value, grad_out = arrays(2, 150, 150, 2, 1, 16)
    block_mask = flex.create_block_mask(mask, 2, 2, 150, 150, block_q=block[0], block_k=block[1])

    def call(*arrays):
        return flex.flex_attention(
            *arrays, block_mask=block_mask, implementation="pallas_flex", config=SMALL
        )

    b, h, q, k = np.ogrid[:2, :2, :150, :150]
    seen = np.broadcast_to(mask(*map(jnp.asarray, (b, h, q, k))), (2, 2, 150, 150))
    right, _, gradients = dense.attention(query, key, value, grad_out, scale=0.25, seen=seen)
    got = value_and_gradients(call, query, key, value, grad_out)
    assert_close(got, (right, *gradients[:3]))


@pytest.mark.parametrize(
    ("score", "mask"),
    [
        (soft_cap, None),
        (flex.alibi(4), flex.causal),
        (jax.tree_util.Partial(from_table, jnp.linspace(-2, 2, 84).reshape(4, 21)), None),
    ],
    ids=["cap", "alibi", "table"],
)
def test_score_functions_agree_with_automatic_differentiation(score, mask):
    inputs = arrays(1, 70, 60, 4, 2, 16)

    def call(implementation, config):
        return lambda *arrays: flex.flex_attention(
            *arrays, score_mod=score, mask_mod=mask, implementation=implementation, config=config
        )

    got = value_and_gradients(call("pallas_flex", SMALL), *inputs)
    assert_close(got, value_and_gradients(call("xla", None), *inputs))


def test_the_plain_implementation_is_right_where_rows_see_nothing():
    query, key, value, grad_out = arrays(1, 60, 60, 2, 1, 16)
    b, h, q, k = np.ogrid[:1, :2, :60, :60]
    seen = np.broadcast_to(few_see_any(b, h, q, k), (1, 2, 60, 60))
    right, _, gradients = dense.attention(query, key, value, grad_out, scale=0.25, seen=seen)

    def call(*arrays):
        return flex.flex_attention(*arrays, mask_mod=few_see_any, implementation="xla")

    assert_close(value_and_gradients(call, query, key, value, grad_out), (right, *gradients[:3]))


@settings(max_examples=4, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 60)),
    blocks=st.lists(st.sampled_from([16, 32, 64]), min_size=6, max_size=6),
)
def test_it_serves_causal_and_windowed_attention(sizes, causal, window, blocks):
    query, key, value, grad_out = arrays(1, *sizes, 2, 1, 16)
    names = ("block_q", "block_k", "block_q_dq", "block_k_dq", "block_q_dkv", "block_k_dkv")
    config = SMALL | dict(zip(names, blocks, strict=True))

    def call(*arrays):
        return pallas_flex(
            *arrays, None, None, None, None,
            scale=0.25, is_causal=causal, local_window_size=window, config=config,
        )  # fmt: skip

    seen = dense.visible((1, 2, *sizes), causal=causal, window=window)
    right, _, gradients = dense.attention(query, key, value, grad_out, scale=0.25, seen=seen)
    got = value_and_gradients(call, query, key, value, grad_out)
    assert_close(got, (right, *gradients[:3]))


def test_a_block_mask_counts_empty_partial_and_full_blocks():
    mask = flex.create_block_mask(flex.causal, None, None, 256, 256, block_q=64, block_k=64)
    assert np.asarray(mask.keys.full_count).tolist() == [[[0, 1, 2, 3]]]
    assert np.asarray(mask.keys.partial_count).tolist() == [[[1, 1, 1, 1]]]
    assert np.asarray(mask.queries.full_count).tolist() == [[[3, 2, 1, 0]]]
    assert float(mask.sparsity) == pytest.approx(6 / 16)


def test_a_block_that_reaches_beyond_the_sequence_is_never_full():
    mask = flex.create_block_mask(
        lambda b, h, q, k: q >= 0, None, None, 100, 100, block_q=64, block_k=64
    )
    assert np.asarray(mask.keys.full_count).tolist() == [[[1, 0]]]
    assert np.asarray(mask.keys.partial_count).tolist() == [[[1, 2]]]


def test_a_block_mask_goes_through_jit_with_its_arrays():
    mask = flex.create_block_mask(flex.document(IDS), 2, None, 150, 150, block_q=64, block_k=64)
    inputs = arrays(2, 150, 150, 2, 2, 16)[:3]

    @jax.jit
    def call(mask, *arrays):
        return flex.flex_attention(
            *arrays, block_mask=mask, implementation="pallas_flex", config=SMALL
        )

    want = flex.flex_attention(*inputs, mask_mod=flex.document(IDS), implementation="xla")
    np.testing.assert_allclose(call(mask, *inputs), want, atol=1e-5)


def test_bad_arguments_are_refused_by_name():
    query, key, value, _ = arrays(1, 40, 40, 2, 2, 16)
    with pytest.raises(UnknownNameError, match="cudnn"):
        flex.flex_attention(query, key, value, implementation="cudnn")
    with pytest.raises(ConfigError, match="block_q=48"):
        flex.flex_attention(query, key, value, implementation="pallas_flex", config={"block_q": 48})
    with pytest.raises(ProblemError, match="block_q"):
        flex.create_block_mask(flex.causal, None, None, 64, 64, block_q=48)
    short = flex.create_block_mask(flex.causal, None, None, 30, 40)
    with pytest.raises(ProblemError, match="30 queries"):
        flex.flex_attention(query, key, value, block_mask=short, implementation="pallas_flex")
    with pytest.raises(ProblemError, match="value"):
        flex.flex_attention(query, key, value.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": None}, ["query", "None"]),
        ({"key": object()}, ["key", "object"]),
        ({"query": [[1.0, 2.0]]}, ["query", "[B, T, N, H]", "[1, 2]"]),
        ({"value": jnp.zeros((1, 7, 2, 16))}, ["value", "[1, 7, 2, 16]"]),
        ({"scale": jnp.ones(3)}, ["scale", "[3]"]),
        ({"scale": float("nan")}, ["scale", "nan", "finite"]),
        ({"scale": "0.5"}, ["scale", "'0.5'"]),
        ({"score_mod": 3}, ["score_mod", "3", "(score, b, h, q, k)"]),
        ({"score_mod": lambda score, q: score}, ["score_mod", "5 arguments"]),
        ({"score_mod": lambda s, b, h, q, k: s.sum()}, ["score_mod", "elementwise", "float32[]"]),
        ({"score_mod": lambda s, b, h, q, k: s > 0}, ["score_mod", "floating", "bool"]),
        ({"score_mod": lambda s, b, h, q, k: (s, s)}, ["score_mod", "one array", "tuple"]),
        ({"mask_mod": "causal"}, ["mask_mod", "'causal'", "(b, h, q, k)"]),
        ({"mask_mod": lambda q, k: q >= k}, ["mask_mod", "4 arguments"]),
        ({"mask_mod": lambda b, h, q, k: q - k}, ["mask_mod", "booleans", "int32"]),
        ({"mask_mod": lambda b, h, q, k: (q >= k)[0, 0, 1:]}, ["mask_mod", "elementwise"]),
        ({"mask_mod": flex.document(IDS)}, ["segment_ids", "[2, 150]", "[1, 40]"]),
        ({"mask_mod": lambda b, h, q, k: IDS[b, q] == IDS[b, k]},
         ["mask_mod", "[2, 150]", "Partial"]),
        ({"score_mod": lambda s, b, h, q, k: s + SLOPES[h] * (q - k)},
         ["score_mod", "[2]", "Partial"]),
        ({"score_mod": functools.partial(from_table, jnp.zeros((2, 21)))},
         ["score_mod", "[2, 21]", "Partial"]),
        ({"score_mod": flex.alibi(4)}, ["score_mod", "alibi(4)", "2 heads"]),
        ({"block_mask": flex.create_block_mask(flex.causal, None, None, 40, 40),
          "mask_mod": flex.local_window(3, 0)}, ["block_mask", "causal", "local_window"]),
        ({"block_mask": flex.causal}, ["block_mask", "create_block_mask", "mask_mod"]),
        ({"block_mask": flex.create_block_mask(flex.causal, None, None, 30, 40)}, ["30 queries"]),
        (
            {"block_mask": flex.create_block_mask(flex.causal, 3, None, 40, 40)},
            ["batch 3", "has 1"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("implementation", ["xla", "pallas_flex"])
def test_an_argument_that_is_not_right_is_named_with_its_value(implementation, change, words):
    names = ("query", "key", "value")
    given = dict(zip(names, arrays(1, 40, 40, 2, 2, 16), strict=False)) | change
    with pytest.raises(ProblemError) as caught:
        flex.flex_attention(**given, implementation=implementation)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: flex.local_window(-1, 0), ["left", "-1"]),
        (lambda: flex.prefix(2.5), ["length", "2.5"]),
        (lambda: flex.alibi(0), ["heads", "0"]),
        (lambda: flex.document(jnp.zeros((1, 4))), ["segment_ids", "float32"]),
        (lambda: flex.document(None), ["segment_ids", "None"]),
        (lambda: flex.both(), ["both", "()"]),
        (lambda: flex.either(flex.causal, 3), ["either", "3"]),
        (lambda: flex.create_block_mask(None, None, None, 8, 8), ["mask_mod", "None"]),
        (lambda: flex.create_block_mask(flex.causal, 0, None, 8, 8), ["batch", "0"]),
        (lambda: flex.create_block_mask(flex.causal, None, None, "8", 8), ["seq", "'8'"]),
        (lambda: flex.create_block_mask(lambda b, h: b, None, None, 8, 8), ["4 arguments"]),
    ],
)
def test_a_mask_that_cannot_be_is_refused_when_it_is_made(make, words):
    with pytest.raises(ProblemError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_a_traced_array_from_outside_is_refused_too():
    query, key, value, _ = arrays(2, 40, 40, 2, 2, 16)

    def call(ids):
        return flex.flex_attention(
            query, key, value, mask_mod=lambda b, h, q, k: ids[b, q] == ids[b, k]
        )

    with pytest.raises(ProblemError, match=r"mask_mod reads an array of shape \[2, 40\]"):
        jax.jit(call)(jnp.zeros((2, 40), jnp.int32))


def test_the_mask_of_a_block_mask_may_be_given_again():
    query, key, value, _ = arrays(2, 40, 40, 2, 2, 16)
    blocks = flex.create_block_mask(flex.local_window(3, 0), None, None, 40, 40)
    want = flex.flex_attention(query, key, value, mask_mod=flex.local_window(3, 0))
    got = flex.flex_attention(
        query, key, value, mask_mod=flex.local_window(3, 0), block_mask=blocks
    )
    np.testing.assert_array_equal(got, want)
    ids = jnp.arange(80, dtype=jnp.int32).reshape(2, 40) // 8
    mask = flex.document(ids)
    blocks = flex.create_block_mask(mask, 2, None, 40, 40)
    got = flex.flex_attention(query, key, value, mask_mod=flex.document(ids), block_mask=blocks)
    np.testing.assert_array_equal(got, flex.flex_attention(query, key, value, mask_mod=mask))


def test_a_config_needs_the_implementation_that_it_belongs_to():
    query, key, value, _ = arrays(1, 40, 40, 2, 2, 16)
    for implementation in ("default", "xla"):
        with pytest.raises(ConfigError, match="pallas_flex"):
            flex.flex_attention(query, key, value, implementation=implementation, config=SMALL)
    for nonsense in (3, {"blocks": 2}, {"block_q": "64"}, {1: 2}):
        with pytest.raises(ConfigError, match="config"):
            flex.flex_attention(query, key, value, implementation="pallas_flex", config=nonsense)


def test_lists_are_arrays_and_a_traced_scale_is_a_scale():
    query, key, value, _ = arrays(1, 10, 10, 2, 2, 16)
    want = flex.flex_attention(query, key, value, scale=0.5, mask_mod=flex.causal)
    lists = [np.asarray(array).tolist() for array in (query, key, value)]
    np.testing.assert_allclose(
        flex.flex_attention(*lists, scale=0.5, mask_mod=flex.causal), want, rtol=1e-5
    )
    traced = jax.jit(
        lambda s: flex.flex_attention(query, key, value, scale=s, mask_mod=flex.causal)
    )
    np.testing.assert_allclose(traced(0.5), want, rtol=1e-5, atol=1e-6)
