import dataclasses
import math

import numpy as np
import pytest

from shapetune.autotune import verify
from shapetune.kernels import Expected

from ..samples import problem

VALUE = np.linspace(-2.0, 4.0, 12).reshape(3, 4)
EXPECTED = [Expected("out", (0,), VALUE), Expected("grad_query", (0,), 10 * VALUE)]
RIGHT = {"out": VALUE[None], "grad_query": 10 * VALUE[None]}


def test_right_outputs_have_no_error():
    assert verify.errors(RIGHT, EXPECTED) == [0.0, 0.0]


def test_an_error_counts_relative_to_the_largest_value():
    off = {**RIGHT, "out": VALUE[None] + 0.04}
    assert verify.errors(off, EXPECTED) == pytest.approx([0.01, 0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(bad):
    off = {**RIGHT, "out": np.where(VALUE > 3.9, bad, VALUE)[None]}
    checked = verify.check(off, EXPECTED, [1e300, 1e300])
    assert not checked.passed
    assert checked.where == "out"


def test_a_wrong_shape_never_passes():
    assert math.isinf(verify.errors({**RIGHT, "out": VALUE[None, :2]}, EXPECTED)[0])


def test_values_that_cancel_are_held_to_the_size_of_the_others():
    expected = [Expected("out", (0,), VALUE), Expected("grad_query", (0,), 1e-18 * VALUE)]
    outputs = {"out": VALUE[None], "grad_query": 1e-8 * VALUE[None]}
    assert verify.errors(outputs, expected)[1] < 1e-5
    outputs["grad_query"] = 0.1 * VALUE[None]
    assert verify.errors(outputs, expected)[1] > 1


def test_the_worst_against_its_own_tolerance_is_reported():
    off = {"out": VALUE[None] + 0.4, "grad_query": 10 * VALUE[None] + 0.4}
    checked = verify.check(off, EXPECTED, [1.0, 1e-4])
    assert checked.where == "grad_query"
    assert not checked.passed


def test_tolerances_follow_dtype_length_and_the_plain_implementation():
    about = problem(seq=1024)
    floor = verify.rounding_floor(about)
    assert verify.rounding_floor(about.replace(dtype="bfloat16")) > 100 * floor
    assert verify.rounding_floor(about.replace(kv_seq=4096)) > floor
    assert verify.rounding_floor(about, 500.0) > 10 * floor
    low, high = verify.tolerances(about, [0.0, 0.01], EXPECTED)
    assert low == floor
    assert high == pytest.approx(0.03)
    assert verify.tolerances(about, None, EXPECTED[:1]) == [verify.BASELINE_FACTOR * floor]
    assert math.isfinite(verify.tolerances(about, [math.inf], EXPECTED[:1])[0])
    assert dataclasses.replace(verify.Check(0.2, 0.1, "out")).passed is False
