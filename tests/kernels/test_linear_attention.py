"""Linear attention: the reference against its definition, and what runs everywhere against it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapetune.autotune import verify
from shapetune.cache import Candidate, Problem
from shapetune.cache.errors import ConfigError, ProblemError, UnknownNameError
from shapetune.kernels import current_device, get_op
from shapetune.kernels.linear_attention import linear_attention, reference
from shapetune.kernels.linear_attention.problem import problem_of

from .agree import BARS, candidate, check_agrees, run

OP = get_op("linear_attention")
NAMES = ("scan", "chunked")


def problem(seq, window=-1, **fields):
    base = {"dim": 16, "batch": 2, "heads": 2, "causal": True, "mode": "fwd_bwd"}
    return Problem.make("linear_attention", seq=seq, window=window, **{**base, **fields})


def _grid():
    """A covering set: every pair of values of two fields occurs."""
    seqs = (1, 5, 63, 64, 65, 600)
    windows = itertools.cycle((-1, 0, 16, 64, 1000))
    heads = itertools.cycle(((2, 2), (4, 2), (4, 1)))
    dims = itertools.cycle(((32, 32), (16, 48), (64, 24), (48, 64)))
    words = itertools.cycle(((), ("state",), ("relu", "state"), ("relu",)))
    for seq in (*seqs, *seqs):
        (n, k), (dim, value_dim) = next(heads), next(dims)
        yield problem(
            seq, next(windows), dim=dim, value_dim=value_dim, heads=n, kv_heads=k,
            features=next(words),
        )  # fmt: skip
    yield problem(2048, 64, heads=1, batch=1, dim=64)
    yield problem(2048, -1, heads=2, kv_heads=1, batch=1, dim=32, features=("state",))


@pytest.mark.parametrize("problem", list(_grid()), ids=lambda p: p.label)
def test_chunked_agrees_with_float64(problem):
    exp = candidate(problem, "chunked").config["exp"]
    wished = Candidate("chunked", {"chunk": 32, "span": 2, "exp": exp})
    fits = OP.implementation("chunked").refusal(problem, current_device(), wished.config) is None
    check_agrees(problem, wished if fits else candidate(problem, "chunked"))


@pytest.mark.parametrize("problem", list(_grid())[1::3], ids=lambda p: p.label)
def test_scan_agrees_with_float64(problem):
    check_agrees(problem, candidate(problem, "scan"))


@pytest.mark.parametrize("exp", ["native", "polynomial"])
@pytest.mark.parametrize(("chunk", "span"), [(16, 1), (32, 8), (256, 1)])
def test_the_config_of_chunked_does_not_change_the_result(chunk, span, exp):
    about = problem(333, 16, heads=2, kv_heads=1, features=("state",))
    check_agrees(about, Candidate("chunked", {"chunk": chunk, "span": span, "exp": exp}))


@pytest.mark.parametrize("seq", [512, 8192])
def test_bfloat16_gradients_do_not_drift_with_length(seq):
    about = problem(seq, 64, dtype="bfloat16", dim=32, heads=1, batch=1)
    assert BARS["bfloat16"] <= 0.03
    check_agrees(about, candidate(about, "chunked"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", OP.hard_inputs)
def test_harder_inputs_agree_with_float64(name, kind):
    about = problem(333, 16, features=("state",))
    check_agrees(about, candidate(about, name), kind)


@settings(max_examples=6, deadline=None)
@given(
    seq=st.integers(1, 90),
    window=st.integers(-1, 95),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    words=st.sets(st.sampled_from(["state", "relu"])),
    chunk=st.sampled_from([16, 32]),
    span=st.sampled_from([1, 2]),
    exp=st.sampled_from(["native", "polynomial"]),
)
def test_any_shape_window_and_chunk_agree_with_float64(
    seq, window, kv_heads, group, dim, value_dim, words, chunk, span, exp
):
    about = problem(
        seq, window, kv_heads=kv_heads, heads=kv_heads * group, batch=1, dim=dim,
        value_dim=value_dim, features=tuple(words),
    )  # fmt: skip
    config = {"chunk": chunk, "span": span, "exp": exp if "relu" not in words else "native"}
    if OP.implementation("chunked").refusal(about, current_device(), config) is None:
        check_agrees(about, Candidate("chunked", config))


@pytest.mark.parametrize("kind", ["softmax", "relu"])
@pytest.mark.parametrize("window", [-1, 0, 7, 40, 300])
def test_the_reference_in_groups_is_the_recurrence(kind, window):
    rng = np.random.default_rng(0)
    shapes = (2, 290, 4, 6), (2, 290, 2, 6), (2, 290, 2, 5), (2, 4, 12, 5)
    q, k, v, h = (rng.standard_normal(shape) for shape in shapes)
    output, final = reference.recurrence(q, k, v, h, window_size=window, kind=kind)
    for row, head in itertools.product(range(2), range(2)):
        of = slice(2 * head, 2 * head + 2)
        got = reference.group(
            q[row, :, of], k[row, :, head], v[row, :, head], h[row, of],
            window_size=window, kind=kind,
        )  # fmt: skip
        np.testing.assert_allclose(got.output, output[row, :, of], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(got.final_state, final[row, of], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["softmax", "relu"])
@pytest.mark.parametrize("window", [-1, 3, 200])
def test_the_gradients_of_the_reference_are_those_of_finite_differences(kind, window):
    rng = np.random.default_rng(1)
    shapes = (150, 2, 4), (150, 4), (150, 3), (2, 8, 3)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    weights = rng.standard_normal((150, 2, 3)), rng.standard_normal((2, 8, 3))
    fixed = {"window_size": window, "kind": kind}

    def loss(arrays):
        got = reference.group(*arrays, **fixed)
        return (got.output * weights[0]).sum() + (got.final_state * weights[1]).sum()

    result = reference.group(*arrays, **fixed, weights=weights)
    for i, name in enumerate(("query", "key", "value", "initial_state")):
        along = rng.standard_normal(shapes[i])
        ahead, behind = list(arrays), list(arrays)
        ahead[i], behind[i] = arrays[i] + 1e-6 * along, arrays[i] - 1e-6 * along
        slope = (loss(ahead) - loss(behind)) / 2e-6
        exact = (getattr(result, f"grad_{name}") * along).sum()
        assert abs(slope - exact) < 1e-5 * max(1.0, abs(exact)), name


def _arrays(seq=40, heads=2, kv_heads=2, dtype=jnp.float32):
    about = problem(seq, heads=heads, kv_heads=kv_heads, features=("state",))
    q, k, v, h = OP.make_inputs(about, 0, "normal").arrays
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), h


def test_a_sequence_in_two_halves_is_the_whole():
    q, k, v, h = _arrays()
    whole, end = linear_attention(q, k, v, h, window_size=-1)
    first, state = linear_attention(q[:, :23], k[:, :23], v[:, :23], h, window_size=-1)
    second, last = linear_attention(q[:, 23:], k[:, 23:], v[:, 23:], state, window_size=-1)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, atol=1e-5)
    np.testing.assert_allclose(last, end, atol=1e-5)


def test_nothing_after_a_position_reaches_it_and_nothing_in_its_window():
    q, k, v, h = _arrays()
    before, _ = linear_attention(q, k, v, h, window_size=4)
    changed, _ = linear_attention(q, k, v.at[:, 20].add(1.0), h, window_size=4)
    differs = np.abs(np.asarray(before - changed)).max(axis=(0, 2, 3)) > 0
    assert not differs[:25].any()
    assert differs[25:].all()


@pytest.mark.parametrize("implementation", ["default", *NAMES])
def test_it_runs_inside_jit_vmap_and_grad(implementation):
    q, k, v, h = _arrays()

    def loss(q, h):
        out, state = linear_attention(q, k, v, h, window_size=3, implementation=implementation)
        return jnp.sum(out) + jnp.sum(state)

    grads = jax.jit(jax.grad(loss, (0, 1)))(q, h)
    several = jax.jit(jax.vmap(jax.grad(loss, (0, 1))))(jnp.stack([q, 2 * q]), jnp.stack([h, h]))
    for one, two in zip(grads, several, strict=True):
        np.testing.assert_allclose(one, two[0], atol=1e-4)


def test_the_output_has_the_dtype_of_value_and_the_state_is_float32():
    q, k, v, _ = _arrays(dtype=jnp.bfloat16)
    out, state = linear_attention(q, k, v, window_size=3)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    assert out.shape == q.shape
    assert state.shape == (2, 2, 32, 16)


def test_a_chunked_backward_pass_keeps_no_state_for_each_token():
    about = problem(1024, dim=32, heads=1, batch=1)
    q, k, v, _ = OP.make_inputs(about, 0, "normal").arrays
    bound = OP.bind(about, candidate(about, "chunked"))
    _, pull = jax.vjp(lambda q, k, v: bound(q, k, v, None), q, k, v)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    assert kept < 2 * (q.size + k.size + v.size)


BAD = [
    ({"query": np.zeros((40, 2, 16), np.float32)}, "query must be .B, T, heads, H."),
    ({"key": np.zeros((2, 39, 2, 16), np.float32)}, r"key has shape \[2, 39"),
    ({"value": np.zeros((2, 40, 1, 16), np.float32)}, r"value has shape \[2, 40, 1"),
    ({"value": np.zeros((2, 40, 2, 16), np.float16)}, "value has dtype float16 but query"),
    ({"query": np.zeros((2, 40, 3, 16), np.float32)}, "3 heads, which is not a multiple"),
    ({"query": np.zeros((2, 40, 2, 16), np.int32)}, "query has dtype int32"),
    ({"initial_state": np.zeros((2, 2, 16, 16), np.float32)}, r"initial_state must be float32\[2"),
    ({"window_size": -2}, "window_size must be -1"),
    ({"window_size": 1.5}, "window_size must be an integer, got 1.5"),
    ({"window_size": (3, 0)}, "window_size must be an integer"),
    ({"feature_map": "gelu"}, "feature_map must be one of"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_named(change, message):
    arguments = dict(zip(("query", "key", "value", "initial_state"), _arrays(), strict=True))
    with pytest.raises(ProblemError, match=message):
        linear_attention(**{**arguments, "window_size": 4, **change})


def test_bad_choices_are_named():
    q, k, v, _ = _arrays()
    with pytest.raises(UnknownNameError, match="no implementation 'fast'"):
        linear_attention(q, k, v, window_size=4, implementation="fast")
    with pytest.raises(ConfigError, match="chunk=17"):
        linear_attention(q, k, v, window_size=4, implementation="chunked", config={"chunk": 17})
    with pytest.raises(ConfigError, match=r"needs an implementation.*chunked, pallas"):
        linear_attention(q, k, v, window_size=4, config={"chunk": 16})


def test_a_call_and_a_plan_make_the_same_problem():
    made = OP.make_inputs(
        problem(40, 3, heads=4, kv_heads=2, features=("relu", "state")), 0, "normal"
    )
    found = problem_of(made.arrays, window_size=3, feature_map="relu", mode="fwd_bwd")
    assert found == problem(40, 3, heads=4, kv_heads=2, features=("relu", "state"))


@pytest.mark.parametrize("seq", [1, 16, 700, 8192])
@pytest.mark.parametrize("window", [-1, 64, 10_000])
def test_the_heuristic_is_in_its_space(seq, window):
    for mode in ("fwd", "fwd_bwd"):
        about = problem(seq, window, mode=mode)
        chosen = OP.heuristic(about, current_device())
        OP.require(about, current_device(), chosen)
        assert OP.implementation(chosen.implementation).automatic(about, current_device())


def test_a_mistake_in_the_output_is_caught():
    about = problem(65, 3, mode="fwd")
    outputs, inputs = run(about, candidate(about, "chunked"))
    outputs["output"] = outputs["output"].copy()
    outputs["output"][:, 64:] = 0
    assert max(verify.errors(outputs, OP.expect(about, inputs, 2))) > 0.1
