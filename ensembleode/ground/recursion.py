"""Recursion that is too deep for Python's own stack, such as one as deep as a program is long."""

from collections.abc import Generator, Iterable
from typing import Any, TypeAlias, TypeVar


_T = TypeVar("_T")
# A generator that yields the calls whose results it needs, and is sent the results.
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
    """A call that returns the results of several calls."""
    found = []
    for call in calls:
        result = yield call
        found.append(result)
    return found
