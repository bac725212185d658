"""How differential-algebraic equations begin: SciML's algorithms, by their names."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class CheckInit:
    """The start is taken as it is: a trajectory that doesn't fulfil its algebraic equations there,
    to `abstol`, ends with `ReturnCode.InitialFailure`. The default."""


@dataclasses.dataclass(frozen=True)
class BrownFullBasicInit:
    """Keeps the differential components of the start, and solves the algebraic equations for the
    algebraic ones, from what is given for these: by Newton's method, whose steps are halved where
    the equations don't come nearer to zero.

    It is done for each trajectory by itself, before its first step, where the start is further from
    the equations than `abstol`. Where no solution is found the trajectory ends with
    `ReturnCode.InitialFailure`. What it finds is a function of the differential components, the
    parameters and the start time, with derivatives of any order, by the implicit function theorem.
    (The solution begins with the state that was found; `sim.u0` is what was given.)

    **Arguments:**

    - `abstol`: how far from zero an equation may be.

    **Raises:** `ValueError` for a tolerance that is not positive.

    Source: Brown, Hindmarsh and Petzold, "Consistent initial condition calculation for
    differential-algebraic systems", SIAM J. Sci. Comput. 19 (1998), 1495.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> f = eo.ODEFunction(lambda u, p, t: jnp.stack([-u[1], u[0] ** 3 - u[1]]), mass_matrix=[1, 0])
    >>> prob = eo.ODEProblem(f, [2.0, 0.0], (0.0, 1.0))
    >>> sol = eo.solve(prob, eo.Rodas4(), initializealg=eo.BrownFullBasicInit())
    >>> sol.u[0].tolist(), eo.solve(prob, eo.Rodas4()).retcode.name
    ([2.0, 8.0], 'InitialFailure')
    """

    abstol: float = 1e-10

    def __post_init__(self):
        if not (isinstance(self.abstol, float | int) and 0 < self.abstol < math.inf):
            raise ValueError(f"abstol must be a positive number, got {self.abstol!r}.")
