"""Checks of numbers that people write on command lines and in files."""

import contextlib
import math
import reprlib
from typing import Any


# Beyond this, and below its inverse, no number is that of a run, and results would be no floats.
_MOST = 1e50


class PlanError(ValueError):
    """An input of a plan is wrong: a number, a fleet, or the function to be measured."""


def number(value: Any, what: str) -> float:
    """A positive number, possibly given as text (YAML reads 1e8 as text). **Raises:** `PlanError`
    that names `what`."""
    found = _float(value)
    if found is None or found <= 0:
        raise PlanError(f"{what} must be a positive number, got {shown(value)}.")
    if not 1 / _MOST <= found <= _MOST:
        raise PlanError(f"{what} must be from {1 / _MOST:g} to {_MOST:g}, got {shown(value)}.")
    return found


def whole_number(value: Any, what: str) -> int:
    """A whole number of at least 1, possibly given as text or as a float (1e8). **Raises:**
    `PlanError` that names `what`."""
    found = _float(value)
    if found is None or found < 1 or found != int(found):
        raise PlanError(f"{what} must be a whole number, 1 or more, got {shown(value)}.")
    if found > _MOST:
        raise PlanError(f"{what} must be {_MOST:g} at most, got {shown(value)}.")
    return value if isinstance(value, int) else int(found)


def shown(value: Any) -> str:
    """A value in a message: however large it is, in a line."""
    if isinstance(value, int) and abs(value) > 10**60:
        return "a number of more than 60 digits"
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 3, 3
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def _float(value: Any) -> float | None:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found = float(value)
            return found if math.isfinite(found) else None
    return None
