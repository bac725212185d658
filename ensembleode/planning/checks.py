"""Checks of numbers that people write on command lines and in files."""

import contextlib
import math
from typing import Any


class PlanError(ValueError):
    """An input of a plan is wrong: a number, a fleet, or the function to be measured."""


def number(value: Any, what: str) -> float:
    """A positive number, possibly given as text (YAML reads 1e8 as text). **Raises:** `PlanError`
    that names `what`."""
    found = _float(value)
    if found is None or found <= 0:
        raise PlanError(f"{what} must be a positive number, got {value!r}.")
    return found


def whole(value: Any, what: str) -> int:
    """A whole number of at least 1, possibly given as text or as a float (1e8). **Raises:**
    `PlanError` that names `what`."""
    found = _float(value)
    if found is None or found < 1 or found != int(found):
        raise PlanError(f"{what} must be a whole number, 1 or more, got {value!r}.")
    return value if isinstance(value, int) else int(found)


def _float(value: Any) -> float | None:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found = float(value)
            return found if math.isfinite(found) else None
    return None
