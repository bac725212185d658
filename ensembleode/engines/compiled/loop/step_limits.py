"""Shortens steps at whose end a component would be negative, as the last step predicts.

Source: Shampine, Thompson, Kierzenka and Byrne, "Non-negative solutions of ODEs", Applied
Mathematics and Computation 170 (2005); the rule is that of DiffEqCallbacks' `PositiveDomain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..llvm.builder import BOOL, Value
from ..steps.saved_rows import TriedStep


if TYPE_CHECKING:
    from .loop import Loop


# The fraction of the size found that the next step takes.
_SAFETY = 0.9


def hold(loop: Loop, step: TriedStep, here: Value, tolerance: tuple, scalefactor: float) -> None:
    """Shorten the next step of the lanes `here`, which are at the end of this step, until this
    step's interpolant, extrapolated to the end of the next step, is above minus `tolerance` in
    every component with a tolerance.

    A component that is below that already is ignored, since no step is short enough for it.
    """
    b, p = loop.b, loop.problem
    t, now, proposed = loop.t.get(), loop.state(), loop.h.get()

    def shorten() -> None:
        at = step.y, step.attempt.dense, step.t, step.h
        dense = step.method.dense(b, loop.equations(loop.held, here), *at)
        size = b.variable(p.dtype, proposed)

        def too_long() -> Value:
            ahead = t + loop.direction * size.get()
            theta = (ahead - step.t) / b.where(here, step.h, 1.0)
            u = step.method.interpolate(b, step.y, dense, step.h, theta)
            below = b.constant(False, BOOL, of_lanes=True)
            for x, start, least in zip(u, now, tolerance, strict=False):
                below = below | ((x <= -least) & (start > -least))
            return here & below & ahead.ne(t)

        def one() -> None:
            size.set_where(too_long(), size.get() * scalefactor)

        b.while_(lambda: b.any(too_long()), one)
        held = here & size.get().ne(proposed)
        bounded = loop.bounds(loop.held).bounded(b, size.get() * _SAFETY)
        loop.h.set_where(held, bounded)

    b.if_(b.any(here), shorten)
