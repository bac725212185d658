"""Finds states that fulfil the algebraic equations of a mass matrix: at the start, after affects,
and after jumps of the field."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..fields.derivatives.jacobian import is_reverse_only
from ..ground.recent import jit_recent
from ..plan.rate import solved
from ..plan.trajectory_numbers import Trajectories
from ..problem.callbacks import all_of, CallbackSet, PresetTimeCallback
from ..problem.initialization import BrownFullBasicInit
from ..solvers.mass_matrix import MassMatrix, mixing
from ..tracing.branches import with_selected_branches
from ..tracing.program import is_tracer, Program


# The largest number of Newton steps, and how often each may be halved.
_MOST_STEPS, _LENGTHS = 100, 10
_STEPS_AFTER = 30  # Newton steps after an affect


def with_consistent_start(every: Trajectories) -> Trajectories:
    """The ensemble with the initial states that `initializealg` computes."""
    init, mass = every.options["initializealg"], every.form and every.form.mass
    if not isinstance(init, BrownFullBasicInit) or mass is None or not mass.is_singular:
        return every
    return every.with_start(functools.partial(_started, every.field, mass, init))


class AfterJumps(PresetTimeCallback):
    """A callback of the library's own that solves the algebraic equations again after a jump of the
    field. Solutions don't record its events."""


def with_equations_after_jumps(callback: Any, times: Any, t0: Any) -> CallbackSet:
    """The callbacks, and one that solves the algebraic equations again at these times, `[time]`, at
    which the field jumps. It acts last, because what other callbacks do at that time belongs to the
    field before the jump. It doesn't act at the start, which is consistent already."""
    xp: ModuleType = jnp if is_tracer(times) or is_tracer(t0) else np
    inside = xp.where(times == t0, np.inf, times)
    last = AfterJumps(inside, lambda integrator: integrator, save_positions=(False, False))
    return CallbackSet(*all_of(callback), last)


def consistent_again(f: Callable, mass: MassMatrix, u: PyTree) -> Array:
    """The state `u` after an affect, a vector, with its algebraic components replaced by a solution
    of the algebraic equations of `f(u)`, the vector field at that time.

    Newton's method takes a fixed number of whole steps, in operations that every engine has. So the
    result has derivatives of any order, in both modes. Engines check whether it is a solution.
    """
    rows, columns = np.array(mass.algebraic_rows), np.array(mass.algebraic_columns)
    factors = jnp.asarray(mixing(len(rows)), u.dtype)

    def equations(z: Array) -> Array:
        return f(u.at[columns].set(z))[rows]

    def step(_: Array, z: Array) -> Array:
        matrix, right = jax.jacfwd(equations)(z), equations(z)
        size = jax.lax.stop_gradient(jnp.max(jnp.abs(matrix), axis=1))
        both = jnp.concatenate([matrix, right[:, None]], axis=1) / size[:, None]
        return z - solved(jnp.matmul(factors, both))

    return u.at[columns].set(jax.lax.fori_loop(0, _STEPS_AFTER, step, u[columns]))


@functools.partial(jit_recent, static=3)
def _started(
    field: Program,
    mass: MassMatrix,
    init: BrownFullBasicInit,
    u: PyTree,
    numbers: Sequence,
    t: Array,
) -> Array:
    """The state with its algebraic components replaced by a solution of the algebraic equations."""
    n = len(field.jaxpr.constvars)
    rows, columns = np.array(mass.algebraic_rows), np.array(mass.algebraic_columns)
    flat = u.reshape(-1)

    def with_algebraic(z: Array) -> Array:
        return flat.at[columns].set(z).reshape(u.shape)

    rate = with_selected_branches(field)

    def equations(z: Array) -> Array:
        return rate(numbers[:n], with_algebraic(z), tuple(numbers[n:]), t).reshape(-1)[rows]

    z = flat[columns]
    if is_reverse_only(field):
        return with_algebraic(_root_by_rows(equations, z, init.abstol))
    newton = functools.partial(_newton, abstol=init.abstol, derivative=jax.jacfwd)
    return with_algebraic(jax.lax.custom_root(equations, z, newton, _solved))


def _root_by_rows(equations: Callable, z: Any, abstol: float) -> Any:
    """A root of equations that have only derivatives in reverse mode, with derivatives of its own
    in that mode."""
    residual, given = jax.closure_convert(equations, z)

    @jax.custom_vjp
    def root(z: Any, *given: Any) -> Any:
        newton = functools.partial(_newton, abstol=abstol, derivative=jax.jacrev)
        return newton(lambda z: residual(z, *given), z)

    def forwards(z: Any, *given: Any) -> tuple:
        found = root(z, *given)
        return found, (found, given)

    def backwards(kept: tuple, cotangent: PyTree) -> tuple:
        found, given = kept
        matrix = jax.jacrev(residual)(found, *given)
        _, pull = jax.vjp(functools.partial(residual, found), *given)
        return jnp.zeros_like(found), *pull(-jnp.linalg.solve(matrix.T, cotangent))

    root.defvjp(forwards, backwards)
    return root(z, *given)


def _solved(linear: Callable, right: Array) -> Array:
    return jnp.linalg.solve(jax.jacfwd(linear)(right), right)


class _NewtonSearch(NamedTuple):
    """The state of Newton's method: the iterate `z`, the largest residual there, the number of
    steps so far, and whether the last step made the residual smaller."""

    z: Any
    distance: Any
    steps: Any
    nearer: Any


def _newton(equations: Callable, z: Array, *, abstol: float, derivative: Callable) -> Array:
    shares = 0.5 ** np.arange(_LENGTHS)

    def distance(z: Array) -> Array:
        return jnp.max(jnp.abs(equations(z)))

    def goes_on(now: _NewtonSearch) -> Array:
        return now.nearer & (now.distance > abstol) & (now.steps < _MOST_STEPS)

    def step(now: _NewtonSearch) -> _NewtonSearch:
        change = jnp.linalg.solve(derivative(equations)(now.z), equations(now.z))
        tries = now.z[None] - jnp.asarray(shares, change.dtype)[:, None] * change[None]
        found = jax.vmap(distance)(tries)
        found = jnp.where(jnp.isnan(found), jnp.inf, found)
        best = jnp.argmin(found)
        nearer = found[best] < now.distance
        z = jnp.where(nearer, tries[best], now.z)
        return _NewtonSearch(z, jnp.where(nearer, found[best], now.distance), now.steps + 1, nearer)

    first = _NewtonSearch(z, distance(z), jnp.zeros((), np.int32), jnp.ones((), bool))
    return jax.lax.while_loop(goes_on, step, first).z
