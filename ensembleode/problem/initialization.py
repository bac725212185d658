"""The initialization of differential-algebraic equations: SciML's algorithms, under their names."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class CheckInit:
    """The initial state is used as it is. A trajectory whose initial state doesn't fulfil its
    algebraic equations, to `abstol`, ends with `ReturnCode.InitialFailure`. This is the default."""


@dataclasses.dataclass(frozen=True)
class BrownFullBasicInit:
    """Keeps the differential components of the initial state, and solves the algebraic equations
    for the algebraic components. It uses Newton's method, which starts from the given algebraic
    components, and whose steps are halved as long as they don't come closer to a solution.

    It is done again after each affect of a callback, by thirty whole Newton steps from the
    algebraic components that the affect left, so an affect changes the differential components
    alone; and in the same way at `d_discontinuities`, for the equations after the jump (not with
    `engine="julia"`).

    At the start, this is done for each trajectory separately, if its initial state is further
    from the equations than `abstol`. If no solution is found, the trajectory ends with
    `ReturnCode.InitialFailure`. The result is a function of the differential components, the
    parameters and the start time, with derivatives of any order, by the implicit function theorem.
    The solution begins with the state that was found, but `sim.u0` is the state that was given.

    **Arguments:**

    - `abstol`: the largest residual of an equation, at most the `abstol` of the solve, to which
        the start that was found is checked.

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
