"""Implementations of attention that do all the harm that there is; for a worker to import.

Imported by name, by tests and by the workers that they start; each registers on
import, and is considered only if it is asked for.
"""

import ctypes
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from shapetune.kernels import Implementation, get_op
from shapetune.kernels.attention.xla import xla


def _good(arrays, static):
    return xla(*arrays, config={}, **static)


def _with_gradient(function):
    """``function(out)`` with a gradient that compiles."""
    call = jax.custom_vjp(function)
    call.defvjp(lambda out: (call(out), None), lambda _, grad: (grad,))
    return call


def _on_host(compute, arrays, static):
    """What ``compute(right)`` makes of the right output, on the host at each call."""
    right = _good(arrays, static)
    shape = jax.ShapeDtypeStruct(right.shape, right.dtype)

    def call(out):
        return jax.pure_callback(lambda out: compute(np.array(out)), shape, out)

    return _with_gradient(call)(right)


def _raises_at_trace(*arrays, config, **static):
    raise ValueError("no such block")


def _raises_at_compile(*arrays, config, **static):
    def unknown(out):
        # Nothing of that name is registered, and XLA says so when it compiles.
        shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
        return jax.ffi.ffi_call("shapetune_no_such_kernel", shape)(out)

    return _with_gradient(unknown)(_good(arrays, static))


def _segfaults(*arrays, config, **static):
    def crash(out):
        print("about to read address 0", file=sys.stderr, flush=True)
        ctypes.string_at(0)
        return out

    return _on_host(crash, arrays, static)


def _exits(*arrays, config, **static):
    def leave(out):
        os._exit(3)

    return _on_host(leave, arrays, static)


def _exits_at_trace(*arrays, config, **static):
    sys.exit(4)


def _hangs_in_compile(*arrays, config, **static):
    while True:
        time.sleep(0.1)


def _hangs_in_execution(*arrays, config, **static):
    def forever(out):
        return jax.lax.while_loop(lambda x: jnp.isfinite(x).any(), jnp.cos, out)

    return _with_gradient(forever)(_good(arrays, static))


def _eats_memory(*arrays, config, **static):
    def eat(out):
        held = []
        while True:
            held.append(np.ones(2**23))  # 64 MiB, touched

    return _on_host(eat, arrays, static)


def _nan(*arrays, config, **static):
    return _good(arrays, static).at[..., -1].set(jnp.nan)


def _wrong_tail(*arrays, config, **static):
    out = _good(arrays, static)
    block = 64
    start = (out.shape[1] // block) * block  # the last, ragged block
    return out.at[:, start:].multiply(1.01)


@jax.custom_vjp
def _bad_gradient(out):
    return out


_bad_gradient.defvjp(lambda out: (out, None), lambda _, grad: (0.9 * grad,))


def _wrong_gradient(*arrays, config, **static):
    return _bad_gradient(_good(arrays, static))


def _garbage_at_once(query, key, value, *arrays, config, **static):
    return jnp.full((*query.shape[:3], value.shape[3]), 0.1, query.dtype)


_buffers: dict[tuple[int, ...], np.ndarray] = {}


def _writes_half(*arrays, config, **static):
    """Returns a buffer that it keeps: right in full once, then only half of it written."""

    def half(out):
        if out.shape not in _buffers:
            _buffers[out.shape] = out.copy()
        buffer = _buffers[out.shape]
        buffer[:, ::2] = out[:, ::2]
        return buffer

    return _on_host(half, arrays, static)


_calls = {"first": 0}


def _right_once(*arrays, config, **static):
    def once(out):
        _calls["first"] += 1
        return out if _calls["first"] == 1 else 1.5 * out

    return _on_host(once, arrays, static)


def _noisy(*arrays, config, **static):
    rng = np.random.default_rng(0)

    def noisy(out):
        return (out * (1 + 1e-3 * rng.standard_normal(out.shape))).astype(out.dtype)

    return _on_host(noisy, arrays, static)


def _sleeps_with_a_child(*arrays, config, **static):
    """Starts a process that outlives a worker killed alone, and hangs."""
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["SHAPETUNE_TEST_CHILD"], "w") as file:
        file.write(str(child.pid))
    while True:
        time.sleep(0.1)


def _terminated_by_someone(*arrays, config, **static):
    os.kill(os.getpid(), signal.SIGKILL)


def _slow(*arrays, config, **static):
    """Right, and far from fast: a heuristic that one should beat."""

    def later(out):
        time.sleep(0.02)
        return out

    return _on_host(later, arrays, static)


#: Of each its function and the outcome that it must have.
KINDS = {
    "raises_at_trace": (_raises_at_trace, "compile_error"),
    "raises_at_compile": (_raises_at_compile, "compile_error"),
    "segfaults": (_segfaults, "crashed"),
    "exits": (_exits, "crashed"),
    "exits_at_trace": (_exits_at_trace, "compile_error"),
    "hangs_in_compile": (_hangs_in_compile, "timed_out"),
    "hangs_in_execution": (_hangs_in_execution, "timed_out"),
    "eats_memory": (_eats_memory, "out_of_memory"),
    "gives_nan": (_nan, "wrong_result"),
    "wrong_tail": (_wrong_tail, "wrong_result"),
    "wrong_gradient": (_wrong_gradient, "wrong_result"),
    "garbage_at_once": (_garbage_at_once, "wrong_result"),
    "writes_half": (_writes_half, "wrong_result"),
    "right_once": (_right_once, "wrong_result"),
    "noisy": (_noisy, "nondeterministic"),
}
OTHERS = {
    "sleeps_with_a_child": _sleeps_with_a_child,
    "terminated_by_someone": _terminated_by_someone,
    "slow": _slow,
    "alias": lambda *arrays, config, **static: _good(arrays, static),
}


def register():
    """Registers them all; they are tried only by name."""
    every = {**{name: function for name, (function, _) in KINDS.items()}, **OTHERS}
    for name, function in every.items():
        get_op("attention").register(
            Implementation(name, function, automatic=lambda problem, device: False)
        )


def unregister():
    """Takes them away again."""
    for name in (*KINDS, *OTHERS):
        get_op("attention").implementations.pop(name, None)


register()
