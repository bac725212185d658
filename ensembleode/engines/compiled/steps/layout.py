"""The numbers of trajectories: where a kernel reads them, and which of them its lanes hold.

Every leaf of `TrajectoryNumbers` is passed to the kernel as an operand, without a copy:
`[trajectory, ...]` where each trajectory has its own, or the leaf itself where all share it. On a
GPU the trajectories come last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....fields import Inputs
from ....ground.keys import raw
from ....plan.plan import Plan
from ....plan.trajectory_numbers import TrajectoryNumbers
from ....problem.number_table import but, of_kind
from ....solvers.step_size import Tolerances
from ..algebra.components import built
from ..algebra.products import Strips
from ..algebra.reading import Memory
from ..llvm.builder import Builder, ElementPointer, I64, Value, Variable
from . import tuning


if TYPE_CHECKING:
    from .description import KernelDescription


# The rows of the table that are operands as leaves: constants, parameters, others.
# Times to save and flags are operands of their own.
_OPERANDS = sorted(
    but("times", "flag"),
    key=lambda x: (x.kind != "constants", x.kind != "parameters", x.dtype is not None),
)


_PARAMETERS = [x.name for x in _OPERANDS if x.kind in ("constants", "parameters")]

# The rows that are always read from memory, row by row.
_IN_MEMORY = [x.name for x in of_kind("stops")]


class NumberPlace(NamedTuple):
    """A leaf of `TrajectoryNumbers`, by the name of its row of the table. Its first component has
    the index `start` in its group, counted per dtype (see `fields.ir.Buffer`)."""

    name: str
    is_own: bool
    dtype: np.dtype
    size: int
    start: int

    @property
    def group(self) -> str:
        return "own" if self.is_own else "shared"


class NumbersLayout(NamedTuple):
    """All leaves except for the times to save, in the order of the operands."""

    numbers: tuple[NumberPlace, ...]

    @property
    def inputs(self) -> Inputs:
        """The layout of the constants and parameters of `f`."""
        return self.inputs_of("f")

    def inputs_of(self, program: str) -> Inputs:
        """The layout of the numbers that a program reads; `program` is the name of its function."""
        read = [x.name for x in _OPERANDS if x.kind == "parameters" or x.option == program]
        return Inputs(tuple((x.group, x.start) for x in self.numbers if x.name in read), None)

    def find(self, name: str) -> int | None:
        """The index of the number with this name; None if there is none."""
        return next((i for i, x in enumerate(self.numbers) if x.name == name), None)


class NumbersOrder(NamedTuple):
    """The order in which the numbers of trajectories lie in an array. Without `n`, the numbers of
    each trajectory lie side by side; with it, the trajectories, `n` in all, come last, so that
    neighbouring threads of a GPU access neighbouring elements."""

    n: Value | None = None

    def place(self, index: Value, i: Value | int, size: Value | int) -> Value:
        """The place of number `i`, of `size` numbers, of trajectory `index`."""
        return index * size + i if self.n is None else index + i * self.n

    def place_in_row(
        self, n: Value, row: Value | int, index: Value, i: Value | int, size: int
    ) -> Value:
        """The place of number `i`, of `size` numbers, of trajectory `index`, one of `n`, in a row
        that all trajectories have, so that rows that none reaches lie together."""
        return (row * n + index) * size + i if self.n is None else (row * size + i) * n + index


def trajectories_last(x: Array) -> Array:
    """An array with the trajectories first, rearranged for a GPU: `[number, trajectory]`."""
    return x.reshape(x.shape[0], -1).T


def layout_of(plan: Plan, lanes: TrajectoryNumbers) -> NumbersLayout:
    """**Arguments:** `lanes`: arrays, or abstract values."""
    named = list(_leaves(plan, lanes))
    avals = [
        jax.ShapeDtypeStruct(x.shape[1:] if is_own else x.shape, dtype)
        for _, x, dtype, is_own in named
    ]
    groups = ["own" if is_own else "shared" for *_, is_own in named]
    places = Inputs.laid_out(avals, groups).places
    numbers = (
        NumberPlace(name, is_own, np.dtype(aval.dtype), math.prod(aval.shape), start)
        for (name, *_, is_own), aval, (_, start) in zip(named, avals, places, strict=True)
    )
    return NumbersLayout(tuple(numbers))


def operands_of(plan: Plan, lanes: TrajectoryNumbers, *, on_gpu: bool) -> list:
    """The arrays of `layout.numbers`."""
    leaves = ((jnp.asarray(x, dtype), is_own) for _, x, dtype, is_own in _leaves(plan, lanes))
    return [trajectories_last(x) if on_gpu and is_own else x for x, is_own in leaves]


def _leaves(plan: Plan, lanes: TrajectoryNumbers) -> Iterator[tuple[str, Any, np.dtype, bool]]:
    for row in _OPERANDS:
        found, batched = getattr(lanes, row.name), getattr(plan.batched, row.name)
        if row.kind in ("constants", "parameters"):
            for x, is_own in zip(map(raw, found), batched, strict=True):
                yield row.name, x, np.dtype(x.dtype), is_own
        elif found is not None:
            x = found if hasattr(found, "shape") else jnp.asarray(found)
            yield row.name, x, np.dtype(row.dtype or plan.state.dtype), batched


def _held_by_lanes(layout: NumbersLayout) -> set[int]:
    """The indices of the numbers that lanes hold: the smallest parameters, and small others."""
    own = [i for i, x in enumerate(layout.numbers) if x.is_own and x.name != "u0"]
    parameters = [i for i in own if layout.numbers[i].name in _PARAMETERS]
    found = {i for i in own if layout.numbers[i].size <= tuning.MOST_HELD}.difference(parameters)
    left = tuning.MOST_HELD
    for i in sorted(parameters, key=lambda i: layout.numbers[i].size):
        left -= layout.numbers[i].size
        if left >= 0:
            found.add(i)
    return found


class LaneNumbers:
    """The numbers of the trajectories that are in the lanes, within a kernel.

    `load` and `memory` have the interface of `reading.OperandReader`.
    """

    def __init__(
        self,
        b: Builder,
        problem: KernelDescription,
        buffers: list[ElementPointer],
        order: NumbersOrder,
        packed: dict[Strips, ElementPointer] | None = None,
    ):
        self.b, self.problem, self._buffers, self.order = b, problem, buffers, order
        self._packed = {} if packed is None else packed
        self.layout = layout = problem.layout
        self.index = b.variable(I64, 0)
        self._held: dict[int, list[Variable]] = {}
        self._shared: dict[int, list[Value]] = {}
        self._places: dict[tuple, list[int]] = {}
        shared, held = 0, _held_by_lanes(layout)
        for i, number in enumerate(layout.numbers):
            self._places.setdefault((number.group, number.dtype), []).append(i)
            if number.name in _IN_MEMORY:
                continue
            if i in held:
                self._held[i] = [b.variable(number.dtype, 0) for _ in range(number.size)]
            elif not number.is_own and shared + number.size <= tuning.MOST_SHARED:
                self._shared[i] = [buffers[i].load(c) for c in range(number.size)]
                shared += number.size

    def another(self) -> LaneNumbers:
        """A second object like this one, for the numbers of other trajectories."""
        return LaneNumbers(self.b, self.problem, self._buffers, self.order, self._packed)

    def variables(self) -> list[list[Variable]]:
        return list(self._held.values())

    def take(self, index: Value, fresh: Value) -> None:
        """Read the numbers of other trajectories, in the lanes `fresh`."""
        self.index.set_where(fresh, index)
        for i, variables in self._held.items():
            for c, variable in enumerate(variables):
                at = self.order.place(index, c, len(variables))
                variable.set(self._buffers[i].gather(at, fresh, variable.get()))

    def number(self, name: str, component: int = 0) -> Value:
        """A number by its name: a value with lanes, or a scalar where all trajectories share it."""
        i = self._find(name)
        return self._component(i, component if self.layout.numbers[i].size > 1 else 0)

    def size(self, name: str) -> int:
        """How many numbers a trajectory has under this name."""
        return self.layout.numbers[self._find(name)].size

    def element(self, name: str, component: Value) -> Value:
        """A number by its name, read from memory; `component` may differ from lane to lane."""
        return self._element(self._find(name), component)

    def _find(self, name: str) -> int:
        i = self.layout.find(name)
        assert i is not None, name
        return i

    def tolerances(self, components: int) -> Tolerances:
        """The tolerances of the components; arbitrary ones where step-size control doesn't look."""
        b, d = self.b, self.problem

        def of(name: str) -> tuple:
            if not d.in_memory:
                places = (c if c < d.controlled else 0 for c in range(components))
                return tuple(self.number(name, c) for c in places)
            if self.size(name) == 1:
                return (self.number(name),)
            return tuple(built(b, d, lambda c: c, functools.partial(self.element, name)))

        return Tolerances(of("abstol"), of("reltol"))

    def u0(self, index: Value, fresh: Value) -> list:
        """The initial states of these trajectories in the lanes `fresh`; zero in the others."""
        b, d, i = self.b, self.problem, self._find("u0")
        number, buffer = self.layout.numbers[i], self._buffers[i]
        if not number.is_own:
            shared = self._element if d.in_memory else self._component
            return built(b, d, lambda c: c, lambda c: b.spread(shared(i, c)))
        place = functools.partial(self.order.place, index, size=number.size)
        return built(b, d, place, lambda at: buffer.gather(at, fresh, 0))

    def load(self, group: str, dtype: np.dtype, index: int) -> Value:
        """An element of a group of the field's numbers."""
        i = self._which(group, dtype, index)
        return self._component(i, index - self.layout.numbers[i].start)

    def memory(self, group: str, dtype: np.dtype, start: int, end: int) -> Memory | None:
        """The memory of elements of a group; None where the lanes hold them."""
        i = self._which(group, dtype, start)
        number, buffer = self.layout.numbers[i], self._buffers[i]
        assert end <= number.start + number.size, (group, start, end)
        if i in self._held:
            return None
        if number.is_own:
            stride = 1 if self.order.n is None else self.order.n
            offsets = self.order.place(self.index.get(), -number.start, number.size)
            return Memory(buffer, offsets=self.b.spread(offsets), stride=stride)
        return Memory(buffer.offset(-number.start))

    def packed(self, strips: Strips) -> ElementPointer | None:
        """Shared weights, packed at the start of the kernel; None for those that are too many."""
        b, at = self.b, strips.weights.buffer
        if strips not in self._packed:
            taken = sum(x.size * x.dtype.itemsize for x in (*self._packed, strips))
            if taken > tuning.MOST_PACKED:
                return None
            with b.at_start():
                found = self._packed[strips] = b.array(strips.dtype, strips.size)
                number = self._which(at.group, at.dtype, at.start)
                start = at.start - self.layout.numbers[number].start
                strips.write(self._buffers[number].offset(start), found)
        return self._packed[strips]

    def _which(self, group: str, dtype: np.dtype, index: int) -> int:
        for i in self._places[group, np.dtype(dtype)]:
            number = self.layout.numbers[i]
            if number.start <= index < number.start + number.size:
                return i
        raise AssertionError((group, dtype, index))

    def _component(self, i: int, c: int) -> Value:
        if i in self._held:
            return self._held[i][c].get()
        if i in self._shared:
            return self._shared[i][c]
        return self._element(i, self.b.constant(c, I64))

    def _element(self, i: int, c: Value) -> Value:
        """Component `c` of leaf `i`, read from memory."""
        b, number, buffer = self.b, self.layout.numbers[i], self._buffers[i]
        if not number.is_own and not c.lanes:
            return buffer.load(c)
        at = self.order.place(self.index.get(), c, number.size) if number.is_own else c
        everywhere = b.constant(True, bool, of_lanes=True)
        return buffer.gather(at, everywhere, 0)
