"""Ralston's method of order 2."""

from typing import ClassVar

from .explicit_runge_kutta import ExplicitRungeKutta
from .tableau import Tableau


class Ralston(ExplicitRungeKutta):
    """Ralston's method, order 2, embedded Euler error estimate.

    Source: Ralston, "Runge-Kutta methods with minimum error bounds", Math. Comp. 16 (1962).
    """

    tableau: ClassVar[Tableau] = Tableau(
        c=(0, 2 / 3),
        a=((2 / 3,),),
        b=(1 / 4, 3 / 4),
        order=2,
        error=(-3 / 4, 3 / 4),
        embedded_order=1,
    )
    references: ClassVar[tuple[str, ...]] = ("ralston1962",)
