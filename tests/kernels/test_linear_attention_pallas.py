"""The Pallas kernels of linear attention, interpreted on a CPU, against float64."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapetune.cache import Device, Problem
from shapetune.kernels import current_device, get_op
from shapetune.kernels.linear_attention import linear_attention

from .agree import candidate, check_agrees

OP = get_op("linear_attention")
GPU = Device("cuda", "NVIDIA GeForce RTX 3090", "8.6", 82, 101376, 25_300_000_000, "")
INTERPRETED = {"chunk": 16, "value_tile": 16}


def problem(seq, window=-1, **fields):
    base = {"dim": 16, "batch": 1, "heads": 2, "causal": True, "mode": "fwd_bwd"}
    return Problem.make("linear_attention", seq=seq, window=window, **{**base, **fields})


CASES = [
    problem(1),
    problem(5, 0, features=("state",)),
    problem(64, 16, dim=24, value_dim=20, heads=2, kv_heads=1, features=("state",)),
    problem(65, -1, dim=32, heads=2, kv_heads=1),
    problem(40, 3, value_dim=48, kv_heads=1, features=("relu", "state")),
    problem(20, 100, features=("state",)),
    problem(70, 5, dtype="bfloat16", features=("state",)),
]
#: Rounding must not grow with the length: the bars are those of the short ones.
LONG = [
    problem(600, 16, dim=32, heads=1, features=("state",)),
    problem(2048, 64, dim=32, heads=1),
    problem(512, 64, dim=32, heads=1, dtype="bfloat16"),
    problem(8192, 64, dim=32, heads=1, dtype="bfloat16"),
]


@pytest.mark.parametrize("about", CASES, ids=lambda p: p.label)
def test_the_kernels_agree_with_float64(about):
    check_agrees(about, candidate(about, "pallas", INTERPRETED))


@pytest.mark.parametrize("about", LONG, ids=lambda p: p.label)
def test_the_kernels_agree_with_float64_at_length(about):
    check_agrees(about, candidate(about, "pallas", {"chunk": 128, "value_tile": 32}))


@pytest.mark.parametrize("about", [CASES[2], CASES[3]], ids=lambda p: p.label)
def test_the_fused_forward_pass_agrees_with_float64(about):
    fused = {**INTERPRETED, "variant": "fused"}
    check_agrees(about.replace(mode="fwd"), candidate(about, "pallas", fused))


@pytest.mark.parametrize("kind", OP.hard_inputs)
def test_harder_inputs_agree_with_float64(kind):
    about = problem(50, 3, features=("state",))
    check_agrees(about, candidate(about, "pallas", INTERPRETED), kind)


def test_a_scanned_backward_pass_agrees_with_float64():
    about = problem(40, 5, kv_heads=1, features=("state",))
    check_agrees(about, candidate(about, "pallas_scanbwd", INTERPRETED))


@settings(max_examples=3, deadline=None)
@given(
    seq=st.integers(1, 50),
    window=st.integers(-1, 55),
    group=st.integers(1, 2),
    dim=st.integers(1, 20),
    value_dim=st.integers(1, 20),
    words=st.sets(st.sampled_from(["state", "relu"])),
)
def test_any_shape_and_window_agrees_with_float64(seq, window, group, dim, value_dim, words):
    about = problem(
        seq, window, heads=group, kv_heads=1, dim=dim, value_dim=value_dim, features=tuple(words)
    )
    check_agrees(about, candidate(about, "pallas", INTERPRETED))


def test_a_cpu_is_never_given_an_interpreted_kernel():
    usable = OP.usable(problem(512), current_device())
    if current_device().platform == "cpu":
        assert "pallas" not in usable
    assert "pallas" in OP.usable(problem(512), GPU)
    assert "pallas_scanbwd" not in OP.usable(problem(512), GPU)


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
def test_the_default_config_is_in_the_space(dim, dtype, mode):
    for seq in (1, 65, 8192):
        about = problem(seq, 64, dim=dim, dtype=dtype, mode=mode)
        one = OP.implementation("pallas")
        assert one.refusal(about, GPU, one.default_config(about, GPU)) is None


def test_wide_heads_are_refused_by_name():
    reason = OP.implementation("pallas").supports(problem(64, dim=512), GPU)
    assert "heads of up to 256" in reason


@pytest.mark.parametrize("dim", [32, 80])
@pytest.mark.parametrize("variant", ["parallel", "fused"])
def test_forward_and_backward_lower_for_a_gpu(dim, variant):
    """Sizes that are no powers of two, or primitives without a rule, fail here."""
    about = problem(300, 64, dim=dim, heads=4, kv_heads=2, features=("state",))
    bound = OP.bind(about, candidate(about, "pallas", {"variant": variant}))
    arrays = OP.make_inputs(about, 0, "normal").arrays

    def loss(*arrays):
        out, state = bound(*arrays)
        return jnp.sum(out) + jnp.sum(state)

    kind = jax.sharding.AbstractDevice("NVIDIA A100", None, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    one_tile = dim == 32
    assert ("linear_attention_key_value_gradient" in text) == one_tile
    assert ("linear_attention_value_gradient" in text) == (not one_tile)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["parallel", "fused"])
def test_compiled_kernels_agree_with_float64_on_a_gpu(dim, dtype, variant):
    for seq, window in ((65, 0), (2048, 64)):
        about = problem(seq, window, dim=dim, dtype=dtype, heads=4, kv_heads=2, features=("state",))
        check_agrees(about, candidate(about, "pallas", {"variant": variant}))


@pytest.mark.gpu
def test_the_default_runs_on_a_gpu():
    q, k, v, h = OP.make_inputs(problem(600, features=("state",)), 0, "normal").arrays
    out, state = linear_attention(q, k, v, h, window_size=64)
    assert out.shape == v.shape
    assert state.shape == h.shape
