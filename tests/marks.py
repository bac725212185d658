"""Marks for the cases of a test that run every time, only with `pytest -m slow`, or only with
Julia."""

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


def on_julia(*case, **how):
    """A case of `pytest.mark.parametrize` that runs Julia."""
    return pytest.param(*case, marks=julia_marks(), **how)


def julia_marks() -> list:
    """The marks of a test that runs Julia."""
    reason = why_no_julia()
    skip = pytest.mark.skipif(bool(reason), reason=reason or "there is a Julia")
    return [pytest.mark.julia, skip]
