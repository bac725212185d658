"""Which cases of a test run every time, with `pytest -m slow` only, or where there is a Julia."""

import functools

import pytest

from ensembleode.engines.julia import environment


def slow_unless(quick, *case, **how):
    """A case of `pytest.mark.parametrize`."""
    return pytest.param(*case, marks=() if quick else pytest.mark.slow, **how)


@functools.cache
def why_no_julia() -> str:
    """Why no Julia can be run here; empty where one can."""
    try:
        environment.check(environment.find())
    except environment.JuliaError as e:
        return str(e)
    return ""


def needs_julia(test):
    """Marks a test that runs Julia."""
    for mark in _julia_marks():
        test = mark(test)
    return test


def on_julia(*case, **how):
    """A case of `pytest.mark.parametrize` that runs Julia."""
    return pytest.param(*case, marks=_julia_marks(), **how)


def _julia_marks() -> tuple:
    reason = why_no_julia()
    return pytest.mark.julia, pytest.mark.skipif(bool(reason), reason=reason or "there is a Julia")
