"""Prints a lowered function (`fields/ir.py`) as LLVM IR, for all lanes at once.

A number that differs between lanes is a value with an entry for each lane; a number that all lanes
share is a scalar (see `uniformity.py`). Where lanes take different branches, all lanes run every
branch that one of them takes, and masks keep the results of the others unchanged.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ....fields import ir, walking
from ..algebra.products import product, Rows, Strips, strips_pay, tile_of
from ..algebra.reading import copied, Memory, OperandReader
from ..llvm.builder import BOOL, Builder, ElementPointer, I64, Value, Variable
from ..llvm.machine import current
from . import tuning
from .operations import checked, DRAWN, operation
from .uniformity import Region, Uniformity


class Printer:
    """Writes the instructions of a function at the builder's position, for the lanes of the mask.
    The function reads `numbers` and the time `t`; `stored` puts its result into `result`."""

    def __init__(
        self,
        b: Builder,
        fn: ir.Function,
        numbers: OperandReader,
        t: Value,
        mask: Value | None,
        result: Memory | None = None,
    ):
        self.b, self.fn, self.numbers = b, fn, numbers
        self.uniformity = Uniformity(fn, has_lanes=bool(b.lanes), own_time=bool(t.lanes))
        self.values = {"t": t}
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
        assert self.result is not None
        self.block([x for x in self.fn.body if not self._in_place(x)])
        # All components are computed before any is stored.
        for i, x in enumerate([self.expr(x) for x in self.fn.outputs]):
            self.result.store(i, x)

    def _in_place(self, stmt: ir.Stmt) -> bool:
        """Whether a statement copies a whole array to the result, where that array then lies."""
        match stmt:
            case ir.For(i, n, (ir.Store(ir.Buffer("out") as out, to, ir.Load(source, index)),)):
                is_whole = to == index == ir.Index(0, ((i, 1),)) and out.size == source.size == n
            case _:
                return False
        if not is_whole or source.group != "work" or not self.uniformity.in_lanes(source):
            return False
        place = self.uniformity.place_of(source)
        if place[2:] != (source.start, source.start + n) or place in self.memories:
            return False
        assert self.result is not None
        self.memories[place] = self.result.moved(out.start)
        return True

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
            case ir.Product():
                self.product(stmt)

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

        has_room = self.b.lanes > 1 and current().registers >= 32
        is_short = walking.is_flat(body) and walking.cost(body) <= tuning.LONGEST_TURN
        at_once = tuning.TURNS_AT_ONCE if has_room and is_short else 1
        if n * (walking.length(body) + walking.cost(body)) <= tuning.WRITTEN_OUT:
            at_once = n

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
            with self.inside_region(inside, now):
                self.block(stmt.test)
                going = now & self.expr(stmt.condition)
            active.set(going)
            return b.any(going)

        def turn() -> None:
            with self.inside_region(inside, active.get()):
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
            cheap = sum(map(walking.cost, stmt.cases)) <= tuning.CHEAP
            for k, case in enumerate(stmt.cases):
                here = left if k == last else left & which.eq(k)
                inside = self.uniformity.inside(stmt, stmt.which, self.region, k)

                def run(case=case, here=here, inside=inside) -> None:
                    with self.inside_region(inside, here):
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
    def inside_region(self, region: Region, mask: Value) -> Iterator[None]:
        before = self.region, self.mask
        self.region, self.mask = region, mask
        try:
            yield
        finally:
            self.region, self.mask = before

    def product(self, stmt: ir.Product) -> None:
        b, out, dtype = self.b, stmt.out, stmt.out.buffer.dtype
        shape = out.rows, out.columns, stmt.x.columns
        varies = self.uniformity.in_lanes(out.buffer)
        tile = tile_of(b, shape, dtype, varies=varies)
        x, y = self._rows(stmt.x, tile.rows), self._rows(stmt.y.swapped, tile.columns)

        def store(row: Value | int, column: Value | int, total: Value) -> None:
            self.store(out.buffer, _place(out, row, column), total)

        product(b, shape, tile, dtype, x, y, store, varies=varies)

    def _rows(self, m: ir.Matrix, at_once: int) -> Rows:
        """The rows of a matrix, for a product that takes `at_once` of them at a time."""
        if m.buffer.group == "shared" and strips_pay(self.b, m):
            strips = Strips(m, at_once)
            if (packed := self.numbers.packed(strips)) is not None:
                return strips.rows(packed)

        def found(first: Value | int, n: int, term: Value | int) -> list[Value]:
            return [self.load(m.buffer, _place(m, first + i, term)) for i in range(n)]

        return found

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
        return functools.reduce(operator.add, others, first + known if known else first)

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
            self.memories[place] = Memory.new(self.b, dtype, end - start, of_lanes=of_lanes)
        return self.memories[place]

    def table(self) -> Memory:
        place = ElementPointer(self.b, self.b.module.table(self.fn.tables, I64), I64)
        return Memory(place, of_lanes=False)

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
            case ir.Op(name, args, dtype, param) if name in DRAWN:
                return operation(self.b, name, [self.read_once(x) for x in args], dtype, param)
            case ir.Op(name, args, dtype, param):
                return operation(self.b, name, [self.expr(x) for x in args], dtype, param)

    def read_once(self, expr: ir.Expr) -> Value:
        """An operand of a random number. An input of the function is read once, so that the numbers
        of a block have the same operands, and share its words."""
        match expr:
            case ir.Load(ir.Buffer(group), ir.Index(_, ())) if group not in ("work", "out"):
                return self.b.once_for((self, expr), lambda: self.expr(expr))
        return self.expr(expr)


def _place(m: ir.Matrix, row: Value | int, column: Value | int) -> Value | int:
    by_row, by_column = m.strides
    return row * by_row + column * by_column
