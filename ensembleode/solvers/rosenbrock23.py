"""Shampine and Reichelt's pair of orders 2 and 3."""

from typing import ClassVar

from .base import Rosenbrock
from .rosenbrock import ModifiedRosenbrock


class Rosenbrock23(Rosenbrock):
    """Rosenbrock 2(3), L-stable, of two evaluations of `f` a step: for stiff problems at loose
    tolerances, from 1e-2 to 1e-4 or so. Known as `ode23s`; steps as OrdinaryDiffEq's, but that an
    `f` of the time has the paper's estimate of the error.

    Source: Shampine and Reichelt, "The MATLAB ODE Suite", SIAM J. Sci. Comput. 18 (1997), with its
    interpolant, order 2.
    """

    method: ClassVar[ModifiedRosenbrock] = ModifiedRosenbrock()
    fsal: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("shampine1997",)
