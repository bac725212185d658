"""Reverse mode by record and replay: the exact adjoint of the steps that were taken.

The backward pass runs a chunk again, recording its steps, and replays them backwards with the step
sizes held constant (the discrete adjoint; Hager, "Runge-Kutta methods in optimal control and the
transformed adjoint system", Numer. Math. 87, 2000). The record has room for one segment of steps.
For earlier segments only checkpoints at their starts are kept, from which they are recorded again.
So the memory grows with the square root of `maxiters`, the cost with the number of steps taken, and
nothing is kept from one chunk to the next.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from ...core.lane import Lane
from ...core.plan import Plan
from ...fields.lanes.field import LaneField
from ...solvers.method import Equations, equations_of, Method
from .leaves import computed_once, LANES, Leaves, map_leaves, over, select
from .loop import advance, lanes_of, of_each_lane, running, start, State
from .stops import has_jumps, steps_between


# The bytes of a record. Longer segments need fewer runs, until they leave the cache.
_RECORD = 2**20


class Record(NamedTuple):
    """The steps of a segment, each field with a leading axis `[step, ...]`; `h` is zero in lanes
    that did not take the step.

    - `carry`: the method's carry at the start of the step, if cotangents pass through it (see
        `_is_chained`); else None.
    - `anew`: whether the carry was made anew from the state, for the first step after a
        discontinuity; None where there are no discontinuities, or no carry is recorded.
    """

    t: Any
    h: Any
    y: Leaves
    carry: Any
    anew: Any = None


class Pulled(NamedTuple):
    """The cotangents, pulled back to the start of a step.

    - `y`, `carry`: the cotangents of the state and of the method's carry (where it is recorded).
    - `grad`: the cotangents of the arguments.
    - `rows`: how many of the saved rows are left, `[lane]`.
    """

    y: Leaves
    carry: Any
    grad: Any
    rows: Any


class Buffers(NamedTuple):
    """Memory for the record of a segment and for the checkpoints, which all chunks use in turn."""

    record: Record
    checkpoints: State


class SavedRows(NamedTuple):
    """The saved states, their times, and the number of rows of each lane."""

    u: Inexact[Array, "lane row *state"]
    t: Float[Array, " row"] | Float[Array, "lane row"]
    length: Int[Array, " lane"]


class Wide(NamedTuple):
    """The arguments of the field in the form in which they are differentiated.

    A number that all lanes share is extended to one number for each lane, so that its cotangents
    are summed over the lanes only once, at the end. The exceptions are numbers that decide what the
    field computes (such as the predicate of a `lax.cond`), which stay single, so that the field
    takes the same branch as forwards.

    - `args`: the arguments whose cotangents are wanted; None in the place of the others, which are
        in `rest`.
    - `has_lanes`: which of `args` have an axis of lanes.
    """

    args: Any
    rest: Any
    has_lanes: Any

    def combined(self, args: Any) -> Any:
        return eqx.combine(args, self.rest)

    def added(self, grad: Any, more: Any, mask: Any) -> Any:
        """The sum of both cotangents, where `more` counts only in the lanes of the mask: it may be
        NaN in the others."""

        def add(x, y, has_lanes):
            return x + jnp.where(over(mask, y), y, jnp.zeros_like(y)) if has_lanes else x + y

        return jax.tree.map(add, grad, more, self.has_lanes)

    @property
    def is_shared(self) -> bool:
        """Whether there are arguments whose cotangents are summed over the lanes in every step."""
        return not all(jax.tree.leaves(self.has_lanes))


def buffers(plan: Plan, like: Lane) -> Buffers | None:
    """Memory for chunks like this one, which may be abstract; None where every step is saved."""
    if plan.saving.mode == "steps":
        return None
    lanes = lanes_of(like)
    mask = jax.ShapeDtypeStruct((lanes,), bool)
    # For the shapes alone, any field will do.
    state = jax.eval_shape(lambda c, mask: start(plan, lambda y, t: y, c, mask), like, mask)
    each = sum(math.prod(x.shape) * x.dtype.itemsize for x in like.u0)
    each += 2 * lanes * like.u0[0].dtype.itemsize
    length = min(plan.maxiters, max(math.isqrt(plan.maxiters - 1) + 1, _RECORD // each))
    segments = -(-plan.maxiters // length)

    def room(n, x):
        return jnp.zeros((n, *x.shape), x.dtype)

    carry = anew = None
    if _is_chained(plan):
        carry = jax.eval_shape(lambda x: of_each_lane(x, lanes), state.carry)
        anew = jax.eval_shape(lambda x: _anew(like, x), state)
    h = jax.ShapeDtypeStruct((lanes,), state.h.dtype)
    record = Record(state.t, h, state.y, carry, anew)
    return Buffers(
        jax.tree.map(lambda x: room(length, x), record),
        jax.tree.map(lambda x: room(segments, x), state),
    )


def _is_chained(plan: Plan) -> bool:
    """Whether cotangents pass through the method's carry from step to step.

    Otherwise the carry is computed from the state again by `init`. But where dense output depends
    on the carry, it is better to pull back through it only once.
    """
    return plan.method.value.method.remembers or plan.saving.mode == "times"


def _anew(chunk: Lane, state: State) -> Any:
    """For each lane, whether the carry for the next step was made anew; None where it never is."""
    if state.stops is None or not has_jumps(chunk):
        return None
    return jnp.broadcast_to(state.stops.anew, (lanes_of(chunk),))


class Replay(NamedTuple):
    """The solve of a chunk that is pulled back through.

    - `mask`: the lanes that succeed; other lanes are not solved.
    - `saved`: the saved states; None where they are not needed.
    - `rows`: the cotangents of the saved states, if any; `end`: the cotangent of the state at `t1`.
    - `wide`: the arguments of the field.
    """

    plan: Plan
    field: LaneField
    chunk: Lane
    mask: Bool[Array, " lane"]
    saved: SavedRows | None
    rows: Inexact[Array, "lane row *state"] | None
    end: Leaves
    wide: Wide

    @property
    def method(self) -> Method:
        return self.plan.method.value.method

    @property
    def mode(self) -> str:
        """The mode of saving: see `core.saving.Saving`."""
        return self.plan.saving.mode

    def equations(self, args: Any) -> Equations:
        """The equations of the field with arguments in the form of `wide`."""
        return equations_of(functools.partial(self.field, self.wide.combined(args)))

    def safe(self, taken: Record) -> Record:
        """The step, moved to the start of the trajectory in lanes that did not take it.

        The field can be evaluated at the start. Elsewhere its derivative may be infinite, and NaN
        when multiplied by a cotangent of zero, which would spoil the sum over the lanes.
        """
        if not self.wide.is_shared:
            return taken
        took, t = taken.h != 0, taken.t
        if t.ndim:
            t = jnp.where(took, t, self.chunk.t0)
        y, carry = select(took, taken.y, self.chunk.u0), _where(took, taken.carry)
        return taken._replace(t=t, y=y, carry=carry)


def pull_back(
    replay: Replay, room: Buffers | None, through: Callable | None = None
) -> tuple[Leaves, Any, Buffers | None]:
    """Pull back through a chunk. The cotangents of lanes that are not in the mask are zero.

    **Arguments:** `through`: pulls back through one step, by default through the step itself.

    **Returns:** the cotangents of `u0` (which may also be saved) and of `wide.args`; and
    the memory, to be used again.
    """
    chunk, mask, args = replay.chunk, replay.mask, replay.wide.args
    grad = jax.tree.map(jnp.zeros_like, args)
    replayed = functools.partial(_replay_all, replay, through or _replay_one)

    def pulled_from(record, rows):
        carry = None
        if through is None:
            carry = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), record.carry)
        return Pulled(replay.end, carry, grad, rows)

    if room is None:
        assert replay.saved is not None
        length = jnp.where(mask, replay.saved.length, 0)
        record, steps = _record_saved(replay, replay.saved._replace(length=length))
        if replay.method.remembers:
            record = record._replace(carry=_carried(replay, record))
        pulled = replayed(record, steps, pulled_from(record, length))
    else:
        pulled = pulled_from(room.record, _rows_saved(replay))
        pulled, room = _replay_segments(replay, replayed, pulled, room)
    adjoint, grad = pulled.y, pulled.grad
    if jax.tree.leaves(pulled.carry):

        def first(y, args):
            carry = replay.method.init(LANES, replay.equations(args), y, chunk.t0)
            return of_each_lane(carry, lanes_of(chunk))

        _, pull_first = jax.vjp(first, chunk.u0, args)
        more, more_grad = pull_first(pulled.carry)
        moved = mask & (chunk.t0 != chunk.t1)
        adjoint = select(moved, map_leaves(jnp.add, adjoint, more), adjoint)
        grad = replay.wide.added(grad, more_grad, moved)
    if replay.rows is not None:
        adjoint = _add_start(replay, adjoint, pulled.rows)
    return adjoint, grad, room


def _replay_segments(replay, replayed, pulled, room) -> tuple:
    """Record and replay the segments, the last first."""
    plan, chunk = replay.plan, replay.chunk
    field = functools.partial(replay.field, chunk.p)
    state = start(plan, field, chunk, replay.mask)
    last, state, room, length = _record_all(plan, field, chunk, state, room)

    def going(carry):
        return carry[0] >= 0

    def segment(carry):
        number, again, length, record, pulled = carry
        # The segment is recorded before it is replayed, as XLA would copy the record otherwise.
        state = _read(room.checkpoints, number)
        _, record, steps = _record_segment(plan, field, chunk, state, record, again)
        length = jnp.where(again, steps, length)
        return number - 1, jnp.array(True), length, record, replayed(record, length, pulled)

    # The last segment is in the record already.
    carry = (last, jnp.array(False), length, room.record, pulled)
    *_, record, pulled = jax.lax.while_loop(going, segment, carry)
    return pulled, Buffers(record, room.checkpoints)


#
# Recording
#


def _record_all(plan, field, chunk, state, room) -> tuple:
    """Run to the end, keeping checkpoints; the last segment stays in the record."""

    def going(carry):
        return running(carry[1])

    def segment(carry):
        number, state, record, checkpoints, _ = carry
        number = number + 1
        checkpoints = _write(checkpoints, number, state)
        state, record, length = _record_segment(plan, field, chunk, state, record, True)
        return number, state, record, checkpoints, length

    none = jnp.zeros((), jnp.int32)
    carry = (none - 1, state, *room, none)
    number, state, record, checkpoints, length = jax.lax.while_loop(going, segment, carry)
    return number, state, Buffers(record, checkpoints), length


def _record_segment(plan, field, chunk, state, record, wanted) -> tuple:
    """Run until the record is full, or all lanes are done."""
    room = record.t.shape[0]

    def going(carry):
        state, _, length = carry
        return wanted & (length < room) & running(state)

    def one(carry):
        state, record, length = carry
        carried = anew = None
        if record.carry is not None:
            carried, anew = of_each_lane(state.carry, lanes_of(chunk)), _anew(chunk, state)
        state, tried = advance(plan, field, chunk, state)
        h = jnp.where(tried.accepted, tried.h, jnp.zeros_like(tried.h))
        taken = Record(tried.t, h, tried.y, carried, anew)
        return state, _write(record, length, taken), length + 1

    return jax.lax.while_loop(going, one, (state, record, jnp.zeros((), jnp.int32)))


def _record_saved(replay: Replay, saved: SavedRows) -> tuple:
    """The record of all steps, where every step was saved; and the number of steps.

    Running the solve again would be another program, which may take different steps because it
    rounds differently.
    """
    chunk, u, t = replay.chunk, jnp.moveaxis(saved.u, (0, 1), (-1, 0)), saved.t.T
    y, length = jax.vmap(replay.field.split)(u), saved.length
    if not replay.plan.saving.start:
        t = jnp.concatenate([jnp.broadcast_to(chunk.t0, (1, t.shape[1])), t])
        y = map_leaves(lambda x, u0: jnp.concatenate([u0[None], x]), y, chunk.u0)
        length = length + 1
    steps = jnp.arange(t.shape[0] - 1, dtype=length.dtype)
    took = steps[:, None] < length[None] - 1
    begins, h = steps_between(chunk, t, jnp.sign(chunk.t1 - chunk.t0))
    h = jnp.where(took, h, 0)
    t = jnp.where(took, begins, chunk.t0 if chunk.t0.ndim == 0 else chunk.t0[None])

    def finite(x, u0):
        wide = took.reshape(len(steps), *(1,) * (x.ndim - 2), -1)
        return jnp.where(wide, x[:-1], u0[None])

    return Record(t, h, map_leaves(finite, y, chunk.u0), None), jnp.max(length) - 1


def _carried(replay: Replay, record: Record) -> Any:
    """The method's carry at the start of each step of the record."""
    method, equations = replay.method, equations_of(functools.partial(replay.field, replay.chunk.p))
    t, _, y, *_ = _read(record, 0)

    def one(carry, taken):
        t, h, y, *_ = taken
        attempt = method.step(LANES, equations, y, carry, t, h)
        return _where(h != 0, attempt.carry, carry), carry

    start = method.init(LANES, equations, y, t)
    return jax.lax.scan(one, of_each_lane(start, t.shape[-1]), record)[1]


def _where(mask: Any, carry: Any, other: Any = None) -> Any:
    """The carry (or its cotangents) in the lanes of the mask, and `other` in the others; by default
    zero."""
    if other is None:
        other = jax.tree.map(jnp.zeros_like, carry)
    return jax.tree.map(lambda x, y: jnp.where(over(mask, x), x, y), carry, other)


def _write(arrays: Any, i: Any, values: Any) -> Any:
    return jax.tree.map(
        lambda a, x: jax.lax.dynamic_update_index_in_dim(a, x, i, 0), arrays, values
    )


def _read(arrays: Any, i: Any) -> Any:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False), arrays)


#
# Replaying
#


def _replay_all(
    replay: Replay, through: Callable, record: Record, length: Any, pulled: Pulled
) -> Pulled:
    def one(carry):
        i, pulled = carry
        i = i - 1
        taken = _read(record, i)
        some = jnp.any(taken.h != 0)
        return i, jax.lax.cond(some, lambda: through(replay, taken, pulled), lambda: pulled)

    return jax.lax.while_loop(lambda carry: carry[0] > 0, one, (length, pulled))[1]


def _replay_one(replay: Replay, taken: Record, pulled: Pulled) -> Pulled:
    """Pull the cotangents back through one step."""
    adjoint, to_carry, grad, rows = pulled
    t, h, y, carry, anew = replay.safe(taken)
    method, took = replay.method, h != 0
    is_dense = replay.mode == "times"

    def forward(y, carry, args):
        equations = replay.equations(args)
        given = carry
        if carry is None or anew is not None:
            given = method.init(LANES, equations, y, t)
        if anew is not None:
            given = _where(anew, of_each_lane(given, lanes_of(replay.chunk)), carry)
        attempt = method.step(LANES, equations, y, given, t, h)
        after = None if carry is None else attempt.carry
        if not is_dense:
            return attempt.y2, after, ()
        return attempt.y2, after, method.dense(LANES, equations, y, attempt.dense, t, h)

    (_, _, dense), pullback = jax.vjp(forward, y, carry, replay.wide.args)
    direct, to_dense = jax.tree.map(jnp.zeros_like, (y, dense))
    if replay.mode == "steps":
        adjoint, rows = add_end(replay, taken, adjoint, rows)
    if is_dense:
        direct, to_dense, rows = _rows_within(replay, taken, dense, (direct, to_dense, rows))
    adjoint_y, carry_before, grad_args = pullback((adjoint, _where(took, to_carry), to_dense))
    to_carry = _where(took, carry_before, to_carry)
    adjoint = select(took, map_leaves(jnp.add, adjoint_y, direct), adjoint)
    return Pulled(adjoint, to_carry, replay.wide.added(grad, grad_args, took), rows)


def add_end(replay: Replay, taken: Record, adjoint: Leaves, rows: Any) -> tuple[Leaves, Any]:
    """Add the cotangent of the state that was saved at the end of the step."""
    taken_here = taken.h != 0
    row = jnp.where(taken_here, rows - 1, 0)
    at_end = cotangents_of(replay, row)
    adjoint = select(taken_here, map_leaves(jnp.add, adjoint, at_end), adjoint)
    return adjoint, rows - taken_here.astype(rows.dtype)


def _rows_within(replay: Replay, taken: Record, dense: tuple, carry: tuple) -> tuple:
    """Add the cotangents of the states that were saved within the step."""
    times, direction = replay.chunk.saveat, jnp.sign(replay.chunk.t1 - replay.chunk.t0)
    t, h = taken.t, taken.h
    took = h != 0

    def pulled(theta, ct):
        def state(y, dense):
            return replay.method.interpolate(LANES, y, dense, h, theta)

        return jax.vjp(state, taken.y, dense)[1](ct)

    def last(rows):
        """The time of the last row, and whether it lies in the step."""
        time = time_of(times, jnp.maximum(rows - 1, 0))
        return computed_once((time, (rows > 0) & took & (direction * (time - t) > 0)))

    def one(carry):
        direct, to_dense, rows, time, here = carry
        theta = jnp.where(here, (time - t) / jnp.where(here, h, 1), 0)
        ct = cotangents_of(replay, jnp.maximum(rows - 1, 0))
        ct = computed_once(map_leaves(lambda x: jnp.where(over(here, x), x, 0), ct))
        direct, to_dense = jax.tree.map(jnp.add, (direct, to_dense), pulled(theta, ct))
        rows = rows - here.astype(rows.dtype)
        return direct, to_dense, rows, *last(rows)

    carry = (*carry, *last(carry[2]))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[4]), one, carry)[:3]


def time_of(times: Any, row: Any) -> Any:
    """The time of row `row` of each lane."""
    if times.ndim == 1:
        return times[row]
    return jnp.take_along_axis(times, row[:, None], axis=1)[:, 0]


def cotangents_of(replay: Replay, row: Any) -> Leaves:
    """The cotangents of row `row` of each lane."""
    assert replay.rows is not None
    lane = jnp.arange(len(replay.mask), dtype=row.dtype)
    return replay.field.split(jnp.moveaxis(replay.rows[lane, row], 0, -1))


def _rows_saved(replay: Replay) -> Any:
    """How many rows were written, in lanes that succeeded."""
    if replay.mode == "ends":
        return jnp.zeros(len(replay.mask), jnp.int32)
    count = jnp.sum(jnp.isfinite(replay.chunk.saveat), axis=-1, dtype=jnp.int32)
    return jnp.where(replay.mask, count, 0)


def _add_start(replay: Replay, adjoint: Leaves, rows: Any) -> Leaves:
    """Add the cotangents of the rows saved at the start."""

    def one(carry):
        adjoint, rows = carry
        left = rows > 0
        ct = cotangents_of(replay, jnp.maximum(rows - 1, 0))
        adjoint = select(left, map_leaves(jnp.add, adjoint, ct), adjoint)
        return adjoint, rows - left.astype(rows.dtype)

    return jax.lax.while_loop(lambda c: jnp.any(c[1] > 0), one, (adjoint, rows))[0]
