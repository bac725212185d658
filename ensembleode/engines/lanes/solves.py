"""Solves over lanes, chunk by chunk, from start to end."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ...core.lane import Lane
from ...core.plan import Plan, Result
from ...fields.lanes.field import LaneField
from ..compiled.stopping import stopped
from ..results import Left, result_of
from .chunks import chunk_of, in_chunks, lane_field, merged, width_in
from .loop import advance, attempt, conclude, running, start, State
from .saved_rows import first_output, lane_first, save
from .stops import has_jumps


# The number of turns after which the flag that stops the loop is read.
_TURNS = 256


def solve(plan: Plan, lanes: Lane, mask: Any) -> Result:
    """The result of these trajectories, solved chunk by chunk in turn; it has times only where each
    trajectory has its own.

    **Arguments:**

    - `lanes`: the numbers, with a leading axis on the leaves that `plan.batched` marks.
    - `mask`: false for trajectories that are not to be solved, and only fill a place: [n].
    """
    n = len(mask)
    field = lane_field(plan)
    width = width_in(plan, field, n)
    every, shared = eqx.partition(lanes, plan.batched)
    chunks = -(-n // width)
    every = jax.tree.map(lambda x: in_chunks(x, chunks, width), every)
    wanted = in_chunks(jnp.asarray(mask), chunks, width)
    wanted = wanted & jnp.asarray(np.arange(chunks * width).reshape(chunks, width) < n)

    one = functools.partial(_solve_chunk, plan, field, shared)
    if chunks > 1:
        result = jax.lax.map(one, (every, wanted))
    else:
        result = one(jax.tree.map(lambda x: x[0], (every, wanted)))
        result = jax.tree.map(lambda x: x[None], result)
    return jax.tree.map(lambda x: merged(x)[:n], result)


def rows(plan: Plan, lanes: Lane, mask: Any) -> list[Any]:
    """See `closed.Closed`."""
    u = solve(plan, lanes, mask).u
    return [u[:, -1:] if plan.saving.mode == "ends" else u]


def _solve_chunk(plan: Plan, field: LaneField, shared: Lane, numbers: tuple) -> Result:
    """The result of a chunk, whose lanes are all integrated to their ends.

    **Arguments:** `numbers`: those that differ between lanes, with the lanes first, and the mask.
    """
    every, mask = numbers
    chunk = chunk_of(plan, field, every, shared, len(mask))
    if plan.method.value.direction != "forward":
        # The barrier gives the same bits, whatever the program has done with these numbers
        # before.
        chunk, mask = jax.lax.optimization_barrier((chunk, mask))

    at = functools.partial(field, chunk.p)

    def body(carry):
        state, out = carry
        state, step = advance(plan, at, chunk, state)
        return state, out if out is None else save(plan, field, chunk, step, out)

    state = start(plan, at, chunk, mask)
    carry = state, first_output(plan, field, chunk, state)
    state, out = jax.lax.while_loop(*turns(body, lambda carry: carry[0], chunk.stop), carry)
    state = conclude(plan, chunk, state, functools.partial(attempt, plan, at, chunk))
    if out is None:
        u, t, count = lane_first(field.join(state.y))[:, None], None, state.naccept
    else:
        u, t, count = out.u, out.t, out.row
    restarts = None
    if state.stops is not None and has_jumps(chunk):
        restarts = jnp.broadcast_to(state.stops.restarts, state.code.shape)
    counts = state.code.astype(jnp.int8), state.naccept, state.ntried, restarts
    return result_of(plan, eqx.combine(every, shared), Left(u, t, count, *counts))


def turns(body: Callable, state_of: Callable[[Any], State], stop: Any) -> tuple[Callable, Callable]:
    """The condition and the body of a loop that takes turns until no lane goes on, or until the
    flag is set (see `Lane.stop`)."""

    def going(carry):
        return running(state_of(carry))

    if stop is None:
        return going, body

    def some(carry):
        first = state_of(carry).tries

        def soon(carry):
            return going(carry) & (state_of(carry).tries - first < _TURNS)

        return jax.lax.while_loop(soon, body, carry)

    return lambda carry: going(carry) & ~stopped(stop, state_of(carry).tries), some
