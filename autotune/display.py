"""What a person sees of a tuning run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from .._words import duration
from ..cache.key import Candidate, Problem
from ..cache.record import Record, Trial
from .final import front, samples_at_most
from .measure import SAMPLE_S
from .options import Listener, Options
from .outcome import in_one_line

#: Seconds between two plain lines about the same problem.
_PLAIN_EVERY_S = 5.0
#: Characters of a failed trial's note in one line.
_NOTE = 160


def speedup(record: Record) -> str:
    """The gain over the heuristic with its interval, in words for a table."""
    if record.heuristic_is_best:
        return "heuristic is best"
    found = record.comparison
    return f"{found.ratio:.2f}× [{found.low:.2f}, {found.high:.2f}]"


def milliseconds(value: float | None) -> str:
    """A time in milliseconds to three digits."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def records_table(records: Sequence[Record]) -> Table:
    """The closing table of a run."""
    table = Table(title=None, header_style="bold")
    table.add_column("problem", overflow="fold")
    table.add_column("heuristic ms", justify="right")
    table.add_column("chosen", overflow="fold")
    table.add_column("ms", justify="right")
    table.add_column("speedup [95%]", overflow="fold")
    table.add_column("trials", justify="right")
    table.add_column("s", justify="right")
    for record in records:
        found = record.comparison
        table.add_row(
            record.problem.label,
            milliseconds(found.heuristic_ms),
            record.chosen.key,
            milliseconds(found.chosen_ms),
            speedup(record),
            str(len(record.trials)),
            f"{record.provenance.seconds:.0f}",
        )
    return table


def front_table(record: Record) -> Table:
    """The trials of a problem that none beats in both time and temporary memory."""
    table = Table(title=record.problem.label, title_justify="left", header_style="bold")
    table.add_column("candidate", overflow="fold")
    table.add_column("ms", justify="right")
    table.add_column("temporary MiB", justify="right")
    for trial in front(record.trials):
        table.add_row(
            trial.candidate.key, milliseconds(trial.median_ms), milliseconds(trial.temp_mb)
        )
    return table


def split(record: Record) -> str:
    """Where the seconds of a problem went."""
    spent = record.provenance
    parts = [
        f"{name} {getattr(spent, f'{name}_s'):.1f}"
        for name in ("compile", "verify", "screen", "time", "compare", "search", "idle")
    ]
    return f"{duration(spent.seconds)}: " + ", ".join(parts)


def outcomes(trials: Sequence[Trial]) -> str:
    """How many trials came to what: one word for each kind, the good ones first."""
    counts = collections.Counter("screened" if t.screened else t.status for t in trials)
    order = sorted(counts, key=lambda word: (word != "ok", word != "screened", word))
    return ", ".join(f"{counts[word]} {word.replace('_', ' ')}" for word in order)


def failures(trials: Sequence[Trial]) -> list[str]:
    """A line for each implementation of which nothing worked, with what the first trial said."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.candidate.implementation, []).append(trial)
    lines = []
    for name, tried in found.items():
        if any(trial.status == "ok" for trial in tried):
            continue
        note = in_one_line(tried[0].note, _NOTE)
        lines.append(f"{name}: {outcomes(tried)}" + (f"; {note}" if note else ""))
    return lines


class _Clock:
    """How long a run may still take, from what its problems took so far."""

    def __init__(self) -> None:
        self._problem_started = time.monotonic()
        self._search_ended: float | None = None
        self._spent: list[float] = []
        self.problems: Sequence[Problem] = ()
        self._options = Options()

    def run_started(self, problems: Sequence[Problem], options: Options) -> None:
        self.problems = problems
        self._options = options

    def problem_started(self) -> None:
        self._problem_started = time.monotonic()
        self._search_ended = None

    def search_ended(self) -> None:
        self._search_ended = self._search_ended or time.monotonic()

    def problem_done(self) -> None:
        self._spent.append(time.monotonic() - self._problem_started)

    def left(self, index: int, done: int, total: int, sample_s: float) -> float:
        """Seconds until the run ends, about; a sample of a finalist takes ``sample_s``."""
        now = time.monotonic()
        elapsed = now - self._problem_started
        here = samples_at_most(self._options) * sample_s
        if self._search_ended is None:
            budget = max(self._options.budget - elapsed, 0.0)
            here += min(elapsed * (total - done) / done, budget) if done else budget
        else:
            here -= now - self._search_ended
        here = max(here, 0.0)
        spent = self._spent or [max(elapsed + here, 1.0)]
        typical = sum(spent) / len(spent)
        return here + typical * (len(self.problems) - index - 1)


class _Display(Listener):
    """What the live and the plain display share: the state of the run in one line.

    ``check`` is called at each step of the run, which it may stop by raising.
    """

    def __init__(self, console: Console, check: Callable[[], None] = lambda: None) -> None:
        self.console = console
        self._check = check
        self._clock = _Clock()
        self._index = self._total = self._done = 0
        self._problem: Problem | None = None
        self._heuristic: Trial | None = None
        self._best: Trial | None = None

    def run_started(self, problems: Sequence[Problem], options: Options) -> None:
        self._clock.run_started(problems, options)

    def problem_started(self, index: int, problem: Problem, total: int) -> None:
        self._check()
        self._clock.problem_started()
        self._index, self._problem, self._total = index, problem, total
        self._done, self._best, self._heuristic = 0, None, None

    def trials_known(self, trials: Sequence[Trial]) -> None:
        self._done = len(trials)
        if not trials:
            return
        quarantined = sum(t.note.startswith("quarantined") for t in trials)
        text = f"{len(trials) - quarantined} trial(s) known from before"
        if quarantined:
            text += f", {quarantined} candidate(s) quarantined"
        self._say(f"{self._where(self._index)} {text}")

    def trial_done(self, trial: Trial, best: Trial | None) -> None:
        self._check()
        self._done += 1
        self._heuristic = self._heuristic or trial
        self._best = best

    def problem_done(self, index: int, record: Record, fresh: bool) -> None:
        if fresh:
            self._clock.problem_done()
        self._say(f"{self._where(index)} {record.problem.label}: {_outcome(record, fresh)}")
        if fresh:
            self._say(f"    trials: {outcomes(record.trials)}; {split(record)}")
            for line in failures(record.trials):
                self._say(f"    {line}")

    def problem_failed(self, index: int, problem: Problem, reason: str) -> None:
        self._clock.problem_done()
        self._say(f"{self._where(index)} {problem.label}: not tuned; {reason}")

    def stage(self, text: str) -> None:
        self._check()
        self._clock.search_ended()

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _where(self, index: int) -> str:
        return f"[{index + 1}/{len(self._clock.problems)}]"

    def _standing(self) -> str:
        if self._best is None or self._heuristic is None:
            return "first trial"
        base = milliseconds(self._heuristic.median_ms)
        return (
            f"best {milliseconds(self._best.median_ms)} ms with {self._best.candidate.key} "
            f"(heuristic {base} ms)"
        )

    def _time_left(self) -> str:
        sample_ms = self._best.median_ms if self._best is not None else None
        sample_s = max(SAMPLE_S, (sample_ms or 0.0) / 1e3)
        left = self._clock.left(self._index, self._done, self._total, sample_s)
        return f"about {duration(left)} left"


def _outcome(record: Record, fresh: bool) -> str:
    found = record.comparison
    if record.heuristic_is_best:
        text = f"the heuristic {record.chosen.key} is best, {milliseconds(found.chosen_ms)} ms"
    else:
        text = (
            f"{record.chosen.key}, {milliseconds(found.chosen_ms)} ms, {speedup(record)} "
            f"against the heuristic's {milliseconds(found.heuristic_ms)} ms"
        )
    return text if fresh else f"tuned before: {text}"


class PlainDisplay(_Display):
    """One line now and then, for logs and pipes."""

    def __init__(self, console: Console, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(console, check)
        self._last = 0.0

    def problem_started(self, index: int, problem: Problem, total: int) -> None:
        super().problem_started(index, problem, total)
        self._say(f"{self._where(index)} {problem.label}: up to {total} trials")
        self._last = time.monotonic()

    def trial_done(self, trial: Trial, best: Trial | None) -> None:
        super().trial_done(trial, best)
        if time.monotonic() - self._last >= _PLAIN_EVERY_S:
            self._last = time.monotonic()
            self._say(
                f"{self._where(self._index)} trial {self._done}/{self._total}: "
                f"{self._standing()}, {self._time_left()}"
            )

    def stage(self, text: str) -> None:
        super().stage(text)
        if time.monotonic() - self._last >= _PLAIN_EVERY_S:
            self._last = time.monotonic()
            self._say(f"{self._where(self._index)} {text}, {self._time_left()}")


class LiveDisplay(_Display):
    """A live view: the problem, the trial, the best so far, the time left."""

    def __init__(self, console: Console, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(console, check)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._problems = self._bars.add_task("problems", total=None, note="")
        self._trials = self._bars.add_task("trials", total=None, note="")
        self._now = ""
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._view)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._live.__exit__(None, None, None)

    def _view(self) -> Group:
        name = self._problem.label if self._problem else "starting"
        lines = [Text(name, style="bold"), Text(self._now, style="dim"), Text(self._standing())]
        return Group(*lines, self._bars)

    def run_started(self, problems: Sequence[Problem], options: Options) -> None:
        super().run_started(problems, options)
        self._bars.update(self._problems, total=len(problems))

    def problem_started(self, index: int, problem: Problem, total: int) -> None:
        super().problem_started(index, problem, total)
        self._bars.reset(self._trials, total=total)

    def trial_started(self, candidate: Candidate) -> None:
        self._now = f"trying {candidate.key}"

    def trial_done(self, trial: Trial, best: Trial | None) -> None:
        super().trial_done(trial, best)
        self._bars.update(self._trials, completed=self._done)
        self._bars.update(self._problems, note=self._time_left())

    def stage(self, text: str) -> None:
        super().stage(text)
        self._now = text
        self._bars.update(self._problems, note=self._time_left())

    def problem_done(self, index: int, record: Record, fresh: bool) -> None:
        super().problem_done(index, record, fresh)
        self._bars.update(self._problems, completed=index + 1)

    def problem_failed(self, index: int, problem: Problem, reason: str) -> None:
        super().problem_failed(index, problem, reason)
        self._bars.update(self._problems, completed=index + 1)
