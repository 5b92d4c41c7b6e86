"""Attention in blocks of queries and keys, in plain JAX: what a CPU should use.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691) with its own
backward pass: memory grows with seq + kv_seq, never with seq × kv_seq, unless
a bias or a mask of that size is given.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..exponential import EXPONENTIALS
from ..op import Config, Device, Implementation, Problem, Space
from ..shardings import compiler_sharded, varying
from ._blockwise_backward import backward
from ._blockwise_forward import Exp, forward
from ._blockwise_tiles import Blocks, Layout
from ._plain import gradients_of_gradients
from .masks import window_ends

#: Scores in one tile: fewer do not keep the threads busy, more fit no processor's caches.
_MIN_TILE, _MAX_TILE = 2**18, 2**22
_MAX_TILE_HEADS = 8
_BLOCKS = (64, 128, 256, 512, 1024, 2048)
#: The smallest block of a backward pass on a CPU; a GPU starts at its double.
_LEAST_BWD = 256


def blockwise(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None,
    return_residual: bool = False,
    config: Config,
) -> Any:
    """Attention computed in blocks, as ``jax.nn.dot_product_attention``.

    A row that may see no key gives zeros, and -inf as its log-sum-exp.

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H]; head n of the query uses head n // (N // K).
        value: [B, S, K, Hv].
        bias: Added to the scores, each axis 1 or full of [B, N, T, S], or None.
        mask: Boolean, True where a key is seen, shaped as the bias, or None.
        query_seq_lengths: int32 [B] or None; rows from there on give zeros.
        key_value_seq_lengths: int32 [B] or None; keys from there on are not seen.
        scale: Factor of the scores.
        is_causal: Whether query i sees keys up to i only.
        local_window_size: (left, right): query i sees keys i - left … i + right.
        return_residual: Also return the log-sum-exp, [B, T, N].
        config: A config of this implementation's space.

    Returns:
        [B, T, N, Hv] in the query's dtype; with ``return_residual`` a pair of
        that and the log-sum-exp in the same dtype, which has no gradient.
    """
    left, right = window_ends(is_causal, local_window_size)
    if key_value_seq_lengths is not None:
        # The padding beyond the last key must stay unseen whatever the length says.
        key_value_seq_lengths = jnp.minimum(key_value_seq_lengths, key.shape[1])
    call = Call(scale, left, right, tuple(sorted(config.items())))
    arrays = (query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths)
    # One type for all: what is the same on every device then gets its gradient summed.
    attend = lambda *given: _attend(call, *varying(given))  # noqa: E731
    rows = ((0, 0), (0, 1), (0, 2), (2, 3))
    out, lse = compiler_sharded(attend, arrays, (rows, (rows[0], rows[2], rows[1])))
    if return_residual:
        return out, lax.stop_gradient(lse.transpose(0, 2, 1).astype(query.dtype))
    return out


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call."""

    scale: float
    left: int | None
    right: int | None
    items: tuple[tuple[str, Any], ...]

    def layout(self, query: Array, key: Array, suffix: str) -> Layout:
        config = dict(self.items)
        block_q = config.get(f"block_q{suffix}", config["block_q"])
        block_k = config.get(f"block_k{suffix}", config["block_k"])
        return Layout(
            batch=query.shape[0],
            heads=query.shape[2],
            kv_heads=key.shape[2],
            tile_heads=config["tile_heads"],
            rows=Blocks.cut(query.shape[1], block_q),
            columns=Blocks.cut(key.shape[1], block_k),
            left=self.left,
            right=self.right,
        )

    def compute(self, query: Array) -> Any:
        wanted = dict(self.items).get("compute", "input")
        return jnp.dtype(jnp.float32) if wanted == "float32" else query.dtype

    @property
    def exp(self) -> Exp:
        return EXPONENTIALS[dict(self.items).get("exp", "native")]

    @property
    def shift(self) -> str:
        return str(dict(self.items).get("shift", "always"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, *arrays: Any) -> tuple[Array, Array]:
    query, key = arrays[:2]
    layout = call.layout(query, key, "")
    return forward(layout, call.scale, call.compute(query), call.exp, call.shift, arrays)


def _attend_fwd(call: Call, *arrays: Any) -> tuple[Any, Any]:
    saved = _attend(call, *arrays)
    return saved, (arrays, saved)


def _attend_bwd(call: Call, residuals: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    # No gradient comes from the log-sum-exp: callers stop it, and so does _gradients_bwd.
    arrays, saved = residuals
    return (*_gradients(call, arrays[:4], saved, grads[0], arrays[4:]), None, None, None)


_attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    call: Call, arrays: tuple[Any, ...], saved: Any, grad_out: Array, seen: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Gradients of query, key, value and bias from these and the output's gradient.

    ``seen`` are the mask and the lengths of queries and of keys.
    """
    query, key = arrays[:2]
    layout = call.layout(query, key, "_bwd")
    given = (*arrays, *seen)
    return backward(layout, call.scale, call.compute(query), call.exp, given, saved, grad_out)


def _gradients_fwd(call: Call, *residuals: Any) -> tuple[Any, Any]:
    return _gradients(call, *residuals), residuals


def _gradients_bwd(call: Call, residuals: Any, grads: Any) -> tuple[Any, ...]:
    arrays, saved, grad_out, seen = residuals
    found, of_grad_out = gradients_of_gradients(
        arrays, grad_out, grads, seen, call.scale, (call.left, call.right)
    )
    # What was saved follows from the arrays, by which it is differentiated in there.
    return found, jax.tree.map(jnp.zeros_like, saved), of_grad_out, None


_gradients.defvjp(_gradients_fwd, _gradients_bwd)


def block_choices(size: int, least: int, most: int) -> tuple[int, ...]:
    """Block sizes from ``least`` to ``most``, and no more than cover the axis."""
    cover = next((block for block in _BLOCKS if block >= size), most)
    return tuple(b for b in _BLOCKS if min(least, cover) <= b <= min(most, cover))


def _tile_heads_choices(problem: Problem) -> tuple[int, ...]:
    """Heads per step that divide the heads, or a group of them, evenly."""
    return tuple(
        n
        for n in range(1, _MAX_TILE_HEADS + 1)
        if problem.heads % n == 0 and (problem.group % n == 0 or n % problem.group == 0)
    )


def _space(problem: Problem, device: Device) -> Space:
    choices: dict[str, tuple[Any, ...]] = {
        "block_q": block_choices(problem.seq, 256, 2048),
        "block_k": block_choices(problem.kv_seq, 256, 1024),
        "tile_heads": _tile_heads_choices(problem),
    }
    cpu = device.platform == "cpu"
    if problem.mode == "fwd_bwd":
        least = _LEAST_BWD if cpu else 2 * _LEAST_BWD
        choices["block_q_bwd"] = block_choices(problem.seq, least, 1024)
        choices["block_k_bwd"] = block_choices(problem.kv_seq, least, 1024)
    # Elsewhere the exponential is no bottleneck.
    choices["exp"] = ("polynomial",) if cpu else ("native",)
    # A branch on an array's value stalls a GPU.
    choices["shift"] = ("needed",) if cpu else ("always",)
    if problem.dtype != "float32":
        # XLA cannot multiply every shape of 16-bit tile on a CPU, and is slow where it can.
        choices["compute"] = ("float32",) if cpu else ("float32", "input")
    return Space(choices, (lambda config: _fits(problem, config),))


def _fits(problem: Problem, config: Config) -> bool:
    """Whether every tile is of a size worth a step."""
    heads = int(config["tile_heads"])
    most = _tile_heads_choices(problem)[-1]
    for suffix in ("", "_bwd"):
        if f"block_q{suffix}" in config:
            rows = min(int(config[f"block_q{suffix}"]), problem.seq)
            columns = min(int(config[f"block_k{suffix}"]), problem.kv_seq)
            scores = heads * rows * columns
            if (scores > _MAX_TILE and heads > 1) or (scores < _MIN_TILE and heads < most):
                return False
    return True


def _supports(problem: Problem, device: Device) -> str | None:
    if "scale[array]" in problem.features:
        return "its scale must be a number, not an array"
    return None


def _default_config(problem: Problem, device: Device) -> Config:
    """Tiles of millions of scores, where XLA's products are fast on a CPU; small blocks of
    keys, and more heads at a time, where a part of a tile is hidden. On a GPU, where other
    implementations serve, these are not measured."""
    limited = problem.causal or problem.window is not None
    training = problem.mode == "fwd_bwd"
    cpu = device.platform == "cpu"
    tall = 2048 if problem.seq >= 2048 and not limited and not training else 1024
    config: dict[str, Any] = {
        "block_q": block_choices(problem.seq, 256, tall)[-1],
        "block_k": block_choices(problem.kv_seq, 256, 256 if limited else 1024)[-1],
    }
    tiles = {"": 2**21 if limited else 2**22}
    if training:
        most = _LEAST_BWD if limited and cpu else 2 * _LEAST_BWD
        config["block_q_bwd"] = block_choices(problem.seq, 256, most)[-1]
        config["block_k_bwd"] = block_choices(problem.kv_seq, 256, most)[-1]
        tiles["_bwd"] = 2**20
    config |= (
        {"exp": "polynomial", "shift": "needed"} if cpu else {"exp": "native", "shift": "always"}
    )
    if problem.dtype != "float32":
        config["compute"] = "float32" if cpu else "input"
    wished = min(
        scores
        / min(config[f"block_q{suffix}"], problem.seq)
        / min(config[f"block_k{suffix}"], problem.kv_seq)
        for suffix, scores in tiles.items()
    )
    choices = _tile_heads_choices(problem)
    for heads in sorted(choices, key=lambda n: (n > wished, abs(n - wished))):
        if _fits(problem, {**config, "tile_heads": heads}):
            return {**config, "tile_heads": heads}
    return next(iter(_space(problem, device)), {**config, "tile_heads": 1})


IMPLEMENTATION = Implementation(
    name="blockwise",
    function=blockwise,
    version=3,
    space=_space,
    supports=_supports,
    default_config=_default_config,
    own_gradient=True,
)
