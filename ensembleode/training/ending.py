"""What tells a process to end, while a fit runs."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Terminated(SystemExit):
    """SIGTERM came. Not caught, it ends the process, with the exit code that shells give it."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)
        self.result: Any = None


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises [`Terminated`][], in the main thread, where nobody else waits for it."""
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
def held() -> Iterator[None]:
    """Ctrl-C, and SIGTERM that raises, come when the block is done: what it writes is whole."""
    came: list[tuple] = []
    handlers = {}
    if _is_main():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):  # (others do nothing to Python)
                handlers[number] = handler
                signal.signal(number, lambda *given: came.append(given))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for given in came:
        handlers[given[0]](*given)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
