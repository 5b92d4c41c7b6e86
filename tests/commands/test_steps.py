import io
import threading
import time

from rich.console import Console

from shapetune.commands import progress
from shapetune.commands.progress import Steps


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def test_a_pipe_gets_plain_lines_now_and_then(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = console(False)
    with Steps("rows", out) as steps:
        steps.begin(10, done=2)
        for _ in range(8):
            clock[0] += 3.0
            steps.doing("timing [b]xla[/b]")
            steps.advance()
    text = out.file.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "2 of 10 rows are there already"
    assert lines[1] == "[3/10] timing [b]xla[/b], about 18 s left"
    assert len(lines) == 1 + 4  # every five seconds at most, not every step


def test_a_terminal_gets_a_bar_with_what_is_done_and_what_is_left(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = console(True)
    with Steps("rows", out) as steps:
        steps.begin(4)
        steps.doing("timing xla")
        clock[0] = 10.0
        steps.advance(2)
    text = out.file.getvalue()
    for words in ("rows", "2/4", "timing xla", "left"):
        assert words in text


def wait_until(holds):
    """Waits for what a thread brings about."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_pipe_hears_of_a_first_step_that_takes_long(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_FIRST_S", 0.05)
    monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.05)
    out = console(False)
    with Steps("steps", out) as steps:
        steps.begin(3)
        steps.doing("drawing")
        wait_until(lambda: out.file.getvalue().count("\n") > 1)
    assert set(out.file.getvalue().splitlines()) == {"[0/3] drawing, 0 s so far"}
    assert "shapetune-steps" not in {thread.name for thread in threading.enumerate()}


def test_a_pipe_hears_nothing_of_what_is_done_at_once():
    out = console(False)
    with Steps("steps", out) as steps:
        steps.begin(3)
        steps.doing("drawing")
        steps.advance(3)
    assert out.file.getvalue() == ""


def test_it_ends_when_the_work_fails():
    out = console(False)
    try:
        with Steps("steps", out) as steps:
            steps.doing("drawing")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert "shapetune-steps" not in {thread.name for thread in threading.enumerate()}


def test_the_time_left_counts_down_while_a_step_is_under_way(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    steps = Steps("rows", console(True))
    steps.begin(4)
    steps.doing("timing [b]xla[/b]")
    told = []
    for now, done in ((7, 0), (10, 1), (14, 0), (20, 0), (90, 0)):
        clock[0] = now
        steps.advance(done) if done else None
        told.append(steps.standing())
    assert told == [
        "7 s so far  timing [b]xla[/b]",
        "about 30 s left  timing [b]xla[/b]",
        "about 26 s left  timing [b]xla[/b]",
        "about 20 s left  timing [b]xla[/b]",
        "about 20 s left  timing [b]xla[/b]",  # of the two steps that are still to begin
    ]


def test_what_is_left_is_not_told_by_a_mean_that_is_found_wrong(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    steps = Steps("steps", console(False))
    steps.begin(3)
    clock[0] = 0.2
    steps.advance()
    assert steps.standing().startswith("about 0 s left")
    clock[0] = 5.0
    assert steps.standing().startswith("5 s so far")


def test_how_long_it_takes_is_not_guessed_where_the_steps_are_not_counted(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = console(False)
    steps = Steps("devices", out)
    steps.advance()
    clock[0] = 3.0
    steps.doing("merged some")
    assert out.file.getvalue() == "merged some, 3 s so far\n"


def test_what_is_left_shrinks_while_many_steps_are_taken_at_once(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Steps("rows", console(True)) as steps:
        steps.begin(24)
        steps.doing("eight rows together")
        clock[0] = 80.0
        steps.advance(8)
        told = []
        for now in (80.0, 110.0, 150.0, 170.0):
            clock[0] = now
            told.append(steps.standing().partition("  ")[0])
    left = ("2 min 40 s", "2 min 10 s", "1 min 30 s", "1 min 20 s")
    assert told == [f"about {words} left" for words in left]


def test_a_long_run_in_a_pipe_speaks_less_often(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = console(False)
    with Steps("rows", out) as steps:
        steps.begin(10_000)
        for _ in range(7200):
            clock[0] += 1.0
            steps.doing("timing")
    assert 100 < out.file.getvalue().count("\n") < 220
