"""Callbacks that correct the state after every step."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.retcode import AffectOutcome
from ..ground.state_tree import real_vector
from ..tracing.field_errors import check_signature
from ..tracing.program import is_tracer
from .callbacks import DiscreteCallback, Integrator, StepLimit
from .number_table import check_tolerance


class _Correction(DiscreteCallback):
    """A callback whose events are not recorded."""

    @property
    def is_kept(self) -> bool:
        return False


class ManifoldProjection(_Correction):
    """After every step, the state is projected onto the manifold where `residual(u, p, t)` is zero,
    so that an energy, a length or another invariant is kept.

    The correction is the smallest one: `u + J^T l`, with the Jacobian `J` of the residual at the
    state before it. `l` is found by a few turns of Newton's method. Where these don't find it, the
    trajectory ends with `ReturnCode.ConvergenceFailure`. A projection is no event of `sim.events`.
    States saved within a step are not projected, as in Julia.

    **Arguments:**

    - `residual`: `residual(u, p, t)`, real numbers (an array or a pytree of arrays), fewer than the
        state has (of which a complex one is two).
    - `abstol`: the largest residual after the projection; by default the machine epsilon to the
        power of 4/5, which is 3e-13 in double and 3e-6 in single precision.
    - `save`: with `save_everystep=True`, whether the state after the projection is a row, after the
        row of the state before it.

    **Raises:** `TypeError` and `ValueError`, naming the argument.

    **Source:** E. Hairer, C. Lubich and G. Wanner, Geometric Numerical Integration, 2nd ed., 2006,
    section IV.4.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> def circles(u, p, t):
    ...     return jnp.stack([u[1], -u[0]])
    >>> on_it = eo.ManifoldProjection(lambda u, p, t: jnp.sum(u**2) - 1.0)
    >>> prob = eo.ODEProblem(circles, [0.0, 1.0], (0.0, 100.0), callback=on_it)
    >>> x, y = eo.solve(prob).u[-1]
    >>> bool(abs(x**2 + y**2 - 1) < 1e-6)
    True
    """

    def __init__(self, residual: Callable, *, abstol: Any = None, save: bool = True):
        if not callable(residual):
            raise TypeError(
                f"residual of ManifoldProjection must be a function (u, p, t), got {residual!r}."
            )
        check_signature(residual, "residual")
        _check_abstol("ManifoldProjection", abstol, several=False)
        affect = functools.partial(_projected, residual, abstol)
        super().__init__(_always, affect, save_positions=(False, save))


class PositiveDomain(_Correction):
    """Keeps the state from becoming negative, for concentrations, populations or masses.

    After every step, negative components are set to zero. The next step is shortened until no
    component is negative at its end, as far as the interpolant of the last step predicts it. A
    correction is no event of `sim.events`. The solver has to be one that chooses its steps.

    **Arguments:**

    - `abstol`: how far below zero a predicted component may be: a number, or like the state; by
        default the `abstol` of the solve. It may be traced, and differ between trajectories.
    - `scalefactor`: the factor, between 0 and 1, by which the step is multiplied until the
        prediction is within `abstol`.
    - `save`: with `save_everystep=True`, whether the state after a correction is a row, after the
        row of the state before it.

    **Raises:** `TypeError` and `ValueError`, naming the argument.

    **Source:** L. F. Shampine, S. Thompson, J. A. Kierzenka and G. D. Byrne, "Non-negative
    solutions of ODEs", Applied Mathematics and Computation 170 (2005); DiffEqCallbacks.

    >>> import ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: -100.0 * u, [1.0], (0.0, 5.0), abstol=1e-2)
    >>> sol = eo.solve(prob, callback=eo.PositiveDomain())
    >>> bool(sol.u[-1, 0] >= 0)
    True
    """

    abstol: Any
    scalefactor: float = eqx.field(static=True)

    def __init__(self, *, abstol: Any = None, scalefactor: float = 0.5, save: bool = True):
        if not 0 < scalefactor < 1:
            raise ValueError(
                f"scalefactor of PositiveDomain must be between 0 and 1, got {scalefactor!r}."
            )
        _check_abstol("PositiveDomain", abstol, several=True)
        super().__init__(_is_negative, _not_negative, save_positions=(False, save))
        self.abstol, self.scalefactor = abstol, float(scalefactor)

    @property
    def limit(self) -> StepLimit:
        return StepLimit(self.abstol, self.scalefactor)


def _check_abstol(name: str, abstol: Any, *, several: bool) -> None:
    for x in jax.tree.leaves(abstol):
        if not is_tracer(x):
            check_tolerance(f"abstol of {name}", x)
    if not several and abstol is not None and np.ndim(abstol):
        raise ValueError(f"abstol of {name} must be a number, got the shape {np.shape(abstol)}.")


def _always(u: PyTree, t: Array, integrator: Integrator) -> ArrayLike:
    return np.bool_(True)


def _is_negative(u: PyTree, t: Array, integrator: Integrator) -> Array:
    return functools.reduce(jnp.logical_or, [jnp.any(x < 0) for x in jax.tree.leaves(u)])


def _not_negative(integrator: Integrator) -> Integrator:
    u = jax.tree.map(lambda x: jnp.where(x < 0, jnp.zeros_like(x), x), integrator.u)
    return dataclasses.replace(integrator, u=u)


_TURNS = 3  # of Newton's method, each of which doubles the number of correct digits
# After the values have converged, further turns make derivatives right, up to the third order.
_DIFFERENTIATED = 2


def _projected(residual: Callable, abstol: Any, integrator: Integrator) -> Integrator:
    """The integrator with its state projected."""
    flat, unravel = jax.flatten_util.ravel_pytree(integrator.u)
    start = real_vector(flat)

    def state_of(x: Array) -> Array:
        is_complex = jnp.iscomplexobj(flat)
        return unravel(jax.lax.complex(*jnp.split(x, 2)) if is_complex else x)

    def g(x: Any) -> Any:
        return _numbers_of(residual(state_of(x), integrator.p, integrator.t), start)

    n = g(start).size
    normals = _jacobian(g, start, n)
    scale = jnp.zeros(n, start.dtype)

    def turn(scale: Any) -> Any:
        x = start + jnp.matmul(scale, normals)
        slopes = jnp.matmul(_jacobian(g, x, n), normals.T)
        return scale - _solution(slopes, g(x))

    for _ in range(_TURNS):
        scale = turn(scale)
    # The root depends only on the equations, and not on the path of the search.
    scale = jax.lax.stop_gradient(scale)
    for _ in range(_DIFFERENTIATED):
        scale = turn(scale)
    found = start + jnp.matmul(scale, normals)
    least = float(jnp.finfo(start.dtype).eps) ** 0.8 if abstol is None else abstol
    is_there = jnp.max(jnp.abs(g(found))) <= jnp.asarray(least, start.dtype)
    after = state_of(jnp.where(is_there, found, start))
    goes_on, fails = float(AffectOutcome.GoesOn), float(AffectOutcome.NotConverged)
    return dataclasses.replace(integrator, u=after, _ends=jnp.where(is_there, goes_on, fails))


def _numbers_of(residual: Any, like: Any) -> Any:
    """The residual as a vector.

    **Raises:** `TypeError` and `ValueError` for a residual that isn't real numbers of the state's
    precision, or not fewer than the state has.
    """
    what, leaves = "residual of ManifoldProjection", jax.tree.leaves(residual)
    for x in leaves:
        if not eqx.is_array_like(x) or isinstance(x, str):
            raise TypeError(f"{what} must return real numbers, got {type(x).__name__}.")
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.result_type(x, like.dtype) != like.dtype:
            raise TypeError(
                f"{what} must return real numbers of the precision of the state u, {like.dtype}; "
                f"it returned {dtype}."
            )
    size = sum(math.prod(np.shape(x)) for x in leaves)
    if not 0 < size < like.size:
        hint = " (Is a `return` missing?)" if not size else ""
        raise ValueError(
            f"{what} must return fewer numbers than the {like.size} (real ones) of the state, and "
            f"one at least; it returned {size}.{hint}"
        )
    return jnp.concatenate([jnp.asarray(x, like.dtype).reshape(-1) for x in leaves])


def _jacobian(g: Callable, x: Array, n: int) -> Array:
    """The Jacobian of the residual, `[residual, component]`."""
    _, pull = jax.vjp(g, x)
    unit = np.eye(n, dtype=x.dtype)
    return jnp.stack([pull(jnp.asarray(unit[i]))[0] for i in range(n)])


def _solution(matrix: Array, vector: Any) -> Array:
    """The solution of a few linear equations `matrix @ x = vector`, by elimination without row
    exchanges, since the matrix is almost a Gram matrix."""
    n = vector.size
    rows: list[list] = [[matrix[i, j] for j in range(n)] + [vector[i]] for i in range(n)]
    for i in range(n):
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [b - factor * a for a, b in zip(rows[i], rows[k], strict=True)]
    found: list = []
    for i in reversed(range(n)):
        known: Sequence = [a * x for a, x in zip(rows[i][i + 1 : n], reversed(found), strict=True)]
        found.append((rows[i][n] - sum(known)) / rows[i][i])
    return jnp.stack(found[::-1])
