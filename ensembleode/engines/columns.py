"""The columns of a matrix by compiled code: one time and one step size for all trajectories.

The time loop is that of the lanes engine with a single lane. Its state stays in a kernel's memory:
each attempt of a step is a call of `compiled.column_step`, which threads share. The norm of the
error is summed up here, over the columns in their order, so it doesn't depend on the threads.

The derivatives are those of the accepted steps, held constant. They are known times of a solve of
the trajectories one by one with a step of the whole span, by the compiled engine.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import sensitivity
from ..core.lane import Lane
from ..core.plan import Plan, Result
from ..fields.lanes.field import LaneField
from ..ground.alone import alone
from ..solvers.method import Attempt
from ..solvers.norms import MaxNorm
from ..tracing.program import Program, Static
from .compiled import column_step
from .compiled.call import call
from .compiled.solves import described, operands
from .derivatives import differentiable
from .lanes.chunks import chunk_of
from .lanes.loop import attempt_with, conclude, decide, start, State, Tried
from .lanes.solves import turns
from .results import for_one, Left, result_of, with_times


# A thread gets at least this many vectors of columns, and threads share an attempt of at least this
# many operations on vectors: asking for help takes some microseconds.
_VECTORS, _WORTH_SHARING = 4, 50_000


class _Stepped(NamedTuple):
    """The result of the time loop, with an axis of one trajectory, the matrix; and the ends of the
    accepted steps, infinitely far behind the last one."""

    result: Result
    ends: Any


def solve(plan: Plan, lanes: Lane, matrix_plan: Plan, matrix: Lane, n: int) -> Result:
    """The solutions of `n` trajectories with the same steps, with the trajectories along the first
    axis.

    **Arguments:** `matrix_plan`, `matrix`: the same for the matrix of all trajectories.
    """
    solver = plan.method.value
    fixed = jax.lax.stop_gradient((lanes, matrix))
    stepped = functools.partial(_stepped, plan, matrix_plan, n)
    # Under `vmap` it runs once for each entry.
    found = alone(jax.custom_batching.sequential_vmap(stepped), *fixed)
    result = _by_trajectory(plan, found.result, n)
    if solver.adaptive:
        plan, lanes = _with_steps(plan, lanes, found.ends)
    result = differentiable(plan, lanes, jnp.ones(n, bool), result)
    if solver.direction == "forward":
        result = sensitivity.forward_only(result)
    return with_times(plan, lanes, result)


def _by_trajectory(plan: Plan, result: Result, n: int) -> Result:
    """The matrix's result with the trajectories along the first axis."""

    def repeated(x: Any) -> Any:
        return jnp.broadcast_to(x, (n, *x.shape[1:]))

    found = jax.tree.map(repeated, result._replace(u=None, t=None))
    t = None if result.t is None else repeated(result.t)
    return found._replace(u=jnp.moveaxis(result.u[0], -1, 0), t=t)


def _with_steps(plan: Plan, lanes: Lane, ends: Any) -> tuple[Plan, Lane]:
    """The plan and the numbers of solves that take these steps."""
    solver = plan.method.value._replace(controller=None)
    batched = plan.batched._replace(dt=False, tstops=False)
    span = jnp.abs(jnp.asarray(lanes.t1 - lanes.t0, plan.state.dtype))
    lanes = lanes._replace(dt=span, tstops=ends)
    return dataclasses.replace(plan, method=Static(solver), batched=batched), lanes


#
# The time loop
#


class _Turn(NamedTuple):
    """What changes from turn to turn: see `column_step.stepping`.

    - `state`: that of the loop, without components.
    - `half`: the half of `both` that holds the columns; `row`: the next row to save.
    - `ends`: the ends of the accepted steps.
    """

    state: State
    both: Any
    rows: Any
    half: Any
    row: Any
    ends: Any


def _stepped(plan: Plan, matrix_plan: Plan, n: int, lanes: Lane, matrix: Lane) -> _Stepped:
    one, numbers = for_one(matrix_plan, matrix)
    assert isinstance(one.field, Program)
    none = (False,) * len(numbers.consts), (False,) * len(numbers.p)
    field = LaneField(one.field, one.state, *none, form=(False, 0))
    chunk = chunk_of(one, field, jax.tree.map(lambda _: None, numbers), numbers, 1)
    at = functools.partial(field, chunk.p)
    steps = _Steps(plan, one, lanes, chunk, n)
    turn = steps.first(start(one, at, chunk, jnp.ones(1, bool)))
    body = functools.partial(steps.turn, at)
    turn = jax.lax.while_loop(*turns(body, lambda turn: turn.state, chunk.stop), turn)
    state = turn.state._replace(y=(steps.states(turn.both, turn.half),))
    state = conclude(one, chunk, state, functools.partial(steps.probe, turn))
    return _Stepped(result_of(one, numbers, steps.left(turn, state)), turn.ends)


class _Steps:
    """The steps of the columns.

    **Arguments:** `plan`, `lanes`: of the trajectories; `one`, `chunk`: of the matrix.
    """

    def __init__(self, plan: Plan, one: Plan, lanes: Lane, chunk: Lane, n: int):
        self.plan, self.one, self.chunk, self.n = plan, one, chunk, n
        # `column_step` has a variable for each component, however many there are.
        d = described(dataclasses.replace(plan, threads=1), lanes, n)
        self.d = d = dataclasses.replace(d, in_memory=False)
        self.room = -(-n // d.width) * d.width
        self.text = column_step.stepping(d)
        self.saved_rows = 0 if plan.saving.mode == "ends" else plan.saving.rows
        self.operands = operands(d, plan, lanes, jnp.ones(n, bool), self.saved_rows, self.room)
        work = column_step.operations(d) * d.method.stages * (self.room // d.width)
        self.threads = plan.threads if work >= _WORTH_SHARING else 1

    def first(self, state: State) -> _Turn:
        """What there is at the start."""
        d, saving = self.d, self.plan.saving
        u0 = self._padded(state.y[0])
        carried = [u0, *(self._padded(x) for x in jax.tree.leaves(state.carry))]
        both = jnp.concatenate(carried)
        both = jnp.stack([both, both])
        rows = jnp.zeros((max(1, self.saved_rows), *u0.shape), d.dtype)
        row = jnp.asarray(int(saving.start) if saving.mode == "steps" else 0, jnp.int32)
        if saving.mode == "times":
            row = jnp.sum(self.chunk.saveat == self.chunk.t0, dtype=jnp.int32)
        at_start = jnp.arange(len(rows), dtype=row.dtype) < row
        rows = jnp.where(at_start[:, None, None], u0, rows)
        far = jnp.sign(self.chunk.t1 - self.chunk.t0) * jnp.inf
        ends = jnp.full(self.plan.maxiters, far, d.dtype)
        bare = state._replace(y=(), carry=())
        return _Turn(bare, both, rows, jnp.zeros((), jnp.int32), row, ends)

    def _padded(self, x: Any) -> Any:
        """A matrix `[*state, column, 1]` as `[component, column]`, with the last column repeated in
        the room behind it."""
        x = x.reshape(self.d.size, self.n)
        return jnp.pad(x, ((0, 0), (0, self.room - self.n)), mode="edge")

    def _matrix(self, x: Any) -> Any:
        """`[..., component, column]` as `[..., *state, column]`, without the room."""
        return x[..., : self.n].reshape(*x.shape[:-2], *self.plan.state.shape, self.n)

    def states(self, both: Any, half: Any) -> Any:
        """The matrix in a half, `[*state, column, 1]`."""
        return self._matrix(both[half, : self.d.size])[..., None]

    def attempt(self, turn: _Turn, state: State, h: Any, last: Any) -> tuple:
        """`both`, `rows` and the measures after an attempt of the signed size `h`, in which the
        rows up to `last` lie."""
        d = self.d
        now = jnp.stack([_only(state.t), _only(h)]).astype(d.dtype)
        places = jnp.stack([turn.half, turn.row, last]).astype(jnp.int32)
        given = [*self.operands, now, places, turn.both, turn.rows]
        measures = jax.ShapeDtypeStruct((column_step.measures(d), self.room), d.dtype)
        outputs = [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[-2:]), measures]
        changed = {len(given) - 2: 0, len(given) - 1: 1}
        least = min(self.room, d.width * _VECTORS)
        shared = {"items": self.room, "threads": self.threads, "least": least}
        return tuple(call(self.text, "step", given, outputs, **shared, in_place=changed))

    def turn(self, at: Any, turn: _Turn) -> _Turn:
        """One turn, which tries a step."""
        state = turn.state

        def step(t2: Any, h: Any) -> Attempt:
            last = self._last_row(turn, _only(t2))
            return Attempt((), (), (), (*self.attempt(turn, state, h, last), last))

        tried = attempt_with(self.one, self.chunk, state, step)
        both, rows, measures, last = tried.attempt.dense
        after, taken = decide(self.one, at, self.chunk, state, tried, self._quality(measures))
        accepted, i = taken.accepted[0], state.naccept[0]
        # A fixed step that fails leaves NaN.
        half = jnp.where(accepted | (not self.d.adaptive), 1 - turn.half, turn.half)
        row = jnp.where(accepted, last, turn.row)
        ends = turn.ends.at[i].set(jnp.where(accepted, _only(taken.t2), turn.ends[i]), mode="drop")
        return _Turn(after, both, rows, half, row, ends)

    def _last_row(self, turn: _Turn, t2: Any) -> Any:
        """The row behind those that lie in a step to `t2`."""
        mode, chunk, rows = self.plan.saving.mode, self.chunk, self.saved_rows
        if mode == "ends":
            return turn.row
        if mode == "steps":
            return turn.row + 1
        direction = jnp.sign(chunk.t1 - chunk.t0)

        def due(row: Any) -> Any:
            return (row < rows) & (direction * (t2 - chunk.saveat.at[row].get(mode="clip")) >= 0)

        return jax.lax.while_loop(due, lambda row: row + 1, turn.row)

    def _quality(self, measures: Any) -> Any:
        """What decides on a step (see `loop.decide`), `[1]`."""
        d, measures = self.d, measures[:, : self.n]
        if not d.adaptive:
            return jnp.sum(measures, keepdims=True)[0] == 0
        if isinstance(d.norm, MaxNorm):
            largest = jnp.max(measures)
            return (largest * largest)[None]
        return jnp.max(jnp.sum(measures, axis=1), keepdims=True) / (self.n * d.size)

    def probe(self, turn: _Turn, state: State) -> Tried:
        """An attempt from the state of the loop."""

        def step(t2: Any, h: Any) -> Attempt:
            del t2
            both, *_ = self.attempt(turn, state, h, turn.row)
            return Attempt((self.states(both, 1 - turn.half),), (), (), ())

        return attempt_with(self.one, self.chunk, state, step)

    def left(self, turn: _Turn, state: State) -> Left:
        """What the loop leaves."""
        saving, u, t, count = self.plan.saving, state.y[0][..., 0][None], None, state.naccept
        if saving.mode != "ends":
            u, count = self._matrix(turn.rows), turn.row
        if saving.mode == "steps":
            start = jnp.broadcast_to(self.chunk.t0, (1,)).astype(turn.ends.dtype)
            t = jnp.concatenate([start, turn.ends] if saving.start else [turn.ends, start])
            t, count = self._of_rows(t)[None], turn.row[None]
        counts = state.code.astype(jnp.int8), state.naccept, state.ntried
        return Left(u[None], t, count, *counts)

    def _of_rows(self, t: Any) -> Any:
        """The first times, as many as there is room for rows."""
        missing = self.saved_rows - len(t)
        return jnp.pad(t, (0, max(0, missing)), constant_values=jnp.nan)[: self.saved_rows]


def _only(x: Any) -> Any:
    """A number of the only lane, or one that all lanes share."""
    return x.reshape(())
