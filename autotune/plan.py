"""Which problems to tune: the grid that a person asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..cache.key import Problem, Window
from ..kernels.op import get_op


def grid(
    op: str,
    *,
    seq: Sequence[int],
    dim: Sequence[int],
    dtype: Sequence[str] = ("float32",),
    causal: Sequence[bool] = (False,),
    mode: Sequence[str] = ("fwd",),
    batch: Sequence[int] = (1,),
    heads: Sequence[int] = (8,),
    kv_heads: int | None = None,
    kv_seq: int | None = None,
    value_dim: int | None = None,
    window: Window = None,
) -> list[Problem]:
    """Every combination of these fields as a problem, without duplicates, in order.

    Raises:
        UnknownNameError: No such op.
        ProblemError: A field is out of range.
    """
    problems: dict[Problem, None] = {}
    for one in itertools.product(mode, dtype, dim, causal, batch, heads, seq):
        chosen_mode, chosen_dtype, size, is_causal, rows, count, length = one
        problem = Problem.make(
            op,
            seq=length,
            kv_seq=kv_seq,
            dim=size,
            value_dim=value_dim,
            dtype=chosen_dtype,
            causal=is_causal,
            window=window,
            batch=rows,
            heads=count,
            kv_heads=kv_heads,
            mode=chosen_mode,
        )
        problems[get_op(op).canonical(problem)] = None
    return list(problems)
