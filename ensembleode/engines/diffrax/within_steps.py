"""The solution within saved steps, from steps that are computed again one by one, or from states at
nodes that the solve keeps."""

import dataclasses
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from ...plan.plan import Plan
from ...solution.dense import inner_nodes
from ...solvers import Bosh3, Dopri5, Euler, Tsit5
from ...solvers.arithmetic import Arithmetic, Components
from ...solvers.method import Equations, StepAttempt
from ...tracing.program import Static
from . import implicit
from .explicit import Explicit


def interpolant(method: Static) -> Any:
    """See [`Engine.interpolant`][ensembleode.engines.base.engine.Engine.interpolant]."""
    ours, solver = method.value.method, method.value.solver
    if ours is None and isinstance(solver, diffrax.AbstractERK):
        return _SolverSteps(Static(solver))
    return ours or len(inner_nodes(_degree(solver)))


def keeps(plan: Plan) -> bool:
    """Whether the states within steps have to be kept, since steps can't be made again."""
    return isinstance(interpolant(plan.method), int)


# The highest degree of the polynomials by which diffrax's solvers interpolate, that of Dopri8.
_HIGHEST = 6


@dataclasses.dataclass(frozen=True)
class _SolverSteps:
    """The steps of an explicit diffrax solver, made one by one in the form of a `Method`."""

    solver: Static
    is_implicit = False
    degree = _HIGHEST

    def init(self, xp: Arithmetic, equations: Equations, y: Components, t: Any) -> tuple:
        return ()

    def step(
        self, xp: Arithmetic, equations: Equations, y: Components, carry: tuple, t: Any, h: Any
    ) -> StepAttempt:
        (start,), solver = y, self.solver.value

        def f(t, u, args):
            return equations.f((u,), t)[0]

        # diffrax differentiates by its arguments, and not by the arrays that they close over.
        terms = diffrax.ODETerm(eqx.filter_closure_convert(f, t, start, None))
        state = solver.init(terms, t, t + h, start, None)
        end, _, dense, _, _ = solver.step(terms, t, t + h, start, None, state, False)
        return StepAttempt((end,), carry, (), solver.interpolation_cls(t0=t, t1=t + h, **dense))

    def dense(
        self, xp: Arithmetic, equations: Equations, y: Components, dense: Any, t: Any, h: Any
    ) -> Any:
        return dense

    def interpolate(
        self, xp: Arithmetic, y: Components, dense: Any, h: Any, theta: float
    ) -> Components:
        (start,) = y
        return (dense.evaluate(dense.t0 + theta * h).astype(start.dtype),)


# Solvers whose dense output in diffrax is that of this library's tableau.
AS_OURS = (Bosh3, Dopri5, Euler, Tsit5)


def _degree(solver: diffrax.AbstractSolver) -> int:
    """The highest degree of the polynomials by which the solver interpolates."""
    if isinstance(solver, Explicit):
        return solver.method.degree
    return 3 if isinstance(solver, implicit.CountingESDIRK) else _HIGHEST


def within_steps(plan: Plan, sol: Any, reached: Any) -> Any:
    """The states within the steps, `[time, node, *state]`. Those of a step are in the row of its
    start; they are NaN where there is no step, or its start isn't saved."""
    solver = plan.method.value.solver
    dense, start, dtype = sol.interpolation, plan.saving.start, plan.state.dtype
    ends = dense.ts[1 - start : 1 - start + plan.saving.rows]
    infos = jax.tree.map(lambda x: x[1 - start :], dense.infos)
    nodes = jnp.asarray(inner_nodes(_degree(solver)), ends.dtype)
    steps = len(ends) - 1

    def within(step, infos):
        there = reached[step] & reached[step + 1]
        t0, t1 = jnp.where(there, ends[step], 0), jnp.where(there, ends[step + 1], 1)
        infos = jax.tree.map(lambda x: jnp.where(there, x, 0), infos)
        between = solver.interpolation_cls(t0=t0, t1=t1, **infos)
        inner = jax.vmap(between.evaluate)(t0 + nodes * (t1 - t0)).astype(dtype)
        return jnp.where(there, inner, jnp.nan)

    inner = jax.vmap(within)(jnp.arange(steps), jax.tree.map(lambda x: x[:steps], infos))
    return jnp.pad(inner, ((0, 1), *(((0, 0),) * (inner.ndim - 1))), constant_values=jnp.nan)
