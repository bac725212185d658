"""Calls with a deep stack. Code such as LLVM's recurses the deeper the longer its input is; where
the stack ends, the process crashes."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar


_T = TypeVar("_T")

_BYTES = 2**28
_lock = threading.Lock()


def with_deep_stack(fn: Callable[[], _T]) -> _T:
    """The result of `fn()`, which runs on a thread of its own, whatever `ulimit -s` is. An
    interrupt is raised at once, while that thread goes on to its end."""
    found: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            found.set_result(fn())
        except BaseException as e:
            found.set_exception(e)

    thread = threading.Thread(target=run, name="ensembleode-deep-stack")
    with _lock:
        # (The size applies to all threads that start from now on.)
        before = threading.stack_size(_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return found.result()
