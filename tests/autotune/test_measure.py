import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shapetune.autotune import measure, timing
from shapetune.cache import Candidate
from shapetune.kernels import get_op

from ..samples import problem

PATIENCE = measure.PATIENCE


@pytest.fixture(autouse=True)
def patience_as_it_is(short_races, monkeypatch):
    """Here calm is waited for as outside of tests."""
    monkeypatch.setattr(measure, "PATIENCE", PATIENCE)


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


def test_a_slow_candidate_is_given_up_with_its_ratio_and_a_fast_one_is_not():
    args = (jnp.ones((400, 400)),)
    slow = measure.compile_program(lambda x: jnp.linalg.matrix_power(x, 9).sum(), args)
    found = timing.time_program(slow, args, timing.Rival(1e-6), measure.Effort())
    assert found.screened
    assert len(found.samples_ms) == 3
    assert "as slow as the best" in found.note
    found = timing.time_program(slow, args, timing.Rival(1e6), measure.Effort(seconds=0.05))
    assert not found.screened
    assert len(found.samples_ms) >= 5
    q1, median, q3 = found.quartiles_ms
    assert 0 < q1 <= median <= q3


class Scripted:
    """Stands in for ``measure.read``: hands out times and shares in order, then again."""

    def __init__(self, monkeypatch, times, shares=None):
        self.times, self.shares, self.at = times, shares or [1.0] * len(times), 0
        monkeypatch.setattr(measure, "read", self.read)
        monkeypatch.setattr(measure, "sample", lambda compiled, args, inner: times[0])

    def read(self, compiled, args, inner):
        at = self.at % len(self.times)
        self.at += 1
        return measure.Reading(self.times[at], self.shares[at])


def program_on(each_ready):
    return measure.Compiled(None, 0.0, 0.0, 0.0, 0.0, each_ready)


def test_a_candidate_is_not_given_up_while_the_best_is_as_slow_beside_it(monkeypatch):
    Scripted(monkeypatch, [5.0])
    program = program_on(True)
    # The best was measured in better days: next to it, the candidate is its equal.
    rival = timing.Rival(1.0, program)
    assert not timing.time_program(program, (), rival, measure.Effort(0.01)).screened


def timed(effort=measure.Effort(0.01, 12, 12), floor_ms=0.0):  # noqa: B008
    return timing.time_program(program_on(True), (), None, effort, floor_ms)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([20.0, 30.0] * 6, "two groups"),
        ([20.0 + i for i in range(12)], "drifting"),
    ],
)
def test_samples_in_doubt_are_taken_again(monkeypatch, times, words):
    script = Scripted(monkeypatch, times)
    found = timed()
    assert found.retaken
    assert words in found.note
    assert "again" in found.note
    assert script.at == 24
    assert len(found.samples_ms) == 24


def test_good_samples_after_ones_in_doubt_stand_alone(monkeypatch):
    Scripted(monkeypatch, [20.0, 30.0] * 6 + [20.0 + 0.01 * (i % 3) for i in range(12)])
    found = timed()
    assert found.retaken
    assert "at first" in found.note
    assert max(found.samples_ms) < 21


def test_a_reading_that_is_too_fast_is_taken_again(monkeypatch):
    Scripted(monkeypatch, [20.0] * 12)
    assert "too fast" in timed(floor_ms=25.0).note
    assert not timed(floor_ms=15.0).retaken


def test_samples_that_another_process_disturbed_do_not_count(monkeypatch):
    script = Scripted(monkeypatch, [40.0, 20.0, 20.0], [0.5, 1.0, 1.0])
    found = timed()
    assert set(found.samples_ms) == {20.0}
    assert script.at == 18
    # Where nothing tells the disturbed from the others, a GPU, all count.
    assert timing.time_program(program_on(False), (), None, measure.Effort(0.01, 12, 12)).samples_ms


def test_disturbed_rounds_are_taken_again(monkeypatch):
    Scripted(monkeypatch, [40.0, 40.0, 20.0, 20.0, 20.0, 20.0], [0.5, 0.5, 1.0, 1.0, 1.0, 1.0])
    times = measure.interleave([(program_on(True), 1)] * 2, (), 6, 0)
    assert (times == 20.0).all()
    assert times.shape == (6, 2)


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
