"""Shampine and Reichelt's pair of orders 2 and 3."""

from typing import ClassVar

from .rosenbrock import ModifiedRosenbrock, Rosenbrock


class Rosenbrock23(Rosenbrock):
    """Rosenbrock 2(3), L-stable, with two evaluations of `f` in a step, for stiff problems at loose
    tolerances, from about 1e-2 to 1e-4. It is known as `ode23s`. Its steps are those of
    OrdinaryDiffEq, except that the error estimate is the paper's if `f` depends on the time.

    Source: Shampine and Reichelt, "The MATLAB ODE Suite", SIAM J. Sci. Comput. 18 (1997), with its
    interpolant, order 2.
    """

    method: ClassVar[ModifiedRosenbrock] = ModifiedRosenbrock()
    fsal: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("shampine1997",)
