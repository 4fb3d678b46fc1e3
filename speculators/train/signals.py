"""Being asked to end while training: the step under way is finished and saved first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = ("SIGINT", "SIGTERM", "SIGUSR1")


class Stopped(SystemExit):
    """Training ended early because the process was told to; exit code 128 + signal number, a checkpoint is written."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class SignalBox:
    """The first signal that arrived, if any."""

    received: int | None = None

    def _receive(self, signum: int, _: FrameType | None) -> None:
        if self.received is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum


@contextmanager
def caught_signals() -> Iterator[SignalBox]:
    """Keep SIGINT, SIGTERM and SIGUSR1 in a box instead of acting on them; a second SIGINT interrupts at once.

    Outside the main thread, where Python delivers no signals, the box stays empty.
    """
    box = SignalBox()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in CAUGHT:
            if hasattr(signal, name):
                before[name] = signal.signal(getattr(signal, name), box._receive)
    try:
        yield box
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
