"""Euler's method."""

from typing import ClassVar

from .explicit_runge_kutta import ExplicitRungeKutta
from .tableau import Interpolant, Tableau


class Euler(ExplicitRungeKutta):
    """Euler's method, order 1, with a fixed step (give `dt`). It is linear between the steps."""

    tableau: ClassVar[Tableau] = Tableau(
        c=(0,), a=(), b=(1,), order=1, interpolant=Interpolant(((1,),), order=1)
    )
    references: ClassVar[tuple[str, ...]] = ("hairer1993",)
