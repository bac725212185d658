"""Euler's method."""

from typing import ClassVar

from .base import ExplicitRungeKutta
from .tableau import Interpolant, Tableau


_tableau = Tableau(c=(0,), a=(), b=(1,), order=1, interpolant=Interpolant(((1,),), order=1))


class Euler(ExplicitRungeKutta):
    """Euler's method, order 1, fixed step (give `dt`). Linear between the steps."""

    tableau: ClassVar[Tableau] = _tableau
    references: ClassVar[tuple[str, ...]] = ("hairer1993",)
