"""A few turns run all of the slow tests, and none is begun too late."""

import os
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings, strategies as st

from .turns import drawn, turned


@settings(max_examples=50)
@given(n=st.integers(1, 500), first=st.integers(0, 10**6), part=st.floats(0.2, 1))
def test_a_few_turns_run_all(n, first, part):
    # Two processes that begin at both ends of a half, as `--dist worksteal` shares them out.
    seen, each = set(), -(-int(n * part) // 2)
    for turn in range(first, first + int(4 / part)):
        order = turned(list(range(n)), turn)
        assert sorted(order) == list(range(n))
        seen.update(order[: each + 1], order[n // 2 : n // 2 + each + 1])
    assert len(seen) == n


class Item:
    path = originalname = "test"

    def __init__(self, mark):
        self.mark = mark

    def get_closest_marker(self, name):
        assert name == "drawn"
        return self.mark


@pytest.mark.parametrize(("n", "total"), [(3, 9), (4, 10), (12, 10)])
def test_cases_drawn_at_random_are_for_all_turns_together(n, total):
    mark = pytest.mark.drawn(n).mark
    others, cases = [Item(None) for _ in range(5)], [Item(mark) for _ in range(total)]
    seen = []
    for turn in range(-(-total // n)):
        found = drawn(others + cases, turn)
        assert found[:5] == others
        assert len(found) == 5 + min(n, total)
        seen += found[5:]
    assert set(seen) == set(cases)


SUITE = """
import pytest

@pytest.mark.parametrize("x", range(8))
def test_one(x):
    assert x != FAILS

def test_of_another_machine():
    pytest.skip("none here")
"""


def run(folder, until, fails=None):
    (folder / "test_suite.py").write_text(SUITE.replace("FAILS", repr(fails)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.turns", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), "-c", "/dev/null", "--until", str(until), str(folder)]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    (found,) = re.findall(r"(\d+) ran, (\d+) can't run here, (\d+) were left", done.stdout)
    return done.returncode, tuple(map(int, found))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("ahead", "fails", "expected"),
    [
        (600, 3, (1, (8, 1, 0))),
        (-1, 3, (0, (0, 0, 9))),
    ],
)
def test_time_is_kept_and_a_failure_seen(tmp_path, ahead, fails, expected):
    assert run(tmp_path, time.time() + ahead, fails) == expected
