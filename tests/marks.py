"""Which cases of a test run every time, and which with `pytest -m slow` only."""

import pytest


def slow_unless(quick, *case, **how):
    """A case of `pytest.mark.parametrize`."""
    return pytest.param(*case, marks=() if quick else pytest.mark.slow, **how)
