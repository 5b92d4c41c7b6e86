"""`llvm`: what its kernels must get right beyond the tests that all implementations share."""

import concurrent.futures
import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shapetune
from shapetune.cache import Problem
from shapetune.kernels import checkup, current_device, get_op
from shapetune.kernels.attention import llvm
from shapetune.kernels.llvm import call, jit
from shapetune.kernels.llvm.code import Machine

from . import dense_attention
from .agree import candidate, check_agrees

OP = get_op("attention")
#: Vectors as other processors have them: AVX2, NEON, and none that exists (LLVM cuts it up).
MACHINES = [Machine(8, 16), Machine(4, 32), Machine(32, 32)]
#: Such as multiply pairs of bfloat16; not by the instruction, which not every processor has.
PAIRING = [Machine(16, 32, "plain"), Machine(8, 16, "plain")]
#: Largest error over the largest right value: roundings of inputs to products.
BFLOAT16_BAR = 1e-2


def make(batch, rows, columns, heads, kv_heads, dim, value_dim=None, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, rows, heads, dim),
        (batch, columns, kv_heads, dim),
        (batch, columns, kv_heads, value_dim or dim),
        (batch, rows, heads, value_dim or dim),
    ]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def attend(
    query, key, value, config=None, causal=False, window=None, lengths=(None, None), scale=0.3
):
    return llvm.llvm(
        query, key, value, None, None, *lengths, scale=scale, is_causal=causal,
        local_window_size=window, return_residual=True,
        config=config or {"block_q": 64, "block_k": 64, "block_k_bwd": 64},
    )  # fmt: skip


def check(arrays, bar=2e-5, **options):
    """Output, log-sum-exp and gradients against float64."""
    *given_arrays, grad_out = arrays
    (out, lse), back = jax.vjp(lambda *a: attend(*a, **options), *given_arrays)
    gradients = back((grad_out, jnp.zeros_like(lse)))
    query, key = given_arrays[:2]
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    q_lengths, kv_lengths = options.get("lengths", (None, None))
    seen = dense_attention.visible(
        shape, causal=options.get("causal", False), window=options.get("window"),
        q_lengths=q_lengths, kv_lengths=kv_lengths,
    )  # fmt: skip
    scale = options.get("scale", 0.3)
    right_out, right_lse, right = dense_attention.attention(*arrays, scale=scale, seen=seen)
    sees = np.isfinite(right_lse)
    out, lse, *gradients = (np.asarray(x, "float64") for x in (out, lse, *gradients))
    np.testing.assert_array_equal(np.isfinite(lse), sees)
    np.testing.assert_allclose(lse[sees], right_lse[sees], rtol=bar, atol=bar)
    expected = (right_out, *right[:3])
    # Where terms cancel, the rounding of sums of up to 80 products is left.
    least = 0.1 * max(np.abs(other).max() for other in expected)
    for one, other in zip((out, *gradients), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bar * max(np.abs(other).max(), least))


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    rows=st.sampled_from((1, 33, 64, 130)),
    columns=st.sampled_from((1, 33, 70, 200)),
    block_q=st.sampled_from((64, 128)),
    block_k=st.sampled_from((16, 64, 128)),
    heads=st.sampled_from(((2, 2), (4, 2), (3, 1))),
    dims=st.sampled_from(((16, 24), (7, 33), (80, 80))),
    causal=st.booleans(),
    window=st.sampled_from((None, (7, 3), (0, 0), (20, 100))),
    lengths=st.booleans(),
)
def test_any_shape_and_blocks_agree_with_float64(
    rows, columns, block_q, block_k, heads, dims, causal, window, lengths
):
    options = {"causal": causal, "window": window}
    if lengths:
        options["lengths"] = (
            jnp.array([rows, rows // 2], "int32"),
            jnp.array([columns // 2, columns + 5], "int32"),
        )
    config = {"block_q": block_q, "block_k": block_k, "block_k_bwd": block_k}
    check(make(2, rows, columns, *heads, *dims), config=config, **options)


@pytest.mark.parametrize("machine", MACHINES, ids=repr)
def test_kernels_for_other_processors_give_the_same(machine, monkeypatch):
    monkeypatch.setattr(jit, "machine", lambda: machine)
    check(make(1, 70, 90, 2, 1, 20, 36), causal=True)


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    machine=st.sampled_from(PAIRING),
    rows=st.sampled_from((1, 33, 64, 131)),
    columns=st.sampled_from((1, 33, 70, 201)),
    block_k=st.sampled_from((15, 64, 128)),
    heads=st.sampled_from(((2, 2), (3, 1))),
    dims=st.sampled_from(((16, 24), (7, 33))),
    causal=st.booleans(),
    window=st.sampled_from((None, (7, 3), (0, 0), (20, 101))),
    lengths=st.booleans(),
)
def test_products_of_pairs_agree_with_float64(
    machine, rows, columns, block_k, heads, dims, causal, window, lengths
):
    options = {"causal": causal, "window": window}
    if lengths:
        options["lengths"] = (
            jnp.array([rows, rows // 2], "int32"),
            jnp.array([columns // 2, columns + 5], "int32"),
        )
    config = {"block_q": 64, "block_k": block_k, "block_k_bwd": block_k}
    arrays = make(2, rows, columns, *heads, *dims, dtype="bfloat16")
    with mock.patch.object(jit, "machine", return_value=machine):
        check(arrays, BFLOAT16_BAR, config=config, **options)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_products_of_pairs_take_any_scale(scale, monkeypatch):
    monkeypatch.setattr(jit, "machine", lambda: PAIRING[0])
    check(make(1, 70, 91, 2, 1, 16, dtype="bfloat16"), BFLOAT16_BAR, causal=True, scale=scale)


def test_padding_that_is_no_number_does_not_reach_products_of_pairs(monkeypatch):
    monkeypatch.setattr(jit, "machine", lambda: PAIRING[0])
    query, key, value, _ = make(1, 40, 64, 2, 2, 16, dtype="bfloat16")
    lengths = (None, jnp.array([21], "int32"))
    clean, _ = attend(query, key, value, lengths=lengths)
    key, value = (array.at[:, 21:].set(jnp.nan) for array in (key, value))
    spoilt, _ = attend(query, key, value, lengths=lengths)
    np.testing.assert_array_equal(clean, spoilt)


@pytest.mark.skipif(jit.machine().dots is None, reason="needs a processor with AVX512-BF16")
def test_the_instruction_for_pairs_gives_what_others_give(monkeypatch):
    arrays = make(1, 70, 91, 2, 2, 24, 40, dtype="bfloat16")

    def all_of():
        (out, lse), back = jax.vjp(lambda *a: attend(*a, causal=True), *arrays[:3])
        return (out, lse, *back((arrays[3], jnp.zeros_like(lse))))

    found = all_of()
    monkeypatch.setattr(jit, "machine", lambda: PAIRING[0])
    for one, other in zip(found, all_of(), strict=True):
        one, other = (np.asarray(x, "float32") for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=4e-3 * np.abs(other).max())


def test_every_config_of_a_space_gives_the_same_answer():
    about = Problem.make("attention", seq=300, dim=16, heads=2, mode="fwd_bwd", causal=True)
    space = OP.implementation("llvm").space(about, current_device())
    configs = [c for c in space if c["block_k"] == c["block_k_bwd"]]
    assert len(configs) == 16
    for config in configs:
        check_agrees(about, candidate(about, "llvm", config))


def test_scores_in_the_hundreds_keep_their_gradients():
    query, *others = make(1, 90, 70, 2, 2, 16)
    check([query * 60, *others], bar=2e-4)


@pytest.mark.parametrize("size", [1e4, 1e5, 1e8])
def test_scores_of_any_size_choose_their_largest(size):
    query, key, value, grad_out = make(1, 70, 90, 2, 2, 16)
    (out, lse), back = jax.vjp(lambda *a: attend(*a), query * size, key * size, value)
    seen = dense_attention.visible((1, 2, 70, 90))
    right, _, _ = dense_attention.attention(
        query * size, key * size, value, grad_out, scale=0.3, seen=seen
    )
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out, right, rtol=0, atol=2e-5 * np.abs(right).max())
    assert all(np.isfinite(one).all() for one in back((grad_out, jnp.zeros_like(lse))))


def test_gradients_of_a_few_heads_are_shared_among_many_threads(monkeypatch):
    monkeypatch.setattr(llvm, "usable_cores", lambda: 7)
    check(make(1, 500, 130, 2, 1, 16), causal=True)
    check(make(1, 3, 130, 1, 1, 16))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_stays_none_and_spoils_no_other_row(bad):
    query, key, value, _ = make(1, 70, 90, 2, 2, 16)
    out, _ = attend(query.at[0, 3, 1].set(bad), key, value)
    clean, _ = attend(query, key, value)
    spoilt = ~np.isfinite(out)
    assert spoilt[0, 3, 1].all()
    assert spoilt.sum() == out.shape[-1]
    np.testing.assert_array_equal(out[~spoilt], clean[~spoilt])


def test_vmap_over_any_of_the_arrays_gives_what_a_loop_gives():
    query, key, value, grad_out = make(3, 40, 50, 4, 2, 16)
    queries = jnp.stack([query, 2 * query])
    lengths = jnp.array([[7, 50, 3], [50, 1, 0]], "int32")

    def loss(query, key, lengths):
        out, _ = attend(query, key, value, lengths=(None, lengths))
        return jnp.sum(out * grad_out)

    graded = jax.value_and_grad(loss, (0, 1))
    found = jax.jit(jax.vmap(graded, (0, None, 0)))(queries, key, lengths)
    for n in range(2):
        right = graded(queries[n], key, lengths[n])
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(one[n], other, rtol=1e-5, atol=1e-5)
    nested = jax.vmap(jax.vmap(lambda q, k, v: attend(q[None], k[None], v[None])[0]))
    stacked = [jnp.stack([x, -x]) for x in (query, key, value)]
    right = attend(-query, -key, -value)[0]
    np.testing.assert_allclose(nested(*stacked)[1, :, 0], right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_has_the_right_gradient(causal):
    query, key, value, _ = make(1, 20, 24, 2, 1, 8)

    def curvature(name):
        def slopes(query):
            def total(query):
                out = shapetune.attention(
                    query, key, value, is_causal=causal, implementation=name,
                    key_value_seq_lengths=jnp.array([21], "int32"),
                )  # fmt: skip
                return jnp.sum(jnp.sin(out))

            return jnp.sum(jnp.cos(jax.grad(total)(query) * 5))

        return jax.grad(slopes)(query)

    right = curvature("xla")
    np.testing.assert_allclose(curvature("llvm"), right, rtol=0, atol=2e-5 * jnp.abs(right).max())


def test_many_calls_at_once_and_in_loops_do_not_disturb_each_other():
    query, key, value, _ = make(2, 200, 200, 4, 4, 32)
    run = jax.jit(lambda scale: attend(query * scale, key, value)[0])
    scales = [jnp.float32(n) for n in range(8)]
    right = [np.asarray(run(scale)) for scale in scales]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            for one, other in zip(threads.map(run, scales), right, strict=True):
                np.testing.assert_array_equal(one, other)
    looped = jax.jit(
        lambda: jax.lax.map(lambda n: attend(query * n, key, value)[0], jnp.stack(scales))
    )()
    np.testing.assert_array_equal(looped, np.stack(right))


def test_memory_does_not_grow_with_the_square_of_the_length():
    def temporary(seq):
        arrays = [jax.ShapeDtypeStruct((1, seq, 2, 16), "float32")] * 3
        graded = jax.jit(jax.grad(lambda *a: attend(*a)[0].sum(), (0, 1, 2)))
        return graded.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192) <= 2.1 * temporary(4096)


def test_one_query_is_left_to_xla_and_a_bias_or_mask_to_others():
    def chosen(**fields):
        about = Problem.make("attention", **{"seq": 64, "dim": 64, **fields})
        return OP.heuristic(about, current_device()).implementation

    assert chosen(seq=256) == chosen(seq=4096, causal=True) == "llvm"
    assert chosen(seq=64) == chosen(seq=1, kv_seq=2**15) == "xla"
    assert chosen(seq=256, features=("mask[ts]",)) == "xla"
    assert chosen(seq=4096, features=("bias[ts]",)) == "blockwise"


def test_without_llvmlite_others_serve_and_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(call.importlib.util, "find_spec", lambda name: None)
    call.missing.cache_clear()
    try:
        about = Problem.make("attention", seq=256, dim=64)
        one = OP.implementation("llvm")
        assert "pip install 'shapetune[cpu]'" in one.supports(about, current_device())
        assert OP.heuristic(about, current_device()).implementation == "xla"
    finally:
        monkeypatch.undo()
        call.missing.cache_clear()


def test_a_processor_without_its_vectors_is_refused(monkeypatch):
    about = Problem.make("attention", seq=256, dim=64)
    for broken, reason in (("platform", "Windows"), ("features", "AVX2")):
        with monkeypatch.context() as patch:
            if broken == "platform":
                patch.setattr(jit.sys, "platform", "win32")
            else:
                patch.setattr(jit.llvm, "get_host_cpu_features", dict)
                patch.setattr(jit.llvm, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
            jit.refusal.cache_clear()
            call.missing.cache_clear()
            said = OP.implementation("llvm").supports(about, current_device())
            assert reason in said
    jit.refusal.cache_clear()
    call.missing.cache_clear()


def test_a_kernel_has_the_same_name_in_every_process_and_another_for_other_code():
    code = (
        "from shapetune.kernels.attention import _llvm_forward as kernel\n"
        "from shapetune.kernels.attention._llvm_panels import Sizes\n"
        "from shapetune.kernels.llvm import call, code\n"
        "sizes = Sizes(8, 8, 'float32')\n"
        "print(call.kernel_name(kernel.write, sizes, code.Machine(8, 16)))\n"
        "print(call.kernel_name(kernel.write, sizes, code.Machine(4, 32)))\n"
    )
    names = [
        subprocess.run(
            [sys.executable, "-c", code], env=dict(os.environ), check=True, timeout=120,
            capture_output=True, text=True,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert names[0] == names[1]
    assert len(set(names[0])) == 2


def test_importing_the_package_does_not_import_llvmlite():
    code = "import sys, shapetune, shapetune.kernels; sys.exit('llvmlite' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=True, timeout=120)


def test_an_old_or_broken_llvmlite_is_refused_with_the_reason(monkeypatch):
    def said():
        call.missing.cache_clear()
        return call.missing()

    monkeypatch.setattr(call.importlib.metadata, "version", lambda name: "0.44.0rc1")
    assert "0.44.0rc1 is too old" in said()
    monkeypatch.undo()

    def broken():
        raise OSError("no executable memory")

    monkeypatch.setattr(jit, "refusal", broken)
    assert said() == "llvmlite does not work here: no executable memory"
    monkeypatch.undo()
    assert said() is None


def test_doctor_says_what_to_install(monkeypatch, tmp_path):
    def said():
        return [one for one in checkup.check_up([tmp_path]) if one.topic == "kernels"]

    assert said() == []
    reason = "the package llvmlite is not installed; pip install 'shapetune[cpu]'"
    monkeypatch.setattr(checkup, "llvm_missing", lambda: reason)
    (finding,) = said()
    assert "llvmlite is not installed" in finding.text
    assert finding.remedy == "pip install 'shapetune[cpu]'"
