"""Derivatives of solves in Julia: forward sensitivities, and continuous adjoints.

JAX derives the right-hand sides of their ODEs, which are translated like any field. The method, the
ensemble algorithm and the tolerances are those of the solve. So the derivatives are accurate to
the tolerances; they are not the exact derivatives of the steps taken.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ...fields import parameters_of
from ...ground.host import host_call
from ...ground.retcode import reached_end
from ...plan.plan import Plan, Result
from ...plan.saving import Saving
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem import sensitivity
from ...problem.number_table import of_kind
from ...tracing.program import Program, trace
from ..base.capabilities import CALLBACKS, MASS, no_derivative, NOISE, STOPS
from ..base.results import numbers_of_each
from ..derivatives.rates import rates
from . import methods, session
from .fields import translate
from .numbers import read_arrays
from .requests import JuliaRequest
from .solving import field_of, NO_DERIVATIVE, options_of, solve_in_program


# With more parameters the adjoint is cheaper.
_MOST_SENSITIVITIES = 20


def differentiable(plan: Plan, lanes: TrajectoryNumbers, n: int) -> Result:
    """Solve `n` trajectories; the result can be differentiated if there are no callbacks, no mass
    matrix and no noise."""
    for feature, given in ((CALLBACKS, plan.events), (MASS, plan.mass), (NOISE, plan.noise)):
        if given is not None and (reason := no_derivative("julia", feature)):
            return solve_in_program(plan, lanes, n, reason)
    chosen = plan.method.value.sensealg
    if chosen == "ForwardDiffSensitivity":
        return sensitivity.forward_only(_forward(plan, lanes, n))
    label = chosen or "the default of engine='julia'"
    lanes = sensitivity.reverse_only(lanes, f"{label}()" if chosen else label)
    return _reverse(lanes, plan, n)


def _check_moving(moves: Any) -> None:
    """**Raises:** `NotImplementedError` for a derivative with respect to times at which `f`
    jumps."""
    if moves and (reason := no_derivative("julia", STOPS)):
        raise NotImplementedError(reason)


#
# What is differentiated
#


class Parameters(NamedTuple):
    """The constants and parameters that are differentiated, as one vector for each trajectory."""

    leaves: tuple
    where: tuple[bool, ...]

    @property
    def size(self) -> int:
        return sum(math.prod(x.shape) for x in self.leaves)

    def split(self, vector: Array) -> list:
        """The leaves of a `[..., parameter]` array."""
        leaves, start = [], 0
        for x in self.leaves:
            size = math.prod(x.shape)
            part = vector[..., start : start + size]
            leaves.append(part.reshape(*vector.shape[:-1], *x.shape).astype(x.dtype))
            start += size
        return leaves


def _parameters(plan: Plan, wanted: Any) -> Parameters:
    """The constants and parameters of the program that are wanted, with the shapes they have for
    one trajectory."""
    avals = parameters_of(plan.field)
    pairs = zip(wanted, avals, strict=True)
    where = tuple(bool(w) and jnp.issubdtype(a.dtype, jnp.inexact) for w, a in pairs)
    return Parameters(tuple(itertools.compress(avals, where)), where)


def _with(leaves: PyTree, where: tuple[bool, ...], new: PyTree) -> list:
    """The leaves, with those where `where` is true replaced by the new ones."""
    new = iter(new)
    return [next(new) if w else x for x, w in zip(leaves, where, strict=True)]


def _rates_at_start(plan: Plan, lanes: TrajectoryNumbers, n: int) -> Any:
    """`f` at the start of each trajectory, `[trajectory, *state]`."""
    t0 = jnp.broadcast_to(jnp.asarray(lanes.t0), (n,))
    return rates(plan, lanes, _starts(plan, lanes, n)[:, None], t0[:, None])[:, 0]


def _starts(plan: Plan, lanes: TrajectoryNumbers, n: int) -> Array:
    return numbers_of_each(lanes.u0, bool(plan.batched.u0), n)


def _dot(a: Any, b: Any) -> Any:
    """The sum of the products over the state, `[trajectory]`."""
    return jnp.sum(a * b, axis=tuple(range(1, a.ndim)))


#
# Forward sensitivities: du/dtheta solved next to u
#


def _sensitivities(
    plan: Plan, lanes: TrajectoryNumbers, n: int, parameters: Parameters
) -> tuple[Any, Result]:
    """The derivatives of the saved states with respect to the initial state and the parameters,
    `[trajectory, time, number, *state]`, and the solution that was computed with them."""
    shape, dtype = plan.state.shape, plan.state.dtype
    d, total = math.prod(shape), math.prod(shape) + parameters.size
    n_consts = len(plan.field.jaxpr.constvars)

    def field(z, numbers, t):
        u, s = z[0], z[1:]
        consts, p = numbers[:n_consts], numbers[n_consts:]

        def f(u, diff):
            every = _with((*consts, *p), parameters.where, diff)
            out = plan.field(every[:n_consts], u.reshape(shape), tuple(every[n_consts:]), t)
            return out.reshape(-1)

        diff = list(itertools.compress(numbers, parameters.where))
        zeros, eye = jnp.zeros((d, parameters.size), dtype), jnp.eye(parameters.size, dtype=dtype)
        unit = jnp.concatenate([zeros, eye])

        def column(s, e):
            return jax.jvp(f, (u, diff), (s, parameters.split(e)))[1]

        return jnp.concatenate([f(u, diff)[None], jax.vmap(column)(s, unit)])

    z = jax.ShapeDtypeStruct((1 + total, d), dtype)
    u0 = _starts(plan, lanes, n).reshape(n, 1, d)
    first = jnp.concatenate([jnp.eye(d, dtype=dtype), jnp.zeros((parameters.size, d), dtype)])
    z0 = jnp.concatenate([u0, jnp.broadcast_to(first, (n, total, d))], axis=1)
    augmented, numbers = _replanned(plan, lanes, field, z, z0)
    result = solve_in_program(augmented, numbers, n)
    s = result.u[:, :, 1:].reshape(n, -1, total, *shape)
    return s, result._replace(u=result.u[:, :, 0].reshape(n, -1, *shape))


def _traced(plan: Plan, field: Callable, state: PyTree, *more: Any) -> Program:
    """The trace of `field(state, numbers, t)`, where the numbers are all those of the plan's field,
    followed by `more`."""
    t: Any = plan.field.jaxpr.invars[-1].aval
    avals = (*parameters_of(plan.field), *more)
    structs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    program, consts = trace(field, state, structs, jax.ShapeDtypeStruct((), t.dtype))
    assert not consts
    return program


def _replanned(
    plan: Plan, lanes: TrajectoryNumbers, field: Callable, state: PyTree, u0: Array
) -> tuple[Plan, TrajectoryNumbers]:
    """A plan and lanes for `field(state, numbers, t)`, with the numbers of the plan's field."""
    program = _traced(plan, field, state)
    size, one = math.prod(state.shape), math.prod(plan.state.shape)

    def tolerance(x: Array, batched: bool) -> Array:
        """A tolerance for each component of the state; its derivatives have the same one."""
        x = jnp.asarray(x)
        if x.ndim - batched == 0:
            return x
        flat = x.reshape(*x.shape[:batched], one)
        return jnp.tile(flat, (*(1,) * batched, size // one))

    batched = plan.batched
    batched = batched._replace(u0=True, consts=(), p=batched.parameters)
    plan = dataclasses.replace(plan, field=program, state=state, batched=batched, form=None)
    tolerances = {
        row.name: tolerance(getattr(lanes, row.name), bool(getattr(batched, row.name)))
        for row in of_kind("tolerance")
    }
    return plan, lanes._replace(u0=u0, consts=(), p=lanes.parameters, **tolerances)


@eqx.filter_custom_jvp
def _forward(plan: Plan, lanes: TrajectoryNumbers, n: int) -> Result:
    return solve_in_program(plan, lanes, n)


@_forward.def_jvp
def _(primals, tangents):
    plan, lanes, n = primals
    _, dot, _ = tangents
    _check_moving(dot.d_discontinuities is not None)
    parameters = _parameters(plan, [x is not None for x in dot.parameters])
    s, result = _sensitivities(plan, lanes, n, parameters)
    d = math.prod(plan.state.shape)
    rows = s.shape[1]
    # The tangent of each number, `[trajectory, number]`.
    flat = [
        jnp.zeros((n, d), s.dtype)
        if dot.u0 is None
        else jnp.broadcast_to(dot.u0.reshape(-1, d), (n, d))
    ]
    every = zip(dot.parameters, plan.batched.parameters, strict=True)
    for (x, batched), w in zip(every, parameters.where, strict=True):
        if w:
            x = x.reshape(n, -1) if batched else x.reshape(1, -1)
            flat.append(jnp.broadcast_to(x, (n, x.shape[1])).astype(s.dtype))
    theta = jnp.concatenate(flat, axis=1)
    du = jnp.einsum("ntk...,nk->nt...", s, theta)
    if dot.t0 is not None:
        # To start later in `u0` is to start at the same time in `u0` minus `f` times the delay.
        shift = _rates_at_start(plan, lanes, n).reshape(n, d)
        shift = shift * jnp.broadcast_to(dot.t0, (n,))[:, None]
        du = du - jnp.einsum("ntk...,nk->nt...", s[:, :, :d], shift)
    dt = _time_tangents(plan, dot, n, rows)
    if dt is not None:
        moving = rates(plan, lanes, result.u, _row_times(plan, lanes, result, n))
        du = du + moving * dt.reshape(*dt.shape, *(1,) * len(plan.state.shape))
    reached = jnp.isfinite(result.u)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_inexact_array(x) else None, result)
    moves = zeros.t is not None and dt is not None and result.t.ndim == dt.ndim
    t = dt if moves else zeros.t
    return result, zeros._replace(u=jnp.where(reached, du, 0), t=t)


def _time_tangents(plan: Plan, dot: TrajectoryNumbers, n: int, rows: int) -> Any:
    """The tangents of the saved times, `[trajectory, time]`; None if these times have none."""
    if plan.saving.mode == "times" and dot.saveat is not None:
        return jnp.broadcast_to(dot.saveat, (n, rows))
    if plan.saving.mode == "ends" and dot.t1 is not None:
        last = jnp.broadcast_to(dot.t1, (n,))
        return jnp.zeros((n, rows), last.dtype).at[:, -1].set(last)
    return None


def _row_times(plan: Plan, lanes: TrajectoryNumbers, result: Result, n: int) -> Any:
    """The times of the saved rows, `[trajectory, time]`; any time in rows that were not reached."""
    t = jnp.broadcast_to(result.t, (n, plan.saving.rows))
    return jnp.where(jnp.isfinite(t), t, jnp.broadcast_to(jnp.asarray(lanes.t0), (n,))[:, None])


#
# Reverse mode
#


@eqx.filter_custom_vjp
def _reverse(lanes: TrajectoryNumbers, plan: Plan, n: int) -> Result:
    return solve_in_program(plan, lanes, n)


@_reverse.def_fwd
def _(perturbed, lanes, plan, n):
    result = solve_in_program(plan, lanes, n)
    return result, result


@_reverse.def_bwd
def _(result, cotangents, perturbed, lanes, plan, n):
    _check_moving(perturbed.d_discontinuities)
    ct = jnp.zeros_like(result.u) if cotangents.u is None else cotangents.u
    # A failed trajectory has a gradient of zero: a loss can mask it.
    good = reached_end(result.retcode)
    rows = jnp.arange(plan.saving.rows, dtype=result.length.dtype)[None] < result.length[:, None]
    keep = (good[:, None] & rows).reshape(n, -1, *(1,) * len(plan.state.shape))
    ct = jnp.where(keep, ct, 0)
    parameters = _parameters(plan, perturbed.parameters)
    d = math.prod(plan.state.shape)
    chosen = plan.method.value.sensealg
    few = d + parameters.size <= _MOST_SENSITIVITIES or methods.is_gpu(plan.method.value.place)
    if chosen is None and few:
        s, augmented = _sensitivities(plan, lanes, n, parameters)
        usable = reached_end(augmented.retcode)
        s = jnp.where(keep[:, :, None], s, 0)
        gradient = jnp.einsum("ntkx,ntx->nk", s.reshape(n, -1, s.shape[2], d), ct.reshape(n, -1, d))
        gradient = jnp.where((usable | ~good)[:, None], gradient, jnp.nan)
    elif chosen == "BacksolveAdjoint":
        gradient = _backsolve(plan, lanes, n, parameters, result, ct)
    else:
        gradient = _interpolating(plan, lanes, n, parameters, result, ct)
    return _as_gradient(plan, lanes, perturbed, parameters, result, ct, gradient, n)


def _as_gradient(plan, lanes, perturbed, parameters, result, ct, gradient, n) -> TrajectoryNumbers:
    """The gradient of each leaf, from the `gradient` `[trajectory, number]`."""
    state = plan.state.shape
    d = math.prod(state)
    at_start, leaves = gradient[:, :d], iter(parameters.split(gradient[:, d:]))
    flat = []
    for b, w in zip(plan.batched.parameters, parameters.where, strict=True):
        g = next(leaves) if w else None
        flat.append(g if g is None or b else jnp.sum(g, axis=0))

    def summed(name: str, g: Any) -> Any:
        if not getattr(perturbed, name):
            return None
        return g if getattr(plan.batched, name) else jnp.sum(g, axis=0)

    u0 = summed("u0", at_start.reshape(n, *state))
    t0 = t1 = saveat = None
    if perturbed.t0:
        moving = _rates_at_start(plan, lanes, n)
        t0 = summed("t0", -_dot(at_start.reshape(n, *state), moving))
        if plan.saving.mode == "ends" and plan.saving.start:
            # The saved initial state stays the same when its time changes.
            t0_row = _dot(ct[:, 0], moving)
            t0 = t0 + (t0_row if plan.batched.t0 else jnp.sum(t0_row))
    if (plan.saving.mode == "times" and perturbed.saveat) or perturbed.t1:
        times = _row_times(plan, lanes, result, n)
        safe = jnp.where(jnp.isfinite(result.u), result.u, _starts(plan, lanes, n)[:, None])
        moving = rates(plan, lanes, safe, times)
        moved = jnp.sum((ct * moving).reshape(n, ct.shape[1], -1), axis=-1)
        if plan.saving.mode == "times":
            saveat = summed("saveat", moved)
        last = moved[:, -1]
        t1 = summed("t1", last if plan.saving.mode == "ends" else jnp.zeros_like(last))
    # The gradients with respect to all other numbers are zero.
    zero = jax.tree.map(lambda w, x: jnp.zeros_like(x) if w else None, perturbed, lanes)
    return zero.with_parameters(flat)._replace(u0=u0, t0=t0, t1=t1, saveat=saveat)


def _adjoint_program(plan: Plan, parameters: Parameters) -> Program:
    """The right-hand side of `z = [lambda, gradient]`, whose last parameter is the state."""
    shape = plan.state.shape
    d = math.prod(shape)
    n_consts = len(plan.field.jaxpr.constvars)

    def field(z, numbers, t):
        *numbers, u = numbers
        diff = list(itertools.compress(numbers, parameters.where))

        def f(u, diff):
            every = _with(numbers, parameters.where, diff)
            return plan.field(every[:n_consts], u, tuple(every[n_consts:]), t)

        _, pull = jax.vjp(f, u, diff)
        du, dp = pull(z[:d].reshape(shape))
        return -jnp.concatenate([x.reshape(-1).astype(z.dtype) for x in (du, *dp)])

    z = jax.ShapeDtypeStruct((d + parameters.size,), plan.state.dtype)
    return _traced(plan, field, z, plan.state)


@dataclasses.dataclass(frozen=True)
class _AdjointCall:
    """Solves the adjoint on the host, from flat operands. Calls are compared by their content."""

    plan: Plan
    program: Program
    n: int
    total: int
    structure: Any

    def __call__(self, *leaves: np.ndarray) -> list[np.ndarray]:
        lanes, rows, cotangents = jtu.tree_unflatten(self.structure, leaves)
        plan, n = self.plan, self.n
        field = field_of(plan)
        method = plan.method.value
        rate: Any = plan.field
        adjoint = translate(self.program, plan.batched.parameters, method.implicit, rate)
        d = math.prod(plan.state.shape)
        read = read_arrays(plan, field, lanes, n)
        for name in ("times", "counts"):
            read.pop(name, None)
        read["rows"] = np.ascontiguousarray(rows, plan.state.dtype)
        read["cotangents"] = np.ascontiguousarray(cotangents).reshape(n, -1, d)
        written = {"gradient": np.empty((n, self.total), plan.state.dtype)}
        options = {**options_of(plan, n), "field": field.as_table(), "adjoint": adjoint.as_table()}
        session.start().run(JuliaRequest("adjoint", options, read, written))
        return [written["gradient"]]


def _interpolating(plan, lanes, n, parameters, result, ct) -> Any:
    total = math.prod(plan.state.shape) + parameters.size
    program = _adjoint_program(plan, parameters)
    rows = _row_times(plan, lanes, result, n)
    leaves, structure = jtu.tree_flatten((lanes, rows, ct))
    call = _AdjointCall(plan, program, n, total, structure)
    room = jax.ShapeDtypeStruct((n, total), plan.state.dtype)
    (gradient,) = host_call(call, [room], *leaves, no_derivative=NO_DERIVATIVE)
    return gradient


def _backsolve(plan, lanes, n, parameters, result, ct) -> Any:
    """The gradient, found by solving back from each saved time to the one before, starting in the
    saved state."""
    shape, dtype = plan.state.shape, plan.state.dtype
    d = math.prod(shape)
    adjoint = _adjoint_program(plan, parameters)
    n_consts = len(lanes.consts)

    def field(z, numbers, t):
        u = z[:d].reshape(shape)
        du = plan.field(numbers[:n_consts], u, tuple(numbers[n_consts:]), t)
        return jnp.concatenate([du.reshape(-1), adjoint((), z[d:], (*numbers, u), t)])

    state = jax.ShapeDtypeStruct((2 * d + parameters.size,), dtype)
    segment, numbers = _replanned(plan, lanes, field, state, jnp.zeros((n, *state.shape), dtype))
    ends = Saving("ends", False, 1)
    batched = segment.batched._replace(
        t0=True, t1=True, saveat=None, count=None, abstol=False, reltol=False
    )
    segment = dataclasses.replace(segment, saving=ends, batched=batched)
    numbers = numbers._replace(
        saveat=None, count=None, abstol=jnp.min(numbers.abstol), reltol=jnp.min(numbers.reltol)
    )
    t0 = jnp.broadcast_to(jnp.asarray(lanes.t0), (n,))
    times = jnp.concatenate([t0[:, None], _row_times(plan, lanes, result, n)], axis=1)
    us = [_starts(plan, lanes, n)[:, None], jnp.where(jnp.isfinite(result.u), result.u, 0)]
    us, cts = (x.reshape(n, -1, d) for x in (jnp.concatenate(us, axis=1), ct))

    def back(carry, row):
        adjoint, good = carry
        t, before, u, ct = row
        adjoint = adjoint.at[:, :d].add(ct)
        z = jnp.concatenate([u, adjoint], axis=1)
        solved = solve_in_program(segment, numbers._replace(u0=z, t0=t, t1=before), n)
        moved = t != before
        adjoint = jnp.where(moved[:, None], solved.u[:, 0, d:], adjoint)
        return (adjoint, good & (~moved | reached_end(solved.retcode))), None

    rows = (times[:, 1:].T, times[:, :-1].T, us[:, 1:].swapaxes(0, 1), cts.swapaxes(0, 1))
    start = (jnp.zeros((n, d + parameters.size), dtype), jnp.ones(n, bool))
    (adjoint, good), _ = jax.lax.scan(back, start, rows, reverse=True)
    adjoint = jnp.where(good[:, None], adjoint, jnp.nan)
    return jnp.where(reached_end(result.retcode)[:, None], adjoint, 0)
