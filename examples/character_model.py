"""Trains a small character model of RAttention layers, then writes with it.

The text is Python's own documentation, which ships with every Python. Run it
from a place where shapetune is installed::

    python examples/character_model.py --steps 150
"""

from __future__ import annotations

import argparse
import functools
import pydoc_data.topics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shapetune
from shapetune.kernels import rattention
from shapetune.kernels.rattention import RAttentionConfig

LAYERS = 2
LAYER = RAttentionConfig(
    width=96, heads=4, head_dim=24, kv_heads=2, window=16, meta_tokens=4, qk_scales=True
)
Params = dict[str, Any]


def load_text() -> tuple[np.ndarray, str]:
    """The text as indices into its alphabet, and the alphabet."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    alphabet = "".join(sorted(set(text)))
    index = {letter: i for i, letter in enumerate(alphabet)}
    return np.array([index[letter] for letter in text], np.int32), alphabet


def init(rng: jax.Array, letters: int) -> Params:
    """Random parameters of the model."""
    rng, key = jax.random.split(rng)
    params: Params = {"letters": 0.02 * jax.random.normal(key, (letters, LAYER.width))}
    for i in range(LAYERS):
        rng, mixing, up, down = jax.random.split(rng, 4)
        width = LAYER.width
        params[f"layer {i}"] = {
            "mixing": rattention.init(mixing, LAYER),
            "up": jax.random.normal(up, (width, 4 * width)) / width**0.5,
            "down": jax.random.normal(down, (4 * width, width)) / (4 * width) ** 0.5,
        }
    return params


def normed(x: jax.Array) -> jax.Array:
    """Root-mean-square norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def logits_of(params: Params, letters: jax.Array) -> jax.Array:
    """[B, T] letters to the logits of the next ones, [B, T, alphabet]."""
    x = params["letters"][letters]
    for i in range(LAYERS):
        layer = params[f"layer {i}"]
        x = x + rattention.apply(layer["mixing"], normed(x), LAYER)
        x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
    return normed(x) @ params["letters"].T


def next_logits(
    params: Params, states: list[Any], letter: jax.Array
) -> tuple[jax.Array, list[Any]]:
    """The same for one more letter [B], at a cost that does not grow."""
    x, after = params["letters"][letter], []
    for i in range(LAYERS):
        layer = params[f"layer {i}"]
        mixed, state = rattention.decode(layer["mixing"], states[i], normed(x), LAYER)
        after.append(state)
        x = x + mixed
        x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
    return normed(x) @ params["letters"].T, after


def loss_of(params: Params, rows: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats for each letter of [B, T + 1]."""
    logits = jax.nn.log_softmax(logits_of(params, rows[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(logits, rows[:, 1:, None], axis=-1))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params: Params, moments: Any, rows: jax.Array, step: jax.Array) -> Any:
    """One step of Adam (https://arxiv.org/abs/1412.6980)."""
    loss, grads = jax.value_and_grad(loss_of)(params, rows)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], grads)
    rate = 3e-3 * jnp.minimum(1.0, step / 20) * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, first, second
    )
    return params, (first, second), loss


def train(steps: int, batch: int, seq: int, seed: int = 0) -> tuple[Params, str, list[float]]:
    """Trains, and returns the parameters, the alphabet and the loss of every step."""
    text, alphabet = load_text()
    rng = np.random.default_rng(seed)
    params = init(jax.random.key(seed), len(alphabet))
    moments = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    losses = []
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(text) - seq - 1, batch)
        rows = np.stack([text[a : a + seq + 1] for a in starts])
        params, moments, loss = train_step(params, moments, rows, jnp.float32(step))
        losses.append(float(loss))
        if step == 1 or step % 25 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f} nats per letter", flush=True)
    return params, alphabet, losses


def write(params: Params, alphabet: str, length: int, seed: int = 0) -> str:
    """Text of the model's own, letter by letter."""
    step = jax.jit(next_logits)
    states = [
        rattention.start(params[f"layer {i}"]["mixing"], LAYER, batch=1) for i in range(LAYERS)
    ]
    letter, rng, text = jnp.array([alphabet.index("\n")]), jax.random.key(seed), ""
    for _ in range(length):
        rng, key = jax.random.split(rng)
        logits, states = step(params, states, letter)
        letter = jax.random.categorical(key, logits / 0.7)
        text += alphabet[int(letter[0])]
    return text


def main() -> None:
    """Trains, shows what the dispatcher chose, and writes a little."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    options = parser.parse_args()
    begun = time.perf_counter()
    params, alphabet, losses = train(options.steps, options.batch, options.seq)
    print(f"{options.steps} steps in {time.perf_counter() - begun:.0f} s")
    shape = {"seq": options.seq, "dim": LAYER.head_dim, "batch": options.batch, "causal": True}
    heads = {"heads": LAYER.heads, "kv_heads": LAYER.groups, "mode": "fwd_bwd"}
    for op, more in (
        ("attention", {"window": (LAYER.window, 0)}),
        ("linear_attention", {"window": LAYER.window, "features": ("state",)}),
    ):
        decision = shapetune.explain(op, **shape, **heads, **more)
        print(f"{op}: {decision.candidate.key} ({decision.tier})")
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}\n")
    print(write(params, alphabet, 300))


if __name__ == "__main__":
    main()
