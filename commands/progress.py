"""What a long command shows: what it is doing, how far it is, when it will end; its tables.

A bar on a terminal, plain lines in a pipe; both on standard error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from .._words import duration
from .interrupts import Interrupts

#: Seconds until the first plain line, for most commands have ended by then.
_PLAIN_FIRST_S = 2.0
#: Seconds between two plain lines: so many at first, a part of the time so far later on.
_PLAIN_EVERY_S = 5.0
_PLAIN_SHARE = 1 / 20
_PLAIN_RARELY_S = 60.0
#: Columns of a pipe: more than any row of a table has.
_PIPE_WIDTH = 2000


class Steps:
    """A number of steps under way; without ``begin``, it is not known how many.

    Args:
        unit: What is counted, such as ``"rows"``.
        console: Where to show it; standard error by default.
    """

    def __init__(self, unit: str, console: Console | None = None) -> None:
        self._unit = unit
        self._console = console or Console(stderr=True)
        self._live = self._console.is_terminal
        self._interrupts = Interrupts()
        self._total: int | None = None
        self._done = self._before = self._advances = 0
        self._now = ""
        self._started = self._advanced = time.monotonic()
        self._due = self._started + _PLAIN_FIRST_S
        self._telling = threading.Lock()
        self._ended = threading.Event()
        self._teller = threading.Thread(target=self._tell_on, name="shapetune-steps", daemon=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Standing(self),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._bar.add_task(unit, total=None)

    def __enter__(self) -> Steps:
        self._interrupts.__enter__()
        if self._live:
            self._bar.start()
        else:
            self._teller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._bar.stop()
        else:
            self._ended.set()
            self._teller.join()
        self._interrupts.__exit__()

    def begin(self, total: int, done: int = 0) -> None:
        """There are ``total`` steps, of which ``done`` were done before."""
        self._total, self._done, self._before = total, done, done
        self._started = self._advanced = time.monotonic()
        self._bar.update(self._task, total=total, completed=done)
        if done:
            self.say(f"{done} of {total} {self._unit} are there already")

    def doing(self, text: str) -> None:
        """Something is under way."""
        self._interrupts.check()
        self._now = text
        if not self._live:
            self._tell()

    def advance(self, steps: int = 1) -> None:
        """So many more are done."""
        self._interrupts.check()
        self._done += steps
        self._advances += 1
        self._advanced = time.monotonic()
        self._bar.update(self._task, completed=self._done)

    def say(self, line: str) -> None:
        """A line that stays."""
        now = time.monotonic()
        rarely = min((now - self._started) * _PLAIN_SHARE, _PLAIN_RARELY_S)
        self._due = now + max(_PLAIN_EVERY_S, rarely)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def standing(self) -> str:
        """How much longer it takes, and what is being done, for one line of a terminal."""
        return f"{self._left()}  {self._now}"

    def _left(self) -> str:
        now = time.monotonic()
        so_far = f"{duration(now - self._started)} so far"
        fresh = self._done - self._before
        if self._total is None or not fresh:
            return so_far
        spent = self._advanced - self._started
        # Some go on by many steps at once.
        each, here = spent / self._advances, now - self._advanced
        left = spent / fresh * (self._total - self._done) - min(here, each)
        # Steps that differ much are not told by their mean: one is found wrong by waiting.
        return so_far if here > each and left < 1 else f"about {duration(left)} left"

    def _tell_on(self) -> None:
        """Says in a pipe what is being done, also while one step takes long."""
        while not self._ended.wait(max(self._due - time.monotonic(), 0.05)):
            self._tell()

    def _tell(self) -> None:
        """One plain line, if it is time for one."""
        with self._telling:
            if self._now and time.monotonic() >= self._due:
                where = "" if self._total is None else f"[{self._done}/{self._total}] "
                self.say(f"{where}{self._now}, {self._left()}")


@contextlib.contextmanager
def at_work(doing: str) -> Iterator[None]:
    """What usually takes no two seconds, and says what it is doing if it takes longer."""
    with Steps("steps") as steps:
        steps.doing(doing)
        yield


class _Standing(ProgressColumn):
    """What is being done, told anew whenever the bar is drawn."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(Column(no_wrap=True))
        self._steps = steps

    def render(self, task: Task) -> Text:
        """The text, whatever it holds."""
        return Text(self._steps.standing())


def wide_console() -> Console:
    """Standard output, without markup: it shows names of others' files.

    A pipe has no width of its own, and each row of a table stays whole.
    """
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=_PIPE_WIDTH, markup=False)
