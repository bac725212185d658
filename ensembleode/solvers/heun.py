"""Heun's method."""

from typing import ClassVar

from .explicit_runge_kutta import ExplicitRungeKutta
from .tableau import Tableau


class Heun(ExplicitRungeKutta):
    """Heun's method (the trapezoidal rule made explicit), order 2, embedded Euler error estimate.

    Source: Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I", II.1.
    """

    tableau: ClassVar[Tableau] = Tableau(
        c=(0, 1), a=((1,),), b=(1 / 2, 1 / 2), order=2, error=(-1 / 2, 1 / 2), embedded_order=1
    )
    references: ClassVar[tuple[str, ...]] = ("hairer1993",)
