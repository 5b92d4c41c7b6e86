"""Records to test with: small, valid, and varied by the arguments."""

from __future__ import annotations

import jax

from shapetune.cache import (
    Candidate,
    Comparison,
    Device,
    Problem,
    Provenance,
    Record,
    Trial,
    Verification,
)
from shapetune.kernels import current_device, get_op

BLOCKS = {"block_q": 512, "block_k": 512}


def problem(**fields) -> Problem:
    """An attention problem; ``fields`` override those of a small one."""
    return Problem.make("attention", **{"seq": 1024, "dim": 64, **fields})


def record(
    about: Problem | None = None,
    *,
    device: Device | None = None,
    chosen: Candidate | None = None,
    ratio: float = 1.5,
    made: float = 1_700_000_000.0,
    jax_version: str = jax.__version__,
    version: int | None = None,
) -> Record:
    """A record that this device would use for ``about``."""
    about = about or problem()
    device = device or current_device()
    op = get_op(about.op)
    heuristic = Candidate("xla", {})
    if chosen is None:
        blockwise = op.implementation("blockwise")
        chosen = Candidate("blockwise", dict(blockwise.default_config(about, device)))
    one = op.implementations.get(chosen.implementation)
    return Record(
        problem=about,
        device=device,
        chosen=chosen,
        heuristic=heuristic,
        comparison=Comparison(ratio, ratio * 0.95, ratio * 1.05, 15, 2.0 * ratio, 2.0),
        verification=Verification(1e-6, 1e-5, ("normal",)),
        provenance=Provenance(
            shapetune="0.1.0",
            jax=jax_version,
            jaxlib=jax_version,
            chosen_version=version if version is not None else (one.version if one else 1),
            heuristic_version=op.implementation("xla").version,
            host="00",
            time=made,
            seconds=10.0,
        ),
        trials=(
            Trial(heuristic, "ok", 2.0 * ratio, 1.9 * ratio, 2.1 * ratio, 5, 1, 0.1, 4.0, 1e-6),
            Trial(chosen, "ok", 2.0, 1.9, 2.1, 5, 1, 0.1, 1.0, 1e-6),
            Trial(Candidate("blockwise", BLOCKS), "compile_error", note="ValueError: no"),
        ),
    )
