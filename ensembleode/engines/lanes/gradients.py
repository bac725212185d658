"""Solves that can be differentiated: what pulls cotangents back through chunks of lanes.

Of a lane that failed they are dropped here, whichever adjoint it is.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ... import sensitivity
from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...core.retcode import ReturnCode
from ..results import with_times
from .chunks import chunk_of, in_chunks, Setup, setup_of, solve
from .continuous_adjoints import backsolve, gauss
from .leaves import Leaves, map_leaves, select, sum_of
from .loop import Chunk
from .replay import buffers, Cotangent, pull_back, Replay


# How a chunk is pulled back, by the name of its `sensealg`.
_ADJOINTS = {"ReplayAdjoint": pull_back, "GaussAdjoint": gauss, "BacksolveAdjoint": backsolve}


def solve_trajectories(
    plan: Plan, lanes: Lane, n: int, mask: Any = None, *, alone: bool = False
) -> Result:
    """Solve `n` trajectories, chunk by chunk; the leaves of the result have their axis first.

    (But `t`, which has it where the trajectories have their own times.)

    **Arguments:**

    - `lanes`: the numbers, a leading axis on the leaves that `plan.batched` marks.
    - `mask`: false for those that only fill a place, and are not solved: [n].
    - `alone`: whether the chunk may be narrower than that of an ensemble.
    """
    setup = setup_of(plan, lanes, alone=alone)
    every, shared = eqx.partition(lanes, plan.batched)
    chunks = -(-n // setup.width)
    every = jax.tree.map(lambda x: in_chunks(x, chunks, setup.width), every)
    wanted = np.arange(chunks * setup.width).reshape(chunks, setup.width) < n
    if mask is not None:
        wanted = wanted & in_chunks(mask, chunks, setup.width)
    wanted = jnp.asarray(wanted)
    method = plan.method.value
    if method.direction == "forward":
        result = sensitivity.forward_only(solve(setup, every, shared, wanted))
    else:
        numbers = sensitivity.reverse_only((every, shared), method.adjoint + "()")
        result = _solved(numbers, wanted, setup)
    result = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], result)
    return with_times(plan, lanes, result)


@eqx.filter_custom_vjp
def _solved(numbers, mask, setup):
    return solve(setup, *numbers, mask)


@_solved.def_fwd
def _(perturbed, numbers, mask, setup):
    del perturbed
    result = solve(setup, *numbers, mask)
    steps = result.naccept + result.nreject
    return result, (result.retcode, steps, (result.u, result.t, result.length))


@_solved.def_bwd
def _(residuals, cotangents, perturbed, numbers, mask, setup):
    codes, steps, saved = residuals
    cotangent = cotangents[0]
    if cotangent is None:
        return jax.tree.map(lambda _: None, numbers)
    adjoint = setup.plan.method.value.adjoint
    moving = any(jtu.tree_leaves([[x.t0, x.t1, x.saveat] for x in perturbed]))
    if not (moving or adjoint == "BacksolveAdjoint" or setup.plan.saving.mode == "steps"):
        saved = None
    (every, shared), fixed = eqx.partition(numbers, eqx.is_inexact_array)
    fixed_every, fixed_shared = fixed
    order, back = _by_cost(setup, steps)
    lanes = jax.tree.map(_merged, (every, fixed_every, cotangent, saved))

    def one(carry, numbers):
        room, grad_shared = carry
        which, ok = numbers
        # A failed lane is not solved again; its numbers, which may be infinite or NaN, are replaced
        # by those of one that succeeded, so that products with shared weights stay finite.
        which = jnp.where(ok, which, which[jnp.argmax(ok)])
        every, fixed, cotangent, saved = jax.tree.map(lambda x: x[which], lanes)
        weight = ok.reshape(-1, *(1,) * (cotangent.ndim - 1))
        cotangent = jnp.where(weight, cotangent, jnp.zeros_like(cotangent))

        def numbers_of(every, shared):
            lane, rest = eqx.combine(every, fixed), eqx.combine(shared, fixed_shared)
            chunk = chunk_of(setup, lane, rest, ok)
            return _real_parts(chunk), chunk

        _, pullback, chunk = jax.vjp(numbers_of, every, shared, has_aux=True)
        grads, room = _pull_back(setup, chunk, cotangent, saved, moving, room)
        # (With no lane that succeeded, all numbers are those of one that failed.)
        some = jnp.any(ok)
        grads = jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), grads)
        grad_every, more_shared = pullback(grads)
        return (room, jax.tree.map(jnp.add, grad_shared, more_shared)), grad_every

    first = jax.tree.map(lambda x: x[0], numbers[0])
    like = jax.eval_shape(lambda e, s, m: chunk_of(setup, e, s, m), first, numbers[1], mask[0])
    zero = jax.tree.map(jnp.zeros_like, shared)
    room = (
        None if adjoint == "BacksolveAdjoint" else buffers(setup.stepping, setup.plan.saving, like)
    )
    succeeded = _merged(mask & (codes == ReturnCode.Success.value))[order]
    (_, grad_shared), grad_every = jax.lax.scan(one, (room, zero), (order, succeeded))
    return jax.tree.map(lambda x: _merged(x)[back].reshape(x.shape), grad_every), grad_shared


def _by_cost(setup: Setup, steps: Any) -> tuple:
    """Lanes in chunks of those that took about as many steps, as a chunk takes the most of any.

    **Returns:** which lane is at each place, `[chunk, lane]`, and at which place each is, `[n]`.
    """
    here = np.arange(steps.size, dtype=np.int32)
    if setup.stepping.controller is None or steps.shape[0] == 1:
        return here.reshape(steps.shape), here
    order = jnp.argsort(steps.reshape(-1)).astype(np.int32)
    back = jnp.zeros_like(order).at[order].set(here, unique_indices=True)
    return order.reshape(steps.shape), back


def _merged(x: Any) -> Any:
    """Without the axis of the chunks."""
    return x.reshape(-1, *x.shape[2:])


def _real_parts(chunk: Chunk) -> tuple:
    """What of a chunk has cotangents."""
    args = eqx.filter(chunk.args, eqx.is_inexact_array)
    return chunk.u0, args, chunk.t0, chunk.t1, chunk.times


def _pull_back(
    setup: Setup, chunk: Chunk, cotangent: Any, saved: Any, moving: bool, room: Any
) -> tuple:
    """The cotangents of `_real_parts(chunk)`, from that of the saved states.

    `saved`: the saved states, their times and how many, where they are wanted; `moving`: whether
    times have cotangents.
    """
    saving, field = setup.plan.saving, setup.field
    at_start = at_end = tuple(map(jnp.zeros_like, chunk.u0))
    rows = cotangent
    if saving.mode == "ends":
        at_end, rows = field.split(_lane_last(cotangent[:, -1])), None
        if saving.start:
            at_start = field.split(_lane_last(cotangent[:, 0]))
    wide, narrow = setup.wide(chunk.args)
    u, t, length = saved or (None, None, None)
    replay = Replay(setup.stepping, setup.field_of, saving, chunk, rows, field.split, wide)
    adjoint, at_u0, grad_args, room = _ADJOINTS[setup.plan.method.value.adjoint](
        replay, Cotangent(at_end, u, t, length), room
    )
    (grad_args,) = narrow(grad_args)
    grad_u0 = map_leaves(jnp.add, at_u0, at_start)
    times = (chunk.t0, chunk.t1, chunk.times)
    if not moving:
        grad_times = jax.tree.map(jnp.zeros_like, times)
    else:
        # A state saved at t0 is u0, whenever that is; but where it is at a time given by saveat.
        at_t0 = at_u0 if saving.mode == "times" else adjoint
        grad_times = _pull_back_times(setup, chunk, cotangent, u, length, at_t0)
    return (grad_u0, grad_args, *grad_times), room


def _pull_back_times(
    setup: Setup, chunk: Chunk, cotangent: Any, u: Any, length: Any, adjoint: Leaves
) -> tuple:
    """The cotangents of `t0`, `t1` and the saved times: those of the states along the field, in the
    lanes of the mask.

    Exact for the solution of the ODE, and so to the tolerances for the one computed.
    """
    field, split = setup.field_of(chunk.args), setup.field.split
    t0, t1, times = chunk.t0, chunk.t1, chunk.times

    def along(adjoint, y, t):
        return jnp.where(chunk.mask, sum_of(jnp.multiply, adjoint, field(y, t)), 0)

    def at_row(i, t):
        # Of rows that are not reached there is no state, and their times may be infinite.
        there = i < length
        adjoint, y = (split(_lane_last(x[:, i])) for x in (cotangent, u))
        found = along(adjoint, select(there, y, chunk.u0), jnp.where(there, t, t0))
        return jnp.where(there, found, 0)

    def at_last(t):
        last = jnp.maximum(length - 1, 0).reshape(-1, *(1,) * (u.ndim - 1))
        rows = (jnp.take_along_axis(x, last, 1)[:, 0] for x in (cotangent, u))
        found = along(*(split(_lane_last(x)) for x in rows), t)
        return jnp.where(length > int(setup.plan.saving.start), found, 0)

    def like(x, value):
        return value if x.ndim else jnp.sum(value)

    grad_t0 = like(t0, -along(adjoint, chunk.u0, t0))
    grad_t1 = jnp.zeros_like(t1)
    if setup.plan.saving.mode != "times":
        grad_t1 = like(t1, at_last(t1))
    if times is None:
        return grad_t0, grad_t1, None
    by_row = [at_row(i, times[..., i]) for i in range(times.shape[-1])]
    grad_times = jnp.stack(by_row, axis=-1)
    return grad_t0, grad_t1, grad_times if times.ndim == 2 else jnp.sum(grad_times, axis=0)


def _lane_last(x: Any) -> Any:
    return jnp.moveaxis(x, 0, -1)
