"""Rosenbrock methods: implicit methods whose steps solve only linear equations.

The matrix `W = M - gamma h J`, with the mass matrix `M` and the Jacobian `J` of `f`, is factorised
once in a step, and each stage solves one system with it. The stages are written in the form that
needs no products with the Jacobian (Hairer and Wanner, "Solving Ordinary Differential Equations
II", IV.7; VI.3 for a mass matrix, which may be singular). A state is a tuple of components, numbers
of an [`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic].
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from .arithmetic import Arithmetic, Components, Number
from .base import ODESolver
from .method import Equations, LinearAlgebra, StepAttempt


class _Linearised:
    """The base of all Rosenbrock methods."""

    remembers = False
    is_implicit = True
    grid = None
    stages: int

    def linear_algebra(self, ntried: Number) -> LinearAlgebra:
        return LinearAlgebra(ntried, ntried, ntried * self.stages)

    def stretches(self, xp: Arithmetic, equations: Equations, last: tuple) -> tuple:
        """The distances, component by component, between two states, which are all one, and bounds
        of the distances between their slopes, which are the sums of the rows of the Jacobian. The
        ratio of the two bounds the eigenvalues of the Jacobian (compare `RungeKutta.stretches`).

        **Arguments:** `last`: see `StepAttempt`.
        """
        sums = equations.row_sums(last)
        # Ones that are numbers like the sums; NaN if the first sum is not finite.
        return (sums[0] * 0.0 + 1.0,) * len(sums), sums


@dataclasses.dataclass(frozen=True)
class Rodas(_Linearised):
    """A stiffly accurate Rosenbrock [`Method`][ensembleode.solvers.method.Method], given by its
    coefficients. Its last stage is the estimate of the error, and the state at the end of the step
    is the argument of `f` in the last stage plus that estimate.

        W k_i = gamma (h f(y + sum_j a_ij k_j, t + c_i h) + h^2 d_i df/dt + M sum_j coupling_ij k_j)

    - `a`, `coupling`: the rows of the coefficients below the diagonal, from the second stage on.
    - `within`: the rows `q` of the dense output, which at the fraction `x` of the step from `y` to
        `y2` is `(1 - x) y + x (y2 + (1 - x) (sum_i q_1i k_i + x (sum_i q_2i k_i + ...)))`.
    """

    gamma: float
    a: tuple[tuple[float, ...], ...]
    coupling: tuple[tuple[float, ...], ...]
    c: tuple[float, ...]
    d: tuple[float, ...]
    within: tuple[tuple[float, ...], ...]
    order: int
    embedded_order: int

    @property
    def stages(self) -> int:
        return len(self.c)

    @property
    def degree(self) -> int:
        return len(self.within) + 1

    def evaluations(self, ntried: Number) -> Number:
        return ntried * self.stages

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Number) -> tuple:
        return ()

    def step(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        carry: tuple,
        t: Number,
        h: Number,
    ) -> StepAttempt:
        gamma_h = h * self.gamma
        jacobian, dfdt = equations.linearise(y, t)
        factors = equations.factorise(jacobian, gamma_h)
        # (The square of a short step is beyond single precision where the product isn't.)
        change = None if dfdt is None else _scaled(xp, h, dfdt)
        mass = equations.mass or _identity
        ks: list[Components] = []
        at, before = y, None
        for row, coupling, c, d in zip(
            ((), *self.a), ((), *self.coupling), self.c, self.d, strict=True
        ):
            if before is not None and row == (*before, 1.0):
                at = _plus(at, (1.0,), ks[-1:])
            else:
                at = _plus(y, row, ks)
            before = row
            # The newest stage is added last, so that the other terms don't wait for it.
            slope = _scaled(xp, gamma_h, equations.f(at, t + c * h if c else t))
            right = _plus(None, [self.gamma * x for x in coupling], ks)
            right = slope if right is None else _sum(mass(right), slope)
            if d:
                right = _moved(xp, right, gamma_h * d, change)
            ks.append(equations.solve(factors, right))
        y2 = _sum(at, ks[-1])
        return StepAttempt(y2, (), (ks[-1],), (y2, *ks), last=jacobian)

    def dense(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        dense: tuple,
        t: Number,
        h: Number,
    ) -> tuple:
        y2, *ks = dense
        return (y2, *(_plus(None, row, ks) for row in self.within))

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Number, theta: Number
    ) -> Components:
        left = 1.0 - theta

        def one(start: Number, end: Number, *within: Number) -> Number:
            x, rest = xp.broadcast_over(theta, start), xp.broadcast_over(left, start)
            value = within[-1]
            for q in reversed(within[:-1]):
                value = q + x * value
            return rest * start + x * (end + rest * value)

        return tuple(one(*each) for each in zip(y, *dense, strict=True))


@dataclasses.dataclass(frozen=True)
class ModifiedRosenbrock(_Linearised):
    """The method known as `ode23s`, of order 2 with an estimate of order 3, as a
    [`Method`][ensembleode.solvers.method.Method]. It carries the derivative at the end of the step.

    In the estimate, df/dt is multiplied by `gamma h`, as in the paper. In OrdinaryDiffEq 7 it is
    multiplied by `h`: if `f` depends on the time, the order of its estimate is lower by one, and
    its steps are shorter.

    Source: Shampine and Reichelt, "The MATLAB ODE Suite", SIAM J. Sci. Comput. 18 (1997), 4.1.
    """

    order = 2
    # The higher order, which OrdinaryDiffEq's controllers use for this method.
    embedded_order = 3
    stages = 3
    degree = 2

    def evaluations(self, ntried: Number) -> Number:
        return ntried * 2 + 1

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Number) -> tuple:
        return (equations.f(y, t),)

    def step(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        carry: tuple,
        t: Number,
        h: Number,
    ) -> StepAttempt:
        (f0,), f, mass = carry, equations.f, equations.mass or _identity
        gamma_h, half = h * _D, h * 0.5
        jacobian, dfdt = equations.linearise(y, t)
        factors = equations.factorise(jacobian, gamma_h)
        k1 = equations.solve(factors, _moved(xp, f0, gamma_h, dfdt))
        f1 = f(_moved(xp, y, half, k1), t + half)
        of_k1 = mass(k1)
        k2 = _sum(equations.solve(factors, _plus(f1, (-1.0,), [of_k1])), k1)
        y2 = _moved(xp, y, h, k2)
        f2 = f(y2, t + h)
        right = _plus(f2, (-_E32, _E32, -2.0, 2.0), [mass(k2), f1, of_k1, f0])
        k3 = equations.solve(factors, _moved(xp, right, gamma_h, dfdt))
        error = _scaled(xp, h * (1 / 6), _plus(k3, (1.0, -2.0), [k1, k2]))
        if equations.differential is None or equations.algebraic is None:
            return StepAttempt(y2, (f2,), (error,), (k1, k2), last=jacobian)
        # The residual is added to the norm of the error, as in OrdinaryDiffEq.
        error, residual = equations.differential(error), equations.algebraic(f2)
        return StepAttempt(y2, (f2,), (error,), (k1, k2), residual=residual)

    def dense(
        self,
        xp: Arithmetic,
        equations: Equations,
        y: Components,
        dense: tuple,
        t: Number,
        h: Number,
    ) -> tuple:
        return dense

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: tuple, h: Number, theta: Number
    ) -> Components:
        scale = h * theta * (1 / (1 - 2 * _D))
        k1, k2 = dense
        first = _scaled(xp, scale * (1.0 - theta), k1)
        return _sum(y, _moved(xp, first, scale * (theta - 2 * _D), k2))


_D = 1 / (2 + math.sqrt(2))
_E32 = 6 + math.sqrt(2)


def _plus(start: Number, weights: Sequence[float], ks: Sequence[Components]) -> Number:
    """`start + sum_i(weights_i k_i)`, added up in this order, for as many `ks` as there are
    weights. If `start` is None, the sum alone, which is None if all weights are zero."""
    total = start
    for w, k in zip(weights, ks, strict=False):
        if w == 0:
            continue
        term = k if w == 1 else tuple(w * x for x in k)
        total = term if total is None else _sum(total, term)
    return total


def _identity(k: Components) -> Components:
    return k


def _sum(a: Components, b: Components) -> Components:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _scaled(xp: Arithmetic, number: Number, k: Components) -> Components:
    return tuple(xp.broadcast_over(number, x) * x for x in k)


def _moved(xp: Arithmetic, a: Components, number: Number, k: Components | None) -> Components:
    """`a + number k`; `a` if `k` is None."""
    return a if k is None else _sum(a, _scaled(xp, number, k))


class Rosenbrock(ODESolver):
    """A Rosenbrock method. A subclass gives its `method`, as engines use it.

    Each step factorises `1 - gamma h J` once, with the Jacobian `J` that is derived from `f`, and
    solves one system with that matrix for each stage.
    """

    method: ClassVar[Rodas | ModifiedRosenbrock]
    implicit: ClassVar[bool] = True
    engines: ClassVar[tuple[str, ...]] = ("compiled", "julia")

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.order, cls.stages = cls.method.order, cls.method.stages
