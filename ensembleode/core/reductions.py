"""Reductions that come with the package."""

from typing import Any

import jax
import jax.numpy as jnp


def sum_reduction(u: Any, data: Any, indices: Any) -> tuple[Any, bool]:
    """The sum over all trajectories of what `output_func` gives: `reduction=eo.sum_reduction`.

    Adds to `u` the sum of `data` over the trajectories (whatever their `indices`), and never stops
    the ensemble. It needs no `u_init`. `EnsembleDistributed` adds up on the workers; where the
    output is one number, such as a loss, each worker gives its sum and its gradient at once, and no
    trajectories.

    >>> import jax, ensembleode as eo
    >>> def loss(p):
    ...     prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), p)
    ...     ens = eo.EnsembleProblem(
    ...         prob,
    ...         lambda prob, ctx: eo.remake(prob, u0=ctx.sim_id * prob.u0),
    ...         output_func=lambda sol, ctx: ((sol.u[-1, 0] - 1) ** 2, False),
    ...         reduction=eo.sum_reduction,
    ...     )
    ...     return eo.solve(ens, trajectories=100).u
    >>> value, gradient = jax.value_and_grad(loss)(1.0)
    """
    del indices
    return jax.tree.map(lambda a, x: a + total(x), u, data), False


def total(x: Any) -> Any:
    """The sum over the first axis; of booleans it counts those that are true."""
    return jnp.sum(x, 0)
