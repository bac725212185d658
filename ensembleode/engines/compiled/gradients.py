"""Solves by kernels, differentiable: in reverse by record and replay, forwards by sensitivities.

Both are those of the lanes engine. Derivatives by times are those of the solution of the ODE, along
the field.
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ... import sensitivity
from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...core.retcode import ReturnCode
from ...tracing.program import Program, trace
from ..rates import rates
from ..results import Numbers, result_of
from .solves import pull_back, Setup, solve


def solved(plan: Plan, lanes: Lane, n: int, mask: Any) -> Result:
    """The result of `n` trajectories, without shared times."""
    solver = plan.method.value
    if solver.direction == "forward":
        return sensitivity.forward_only(_with_tangent(lanes, mask, plan, n))
    lanes = sensitivity.reverse_only(lanes, solver.adjoint + "()")
    return _with_adjoint(lanes, mask, plan, n)


def _solved(plan: Plan, lanes: Lane, n: int, mask: Any) -> Result:
    setup = Setup(plan, math.prod(plan.state.shape), n)
    return _finished(plan, lanes, n, solve(setup, lanes, mask))


def _finished(plan: Plan, lanes: Lane, n: int, found: tuple) -> Result:
    end, saved, counts = found
    u0 = _each(lanes.u0, plan.batched.u0, n)
    numbers = Numbers(u0, jnp.asarray(lanes.t0), jnp.asarray(lanes.t1), _times(plan, lanes))
    method = plan.method.value.method
    return result_of(plan, method, lanes.dt is not None, numbers, end, saved, counts)


def _each(x: Any, batched: bool, n: int) -> Any:
    """One a trajectory, also of what they share."""
    x = jnp.asarray(x)
    return x if batched else jnp.broadcast_to(x, (n, *x.shape))


def _times(plan: Plan, lanes: Lane) -> Any:
    """The times to save, infinite past those that are meant."""
    if lanes.saveat is None or lanes.count is None:
        return lanes.saveat
    times, count = jnp.asarray(lanes.saveat), jnp.asarray(lanes.count)
    beyond = jnp.where(lanes.t1 < lanes.t0, -jnp.inf, jnp.inf).astype(times.dtype)
    if times.ndim == 1 and not count.ndim and not beyond.ndim:
        rows = jnp.arange(len(times), dtype=count.dtype)
        return jnp.where(rows < count, times, beyond)
    rows = jnp.arange(times.shape[-1], dtype=count.dtype)[None]
    return jnp.where(
        rows < count.reshape(-1, 1), times.reshape(-1, rows.size), beyond.reshape(-1, 1)
    )


#
# In reverse
#


@eqx.filter_custom_vjp
def _with_adjoint(lanes, mask, plan, n):
    return _solved(plan, lanes, n, mask)


@_with_adjoint.def_fwd
def _(perturbed, lanes, mask, plan, n):
    del perturbed
    result = _solved(plan, lanes, n, mask)
    return result, (result.u, result.length, result.retcode, result.naccept)


@_with_adjoint.def_bwd
def _(residuals, cotangents, perturbed, lanes, mask, plan, n):
    u, length, codes, naccept = residuals
    cotangent = cotangents[0]
    if cotangent is None:
        return jax.tree.map(lambda _: None, lanes)
    saving, batched = plan.saving, plan.batched
    ok = mask & (codes == ReturnCode.Success.value)

    def where_ok(x):
        return jnp.where(ok.reshape(n, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))

    # Where nothing was reached there is nothing to pull back, and NaN would spread.
    cotangent = where_ok(jnp.where(jnp.isnan(u), 0, cotangent))
    at_end = cotangent[:, -1] if saving.mode == "ends" else cotangent
    setup = Setup(plan, math.prod(plan.state.shape), n)
    reached = naccept + int(saving.start) if saving.mode == "steps" else length
    pulled = pull_back(setup, lanes, ok, at_end, reached)
    # A state saved at t0 is u0, whenever that is; but where it is at a time given by saveat.
    to_start = where_ok(pulled.u0)
    to_u0 = to_start
    if saving.start and saving.mode != "times":
        to_u0 = to_u0 + cotangent[:, 0]
    parameters = iter(pulled.parameters)

    def of_parameter(x, is_own):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return None
        gradient = next(parameters)
        return where_ok(gradient) if is_own else gradient[0]

    consts = tuple(map(of_parameter, lanes.consts, batched.consts))
    p = tuple(map(of_parameter, lanes.p, batched.p))
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_inexact_array(x) else None, lanes)
    gradient = zeros._replace(u0=_gathered(to_u0, batched.u0), p=p, consts=consts)
    moving = any(jtu.tree_leaves((perturbed.t0, perturbed.t1, perturbed.saveat)))
    if moving:
        times = _pulled_back_times(plan, lanes, n, u, length, cotangent, to_start, where_ok)
        gradient = gradient._replace(**times)
    return gradient


def _gathered(x: Any, batched: bool) -> Any:
    return x if batched else jnp.sum(x, axis=0)


def _pulled_back_times(plan, lanes, n, u, length, cotangent, to_start, where_ok) -> dict[str, Any]:
    """The cotangents of `t0`, `t1` and `saveat`: those of the states along the field, of the
    trajectories that succeeded."""
    batched = plan.batched
    t0, t1 = (_each(x, b, n) for x, b in ((lanes.t0, batched.t0), (lanes.t1, batched.t1)))
    u0 = _each(lanes.u0, batched.u0, n)

    def along(cotangent, u, t):
        """`[trajectory, row]`"""
        du = rates(plan, lanes, u, t)
        return where_ok(jnp.sum(cotangent * du, axis=tuple(range(2, u.ndim))))

    found = {"t0": _gathered(-along(to_start[:, None], u0[:, None], t0[:, None])[:, 0], batched.t0)}
    if plan.saving.mode != "times":
        last = jnp.maximum(length - 1, 0).reshape(n, *(1,) * (u.ndim - 1))
        at_end, u1 = (jnp.take_along_axis(x, last, 1) for x in (cotangent, u))
        u1 = jnp.where(jnp.isnan(u1), u0[:, None], u1)
        at_t1 = jnp.where(length > int(plan.saving.start), along(at_end, u1, t1[:, None])[:, 0], 0)
        found["t1"] = _gathered(at_t1, batched.t1)
        return found
    times = _each(lanes.saveat, batched.saveat, n)
    # Of rows that are not reached there is no state, and their times may be infinite.
    there = jnp.arange(u.shape[1], dtype=length.dtype)[None] < length[:, None]
    times = jnp.where(there, times, t0[:, None])
    safe = jnp.where(there.reshape(*there.shape, *(1,) * (u.ndim - 2)), u, u0[:, None])
    found["saveat"] = _gathered(along(cotangent, safe, times), batched.saveat)
    return found


#
# Forwards
#


@eqx.filter_custom_jvp
def _with_tangent(lanes, mask, plan, n):
    return _solved(plan, lanes, n, mask)


@_with_tangent.def_jvp
def _(primals, tangents):
    lanes, mask, plan, n = primals
    moved: Lane = tangents[0]
    size = math.prod(plan.state.shape)
    wide, both = _with_sensitivities(plan, lanes, _start_moved(plan, lanes, n, moved))
    # (On its own: where several tangents are mapped over, the solution is one.)
    result = _solved(plan, lanes, n, mask)
    end, saved, _ = solve(Setup(wide, size, n), both, mask)
    start = _each(_or_zeros(moved.u0, lanes.u0), plan.batched.u0, n)
    if plan.saving.mode == "ends":
        to_u = jnp.stack([start, end[:, 1]][-plan.saving.rows :], axis=1)
    else:
        to_u = saved.u[:, :, 1]
        if plan.saving.mode == "steps" and plan.saving.start:
            to_u = to_u.at[:, 0].set(start)
    to_u = to_u + _times_moved(plan, lanes, n, moved, result)
    to_u = jnp.where(jnp.isnan(result.u), 0, to_u)
    nothing = jax.tree.map(lambda _: None, result)
    return result, nothing._replace(u=to_u)


def _or_zeros(tangent: Any, primal: Any) -> Any:
    return jnp.zeros_like(primal) if tangent is None else tangent


def _start_moved(plan: Plan, lanes: Lane, n: int, moved: Lane) -> Lane:
    """The tangents, that of `u0` with what it moves along the field when `t0` does."""
    if moved.t0 is None:
        return moved
    batched = plan.batched
    u0, t0 = _each(lanes.u0, batched.u0, n), _each(lanes.t0, batched.t0, n)
    du = rates(plan, lanes, u0[:, None], t0[:, None])[:, 0]
    by = _each(moved.t0, batched.t0, n).reshape(n, *(1,) * (u0.ndim - 1))
    start = _each(_or_zeros(moved.u0, lanes.u0), batched.u0, n)
    return moved._replace(u0=start - by * du)


def _times_moved(plan: Plan, lanes: Lane, n: int, moved: Lane, result: Result) -> Any:
    """What the saved states move along the field when their times do."""
    u, batched = result.u, plan.batched
    dt: Any = jnp.zeros(u.shape[:2], u.dtype)
    t: Any = dt
    if plan.saving.mode == "times":
        if moved.saveat is None:
            return jnp.zeros_like(u)
        dt = _each(moved.saveat, batched.saveat, n)
        t = _each(lanes.saveat, batched.saveat, n)
    else:
        if moved.t1 is None:
            return jnp.zeros_like(u)
        rows = jnp.arange(u.shape[1], dtype=result.length.dtype)[None]
        last = (rows == result.length[:, None] - 1) & (
            result.length[:, None] > int(plan.saving.start)
        )
        dt = jnp.where(last, _each(moved.t1, batched.t1, n)[:, None], 0)
        t = jnp.broadcast_to(_each(lanes.t1, batched.t1, n)[:, None], dt.shape)
    u0 = _each(lanes.u0, batched.u0, n)
    safe = jnp.where(jnp.isnan(u), u0[:, None], u)
    du = rates(plan, lanes, safe, t)
    return du * dt.reshape(*dt.shape, *(1,) * (u.ndim - 2))


def _with_sensitivities(plan: Plan, lanes: Lane, moved: Lane) -> tuple[Plan, Lane]:
    """The solve whose state is the state and its tangent: `[2, *state]`."""
    batched, n_consts = plan.batched, len(lanes.consts)
    numbers = (*lanes.consts, *lanes.p)
    tangents = (*moved.consts, *moved.p)
    which = [i for i, x in enumerate(tangents) if x is not None]
    field = plan.field

    def both(u, p, t):
        state, moving = u
        numbers, along = p

        def at(state, *chosen):
            every = list(numbers)
            for i, x in zip(which, chosen, strict=True):
                every[i] = x
            return field(every[:n_consts], state, tuple(every[n_consts:]), t)

        chosen = [numbers[i] for i in which]
        return jnp.stack(jax.jvp(at, (state, *chosen), (moving, *along)))

    own = (*batched.consts, *batched.p)
    parameters = (*numbers, *(tangents[i] for i in which))
    flags = (*own, *(own[i] for i in which))
    structs = [
        jax.ShapeDtypeStruct(x.shape[1:] if b else x.shape, x.dtype)
        for x, b in zip(parameters, flags, strict=True)
    ]
    state = jax.ShapeDtypeStruct((2, *plan.state.shape), plan.state.dtype)
    t = jax.ShapeDtypeStruct((), plan.state.dtype)
    split = len(numbers)
    program, consts = trace(both, state, (structs[:split], structs[split:]), t)
    assert isinstance(program, Program)
    own_u0 = batched.u0 or (moved.u0 is not None and moved.u0.ndim > len(plan.state.shape))
    u0 = lanes.u0
    if own_u0 and not batched.u0:
        u0 = jnp.broadcast_to(u0, _or_zeros(moved.u0, u0).shape)
    u0 = jnp.stack([u0, _or_zeros(moved.u0, u0)], axis=int(own_u0))
    wide = dataclasses.replace(
        plan,
        field=program,
        state=state,
        batched=batched._replace(u0=own_u0, p=flags, consts=(False,) * len(consts)),
    )
    return wide, lanes._replace(u0=u0, p=parameters, consts=tuple(consts))
