"""The fused attention kernels, interpreted, against attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapetune.cache import Device, Problem
from shapetune.kernels.attention.pallas_mha import IMPLEMENTATION, pallas_mha

from . import dense_attention as dense
from .agree import interpreted

BARS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2.5e-2}
RTX3090 = Device("cuda", "NVIDIA GeForce RTX 3090", "8.6", 82, 101376, 25 * 10**9)
A100 = Device("cuda", "NVIDIA A100", "8.0", 108, 166912, 80 * 10**9)
H100 = Device("cuda", "NVIDIA H100", "9.0", 132, 232448, 80 * 10**9)
CPU = Device("cpu", "any")


def config_of(fwd=(32, 32), dq=None, dkv=None):
    config = {"block_q": fwd[0], "block_k": fwd[1], "num_warps": 4, "num_stages": 2}
    for name, blocks in (("dq", dq or fwd), ("dkv", dkv or fwd)):
        config[f"block_q_{name}"], config[f"block_k_{name}"] = blocks
    return config | {"num_warps_bwd": 4, "num_stages_bwd": 1}


def check(
    *,
    sizes,
    heads=(2, 2),
    dims=(16, 16),
    batch=1,
    dtype="float32",
    causal=False,
    window=None,
    bias=None,
    mask=None,
    q_lengths=None,
    kv_lengths=None,
    config=None,
    seed=0,
):
    """Asserts that out, log-sum-exp and every gradient are right."""
    rng = np.random.default_rng(seed)
    (seq, kv_seq), (n, k), (dim, value_dim) = sizes, heads, dims

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    query, key = normal(batch, seq, n, dim), normal(batch, kv_seq, k, dim)
    value, grad_out = normal(batch, kv_seq, k, value_dim), normal(batch, seq, n, value_dim)
    full = (batch, n, seq, kv_seq)

    def sized(axes):
        return [size if axis in axes else 1 for axis, size in zip("bnts", full, strict=True)]

    bias = None if bias is None else normal(*sized(bias))
    mask = None if mask is None else jnp.asarray(rng.random(sized(mask)) > 0.5)
    lengths = [
        None if one is None else jnp.asarray(one, jnp.int32) for one in (q_lengths, kv_lengths)
    ]

    def all_of(query, key, value, bias, mask, lengths, grad_out):
        def call(query, key, value, bias):
            return pallas_mha(
                query, key, value, bias, mask, *lengths,
                scale=dim**-0.5, is_causal=causal, local_window_size=window,
                return_residual=True, config=config or config_of(),
            )  # fmt: skip

        (out, lse), pull = jax.vjp(call, query, key, value, bias)
        return out, lse, pull((grad_out, jnp.zeros_like(lse)))

    out, lse, gradients = interpreted(all_of, query, key, value, bias, mask, lengths, grad_out)
    seen = dense.visible(
        full, causal=causal, window=window, mask=mask, q_lengths=q_lengths, kv_lengths=kv_lengths
    )
    right, right_lse, rights = dense.attention(
        query, key, value, grad_out, scale=dim**-0.5, seen=seen, bias=bias
    )
    bar = BARS[dtype]
    np.testing.assert_allclose(np.asarray(lse, np.float64), right_lse, rtol=bar, atol=10 * bar)
    for got, want in zip((out, *gradients), (right, *rights), strict=True):
        if got is not None:
            assert got.dtype == dtype
            error = np.abs(np.asarray(got, np.float64) - want).max()
            assert error <= bar * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("sizes", [(1, 1), (1, 33), (33, 1), (64, 64), (129, 70), (70, 129)])
def test_any_number_of_queries_and_keys_is_right(sizes):
    check(sizes=sizes, causal=sizes == (129, 70))


@pytest.mark.parametrize(
    ("sizes", "dims", "causal"),
    [
        ((600, 600), (96, 96), True),
        ((1500, 1500), (128, 128), False),
        ((3000, 1500), (64, 64), False),
        ((129, 129), (256, 256), True),
    ],
)
def test_long_and_wide_attention_is_right(sizes, dims, causal):
    config = config_of((128, 128), (128, 64), (64, 128))
    check(sizes=sizes, dims=dims, causal=causal, heads=(1, 1), config=config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_right(dtype):
    check(sizes=(70, 100), dtype=dtype, causal=True, heads=(4, 2))


@pytest.mark.parametrize("dims", [(32, 32), (80, 96), (40, 16), (16, 64)])
def test_head_sizes_that_are_no_power_of_two_are_right(dims):
    check(sizes=(40, 50), dims=dims)


@pytest.mark.parametrize("blocks", [((16, 64), (64, 16), (32, 64)), ((64, 32), (16, 16), (64, 16))])
def test_blocks_of_each_kernel_are_its_own(blocks):
    check(sizes=(150, 100), causal=True, heads=(4, 1), batch=2, config=config_of(*blocks))


@pytest.mark.parametrize(
    ("causal", "window"),
    [(False, (5, 20)), (False, (0, 0)), (True, (40, 0)), (False, (200, 3)), (False, (3, 200))],
)
def test_a_window_hides_what_lies_outside(causal, window):
    check(sizes=(129, 150), causal=causal, window=window)


def test_rows_that_a_window_leaves_no_key_are_zeros():
    check(sizes=(150, 40), window=(10, 0))


def test_lengths_hide_keys_and_zero_rows():
    check(
        sizes=(70, 90), batch=4, heads=(2, 1), q_lengths=(70, 0, 33, 1), kv_lengths=(90, 5, 0, 64)
    )


@pytest.mark.parametrize(
    ("bias", "mask"),
    [("bnts", None), ("nts", "ts"), ("bs", "bnts"), ("s", "bs"), ("t", None), ("", "n")],
)
def test_bias_and_mask_of_any_broadcast_and_the_gradient_of_the_bias(bias, mask):
    check(sizes=(60, 50), batch=2, heads=(4, 2), bias=bias, mask=mask, causal=bias == "bnts")


def test_a_bias_of_minus_infinity_hides_a_key_without_nan():
    bias = jnp.zeros((1, 1, 40, 40)).at[..., 7, :].set(-jnp.inf).at[..., :, 3].set(-jnp.inf)
    query = jnp.ones((1, 40, 2, 16))

    def loss(query, bias):
        out = pallas_mha(
            query, query, query, bias, None, None, None,
            scale=1.0, is_causal=False, local_window_size=None, config=config_of(),
        )  # fmt: skip
        return out.sum(), out

    gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(query, bias)
    assert (out[:, 7] == 0).all()
    assert all(jnp.isfinite(array).all() for array in (*gradients, out))


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dim=st.integers(1, 48),
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 60)),
    blocks=st.lists(st.sampled_from([16, 32, 64]), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
def test_drawn_shapes_and_blocks_are_right(sizes, heads, dim, causal, window, blocks, seed):
    config = config_of(tuple(blocks[:2]), tuple(blocks[2:4]), tuple(blocks[4:]))
    check(
        sizes=sizes, heads=heads, dims=(dim, dim), causal=causal, window=window,
        config=config, seed=seed,
    )  # fmt: skip


def test_vmap_maps_the_kernel_over_a_new_axis():
    query = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, 40, 2, 16)), jnp.float32)

    def call(query):
        return pallas_mha(
            query, query, query, None, None, None, None,
            scale=0.25, is_causal=True, local_window_size=None, config=config_of(),
        )  # fmt: skip

    np.testing.assert_allclose(jax.vmap(call)(query)[1], call(query[1]), atol=1e-6)


def problem_of(**fields):
    given = {"seq": 1024, "dim": 64, "dtype": "bfloat16", "batch": 4, "mode": "fwd_bwd"}
    return Problem.make("attention", **(given | fields))


@pytest.mark.parametrize("device", [RTX3090, A100, H100, CPU])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_config_is_in_the_space(device, dim, dtype):
    for seq in (1, 33, 1500):
        problem = problem_of(dim=dim, dtype=dtype, seq=seq)
        config = IMPLEMENTATION.default_config(problem, device)
        assert IMPLEMENTATION.refusal(problem, device, config) is None


def test_forward_alone_has_no_backward_parameters():
    space = IMPLEMENTATION.space(problem_of(mode="fwd"), RTX3090)
    assert set(space.choices) == {"block_q", "block_k", "num_warps", "num_stages"}


def test_no_block_is_larger_than_the_padded_sequence():
    space = IMPLEMENTATION.space(problem_of(seq=40, kv_seq=20, mode="fwd"), RTX3090)
    assert space.choices["block_q"] == (32, 64)
    assert space.choices["block_k"] == (32,)


def test_a_smaller_device_has_a_smaller_space():
    problem = problem_of(dim=128, dtype="float32", mode="fwd")
    small, large = (list(IMPLEMENTATION.space(problem, device)) for device in (RTX3090, H100))
    assert 0 < len(small) < len(large)


@pytest.mark.parametrize(
    ("fields", "device", "words"),
    [
        ({"dim": 512}, RTX3090, "dim 512"),
        ({}, Device("cuda", "V100", "7.0", 80, 98304), "compute capability 8.0"),
        ({}, Device("tpu", "TPU v5"), "tpu"),
        ({"features": ("sinks",)}, RTX3090, "sinks"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(fields, device, words):
    assert words in IMPLEMENTATION.supports(problem_of(**fields), device)


def test_a_cpu_never_chooses_it_unasked():
    assert not IMPLEMENTATION.automatic(problem_of(), CPU)
    assert IMPLEMENTATION.automatic(problem_of(), RTX3090)
