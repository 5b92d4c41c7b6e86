"""Gradients of gradients, as a penalty on a gradient or a curvature takes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shapetune
from shapetune.cache.errors import UnsupportedError

LENGTHS = jnp.array([140, 0], "int32")
FEATURES = {
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "window": {"is_causal": True, "local_window_size": (30, 0), "key_value_seq_lengths": LENGTHS},
    "bias": {"bias": (1, 4, 150, 170), "is_causal": True},
    "mask": {"mask": (2, 1, 150, 170), "bias": (2, 1, 1, 170)},
}


def _drawn(name, shape):
    """A bias, or a mask that hides half of the keys and from one query all."""
    drawn = jax.random.normal(jax.random.key(len(shape) + shape[0]), shape)
    return drawn if name == "bias" else (drawn > 0).at[:, :, 7].set(False)


def _slopes(name, features, *arrays):
    """A number that depends on all gradients of a loss, each element of them in its own way."""
    query, key, value, bias = arrays

    def total(query, key, value, bias):
        given = features if bias is None else {**features, "bias": bias}
        out = shapetune.attention(query, key, value, implementation=name, **given)
        return jnp.sum(jnp.sin(out))

    every = tuple(n for n, x in enumerate(arrays) if x is not None)
    found = jax.grad(total, every)(query, key, value, bias)
    return sum(jnp.sum(jnp.sin(x)) for x in found)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("blockwise", kind) for kind in FEATURES]
    + [("llvm", kind) for kind, given in FEATURES.items() if not {"bias", "mask"} & {*given}],
)
def test_a_gradient_has_the_right_gradient(name, kind):
    """Of many blocks, batch rows, shared heads, compiled whole."""
    features = {
        option: _drawn(option, value) if option in ("bias", "mask") else value
        for option, value in FEATURES[kind].items()
    }
    bias = features.pop("bias", None)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 150, 4, 8), (2, 170, 2, 8), (2, 170, 2, 12))
    arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)] + [bias]
    every = tuple(n for n, x in enumerate(arrays) if x is not None)

    def curvature(name):
        return jax.jit(jax.grad(functools.partial(_slopes, name, features), every))(*arrays)

    for one, other in zip(curvature(name), curvature("xla"), strict=True):
        assert jnp.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * jnp.abs(other).max())


@pytest.mark.parametrize("name", ["pallas_mha", "pallas_flex"])
def test_attention_by_pallas_says_who_else_has_one(name):
    query, key, value = jnp.ones((3, 1, 40, 2, 16))
    slopes = functools.partial(_slopes, name, {})
    with pytest.raises(UnsupportedError, match=r"no gradient of.*xla"):
        jax.grad(slopes)(query, key, value, None)


@pytest.mark.parametrize("name", ["chunked", "pallas_scanbwd", "pallas"])
def test_the_recurrence_has_it_or_says_who_has(name):
    keys = jax.random.split(jax.random.key(2), 3)
    arrays = [jax.random.normal(k, (1, 70, 2, 8)) for k in keys]

    def curvature(name):
        def total(*arrays):
            out, _ = shapetune.linear_attention(*arrays, window_size=9, implementation=name)
            return jnp.sum(jnp.sin(out))

        def slopes(*arrays):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.grad(total, (0, 1, 2))(*arrays))

        return jax.jit(jax.grad(slopes, (0, 1, 2)))(*arrays)

    if name == "pallas":
        with pytest.raises(UnsupportedError, match=r"no gradient of.*chunked"):
            curvature(name)
        return
    plain = curvature("scan")
    for one, other in zip(curvature(name), plain, strict=True):
        assert jnp.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * jnp.abs(other).max())
