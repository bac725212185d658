"""The continuous adjoint of methods for stiff problems: the adjoint ODE, solved backwards with the
solve's own method and tolerances.

The adjoint ODE is `lambda' = -(df/du)^T lambda`, from the last saved time to `t0`. At each saved
time lambda jumps by the cotangent of the state there. The cotangent of the parameters is the
integral of `(df/dp)^T lambda` (Chen et al., "Neural ordinary differential equations", NeurIPS 2018,
appendix B). The state comes from the dense output of the forward steps.

Where a problem is stiff, lambda decays after each jump within a small part of a forward step, so
the backward steps have step-size control of their own: the adjoint of an ensemble is an ensemble
again, whose field looks up the forward step that contains a time. It is solved from each saved time
to the one before. Step-size control ignores the integrals.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ...fields import parameters_of
from ...ground.retcode import reached_end
from ...plan.plan import Plan
from ...plan.saving import Saving
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...solution.dense import inner_nodes, polynomial
from ...tracing.program import Program, trace
from ..base.results import numbers_of_each
from ..derivatives.along import is_there, where
from ..derivatives.flow import at_numbers, Flow, numbers_and_time, RecordedSolve
from . import solves


# The adjoint is solved for a part of the trajectories at a time. The forward steps of a part, up to
# `maxiters` for each trajectory, take about this many bytes.
_ROOM = 2**29
# The least number of trajectories of a part, enough for the lanes of a thread or two.
_LEAST = 32
# Changes of the adjoint below this fraction of the relative tolerance aren't resolved.
_BELOW = 1e-2
# The forward steps fall into this many parts. A backward step ends at the latest where a part does,
# so that it doesn't miss an abrupt change.
_PARTS = 32


def pull_back(
    flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, cotangents: Sequence
) -> list:
    """See `engine.Engine`. The cotangents of a trajectory whose adjoint can't be solved are NaN.

    **Raises:** `NotImplementedError` for derivatives by the times at which the field jumps.
    """
    plan, n = flow.plan, flow.n
    if plan.events is not None:
        raise NotImplementedError(
            "d_discontinuities depend on what this solve is differentiated by, which "
            "sensealg=GaussAdjoint() takes for constants: pass ReplayAdjoint(), which has that "
            "derivative, or jax.lax.stop_gradient(times)."
        )
    (cotangent,), (there,) = cotangents, is_there(flow, known)
    size = _part(plan)

    def of(which: Any) -> list:
        mine = jax.tree.map(lambda x, own: x[which] if own else x, lanes, plan.batched)
        first = jnp.arange(len(which)) <= which - which[0]  # (what fills up repeats the last)
        return _through(flow, mine, there[which] & first[:, None], cotangent[which])

    if n <= size:
        found = _through(flow, lanes, there, cotangent)
    else:
        parts = -(-n // size)
        which = np.minimum(np.arange(parts * size), n - 1).reshape(parts, size)
        found = [x.reshape(-1, *x.shape[2:])[:n] for x in jax.lax.map(of, jnp.asarray(which))]
    u0, *parameters = found

    def summed(x: Array, is_own: bool) -> Array:
        return x if is_own else where(known.ok, x).reshape(flow.groups, -1, *x.shape[1:]).sum(1)

    return [u0, *map(summed, parameters, flow.own)]


def _part(plan: Plan) -> int:
    """How many trajectories are solved backwards at a time."""
    nodes = len(inner_nodes(plan.method.value.method.degree))
    numbers = math.prod(plan.state.shape) * (1 + nodes) + 1
    return max(_LEAST, _ROOM // ((plan.maxiters + 1) * numbers * plan.state.dtype.itemsize))


def _through(flow: Flow, lanes: TrajectoryNumbers, there: Array, cotangent: Array) -> list:
    """The cotangents of the initial states and of the `wanted` parameters, one for each trajectory,
    from the `cotangent` of the rows that are `there`, `[trajectory, row]`."""
    plan = flow.plan
    n, dtype, size = len(there), plan.state.dtype, math.prod(plan.state.shape)
    steps = solves.steps(plan, lanes, there.any(1))
    t0, t1 = (numbers_of_each(getattr(lanes, x), getattr(plan.batched, x), n) for x in ("t0", "t1"))
    match plan.saving.mode:
        case "ends":
            times = t1[:, None]
        case "times":
            times = numbers_of_each(lanes.saveat, plan.batched.saveat, n)
        case "steps":
            times = steps.t if plan.saving.start else steps.t[:, 1:]
    direction = jnp.where(t1 < t0, -1, 1).astype(dtype)
    # (The tables come last: a kernel that copies small numbers makes room up to the last of these.)
    forward = direction, steps.rows, steps.t, steps.u, steps.inner
    tolerances = [_of_components(plan, lanes, x) for x in ("abstol", "reltol")]
    back, consts = _back_plan(flow, forward)
    last, parts = jnp.maximum(steps.rows - 1, 0), jnp.arange(_PARTS, dtype=steps.rows.dtype)
    ends = jnp.take_along_axis(steps.t, last[:, None] * parts[None] // _PARTS, axis=1)
    flat = cotangent.reshape(n, there.shape[1], -1)
    rows = jnp.max(jnp.sum(there, axis=1, dtype=jnp.int32))

    def at(x: Array, row: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(x, row, 1, keepdims=False)

    def one(i: Any, y: PyTree) -> PyTree:
        row = rows - 1 - i
        here, start = at(there, row), at(times, row)
        y = y.at[:, :size].add(where(here, at(flat, row)))
        adjoint = y[:, :size]
        end = jnp.where(row > 0, at(times, jnp.maximum(row - 1, 0)), t0)
        moves = here & jnp.any(adjoint != 0, axis=1)
        u = jax.vmap(_state_at)(*forward, start)
        abstol, reltol = _tolerances_of_adjoint(*tolerances, adjoint, u)
        numbers = _back_numbers(plan, lanes, forward, ends, start, end)
        numbers = numbers._replace(consts=tuple(consts), u0=y, abstol=abstol, reltol=reltol)
        found = solves.solve(back, numbers, moves)
        arrived = reached_end(found.retcode)
        return jnp.where(moves[:, None], jnp.where(arrived[:, None], found.u[:, 0], jnp.nan), y)

    y = jnp.zeros((n, *back.state.shape), dtype)
    y = jax.lax.fori_loop(0, rows, one, y)
    avals = parameters_of(plan.field)
    return solves.taken_apart(y, [plan.state, *(avals[i] for i in flow.wanted)])


def _of_components(plan: Plan, lanes: TrajectoryNumbers, name: str) -> Array:
    """A tolerance of the solve: `[trajectory or 1, component or 1]`."""
    x = jnp.asarray(getattr(lanes, name), plan.state.dtype)
    return x.reshape(x.shape[0] if getattr(plan.batched, name) else 1, -1)


def _tolerances_of_adjoint(
    abstol: Array, reltol: Array, adjoint: Array, u: Array
) -> tuple[Array, Array]:
    """The tolerances of the adjoint from a saved time on, from its value there and the tolerances
    of the forward solve. As the adjoint's units are reciprocal to the state's, its components are
    compared by the change of the loss when a component of the state `u` changes by its own size.
    Changes far below the largest one don't count. (A component of the state near zero is taken to
    have the size of the tolerances; for the largest change, that of their roundings.)"""
    usual = reltol > 0
    floor = jnp.where(usual, abstol / jnp.where(usual, reltol, 1), 1)
    changes, size = jnp.abs(adjoint), jnp.abs(u) + floor
    least_size = jnp.maximum(jnp.abs(u), jnp.finfo(u.dtype).eps * size)
    largest = jnp.max(changes * least_size, axis=1, keepdims=True)
    least = jnp.where(usual, reltol, abstol).min(1, keepdims=True)
    most = jnp.max(changes, axis=1, keepdims=True)
    of_adjoint = _BELOW * least * jnp.minimum(largest / size, most)
    return of_adjoint, jnp.broadcast_to(reltol.min(1), len(adjoint))


def _back_plan(flow: Flow, forward: tuple) -> tuple[Plan, list]:
    """The plan of the adjoint, and the constants of its field.

    **Arguments:** `forward`: the arguments of `_state_at` but for the time, for each trajectory.
    """
    plan = flow.plan
    assert isinstance(plan.field, Program)
    structs = tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in forward)
    program, consts = _adjoint_of(plan.field, flow.wanted, structs)
    (state,), own = program.out_avals, plan.batched
    given = {
        "p": (*own.parameters, True, *(True for _ in forward)),
        **dict.fromkeys(("u0", "t0", "t1", "abstol", "reltol", "tstops"), True),
        "d_discontinuities": None if own.d_discontinuities is None else True,
    }
    plan = dataclasses.replace(
        plan,
        field=program,
        state=jax.ShapeDtypeStruct(state.shape, state.dtype),
        saving=Saving("ends", False, 1),
        batched=own._replace(consts=(False,) * len(consts), **_NOT_GIVEN, **given),
        beside=(),
        tree=None,
        form=None,
    )
    return plan, consts


def _back_numbers(
    plan: Plan, lanes: TrajectoryNumbers, forward: tuple, ends: Array, start: Array, end: Array
) -> TrajectoryNumbers:
    """The numbers of the adjoint from `start` back to `end`, without its value, its tolerances and
    the constants. Its time is the distance from `start`, as late times are too coarse to resolve
    how it decays; where `f` jumps at known times, it is the distance from zero, which keeps these
    times exact. `ends`: times of forward steps that no backward step passes."""
    direction = forward[0]
    jumps = lanes.d_discontinuities
    origin = start if jumps is None else jnp.zeros_like(start)

    def passed(t: Array) -> Array:
        of, by = (x.reshape(-1, *(1,) * (t.ndim - 1)) for x in (origin, direction))
        return by * (of - t)

    def given(name: str) -> Any:
        return numbers_of_each(getattr(lanes, name), getattr(plan.batched, name), len(start))

    stops = [ends] if lanes.tstops is None else [ends, given("tstops")]
    if jumps is not None:
        jumps = jnp.sort(passed(given("d_discontinuities")), axis=1)
    return lanes._replace(
        p=(*lanes.parameters, origin, *forward),
        t0=passed(start),
        t1=passed(end),
        tstops=jnp.sort(passed(jnp.concatenate(stops, axis=1)), axis=1),
        d_discontinuities=jumps,
        **_NOT_GIVEN,
    )


# Options that are for the forward solve alone.
_NOT_GIVEN: dict[str, Any] = dict.fromkeys(("saveat", "count", "dt", "stop", "max_norm"))


@functools.lru_cache(maxsize=256)
def _adjoint_of(field: Program, wanted: tuple[int, ...], forward: tuple) -> tuple[Program, list]:
    """The field of the adjoint and of the integrals for the `wanted` parameters, and its constants.
    Its parameters are all numbers of the field, the origin of the time, and the arguments `forward`
    of `_state_at`."""
    (out,), (numbers, t) = field.out_avals, numbers_and_time(field)

    def backwards(y: Array, p: tuple, passed: Array) -> Array:
        numbers, origin, forward = p
        direction = forward[0]
        t = origin - direction * passed
        u = _state_at(*forward, t).reshape(out.shape)
        at = at_numbers(field, field, numbers, wanted, t)
        _, pullback = jax.vjp(at, u, *(numbers[i] for i in wanted))
        found = pullback(y[: out.size].reshape(out.shape))
        return direction * jnp.concatenate([x.ravel().astype(out.dtype) for x in found])

    size = out.size + sum(numbers[i].size for i in wanted)
    state = jax.ShapeDtypeStruct((size,), out.dtype)
    return trace(backwards, state, (numbers, t, forward), t, rules=True)


def _state_at(
    direction: Array, rows: Array, times: Array, u: Array, inner: Array, t: Array
) -> Array:
    """The state at a time, from the steps of one trajectory (see `solves.Steps`). Where two steps
    meet, it is the end of the earlier one."""

    def parted(bounds: tuple) -> tuple:
        first, end = bounds
        middle = (first + end) // 2
        after = direction * (t - times[middle]) > 0
        return jnp.where(after, middle, first), jnp.where(after, end, middle)

    # The first row of the step is in [first, end).
    whole = jnp.zeros_like(rows), rows - 1
    row, _ = jax.lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, parted, whole)
    start, h = times[row], times[row + 1] - times[row]
    return polynomial((t - start) / h, u[row], inner[row + 1], u[row + 1])
