"""States at rest: Newton's method from where a solve came to rest, and implicit derivatives.

At rest, `f(y, p) = 0`. Where the Jacobian `J` is singular, a row `w` with `w J = 0` stands for a
quantity that the ODE conserves. Such quantities give the missing equations, `w M (y - u) = 0`, with
the mass matrix `M` and the state `u` at the end of the solve. The derivative of the root `y` comes
from the implicit function theorem, and depends on the initial state through what is conserved.

Matrices are inverted here by elementwise operations: LAPACK's threads wait for ever where several
devices of a CPU call them.

Source: A. Griewank and A. Walther, Evaluating Derivatives, 2nd ed., 2008, section 15.1.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ...fields.derivatives.jacobian import is_reverse_only
from ...ground.devices.alone import alone
from ...ground.retcode import is_successful, ReturnCode, was_ended
from ...plan.plan import Plan, Result
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...solution.events import End
from ...tracing.branches import with_selected_branches
from ...tracing.program import is_inexact, Program, substituted
from ..base.results import numbers_of_each
from .along import fit_for
from .flow import at_numbers


# The largest number of Newton steps; and the rounding errors, for each component, that are left of
# a scaled matrix whose rank is not full.
_MOST_STEPS, _ROUNDINGS = 60, 10


def at_rest(plan: Plan, lanes: TrajectoryNumbers, result: Result) -> Result:
    """The result in which the ends of trajectories that came to rest have the derivatives of the
    state at rest; for `steady_state` they are that state, and other trajectories have failed."""
    ended, events = result.ended, plan.events
    if ended is None or events is None or not events.rests:
        return result
    came = _came_to_rest(plan, result)
    at = {"u": (result.u, lanes.saveat if result.t is None else result.t)}
    if result.events is not None:
        at |= {x: (getattr(result.events, x), result.events.t) for x in ("before", "after")}
    axes = tuple(range(2, result.u.ndim))
    holds, rows = {}, {}
    for name, (u, t) in at.items():
        rows[name] = u
        same = jnp.all(u == ended.u[:, None], axis=axes)
        t = jnp.broadcast_to(jnp.asarray(t), same.shape)
        holds[name] = came[:, None] & same & (t == ended.t[:, None])
    assert isinstance(plan.field, Program)
    about = plan.state.shape, plan.controlled, plan.mass, plan.batched
    system = RestEquations(plan.field, *about)
    if events.settles:
        end, found = system.roots(came, ended.u, ended.t, lanes)
        why = jnp.where(came, ReturnCode.ConvergenceFailure.value, ReturnCode.Failure.value)
        codes = jnp.where(is_successful(result.retcode) & ~found, why, result.retcode)
        result = result._replace(retcode=codes.astype(result.retcode.dtype))
        rows = {name: _put(holds[name], u, end) for name, u in rows.items()}
    else:
        rows, end = _identity(system, came, holds, rows, ended.u, ended.t, lanes)
    if result.events is not None:
        happened = result.events._replace(before=rows["before"], after=rows["after"])
        result = result._replace(events=happened)
    return result._replace(u=rows["u"], ended=End(ended.t, end))


def _came_to_rest(plan: Plan, result: Result) -> Any:
    """Which trajectories a `TerminateSteadyState` ended, `[trajectory]`. If other callbacks may end
    them, it is the one of the last event, which has to be in the record."""
    assert plan.events is not None
    came = was_ended(result.retcode)
    if all(x.which in plan.events.rests for x in plan.events.callbacks if x.may_end):
        return came
    if result.events is None:
        return jnp.zeros_like(came)
    last = result.events.count[:, None] - 1
    of_last = jnp.arange(plan.max_events, dtype=last.dtype)[None] == last
    ends = jnp.isin(result.events.which, jnp.asarray(plan.events.rests, np.int32))
    return came & jnp.any(of_last & ends, axis=1)


def _put(mask: Array, rows: Array, end: Array) -> Any:
    """Rows `[trajectory, row, *state]`; where the mask is true, a row is its trajectory's `end`."""
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (end.ndim - 1)), end[:, None], rows)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(
    system: "RestEquations",
    came: Any,
    holds: dict,
    rows: dict,
    u: PyTree,
    t: Any,
    lanes: TrajectoryNumbers,
) -> PyTree:
    """The rows and the end, with the derivatives of the state at rest where that is found."""
    return rows, u


@_identity.defjvp
def _(system: "RestEquations", primals: Sequence, tangents: Sequence) -> tuple:
    came, holds, _, u, t, lanes = primals
    *_, drows, du, dt, dlanes = tangents

    def root(u, t, lanes):
        return system.roots(came, u, t, lanes)[0]

    at = (u, t, system.needed(lanes)), (du, dt, system.needed(dlanes))
    _, du = jax.jvp(root, *at)
    drows = {name: _put(holds[name], x, du) for name, x in drows.items()}
    return _identity(system, *primals), (drows, du)


class RestInputs(NamedTuple):
    """What the equations of a trajectory depend on besides the components `y` that come to rest:
    the `others`, which follow these in the state; the constants and parameters of the field; the
    time; and the `span` from `t0` to that time."""

    others: Any
    numbers: tuple
    t: Any
    span: Any


@dataclasses.dataclass(frozen=True)
class RestEquations:
    """The equations of a state whose first `size` components come to rest."""

    field: Program
    shape: tuple[int, ...]
    size: int
    mass: Any
    batched: TrajectoryNumbers

    def needed(self, lanes: TrajectoryNumbers) -> TrajectoryNumbers:
        """The numbers that the equations are made of; the others are None."""
        return TrajectoryNumbers(consts=lanes.consts, p=lanes.p, t0=lanes.t0)

    def roots(
        self, came: Array, u: Array, t: Array, lanes: TrajectoryNumbers
    ) -> tuple[Array, Array]:
        """The states at rest near `u`, or `u` where none was found; and whether one was found."""
        fit, numbers = fit_for(came), lanes.parameters
        own = self.batched.parameters
        numbers = tuple(map(fit, numbers, own))

        def every(u: Array, t: Array, t0: Array, numbers: tuple) -> tuple:
            def one(u, t, t0, *numbers):
                flat = u.reshape(-1)
                given = RestInputs(flat[self.size :], numbers, t, t - t0)
                y, found = _root(self, flat[: self.size], given)
                return jnp.concatenate([y, flat[self.size :]]).reshape(u.shape), found

            in_axes = (0, 0, 0, *(0 if x else None for x in own))
            return jax.vmap(one, in_axes=in_axes)(u, t, t0, *numbers)

        t0 = numbers_of_each(lanes.t0, self.batched.t0, len(u))
        y, found = alone(every, fit(u), fit(t), fit(t0), numbers)
        found = found & came
        return jnp.where(found.reshape(-1, *(1,) * (u.ndim - 1)), y, u), found

    def rates(self, y: Array, given: RestInputs, t: Array) -> Array:
        """`f` as a vector of the components that come to rest."""
        u = jnp.concatenate([y, given.others]).reshape(self.shape)
        field = with_selected_branches(self.field)
        rate = at_numbers(field, self.field, given.numbers, (), t)(u)
        return rate.reshape(-1)[: self.size]

    def massive(self, y: Array) -> Array:
        """The product of the mass matrix with a vector or a matrix."""
        n = self.size
        return y if self.mass is None else _times(jnp.asarray(self.mass.matrix[:n, :n], y.dtype), y)

    @property
    def derivative(self) -> Callable:
        return jax.jacrev if is_reverse_only(self.field) else jax.jacfwd

    def jacobian(self, y: Array, given: RestInputs) -> Array:
        return self.derivative(lambda y: self.rates(y, given, given.t))(y)

    def jacobian_product(self, y: PyTree, given: RestInputs, direction: Any) -> PyTree:
        """The product of the Jacobian with a direction."""
        if is_reverse_only(self.field):
            return _times(self.jacobian(y, given), direction)
        return jax.jvp(lambda y: self.rates(y, given, given.t), (y,), (direction,))[1]


class LinearisedEquations(NamedTuple):
    """The equations at a state `y`, divided by the sizes of their rows: `weights f(y) +
    left weights M (y - u) = 0`. The second term fills the rows whose equations in `f` depend on
    those of the other rows.

    - `left`: in each row that is filled, a left null vector of `weights J`; zero in the
        other rows. `regular`: the inverse from which it is computed.
    - `inverse`: that of the equations' matrix, for changes of `y` in units of `scale`.
    """

    inverse: Any
    left: Any
    regular: Any
    weights: Any
    scale: Any


def _linear(system: RestEquations, y: Array, given: RestInputs) -> LinearisedEquations:
    constant = jax.lax.stop_gradient
    scale = constant(_scale(y))
    matrix = system.jacobian(y, given) * scale[None]
    size = constant(jnp.max(jnp.abs(matrix), axis=1))
    weights = 1 / jnp.where(size > 0, size, scale)
    matrix = matrix * weights[:, None]
    eps = jnp.finfo(y.dtype).eps
    _, border = _eliminated(constant(matrix), _ROUNDINGS * len(y) * eps)
    # A border of ones, in rows and columns in which no pivot is left, makes the matrix regular. The
    # rows of its inverse that belong to these columns are the left null vectors.
    regular = _inverse(matrix + border)
    left = _times(border, regular)
    kept = _times(left, weights[:, None] * system.massive(jnp.diag(scale)))
    size = constant(jnp.max(jnp.abs(kept), axis=1, keepdims=True))
    size = jnp.where(size > 0, size, 1)
    return LinearisedEquations(_inverse(matrix + kept / size), left / size, regular, weights, scale)


def _scale(y: Array) -> Array:
    """The sizes of components. One that is tiny beside others counts as larger than it is, so that
    a null direction of the Jacobian is found even where the components along it vanish."""
    size = jnp.abs(y)
    largest = jnp.max(size)
    floor = jnp.where(largest > 0, largest, 1) * jnp.sqrt(jnp.finfo(y.dtype).eps)
    return jnp.maximum(size, floor)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _root(system: RestEquations, u: Array, given: RestInputs) -> tuple[Array, Array]:
    """The state at rest near `u [component]`, and whether it was found; if not, `u`."""
    eps = float(jnp.finfo(u.dtype).eps)

    def goes_on(now: tuple) -> Array:
        _, moved, before, steps = now
        stagnates = (moved < eps**0.5) & (moved >= before)
        return (moved > 4 * eps) & ~stagnates & (steps < _MOST_STEPS)

    def step(now: tuple) -> tuple:
        y, moved, _, steps = now
        at = _linear(system, y, given)
        kept = _times(at.left, at.weights * system.massive(y - u))
        residual = at.weights * system.rates(y, given, given.t) + kept
        change = _times(at.inverse, residual)
        size = jnp.max(jnp.abs(change))
        return y - at.scale * change, jnp.where(jnp.isnan(size), jnp.inf, size), moved, steps + 1

    far = jnp.asarray(jnp.inf, u.dtype)
    y, moved, *_ = jax.lax.while_loop(goes_on, step, (u, far, far, np.int32(0)))
    # The sizes of the terms of f that depend on the state, and the size of f, their sum.
    terms = _times(jnp.abs(system.jacobian(y, given)), _scale(y))
    left = jnp.abs(system.rates(y, given, given.t))
    drift = jnp.abs(system.derivative(lambda t: system.rates(u, given, t))(given.t))
    still = jnp.all(left + drift * jnp.abs(given.span) <= eps**0.5 * terms)
    found = (moved < eps**0.5) & still & jnp.all(jnp.isfinite(y))
    return jnp.where(found, y, u), found


@_root.defjvp
def _(system: RestEquations, primals: Sequence, tangents: Sequence) -> tuple:
    (u, given), (du, dgiven) = primals, tangents
    y, found = _root(system, u, given)
    at = _linear(system, y, given)
    # What is conserved may change with the parameters: a left null vector w of A moves by
    # -w dA (A + border)^-1.
    tilt = at.scale * _times(at.regular, at.weights * system.massive(y - u))

    def residual(others, *numbers):
        here = given._replace(others=others, numbers=numbers)
        turned = at.weights * system.jacobian_product(y, here, tilt)
        return at.weights * system.rates(y, here, given.t) - _times(at.left, turned)

    point, way = ((x.others, *x.numbers) for x in (given, dgiven))
    moved = _derivative_along(system, residual, point, way)
    kept = _times(at.left, at.weights * system.massive(du))
    dy = -at.scale * _times(at.inverse, moved - kept)
    none = np.zeros(found.shape, jax.dtypes.float0)
    return (y, found), (jnp.where(found, dy, du), none)


def _derivative_along(system: RestEquations, fn: Callable, at: Sequence, tangents: Sequence) -> Any:
    """The derivative of `fn` along tangents, even where `fn` has reverse mode alone."""
    places = [i for i, x in enumerate(at) if is_inexact(x)]

    def of_inexact(*chosen):
        return fn(*substituted(at, places, chosen))

    points, tangents = ([xs[i] for i in places] for xs in (at, tangents))
    if not is_reverse_only(system.field):
        return jax.jvp(of_inexact, points, tangents)[1]
    out, pull = jax.vjp(of_inexact, *points)
    return jax.linear_transpose(pull, out)(tuple(tangents))[0]


#
# Matrices
#


def _times(a: Array, b: Array) -> Array:
    """The product of a matrix with a matrix or a vector."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _eliminated(matrix: Array, least: ArrayLike) -> tuple[Array, Array]:
    """The inverse of `matrix + border`, by Gauss-Jordan elimination with complete pivoting, and the
    border: it has a one at each place where no pivot larger than `least` was left."""
    n = len(matrix)
    places = jnp.arange(n)

    def turn(_: Array, now: tuple) -> tuple:
        both, border, left, order = now
        rows, columns = left
        sizes = jnp.where(rows[:, None] & columns[None], jnp.abs(both[:, :n]), -1)
        at = jnp.argmax(sizes)
        row, column = places == at // n, places == at % n
        here = row[:, None] & column[None]
        lacks = here & (jnp.max(sizes) <= least)
        both = both.at[:, :n].add(lacks.astype(both.dtype))
        pivot_row = jnp.sum(jnp.where(row[:, None], both, 0), axis=0)
        pivot = jnp.sum(jnp.where(column, pivot_row[:n], 0))
        pivot_row = pivot_row / pivot
        factors = jnp.sum(jnp.where(column[None], both[:, :n], 0), axis=1)
        both = jnp.where(row[:, None], pivot_row[None], both - factors[:, None] * pivot_row[None])
        order = jnp.where(column, at // n, order)
        return both, border | lacks, (rows & ~row, columns & ~column), order

    both = jnp.concatenate([matrix, jnp.eye(n, dtype=matrix.dtype)], axis=1)
    all_left = jnp.ones(n, bool), jnp.ones(n, bool)
    first = both, jnp.zeros((n, n), bool), all_left, jnp.zeros(n, places.dtype)
    both, border, _, order = jax.lax.fori_loop(0, n, turn, first)
    return both[order, n:], border.astype(matrix.dtype)


@jax.custom_jvp
def _inverse(matrix: Array) -> Array:
    return _eliminated(matrix, -1)[0]


@_inverse.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    inverse = _inverse(*primals)
    return inverse, -_times(_times(inverse, tangents[0]), inverse)
