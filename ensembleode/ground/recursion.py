"""Recursion as deep as a program is long, which Python's own stack doesn't hold."""

from collections.abc import Generator, Iterable
from typing import Any, TypeAlias, TypeVar


_T = TypeVar("_T")
# A call that yields the calls whose results it needs, and is sent these.
Call: TypeAlias = Generator["Call[Any]", Any, _T]


def result_of(call: Call[_T]) -> _T:
    """The result of a recursive function that is written as a generator: `x = yield fn(...)` takes
    the place of `x = fn(...)`.

    >>> def depth(n):
    ...     return 0 if n == 0 else 1 + (yield depth(n - 1))
    >>> result_of(depth(100_000))
    100000
    """
    calls: list[Call[Any]] = [call]
    result: Any = None
    while calls:
        try:
            calls.append(calls[-1].send(result))
            result = None
        except StopIteration as e:
            calls.pop()
            result = e.value
    return result


def results_of(calls: Iterable[Call[_T]]) -> Call[list[_T]]:
    """The results of several calls, as a call."""
    found = []
    for call in calls:
        result = yield call
        found.append(result)
    return found
