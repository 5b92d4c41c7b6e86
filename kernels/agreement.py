"""Agreement of the processes of one job: whether they would all run the same kernels.

Processes that compile different programs for one step wait for each other for
ever; here they compare what they decided, and stop with the difference instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from ..cache.errors import DivergenceError
from ..cache.key import Problem
from .decision import Decision
from .default import explain_problem, state

_SHOWN = 5
_LINE = "\n"


def digest(problems: Iterable[Problem] = ()) -> dict[str, str]:
    """Digests of the record set in force and of the decisions that it gives.

    Args:
        problems: The problems to decide; those that were called so far if there are none.
    """
    lines = "\n".join(_lines(problems))
    return {
        "records": state().records.digest,
        "decisions": hashlib.blake2b(lines.encode(), digest_size=8).hexdigest(),
    }


def _lines(problems: Iterable[Problem]) -> list[str]:
    chosen: list[Decision] = [explain_problem(problem) for problem in problems]
    chosen = chosen or list(state().decisions.values())
    return sorted(f"{one.problem.key} → {one.candidate.key}" for one in chosen)


def require_agreement(problems: Iterable[Problem] = ()) -> None:
    """Makes sure that every process of a job has the same records and decisions.

    All processes must call it, with the same problems; with one process it does
    nothing. What differs between caches does no harm as long as no decision does,
    so that only decisions are compared; the digests of the records are part of the
    message.

    Args:
        problems: The problems that the job will call; those that were called so
            far if there are none.

    Raises:
        DivergenceError: They differ; the message names processes and problems.
    """
    import jax

    if jax.process_count() == 1:
        return
    texts = _gather(_LINE.join([state().records.digest, *_lines(problems)]))
    told = [text.split(_LINE) for text in texts]
    if all(lines[1:] == told[0][1:] for lines in told):
        return
    raise DivergenceError(_difference(told))


def _gather(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.array([len(data)], np.int32)))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def _difference(told: list[list[str]]) -> str:
    """What the first process that differs has otherwise than process 0."""
    mine, other, index = told[0], told[0], 0
    for index, other in enumerate(told):  # noqa: B007
        if other[1:] != mine[1:]:
            break
    only = [
        *(f"process 0: {line}" for line in mine[1:] if line not in other[1:]),
        *(f"process {index}: {line}" for line in other[1:] if line not in mine[1:]),
    ]
    more = f"\n  … and {len(only) - 2 * _SHOWN} more" if len(only) > 2 * _SHOWN else ""
    return (
        f"process {index} would run other kernels than process 0 (records {mine[0]} and "
        f"{other[0]}); give all processes one cache, or SHAPETUNE_DISABLE=1:\n  "
        + "\n  ".join(only[: 2 * _SHOWN])
        + more
    )
