"""Bogacki and Shampine's pair of orders 3 and 2."""

from typing import ClassVar

from .explicit_runge_kutta import ExplicitRungeKutta
from .tableau import Tableau


# fmt: off
_tableau = Tableau(
    c=(0, 1/2, 3/4, 1),
    a=(
        (1/2,),
        (0,   3/4),
        (2/9, 1/3, 4/9),
    ),
    b=(2/9, 1/3, 4/9, 0),
    order=3,
    error=(-5/72, 1/12, 1/9, -1/8),
    embedded_order=2,
)
# fmt: on


class Bosh3(ExplicitRungeKutta):
    """Bogacki-Shampine 3(2), for loose tolerances. SciML's `BS3`.

    Source: Bogacki and Shampine, "A 3(2) pair of Runge-Kutta formulas", Appl. Math. Lett. 2
    (1989).
    """

    tableau: ClassVar[Tableau] = _tableau
    references: ClassVar[tuple[str, ...]] = ("bogacki1989",)
