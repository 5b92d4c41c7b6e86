"""The Pallas kernels of linear attention: what one program computes for one chunk.

The state is kept in halves, one for each half of the feature map, and padded to
powers of two: [.., 2, Hp, Vp]. Everything is summed in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..pallas import triton

Array = jax.Array
Refs = Mapping[str, Any]
Halves = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The static shape of a launch, shared by all of its programs.

    Attributes:
        length: T.
        group: G, query heads for each key head.
        dim: H.
        value_dim: Hv.
        late: Positions by which keys and values come late, less than T.
        chunk: Positions in a chunk.
        tile: Of the value dimension, what one program handles at a time.
        kind: The feature map.
        precision: Of the products of float32 tiles.
    """

    length: int
    group: int
    dim: int
    value_dim: int
    late: int
    chunk: int
    tile: int
    kind: str
    precision: lax.Precision

    @property
    def seen(self) -> int:
        """Keys that some query sees."""
        return self.length - self.late

    @property
    def chunks(self) -> int:
        """Chunks of keys."""
        return -(-self.seen // self.chunk)

    @property
    def tiles(self) -> int:
        """Tiles of the value dimension."""
        return triton.padded(self.value_dim) // self.tile

    def dot(self, left: Array, right: Array, contract: tuple[int, int] = (1, 0)) -> Array:
        """A matrix product of two tiles."""
        return triton.dot(left, right, contract=contract, precision=self.precision)

    def rows(self, ref: Any, place: tuple[Any, Any], i: Any, late: int, columns: Any) -> Array:
        """Rows of chunk i of a [B, T, heads, X] array, float32, zeros beyond its edges."""
        index, valid = self._index(ref, place, i, late, columns)
        return triton.load(ref, index, valid).astype(jnp.float32)

    def put(
        self, ref: Any, rows: Array, place: tuple[Any, Any], i: Any, late: int, columns: Any
    ) -> None:
        """Writes what ``rows`` would read."""
        index, valid = self._index(ref, place, i, late, columns)
        triton.store(ref, index, rows, valid)

    def _index(
        self, ref: Any, place: tuple[Any, Any], i: Any, late: int, columns: Any
    ) -> tuple[tuple[Any, ...], Array | None]:
        (batch, head), (first, count, size) = place, columns
        start = late + i * self.chunk
        ragged = self.seen % self.chunk
        inside = triton.every(
            [
                triton.positions(start, self.chunk, 0) < late + self.seen if ragged else None,
                triton.positions(first, count, 1) < size if triton.padded(size) > size else None,
            ]
        )
        if inside is not None:
            inside = jnp.broadcast_to(inside, (self.chunk, count))
        return (batch, triton.span(start, self.chunk), head, triton.span(first, count)), inside

    def features(self, ref: Any, place: tuple[Any, Any], i: Any, late: int) -> Halves:
        """Both halves of phi of the rows of chunk i, [c, Hp] each."""
        padded = triton.padded(self.dim)
        x = self.rows(ref, place, i, late, (0, padded, self.dim))
        if self.kind == "relu":
            return jnp.maximum(x, 0.0), jnp.maximum(-x, 0.0)
        real = None if padded == self.dim else triton.positions(0, padded, 1) < self.dim
        return _softmax(x, real), _softmax(-x, real)

    def put_gradient(
        self, ref: Any, y: Halves, g: Halves, place: tuple[Any, Any], i: Any, late: int
    ) -> None:
        """Writes the gradient at x, from the halves of phi(x) and the gradients there."""
        if self.kind == "relu":
            dx = jnp.where(y[0] > 0, g[0], 0.0) - jnp.where(y[1] > 0, g[1], 0.0)
        else:
            dx = _softmax_gradient(y[0], g[0]) - _softmax_gradient(y[1], g[1])
        columns = (0, triton.padded(self.dim), self.dim)
        self.put(ref, dx, place, i, late, columns)

    def values(self, j: Any) -> tuple[Any, int, int]:
        """The columns of value tile j: first, count, and how many there are in all."""
        return j * self.tile, self.tile, self.value_dim

    def states(self, ref: Any, *place: Any) -> Halves:
        """Both halves of a state tile [Hp, tile]; the last of ``place`` is the value tile."""
        *index, j = place
        columns = triton.span(j * self.tile, self.tile)
        first, second = (
            triton.load(ref, (*index, half, slice(None), columns)) for half in range(2)
        )
        return first, second

    def put_states(self, ref: Any, states: Halves, *place: Any) -> None:
        """Writes what ``states`` would read."""
        *index, j = place
        columns = triton.span(j * self.tile, self.tile)
        for half in range(2):
            triton.store(ref, (*index, half, slice(None), columns), states[half])

    def scores(self, left: Halves, right: Halves) -> Array:
        """The products of features, zero where the key comes after the query."""
        return self.triangle(
            self.dot(left[0], right[0], (1, 1)) + self.dot(left[1], right[1], (1, 1))
        )

    def triangle(self, scores: Array) -> Array:
        """The scores with those of later keys set to zero."""
        after = triton.positions(0, self.chunk, 0) >= triton.positions(0, self.chunk, 1)
        return jnp.where(after, scores, 0.0)


def _softmax(x: Array, real: Array | None) -> Array:
    if real is not None:
        x = jnp.where(real, x, -jnp.inf)
    e = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    return e / jnp.sum(e, axis=1, keepdims=True)


def _softmax_gradient(y: Array, g: Array) -> Array:
    return y * (g - jnp.sum(g * y, axis=1, keepdims=True))


def _program(kernel: Kernel) -> tuple[Array, Array, Array, Array]:
    """Value tile, chunk, head and batch row of this program."""
    own, head, batch = triton.program_ids(3)
    return own % kernel.tiles, own // kernel.tiles, head, batch


def chunk_sums(kernel: Kernel, refs: Refs) -> None:
    """Writes ``sums``, K^T V of each chunk, one program a key head."""
    j, i, head, batch = _program(kernel)
    k = kernel.features(refs["key"], (batch, head), i, 0)
    v = kernel.rows(refs["value"], (batch, head), i, 0, kernel.values(j))
    sums = kernel.dot(k[0], v, (0, 0)), kernel.dot(k[1], v, (0, 0))
    kernel.put_states(refs["sums"], sums, batch, head, i, j)


def gradient_sums(kernel: Kernel, refs: Refs) -> None:
    """Writes ``sums``, Q^T dO of each chunk, one program a query head."""
    j, i, head, batch = _program(kernel)
    q = kernel.features(refs["query"], (batch, head), i, kernel.late)
    do = kernel.rows(refs["d_output"], (batch, head), i, kernel.late, kernel.values(j))
    sums = kernel.dot(q[0], do, (0, 0)), kernel.dot(q[1], do, (0, 0))
    kernel.put_states(refs["sums"], sums, batch, head, i, j)


def running_sums(count: int, block: int, reverse: bool, refs: Refs) -> None:
    """Writes ``before``, the sums of the chunks before each, and ``total``, that of all.

    Sums [heads, chunks, elements] begin with ``start`` [heads, elements]; in
    reverse they run from the last chunk to the first.
    """
    own, head = triton.program_ids(2)
    columns = triton.span(own * block, block)

    def step(i: Any, total: Array) -> Array:
        i = count - 1 - i if reverse else i
        triton.store(refs["before"], (head, i, columns), total)
        return total + triton.load(refs["sums"], (head, i, columns))

    total = triton.load(refs["start"], (head, columns))
    triton.store(refs["total"], (head, columns), triton.loop(0, count, step, total))


def chunk_outputs(kernel: Kernel, refs: Refs) -> None:
    """Writes ``output``, one program a chunk and query head."""
    j, i, head, batch = _program(kernel)
    own = kernel.states(refs["before"], batch, head // kernel.group, i, j)
    _put_output(kernel, refs, own, (j, i, head, batch))


def _put_output(kernel: Kernel, refs: Refs, state: Halves, place: tuple[Any, ...]) -> Halves:
    """Writes the output rows of a chunk, and returns the chunk's K^T V."""
    j, i, head, batch = place
    shared = (batch, head // kernel.group)
    q = kernel.features(refs["query"], (batch, head), i, kernel.late)
    k = kernel.features(refs["key"], shared, i, 0)
    v = kernel.rows(refs["value"], shared, i, 0, kernel.values(j))
    if "base" in refs:
        base = kernel.states(refs["base"], batch, head, j)
        state = state[0] + base[0], state[1] + base[1]
    rows = kernel.dot(kernel.scores(q, k), v)
    rows += kernel.dot(q[0], state[0]) + kernel.dot(q[1], state[1])
    kernel.put(refs["output"], rows, (batch, head), i, kernel.late, kernel.values(j))
    return kernel.dot(k[0], v, (0, 0)), kernel.dot(k[1], v, (0, 0))


def fused_outputs(kernel: Kernel, refs: Refs) -> None:
    """All of the forward pass, one program a query head and value tile.

    Heads of a group all write the same states.
    """
    j, head, batch = triton.program_ids(3)
    shared = (batch, head // kernel.group)

    def step(i: Any, state: Halves) -> Halves:
        kernel.put_states(refs["before"], state, *shared, i, j)
        sums = _put_output(kernel, refs, state, (j, i, head, batch))
        return state[0] + sums[0], state[1] + sums[1]

    state = kernel.states(refs["start"], *shared, j)
    state = triton.loop(0, kernel.chunks, step, state)
    kernel.put_states(refs["total"], state, *shared, j)


def query_gradient(kernel: Kernel, refs: Refs) -> None:
    """Writes ``d_query``: dA = (dO V^T) * M, and dQ = dO H^T + dA K."""
    i, head, batch = triton.program_ids(3)
    shared = (batch, head // kernel.group)
    q = kernel.features(refs["query"], (batch, head), i, kernel.late)
    k = kernel.features(refs["key"], shared, i, 0)

    def of_tile(j: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        do = kernel.rows(refs["d_output"], (batch, head), i, kernel.late, kernel.values(j))
        v = kernel.rows(refs["value"], shared, i, 0, kernel.values(j))
        state = kernel.states(refs["before"], *shared, i, j)
        if "base" in refs:
            base = kernel.states(refs["base"], batch, head, j)
            state = state[0] + base[0], state[1] + base[1]
        first, second, d_scores = carry
        return (
            first + kernel.dot(do, state[0], (1, 1)),
            second + kernel.dot(do, state[1], (1, 1)),
            d_scores + kernel.dot(do, v, (1, 1)),
        )

    g, d_scores = _over_tiles(kernel, of_tile, q)
    g = g[0] + kernel.dot(d_scores, k[0]), g[1] + kernel.dot(d_scores, k[1])
    kernel.put_gradient(refs["d_query"], q, g, (batch, head), i, kernel.late)


def _over_tiles(
    kernel: Kernel, of_tile: Callable[[Any, tuple[Array, ...]], tuple[Array, ...]], like: Halves
) -> tuple[Halves, Array]:
    """What ``of_tile`` sums over the value tiles: halves as ``like``, and [c, c] scores."""
    scores = jnp.zeros((kernel.chunk, kernel.chunk), jnp.float32)
    carry: tuple[Array, ...] = (jnp.zeros_like(like[0]), jnp.zeros_like(like[1]), scores)
    # A loop that runs once would still keep its sums apart from their use.
    carry = of_tile(0, carry) if kernel.tiles == 1 else triton.loop(0, kernel.tiles, of_tile, carry)
    return (carry[0], carry[1]), kernel.triangle(carry[2])


def key_value_gradient(kernel: Kernel, refs: Refs) -> None:
    """Writes ``d_key`` and ``d_value`` where one tile holds all values.

    Summed over the query heads of a group: dK = dA^T Q + V dH^T and
    dV = ((Q K^T) * M)^T dO + K dH.
    """
    i, head, batch = triton.program_ids(3)
    k = kernel.features(refs["key"], (batch, head), i, 0)
    v = kernel.rows(refs["value"], (batch, head), i, 0, kernel.values(0))

    def of_head(member: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        place = (batch, head * kernel.group + member)
        q, do, after = _of_query_head(kernel, refs, place, i, 0)
        g = _key_slopes(kernel, refs, place, i, q, k, (v, do, after))
        dv = _value_slopes(kernel, q, k, do, after)
        return carry[0] + g[0], carry[1] + g[1], carry[2] + dv

    zeros = (jnp.zeros_like(k[0]), jnp.zeros_like(k[1]), jnp.zeros_like(v))
    first, second, dv = _over_heads(kernel, of_head, zeros)
    kernel.put_gradient(refs["d_key"], k, (first, second), (batch, head), i, 0)
    kernel.put(refs["d_value"], dv, (batch, head), i, 0, kernel.values(0))


def key_gradient(kernel: Kernel, refs: Refs) -> None:
    """Writes ``d_key``, walking over the value tiles."""
    i, head, batch = triton.program_ids(3)
    k = kernel.features(refs["key"], (batch, head), i, 0)

    def of_head(member: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        place = (batch, head * kernel.group + member)
        q = kernel.features(refs["query"], place, i, kernel.late)
        g = _key_slopes(kernel, refs, place, i, q, k, None)
        return carry[0] + g[0], carry[1] + g[1]

    zeros = (jnp.zeros_like(k[0]), jnp.zeros_like(k[1]))
    first, second = _over_heads(kernel, of_head, zeros)
    kernel.put_gradient(refs["d_key"], k, (first, second), (batch, head), i, 0)


def value_gradient(kernel: Kernel, refs: Refs) -> None:
    """Writes ``d_value``, one program a value tile."""
    j, i, head, batch = _program(kernel)
    k = kernel.features(refs["key"], (batch, head), i, 0)

    def of_head(member: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        place = (batch, head * kernel.group + member)
        q, do, after = _of_query_head(kernel, refs, place, i, j)
        return (carry[0] + _value_slopes(kernel, q, k, do, after),)

    zeros = (jnp.zeros((kernel.chunk, kernel.tile), jnp.float32),)
    (dv,) = _over_heads(kernel, of_head, zeros)
    kernel.put(refs["d_value"], dv, (batch, head), i, 0, kernel.values(j))


def _over_heads(
    kernel: Kernel,
    of_head: Callable[[Any, tuple[Array, ...]], tuple[Array, ...]],
    zeros: tuple[Array, ...],
) -> tuple[Array, ...]:
    if kernel.group == 1:
        return of_head(0, zeros)
    return triton.loop(0, kernel.group, of_head, zeros)


def _of_query_head(
    kernel: Kernel, refs: Refs, place: tuple[Any, Any], i: Any, j: Any
) -> tuple[Halves, Array, Halves]:
    """Features of the queries, gradients of the outputs, and the gradient at the state after."""
    q = kernel.features(refs["query"], place, i, kernel.late)
    do = kernel.rows(refs["d_output"], place, i, kernel.late, kernel.values(j))
    return q, do, kernel.states(refs["after"], *place, i, j)


def _key_slopes(
    kernel: Kernel,
    refs: Refs,
    place: tuple[Any, Any],
    i: Any,
    q: Halves,
    k: Halves,
    loaded: tuple[Array, Array, Halves] | None,
) -> Halves:
    """dA^T Q + V dH^T of one query head; the only value tile may be loaded already."""
    batch, own = place

    def of_tile(j: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        if loaded is not None:
            v, do, after = loaded
        else:
            columns = kernel.values(j)
            v = kernel.rows(refs["value"], (batch, own // kernel.group), i, 0, columns)
            do = kernel.rows(refs["d_output"], place, i, kernel.late, columns)
            after = kernel.states(refs["after"], *place, i, j)
        first, second, d_scores = carry
        return (
            first + kernel.dot(v, after[0], (1, 1)),
            second + kernel.dot(v, after[1], (1, 1)),
            d_scores + kernel.dot(do, v, (1, 1)),
        )

    g, d_scores = _over_tiles(kernel, of_tile, k)
    return (
        g[0] + kernel.dot(d_scores, q[0], (0, 0)),
        g[1] + kernel.dot(d_scores, q[1], (0, 0)),
    )


def _value_slopes(kernel: Kernel, q: Halves, k: Halves, do: Array, after: Halves) -> Array:
    """((Q K^T) * M)^T dO + K dH of one query head and value tile."""
    dv = kernel.dot(kernel.scores(q, k), do, (0, 0))
    return dv + kernel.dot(k[0], after[0]) + kernel.dot(k[1], after[1])
