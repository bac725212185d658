"""Solves over lanes, and the way back through them, for derivatives (see `engines/derivatives.py`).
Replay has derivatives of any order; a continuous adjoint only has the first, in reverse mode."""

import dataclasses
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ...core.lane import Lane
from ...core.plan import Plan, Result
from ..along import where
from ..flow import Flow, Known, own_of, reals_of, with_own, with_reals
from .chunks import chunk_of, in_chunks, Setup, setup_of, solve_chunks
from .continuous_adjoints import backsolve, gauss
from .loop import Chunk
from .replay import buffers, Cotangent, pull_back as replayed, Replay, SavedRows


# The function that pulls back through a chunk, by the name of its `sensealg`.
_ADJOINTS = {"ReplayAdjoint": replayed, "GaussAdjoint": gauss, "BacksolveAdjoint": backsolve}


class Found(NamedTuple):
    """Further data of solved trajectories: how many `steps` they took, `[trajectory]`, and the
    `saved` states, where they are needed."""

    steps: Int[Array, "lane"]
    saved: SavedRows | None = None


def solve(plan: Plan, lanes: Lane, mask: Any) -> Result:
    """The result of these trajectories, solved chunk by chunk in turn; it has times only where each
    trajectory has its own.

    **Arguments:**

    - `lanes`: the numbers, with a leading axis on the leaves that `plan.batched` marks.
    - `mask`: false for trajectories that are not to be solved, and only fill a place: [n].
    """
    n = len(mask)
    setup = setup_of(plan, lanes, n)
    width = setup.width
    every, shared = eqx.partition(lanes, plan.batched)
    chunks = -(-n // width)
    every = jax.tree.map(lambda x: in_chunks(x, chunks, width), every)
    wanted = in_chunks(jnp.asarray(mask), chunks, width)
    wanted = wanted & jnp.asarray(np.arange(chunks * width).reshape(chunks, width) < n)
    result = solve_chunks(setup, every, shared, wanted)
    return jax.tree.map(lambda x: _merged(x)[:n], result)


def rows(plan: Plan, lanes: Lane, mask: Any) -> Any:
    """The saved states of these trajectories; where only ends are saved, their last states."""
    u = solve(plan, lanes, mask).u
    return u[:, -1:] if plan.saving.mode == "ends" else u


def pull_back(flow: Flow, lanes: Lane, known: Known, cotangent: Any) -> list:
    """See `closed.Closed`."""
    own = own_of(flow.plan)
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
    chunked = setup_of(plan, lanes, flow.n)
    own, reals = own_of(plan), reals_of(plan, lanes)
    every = [lanes.u0, *(x for x, o in zip(reals, own, strict=True) if o)]
    shared = [x for x, o in zip(reals, own, strict=True) if not o]
    fixed_every, fixed_shared = eqx.partition(lanes, plan.batched)
    order, back, ok = _by_cost(chunked, steps, known.ok)

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
            lane = with_reals(plan, lane, [next(each if o else rest) for o in own])
            lane, rest = eqx.partition(lane, plan.batched)
            chunk = chunk_of(chunked, lane, rest, ok)
            return (chunk.u0, eqx.filter(chunk.args, eqx.is_inexact_array)), chunk

        _, pullback, chunk = jax.vjp(numbers_of, here, shared, has_aux=True)
        grads, room = _pull_back(chunked, chunk, where(ok, c), saved_here, room)
        # If no lane succeeded, all numbers are those of a lane that failed.
        some = jnp.any(ok)
        grads = jax.tree.map(lambda x: jnp.where(some, x, jnp.zeros_like(x)), grads)
        grad_every, more_shared = pullback(grads)
        return (room, jax.tree.map(jnp.add, grad_shared, more_shared)), grad_every

    like = jax.eval_shape(
        lambda which: chunk_of(
            chunked, jax.tree.map(lambda x: x[which], fixed_every), fixed_shared, ok[0]
        ),
        order[0],
    )
    room = None
    if solver.adjoint != "BacksolveAdjoint":
        room = buffers(chunked.stepping, saving, like)
    zero = jax.tree.map(jnp.zeros_like, shared)
    (_, grad_shared), grad_every = jax.lax.scan(one, (room, zero), (order, ok))
    u0, *each = [_merged(x)[back] for x in grad_every]
    each, rest = iter(each), iter(grad_shared)
    return [u0, *(next(each) if o else next(rest)[None] for o in own)]


def _by_cost(setup: Setup, steps: Any, ok: Any) -> tuple:
    """Trajectories arranged in chunks of about equal numbers of steps, since a chunk takes as long
    as its slowest lane.

    **Returns:** the number of the trajectory at each place, `[chunk, lane]`; the place of each
    trajectory, `[trajectory]`; and a mask of the places whose trajectory succeeded.
    """
    n = len(steps)
    chunks = -(-n // setup.width)
    places = chunks * setup.width
    here = np.arange(places, dtype=np.int32)
    order = back = here
    if setup.stepping.controller is not None and chunks > 1:
        order = jnp.argsort(jnp.pad(steps, (0, places - n))).astype(np.int32)
        back = jnp.zeros_like(order).at[order].set(here, unique_indices=True)
    succeeded = jnp.pad(ok, (0, places - n))[order]
    shape = chunks, setup.width
    return jnp.minimum(order, n - 1).reshape(shape), back[:n], succeeded.reshape(shape)


def _merged(x: Any) -> Any:
    """An array with its axes of chunks and lanes joined."""
    return x.reshape(-1, *x.shape[2:])


def _pull_back(
    setup: Setup, chunk: Chunk, cotangent: Any, saved: SavedRows | None, room: Any
) -> tuple:
    """The cotangents of the initial states and of the real arguments, from the cotangent of the
    rows.

    **Arguments:** `saved`: the saved states, where they are needed.
    """
    saving, field = setup.plan.saving, setup.field
    at_end = tuple(map(jnp.zeros_like, chunk.u0))
    rows = cotangent
    if saving.mode == "ends":
        at_end, rows = field.split(jnp.moveaxis(cotangent[:, 0], 0, -1)), None
    wide, narrow = setup.wide(chunk.args)
    replay = Replay(setup.stepping, setup.field_of, saving, chunk, rows, field.split, wide)
    _, at_u0, grad_args, room = _ADJOINTS[setup.plan.method.value.adjoint](
        replay, Cotangent(at_end, saved), room
    )
    (grad_args,) = narrow(grad_args)
    return (at_u0, grad_args), room
