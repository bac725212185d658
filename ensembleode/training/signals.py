"""Handlers of the signals that tell a process to end while a fit runs."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


# Held while a file is written, so that the process doesn't end before the file is complete.
writing = threading.Lock()


class Terminated(SystemExit):
    """SIGTERM was received. If it isn't caught, the process ends with the exit code that shells
    use."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)
        self.result: Any = None


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within this block, in the main thread, SIGTERM raises [`Terminated`][], unless the program
    has a handler for it."""
    if not _is_main() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def told(*_):
        raise Terminated

    signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Within this block, Ctrl-C and SIGTERM are held back until its end, so that files that are
    written in it are complete."""
    came: list[tuple] = []
    handlers = {}
    if _is_main():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):  # other handlers call nothing in Python
                handlers[number] = handler
                signal.signal(number, lambda *given: came.append(given))
    try:
        with writing:
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for given in came:
        handlers[given[0]](*given)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
