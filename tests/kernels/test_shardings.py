"""Inside ``shard_map`` with its checks, and on explicitly sharded arrays, loops over blocks
trace and give what one device gives, gradients of what is the same everywhere included."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shapetune import attention, linear_attention

DEVICES = 4
BY_HEAD = PartitionSpec("data", None, "model")


def _arrays():
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((4, 160, n, 8), "float32") for n in (4, 2, 2))
    bias = rng.standard_normal((1, 1, 160, 160), "float32")
    return query, key, value, bias, np.array([160, 30, 1, 77], "int32")


def _attend(query, key, value, bias, lengths):
    return attention(
        query, key, value, bias, is_causal=True, key_value_seq_lengths=lengths,
        implementation="blockwise",
    )  # fmt: skip


def _attend_unbiased(query, key, value, bias, lengths):
    """Without a bias the softmax is not shifted where scores are small, as here."""
    return _attend(query * bias.std(), key, value, None, lengths)


def _attend_by_llvm(query, key, value, bias, lengths):
    return attention(
        query * bias.std(), key, value, is_causal=True, key_value_seq_lengths=lengths,
        implementation="llvm",
    )  # fmt: skip


def _recur(name):
    def call(query, key, value, bias, lengths):
        query = query * bias.std()
        return linear_attention(query, key, value, window_size=5, implementation=name)[0]

    return call


FUNCTIONS = (_attend, _attend_unbiased, _attend_by_llvm, _recur("chunked"), _recur("scan"))


def _values(function, arrays):
    """The output and the gradients of the float arrays, under ``jit``, on the host."""

    def loss(*given):
        output = function(*given, arrays[-1])
        return jnp.sum(output**2), output

    graded = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
    (_, output), gradients = graded(*arrays[:-1])
    return output, jax.device_get((output, *gradients))


def _check(found, right):
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * max(1.0, np.abs(other).max()))


def main():
    """Runs on several devices; the test below starts it in a process that has them."""
    assert len(jax.devices()) == DEVICES
    arrays = _arrays()
    specs = (BY_HEAD, BY_HEAD, BY_HEAD, PartitionSpec(), PartitionSpec("data"))
    manual, explicit = (
        jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    for function in FUNCTIONS:
        _, right = _values(function, arrays)
        sharded = jax.shard_map(function, mesh=manual, in_specs=specs, out_specs=BY_HEAD)
        _check(_values(sharded, arrays)[1], right)
        with jax.set_mesh(explicit):
            placed = [
                jax.device_put(x, NamedSharding(explicit, spec))
                for x, spec in zip(arrays, specs, strict=True)
            ]
            output, found = _values(function, placed)
            assert output.sharding.is_equivalent_to(placed[0].sharding, 4)
            _check(found, right)


def test_shard_map_and_explicit_shardings_give_what_one_device_gives():
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=300)


if __name__ == "__main__":
    main()
