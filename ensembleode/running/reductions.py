"""Reductions: `sum_reduction`, and checks of those that users write."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jaxtyping import PyTree

from .executor import Executor
from .job import Job, may_rerun


def sum_reduction(u: PyTree, data: PyTree, indices: Array | np.ndarray) -> tuple[Any, bool]:
    """The sum of the outputs of all trajectories: `reduction=eo.sum_reduction`.

    It adds to `u` the sum of `data` over the trajectories, ignores their `indices`, and never stops
    the ensemble. It needs no `u_init`. `EnsembleDistributed` adds up on the workers. Where the
    output is one number, such as a loss, each worker returns its sum together with the gradient,
    and no trajectories.

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
    return jax.tree.map(lambda a, x: a + total(x), u, data), False


def total(x: Array) -> Array:
    """The sum over the first axis; for booleans, the number of true ones."""
    return jnp.sum(x, 0)


def empty(reduction: Callable | None, out: Any) -> PyTree:
    """The value that a reduction without `u_init` starts from."""
    if reduction is sum_reduction:
        sums = jax.eval_shape(lambda out: jax.tree.map(total, out), out)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    return jax.tree.map(lambda x: x[:0], out)


def adds_up(job: Job, executor: Executor) -> bool:
    """Whether the executor can add up the outputs where they are computed. Inside `jit`, outputs
    may be differentiated, and then each has to be one real number."""
    if job.plan.output is None or not executor.totals or may_rerun(job.plan):
        return False
    out, _ = jtu.tree_unflatten(job.plan.output.out_tree, job.plan.output.out_avals)
    real = [jnp.issubdtype(x.dtype, jnp.floating) and not x.shape for x in jtu.tree_leaves(out)]
    return not job.traced or real == [True]


def checked(pair: PyTree) -> tuple[PyTree, PyTree]:
    """The value and the boolean that a reduction returned.

    **Raises:** `TypeError` where it returned something else than a pair of a value and a boolean.
    """
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"reduction must return a pair (u, converged), got {type(pair).__name__}.")
    u, converged = pair
    if np.shape(converged) != ():
        raise TypeError(
            "reduction must return a pair (u, converged) with converged a boolean; its converged "
            f"has the shape {np.shape(converged)}."
        )
    return u, converged


def check_structure(u: PyTree, new: Any) -> None:
    """**Raises:** `TypeError` where a traced reduction returns another structure than it was
    given."""

    def struct(tree):
        leaves, structure = jtu.tree_flatten(tree)
        return structure, [(np.shape(x), jnp.result_type(x)) for x in leaves]

    if struct(u) != struct(new):
        raise TypeError(
            "inside jit, reduction must return a u of the structure, shapes and dtypes of u_init; "
            f"u_init has {struct(u)}, it returned {struct(new)}."
        )
