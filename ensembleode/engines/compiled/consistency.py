"""Whether algebraic equations hold where trajectories begin, or go on after an affect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...solvers.step_size import in_abstol
from .builder import Value


if TYPE_CHECKING:
    from .loop import Loop


def is_consistent(loop: Loop, mask: Value, t: Value) -> Value | None:
    """The lanes where the algebraic equations hold at the time `t`; None where there are none."""
    b, p = loop.b, loop.problem
    if p.mass is None or not p.mass.is_singular:
        return None
    equations, n = loop.equations(loop.held, mask), p.controlled
    assert equations.algebraic is not None
    rest = equations.algebraic(equations.f(loop.state(), t))
    return p.norm(b, in_abstol(b, loop.held.tolerances(n), rest[:n])) <= 1.0
