"""The events of a solution, and where it stopped."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.retcode import is_successful, ReturnCodes, was_ended
from ..tracing.program import is_tracer


class Events(eqx.Module):
    """The events of callbacks, one after another; for several trajectories, these are the first
    axis.

    - `t [event]`: the times.
    - `which [event]`: the number of the callback, counted from 0.
    - `direction [event]`: whether its condition rose (1) or fell (-1) through zero; for a discrete
        callback it is 1. With a vector callback it has an entry for each of the conditions,
        `[event, condition]`, which is 0 where a condition did not cross.
    - `u_before`, `u_after [event, *state]`: the states, in the structure of `u`.
    - `count []`: the number of events.

    Outside of `jit`, these are NumPy arrays, so that an index past the last event is an error.
    Where a trajectory had fewer events than others, the rest is NaN, and `which` is -1. Callbacks
    with `save_positions=(False, False)` have no entries.
    """

    t: Any
    which: Any
    direction: Any
    u_before: PyTree
    u_after: PyTree
    count: Any


def first_events(events: Events, most: int, *, several: bool) -> Events:
    """The first `most` events of a trajectory, or of each of several; as NumPy arrays, since JAX's
    answer an index past the end with the last event."""
    part = (slice(None), slice(most)) if several else slice(most)
    rows = dataclasses.replace(events, count=None)
    rows = jax.tree.map(lambda x: x[part] if is_tracer(x) else np.asarray(x[part]), rows)
    return dataclasses.replace(rows, count=events.count)


class End(eqx.Module):
    """Where trajectories have stopped: at the event that ended them, and otherwise at the last time
    that was saved. For several trajectories, these are the first axis.

    - `t []`: the times.
    - `u [*state]`: the states, after the event.
    - `integral`, `p_at`, `noise`: those of the solution there.

    Trajectories that failed have no end; theirs is NaN.
    """

    t: Any
    u: PyTree
    integral: PyTree = None
    p_at: PyTree = None
    noise: PyTree = None


def end_by(t: np.ndarray, u_after: PyTree, count: np.ndarray, retcode: ReturnCodes) -> End:
    """The ends of several trajectories that were ended by an event, their last one; NaN for other
    trajectories, and where that event isn't among those given."""
    last, room = jnp.asarray(count) - 1, t.shape[1]
    known = was_ended(jnp.asarray(retcode)) & (last >= 0) & (last < room)

    def at(x: Any) -> Any:
        x = jnp.asarray(x)
        if not room:
            return jnp.full_like(x, jnp.nan, shape=(len(x), *x.shape[2:]))
        return _where(known, _taken_from_rows(x, jnp.clip(last, 0, room - 1)), jnp.nan)

    return End(at(t), jax.tree.map(at, u_after))


def end_of(rows: End, ended: End | None, lengths: np.ndarray, retcode: np.ndarray) -> End:
    """The ends of several trajectories, of which `rows` were saved, `[trajectory, time, ...]`; for
    `ended` see `with_end`."""
    last = jnp.clip(jnp.asarray(lengths) - 1, 0)
    end = jax.tree.map(lambda x: _taken_from_rows(jnp.asarray(x), last), rows)
    if ended is not None:
        is_end = was_ended(jnp.asarray(retcode))
        end = jax.tree.map(lambda x, y: _where(is_end, jnp.asarray(x), y), ended, end)
    stopped = is_successful(jnp.asarray(retcode))
    return jax.tree.map(lambda x: _where(stopped, x, jnp.nan), end)


def with_end(
    rows: End, ended: End | None, length: ArrayLike, retcode: ReturnCodes, *, adds: bool
) -> tuple[End, Any]:
    """The saved `rows` of one trajectory, `[time, ...]`, with its end in the last row, unless it
    has failed; and how many rows were reached, counting the end. `ended` is the end by an event:
    NaN if no event ended the trajectory, None if none may. `length` is the number of rows that were
    reached without the end, and `adds` says whether a row is added for the end."""
    rows, length = jax.tree.map(jnp.asarray, (rows, length))
    if adds:
        rows = jax.tree.map(lambda x: jnp.concatenate([x, x[-1:]]), rows)
    last, start = jnp.clip(length - 1, 0), length
    end = jax.tree.map(lambda x: x[last], rows)
    if ended is not None:
        is_end = jnp.asarray(was_ended(retcode))
        there = jax.tree.leaves(jax.tree.map(lambda x, y: jnp.all(x == y), ended, end))
        lacks = is_end & ~jnp.all(jnp.stack(there))
        end = jax.tree.map(lambda x, y: jnp.where(is_end, x, y), ended, end)
        start = jnp.where(lacks, jnp.minimum(length, rows.t.size - 1), length)
        length = jnp.where(lacks, start + 1, length)
    lacks = (start < rows.t.size) & is_successful(retcode)
    rows = jax.tree.map(lambda x, y: x.at[-1].set(jnp.where(lacks, y, x[-1])), rows, end)
    return rows, length


def cut(rows: PyTree, length: int, count: int) -> PyTree:
    """The first `length` rows; where `count` is larger than `length`, the last row follows them."""
    if count <= length:
        return jax.tree.map(lambda x: x[: max(1, length)], rows)
    return jax.tree.map(lambda x: jnp.concatenate([x[:length], x[-1:]]), rows)


def _taken_from_rows(x: Any, place: Array) -> Array:
    """The entry at this place of each row of `x`."""
    return jnp.take_along_axis(x, place.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]


def _where(mask: Any, x: Array, y: ArrayLike) -> Array:
    x = jnp.asarray(x)
    return jnp.where(mask.reshape(-1, *(1,) * (max(x.ndim, jnp.ndim(y)) - 1)), x, y)
