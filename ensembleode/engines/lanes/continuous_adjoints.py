"""Continuous adjoints: the adjoint ODE is solved backwards, instead of pulling back the steps.

The adjoint ODE is `lambda' = -(df/du)^T lambda`, from the end to the start. At each saved state,
lambda jumps by the state's cotangent. The cotangent of the parameters is the integral of
`(df/dp)^T lambda` (Chen et al., "Neural ordinary differential equations", NeurIPS 2018, appendix
B).

- [`gauss`][] gets the state from the dense output of the recorded steps, and integrates over each
    step by Gauss-Legendre quadrature (Norcliffe and Deisenroth, "Faster training of neural ODEs
    using Gauss-Legendre quadrature", TMLR 2023).
- [`backsolve`][] also solves for the state, backwards from each saved state, and records nothing.

Both have the arguments and results of `replay.pull_back`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...solvers.method import equations_of
from ...solvers.time import REACH_OF_STEP, rounding
from ...solvers.verdicts import SUCCESS
from .leaves import computed_once, is_finite, LANES, Leaves, map_leaves, over, select
from .loop import advance, running, start, Step
from .replay import add_end, cotangents_of, pull_back, Pulled, Record, Replay, time_of


#
# Along the recorded steps
#


class _Dense(NamedTuple):
    """A recorded step, and the states within it."""

    replay: Replay
    taken: Record
    dense: tuple

    def at(self, theta: Any) -> tuple[Leaves, Any]:
        """The state and the time at `theta`, from 0 at the start of the step to 1 at its end."""
        t, h, y, *_ = self.taken
        if isinstance(theta, float) and theta == 0:
            return y, t
        method = self.replay.method
        return method.interpolate(LANES, y, self.dense, h, theta), t + theta * h


def _over_step(replay: Replay, taken: Record, pulled: Pulled) -> Pulled:
    """Integrate back over one step, from its end or a saved time to the saved time before, and so
    on to its start."""
    adjoint, _, grad, rows = pulled
    taken = replay.safe(taken)
    t, h, y, carry, _ = taken
    method = replay.method
    equations = equations_of(functools.partial(replay.field, replay.chunk.p))
    if carry is None:
        carry = method.init(LANES, equations, y, t)
    attempt = method.step(LANES, equations, y, carry, t, h)
    dense = _Dense(replay, taken, method.dense(LANES, equations, y, attempt.dense, t, h))
    if replay.mode == "steps":
        adjoint, rows = add_end(replay, taken, adjoint, rows)
    if replay.mode != "times":
        adjoint, grad = _over_part(dense, adjoint, grad, 1.0, 0.0)
        return Pulled(adjoint, None, grad, rows)

    def jump(adjoint, rows, here):
        ct = cotangents_of(replay, jnp.maximum(rows - 1, 0))
        adjoint = select(here, map_leaves(jnp.add, adjoint, ct), adjoint)
        return adjoint, rows - here.astype(rows.dtype)

    def one(carry):
        adjoint, grad, rows, theta, _ = carry
        stop, here = _last_row(dense, rows)
        stop = jnp.minimum(stop, theta)
        adjoint, grad = _over_part(dense, adjoint, grad, theta, stop)
        adjoint, rows = jump(adjoint, rows, here)
        return adjoint, grad, rows, stop, here

    # Integrating over a part of no length costs as much as over another, and the saved times often
    # are those of the steps.
    theta, here = _last_row(dense, rows)
    adjoint, rows = jump(adjoint, rows, here & (theta >= 1))
    took = h != 0
    carry = (adjoint, grad, rows, took.astype(h.dtype), took)
    adjoint, grad, rows, *_ = jax.lax.while_loop(lambda c: jnp.any(c[4]), one, carry)
    return Pulled(adjoint, None, grad, rows)


# Integrates back over the steps of the lanes in the mask, which succeeded.
gauss = functools.partial(pull_back, through=_over_step)


def _last_row(dense: _Dense, rows: Any) -> tuple:
    """The place within the step of the last row that is left, as theta (zero if it is before the
    step); and whether it is in the step.

    Times that differ only by rounding count as equal: a row at the start belongs to the step
    before.
    """
    chunk, t, h = dense.replay.chunk, dense.taken.t, dense.taken.h
    took = h != 0
    time = time_of(chunk.saveat, jnp.maximum(rows - 1, 0))
    close = jnp.minimum(rounding(chunk.t0, chunk.t1, h.dtype), REACH_OF_STEP * jnp.abs(h))
    after = jnp.sign(h) * (time - t)
    here = (rows > 0) & took & (after > jnp.where(t == chunk.t0, 0, close))
    theta = jnp.where(took, after / jnp.where(took, jnp.abs(h), 1), 0)
    theta = jnp.where(jnp.abs(h) - after <= close, jnp.ones_like(theta), theta)
    return computed_once((jnp.where(here, theta, 0), here))


def _over_part(dense: _Dense, adjoint: Leaves, grad: Any, begin: Any, stop: Any) -> tuple:
    """The adjoint at `stop` from the adjoint at `begin` (both are thetas from 0 to 1), by one step
    of the method; and the cotangent of the parameters, with the contribution of this part added.

    Going backwards in time and the minus of the adjoint ODE cancel.
    """
    replay, length = dense.replay, begin - stop
    method, h = replay.method, length * dense.taken.h
    # In the other lanes the rate may be infinite, and NaN when multiplied by zero.
    moved = h != 0

    def at(x):
        return dense.at(begin - x * length)

    def rate(adjoint, x):
        """The derivative of the adjoint with respect to `x`, which goes from 0 at `begin` to 1 at
        `stop`."""
        u, t = at(x)
        _, pullback = jax.vjp(lambda u: replay.field(replay.chunk.p, u, t), u)
        rate = pullback(adjoint)[0]
        return computed_once(
            map_leaves(lambda x: jnp.where(over(moved, x), over(h, x) * x, 0), rate)
        )

    equations = equations_of(rate)
    carry = method.init(LANES, equations, adjoint, 0.0)
    attempt = method.step(LANES, equations, adjoint, carry, 0.0, 1.0)
    within = method.dense(LANES, equations, adjoint, attempt.dense, 0.0, 1.0)
    for x, weight in _quadrature(method.order):
        weighed = map_leaves(
            lambda a, w=weight: over(w * h, a) * a,
            method.interpolate(LANES, adjoint, within, 1.0, x),
        )
        u, t = at(x)
        grad = _add_pulled(replay, u, t, weighed, grad, moved)
    return attempt.y2, grad


def _quadrature(order: int) -> list[tuple[float, float]]:
    """Nodes and weights of a quadrature on [0, 1] with a higher order than the method's."""
    count = min(max(3, (order + 2) // 2), 5)
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return [(float(1 + x) / 2, float(w) / 2) for x, w in zip(nodes, weights, strict=True)]


def _add_pulled(replay: Replay, u: Leaves, t: Any, cotangent: Leaves, grad: Any, mask: Any) -> Any:
    """Add the cotangent of the parameters that belongs to a cotangent of `f(u, p, t)`, in the lanes
    of the mask."""
    field, wide = replay.field, replay.wide
    _, pullback = jax.vjp(lambda args: field(wide.combined(args), u, t), wide.args)
    return wide.added(grad, pullback(cotangent)[0], mask)


#
# Backwards, together with the state
#


def backsolve(replay: Replay, room: None) -> tuple[Leaves, Any, None]:
    """Solve back through the lanes of the mask, which succeeded; the result is NaN where that
    fails."""
    saving, chunk, saved = replay.plan.saving, replay.chunk, replay.saved
    assert saved is not None
    back = _Back(replay)
    adjoint, grad = replay.end, jax.tree.map(jnp.zeros_like, replay.wide.args)

    def row_of(array, i):
        array = jax.lax.dynamic_index_in_dim(array, i, 1, keepdims=False)
        return replay.field.split(jnp.moveaxis(array, 0, -1))

    times, t0 = chunk.saveat, chunk.t0
    if saving.mode == "ends":
        u = row_of(saved.u, saving.rows - 1)
        adjoint, grad = back.solved(chunk.t1, chunk.t0, u, adjoint, grad)
        return adjoint, back.lost_in(adjoint, grad), room

    def one(i, carry):
        adjoint, at_u0, grad = carry
        i = saving.rows - 1 - i
        t, before = (jnp.take(times, j, axis=-1) for j in (i, jnp.maximum(i - 1, 0)))
        there = jnp.isfinite(t) & (i < saved.length)
        ct = row_of(replay.rows, i)
        at_start = t == t0
        at_u0 = select(at_start, map_leaves(jnp.add, at_u0, ct), at_u0)
        adjoint = select(there & ~at_start, map_leaves(jnp.add, adjoint, ct), adjoint)
        u = select(there, row_of(saved.u, i), chunk.u0)
        # A row that is not there leaves no distance to integrate over.
        t = jnp.where(there, t, t0)
        before = jnp.where(there & (i > 0), before, t0)
        adjoint, grad = back.solved(t, before, u, adjoint, grad)
        return adjoint, at_u0, grad

    zero = tuple(map(jnp.zeros_like, adjoint))
    adjoint, at_u0, grad = jax.lax.fori_loop(0, saving.rows, one, (adjoint, zero, grad))
    return map_leaves(jnp.add, adjoint, at_u0), back.lost_in(adjoint, grad), room


class _Back(NamedTuple):
    """The ODE of the state and its adjoint; the leaves of the adjoint follow those of the state."""

    replay: Replay

    def rates(self, both: Leaves, t: Any) -> Leaves:
        u, adjoint = _halves(both)
        du, pullback = jax.vjp(lambda u: self.replay.field(self.replay.chunk.p, u, t), u)
        return (*du, *map_leaves(jnp.negative, pullback(adjoint)[0]))

    def solved(self, t: Any, stop: Any, u: Leaves, adjoint: Leaves, grad: Any) -> tuple:
        """The adjoint at `stop` and the cotangent of the parameters, from those at `t`."""
        abstol, reltol = (
            x * 2 if isinstance(x, tuple) else x
            for x in (self.replay.chunk.abstol, self.replay.chunk.reltol)
        )
        both = (*u, *adjoint)
        chunk = self.replay.chunk._replace(u0=both, t0=t, t1=stop, abstol=abstol, reltol=reltol)
        state = start(self.replay.plan, self.rates, chunk, self.replay.mask)

        def one(carry):
            state, grad = carry
            state, tried = advance(self.replay.plan, self.rates, chunk, state)
            return state, self.integrated(tried, grad)

        def going(carry):
            return running(carry[0])

        state, grad = jax.lax.while_loop(going, one, (state, grad))
        arrived = ~self.replay.mask | ((state.code == SUCCESS) & is_finite(state.y))
        adjoint = _halves(state.y)[1]
        return map_leaves(lambda x: jnp.where(over(arrived, x), x, jnp.nan), adjoint), grad

    def integrated(self, tried: Step, grad: Any) -> Any:
        """Add the contribution of a step to the cotangent of the parameters, from the states within
        it."""
        method, accepted = self.replay.method, tried.accepted
        # Infinite numbers in a rejected step would be NaN when multiplied by zero. There, the field
        # is evaluated at the start of the trajectory instead, since its derivative may be infinite,
        # too.
        start = (*self.replay.chunk.u0, *map_leaves(jnp.zeros_like, self.replay.chunk.u0))
        h = jnp.where(accepted, tried.h, 0)
        dense = method.dense(
            LANES, equations_of(self.rates), tried.y, tried.attempt.dense, tried.t, tried.h
        )
        for x, weight in _quadrature(method.order):
            both = method.interpolate(LANES, tried.y, dense, tried.h, x)
            u, adjoint = _halves(select(accepted, both, start))
            t = jnp.where(accepted, tried.t + x * h, self.replay.chunk.t0)
            weighed = map_leaves(lambda a, w=weight: over(-w * h, a) * a, adjoint)
            grad = _add_pulled(self.replay, u, t, weighed, grad, accepted)
        return grad

    def lost_in(self, adjoint: Leaves, grad: Any) -> Any:
        """The cotangents, which are NaN if they are sums over lanes of which one has lost its
        adjoint."""
        lost = self.replay.mask & ~is_finite(adjoint)
        u0, t0 = self.replay.chunk.u0, self.replay.chunk.t0

        def marked():
            mark = map_leaves(lambda x: jnp.where(over(lost, x), jnp.nan, jnp.zeros_like(x)), u0)
            return _add_pulled(self.replay, u0, t0, mark, grad, lost)

        return jax.lax.cond(jnp.any(lost), marked, lambda: grad)


def _halves(both: Leaves) -> tuple[Leaves, Leaves]:
    half = len(both) // 2
    return both[:half], both[half:]
