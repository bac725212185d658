"""The numbers of trajectories: where a kernel finds them, and what its lanes hold of them.

Every leaf of a `Lane` is an operand of the kernel as it is: `[trajectory, ...]` where each
trajectory has its own, or the leaf itself where they share it. On a GPU the trajectories come last.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...core.lane import Lane
from ...core.plan import Plan
from ...fields import Inputs
from ...ground.keys import raw
from ...numbers import but, of_kind
from .builder import Buffer, Builder, I64, Value, Variable
from .reading import Memory


# A lane holds as many numbers of its own; more are read where they lie.
_MOST_HELD = 64
# As many numbers that all share are read once; more at each use.
_MOST_SHARED = 64


# The rows of the table that are operands. The constants come first, and then the parameters, as
# programs have them; times to save and flags are operands of their own.
_OPERANDS = sorted(
    but("times", "flag"),
    key=lambda x: (x.kind != "constants", x.kind != "parameters", x.dtype is not None),
)


# Those that are read where they lie, row by row.
_IN_MEMORY = [x.name for x in of_kind("stops")]


class Number(NamedTuple):
    """A leaf of a `Lane`.

    - `name`: that of its row of the table.
    - `start`: where its first component is in its group of its dtype (see `fields.ir.Buffer`).
    """

    name: str
    is_own: bool
    dtype: np.dtype
    size: int
    start: int

    @property
    def group(self) -> str:
        return "own" if self.is_own else "shared"


class Layout(NamedTuple):
    """All leaves but the times to save, in the order of the operands."""

    numbers: tuple[Number, ...]

    @property
    def inputs(self) -> Inputs:
        """Where the constants and parameters of `f` lie."""
        return self.inputs_of("f")

    def inputs_of(self, program: str) -> Inputs:
        """The numbers that a program reads, by the name of its function."""
        read = [x.name for x in _OPERANDS if x.kind == "parameters" or x.option == program]
        return Inputs(tuple((x.group, x.start) for x in self.numbers if x.name in read), None)

    def find(self, name: str) -> int | None:
        """Which of the numbers has this name."""
        return next((i for i, x in enumerate(self.numbers) if x.name == name), None)


class Order(NamedTuple):
    """How the numbers of trajectories lie in an array.

    The trajectories come first, and what each has lies side by side; or last, of `n`, as the
    threads of a GPU want it: neighbours read and write what lies side by side.
    """

    n: Value | None = None

    def place(self, index: Value, i: Value | int, size: Value | int) -> Value:
        """Number `i`, of as many as `size`, of a trajectory."""
        return index * size + i if self.n is None else index + i * self.n


def trajectories_last(x: Any) -> Any:
    """An array whose first axis is that of the trajectories, for a GPU: [number, trajectory]."""
    return x.reshape(x.shape[0], -1).T


def layout_of(plan: Plan, lanes: Lane) -> Layout:
    """**Arguments:** `lanes`: arrays, or abstract values."""
    named = list(_leaves(plan, lanes))
    avals = []
    for _, x, dtype, is_own in named:
        avals.append(jax.ShapeDtypeStruct(x.shape[1:] if is_own else x.shape, dtype))
    groups = ["own" if is_own else "shared" for *_, is_own in named]
    places = Inputs.laid_out(avals, groups).places
    numbers = (
        Number(name, is_own, np.dtype(aval.dtype), math.prod(aval.shape), start)
        for (name, *_, is_own), aval, (_, start) in zip(named, avals, places, strict=True)
    )
    return Layout(tuple(numbers))


def operands_of(plan: Plan, lanes: Lane, *, on_gpu: bool) -> list[Any]:
    """The arrays of `layout.numbers`."""
    leaves = ((jnp.asarray(x, dtype), is_own) for _, x, dtype, is_own in _leaves(plan, lanes))
    return [trajectories_last(x) if on_gpu and is_own else x for x, is_own in leaves]


def _leaves(plan: Plan, lanes: Lane) -> Iterator[tuple[str, Any, np.dtype, bool]]:
    for row in _OPERANDS:
        found, batched = getattr(lanes, row.name), getattr(plan.batched, row.name)
        if row.kind in ("constants", "parameters"):
            for x, is_own in zip(map(raw, found), batched, strict=True):
                yield row.name, x, np.dtype(x.dtype), is_own
        elif found is not None:
            x = found if hasattr(found, "shape") else jnp.asarray(found)
            yield row.name, x, np.dtype(row.dtype or plan.state.dtype), batched


class Held:
    """The numbers of the trajectories that are in the lanes, within a kernel.

    (What fields ask of it is as in `reading.Numbers`.)
    """

    def __init__(self, b: Builder, layout: Layout, buffers: list[Buffer], order: Order):
        self.b, self.layout, self._buffers, self.order = b, layout, buffers, order
        self.index = b.variable(I64, 0)
        self._held: dict[int, list[Variable]] = {}
        self._shared: dict[int, list[Value]] = {}
        self._places: dict[tuple, list[int]] = {}
        shared = 0
        for i, number in enumerate(layout.numbers):
            self._places.setdefault((number.group, number.dtype), []).append(i)
            if number.name in _IN_MEMORY:
                continue
            if number.is_own and number.name != "u0" and number.size <= _MOST_HELD:
                self._held[i] = [b.variable(number.dtype, 0) for _ in range(number.size)]
            elif not number.is_own and shared + number.size <= _MOST_SHARED:
                self._shared[i] = [buffers[i].load(c) for c in range(number.size)]
                shared += number.size

    def another(self) -> "Held":
        """Room for other trajectories."""
        return Held(self.b, self.layout, self._buffers, self.order)

    def variables(self) -> list[list[Variable]]:
        return list(self._held.values())

    def take(self, index: Value, fresh: Value) -> None:
        """Other trajectories, in the lanes that are `fresh`."""
        self.index.set_where(fresh, index)
        for i, variables in self._held.items():
            size = len(variables)
            for c, variable in enumerate(variables):
                at = self.order.place(index, c, size)
                variable.set(self._buffers[i].gather(at, fresh, variable.get()))

    def number(self, name: str, component: int = 0) -> Value:
        """A number of a name: a value with lanes, or a scalar where all share it."""
        i = self.layout.find(name)
        assert i is not None, name
        return self._component(i, component if self.layout.numbers[i].size > 1 else 0)

    def size(self, name: str) -> int:
        """How many numbers a trajectory has of a name."""
        i = self.layout.find(name)
        assert i is not None, name
        return self.layout.numbers[i].size

    def element(self, name: str, component: Value) -> Value:
        """A number of a name, which lies in memory; the component may differ from lane to lane."""
        i = self.layout.find(name)
        assert i is not None, name
        return self._element(i, component)

    def u0(self, index: Value, fresh: Value) -> list[Value]:
        """The initial states of these trajectories; zero in the other lanes."""
        i = self.layout.find("u0")
        assert i is not None
        number, buffer = self.layout.numbers[i], self._buffers[i]
        if not number.is_own:
            return [self.b.spread(self._component(i, c)) for c in range(number.size)]
        size = number.size
        places = [self.order.place(index, c, size) for c in range(size)]
        return [buffer.gather(at, fresh, 0) for at in places]

    def load(self, group: str, dtype: np.dtype, index: int) -> Value:
        """An element of a group of numbers of the field."""
        i = self._which(group, dtype, index)
        return self._component(i, index - self.layout.numbers[i].start)

    def memory(self, group: str, dtype: np.dtype, start: int, end: int) -> Memory | None:
        """Where elements of a group lie; None where they are held."""
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
        """Component `c` of a leaf, where it lies."""
        b, number, buffer = self.b, self.layout.numbers[i], self._buffers[i]
        if not number.is_own and not c.lanes:
            return buffer.load(c)
        at = self.order.place(self.index.get(), c, number.size) if number.is_own else c
        everywhere = b.constant(True, bool, of_lanes=True)
        return buffer.gather(at, everywhere, 0)
