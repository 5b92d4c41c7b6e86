import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shapetune.autotune import measure
from shapetune.cache import Candidate
from shapetune.kernels import get_op

from ..samples import problem


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        base = 10 * np.exp(rng.normal(0, 0.1, 15))
        other = 8 * np.exp(rng.normal(0, 0.1, 15))
        _, low, high = measure.paired_ratio(base, other)
        held += low <= 1.25 <= high
    assert 0.92 <= held / 400 <= 0.99


def test_equal_programs_are_rarely_told_apart():
    rng = np.random.default_rng(1)
    wrong = sum(
        measure.paired_ratio(np.exp(rng.normal(0, 0.2, 15)), np.exp(rng.normal(0, 0.2, 15)))[1] > 1
        for _ in range(400)
    )
    assert wrong / 400 <= 0.05


def test_the_ratio_stands_a_burst_of_noise():
    base, other = np.full(15, 10.0), np.full(15, 5.0)
    other[3:6] = 50.0
    ratio, low, high = measure.paired_ratio(base, other)
    assert low <= 2.0 <= high
    assert ratio == pytest.approx(2.0)


def test_the_signed_rank_cut_is_the_tables():
    # Critical values at 2.5% on each side, Hollander and Wolfe, table A.4.
    assert [measure._signed_rank_cut(n) for n in (6, 10, 15, 20)] == [0, 8, 25, 52]


def test_few_pairs_give_the_widest_interval():
    ratio, low, high = measure.paired_ratio(np.array([2.0, 4.0]), np.array([1.0, 1.0]))
    assert (low, high) == pytest.approx((2.0, 4.0))
    assert ratio == pytest.approx(np.sqrt(8))


def test_calibration_fills_a_sample_and_stays_bounded():
    assert measure.calibrate(100.0) == 1
    assert measure.calibrate(1.0) == 10
    assert measure.calibrate(0.0) == measure.MAX_INNER


def test_a_slow_candidate_is_given_up_and_a_fast_one_is_not():
    args = (jnp.ones((400, 400)),)
    compiled = measure.compile_program(lambda x: jnp.linalg.matrix_power(x, 9).sum(), args)
    timing, given_up = measure.time_program(compiled, args, 1e-6, measure.Effort())
    assert given_up
    assert len(timing.samples_ms) == 3
    timing, given_up = measure.time_program(compiled, args, 1e6, measure.Effort(seconds=0.05))
    assert not given_up
    assert len(timing.samples_ms) >= 5
    q1, median, q3 = timing.quartiles_ms
    assert 0 < q1 <= median <= q3


def test_a_compiled_program_tells_its_memory():
    args = (jnp.ones((256, 256), jnp.float32),)
    compiled = measure.compile_program(lambda x: x + 1, args)
    assert compiled.arg_mb == pytest.approx(0.25)
    assert compiled.out_mb == pytest.approx(0.25)
    assert compiled.compile_s > 0


def test_the_timed_program_is_the_loss_and_its_gradients():
    about = problem(seq=40, dim=16, heads=2, mode="fwd_bwd", features=("bias[ts]",))
    op = get_op("attention")
    inputs = op.make_inputs(about, 0, "normal")
    result = measure.program(op, about, Candidate("xla"), inputs)(*measure.arguments(about, inputs))
    named = measure.named_outputs(op, about, inputs, result)
    assert set(named) == {"out", "grad_query", "grad_key", "grad_value", "grad_bias"}
    want = jnp.sum(named["out"] * inputs.weights[0])
    np.testing.assert_allclose(result[0][0], want, rtol=1e-5)
    assert isinstance(jax.block_until_ready(result[0][0]), jax.Array)
