"""Where the commands show how far they are, and print their tables."""

from __future__ import annotations

from rich.console import Console

from ..autotune.progress import Steps

__all__ = ["Steps", "wide_console"]


def wide_console() -> Console:
    """Standard output, without markup: it shows names of others' files.

    A pipe has no width of its own, and each row of a table stays whole.
    """
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=240, markup=False)
