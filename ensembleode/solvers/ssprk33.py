"""Shu and Osher's strong stability preserving method of order 3."""

from typing import ClassVar

from .explicit_runge_kutta import ExplicitRungeKutta
from .tableau import Interpolant, Tableau


# fmt: off
_tableau = Tableau(
    c=(0, 1, 1/2),
    a=(
        (1,),
        (1/4, 1/4),
    ),
    b=(1/6, 1/6, 2/3),
    order=3,
    interpolant=Interpolant(
        (
            (1, -5/6),
            (0,  1/6),
            (0,  2/3),
        ),
        order=2,
    ),
)
# fmt: on


class SSPRK33(ExplicitRungeKutta):
    """Shu-Osher, order 3, fixed step (give `dt`): for hyperbolic equations.

    It is strong stability preserving: a quantity that doesn't grow in a step of `Euler` of size
    `dt` (such as a maximum, or the total variation) doesn't grow in a step of this method, either.
    The same holds for its interpolant, of order 2, which takes no more stages: the parabola through
    both states with the slope at the start. So the slopes of two successive steps do not agree
    where they meet.

    Source: Shu and Osher, "Efficient implementation of essentially non-oscillatory shock-capturing
    schemes", J. Comput. Phys. 77 (1988); the interpolant is from Ketcheson, Loczi, Jangabylova and
    Kusmanov, "Dense output for strong stability preserving Runge-Kutta methods", J. Sci. Comput. 71
    (2017), as in OrdinaryDiffEq.
    """

    tableau: ClassVar[Tableau] = _tableau
    references: ClassVar[tuple[str, ...]] = ("shu1988", "ketcheson2017")
