"""The kernel that tries one step for all columns of a matrix, with the same time and step size.

The numbers of neighbouring columns lie side by side: `[number, column]`, with as many columns as
fill whole vectors of lanes. One vector of columns is stepped at a time, with its stages in
registers, or in a thread's own memory where a state is an array (see `algebra/components.py`). So
the memory that all columns share has only what a step begins with and what it returns.
"""

import functools
import itertools
from typing import Any

import jax.tree_util as jtu

from ...fields.walking import length
from ...solvers.method import StepAttempt
from ...solvers.norms import MaxNorm
from ...solvers.step_size import scaled
from ..compiled.algebra.components import arithmetic, built, for_each_component
from ..compiled.kernel import KernelFrame, with_arrays
from ..compiled.llvm.builder import BOOL, Builder, ElementPointer, I64, Value
from ..compiled.llvm.module import Module
from ..compiled.steps.description import KernelDescription
from ..compiled.steps.equations import equations_in, translated
from ..compiled.steps.layout import LaneNumbers


# Further entries of `sizes`: the number of columns that there is room for; and, where there are
# arrays, the bytes of a thread's arrays.
COLUMNS, ARRAYS = 3, 4
# The entries of `now`: the time and the signed size of the step.
T, H = range(2)
# The entries of `places`: the half of `both` that holds the columns, the first row in the step, and
# the first row after it.
HALF, FIRST, END = range(3)


def carried(d: KernelDescription) -> int:
    """How many numbers of a column go from step to step: its state and the method's carry."""
    return d.size * _states(d)


def _states(d: KernelDescription) -> int:
    return 1 + len(jtu.tree_leaves(d.carry_like)) // d.values


@functools.lru_cache(maxsize=256)
def operations(d: KernelDescription) -> int:
    """About how many operations an evaluation of the field takes."""
    inputs = d.layout.inputs
    return length(translated(d.field.jaxpr, inputs, "f", in_memory=d.in_memory).body)


def measures(d: KernelDescription) -> int:
    """How many measures of each column a step returns, by which it is accepted or rejected."""
    return len(d.method.tableau.errors) if d.adaptive else 1  # type: ignore[union-attr]


@functools.lru_cache(maxsize=256)
def stepping(d: KernelDescription) -> tuple[str, int]:
    """The IR of the kernel `step`, for the columns from `first` to `end`, and the bytes of a
    thread's memory for arrays, which is the last result where there are any bytes. Its operands are
    those of `kernel.solving`, `now`, `places`, and the arrays that it changes in place; its
    results, these arrays and the measures.

    - `both [half, number, column]`: in one half the columns before the step, their states followed
        by their carries; the other half becomes those after it.
    - `rows [row, component, column]`: the saved states, of which those in the step are written.
    - `measures [measure, column]`: for an adaptive step the column's part in the norm of each error
        estimate; for a fixed step a number that is zero if the state after it is finite.
    """
    module = Module(d.width, has_fma=d.has_fma)
    names = ["now", "places", "both_before", "rows_before", "both", "rows", "measures"]
    parameters = KernelFrame.parameters(d, names)
    with module.function("step", parameters, linkage="external") as b:
        frame = KernelFrame(b, d, names)
        heap = b.heap = frame.heap(b, d, ARRAYS)
        columns = _Columns(b, d, frame)
        first, end, _ = frame.share
        at = b.variable(I64, first, of_lanes=False)

        def one() -> None:
            columns.step(at.get())
            at.set(at.get() + max(1, b.lanes))

        b.while_(lambda: at.get() < end, one)
        b.return_()
        arrays = with_arrays(parameters, heap)
    return module.text, arrays


class _Columns:
    """The numbers that all columns share, and the step of some of them."""

    def __init__(self, b: Builder, d: KernelDescription, frame: KernelFrame):
        self.b, self.d, self.frame, self.xp = b, d, frame, arithmetic(b, d)
        self.held = LaneNumbers(b, d, frame.numbers, frame.order)
        self.equations = equations_in(b, d)
        self.room = b.cast(frame.sizes.load(COLUMNS), I64)
        now, places = frame.others["now"], frame.others["places"]
        self.t, self.h = now.load(T), now.load(H)
        half, self.first, self.end = (b.cast(places.load(i), I64) for i in (HALF, FIRST, END))
        self.old, self.new = half * carried(d), (1 - half) * carried(d)
        self.everywhere = b.constant(True, BOOL, of_lanes=True)

    def step(self, at: Value) -> None:
        """Step the columns from number `at` on, one in each lane."""
        b, d, method = self.b, self.d, self.d.method
        # The lanes behind the last column repeat it.
        self.held.take(b.minimum(b.lane_numbers() + at, self.frame.n - 1), self.everywhere)
        both = self.frame.others["both"]

        def place(first: Value, state: int, c: Any) -> Value:
            return (first + (state * d.size) + c) * self.room + at

        def load(state: int) -> list:
            return built(b, d, lambda c: place(self.old, state, c), both.load_lanes)

        y, *rest = map(load, range(_states(d)))
        carry = jtu.tree_unflatten(jtu.tree_structure(d.carry_like), list(itertools.chain(*rest)))
        equations = self.equations(self.held, self.everywhere)
        attempt = method.step(self.xp, equations, tuple(y), carry, self.t, self.h)
        after = [*attempt.y2, *jtu.tree_leaves(attempt.carry)]
        for state in range(_states(d)):
            components = after[state * d.values : (state + 1) * d.values]
            for_each_component(
                components, lambda c, x, s=state: both.store_lanes(place(self.new, s, c), x)
            )
        for i, x in enumerate(self._measures(tuple(y), attempt)):
            self.frame.others["measures"].store_lanes(self.room * i + at, x)
        self._save(at, equations, tuple(y), attempt)

    def _measures(self, y: tuple, attempt: StepAttempt) -> list[Value]:
        if not self.d.adaptive:
            return [self.xp.total(tuple(x * 0.0 for x in attempt.y2))]
        tol, states = self.held.tolerances(self.d.size), (y, attempt.y2)
        in_parts = self.d.in_parts
        return [
            self._part(scaled(self.xp, tol, x, *states, in_parts=in_parts)) for x in attempt.error
        ]

    def _part(self, values: tuple) -> Value:
        """A column's part in a norm: the sum of squares, or the largest magnitude."""
        if isinstance(self.d.norm, MaxNorm):
            return self.xp.largest(tuple(map(abs, values)))
        return self.xp.total(tuple(x * x for x in values))

    def _save(self, at: Value, equations: Any, y: tuple, attempt: StepAttempt) -> None:
        """Save the rows that lie in the step."""
        b, d, rows = self.b, self.d, self.frame.others["rows"]

        def write(row: Value, u: tuple) -> None:
            for_each_component(
                u, lambda c, x: rows.store_lanes((row * d.size + c) * self.room + at, x)
            )

        def within() -> None:
            dense = d.method.dense(self.xp, equations, y, attempt.dense, self.t, self.h)
            row = b.variable(I64, self.first, of_lanes=False)
            times: ElementPointer | None = self.frame.times
            assert times is not None

            def one() -> None:
                theta = (times.load(row.get()) - self.t) / self.h
                write(row.get(), d.method.interpolate(self.xp, y, dense, self.h, theta))
                row.set(row.get() + 1)

            b.while_(lambda: row.get() < self.end, one)

        if d.saving.mode == "times":
            b.if_(self.first < self.end, within)
        elif d.saving.mode == "steps":
            b.if_(self.first < self.end, lambda: write(self.first, attempt.y2))
