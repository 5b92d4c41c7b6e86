"""What a long command shows: what it is doing, how far it is, when it will end.

A bar on a terminal, plain lines in a pipe; both on standard error.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..autotune.display import duration

#: Seconds between two plain lines.
_PLAIN_EVERY_S = 5.0


class Steps:
    """A number of steps under way.

    Args:
        unit: What is counted, such as ``"rows"``.
        console: Where to show it; standard error by default.
    """

    def __init__(self, unit: str, console: Console | None = None) -> None:
        self._unit = unit
        self._console = console or Console(stderr=True)
        self._live = self._console.is_terminal
        self._total = self._done = self._before = 0
        self._started = self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}  {task.fields[now]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task(unit, total=None, left="", now="")

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, total: int, done: int = 0) -> None:
        """There are ``total`` steps, of which ``done`` were done before."""
        self._total, self._done, self._before = total, done, done
        self._started = time.monotonic()
        self._bar.update(self._task, total=total, completed=done)
        if done:
            self.say(f"{done} of {total} {self._unit} are there already")

    def doing(self, text: str) -> None:
        """Something is under way."""
        self._bar.update(self._task, now=escape(text))
        if not self._live and time.monotonic() - self._last >= _PLAIN_EVERY_S:
            self.say(f"[{self._done}/{self._total}] {text}{self._left(', {} left')}")

    def advance(self, steps: int = 1) -> None:
        """So many more are done."""
        self._done += steps
        self._bar.update(self._task, completed=self._done, left=self._left("{} left"))

    def say(self, line: str) -> None:
        """A line that stays."""
        self._last = time.monotonic()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _left(self, form: str) -> str:
        fresh = self._done - self._before
        if not fresh:
            return ""
        each = (time.monotonic() - self._started) / fresh
        return form.format(f"about {duration(each * (self._total - self._done))}")


def wide_console() -> Console:
    """Standard output, without markup: it shows names of others' files.

    A pipe has no width of its own, and each row of a table stays whole.
    """
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=240, markup=False)
