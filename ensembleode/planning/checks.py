"""Numbers that people write, on command lines and in files."""

import contextlib
import math
from typing import Any


class PlanError(ValueError):
    """What a plan was asked of is wrong: a number, a fleet, or what was to be measured."""


def number(value: Any, what: str) -> float:
    """A positive number, maybe as text (to YAML, 1e8 is text); else `PlanError` of `what`."""
    found = _float(value)
    if found is None or found <= 0:
        raise PlanError(f"{what} must be a positive number, got {value!r}.")
    return found


def whole(value: Any, what: str) -> int:
    """A whole number, 1 or more, maybe as text or as a float (1e8); else `PlanError` of `what`."""
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
