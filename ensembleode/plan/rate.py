"""The derivative of the solution with respect to time, which with a mass matrix is not `f`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..fields import staged
from ..fields.derivatives.elimination import factors_of
from ..fields.derivatives.jacobian import is_reverse_only
from ..fields.derivatives.sparsity import structure
from ..solvers.mass_matrix import MassMatrix, rows_for_pivots
from ..tracing.program import Program, program_of
from .implicit_form import ImplicitForm


def rate_of(field: Program, form: ImplicitForm | None) -> Program:
    """`du/dt` as a program of the constants, state, parameters and time of the field."""
    if form is not None and form.rate is not None:
        return form.rate
    return field if form is None or form.mass is None else _with_mass(field, form.mass)


@functools.lru_cache(maxsize=256)
def _with_mass(field: Program, mass: MassMatrix) -> Program:
    """The program of `M^-1 f`. If `M` is singular, the time derivatives of the algebraic equations,
    `0 = dg/du du/dt + dg/dt`, take their places, and determine the derivative if the index is one.
    """
    rows, columns = np.array(mass.algebraic_rows, int), np.array(mass.algebraic_columns, int)
    inverse = None if mass.is_singular else mass.inverse().matrix
    derivative = jax.jacrev if is_reverse_only(field) else jax.jacfwd
    sums = np.zeros((0, 0))
    if inverse is None:
        pattern = tuple(map(tuple, np.argwhere(structure(field)).tolist()))
        sums = factors_of(rows_for_pivots(mass, pattern), mass.size)

    def rate(consts: Any, u: PyTree, p: tuple, t: Any) -> PyTree:
        def f(u: PyTree, t: Any) -> PyTree:
            return field(consts, u, p, t).reshape(-1)

        du = f(u, t)
        if inverse is not None:
            return jnp.matmul(jnp.asarray(inverse, u.dtype), du).reshape(u.shape)
        matrix = jnp.asarray(mass.matrix, u.dtype)
        by_state = derivative(lambda u: f(u, t)[rows])(u).reshape(len(rows), -1)
        moved = derivative(lambda t: f(u, t)[rows])(t)
        # Sums of equations should not lose small ones in the rounding of others.
        size = jax.lax.stop_gradient(jnp.max(jnp.abs(by_state[:, columns]), axis=1))
        by_state, moved = by_state / size[:, None], moved / size
        matrix, right = matrix.at[rows].set(by_state), du.at[rows].set(-moved)
        both = jnp.concatenate([matrix, right[:, None]], axis=1)
        return solved(jnp.matmul(jnp.asarray(sums, u.dtype), both)).reshape(u.shape)

    return program_of(staged(field, rate), field.out_tree, rules=True)


def solved(both: Array) -> Array:
    """The solution of the equations `[n, n + 1]`, whose last column is the right-hand side, by
    Gauss-Jordan elimination without row exchanges, in operations that every engine has."""
    for k in range(len(both)):
        row = both[k] / both[k, k]
        factors = both[:, k].at[k].set(0)
        both = (both - factors[:, None] * row[None]).at[k].set(row)
    return both[:, -1]
