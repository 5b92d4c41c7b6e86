"""What is special to blockwise attention: blocks of any size give the same answer,
hidden blocks cost nothing, and memory does not grow with seq × kv_seq."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shapetune
from shapetune.cache.key import Device, Problem
from shapetune.kernels.attention._blockwise_forward import _small
from shapetune.kernels.attention._blockwise_tiles import Blocks, Layout
from shapetune.kernels.attention.blockwise import IMPLEMENTATION, blockwise
from shapetune.kernels.exponential import polynomial_exp

from . import dense_attention

CPU = Device("cpu", "test")
GPU = Device("cuda", "test", "9.0")
NAMES = ("out", "lse", "query", "key", "value", "bias")


def make(shape, dtype="float32", value_dim=None, seed=0):
    """Query, key, value and the gradient of the output, from (B, T, S, N, K, H)."""
    batch, rows, columns, heads, kv_heads, dim = shape
    rng = np.random.default_rng(seed)
    value_dim = value_dim or dim
    shapes = (
        (batch, rows, heads, dim),
        (batch, columns, kv_heads, dim),
        (batch, columns, kv_heads, value_dim),
    )
    arrays = [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]
    return arrays, jnp.asarray(rng.standard_normal((batch, rows, heads, value_dim)), "float32")


@functools.partial(jax.jit, static_argnames=("causal", "window", "config"))
def outputs_and_gradients(
    arrays,
    grad_out,
    *,
    causal=False,
    window=None,
    bias=None,
    mask=None,
    q_lengths=None,
    kv_lengths=None,
    config=(),
):
    def loss(query, key, value, bias):
        out, lse = blockwise(
            query,
            key,
            value,
            bias,
            mask,
            q_lengths,
            kv_lengths,
            scale=0.3,
            is_causal=causal,
            local_window_size=window,
            return_residual=True,
            config=dict(config),
        )
        return (out.astype("float32") * grad_out).sum(), (out, lse)

    positions = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    gradients, results = jax.grad(loss, positions, has_aux=True)(*arrays, bias)
    return (*results, *gradients)


def check(arrays, grad_out, config, bar=2e-5, **options):
    found = outputs_and_gradients(arrays, grad_out, config=tuple(config.items()), **options)
    batch, rows, heads, _ = arrays[0].shape
    bias = options.pop("bias", None)
    seen = dense_attention.visible((batch, heads, rows, arrays[1].shape[1]), **options)
    out, lse, gradients = dense_attention.attention(
        *arrays, grad_out, scale=0.3, seen=seen, bias=bias
    )
    for name, got, right in zip(NAMES, found, (out, lse, *gradients), strict=False):
        got = np.asarray(got, np.float64)
        finite = np.isfinite(right)
        np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=name)
        error = np.abs(got[finite] - right[finite]).max(initial=0.0)
        assert error <= bar * max(1.0, np.abs(right[finite]).max(initial=0.0)), (name, error)


def config_of(block_q, block_k, tile_heads=1, exp="polynomial", bwd=None, shift="needed"):
    block_q_bwd, block_k_bwd = bwd or (block_q, block_k)
    return {
        "block_q": block_q,
        "block_k": block_k,
        "tile_heads": tile_heads,
        "exp": exp,
        "shift": shift,
        "compute": "float32",
        "block_q_bwd": block_q_bwd,
        "block_k_bwd": block_k_bwd,
    }


@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    rows=st.sampled_from((1, 33, 70)),
    columns=st.sampled_from((1, 33, 70)),
    block_q=st.sampled_from((16, 64, 128)),
    block_k=st.sampled_from((16, 32, 128)),
    heads=st.sampled_from(((2, 2, 1), (4, 2, 1), (4, 2, 4), (6, 2, 3), (3, 1, 3))),
    causal=st.booleans(),
    window=st.sampled_from((None, (7, 3), (0, 0), (20, 100))),
    lengths=st.booleans(),
    shift=st.sampled_from(("always", "needed")),
)
def test_any_blocks_agree_with_float64(
    rows, columns, block_q, block_k, heads, causal, window, lengths, shift
):
    n_heads, kv_heads, tile_heads = heads
    arrays, grad_out = make((2, rows, columns, n_heads, kv_heads, 16), value_dim=24)
    options = {"causal": causal, "window": window}
    if lengths:
        options["q_lengths"] = jnp.array([rows, rows // 2], "int32")
        options["kv_lengths"] = jnp.array([columns // 2, columns], "int32")
    config = config_of(block_q, block_k, tile_heads, shift=shift)
    check(arrays, grad_out, config, **options)


#: What the queries, keys and values are multiplied with, and whether no shift is needed then.
MAGNITUDES = [
    ((1, 1, 1), True),
    ((3, 1, 1), True),
    ((30, 30, 1), False),
    ((1e30, 1e-30, 1), False),
    ((1e-30, 1e30, 1), False),
    ((1, 1, 1e20), False),
    ((1, 1, 1e-25), False),
    ((1, 1, 0), True),
]


def test_a_softmax_is_shifted_where_its_scores_or_values_may_be_large():
    plain, grad_out = make((1, 70, 90, 2, 1, 8))
    configs = [config_of(32, 32, 2), config_of(32, 32, 2, shift="always")]
    for factors, small in MAGNITUDES:
        arrays = tuple(a * f for a, f in zip(plain, factors, strict=True))
        assert bool(_small(*arrays, 0.3)) is small, factors
        found, right = (
            outputs_and_gradients(arrays, grad_out, config=tuple(config.items()), causal=True)
            for config in configs
        )
        for one, other in zip(found, right, strict=True):
            assert np.isfinite(one).all()
            bar = 3e-5 if small else 1e-6
            np.testing.assert_allclose(one, other, rtol=0, atol=bar * np.abs(other).max())


def test_a_tiny_scale_does_not_hide_large_scores_nor_tiny_queries_a_large_scale():
    (query, key, value), _ = make((1, 8, 8, 1, 1, 8))
    assert not _small(query * 1e18, key * 1e18, value, 1e-25)
    assert not _small(query * 1e-20, key * 1e19, value, 1e6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_counts_as_large(bad):
    arrays, _ = make((1, 8, 8, 1, 1, 8))
    for i in range(3):
        spoilt = [a.at[0, 3, 0, 1].set(bad) if i == n else a for n, a in enumerate(arrays)]
        assert not _small(*spoilt, 0.3)


def test_under_vmap_one_form_of_the_softmax_is_computed_and_not_both():
    arrays, _ = make((3, 40, 40, 2, 1, 8))
    attend = functools.partial(
        blockwise,
        bias=None,
        mask=None,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        scale=0.3,
        is_causal=False,
        local_window_size=None,
        config=config_of(64, 64),
    )

    def single(*one):
        return attend(*(a[None] for a in one))[0]

    program = str(jax.make_jaxpr(jax.vmap(single))(*arrays))
    assert "cond[" in program
    large = (arrays[0].at[1].mul(1e3), *arrays[1:])
    for each in (arrays, large):
        many = jax.jit(jax.vmap(single))(*each)
        for i in range(3):
            np.testing.assert_allclose(many[i], single(*(a[i] for a in each)), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_any_broadcast_has_its_gradient_and_a_mask_hides(causal):
    arrays, grad_out = make((2, 40, 50, 4, 2, 8))
    rng = np.random.default_rng(1)
    for axes in ((2, 4, 40, 50), (1, 4, 1, 50), (2, 1, 40, 1), (1, 1, 1, 1)):
        bias = np.where(rng.random(axes) < 0.1, -np.inf, rng.standard_normal(axes))
        mask = rng.random((2, 1, 40, 50)) < 0.7
        options = {"bias": jnp.asarray(bias, "float32"), "mask": jnp.asarray(mask)}
        check(arrays, grad_out, config_of(16, 16, 2), causal=causal, **options)


def test_a_mask_alone_hides_keys_and_whole_rows():
    arrays, grad_out = make((2, 40, 50, 4, 2, 8))
    mask = np.random.default_rng(1).random((2, 1, 40, 50)) < 0.7
    mask[:, :, [3, 39]] = False
    for shift in ("always", "needed"):
        check(arrays, grad_out, config_of(16, 16, 2, shift=shift), mask=jnp.asarray(mask))


def test_tall_tiles_are_cut_on_the_diagonal_without_a_change_of_the_answer():
    arrays, grad_out = make((1, 120, 120, 2, 1, 8))
    for block_q, block_k, tile_heads in ((120, 40, 1), (120, 32, 2), (64, 16, 1)):
        check(arrays, grad_out, config_of(block_q, block_k, tile_heads), causal=True)
    check(arrays, grad_out, config_of(120, 40), causal=True, window=(50, 0))


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
def test_every_config_of_a_space_gives_the_same_answer(mode):
    problem = Problem.make(
        "attention", seq=300, kv_seq=520, dim=8, heads=4, kv_heads=2, causal=True, mode=mode
    )
    configs = list(IMPLEMENTATION.space(problem, CPU))
    arrays, grad_out = make((1, 300, 520, 4, 2, 8))
    assert len(configs) > 3
    step = max(1, len(configs) // 5)
    for config in configs[::step]:
        check(arrays, grad_out, config, causal=True)


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
def test_spaces_are_small_and_hold_their_default(device, dtype, mode):
    for seq in (1, 33, 400, 600, 1500, 4096, 131072):
        for heads, kv_heads in ((8, 8), (8, 1), (6, 2), (7, 7), (32, 8)):
            problem = Problem.make(
                "attention", seq=seq, dim=80, heads=heads, kv_heads=kv_heads, dtype=dtype, mode=mode
            )
            space = IMPLEMENTATION.space(problem, device)
            assert 1 <= sum(1 for _ in space) <= 400
            assert space.refusal(IMPLEMENTATION.default_config(problem, device)) is None


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_seq_and_not_with_its_square(mode, causal):
    def temporary_bytes(seq):
        problem = Problem.make("attention", seq=seq, dim=8, heads=2, causal=causal, mode=mode)
        config = IMPLEMENTATION.default_config(problem, CPU)
        array = jax.ShapeDtypeStruct((1, seq, 2, 8), "float32")

        def call(query, key, value):
            return blockwise(
                query,
                key,
                value,
                None,
                None,
                None,
                None,
                scale=0.3,
                is_causal=causal,
                local_window_size=None,
                config=config,
            )

        def loss(*args):
            return call(*args).sum()

        function = call if mode == "fwd" else jax.value_and_grad(loss, (0, 1, 2))
        compiled = jax.jit(function).lower(array, array, array).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Four times the length; a tile, which stays as it is, is most of it.
    assert temporary_bytes(32768) < 2.5 * temporary_bytes(8192)


def test_hidden_blocks_are_not_visited():
    layout = Layout(1, 1, 1, 1, Blocks.cut(1024, 128), Blocks.cut(1024, 128), None, 0)
    visits = [layout.columns_seen(i, None) for i in range(8)]
    assert [one.end - one.begin for one in visits] == list(range(1, 9))
    assert [one.partial for one in visits] == [1] * 8
    narrow = Layout(1, 1, 1, 1, Blocks.cut(1024, 128), Blocks.cut(1024, 128), 100, 0)
    assert (
        max(narrow.columns_seen(i, None).end - narrow.columns_seen(i, None).begin for i in range(8))
        == 2
    )
    assert [layout.rows_seeing(j, None, None).begin for j in range(8)] == list(range(8))


@pytest.mark.parametrize("size", [1, 17, 600, 1500, 3000, 4097])
@pytest.mark.parametrize("wanted", [64, 512, 1024])
def test_blocks_cover_an_axis_and_repeat_little(size, wanted):
    blocks = Blocks.cut(size, wanted)
    fresh = [(blocks.fresh(i), blocks.start(i) + blocks.block) for i in range(blocks.count)]
    assert blocks.block <= max(wanted, 1)
    assert fresh[0][0] == 0
    assert fresh[-1][1] == size
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(fresh))
    assert blocks.count * blocks.block - size < 16 * blocks.count


def test_vmap_remat_and_jit_compose_with_the_gradient():
    arrays, grad_out = make((3, 40, 40, 2, 1, 8))
    config = config_of(16, 16)

    def loss(query, key, value, lengths):
        out = blockwise(
            query[None],
            key[None],
            value[None],
            None,
            None,
            None,
            lengths[None],
            scale=0.3,
            is_causal=True,
            local_window_size=None,
            config=config,
        )
        return (out[0] * grad_out[0]).sum()

    lengths = jnp.array([5, 40, 17], "int32")
    gradient = jax.grad(jax.checkpoint(loss), (0, 1, 2))
    batched = jax.jit(jax.vmap(gradient))(*arrays, lengths)
    for i in range(3):
        single = gradient(*(a[i] for a in arrays), lengths[i])
        for one, many in zip(single, batched, strict=True):
            np.testing.assert_allclose(many[i], one, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_has_the_right_gradient_where_its_loops_can_be_reversed(causal):
    arrays, _ = make((1, 20, 20, 2, 1, 8))

    def slope(name, query):
        attend = functools.partial(shapetune.attention, is_causal=causal, implementation=name)
        first = jax.grad(lambda q: jnp.sin(attend(q, *arrays[1:])).sum())
        return jax.grad(lambda q: (first(q) ** 2).sum())(query)

    found, right = (slope(name, arrays[0]) for name in ("blockwise", "xla"))
    np.testing.assert_allclose(found, right, atol=2e-5 * np.abs(right).max())


def test_the_polynomial_is_the_exponential_to_float32_rounding():
    x = np.concatenate([np.linspace(88, -87, 400_001), [-np.inf, -200.0]]).astype("float32")
    found = np.asarray(jax.jit(polynomial_exp)(x), np.float64)
    right = np.exp(x.astype(np.float64))
    # The rounding of x · log2(e) grows with |x|, as does the spacing of x itself.
    bar = 2.5e-7 + 1.2e-7 * np.minimum(np.abs(x), 88.0)
    assert (np.abs(found - right) <= bar * right)[:-1].all()
    assert (found[-2:] == 0).all()
    assert np.isnan(polynomial_exp(jnp.float32("nan")))


def test_a_scale_that_is_an_array_is_refused_with_the_reason():
    problem = Problem.make("attention", seq=64, dim=8, features=("scale[array]",))
    assert "number" in (IMPLEMENTATION.supports(problem, CPU) or "")
    assert IMPLEMENTATION.supports(problem.replace(features=()), CPU) is None
