"""The interface between a time loop and a method: a step is one program.

The program is written over the operations of an
[`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic]. An engine runs it on JAX arrays, or
writes it as generated code, and differentiates it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import lu_factor, lu_solve
from jax.typing import DTypeLike

from .arithmetic import Arithmetic, Components, Mask, Number, NUMBERS
from .mass_matrix import MassMatrix


def _not_given(*args: Any) -> Any:
    """A placeholder for operations that explicit methods don't use."""
    raise NotImplementedError("These equations are of explicit methods.")


@dataclasses.dataclass(frozen=True)
class Equations:
    """The operations of the problem that a method may use.

    - `f(y, t)`: the vector field, Components like `y`.
    - `jvp(y, t, dy, dt)`: its derivative at that point along `(dy, dt)`.

    For implicit methods there are also:

    - `linearise(y, t)`: the derivatives of `f` at that point: with respect to the state, a tuple of
        the entries of the Jacobian that may be nonzero; and with respect to the time, Components,
        or None if `f` doesn't depend on the time.
    - `factorise(jacobian, gamma_h)`: the factors of `M - gamma_h jacobian`, a tuple, with the
        mass matrix `M`; the derivative of the state is `M^-1 f`.
    - `solve(factors, b)`: the solution, Components; NaN where the matrix is singular.
    - `row_sums(jacobian)`: the sums of the magnitudes of the entries of each row, Components.
    - `mass(y)`: the product of `M` with Components; None if `M` is the identity.
    - `differential(y)`: Components with zeros in place of the algebraic components, whose
        derivative is in no equation.
    - `algebraic(y)`: Components with zeros in place of the equations that have a derivative. Both
        are None if all equations have one.
    - `branch(mask, then, otherwise)`: does the same as `either`, with branches if there are any.
    """

    f: Callable
    jvp: Callable
    linearise: Callable = _not_given
    factorise: Callable = _not_given
    solve: Callable = _not_given
    row_sums: Callable = _not_given
    branch: Callable | None = None
    mass: Callable | None = None
    differential: Callable | None = None
    algebraic: Callable | None = None

    def either(self, xp: Arithmetic, mask: Mask, then: Callable, otherwise: Callable) -> Any:
        """`then(equations)` where the mask is true, and `otherwise(equations)` elsewhere. Both
        return trees of numbers, one for each trajectory. If there is a `branch`, a function that no
        trajectory needs is not run."""
        if self.branch is not None:
            return self.branch(mask, then, otherwise)
        return jax.tree.map(functools.partial(xp.where, mask), then(self), otherwise(self))


def equations_of(
    field: Callable,
    product: Callable | None = None,
    mass: MassMatrix | None = None,
    *,
    is_reverse_only: bool = False,
) -> Equations:
    """The equations of a field, differentiated by JAX. For implicit methods, the state has to be a
    single component.

    **Arguments:** `product(u, t, direction)`: the product with the Jacobian; by default the
    Jacobian is found by JAX. `mass`: the mass matrix, by default the identity. `is_reverse_only`:
    whether the field has only derivatives in reverse mode.
    """
    derivative = jax.jacrev if is_reverse_only else jax.jacfwd

    def linearise(y: Components, t: Number) -> tuple:
        (u,) = y
        if product is None:
            jacobian = derivative(lambda u: field((u,), t)[0])(u)
        else:
            directions = jnp.eye(u.size, dtype=u.dtype).reshape(-1, *u.shape)
            jacobian = jax.vmap(product, in_axes=(None, None, 0), out_axes=-1)(u, t, directions)
        jacobian = jacobian.reshape(*u.shape, u.size)
        return (jacobian,), derivative(lambda t: field(y, t))(t)

    def factorise(jacobian: tuple, gamma_h: Number) -> tuple:
        matrix = jacobian[0].reshape(-1, jacobian[0].shape[-1])
        of_step = jnp.asarray(gamma_h, matrix.dtype) * matrix
        m = jnp.eye(len(matrix)) if mass is None else mass.matrix
        return lu_factor(jnp.asarray(m, matrix.dtype) - of_step)

    def solve(factors: tuple, b: Components) -> Components:
        (b0,) = b
        return (lu_solve(factors, b0.ravel()).reshape(b0.shape),)

    def row_sums(jacobian: tuple) -> Components:
        (by_component,) = jacobian
        return (jnp.sum(jnp.abs(by_component), axis=-1),)

    def jvp(y: Components, t: Number, dy: Components, dt: Number) -> Components:
        return jax.jvp(field, (y, t), (dy, dt))[1]

    equations = Equations(field, jvp, linearise, factorise, solve, row_sums)
    if mass is None:
        return equations
    matrix, columns, rows = mass.matrix, mass.algebraic_columns, mass.algebraic_rows

    def times(y: Components) -> Components:
        (u,) = y
        return (jnp.matmul(jnp.asarray(matrix, u.dtype), u.ravel()).reshape(u.shape),)

    def without(places: tuple[int, ...], y: Components) -> Components:
        (u,) = y
        return (u.ravel().at[np.array(places, int)].set(0).reshape(u.shape),)

    others = tuple(i for i in range(mass.size) if i not in rows)
    return dataclasses.replace(
        equations,
        mass=times,
        differential=functools.partial(without, columns),
        algebraic=functools.partial(without, others),
    )


class StepAttempt(NamedTuple):
    """A step that was tried.

    - `y2`: the state at its end.
    - `carry`: what the method carries to the next step, if this one is accepted.
    - `error`: the estimates of its error, each component by component, of which the largest counts;
        None for a method without estimates.
    - `dense`: the data from which states within the step are interpolated, a tuple.
    - `failed`: where the method itself failed; None where it can't fail.
    - `residual`: the residual of the algebraic equations at the step's end. Its norm in units of
        the absolute tolerances is added to that of the error. None if there are no algebraic
        equations, or if the method doesn't need this check.
    - `last`: the data from which a method that has `stretches` makes them.
    """

    y2: Components
    carry: Any
    error: tuple[Components, ...]
    dense: tuple
    failed: Mask = None
    residual: Components | None = None
    last: tuple = ()


class LinearAlgebra(NamedTuple):
    """The numbers of Jacobians evaluated, of matrices factorised, and of systems solved with the
    factors."""

    njac: Number
    nw: Number
    nsolve: Number


@runtime_checkable
class StepGrid(Protocol):
    """The places that steps may have in the time span."""

    def end(self, xp: Arithmetic, y: Components, t0: Number, t1: Number, h: Number) -> Number:
        """Where an adaptive step from the state `y` ends, which is at most of the size `h > 0`;
        the time span goes from `t0` to `t1`."""
        ...


@runtime_checkable
class Method(Protocol):
    """A method for ordinary differential equations, whose states are tuples of components.

    Its carry, which goes from step to step, is a tree of states and of numbers, one for each
    trajectory, with the dtype of the state. Derivatives regard the numbers as constants, like
    steps. A method is a value: it is hashable, and equal to another method that does the same.

    - `order`: the order of convergence; `embedded_order`: the order of the solution with which the
        error estimate compares, None without an estimate.
    - `stages`: the evaluations of the field in a step, for estimates of memory; `degree`: the
        degree of the polynomial that its dense output is within a step.
    - `remembers`: whether a carry holds more than `init` computes from the state and time alone.
    - `is_implicit`: whether it uses more of the equations than `f` and `jvp`.
    - `grid`: where steps lie if each is known by its place, as that of a stochastic method, whose
        noise belongs to the place: an event cuts such a step, and what is left of it comes next.
        None where steps may end anywhere.
    """

    @property
    def order(self) -> int: ...

    @property
    def embedded_order(self) -> int | None: ...

    @property
    def stages(self) -> int: ...

    @property
    def degree(self) -> int: ...

    @property
    def remembers(self) -> bool: ...

    @property
    def is_implicit(self) -> bool: ...

    @property
    def grid(self) -> "StepGrid | None": ...

    def evaluations(self, ntried: Number) -> Number:
        """The number of evaluations of the field in `ntried` steps, accepted or not."""

    def linear_algebra(self, ntried: Number) -> LinearAlgebra | None:
        """The linear algebra of `ntried` steps, accepted or not; None for an explicit method."""

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Number) -> Any:
        """The carry for the first step of a trajectory, which begins in `y` at `t`."""

    def step(
        self, xp: Arithmetic, equations: Equations, y: Components, carry: Any, t: Number, h: Number
    ) -> StepAttempt:
        """A step from the state `y` at `t`, of the signed size `h`."""
        ...

    def dense(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        dense: tuple,
        t: Number,
        h: Number,
    ) -> tuple:
        """The data that `interpolate` needs for a step, from the `dense` of its `StepAttempt`. For
        an explicit method, the results of additional evaluations are appended."""
        ...

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Number, theta: Number
    ) -> Components:
        """The state at `t + theta h`."""
        ...


def evaluated_once(f: Callable, y: Components, t: Number) -> Callable:
    """`f`, evaluated only once at this `y` and `t`, however often it is called."""
    found: list = []

    def at(y2: Components, t2: Number) -> Components:
        if y2 is not y or t2 is not t:
            return f(y2, t2)
        if not found:
            found.append(f(y, t))
        return found[0]

    return at


def carry_like(method: Method, size: int, dtype: DTypeLike) -> Any:
    """A carry of zeros for a state of `size` components."""
    zero = np.zeros((), dtype)[()]
    equations = Equations(lambda y, t: y, lambda y, t, dy, dt: y)
    made = method.init(NUMBERS, equations, (zero,) * size, zero)
    return jax.tree.map(lambda x: zero, made)
