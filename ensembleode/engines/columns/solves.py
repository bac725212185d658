"""Solves of the columns of a matrix from start to end, and their derivatives.

The state stays in a kernel's memory: each attempt of a step is a call of the kernel of `step.py`,
which threads share. The norm of the error is summed up here, over the columns in their order, so it
doesn't depend on the threads.

For derivatives, the compiled engine solves the trajectories one by one again, with the accepted
steps held constant: their ends are the known times of a solve whose fixed step is the whole span.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...ground.devices.alone import alone
from ...plan.known_times import differing
from ...plan.plan import Plan, Result
from ...plan.saving import meant
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem import sensitivity
from ...solvers.norms import MaxNorm
from ...tracing.program import Program, Static
from ..base.results import for_one, LoopResult, result_of, with_times
from ..base.tuning import MOST_COLUMN_VARIABLES
from ..compiled.solves import described, memory_of, operands
from ..compiled.xla.call import call
from ..derivatives.derivatives import differentiable
from . import loop, step as column_step, tuning
from .loop import ColumnState, ColumnTrial


def solve(
    plan: Plan, lanes: TrajectoryNumbers, matrix_plan: Plan, matrix: TrajectoryNumbers, n: int
) -> Result:
    """The solutions of `n` trajectories with the same steps, with the trajectories along the first
    axis. `matrix_plan` and `matrix` are those of the matrix of all trajectories."""
    solver = plan.method.value
    fixed = jax.lax.stop_gradient((lanes, matrix))
    stepped = functools.partial(_stepped, plan, matrix_plan, n)
    of_matrix, ends = alone(jax.custom_batching.sequential_vmap(stepped), *fixed)
    result = _by_trajectory(plan, of_matrix, n)
    if solver.adaptive:
        plan, lanes = _with_steps(plan, lanes, ends)
    result = differentiable(plan, lanes, jnp.ones(n, bool), result)
    if solver.direction == "forward":
        result = sensitivity.forward_only(result)
    return with_times(plan, lanes, result)


def _by_trajectory(plan: Plan, result: Result, n: int) -> Result:
    """The matrix's result with the trajectories along the first axis."""

    def repeated(x: Array) -> Array:
        return jnp.broadcast_to(x, (n, *x.shape[1:]))

    found = jax.tree.map(repeated, result._replace(u=None, t=None))
    t = None if result.t is None else repeated(result.t)
    return found._replace(u=jnp.moveaxis(result.u[0], -1, 0), t=t)


def _with_steps(
    plan: Plan, lanes: TrajectoryNumbers, ends: Array
) -> tuple[Plan, TrajectoryNumbers]:
    """The plan and the numbers of solves that take these steps."""
    solver = plan.method.value._replace(controller=None)
    batched = plan.batched._replace(dt=False, tstops=False)
    span = jnp.abs(jnp.asarray(lanes.t1 - lanes.t0, plan.state.dtype))
    lanes = lanes._replace(dt=span, tstops=ends)
    return dataclasses.replace(plan, method=Static(solver), batched=batched), lanes


class _Turn(NamedTuple):
    """What changes from turn to turn. `half` is the half of `both` that holds the columns (see
    `step.stepping`), `row` the next row to save, and `ends` the ends of the accepted steps."""

    state: ColumnState
    both: Any
    rows: Any
    half: Any
    row: Any
    ends: Any


def _stepped(
    plan: Plan, matrix_plan: Plan, n: int, lanes: TrajectoryNumbers, matrix: TrajectoryNumbers
) -> tuple[Result, Any]:
    """The result of the time loop, with an axis of one trajectory, the matrix; and the ends of the
    accepted steps, infinitely far behind the last one."""
    one, numbers = for_one(matrix_plan, matrix)
    jumps = numbers.d_discontinuities
    numbers = numbers._replace(
        saveat=meant(numbers.saveat, numbers.count, numbers.t0, numbers.t1),
        d_discontinuities=None if jumps is None else differing(jumps),
    )
    steps = _ColumnSteps(plan, one, lanes, numbers, n)
    turn = jax.lax.while_loop(
        *loop.turns(steps.turn, lambda turn: turn.state, numbers.stop), steps.first()
    )
    return result_of(one, numbers, steps.left(turn)), turn.ends


class _ColumnSteps:
    """The steps of the columns.

    **Arguments:** `plan`, `lanes`: of the trajectories; `one`, `numbers`: of the matrix.
    """

    def __init__(
        self, plan: Plan, one: Plan, lanes: TrajectoryNumbers, numbers: TrajectoryNumbers, n: int
    ):
        self.plan, self.one, self.numbers, self.n = plan, one, numbers, n
        d = described(dataclasses.replace(plan, threads=1), lanes, n)
        in_memory = d.in_memory and d.size > MOST_COLUMN_VARIABLES
        self.d = d = dataclasses.replace(d, in_memory=in_memory)
        self.room = -(-n // d.width) * d.width
        self.text, self.arrays = column_step.stepping(d)
        self.saved_rows = 0 if plan.saving.mode == "ends" else plan.saving.rows
        sizes = self.saved_rows, self.room, *([self.arrays] if self.arrays else [])
        self.operands = operands(d, plan, lanes, jnp.ones(n, bool), *sizes)
        work = column_step.operations(d) * d.method.stages * (self.room // d.width)
        self.threads = plan.threads if work >= tuning.WORTH_SHARING else 1

    def field(self, y: tuple, t: Array) -> tuple:
        """The derivatives of the matrix, which is a tuple of one array."""
        assert isinstance(self.one.field, Program)
        return (self.one.field(self.numbers.consts, y[0], self.numbers.p, t),)

    def first(self) -> _Turn:
        """The turn's variables at the start."""
        d, saving, numbers = self.d, self.plan.saving, self.numbers
        y = (jnp.asarray(numbers.u0),)
        state, carry = loop.start(self.one, self.field, numbers, y)
        u0, both = self._padded(y[0]), self._carried(y, carry)
        both = jnp.stack([both, both])
        rows = jnp.zeros((max(1, self.saved_rows), *u0.shape), d.dtype)
        row = jnp.asarray(int(saving.start) if saving.mode == "steps" else 0, jnp.int32)
        if saving.mode == "times":
            row = jnp.sum(numbers.saveat == numbers.t0, dtype=jnp.int32)
        at_start = jnp.arange(len(rows), dtype=row.dtype) < row
        rows = jnp.where(at_start[:, None, None], u0, rows)
        far = jnp.sign(numbers.t1 - numbers.t0) * jnp.inf
        ends = jnp.full(self.plan.maxiters, far, d.dtype)
        return _Turn(state, both, rows, jnp.zeros((), jnp.int32), row, ends)

    def _carried(self, y: tuple, carry: Any) -> Array:
        """The matrix and the method's carry in the form of a half of `both`."""
        return jnp.concatenate([self._padded(x) for x in (*y, *jax.tree.leaves(carry))])

    def _padded(self, x: Array) -> Array:
        """A matrix `[*state, column]` as `[component, column]`, filled up with copies of the last
        column."""
        x = x.reshape(self.d.size, self.n)
        return jnp.pad(x, ((0, 0), (0, self.room - self.n)), mode="edge")

    def _matrix(self, x: Array) -> Array:
        """`[..., component, column]` as `[..., *state, column]`, without the copies at the end."""
        return x[..., : self.n].reshape(*x.shape[:-2], *self.plan.state.shape, self.n)

    def _state(self, both: Array, half: Array) -> tuple:
        """The matrix in a half."""
        return (self._matrix(both[half, : self.d.size]),)

    def attempt(self, turn: _Turn, h: Array, last: Array) -> tuple:
        """`both`, `rows` (up to `last`) and the measures after an attempt of this size."""
        d = self.d
        now = jnp.stack([turn.state.t, h]).astype(d.dtype)
        places = jnp.stack([turn.half, turn.row, last]).astype(jnp.int32)
        given = [*self.operands, now, places, turn.both, turn.rows]
        measures = jax.ShapeDtypeStruct((column_step.measures(d), self.room), d.dtype)
        outputs = [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[-2:]), measures]
        outputs += memory_of(self.threads * self.arrays)
        changed = {len(given) - 2: 0, len(given) - 1: 1}
        least = min(self.room, d.width * tuning.VECTORS)
        shared = {"items": self.room, "threads": self.threads, "least": least}
        return tuple(call(self.text, "step", given, outputs, **shared, in_place=changed))[:3]

    def turn(self, turn: _Turn) -> _Turn:
        """One turn, which tries a step."""
        one, numbers, i = self.one, self.numbers, turn.state.naccept
        trial = loop.attempt(one, numbers, turn.state)
        last = self._last_row(turn, trial.t2)
        both, rows, measures = self.attempt(turn, trial.h, last)
        quality = self._quality(measures)
        state, accepted, jumps = loop.decide(one, numbers, turn.state, trial, quality)
        # A fixed step that fails leaves NaN.
        half = jnp.where(accepted | (not self.d.adaptive), 1 - turn.half, turn.half)
        row = jnp.where(accepted, last, turn.row)
        ends = turn.ends.at[i].set(jnp.where(accepted, trial.t2, turn.ends[i]), mode="drop")
        if numbers.d_discontinuities is not None:
            both = self._renewed(both, half, jumps, state.t)
        return _Turn(state, both, rows, half, row, ends)

    def _renewed(self, both: Any, half: Any, jumps: Any, t: Any) -> Any:
        """`both` with the method's carry made anew where `f` has jumped."""

        def anew() -> Any:
            y = self._state(both, half)
            carry = loop.carry_at(self.one, self.field, y, t)
            return both.at[half].set(self._carried(y, carry))

        return jax.lax.cond(jumps, anew, lambda: both)

    def _last_row(self, turn: _Turn, t2: Array) -> Array:
        """The number of the first row after those that lie in a step to `t2`."""
        mode, numbers, rows = self.plan.saving.mode, self.numbers, self.saved_rows
        if mode == "ends":
            return turn.row
        if mode == "steps":
            return turn.row + 1
        direction = jnp.sign(numbers.t1 - numbers.t0)

        def due(row: Array) -> Array:
            return (row < rows) & (direction * (t2 - numbers.saveat.at[row].get(mode="clip")) >= 0)

        return jax.lax.while_loop(due, lambda row: row + 1, turn.row)

    def _quality(self, measures: Array) -> Array:
        """The quality of a step, in the form that `loop.decide` wants."""
        d, measures = self.d, measures[:, : self.n]
        if not d.adaptive:
            return jnp.sum(measures) == 0
        if isinstance(d.norm, MaxNorm):
            largest = jnp.max(measures)
            return largest * largest
        numbers = d.size // 2 if d.in_parts else d.size
        return jnp.max(jnp.sum(measures, axis=1)) / (self.n * numbers)

    def left(self, turn: _Turn) -> LoopResult:
        """The outcome of the loop, with an axis of one trajectory."""
        saving, state, (y,) = self.plan.saving, turn.state, self._state(turn.both, turn.half)

        def probe(trial: ColumnTrial) -> tuple:
            both, *_ = self.attempt(turn, trial.h, turn.row)
            return self._state(both, 1 - turn.half)

        code = loop.code_of(self.one, self.numbers, state, (y,), probe)
        u, t, count = y[None], None, state.naccept
        if saving.mode != "ends":
            u, count = self._matrix(turn.rows), turn.row
        if saving.mode == "steps":
            start = jnp.asarray(self.numbers.t0, turn.ends.dtype)[None]
            t = jnp.concatenate([start, turn.ends] if saving.start else [turn.ends, start])
            t, count = self._of_rows(t)[None], turn.row
        restarts = None if state.stops is None else state.stops.restarts[None]
        counts = code.astype(jnp.int8)[None], state.naccept[None], state.ntried[None]
        return LoopResult(u[None], t, count[None], *counts, restarts)

    def _of_rows(self, t: Array) -> Array:
        """The first times, one for each row that there is room for."""
        missing = self.saved_rows - len(t)
        return jnp.pad(t, (0, max(0, missing)), constant_values=jnp.nan)[: self.saved_rows]
