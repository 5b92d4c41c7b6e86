"""Ctrl-C that is never lost.

Python drops an exception that is raised in a callback of the garbage collector or in a
destructor, and a KeyboardInterrupt with it; JAX has such a callback.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """Remembers a Ctrl-C, so that work which went on in spite of it is stopped at its next step.

    A context of the main thread; where SIGINT is ignored or handled otherwise already, and in
    other threads, it changes nothing.
    """

    def __init__(self) -> None:
        self._heard = False
        self._set = False

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hear)
            self._set = True
        return self

    def __exit__(self, *failure: object) -> None:
        if self._set:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._set = False

    def check(self) -> None:
        """To be called at each step of the work.

        Raises:
            KeyboardInterrupt: There was a Ctrl-C.
        """
        if self._heard:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True
        signal.default_int_handler(number, frame)
