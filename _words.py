"""Words for what a person reads, of which every layer makes use."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 3 min 20 s."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"
