"""This library's explicit methods as diffrax solvers, for those that diffrax doesn't have.

A step and the solution within it are those of the [`Method`][ensembleode.solvers.method.Method],
formula by formula, so they agree with those of other engines to rounding.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ...solvers.arithmetic import Components, StateArithmetic
from ...solvers.explicit_runge_kutta import RungeKutta
from ...solvers.method import Equations, equations_of, Method, StepAttempt
from ...solvers.time import size_within
from .control import ErrorEstimates


class _DiffraxArithmetic(StateArithmetic):
    """The operations on states, which may have another dtype than times."""

    def broadcast_over(self, number: Array, component: Array) -> Array:
        return jnp.asarray(number, component.dtype)


_XP: Any = _DiffraxArithmetic()


class Explicit(diffrax.AbstractSolver):
    """An explicit method of this library."""

    method: Method = eqx.field(static=True)
    # Whether states within steps are asked for, for which some methods evaluate `f` further times;
    # and the only times where they are, in the direction of time (None for all times).
    is_dense: bool = eqx.field(static=True, default=False)
    times: Array | None = None

    term_structure: ClassVar = diffrax.AbstractTerm

    @property
    def interpolation_cls(self) -> Callable[..., Any]:  # pyright: ignore
        return functools.partial(_StepInterpolant, method=self.method)

    def order(self, terms: Any) -> int:
        return self.method.order

    def error_order(self, terms: Any) -> int:
        order = self.method.order
        return 1 + min(order, self.method.embedded_order or order - 1)

    def init(self, terms: Any, t0: Any, t1: Any, y0: PyTree, args: PyTree) -> PyTree:
        return _kept(self.method.init(_XP, _equations(terms, y0, args), _components(y0), t0))

    def func(self, terms: Any, t0: Any, y0: PyTree, args: PyTree) -> PyTree:
        return _in_direction(terms, t0, y0, args)

    def step(
        self,
        terms: Any,
        t0: Any,
        t1: Any,
        y0: PyTree,
        args: PyTree,
        solver_state: Any,
        made_jump: Any,
    ) -> tuple:
        equations, y = _equations(terms, y0, args), _components(y0)
        # In diffrax, time goes forwards.
        within = size_within(_XP, *jax.lax.stop_gradient((t0, t1)), 1)
        h = t1 - t0
        h = h + jax.lax.stop_gradient(within - h)
        carry = self.method.init(_XP, equations, y, t0) if solver_state is None else solver_state
        carry = self._renewed(equations, y, t0, carry, made_jump)
        tried = self.method.step(_XP, equations, y, carry, t0, h)
        errors = tuple(_like(y0, e) for e in tried.error)
        if tried.failed is not None:
            infinite = functools.partial(jnp.where, tried.failed, jnp.inf)
            errors = jax.tree.map(infinite, errors)
        error: Any = ErrorEstimates(errors) if len(errors) > 1 else errors[0] if errors else None
        dense = {"y0": y0, "dense": self._dense(equations, y, tried, t0, t1, h)}
        return _like(y0, tried.y2), error, dense, _kept(tried.carry), diffrax.RESULTS.successful

    def _renewed(
        self, equations: Equations, y: Components, t: Array, carry: PyTree, jumped: ArrayLike
    ) -> PyTree:
        """The carry; made anew where `f` has jumped."""

        def anew() -> Any:
            made = self.method.init(_XP, equations, y, t)
            return jax.tree.map(functools.partial(jnp.where, jumped), made, carry)

        if not jax.tree.leaves(carry) or jumped is False:
            return carry
        return jax.lax.cond(eqxi.unvmap_any(jumped), anew, lambda: carry)

    def _dense(
        self,
        equations: Equations,
        y: Components,
        tried: StepAttempt,
        t0: Array,
        t1: Array,
        h: Array,
    ) -> tuple:
        def made() -> tuple:
            return self.method.dense(_XP, equations, y, tried.dense, t0, h)

        if not self.is_dense:
            return tried.dense
        method = self.method
        adds_stages = isinstance(method, RungeKutta) and method.tableau.interpolant.extra_c
        if self.times is None or not adds_stages:
            return made()
        n, shapes = len(tried.dense), jax.eval_shape(made)
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[n:])
        asked = jnp.any((self.times > t0) & (self.times <= t1))
        # (For all trajectories if it is so for one.)
        more = jax.lax.cond(eqxi.unvmap_any(asked), lambda: made()[n:], lambda: none)
        return *tried.dense, *more


class _StepInterpolant(diffrax.AbstractLocalInterpolation):
    """The solution within a step, by the method's own interpolant."""

    t0: Array
    t1: Array
    y0: Array
    dense: tuple
    method: Method = eqx.field(static=True)

    def evaluate(self, t0: Any, t1: Any = None, left: bool = True) -> Any:
        if t1 is not None:
            return jtu.tree_map(jnp.subtract, self.evaluate(t1), self.evaluate(t0))
        # A trajectory that can't begin, or has ended, takes steps without length.
        is_empty = self.t0 == self.t1
        h = jnp.where(is_empty, 1, self.t1 - self.t0)
        theta = jnp.where(is_empty, 0, t0 - self.t0) / h
        y = self.method.interpolate(_XP, _components(self.y0), self.dense, h, theta)
        return _like(self.y0, y)


def _equations(terms: Any, like: Array, args: tuple[Array, ...] | None) -> Equations:
    """The equations of states with this structure."""

    def f(y: Components, t: Array) -> Components:
        return _components(_in_direction(terms, t, _like(like, y), args))

    return equations_of(f)


def _in_direction(terms: Any, t: Array, y: Array, args: tuple[Array, ...] | None) -> Array:
    """The derivative of the state with respect to the time of diffrax, which goes forwards. Where
    time goes backwards, diffrax has changed its sign, and the terms' `contr` has that sign."""
    sign = terms.contr(jnp.zeros_like(t), jnp.ones_like(t))
    return terms.vf_prod(t, y, args, sign)


def _kept(carry: PyTree) -> PyTree:
    """A method's carry as diffrax keeps it: None where it has no numbers."""
    return carry if jax.tree.leaves(carry) else None


def _components(tree: PyTree) -> Components:
    return tuple(jtu.tree_leaves(tree))


def _like(tree: PyTree, components: Components) -> Array:
    return jtu.tree_unflatten(jtu.tree_structure(tree), list(components))
