"""The explicit midpoint method."""

from typing import ClassVar

from .explicit_runge_kutta import ExplicitRungeKutta
from .tableau import Tableau


class Midpoint(ExplicitRungeKutta):
    """The explicit midpoint method, order 2, embedded Euler error estimate.

    Source: Runge, "Ueber die numerische Aufloesung von Differentialgleichungen", Math. Ann. 46
    (1895).
    """

    tableau: ClassVar[Tableau] = Tableau(
        c=(0, 1 / 2), a=((1 / 2,),), b=(0, 1), order=2, error=(-1, 1), embedded_order=1
    )
    references: ClassVar[tuple[str, ...]] = ("runge1895",)
