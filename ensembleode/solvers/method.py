"""What a time loop asks of a method: a step is one program.

It is written over the operations of an [`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic]:
an engine runs it on JAX arrays, or writes it as generated code, and differentiates it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import lu_factor, lu_solve

from .arithmetic import Arithmetic, Components, NUMBERS


def _not_given(*args: Any) -> Any:
    """What explicit methods have no use for."""
    raise NotImplementedError("These equations are of explicit methods.")


@dataclasses.dataclass(frozen=True)
class Equations:
    """What a method may ask of the problem.

    - `f(y, t)`: the vector field, Components like `y`.
    - `jvp(y, t, dy, dt)`: its derivative there along `(dy, dt)`.

    And implicit methods:

    - `linearise(y, t)`: its derivatives there: by the state, the entries of the Jacobian that may
        differ from zero, a tuple; and by the time, Components, or None where that is not in it.
    - `factorise(jacobian, gamma_h)`: the factors of `1 - gamma_h jacobian`, a tuple.
    - `solve(factors, b)`: the solution, Components; NaN where the matrix is singular.
    - `row_sums(jacobian)`: of the absolute values of its entries, Components.

    - `branch(mask, then, otherwise)`: what `either` does, where there are branches.
    """

    f: Callable
    jvp: Callable
    linearise: Callable = _not_given
    factorise: Callable = _not_given
    solve: Callable = _not_given
    row_sums: Callable = _not_given
    branch: Callable | None = None

    def either(self, xp: Arithmetic, mask: Any, then: Callable, otherwise: Callable) -> Any:
        """`then(equations)` where the mask is true, `otherwise(equations)` elsewhere: trees of
        numbers a trajectory. What no trajectory needs is not computed where there are branches."""
        if self.branch is not None:
            return self.branch(mask, then, otherwise)
        return jax.tree.map(functools.partial(xp.where, mask), then(self), otherwise(self))


def equations_of(field: Callable) -> Equations:
    """The equations of a field that JAX can differentiate, of which the state is one component
    where the method is implicit."""

    def linearise(y: Components, t: Any) -> tuple:
        (u,) = y
        jacobian = jax.jacfwd(lambda u: field((u,), t)[0])(u).reshape(u.size, u.size)
        dfdt = jax.jvp(lambda t: field(y, t), (t,), (jnp.ones_like(t),))[1]
        return (jacobian,), dfdt

    def factorise(jacobian: tuple, gamma_h: Any) -> tuple:
        (matrix,) = jacobian
        of_step = jnp.asarray(gamma_h, matrix.dtype) * matrix
        return lu_factor(jnp.eye(len(matrix), dtype=matrix.dtype) - of_step)

    def solve(factors: tuple, b: Components) -> Components:
        (b0,) = b
        return (lu_solve(factors, b0.ravel()).reshape(b0.shape),)

    def row_sums(jacobian: tuple) -> Components:
        (matrix,) = jacobian
        return (jnp.sum(jnp.abs(matrix), axis=1),)

    def jvp(y: Components, t: Any, dy: Components, dt: Any) -> Components:
        return jax.jvp(field, (y, t), (dy, dt))[1]

    return Equations(field, jvp, linearise, factorise, solve, row_sums)


class Attempt(NamedTuple):
    """A step that was tried.

    - `y2`: the state at its end.
    - `carry`: what the next step wants of this one, if it is accepted.
    - `error`: the estimates of its error, each component by component: the largest counts. None of
        a method without.
    - `dense`: what states within the step are interpolated from, a tuple.
    - `failed`: where the method itself gave up; None where it can't.
    - `last`: what a method that has `stretches` makes them of.
    """

    y2: Components
    carry: Any
    error: tuple[Components, ...]
    dense: tuple
    failed: Any = None
    last: tuple = ()


class LinearAlgebra(NamedTuple):
    """How many Jacobians were evaluated, matrices factorised, and systems solved with these."""

    njac: Any
    nw: Any
    nsolve: Any


@runtime_checkable
class Method(Protocol):
    """A method for ordinary differential equations, of states that are tuples of components.

    What it carries from step to step is a tree of states, and of numbers a trajectory (to
    derivatives these are constants, as steps are), of the dtype of the state. It is a value:
    hashable, and equal to another that does the same.

    - `order`: of convergence; `embedded_order`: of the solution that the estimate compares with;
        None without an estimate.
    - `stages`: evaluations of the field in a step, for estimates of memory; `degree`: of the
        polynomial that its dense output is within a step.
    - `remembers`: whether a carry holds more than `init` makes of the state and time alone.
    - `is_implicit`: whether it asks the equations for more than `f` and `jvp`.
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

    def evaluations(self, ntried: Any) -> Any:
        """How many evaluations of the field so many steps take, accepted or not."""
        ...

    def linear_algebra(self, ntried: Any) -> LinearAlgebra | None:
        """What so many steps take besides, accepted or not; None of an explicit method."""
        ...

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Any) -> Any:
        """What the first step of a trajectory is carried, which begins in `y` at `t`."""
        ...

    def step(
        self, xp: Arithmetic, equations: Equations, y: Components, carry: Any, t: Any, h: Any
    ) -> Attempt:
        """A step from the state `y` at `t`, of the signed size `h`."""
        ...

    def dense(
        self, xp: Arithmetic, equations: Equations, y: Components, dense: tuple, t: Any, h: Any
    ) -> tuple:
        """What `interpolate` wants of that step, of the `dense` of its `Attempt`: an explicit
        method's is followed by what takes more evaluations."""
        ...

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Any, theta: Any
    ) -> Components:
        """The state at `t + theta h`."""
        ...


def evaluated_once(f: Callable, y: Components, t: Any) -> Callable:
    """`f`, which is evaluated only once at this `y` and `t`, however often it is called."""
    found: list = []

    def at(y2: Components, t2: Any) -> Components:
        if y2 is not y or t2 is not t:
            return f(y2, t2)
        if not found:
            found.append(f(y, t))
        return found[0]

    return at


def carry_like(method: Method, size: int, dtype: Any) -> Any:
    """A carry of a state of so many components, of zeros."""
    zero = np.zeros((), dtype)[()]
    equations = Equations(lambda y, t: y, lambda y, t, dy, dt: y)
    made = method.init(NUMBERS, equations, (zero,) * size, zero)
    return jax.tree.map(lambda x: zero, made)
