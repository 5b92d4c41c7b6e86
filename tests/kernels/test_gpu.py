"""On a real GPU: every implementation that claims support is right, and the tuner runs."""

import pytest

import shapetune
from shapetune.autotune import Options
from shapetune.autotune.measure import Effort
from shapetune.cache import Problem
from shapetune.kernels import current_device, get_op

from .agree import candidate, check_agrees

pytestmark = pytest.mark.gpu

BASE = {"seq": 1024, "dim": 64, "dtype": "bfloat16", "batch": 2, "mode": "fwd_bwd"}
SHAPES = [
    {},
    {"causal": True},
    {"seq": 1500, "causal": True, "dim": 128},
    {"seq": 600, "kv_seq": 1111, "heads": 8, "kv_heads": 2},
    {"dim": 80},
    {"window": (128, 0), "causal": True},
    {"features": ("bias[ts]",)},
    {"features": ("kv_lengths", "q_lengths")},
    {"dtype": "float16"},
]


@pytest.mark.parametrize(
    "name", ["xla", "blockwise", "pallas_mha", "pallas_flex", "cudnn", "mosaic"]
)
def test_every_supported_shape_agrees_with_float64(name):
    op, device = get_op("attention"), current_device()
    checked = 0
    for fields in SHAPES:
        problem = Problem.make("attention", **{**BASE, **fields})
        if op.implementation(name).supports(problem, device) is None:
            check_agrees(problem, candidate(problem, name))
            checked += 1
        elif op.implementation(name).supports(problem.replace(mode="fwd"), device) is None:
            check_agrees(problem.replace(mode="fwd"), candidate(problem.replace(mode="fwd"), name))
            checked += 1
    if not checked:
        reason = op.implementation(name).supports(Problem.make("attention", **BASE), device)
        pytest.skip(f"{name} supports none of the shapes on this device: {reason}")


def test_a_short_tuning_run_finds_a_verified_winner(own_cache):
    options = Options(trials=8, budget=20, pairs=7, rounds=3, effort=Effort(0.05, 3, 5))
    (one,) = shapetune.tune("attention", {**BASE, "mode": "fwd"}, options=options)
    assert one.verification.rel_err <= one.verification.tolerance
    assert shapetune.explain("attention", **{**BASE, "mode": "fwd"}).candidate == one.chosen
