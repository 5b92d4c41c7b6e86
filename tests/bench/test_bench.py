import jax
import jax.numpy as jnp
import numpy as np

from shapetune.bench import demo
from shapetune.bench.dispatch import dispatch_cost
from shapetune.bench.side_by_side import side_by_side, speedups, value_and_gradients
from shapetune.kernels import default

from ..samples import problem


def _work(times):
    def function(x):
        for _ in range(times):
            x = jnp.tanh(x @ x)
        return x

    return function


def test_more_work_is_found_slower():
    ratio, low, _high = speedups(_work(24), _work(2), (jnp.ones((300, 300)),), pairs=9)
    assert ratio > 2
    assert low > 1


def test_samples_come_in_rounds():
    times = side_by_side([_work(1), _work(2), _work(3)], (jnp.ones((8, 8)),), rounds=4)
    assert times.shape == (4, 3)
    assert (times > 0).all()


def test_the_loss_has_the_value_and_three_gradients():
    arrays = [jnp.ones((1, 4, 2, 8)) * i for i in (1.0, 2.0, 3.0)]
    weights = jnp.ones((1, 4, 2, 8))
    value, grads = value_and_gradients(jax.nn.dot_product_attention, weights)(*arrays)
    np.testing.assert_allclose(value, 3 * weights.size, rtol=1e-6)
    assert len(grads) == 3


def test_the_demo_has_problems_and_a_line_for_each():
    assert {p.mode for p in demo.problems()} == {"fwd", "fwd_bwd"}
    line = demo.gain(problem(seq=33, dim=16, heads=2))
    assert "× as fast" in line
    assert "tier heuristic" in line


def test_the_cost_of_a_dispatch_is_measured():
    with default.use_cache([]):
        cost = dispatch_cost()
    # A fifth of the call was measured; only a dispatch that decides anew in each call fails.
    assert cost["added_us"]["median"] < 5 * cost["call_us"]
