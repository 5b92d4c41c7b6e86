import io

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
    assert lines[1] == "[3/10] timing [b]xla[/b], about 42 s left"
    assert len(lines) == 1 + 4  # every five seconds at most, not every step


def test_a_terminal_gets_a_bar_with_what_is_done_and_what_is_left():
    out = console(True)
    with Steps("rows", out) as steps:
        steps.begin(4)
        steps.doing("timing xla")
        steps.advance(2)
    text = out.file.getvalue()
    for words in ("rows", "2/4", "timing xla", "left"):
        assert words in text
