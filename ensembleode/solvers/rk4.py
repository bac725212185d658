"""The classical Runge-Kutta method."""

from typing import ClassVar

from .explicit_runge_kutta import ExplicitRungeKutta
from .tableau import Tableau


# fmt: off
_tableau = Tableau(
    c=(0, 1/2, 1/2, 1),
    a=(
        (1/2,),
        (0,   1/2),
        (0,   0,   1),
    ),
    b=(1/6, 1/3, 1/3, 1/6),
    order=4,
)
# fmt: on


class RK4(ExplicitRungeKutta):
    """The classical Runge-Kutta method, order 4, fixed step (give `dt`).

    Between the steps it is of order 3. (SciML's `RK4` can also adapt its step, by an estimate from
    the residual.)

    Source: Kutta, "Beitrag zur naeherungsweisen Integration totaler Differentialgleichungen",
    Z. Math. Phys. 46 (1901).
    """

    tableau: ClassVar[Tableau] = _tableau
    references: ClassVar[tuple[str, ...]] = ("kutta1901",)
