"""Does a candidate agree with the float64 reference? Fixed bars, independent of the tuner's."""

from __future__ import annotations

import jax
import numpy as np

from shapetune.autotune import measure, verify
from shapetune.cache import Candidate
from shapetune.kernels import current_device, get_op

#: Of an interpreted kernel its own code is tested, not what LLVM makes of the interpreter's.
_AS_IT_IS = {"xla_backend_optimization_level": 0}
#: Largest error over largest right value, forward and gradients.
BARS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2.5e-2}


def candidate(problem, name, config=None):
    """A candidate of an implementation, by default with its own default config."""
    one = get_op(problem.op).implementation(name)
    defaults = one.default_config(problem, current_device())
    return Candidate(name, {**defaults, **(config or {})})


def run(problem, chosen, kind="normal", seed=0):
    """The named outputs of a candidate, and the inputs."""
    op = get_op(problem.op)
    op.require(problem, current_device(), chosen)
    inputs = op.make_inputs(problem, seed, kind)
    args = measure.arguments(problem, inputs)
    options = _AS_IT_IS if chosen.implementation.startswith("pallas") else None
    program = measure.program(op, problem, chosen, inputs)
    compiled = measure.compile_program(program, args, options)
    return measure.named_outputs(op, problem, inputs, compiled.call(*args)), inputs


def interpreted(function, *args):
    """What a function that calls interpreted kernels gives, compiled whole and quickly."""
    return jax.jit(function).lower(*args).compile(_AS_IT_IS)(*args)


def check_agrees(problem, chosen, kind="normal", bar=None, slices=2):
    """Asserts that outputs, and in mode fwd_bwd gradients, are right within the bar.

    Of a gradient whose terms all cancel nothing but their rounding is left: there the bar is
    what rounding explains, as in tuning.
    """
    outputs, inputs = run(problem, chosen, kind)
    expected = get_op(problem.op).expect(problem, inputs, slices)
    bar = bar or BARS[problem.dtype]
    for one, error in zip(expected, verify.errors(outputs, expected), strict=True):
        cancels = one.condition > 100 and np.abs(one.value).max() < 1e-13
        limit = max(bar, verify.rounding_floor(problem, one.condition)) if cancels else bar
        assert error <= limit, (problem.label, chosen.key, one.output, error, limit)
    assert all(np.isfinite(array).all() for array in outputs.values())
