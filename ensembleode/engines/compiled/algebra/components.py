"""States as values of a kernel: a large state is one array, which a loop over components computes.

A small state is a tuple with a value for each component, and all arithmetic on it is unrolled. A
large state is a tuple of a single `Array`, an expression for any of its components, which becomes a
loop where the components are needed in memory, or one by one. So the code of a step doesn't grow
with the state. Both forms compute a component by the same operations in the same order. (The last
digits may still differ, as LLVM may fuse other products with sums.)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax.typing import DTypeLike

from ....solvers.arithmetic import Arithmetic, Components, PlainArithmetic
from ..llvm.builder import BOOL, Builder, ElementPointer, I64, Value
from .reading import LoadedNumbers, Memory


class ComponentTurn:
    """A turn of a loop over components: its number, and the arrays' components of that number."""

    def __init__(self, index: Value):
        self.index = index
        self._values: dict[Array, Value] = {}

    def value(self, array: Array) -> Value:
        if array not in self._values:
            self._values[array] = array.component(self)
        return self._values[array]


def _operator(op: Callable, dtype: DTypeLike | None = None) -> Callable[[Array, Any], Array]:
    return lambda self, other: componentwise(op, self, other, dtype=dtype)


def _swapped(op: Callable) -> Callable[[Array, Any], Array]:
    return lambda self, other: componentwise(op, other, self)


def _unary(op: Callable) -> Callable[[Array], Array]:
    return lambda self: componentwise(op, self)


class Array:
    """`n` components, as an expression: `component(turn)` writes the component of one turn of a
    loop. The operators act component by component, also with numbers. An array that reads memory
    has to be used before that memory changes."""

    def __init__(
        self, b: Builder, n: int, dtype: np.dtype, component: Callable[[ComponentTurn], Value]
    ):
        self.b, self.n, self.dtype = b, n, dtype
        self._component = component

    def component(self, turn: ComponentTurn) -> Value:
        memory = self.b.known_result(self)
        return self._component(turn) if memory is None else memory.load(turn.index)

    def stored(self) -> Memory:
        """The components in memory, to be read in this block and its inner blocks."""

        def store() -> Memory:
            memory = Memory.new(self.b, self.dtype, self.n, of_lanes=True)
            _for_each(self, lambda turn: memory.store(turn.index, turn.value(self)))
            return memory

        return self.b.once_for(self, store)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, part: slice) -> Array:
        """A part of the components, one after the other."""
        start, end, _ = part.indices(self.n)

        def component(turn: ComponentTurn) -> Value:
            return ComponentTurn(turn.index + start).value(self)

        return Array(self.b, end - start, self.dtype, component)

    __add__, __radd__ = _operator(operator.add), _swapped(operator.add)
    __sub__, __rsub__ = _operator(operator.sub), _swapped(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul), _swapped(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv), _swapped(operator.truediv)
    __and__, __or__ = _operator(operator.and_), _operator(operator.or_)
    __lt__, __le__ = _operator(operator.lt, BOOL), _operator(operator.le, BOOL)
    __gt__, __ge__ = _operator(operator.gt, BOOL), _operator(operator.ge, BOOL)

    __neg__, __invert__ = _unary(operator.neg), _unary(operator.invert)
    __abs__ = _unary(operator.abs)


def componentwise(op: Callable, *xs: Any, dtype: DTypeLike | None = None) -> Any:
    """`op` of the components of arrays, and of numbers that all components share. The result has
    the dtype `dtype`, by default that of the arrays; of numbers alone, it is a number."""
    arrays = [x for x in xs if isinstance(x, Array)]
    if not arrays:
        return op(*xs)

    def component(turn: ComponentTurn) -> Value:
        return op(*(turn.value(x) if isinstance(x, Array) else x for x in xs))

    first = arrays[0]
    return Array(first.b, first.n, np.dtype(dtype or first.dtype), component)


class StoredArray(Array):
    """An array that lies in memory."""

    def __init__(self, memory: Memory, n: int):
        buffer = memory.buffer
        super().__init__(buffer.builder, n, buffer.dtype, lambda turn: memory.load(turn.index))
        self._memory = memory

    def stored(self) -> Memory:
        return self._memory


def copied(x: Any) -> Any:
    """The same components, whatever happens to the memory that they come from."""
    if not isinstance(x, Array):
        return x
    copy = Array(x.b, x.n, x.dtype, lambda turn: turn.value(x))
    return StoredArray(copy.stored(), x.n)


class ComponentPlace:
    """A place for one component in memory, with the interface of a `Variable`."""

    def __init__(self, memory: Memory, index: Value):
        self._memory, self._index = memory, index

    def get(self) -> Value:
        return self._memory.load(self._index)

    def set(self, x: Value) -> None:
        self._memory.store(self._index, x)

    def set_where(self, mask: Value, x: Value) -> None:
        self._memory.store(self._index, x, mask)


class ArrayPlaces:
    """The places of an array in memory, zeros at first, with the interface of a `Variable`."""

    def __init__(self, b: Builder, dtype: np.dtype, n: int):
        self.b, self.dtype, self.n = b, dtype, n
        self.memory = Memory.new(b, dtype, n, of_lanes=True)
        self.set(0)

    def get(self) -> Array:
        """The array in these places, to be used before another one is stored in them."""
        return StoredArray(self.memory, self.n)

    def set(self, x: Any) -> None:
        array = self._array(x)
        _for_each(array, lambda turn: self.memory.store(turn.index, turn.value(array)))

    def set_where(self, mask: Value, x: Any) -> None:
        array = self._array(x)
        _for_each(array, lambda turn: self.memory.store(turn.index, turn.value(array), mask))

    def _array(self, x: Any) -> Array:
        if isinstance(x, Array):
            return x
        number = self.b.spread(self.b.as_value(x, self.dtype))
        return Array(self.b, self.n, self.dtype, lambda _: number)


@runtime_checkable
class StateForm(Protocol):
    """How many components a state has, of which dtype, and whether they are in memory."""

    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def in_memory(self) -> bool: ...


def places(b: Builder, form: StateForm) -> list:
    """Places for a state, which begins as zeros: variables, or one `ArrayPlaces`."""
    if form.in_memory:
        return [ArrayPlaces(b, form.dtype, form.size)]
    return [b.variable(form.dtype, 0) for _ in range(form.size)]


def set_all(variables: Iterable, xs: Iterable, mask: Value | None = None) -> None:
    """Set variables or places to these values, in the lanes of the mask or in all."""
    for variable, x in zip(variables, xs, strict=True):
        if mask is None:
            variable.set(x)
        else:
            variable.set_where(mask, x)


def built(b: Builder, form: StateForm, place: Callable, read: Callable[[Any], Value]) -> list:
    """A state whose component `c` is `read(place(c))`."""
    if form.in_memory:
        return [Array(b, form.size, form.dtype, lambda turn: read(place(turn.index)))]
    return [read(at) for at in [place(c) for c in range(form.size)]]


def _for_each(array: Array, body: Callable[[ComponentTurn], None], start: int = 0) -> None:
    array.b.for_(array.n, lambda i: body(ComponentTurn(i)), start)


def for_each_component(y: Sequence, body: Callable[[Any, Value], None]) -> None:
    """Call `body(c, x)` for every component `x` of a state, and its number `c`."""
    for c, x in enumerate(y):
        if isinstance(x, Array):
            assert len(y) == 1
            _for_each(x, lambda turn, x=x: body(turn.index, turn.value(x)))
        else:
            body(c, x)


def for_chosen(
    y: Sequence, chosen: Sequence[int] | None, body: Callable[[Any, Value], None]
) -> None:
    """Call `body(i, x)` for the `chosen` components `x` of a state, and their numbers `i` among
    these; None for all components."""
    if chosen is None:
        for_each_component(y, body)
    elif isinstance(x := y[0], Array):
        b = x.b
        places = ElementPointer(b, b.module.table(chosen, I64), I64)
        b.for_(len(chosen), lambda i: body(i, ComponentTurn(places.load(i)).value(x)))
    else:
        for i, c in enumerate(chosen):
            body(i, y[c])


def each_place(variables: Sequence, body: Callable[[Any, Any], None]) -> None:
    """Call `body(c, variable)` for the place of every component of a state."""
    for c, x in enumerate(variables):
        if isinstance(x, ArrayPlaces):
            assert len(variables) == 1
            x.b.for_(x.n, lambda i, x=x: body(i, ComponentPlace(x.memory, i)))
        else:
            body(c, x)


def changed(variables: Sequence, new: Callable[[Any, Callable[[], Value]], Value]) -> list:
    """A state whose component `c` is `new(c, get)`; `get()` reads component `c` of `variables`."""
    if variables and isinstance(variables[0], ArrayPlaces):
        (x,) = variables
        return [
            Array(
                x.b,
                x.n,
                x.dtype,
                lambda turn: new(turn.index, ComponentPlace(x.memory, turn.index).get),
            )
        ]
    return [new(c, x.get) for c, x in enumerate(variables)]


def total(components: Iterable[Any]) -> Any:
    """The sum of all components, in their order."""
    components = iter(components)
    first = next(components)
    if isinstance(first, Array):
        return _reduced(operator.add, first)
    return functools.reduce(operator.add, components, first)


def _reduced(op: Callable, x: Array) -> Value:
    """`op(...op(op(x0, x1), x2)...)`"""
    b = x.b

    def at(i: int) -> Value:
        return ComponentTurn(b.constant(i, I64)).value(x)

    if x.n == 1:
        return at(0)
    result = b.variable(x.dtype, op(at(0), at(1)))
    _for_each(x, lambda turn: result.set(op(result.get(), turn.value(x))), start=2)
    return result.get()


def _componentwise(name: str, dtype: DTypeLike | None = None) -> Callable:
    return lambda self, *xs: componentwise(getattr(self.b, name), *xs, dtype=dtype)


class LoopArithmetic(PlainArithmetic):
    """The operations on arrays of components, and on numbers as a builder has them."""

    def __init__(self, b: Builder):
        self.b = b

    minimum, maximum = _componentwise("minimum"), _componentwise("maximum")
    abs, sign, floor = _componentwise("abs"), _componentwise("sign"), _componentwise("floor")
    sqrt, equal = _componentwise("sqrt"), _componentwise("equal", BOOL)

    def where(self, mask: Any, x: Any, y: Any) -> Any:
        dtype = next((a.dtype for a in (x, y) if hasattr(a, "dtype")), None)
        return componentwise(self.b.where, mask, x, y, dtype=dtype)

    def cast(self, x: Any, dtype: DTypeLike) -> Any:
        return componentwise(lambda x: self.b.cast(x, dtype), x, dtype=np.dtype(dtype))

    def bitcast(self, x: Any, dtype: DTypeLike) -> Any:
        return componentwise(lambda x: self.b.bitcast(x, dtype), x, dtype=np.dtype(dtype))

    def broadcast_over(self, number: Any, component: Any) -> Any:
        if isinstance(number, Array) or not isinstance(component, Array):
            return number
        return componentwise(lambda _: number, component, dtype=number.dtype)

    def once(self, x: Any) -> Any:
        return StoredArray(x.stored(), x.n) if isinstance(x, Array) else x

    def mean(self, components: Components) -> Any:
        n = sum(x.n if isinstance(x, Array) else 1 for x in components)
        return self.total(components) * (1.0 / n)

    def total(self, components: Components) -> Any:
        return total(components)

    def largest(self, components: Components) -> Any:
        if isinstance(components[0], Array):
            return _reduced(lambda x, y: self.b.largest((x, y)), components[0])
        return self.b.largest(components)


def arithmetic(b: Builder, form: StateForm) -> Arithmetic:
    """The operations on the components of a state."""
    return LoopArithmetic(b) if form.in_memory else b


def numbers_of(components: Sequence) -> Sequence[Value]:
    """The components in the form in which a field reads them: an array's components in memory."""
    first = None if isinstance(components, LoadedNumbers) else next(iter(components), None)
    return LoadedNumbers(first.stored(), first.n) if isinstance(first, Array) else components
