"""The way back through solves over lanes, for derivatives (see `engines/derivatives.py`). Replay
has derivatives of any order; a continuous adjoint only has the first, in reverse mode."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ...core.lane import Lane
from ...core.plan import Plan
from ...fields.lanes.field import LaneField
from ..along import where
from ..flow import Flow, Known, with_own, with_wanted
from .chunks import chunk_of, lane_field, merged, width_back
from .continuous_adjoints import backsolve, gauss
from .loop import lanes_of
from .replay import buffers, pull_back as replayed, Replay, SavedRows, Wide
from .solves import solve


# The function that pulls back through a chunk, by the name of its `sensealg`.
_ADJOINTS = {"ReplayAdjoint": replayed, "GaussAdjoint": gauss, "BacksolveAdjoint": backsolve}


class Found(NamedTuple):
    """Further data of solved trajectories: how many `steps` they took, `[trajectory]`, and the
    `saved` states, where they are needed."""

    steps: Int[Array, " lane"]
    saved: SavedRows | None = None


def pull_back(flow: Flow, lanes: Lane, known: Known, cotangents: Sequence) -> list:
    """See `closed.Closed`."""
    own, (cotangent,) = flow.own, cotangents
    if flow.groups == 1:
        return _pulled_back(flow, lanes, known, cotangent)
    alone, lanes = with_own(dataclasses.replace(flow, groups=1), lanes, [True] * len(own))
    u0, *parameters = _pulled_back(alone, lanes, known, cotangent)

    def summed(x, is_own):
        return x if is_own else where(known.ok, x).reshape(flow.groups, -1, *x.shape[1:]).sum(1)

    return [u0, *map(summed, parameters, own)]


def _pulled_back(flow: Flow, lanes: Lane, known: Known, cotangent: Any) -> list:
    """`pull_back` for a single group, chunk by chunk; cotangents of shared numbers are summed."""
    plan = flow.plan
    solver, saving = plan.method.value, plan.saving
    steps, saved = known.more
    if saving.mode == "steps" and plan.controlled < math.prod(plan.state.shape):
        # The saved states don't have the tangents, so the trajectories are solved again.
        result = solve(plan, lanes, known.ok)
        saved = SavedRows(result.u, result.t, result.length)
    field = lane_field(plan)
    width = width_back(plan, field, flow.n)
    own, wanted = flow.own, flow.wanted_of(lanes)
    every = [lanes.u0, *(x for x, o in zip(wanted, own, strict=True) if o)]
    shared = [x for x, o in zip(wanted, own, strict=True) if not o]
    moving = tuple(i in flow.wanted for i in range(len(lanes.parameters)))
    fixed_every, fixed_shared = eqx.partition(lanes, plan.batched)
    order, back, ok = _by_cost(solver.adaptive, width, steps, known.ok)

    def one(carry, which):
        room, grad_shared = carry
        which, ok = which
        # A failed lane is not solved again. Its numbers may be infinite or NaN, so they are
        # replaced by those of a lane that succeeded, which keeps products with shared weights
        # finite.
        which = jnp.where(ok, which, which[jnp.argmax(ok)])
        here, fixed, c, saved_here = jax.tree.map(
            lambda x: x[which], (every, fixed_every, cotangent, saved)
        )

        def numbers_of(every, shared):
            u0, *each = every
            each, rest = iter(each), iter(shared)
            lane = eqx.combine(fixed, fixed_shared)._replace(u0=u0)
            lane = with_wanted(flow, lane, [next(each if o else rest) for o in own])
            lane, rest = eqx.partition(lane, plan.batched)
            chunk = chunk_of(plan, field, lane, rest, width)
            return (chunk.u0, eqx.filter(chunk.p, moving)), chunk

        _, pullback, chunk = jax.vjp(numbers_of, here, shared, has_aux=True)
        grads, room = _through_chunk(plan, field, chunk, moving, ok, where(ok, c), saved_here, room)
        # If no lane succeeded, all numbers are those of a lane that failed.
        some = jnp.any(ok)
        grads = jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), grads)
        grad_every, more_shared = pullback(grads)
        return (room, jax.tree.map(jnp.add, grad_shared, more_shared)), grad_every

    like = jax.eval_shape(
        lambda which: chunk_of(
            plan, field, jax.tree.map(lambda x: x[which], fixed_every), fixed_shared, width
        ),
        order[0],
    )
    room = None
    if solver.adjoint != "BacksolveAdjoint":
        room = buffers(plan, like)
    zero = jax.tree.map(jnp.zeros_like, shared)
    (_, grad_shared), grad_every = jax.lax.scan(one, (room, zero), (order, ok))
    u0, *each = [merged(x)[back] for x in grad_every]
    each, rest = iter(each), iter(grad_shared)
    return [u0, *(next(each) if o else next(rest)[None] for o in own)]


def _by_cost(adaptive: bool, width: int, steps: Any, ok: Any) -> tuple:
    """Trajectories arranged in chunks of about equal numbers of steps, since a chunk takes as long
    as its slowest lane.

    **Returns:** the number of the trajectory at each place, `[chunk, lane]`; the place of each
    trajectory, `[trajectory]`; and a mask of the places whose trajectory succeeded.
    """
    n = len(steps)
    chunks = -(-n // width)
    places = chunks * width
    here = np.arange(places, dtype=np.int32)
    order = back = here
    if adaptive and chunks > 1:
        order = jnp.argsort(jnp.pad(steps, (0, places - n))).astype(np.int32)
        back = jnp.zeros_like(order).at[order].set(here, unique_indices=True)
    succeeded = jnp.pad(ok, (0, places - n))[order]
    shape = chunks, width
    return jnp.minimum(order, n - 1).reshape(shape), back[:n], succeeded.reshape(shape)


def _wide(field: LaneField, args: Any, moving: Sequence[bool], width: int) -> tuple[Wide, Callable]:
    """The field's arguments widened for differentiation by those that are `moving`, and a function
    that pulls their cotangents back to the arguments as they were."""
    real, rest = eqx.partition(args, moving)
    flags = zip(real, field.batched, field.deciding, strict=True)
    has_lanes = tuple(
        jax.tree.map(lambda x, b=b, d=d: b or (x.ndim == 0 and not d), arg) for arg, b, d in flags
    )

    def widened(real):
        def one(x, has_lanes):
            return jnp.broadcast_to(x, (width,)) if has_lanes and not x.ndim else x

        return jax.tree.map(one, real, has_lanes)

    args, narrow = jax.vjp(widened, real)
    return Wide(args, rest, has_lanes), narrow


def _through_chunk(
    plan: Plan,
    field: LaneField,
    chunk: Lane,
    moving: Sequence[bool],
    ok: Any,
    cotangent: Any,
    saved: SavedRows | None,
    room: Any,
) -> tuple:
    """The cotangents of the initial states and of the arguments that are `moving`, from the
    cotangent of the rows.

    **Arguments:** `saved`: the saved states, where they are needed.
    """
    at_end = tuple(map(jnp.zeros_like, chunk.u0))
    rows = cotangent
    if plan.saving.mode == "ends":
        at_end, rows = field.split(jnp.moveaxis(cotangent[:, 0], 0, -1)), None
    wide, narrow = _wide(field, chunk.p, moving, lanes_of(chunk))
    replay = Replay(plan, field, chunk, ok, saved, rows, at_end, wide)
    at_u0, grad_args, room = _ADJOINTS[plan.method.value.adjoint](replay, room)
    (grad_args,) = narrow(grad_args)
    return (at_u0, grad_args), room
