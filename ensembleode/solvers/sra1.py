"""Roessler's method SRA1."""

from typing import ClassVar

from .stochastic import SRA, SRATableau


class SRA1(SRA):
    """Roessler's method for additive noise, of strong order 1.5, with two stages.

    Source: Roessler, "Runge-Kutta methods for the strong approximation of solutions of stochastic
    differential equations", SIAM J. Numer. Anal. 48(3), 2010, table 6.3.
    """

    coefficients: ClassVar[SRATableau] = SRATableau(
        a0=((3 / 4,),),
        b0=((3 / 2,),),
        alpha=(1 / 3, 2 / 3),
        beta1=(1, 0),
        beta2=(-1, 1),
        c0=(0, 3 / 4),
        c1=(1, 0),
    )
    references: ClassVar[tuple[str, ...]] = ("roessler2010",)
