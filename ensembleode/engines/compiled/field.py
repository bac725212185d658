"""A lowered function as instructions: the printer of `fields.ir` to LLVM IR, for lanes.

A number that differs between lanes is a value with an entry for each lane; a number that all lanes
share is a scalar (see `uniformity.py`). Where lanes take different branches, all lanes run every
branch that one of them takes, and masks keep the results of the others unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import jax.extend.core as jex
import numpy as np

from ...fields import Inputs, ir, lower, walking
from ...tracing.program import equations
from .builder import BOOL, Buffer, Builder, I64, Value, Variable
from .machine import current
from .module import Module
from .operations import checked, operation
from .products import product
from .reading import copied, Loaded, Memory, Numbers
from .uniformity import Region, Uniformity


# Loops of at most as many simple operations are unrolled.
_WRITTEN_OUT = 128
# The turns of longer loops that are written one behind the other where there are 32 vector
# registers, if the cost of a turn is at most this. Such turns hide each other's latency (with 16
# registers they are no faster).
_TURNS_AT_ONCE, _LONGEST_TURN = 4, 64
# A field with more expensive functions, such as sines, is not taken apart into scalars.
_MOST_DEAR = 24
# A long program is taken apart into at most as many operations on scalars for each equation.
_MOST_SCALARS = 2
# Where lanes take different branches, branches of at most this cost are all run without a test.
_CHEAP = 32


def lowered(jaxpr: jex.Jaxpr, inputs: Inputs, largest_returned: int) -> ir.Function:
    """A function lowered by `fields.lower`. Loops over functions such as sines stay loops:
    unrolled, they take long to compile and are no faster.

    **Raises:** `UntranslatableError`.
    """
    fn = lower(jaxpr, inputs, largest_returned)
    if walking.dear(fn) <= _MOST_DEAR:
        return fn
    return lower(jaxpr, inputs, largest_returned, apart=False)


def by_loops(jaxpr: jex.Jaxpr, inputs: Inputs, largest_returned: int = 0) -> ir.Function:
    """A function lowered by `fields.lower`, all of whose loops stay loops, so that its code is as
    long as the program. A program of as many equations as there are scalars is taken apart even so.

    **Raises:** `UntranslatableError`.
    """
    most = _MOST_SCALARS * sum(1 for _ in equations(jaxpr))
    return lower(jaxpr, inputs, largest_returned, most=most)


def evaluate(
    b: Builder, fn: ir.Function, numbers: Numbers, t: Value, mask: Value | None = None
) -> list[Value]:
    """Write the evaluation of a function at this place. Returns the components of its result; those
    that all lanes share are scalars.

    **Arguments:** `mask`: the lanes whose results are used; loops don't go on for other lanes.

    **Raises:** `UntranslatableError` for an operation or a dtype that isn't supported.
    """
    return _Printer(b, fn, numbers, t, mask).results()


def evaluate_with_parts(
    b: Builder, fn: ir.Function, numbers: Numbers, t: Value, mask: Value | None = None
) -> tuple[list[Value], Callable[[ir.Expr], Value]]:
    """The results of `evaluate` for a function that consists of expressions only, and a function
    that returns the value of each of these expressions."""
    printer = _Printer(b, fn, numbers, t, mask)
    return printer.results(), printer.expr


def evaluate_apart(
    b: Builder,
    fn: ir.Function,
    name: str,
    numbers: Numbers,
    t: Value,
    mask: Value | None = None,
    result: Memory | None = None,
) -> Loaded:
    """`evaluate` in a function of its own in the module, which is written once: for long functions
    that are evaluated in many places.

    **Arguments:**

    - `name`: the name of that function. All `numbers` passed under one name must come from the same
        kind of place.
    - `result`: memory of lanes for the result; by default it is on the stack.
    """
    written = _APART.setdefault(b.module, {})
    if name not in written:
        written[name] = _Apart(b, fn, name, numbers, t, mask)
    if result is None:
        result = Memory.on_stack(b, fn.dtype, fn.size, of_lanes=True)
    return written[name](b, numbers, t, mask, result)


_Source: TypeAlias = tuple[str, np.dtype, tuple[int, int] | None]


class _Apart:
    """A separate function of the module, which reads its numbers from memory; numbers that are in
    registers are copied there before the call."""

    def __init__(
        self, b: Builder, fn: ir.Function, name: str, numbers: Numbers, t: Value, mask: Value | None
    ):
        self.fn, self.name = fn, name
        parameters = ["ptr noalias %out"]
        with b.module.function(name, parameters, attributes="noinline") as inside:

            def parameter(name: str, value: Value | None) -> Value | None:
                if value is None:
                    return None
                parameters.append(f"{value.type} %{name}")
                return inside.parameter(f"%{name}", value.dtype, value.lanes)

            self.time, self.mask = t.type, None if mask is None else mask.type
            time, lanes = parameter("t", t), parameter("mask", mask)
            self.passed = _Passed(inside, numbers, parameters)
            result = Memory(Buffer(inside, "%out", fn.dtype), of_lanes=True)
            _Printer(inside, fn, self.passed, time, lanes, result).stored()
            inside.return_()

    def __call__(
        self, b: Builder, numbers: Numbers, t: Value, mask: Value | None, result: Memory
    ) -> Loaded:
        assert (t.type, None if mask is None else mask.type) == (self.time, self.mask), self.name
        args = [f"ptr {result.buffer.base}", str(t), *([] if mask is None else [str(mask)])]
        for group, dtype, ends in self.passed.places:
            if ends is None:
                memory = copied(b, numbers, group, dtype, self.passed.copied[group, dtype])
            else:
                memory = numbers.memory(group, dtype, *ends)
                assert memory is not None, (self.name, group, dtype, ends)
            args.append(f"ptr {memory.buffer.base}")
            if memory.offsets is not None:
                args.append(str(memory.offsets))
                args += [] if isinstance(memory.stride, int) else [str(memory.stride)]
        b.emit(f"call void @{self.name}({', '.join(args)})")
        return Loaded(result, self.fn.size)


_APART: weakref.WeakKeyDictionary[Module, dict[str, _Apart]] = weakref.WeakKeyDictionary()


class _Passed(Numbers):
    """The numbers that a separate function is passed, as its code asks for them.

    - `places`: for each of the function's parameters in order, the group, the dtype and the range
        of numbers; None for a range of numbers that is `copied`.
    """

    def __init__(self, b: Builder, numbers: Numbers, parameters: list[str]):
        self.b, self.numbers, self.parameters = b, numbers, parameters
        self.places: dict[_Source, Memory] = {}
        self.copied: dict[tuple[str, np.dtype], set[int]] = {}

    def load(self, group: str, dtype: np.dtype, index: int) -> Value:
        return self._copied(group, dtype, range(index, index + 1)).load(index)

    def read(self, buffer: ir.Buffer, index: int) -> Value:
        ends = buffer.start, buffer.start + buffer.size
        memory = self._passed(buffer.group, buffer.dtype, *ends)
        # Numbers that are not contiguous are gathered as rarely as possible.
        if memory is None or memory.offsets is not None:
            return self.load(buffer.group, buffer.dtype, index)
        return memory.load(index)

    def memory(self, group: str, dtype: np.dtype, start: int, end: int) -> Memory:
        memory = self._passed(group, dtype, start, end)
        return memory or self._copied(group, dtype, range(start, end))

    def _passed(self, group: str, dtype: np.dtype, start: int, end: int) -> Memory | None:
        source = group, dtype, (start, end)
        if source not in self.places:
            memory = self.numbers.memory(group, dtype, start, end)
            if memory is None:
                return None
            self._add(source, memory.of_lanes, memory.offsets, memory.stride)
        return self.places[source]

    def _copied(self, group: str, dtype: np.dtype, indices: range) -> Memory:
        source = group, dtype, None
        if source not in self.places:
            self.copied[group, dtype] = set()
            self._add(source, group != "shared", None, 1)
        self.copied[group, dtype].update(indices)
        return self.places[source]

    def _add(
        self, source: _Source, of_lanes: bool, offsets: Value | None, stride: Value | int
    ) -> None:
        name = f"%numbers{len(self.places)}"
        self.parameters.append(f"ptr noalias readonly {name}")
        if offsets is not None:
            self.parameters.append(f"{offsets.type} {name}_offsets")
            offsets = self.b.parameter(f"{name}_offsets", I64, offsets.lanes)
            if isinstance(stride, Value):
                self.parameters.append(f"{stride.type} {name}_stride")
                stride = self.b.parameter(f"{name}_stride", I64)
        place = Buffer(self.b, name, source[1])
        self.places[source] = Memory(place, of_lanes=of_lanes, offsets=offsets, stride=stride)


class _Printer:
    def __init__(
        self,
        b: Builder,
        fn: ir.Function,
        numbers: Numbers,
        t: Value | None,
        mask: Value | None,
        result: Memory | None = None,
    ):
        self.b, self.fn, self.numbers = b, fn, numbers
        own_time = t is not None and bool(t.lanes)
        self.uniformity = Uniformity(fn, has_lanes=bool(b.lanes), own_time=own_time)
        self.values: dict[str, Value] = {} if t is None else {"t": t}
        self.variables: dict[str, Variable] = {}
        self.memories: dict[object, Memory] = {}
        self.result = result
        # The innermost region, and the lanes that are in it.
        self.region: Region = ()
        self.mask = mask
        # The position for instructions whose results are needed from the beginning.
        self.beginning = b.position

    def results(self) -> list[Value]:
        self.block(self.fn.body)
        if self.fn.outputs:
            return [self.expr(x) for x in self.fn.outputs]
        everything = ir.Buffer("out", self.fn.dtype, 0, self.fn.size)
        return [self.load(everything, i) for i in range(self.fn.size)]

    def stored(self) -> None:
        """Write the function, storing its result to `self.result`."""
        self.block(self.fn.body)
        assert self.result is not None
        # All components are computed before any is stored.
        for i, x in enumerate([self.expr(x) for x in self.fn.outputs]):
            self.result.store(i, x)

    #
    # Statements
    #

    def block(self, stmts: Sequence[ir.Stmt]) -> None:
        for stmt in stmts:
            self.stmt(stmt)

    def stmt(self, stmt: ir.Stmt) -> None:
        match stmt:
            case ir.Let(var, expr):
                value = self.expr(expr)
                if var.name in self.uniformity.assigned:
                    self.variable(var).set(value)
                else:
                    self.values[var.name] = value
            case ir.Assign(var, expr):
                variable, value = self.variable(var), self.expr(expr)
                if self.uniformity.is_local(var, self.region):
                    variable.set(value)
                else:
                    assert self.mask is not None
                    variable.set_where(self.mask, value)
            case ir.Store(buffer, index, expr):
                self.store(buffer, self.index(index), self.expr(expr))
            case ir.For(var, n, body):
                self.loop(var, n, body)
            case ir.While():
                self.while_(stmt)
            case ir.Switch():
                self.switch(stmt)
            case ir.Product(out, x, y):
                self.product(out, x, y)

    def variable(self, var: ir.Var) -> Variable:
        if var.name not in self.variables:
            of_lanes = self.uniformity.varies(var)
            variable = self.b.variable(checked(var.dtype), of_lanes=of_lanes)
            self.variables[var.name] = variable
        return self.variables[var.name]

    def loop(self, var: ir.Var, n: int, body: Sequence[ir.Stmt]) -> None:
        def turn(i: Value) -> None:
            self.values[var.name] = i
            self.block(body)

        if n * (walking.length(body) + walking.cost(body)) <= _WRITTEN_OUT:
            at_once = n
        else:
            has_room = self.b.lanes > 1 and current().registers >= 32
            is_short = walking.is_flat(body) and walking.cost(body) <= _LONGEST_TURN
            at_once = _TURNS_AT_ONCE if has_room and is_short else 1

        def turns(first: Value | int) -> None:
            for k in range(at_once):
                turn(first + k if isinstance(first, Value) else self.b.constant(first + k, I64))

        whole, rest = divmod(n, at_once) if n else (0, 0)
        if whole == 1:
            turns(0)
        elif whole:
            self.b.for_(whole, lambda i: turns(i * at_once if at_once > 1 else i))
        for i in range(n - rest, n):
            turn(self.b.constant(i, I64))

    def while_(self, stmt: ir.While) -> None:
        b = self.b
        inside = self.uniformity.inside(stmt, stmt.condition, self.region)
        if inside == self.region:

            def goes_on() -> Value:
                self.block(stmt.test)
                going = self.expr(stmt.condition)
                # With a single lane, that lane may be one whose results aren't used.
                alone = self.mask is not None and not self.mask.lanes
                return going & self.mask if alone else going

            b.while_(goes_on, lambda: self.block(stmt.body))
            return
        active = b.variable(BOOL, self.lanes_here())

        def any_goes_on() -> Value:
            now = active.get()
            with self.within(inside, now):
                self.block(stmt.test)
                going = now & self.expr(stmt.condition)
            active.set(going)
            return b.any(going)

        def turn() -> None:
            with self.within(inside, active.get()):
                self.block(stmt.body)

        b.while_(any_goes_on, turn)

    def switch(self, stmt: ir.Switch) -> None:
        b, which = self.b, self.expr(stmt.which)
        last = len(stmt.cases) - 1
        if which.constant is not None:
            self.block(stmt.cases[min(max(int(which.constant), 0), last)])
        elif self.uniformity.inside(stmt, stmt.which, self.region) == self.region:
            self.branch(which, stmt.cases)
        else:
            left = self.lanes_here()
            cheap = sum(map(walking.cost, stmt.cases)) <= _CHEAP
            for k, case in enumerate(stmt.cases):
                here = left if k == last else left & which.eq(k)
                inside = self.uniformity.inside(stmt, stmt.which, self.region, k)

                def run(case=case, here=here, inside=inside) -> None:
                    with self.within(inside, here):
                        self.block(case)

                if cheap:
                    run()
                elif case:
                    b.if_(b.any(here), run)
                left = left & which.ne(k)

    def branch(self, which: Value, cases: Sequence[Sequence[ir.Stmt]], k: int = 0) -> None:
        """Run one of the cases, by a number that all lanes share."""
        if k == len(cases) - 1:
            self.block(cases[k])
        else:
            self.b.if_(
                which.eq(k), lambda: self.block(cases[k]), lambda: self.branch(which, cases, k + 1)
            )

    def lanes_here(self) -> Value:
        if self.mask is not None:
            return self.b.spread(self.mask)
        return self.b.constant(True, BOOL, of_lanes=True)

    @contextmanager
    def within(self, region: Region, mask: Value) -> Iterator[None]:
        before = self.region, self.mask
        self.region, self.mask = region, mask
        try:
            yield
        finally:
            self.region, self.mask = before

    def product(self, out: ir.Matrix, x: ir.Matrix, y: ir.Matrix) -> None:
        def entry(m: ir.Matrix) -> Callable[[Value | int, Value | int], Value]:
            return lambda row, column: self.load(m.buffer, _place(m, row, column))

        product(
            self.b,
            (out.rows, out.columns, x.columns),
            out.buffer.dtype,
            entry(x),
            entry(y),
            lambda row, column, total: self.store(out.buffer, _place(out, row, column), total),
            varies=self.uniformity.in_lanes(out.buffer),
        )

    #
    # Memory
    #

    def index(self, index: ir.Index) -> Value | int:
        """An index into a buffer; a Python number where it is known."""
        known = index.offset
        parts: list[Value] = []
        for e, stride in index.terms:
            value = self.expr(e)
            if value.constant is not None:
                known += stride * int(value.constant)
            else:
                parts.append(value * stride if stride != 1 else value)
        if not parts:
            return known
        # Scalars are added first, as that takes scalar instructions.
        first, *others = sorted(parts, key=lambda x: x.lanes)
        total = first + known if known else first
        for x in others:
            total = total + x
        return total

    def load(self, buffer: ir.Buffer, index: Value | int) -> Value:
        checked(buffer.dtype)
        if buffer.group in ("work", "out"):
            return self.scratch(buffer).load(self._offset(buffer) + index)
        place = buffer.start + index
        if buffer.group == "table":
            if isinstance(place, int):
                return self.b.constant(self.fn.tables[place], I64)
            return self.table().load(place)
        if isinstance(place, int):
            return self.numbers.read(buffer, place)
        return self.memory(buffer).load(place)

    def store(self, buffer: ir.Buffer, index: Value | int, value: Value) -> None:
        mask = None if self.uniformity.is_local(buffer, self.region) else self.mask
        self.scratch(buffer).store(self._offset(buffer) + index, value, mask)

    def _offset(self, buffer: ir.Buffer) -> int:
        if buffer.group == "out" and self.result is not None:
            return buffer.start
        return buffer.start - self.uniformity.place_of(buffer)[2]

    def scratch(self, buffer: ir.Buffer) -> Memory:
        if buffer.group == "out" and self.result is not None:
            return self.result
        place = self.uniformity.place_of(buffer)
        if place not in self.memories:
            _, dtype, start, end = place
            of_lanes = self.uniformity.in_lanes(buffer)
            checked(dtype)
            self.memories[place] = Memory.on_stack(self.b, dtype, end - start, of_lanes=of_lanes)
        return self.memories[place]

    def table(self) -> Memory:
        if "table" not in self.memories:
            place = Buffer(self.b, self.b.module.table(self.fn.tables, I64), I64)
            self.memories["table"] = Memory(place, of_lanes=False)
        return self.memories["table"]

    def memory(self, buffer: ir.Buffer) -> Memory:
        """The memory of a buffer's group, for computed indices."""
        group, dtype, ends = buffer.group, buffer.dtype, (buffer.start, buffer.start + buffer.size)
        memory = self.numbers.memory(group, dtype, *ends)
        if memory is not None:
            return memory
        if buffer not in self.memories:
            # The copy is made at the beginning, so that it can be used everywhere.
            with self.b.inserting(self.beginning):
                self.memories[buffer] = copied(self.b, self.numbers, group, dtype, range(*ends))
        return self.memories[buffer]

    #
    # Expressions
    #

    def expr(self, expr: ir.Expr) -> Value:
        match expr:
            case ir.Const(value):
                return self.b.constant(value, checked(value.dtype))
            case ir.Var(name, _):
                variable = self.variables.get(name)
                return self.values[name] if variable is None else variable.get()
            case ir.Load(buffer, index):
                return self.load(buffer, self.index(index))
            case ir.Op(name, args, dtype, param):
                return operation(self.b, name, [self.expr(x) for x in args], dtype, param)


def _place(m: ir.Matrix, row: Value | int, column: Value | int) -> Value | int:
    if m.transposed:
        row, column, columns = column, row, m.rows
    else:
        columns = m.columns
    return row * columns + column
