"""Records without jax, for processes that are started by the dozen."""

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

DEVICE = Device("cuda", "NVIDIA Example 1", "8.6", 82, 101376, 25300000000, "580.1")


def record(seq: int, writer: int = 0, *, device: Device = DEVICE, pad: int = 0) -> Record:
    """A record whose config tells who wrote it; ``pad`` makes it larger by about so many trials."""
    ratio = 1.0 + (writer * 7 + seq) % 97 / 97
    chosen = Candidate("blockwise", {"block_q": seq, "block_k": writer + 1})
    return Record(
        problem=Problem.make("attention", seq=seq, dim=64),
        device=device,
        chosen=chosen,
        heuristic=Candidate("xla", {}),
        comparison=Comparison(ratio, ratio * 0.95, ratio * 1.05, 15, 2.0 * ratio, 2.0),
        verification=Verification(1e-6, 1e-5, ("normal",)),
        provenance=Provenance("0.1.0", "0.10.2", "0.10.2", 1, 1, "00", 1.7e9 + writer, 10.0),
        trials=tuple(Trial(chosen, "ok", 1.0 + n, 1.0, 2.0 + n) for n in range(1 + pad)),
    )
