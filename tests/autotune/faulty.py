"""Implementations of attention that misbehave, registered for the time of a test."""

from __future__ import annotations

import contextlib
import time

import jax
import jax.numpy as jnp

from shapetune.kernels import Implementation, Space, get_op
from shapetune.kernels.attention.xla import xla


def _raises_at_trace(*arrays, config, **static):
    raise ValueError("no such block")


def _nan(*arrays, config, **static):
    return xla(*arrays, config={}, **static).at[..., -1].set(jnp.nan)


def _wrong_tail(*arrays, config, **static):
    out = xla(*arrays, config={}, **static)
    return out.at[:, -1:].multiply(1.5)


def _zeros(query, key, value, *arrays, config, **static):
    return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)


@jax.custom_vjp
def _bad_gradient(out):
    return out


_bad_gradient.defvjp(lambda out: (out, None), lambda _, grad: (0.9 * grad,))


def _wrong_gradient(*arrays, config, **static):
    return _bad_gradient(xla(*arrays, config={}, **static))


def _unsupported(*arrays, config, **static):
    raise AssertionError("must not be called")


def _overflows(query, key, value, *arrays, scale, config, **static):
    """Softmax without its maximum taken off: right on tame inputs, infinite on large scores."""
    weights = jnp.exp(scale * jnp.einsum("btnh,bsnh->bnts", query, key).astype(jnp.float32))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def _dawdles(*arrays, config, **static):
    """Right, and slower than all others, on any machine."""
    out = xla(*arrays, config={}, **static)

    def dawdle(out):
        time.sleep(0.01)
        return out

    return jax.pure_callback(dawdle, jax.ShapeDtypeStruct(out.shape, out.dtype), out)


_calls = {"changes_its_mind": 0}


def _changes_its_mind(*arrays, config, **static):
    """Right in two runs of three."""
    out = xla(*arrays, config={}, **static)

    def drift(out):
        _calls["changes_its_mind"] += 1
        return out if _calls["changes_its_mind"] % 3 else 1.5 * out

    return jax.pure_callback(drift, jax.ShapeDtypeStruct(out.shape, out.dtype), out)


KINDS = {
    "raises_at_trace": (_raises_at_trace, "compile_error"),
    "gives_nan": (_nan, "wrong_result"),
    "wrong_tail": (_wrong_tail, "wrong_result"),
    "zeros_at_once": (_zeros, "wrong_result"),
    "wrong_gradient": (_wrong_gradient, "wrong_result"),
    "refuses": (_unsupported, "unsupported"),
    "overflows": (_overflows, "wrong_result"),
    "dawdles": (_dawdles, "ok"),
    "changes_its_mind": (_changes_its_mind, "nondeterministic"),
}


@contextlib.contextmanager
def registered(*names):
    """Registers some of ``KINDS`` with the op `attention`."""
    op = get_op("attention")
    for name in names:
        function, _ = KINDS[name]
        reason = "it refuses" if name == "refuses" else None
        op.register(
            Implementation(
                name=name,
                function=function,
                space=lambda problem, device: Space(),
                supports=lambda problem, device, reason=reason: reason,
            )
        )
    try:
        yield op
    finally:
        for name in names:
            del op.implementations[name]
