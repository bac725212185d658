"""A pytest plugin for tests that are too many to run every time: a part of them, in turn.

    python -m pytest -p tests.turns --turn N --until SECONDS ...

The tests run in the order of their files, from a place on that moves with the number N of the turn,
and none is begun after this time (of `time.time()`). The last lines say how many were left. Of a
test whose cases are drawn at random, `@pytest.mark.drawn(n)`, each turn runs n others: all would
take many times what all other tests take.
"""

import time

import pytest


# A turn begins this far after the one before it, as a part of all tests: the golden ratio, with
# which any number of turns in succession begin as far from each other as can be.
_STRIDE = (5**0.5 - 1) / 2
_LEFT = "not begun, as the time was over"


def pytest_addoption(parser):
    group = parser.getgroup("turns", "a part of the tests, in turn")
    group.addoption("--turn", type=int, default=0, help="the number of the turn")
    group.addoption("--until", type=float, default=float("inf"), help="when to begin no more")


def turned(items, turn):
    """The items, from the place of this turn on."""
    first = int(len(items) * (turn * _STRIDE % 1))
    return items[first:] + items[:first]


def drawn(items, turn):
    """The items without those drawn cases that are of other turns."""
    cases = {}
    for item in items:
        if item.get_closest_marker("drawn"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    others = set()
    for of_test in cases.values():
        (n,) = of_test[0].get_closest_marker("drawn").args
        first = turn * n % len(of_test)
        others.update((of_test[first:] + of_test[:first])[n:])
    return [item for item in items if item not in others]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    turn, until = config.getoption("--turn"), config.getoption("--until")
    if until < float("inf"):
        items[:] = drawn(items, turn)
    order = sorted(items, key=lambda item: item.path)  # (Stable: a file's tests keep theirs.)
    items[:] = turned(order, turn)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.time() > item.config.getoption("--until"):
        pytest.skip(_LEFT)


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    left = sum(_LEFT in str(report.longrepr) for report in skipped)
    ran = sum(len(terminalreporter.stats.get(x, [])) for x in ("passed", "failed"))
    elsewhere = len(skipped) - left
    terminalreporter.write_line(
        f"slow tests: {ran} ran, {elsewhere} can't run here, {left} were left for other turns"
    )
