"""Every implementation of attention against the float64 reference and against jax.nn."""

import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shapetune
from shapetune.autotune import verify
from shapetune.cache import Problem
from shapetune.cache.errors import (
    ConfigError,
    ProblemError,
    ShapetuneError,
    UnknownNameError,
    UnsupportedError,
)
from shapetune.kernels import current_device, get_op

from .agree import candidate, check_agrees, run

ATTENTION = get_op("attention")
NAMES = ("xla", "blockwise", "llvm", *(["tokamax"] if importlib.util.find_spec("tokamax") else []))
#: Those that take a bias and a mask.
BIASED = tuple(name for name in NAMES if name != "llvm")
#: The Pallas kernels are interpreted on a CPU: right, and too slow for the large shapes.
ALL = (*NAMES, "pallas_mha", "pallas_flex")


def _grid():
    """A covering set: every pair of values of two fields occurs."""
    shapes = [
        (1, 1),
        (33, 33),
        (129, 129),
        (600, 600),
        (1500, 1500),
        (33, 600),
        (600, 129),
        (1, 129),
    ]
    dtypes = itertools.cycle(["float32", "bfloat16", "float16"])
    heads = itertools.cycle([(8, 8), (8, 2), (8, 1), (2, 2)])
    dims = itertools.cycle([32, 64, 80, 128])
    for (seq, kv_seq), causal in itertools.product(shapes, (False, True)):
        for dtype in (next(dtypes), next(dtypes)):
            n, k = next(heads)
            if seq == 1500:
                n, k = n // 4 or 1, max(1, k // 4)
            yield Problem.make(
                "attention", seq=seq, kv_seq=kv_seq, dim=next(dims), dtype=dtype, causal=causal,
                heads=n, kv_heads=k, batch=2 if seq < 100 else 1, mode="fwd_bwd",
            )  # fmt: skip
        next(dims)


FEATURES = [
    {"window": (16, 0), "causal": True},
    {"window": (40, 7)},
    {"window": (5, 0), "seq": 200, "kv_seq": 150},  # the last rows see no key
    {"features": ("bias[bnts]",)},
    {"features": ("bias[ts]",), "causal": True},
    {"features": ("bias[s]", "mask[bs]")},
    {"features": ("mask[bnts]",)},
    {"features": ("mask[ts]",), "causal": True, "dtype": "bfloat16"},
    {"features": ("kv_lengths",)},
    {"features": ("kv_lengths", "q_lengths"), "causal": True},
    {"value_dim": 48},
    {"value_dim": 16, "kv_heads": 1},
]


def _served(name, problem):
    """Whether an implementation claims to serve a problem."""
    return ATTENTION.implementation(name).supports(problem, current_device()) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [(n, p) for n in NAMES for p in _grid() if n != "tokamax" or _served(n, p)],
    ids=lambda o: getattr(o, "label", o),
)
def test_outputs_and_gradients_agree_with_float64(name, problem):
    check_agrees(problem, candidate(problem, name))


def _claimed(name, features):
    """Whether an implementation claims to know these features."""
    return _served(name, Problem.make("attention", seq=40, dim=16, features=features))


@pytest.mark.parametrize(
    ("name", "fields"),
    [(n, f) for n in ALL for f in FEATURES if _claimed(n, f.get("features", ()))],
    ids=str,
)
def test_every_argument_agrees_with_float64(name, fields):
    base = {"seq": 150, "dim": 32, "batch": 2, "heads": 4, "kv_heads": 2, "mode": "fwd_bwd"}
    problem = Problem.make("attention", **{**base, **fields})
    check_agrees(problem, candidate(problem, name), slices=4)


#: Without a causal mask keys that are alike are hardest; interpreted kernels are slow.
HARDER = [
    *itertools.product(NAMES, [("float32", True), ("bfloat16", True), ("bfloat16", False)]),
    *itertools.product(("pallas_mha", "pallas_flex"), [("bfloat16", False)]),
]


@pytest.mark.parametrize(("name", "how"), HARDER)
@pytest.mark.parametrize("kind", ATTENTION.hard_inputs)
def test_harder_inputs_agree_with_float64(name, how, kind):
    """As closely as a search wants it of a winner, gradients too."""
    dtype, causal = how
    seq = 333 if name in NAMES else 120
    problem = Problem.make(
        "attention", seq=seq, dim=64, heads=2, dtype=dtype, causal=causal, mode="fwd_bwd"
    )
    outputs, inputs = run(problem, candidate(problem, name), kind)
    expected = ATTENTION.expect(problem, inputs, 2)
    found = verify.check(outputs, expected, verify.tolerances(problem, None, expected))
    assert found.rel_err <= found.tolerance, found


def _arrays(seq=40, kv_seq=56, heads=4, kv_heads=2, dim=16, batch=2, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (
        (batch, seq, heads, dim),
        (batch, kv_seq, kv_heads, dim),
        (batch, kv_seq, kv_heads, dim),
    )
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


LENGTHS = jnp.array([17, 56], jnp.int32)
CALLS = [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"bias": jnp.sin(jnp.arange(40 * 56.0)).reshape(1, 1, 40, 56)},
    {"bias": jnp.sin(jnp.arange(4 * 56.0)).reshape(4, 1, 56)},
    {"mask": (jnp.arange(40 * 56) % 3 > 0).reshape(1, 1, 40, 56)},
    {"mask": jnp.arange(56).reshape(1, 56) < 50},
    {"key_value_seq_lengths": LENGTHS},
    {"query_seq_lengths": jnp.array([40, 3], jnp.int32), "key_value_seq_lengths": LENGTHS},
    {"local_window_size": 9},
    {"local_window_size": (4, 20), "scale": 2.0},
    {"local_window_size": (11, 3), "is_causal": True},
]


WORDS = {
    "bias": "bias[ts]",
    "mask": "mask[ts]",
    "query_seq_lengths": "q_lengths",
    "key_value_seq_lengths": "kv_lengths",
}


def _calls():
    """Every call with every implementation that claims what the call needs."""
    for name in ("default", *ALL):
        for options in CALLS:
            words = tuple(sorted(WORDS[o] for o in options if o in WORDS))
            if name == "default" or _claimed(name, words):
                yield name, options


@pytest.mark.parametrize(
    ("name", "options"), list(_calls()), ids=lambda o: o if isinstance(o, str) else "+".join(o)
)
def test_a_call_means_what_it_means_in_jax_nn(name, options):
    arrays = _arrays()
    want = jax.nn.dot_product_attention(*arrays, **options)
    got = shapetune.attention(*arrays, **options, implementation=name)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("name", ["default", *(n for n in ALL if _claimed(n, ("residual",)))])
def test_inputs_without_batch_and_the_residual(name):
    query, key, value = (a[0] for a in _arrays())
    want, want_residual = jax.nn.dot_product_attention(query, key, value, return_residual=True)
    got, residual = shapetune.attention(
        query, key, value, return_residual=True, implementation=name
    )
    assert got.shape == (40, 4, 16)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(residual, want_residual, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [*BIASED, "pallas_mha"])
def test_rows_that_see_no_key_are_zeros_with_zero_gradients(name):
    query, key, value = _arrays(seq=8, kv_seq=8)
    mask = jnp.ones((1, 1, 8, 8), bool).at[:, :, 3].set(False)
    bias = jnp.zeros((1, 1, 8, 8)).at[:, :, 5].set(-jnp.inf)

    def total(q, k, v):
        out = shapetune.attention(q, k, v, bias, mask, implementation=name)
        return out.sum(), out

    (_, out), grads = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)
    assert (out[:, (3, 5)] == 0).all()
    assert (jnp.abs(out[:, 4]) > 0).any()
    for grad in grads:
        assert jnp.isfinite(grad).all()
    assert (grads[0][:, (3, 5)] == 0).all()


@pytest.mark.parametrize("name", [*NAMES, "pallas_mha"])
def test_no_length_at_all_gives_zeros(name):
    arrays = _arrays()
    out = shapetune.attention(
        *arrays, key_value_seq_lengths=jnp.array([0, 56], jnp.int32), implementation=name
    )
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()


def test_a_traced_scale_goes_through_and_has_a_gradient():
    arrays = _arrays()

    def total(attend, scale):
        return jnp.sin(attend(*arrays, scale=scale)).sum()

    for scale in (0.25, 1.5):
        want = jax.value_and_grad(lambda s: total(jax.nn.dot_product_attention, s))(scale)
        got = jax.value_and_grad(lambda s: total(shapetune.attention, s))(scale)
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_numpy_inputs_and_lists_are_taken():
    arrays = [np.asarray(a) for a in _arrays()]
    want = jax.nn.dot_product_attention(*arrays)
    np.testing.assert_allclose(shapetune.attention(*arrays), want, rtol=2e-5, atol=2e-5)
    lists = [a[0, :4].tolist() for a in arrays]
    assert shapetune.attention(*lists).shape == (4, 4, 16)


BAD = [
    (lambda q, k, v: (q, k.astype(jnp.bfloat16), v), {}, ["key", "bfloat16", "float32"]),
    (lambda q, k, v: (q.astype(jnp.int32),) * 3, {}, ["query", "int32", "cast"]),
    (lambda q, k, v: (q, k[..., :8], v), {}, ["key", "[2, 56, 2, 8]"]),
    (lambda q, k, v: (q, k, v[:, :5]), {}, ["value", "[2, 5, 2, 16]"]),
    (lambda q, k, v: (q[:, :, :3], k, v), {}, ["3", "2"]),
    (lambda q, k, v: (q[:, :0], k, v), {}, ["query", "empty"]),
    (lambda q, k, v: (q[0, 0], k, v), {}, ["query", "axes"]),
    (lambda q, k, v: (q, k, v), {"mask": jnp.ones((1, 1, 40, 56))}, ["mask", "boolean", "bias"]),
    (lambda q, k, v: (q, k, v), {"bias": jnp.ones((1, 3, 40, 56))}, ["bias", "[1, 3, 40, 56]"]),
    (lambda q, k, v: (q, k, v), {"local_window_size": -1}, ["local_window_size", "-1"]),
    (lambda q, k, v: (q, k, v), {"local_window_size": [1, 2, 3]}, ["local_window_size"]),
    (lambda q, k, v: (q, k, v), {"scale": float("nan")}, ["scale", "nan"]),
    (lambda q, k, v: (q, k, v), {"scale": jnp.ones(3)}, ["scale", "[3]"]),
    (lambda q, k, v: (q, k, v), {"scale": "big"}, ["scale", "big"]),
    (lambda q, k, v: (q, k, v), {"is_causal": 1.5}, ["is_causal", "1.5"]),
    (lambda q, k, v: (q, k, v), {"key_value_seq_lengths": jnp.ones(3, jnp.int32)}, ["key_value_seq_lengths", "[2]"]),
    (lambda q, k, v: (q, k, v), {"query_seq_lengths": jnp.ones(2)}, ["query_seq_lengths", "int32"]),
    (lambda q, k, v: ("text", k, v), {}, ["query", "str"]),
    (lambda q, k, v: (None, k, v), {}, ["query", "None"]),
    (lambda q, k, v: (q, k, v), {"scale": 10**400}, ["scale", "finite"]),
    (lambda q, k, v: (q, k, v), {"bias": jnp.ones((1, 1, 1, 40, 56))}, ["bias", "[1, 1, 1, 40, 56]"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "words"), BAD)
def test_a_bad_argument_is_named_with_its_value(change, options, words):
    with pytest.raises(ProblemError) as caught:
        shapetune.attention(*change(*_arrays()), **options)
    for word in words:
        assert word in str(caught.value)


def test_a_bad_name_or_config_says_what_there_is():
    arrays = _arrays()
    with pytest.raises(UnknownNameError, match=r"flash.*blockwise"):
        shapetune.attention(*arrays, implementation="flash")
    with pytest.raises(ConfigError, match="block_q=7"):
        shapetune.attention(*arrays, implementation="blockwise", config={"block_q": 7})
    with pytest.raises(ConfigError, match="tile"):
        shapetune.attention(*arrays, implementation="blockwise", config={"tile": 1})
    with pytest.raises(ConfigError, match="implementation"):
        shapetune.attention(*arrays, config={"block_q": 64})
    with pytest.raises(ConfigError, match="config"):
        shapetune.attention(*arrays, implementation="blockwise", config=3)
    assert issubclass(UnsupportedError, ShapetuneError)


def test_too_large_scores_are_refused_by_name_before_they_fail():
    huge = Problem.make("attention", seq=2**20, dim=64)
    reason = ATTENTION.implementation("xla").supports(huge, current_device())
    assert "GiB" in reason
    assert ATTENTION.heuristic(huge, current_device()).implementation == "llvm"
    biased = huge.replace(features=("bias[s]",))
    assert ATTENTION.heuristic(biased, current_device()).implementation == "blockwise"


def test_flops_and_traffic_count_what_is_visible():
    full = Problem.make("attention", seq=512, dim=64, batch=2)
    causal = full.replace(causal=True)
    assert ATTENTION.flops(full) == 4 * 2 * 8 * 512 * 512 * 64
    assert ATTENTION.flops(causal) == 4 * 2 * 8 * (512 * 513 / 2) * 64
    assert ATTENTION.flops(full.replace(window=(3, 0))) == 4 * 16 * (512 * 4 - 6) * 64
    assert ATTENTION.flops(full.replace(mode="fwd_bwd")) == 3.5 * ATTENTION.flops(full)
    assert ATTENTION.traffic(full) == 4 * 2 * 512 * 8 * 64 * 4


def test_equal_windows_are_one_problem():
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _arrays(40, 40)]
    from shapetune.kernels.attention.problem import problem_of

    def problem(window, causal):
        return problem_of((*arrays, None, None, None, None), is_causal=causal, window=window)

    assert problem((100, 100), False) == problem(None, False)
    assert problem((7, 3), True) == problem((7, 0), True) == problem((7, 99), True)
    assert problem((7, 3), False) != problem((7, 0), False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [56, 57, 99, 1000])
def test_a_length_beyond_the_keys_sees_all_keys_and_no_padding(name, length):
    arrays = _arrays()
    lengths = jnp.full(2, length, jnp.int32)
    got = shapetune.attention(*arrays, key_value_seq_lengths=lengths, implementation=name)
    want = jax.nn.dot_product_attention(*arrays)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", BIASED)
def test_an_integer_bias_is_taken(name):
    arrays = _arrays()
    bias = jnp.arange(56).reshape(1, 1, 1, 56) % 3
    got = shapetune.attention(*arrays, bias, implementation=name)
    want = jax.nn.dot_product_attention(*arrays, bias)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
