"""The solution between saved steps: in each step it is a polynomial, given by its values at nodes.

The nodes are the Chebyshev-Lobatto points, which include both ends of the step, since a polynomial
of any degree is well conditioned there (Trefethen, "Approximation Theory and Approximation
Practice", 2013, chapters 5 and 15). The subclasses of `Dense` differ in where the values at the
inner nodes come from.
"""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..fields.derivatives.jacobian import is_reverse_only
from ..ground.recent import jit_recent
from ..ground.state_tree import StateTree
from ..solvers.arithmetic import ArrayArithmetic
from ..solvers.method import equations_of
from ..solvers.switching import Switching
from ..solvers.time import next_time, size_before


class DenseStep(NamedTuple):
    """A saved step: its row, its start `t`, its signed length `h`, and the states at both ends
    (pytrees if the user's state is one)."""

    row: Any
    t: Any
    h: Any
    start: Any
    end: Any


class Dense(eqx.Module):
    """The data from which the solution within steps is computed."""

    @abc.abstractmethod
    def inner_states(self, step: DenseStep) -> Any:
        """The states at the inner nodes of a step: `[node, *state]`."""

    def of_trajectories(self, i: ArrayLike) -> "Dense":
        """The data of one of several trajectories, or of some of them (an array of indices)."""
        return jax.tree.map(lambda x, own: x[i] if own else x, self, self.own)

    def rows(self, rows: Any) -> "Dense":
        """The data of these rows."""
        return jax.tree.map(lambda x: x[rows], self)

    @property
    def own(self) -> Any:
        """For each leaf, whether it differs between trajectories."""
        return jax.tree.map(lambda _: True, self)


class KeptNodes(Dense):
    """The states at the inner nodes were kept: `[time, node, *state]`, in the row where a step
    starts."""

    inner: PyTree

    def inner_states(self, step: DenseStep) -> Array:
        return jax.tree.map(lambda x: x[step.row], self.inner)


class KeptSlopes(Dense):
    """The derivatives at the saved states were kept: `[time, *state]`; the polynomial is a
    cubic."""

    du: PyTree

    def inner_states(self, step: DenseStep) -> Array:
        def one(du, start, end):
            return _cubic(step.h, start, end, du[step.row], du[step.row + 1])

        return jax.tree.map(one, self.du, step.start, step.end)


class StraightSteps(Dense):
    """The solution is linear between the saved states."""

    def inner_states(self, step: DenseStep) -> Array:
        def one(start, end):
            return jnp.stack([start + x * (end - start) for x in inner_nodes(1)])

        return jax.tree.map(one, step.start, step.end)

    def rows(self, rows: Any) -> "StraightSteps":
        return self


class DensePlan(NamedTuple):
    """The static properties of a solve that decide the solution within a step.

    - `field`: the vector field, `field(consts, u, p, t)`, or without a `method` the derivative of
        the state, which with a mass matrix is another function; `tree`: the structure of its state.
    - `method`: makes a step again. It has the `degree`, `is_implicit`, `init`, `step`, `dense` and
        `interpolate` of a [`Method`][ensembleode.solvers.method.Method]. None where steps can't be
        made again; the polynomial is then the cubic through the states at both ends, with their
        slopes.
    - `own`: which of the constants and parameters differ between trajectories.
    - `form`: what implicit methods need besides the field; None where they need nothing.
    - `jumps`: whether the field jumps at known times, after which a step begins just after the end
        of the step before.
    """

    field: Callable
    method: Any
    tree: StateTree | None
    own: tuple[tuple[bool, ...], tuple[bool, ...]]
    jumps: bool = False
    form: Any = None


class RemadeSteps(Dense):
    """Nothing was kept: a step is made again when its inner states are needed, with the same result
    each time."""

    consts: tuple
    p: tuple
    known: DensePlan = eqx.field(static=True)

    def inner_states(self, step: DenseStep) -> PyTree:
        tree, method = self.known.tree, self.known.method
        start, end = (x if tree is None else tree.ravel(x) for x in (step.start, step.end))

        def field(y, t):
            return (self.known.field(self.consts, y[0], self.p, t),)

        if method is None:
            (left,), (right,) = field((start,), step.t), field((end,), step.t + step.h)
            inner = _cubic(step.h, start, end, left, right)
        else:
            y, t, h = (start,), step.t, step.h
            if self.known.jumps:
                # (In steps that don't follow a jump, the result is the same.)
                t2, direction = t + h, jnp.sign(h)
                t = next_time(_XP, t, direction)
                h = size_before(_XP, t, t2, True, direction)
            mass = None if self.known.form is None else self.known.form.mass
            no_forward = method.is_implicit and is_reverse_only(self.known.field)
            equations = equations_of(field, self._product(), mass, is_reverse_only=no_forward)
            if isinstance(method, Switching):
                method = method.made_by(_XP, equations, y, t, h, (end,))
            carry = method.init(_XP, equations, y, t)
            dense = method.step(_XP, equations, y, carry, t, h).dense
            dense = method.dense(_XP, equations, y, dense, t, h)
            at = (method.interpolate(_XP, y, dense, h, c) for c in inner_nodes(method.degree))
            inner = jnp.stack([u for (u,) in at])
        return inner if tree is None else tree.unravel(inner)

    def _product(self) -> Callable | None:
        """The product of the user's Jacobian with a direction; None if the user gave no
        Jacobian."""
        form = self.known.form
        if form is None or form.product is None:
            return None

        def product(y: PyTree, t: Any, direction: Any) -> PyTree:
            return form.product(self.consts, y, (*self.p, direction), t)

        return product

    def rows(self, rows: Any) -> "RemadeSteps":
        return self

    def of_trajectories(self, i: ArrayLike) -> "RemadeSteps":
        consts, p = (
            tuple(x[i] if own else x for x, own in zip(xs, owned, strict=True))
            for xs, owned in zip((self.consts, self.p), self.known.own, strict=True)
        )
        known = self.known
        if not np.ndim(i):
            known = known._replace(own=jax.tree.map(lambda _: False, known.own))
        return RemadeSteps(consts, p, known)

    @property
    def own(self) -> "RemadeSteps":
        return RemadeSteps(*self.known.own, self.known)


class _NumberArithmetic(ArrayArithmetic):
    """Arithmetic on a state that is a single component."""

    def broadcast_over(self, number: Array, component: Array) -> Array:
        return jnp.asarray(number, component.dtype)

    def total(self, components: tuple[Array, ...]) -> Any:
        return sum(jnp.sum(x) for x in components)


_XP: Any = _NumberArithmetic(jnp)


@functools.cache
def inner_nodes(degree: int) -> tuple[float, ...]:
    """The inner nodes of a step, from 0 to 1, that determine a polynomial of this degree together
    with the ends. There is at least one, so that no array is empty."""
    degree = max(2, degree)
    return tuple(math.sin(math.pi * j / (2 * degree)) ** 2 for j in range(1, degree))


def _cubic(h: Array, left: Array, right: Array, dleft: Array, dright: Array) -> Array:
    """The values at its inner nodes of the cubic with these values and slopes at the ends (Hairer,
    Norsett and Wanner, "Solving Ordinary Differential Equations I", II.6)."""
    h = jnp.asarray(h, left.dtype)
    return jnp.stack(
        [
            (1 + 2 * x) * (1 - x) ** 2 * left
            + x**2 * (3 - 2 * x) * right
            + h * (x * (1 - x) ** 2 * dleft + x**2 * (x - 1) * dright)
            for x in inner_nodes(3)
        ]
    )


def polynomial(x: Array, start: Array, inner: Array, end: Array) -> Array:
    """The polynomial at the fraction `x` of a step, by Lagrange's formula relative to the nearer
    end, at which it is exact."""
    nodes, weights = np.array([0.0, *inner_nodes(len(inner) + 1), 1.0]), jnp.ones((), x.dtype)
    for k, node in enumerate(nodes.tolist()):
        is_other = np.arange(len(nodes)) != k
        scale = is_other / np.where(is_other, nodes - node, 1)
        weights = weights * ((x - node) * scale.astype(x.dtype) + (~is_other).astype(x.dtype))
    near = jnp.where(x < 0.5, start, end)
    values = jnp.concatenate([start[None], inner, end[None]]) - near[None]
    weights = weights.astype(values.dtype).reshape(-1, *(1,) * start.ndim)
    return near + jnp.sum(weights * values, axis=0)


def states_at(
    dense: Dense,
    times: Any,
    u: PyTree,
    lengths: Any,
    succeeded: ArrayLike,
    t: Any,
    deriv: int = 0,
    *,
    several: bool,
) -> PyTree:
    """The states at `t` (a number or `[n]`), or their derivatives of order `deriv` with respect to
    time. They are NaN outside of what was reached.

    **Arguments:** the saved `times [time]`; the states `u`, with leaves `[time, *state]`; the
    number of times that were reached; and whether the trajectory succeeded (otherwise its gradient
    is zero). With `several` trajectories, all of these, and the results, have a leading axis of
    trajectories. `t` is the same for all.
    """  # fmt: skip
    # Two programs: the second takes long to compile, and doesn't depend on the number of steps.
    found = _evaluated(_find, None, several, None, (times, u, lengths, succeeded), (t,))
    return _evaluated(_states_at, deriv, several, dense, found)


def states_between(
    dense: Dense,
    times: Array | np.ndarray,
    u: PyTree,
    lengths: ArrayLike,
    points: int,
    *,
    several: bool,
) -> Array:
    """The states at `points` evenly spaced points of each step, `[time, point, *state]`, from its
    start on, in the row where it starts. The other arguments are those of `states_at`."""
    return _evaluated(_along_steps, points, several, dense, (times, u, lengths))


def kept(dense: Dense, times: Array, u: PyTree, lengths: Array, *, several: bool) -> KeptNodes:
    """The same solution as data without a program: the states at the inner nodes of all steps, NaN
    where there is no step. The arguments are those of `states_at`."""
    return KeptNodes(_evaluated(_within_steps, None, several, dense, (times, u, lengths)))


def _evaluated(
    fn: Callable,
    option: Any,
    several: bool,
    dense: Dense | None,
    each: tuple,
    shared: tuple = (),
) -> PyTree:
    """`fn(dense, *each, *shared, option)`, compiled, and mapped over the trajectories where there
    are `several`."""
    own = None
    if several:
        own = () if dense is None else tuple(jtu.tree_leaves(dense.own))
    leaves, structure = jtu.tree_flatten((dense, each, shared))
    return _compiled(fn, option, own, structure, [jnp.asarray(x) for x in leaves])


@functools.partial(jit_recent, static=4)
def _compiled(fn, option, own, structure, leaves):
    dense, each, shared = jtu.tree_unflatten(structure, leaves)

    def of_one(dense, each):
        return fn(dense, *each, *shared, option)

    if own is None:
        return of_one(dense, each)
    flags = iter(own)
    axes = jax.tree.map(lambda _: 0 if next(flags) else None, dense)
    return jax.vmap(of_one, in_axes=(axes, 0))(dense, each)


class _FoundStep(NamedTuple):
    """A time, the step that it is in, whether that has a positive length, whether the time was
    reached, and whether the trajectory succeeded."""

    step: DenseStep
    has_length: Any
    t: Any
    inside: Any
    succeeded: Any


def _find(
    _: None,
    times: Array,
    u: PyTree,
    length: Array,
    succeeded: Array,
    t: Array,
    __: None,
) -> tuple[_FoundStep]:
    """The steps in which the times `t` are."""
    reached = jnp.arange(times.shape[0], dtype=length.dtype) < length
    sign = jnp.where(times[jnp.minimum(1, length - 1)] < times[0], -1, 1).astype(times.dtype)
    ordered = jnp.where(reached, times * sign, jnp.inf)
    last = ordered[jnp.maximum(length - 1, 0)]

    def at(t):
        inside = (t * sign >= ordered[0]) & (t * sign <= last) & (length > 0)
        row = jnp.searchsorted(ordered, t * sign, side="right").astype(length.dtype) - 1
        row = jnp.clip(row, 0, jnp.maximum(length - 2, 0))
        return _FoundStep(*_step(times, u, length, row), t, inside, succeeded)

    return (jax.vmap(at)(t) if t.ndim else at(t),)


def _states_at(dense: Dense, found: _FoundStep, deriv: int) -> PyTree:
    def of(found):
        step, has_length, t, inside, succeeded = found
        inner = jax.tree.map(
            lambda x: jnp.where(succeeded, x, jax.lax.stop_gradient(x)),
            _inner(dense, step, has_length),
        )

        def at(t):
            x = (t - step.t) / jnp.where(has_length, step.h, 1)
            return jax.tree.map(functools.partial(polynomial, x), step.start, inner, step.end)

        for _ in range(deriv):
            at = _derivative(at)
        # (Where a state isn't asked for, its derivative may be infinite, and would make the
        # gradient NaN.)
        states = at(jnp.where(inside, t, step.t))
        return jax.tree.map(lambda u: jnp.where(inside, u, jnp.nan), states)

    return jax.vmap(of)(found) if found.t.ndim else of(found)


def _along_steps(dense: Dense, times: Array, u: PyTree, length: Array, points: int) -> Array:
    def along(row):
        step, has_length = _step(times, u, length, row)
        inner = _inner(dense, step, has_length)

        def at(x):
            return jax.tree.map(functools.partial(polynomial, x), step.start, inner, step.end)

        return jax.vmap(at)(jnp.arange(points, dtype=times.dtype) / points)

    return jax.vmap(along)(jnp.arange(times.shape[0], dtype=length.dtype))


def _within_steps(dense: Dense, times: Array, u: PyTree, length: Array, _: None) -> PyTree:
    def of(row):
        step, _ = _step(times, u, length, row)
        inner = dense.inner_states(step)
        return jax.tree.map(lambda x: jnp.where(row + 1 < length, x, jnp.nan), inner)

    return jax.vmap(of)(jnp.arange(times.shape[0], dtype=length.dtype))


def _step(times: Array, u: PyTree, length: Array, row: Array) -> tuple[DenseStep, Any]:
    """The step from a row on, and whether its length is positive. If nothing was reached after the
    row, or the span has no length, it is a step of length zero from a state that was reached."""
    after = jnp.minimum(row + 1, times.shape[0] - 1)
    has_length = (row + 1 < length) & (times[after] != times[row])
    row = jnp.where(row < length, row, 0)
    t = jnp.where(length > 0, times[row], 0)
    h = jnp.where(has_length, times[after] - t, 0)
    start = jax.tree.map(lambda u: jnp.where(length > 0, u[row], 1), u)
    end = jax.tree.map(lambda u, start: jnp.where(has_length, u[after], start), u, start)
    return DenseStep(row, t, h, start, end), has_length


def _inner(dense: Dense, step: DenseStep, has_length: Array) -> PyTree:
    return jax.tree.map(
        functools.partial(jnp.where, has_length), dense.inner_states(step), step.start
    )


def _derivative(fn: Callable) -> Callable:
    return lambda t: jax.jvp(fn, (t,), (jnp.ones_like(t),))[1]
