"""Fields in compiled code: lowering them, and evaluating them in place or by separate functions."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeAlias

import jax.extend.core as jex
import numpy as np

from ....fields import Inputs, ir, lower as lower_for, walking
from ....fields.derivatives.forwarding import forwarded
from ....tracing.evaluation import equations
from ..algebra.products import Strips
from ..algebra.reading import copied, LoadedNumbers, Memory, OperandReader
from ..llvm.builder import BOOL, Builder, ElementPointer, I64, Value
from ..llvm.heap import LentHeap
from ..llvm.module import Module
from . import tuning
from .printer import Printer


# There are no instructions for functions such as the incomplete gamma function.
lower = functools.partial(lower_for, functions=True)


def lowered(jaxpr: jex.Jaxpr, inputs: Inputs, largest_returned: int) -> ir.Function:
    """A function lowered by `fields.lower`, where loops over functions such as sines stay loops.
    **Raises:** `UntranslatableError`."""
    fn = lower(jaxpr, inputs, largest_returned)
    if walking.dear(fn) <= tuning.MOST_DEAR:
        return fn
    return lower(jaxpr, inputs, largest_returned, apart=False)


def by_loops(jaxpr: jex.Jaxpr, inputs: Inputs, largest_returned: int = 0) -> ir.Function:
    """A function lowered by `fields.lower`, all of whose loops stay loops, unless it has as many
    equations as there are scalars. Arrays that are only moved are not made. **Raises:**
    `UntranslatableError`."""
    most = tuning.MOST_SCALARS * sum(1 for _ in equations(jaxpr))
    return forwarded(lower(jaxpr, inputs, largest_returned, most=most))


def evaluate(
    b: Builder, fn: ir.Function, numbers: OperandReader, t: Value, mask: Value | None = None
) -> list[Value]:
    """The components of a function's result, evaluated at this place for the lanes of the mask;
    those that all lanes share are scalars. **Raises:** `UntranslatableError`."""
    return Printer(b, fn, numbers, t, mask).results()


def evaluate_with_parts(
    b: Builder, fn: ir.Function, numbers: OperandReader, t: Value, mask: Value | None = None
) -> tuple[list[Value], Callable[[ir.Expr], Value]]:
    """The results of `evaluate` for a function whose body is expressions alone; and a function that
    returns the value of each expression in it."""
    printer = Printer(b, fn, numbers, t, mask)
    return printer.results(), printer.expr


def evaluate_apart(
    b: Builder,
    fn: ir.Function,
    name: str,
    numbers: OperandReader,
    t: Value,
    mask: Value | None = None,
    result: Memory | None = None,
) -> LoadedNumbers:
    """`evaluate` by a separate function of the module, which is written once under this name for
    all callers whose numbers come from the same kinds of places. `result`: memory of lanes for the
    result, by default the caller's own."""
    written = _APART.setdefault(b.module, {})
    if b.waits is not None:
        name = f"{name}_or_wait"
    if name not in written:
        written[name] = _SeparateFunction(b, fn, name, numbers, t, mask)
    if result is None:
        result = Memory.new(b, fn.dtype, fn.size, of_lanes=True)
    return written[name](b, numbers, t, mask, result)


# A group, a dtype and a range of numbers (None for copied ones); or packed weights.
_Source: TypeAlias = tuple[str, np.dtype, tuple[int, int] | None] | Strips


class _SeparateFunction:
    """A separate function of the module, which reads its numbers from memory."""

    def __init__(
        self,
        b: Builder,
        fn: ir.Function,
        name: str,
        numbers: OperandReader,
        t: Value,
        mask: Value | None,
    ):
        self.fn, self.name = fn, name
        parameters = ["ptr noalias %out"]
        with b.module.function(name, parameters, attributes="noinline") as inside:
            heap = inside.heap = None if b.heap is None else LentHeap(inside)
            lasting = inside.passed = []

            def parameter(name: str, value: Value) -> Value:
                parameters.append(f"{value.type} %{name}")
                return inside.parameter(f"%{name}", value.dtype, value.lanes)

            self.time, self.mask = t.type, None if mask is None else mask.type
            time, lanes = parameter("t", t), None if mask is None else parameter("mask", mask)
            self.passed = _PassedNumbers(inside, numbers, parameters)
            result = Memory(ElementPointer(inside, "%out", fn.dtype), of_lanes=True)
            with nullcontext() if b.waits is None else inside.waiting() as waits:
                Printer(inside, fn, self.passed, time, lanes, result).stored()
            if waits is not None:
                inside.lasting_array(BOOL, 1).store_lanes(0, waits.get())
            inside.return_()
            self.arrays = [] if heap is None else heap.sizes
            parameters += [] if heap is None else heap.parameters
            self.lasting = lasting
            parameters += [f"ptr noalias %lasting{i}" for i in range(len(lasting))]

    def __call__(
        self, b: Builder, numbers: OperandReader, t: Value, mask: Value | None, result: Memory
    ) -> LoadedNumbers:
        assert (t.type, None if mask is None else mask.type) == (self.time, self.mask), self.name
        args = [f"ptr {result.buffer.base}", str(t), *([] if mask is None else [str(mask)])]
        for source in self.passed.places:
            if isinstance(source, Strips):
                packed = numbers.packed(source)
                assert packed is not None, self.name
                args.append(f"ptr {packed.base}")
                continue
            group, dtype, ends = source
            if ends is None:
                memory = copied(b, numbers, group, dtype, self.passed.copied[group, dtype])
            else:
                memory = numbers.memory(group, dtype, *ends)
                assert memory is not None, (self.name, group, dtype, ends)
            args.append(f"ptr {memory.buffer.base}")
            if memory.offsets is not None:
                args.append(str(memory.offsets))
                args += [] if isinstance(memory.stride, int) else [str(memory.stride)]
        if self.arrays:
            assert b.heap is not None, self.name
            args += [f"ptr {x}" for x in b.heap.lent(self.name, self.arrays)]
        lasting = b.passed_to(self.name, self.lasting)
        args += [f"ptr {x.base}" for x in lasting]
        b.emit(f"call void @{self.name}({', '.join(args)})")
        if b.waits is not None:
            b.waits.set(b.waits.get() | lasting[-1].load_lanes(0))
        return LoadedNumbers(result, self.fn.size)


_APART: weakref.WeakKeyDictionary[Module, dict[str, _SeparateFunction]] = (
    weakref.WeakKeyDictionary()
)


class _PassedNumbers(OperandReader):
    """The numbers that a separate function is passed, as its code asks for them: `places` is the
    memory of each of its parameters, and `copied` says which numbers of a group are copied."""

    def __init__(self, b: Builder, numbers: OperandReader, parameters: list[str]):
        self.b, self.numbers, self.parameters = b, numbers, parameters
        self.places: dict[_Source, Memory] = {}
        self.copied: dict[tuple[str, np.dtype], set[int]] = {}
        self._gathered: dict[tuple[str, np.dtype, int], Value] = {}
        self._beginning = b.position

    def load(self, group: str, dtype: np.dtype, index: int) -> Value:
        return self._copied(group, dtype, range(index, index + 1)).load(index)

    def read(self, buffer: ir.Buffer, index: int) -> Value:
        ends = buffer.start, buffer.start + buffer.size
        memory = self._passed(buffer.group, buffer.dtype, *ends)
        if memory is None:
            return self.load(buffer.group, buffer.dtype, index)
        if memory.offsets is None:
            return memory.load(index)
        # Numbers that are not contiguous are gathered once, at the function's beginning.
        place = buffer.group, buffer.dtype, index
        if place not in self._gathered:
            with self.b.inserting(self._beginning):
                self._gathered[place] = memory.load(index)
        return self._gathered[place]

    def memory(self, group: str, dtype: np.dtype, start: int, end: int) -> Memory:
        memory = self._passed(group, dtype, start, end)
        return memory or self._copied(group, dtype, range(start, end))

    def _passed(self, group: str, dtype: np.dtype, start: int, end: int) -> Memory | None:
        source = group, dtype, (start, end)
        if source not in self.places:
            memory = self.numbers.memory(group, dtype, start, end)
            if memory is None:
                return None
            at = memory.offsets, memory.stride
            self._add(source, dtype, *at, of_lanes=memory.of_lanes)
        return self.places[source]

    def packed(self, strips: Strips) -> ElementPointer | None:
        if strips not in self.places:
            if self.numbers.packed(strips) is None:
                return None
            self._add(strips, strips.dtype, of_lanes=False)
        return self.places[strips].buffer

    def _copied(self, group: str, dtype: np.dtype, indices: range) -> Memory:
        source = group, dtype, None
        if source not in self.places:
            self.copied[group, dtype] = set()
            self._add(source, dtype, of_lanes=group != "shared")
        self.copied[group, dtype].update(indices)
        return self.places[source]

    def _add(
        self,
        source: _Source,
        dtype: np.dtype,
        offsets: Value | None = None,
        stride: Value | int = 1,
        *,
        of_lanes: bool,
    ) -> None:
        name = f"%numbers{len(self.places)}"
        self.parameters.append(f"ptr noalias readonly {name}")
        if offsets is not None:
            self.parameters.append(f"{offsets.type} {name}_offsets")
            offsets = self.b.parameter(f"{name}_offsets", I64, offsets.lanes)
            if isinstance(stride, Value):
                self.parameters.append(f"{stride.type} {name}_stride")
                stride = self.b.parameter(f"{name}_stride", I64)
        place = ElementPointer(self.b, name, dtype)
        self.places[source] = Memory(place, of_lanes=of_lanes, offsets=offsets, stride=stride)
