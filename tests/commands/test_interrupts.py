"""A Ctrl-C that Python drops stops the work at its next step."""

import gc
import os
import signal

import pytest

from shapetune.commands.interrupts import Interrupts
from shapetune.commands.output import display
from shapetune.commands.progress import Steps


@pytest.fixture
def lost_interrupt(capfd, sigint):
    """Sends a SIGINT whose KeyboardInterrupt the garbage collector's callback drops."""

    def send():
        def callback(phase, info):
            if phase == "start":
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    pass  # the handler runs here

        gc.callbacks.append(callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(callback)

    return send


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_interrupt_is_raised_at_the_next_step(lost_interrupt):
    with Interrupts() as interrupts:
        interrupts.check()
        lost_interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_steps_of_a_command_and_the_display_of_a_run_stop(lost_interrupt, monkeypatch):
    with Steps("rows") as steps:
        lost_interrupt()
        with pytest.raises(KeyboardInterrupt):
            steps.doing("a row")
    ended = []

    def leave(code):
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)

    def work():
        with display() as (_, listener):
            lost_interrupt()
            listener.stage("comparing")

    with pytest.raises(SystemExit):
        work()
    assert ended == [130]


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            interrupts.check()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
