"""Roessler's method SRIW1."""

from typing import ClassVar

from .stochastic import SRI, SRITableau


class SRIW1(SRI):
    """Roessler's method for diagonal or scalar noise, of strong order 1.5.

    Source: Roessler, "Runge-Kutta methods for the strong approximation of solutions of stochastic
    differential equations", SIAM J. Numer. Anal. 48(3), 2010, table 6.2.
    """

    drift_weight: ClassVar[float] = 1 / 6
    coefficients: ClassVar[SRITableau] = SRITableau(
        a0=((3 / 4,), (0, 0), (0, 0, 0)),
        a1=((1 / 4,), (1, 0), (0, 0, 1 / 4)),
        b0=((3 / 2,), (0, 0), (0, 0, 0)),
        b1=((1 / 2,), (-1, 0), (-5, 3, 1 / 2)),
        alpha=(1 / 3, 2 / 3, 0, 0),
        beta1=(-1, 4 / 3, 2 / 3, 0),
        beta2=(-1, 4 / 3, -1 / 3, 0),
        beta3=(2, -4 / 3, -2 / 3, 0),
        beta4=(-2, 5 / 3, -2 / 3, 1),
        c0=(0, 3 / 4, 0, 0),
        c1=(0, 1 / 4, 1, 1 / 4),
    )
    references: ClassVar[tuple[str, ...]] = ("roessler2010",)
