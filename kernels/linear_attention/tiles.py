"""How the chunked form sees the arrays: spans of chunks, heads sorted into groups.

A span is a few chunks that are computed side by side; spans follow each other.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

#: As which (argument, axis) each axis of the two outputs is sharded, if that is.
OUTPUT_AXES = (((0, 0), (0, 1), (0, 2), (2, 3)), ((0, 0), (0, 2), None, (2, 3)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static shape of one chunked computation.

    Attributes:
        batch: B.
        length: T.
        kv_heads: K.
        group: G = N / K, query heads for each key head.
        late: Positions by which keys and values come late, at most T.
        chunk: Positions in a chunk.
        span: Chunks in a span.
        kind: The feature map.
        exp: The exponential of the feature map.
        per_head: Whether the state differs between the query heads of a group,
            which it does only where an initial state tells them apart.
    """

    batch: int
    length: int
    kv_heads: int
    group: int
    late: int
    chunk: int
    span: int
    kind: str
    exp: str
    per_head: bool

    @property
    def seen(self) -> int:
        """Keys that some query sees."""
        return self.length - self.late

    @property
    def states(self) -> int:
        """R: states for each key head, G or 1."""
        return self.group if self.per_head else 1

    def queries(self, x: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
        """Rows of [B, T, N, X] as float32 [B, K, m, R, (G/R) c, X]."""
        x = self._rows(x, start, count)
        sizes = (self.batch, -1, self.chunk, self.kv_heads, self.states)
        x = x.reshape(*sizes, self.group // self.states, x.shape[-1])
        x = x.transpose(0, 3, 1, 4, 5, 2, 6)
        return _once(x.reshape(*x.shape[:4], -1, x.shape[-1]))

    def keys(self, x: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
        """Rows of [B, T, K, X] as float32 [B, K, m, c, X]."""
        x = self._rows(x, start, count)
        x = x.reshape(self.batch, -1, self.chunk, self.kv_heads, x.shape[-1])
        return _once(x.transpose(0, 3, 1, 2, 4))

    def _rows(self, x: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
        x = lax.dynamic_slice_in_dim(x, start, count, axis=1).astype(jnp.float32)
        # Values of zero keep the padding out of the state and out of the gradients.
        return jnp.pad(x, ((0, 0), (0, -count % self.chunk), (0, 0), (0, 0)))

    def put_queries(
        self, x: jax.Array, rows: jax.Array, start: jax.Array | int, count: int
    ) -> jax.Array:
        """``x`` with the rows that ``queries`` would read replaced."""
        parts = (*rows.shape[:4], self.group // self.states, self.chunk, rows.shape[-1])
        rows = rows.reshape(parts).transpose(0, 2, 5, 1, 3, 4, 6)
        return self._put(x, rows, start, count)

    def put_keys(
        self, x: jax.Array, rows: jax.Array, start: jax.Array | int, count: int
    ) -> jax.Array:
        """``x`` with the rows that ``keys`` would read replaced."""
        return self._put(x, rows.transpose(0, 2, 3, 1, 4), start, count)

    def _put(self, x: jax.Array, rows: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
        rows = rows.reshape(self.batch, -1, *x.shape[2:])[:, :count].astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(x, rows, start, axis=1)

    def by_group(self, state: jax.Array) -> jax.Array:
        """[B, N, 2H, Hv] to [B, K, G, 2H, Hv]."""
        return state.reshape(self.batch, self.kv_heads, self.group, *state.shape[2:])


def _once(x: jax.Array) -> jax.Array:
    """``x`` in memory: XLA would transpose it again for every reader."""
    return lax.optimization_barrier(x)


def product(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix products over the axes ``contract`` (-1 or -2); all axes before are batch."""
    batch = tuple(range(left.ndim - 2))
    axes = ((left.ndim + contract[0],), (right.ndim + contract[1],))
    return lax.dot_general(
        left,
        right,
        (axes, (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def sums_before(parts: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Running sums over axis 2: ``start`` plus the parts before each, and plus all."""
    sums = [start]
    for i in range(parts.shape[2]):
        sums.append(sums[-1] + parts[:, :, i])
    return jnp.stack(sums[:-1], axis=2), sums[-1]


def sums_after(parts: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Running sums over axis 2 from the back: ``end`` plus the parts after each, and plus all."""
    before, total = sums_before(parts[:, :, ::-1], end)
    return before[:, :, ::-1], total


def merged(x: jax.Array) -> jax.Array:
    """[B, K, m, R, rows, X] to [B, K, m, R rows, X]."""
    return x.reshape(*x.shape[:3], -1, x.shape[-1])
