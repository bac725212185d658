"""One pass over a program, which turns equations into statements."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from ..equations import opened, reader, registers, used
from ..gather_scatter import strides_of
from ..ir import Buffer, Const, Expr, For, Function, Index, Let, Op, Stmt, Store, Var
from ..simplifying import written_out
from .errors import UntranslatableError
from .values import cast, INT, LoweredArray, number, position, scalar, stored


Rule: TypeAlias = Callable[["Lowering", Any, list[LoweredArray]], list[LoweredArray]]
RULES: dict[str, Rule] = {}  # by the primitive that they lower
rule = registers(RULES)


class Lowering:
    """The state of one pass: the statements so far, and the names and memory in use. `functions`
    says whether `plain.FUNCTIONS` are written out."""

    def __init__(self, *, functions: bool) -> None:
        self.functions = functions
        self.blocks: list[list[Stmt]] = [[]]
        self.work: dict[np.dtype, int] = {}
        self.tables: list[int] = []
        self._names = itertools.count(1)
        self._counters = itertools.count(1)

    def function(self, outputs: tuple[Expr, ...], size: int, dtype: DTypeLike) -> Function:
        body = tuple(self.blocks[0])
        work = tuple(self.work.items())
        return Function(body, outputs, size, np.dtype(dtype), work, tuple(self.tables))

    def evaluate(self, jaxpr: Any, ins: Sequence[LoweredArray]) -> list[LoweredArray]:
        """The outputs of a jaxpr, closed or not; for the arguments see `interpreted`."""
        inner, values = opened(jaxpr, ins, self.constant)
        eqns, uses = used(inner)
        env = {v: self.settled(x, uses[v]) if uses[v] > 1 else x for v, x in values.items()}
        read = reader(env, self.constant)
        for eqn in eqns:
            plainer = written_out(eqn, functions=self.functions)
            args = [read(v) for v in eqn.invars]
            if plainer is None:
                outs = RULES[eqn.primitive.name](self, eqn, args)
            else:
                outs = self.evaluate(plainer, args)
            for v, out in zip(eqn.outvars, outs, strict=True):
                env[v] = self.settled(out.reshaped(v.aval.shape), uses[v])
        return [read(v) for v in inner.outvars]

    def settled(self, value: LoweredArray, uses: int) -> LoweredArray:
        """The value, stored in a variable or in memory if it would otherwise be computed several
        times."""
        if value.size == 1:
            return scalar(self.let(value.expr), value.shape)
        return self.stored(value) if uses > 1 and value.depth else value

    def constant(self, array: np.ndarray) -> LoweredArray:
        array = np.asarray(array)
        first = array.reshape(-1)[:1]
        if array.tobytes() == first.tobytes() * array.size:
            return scalar(Const(first[0]) if array.size else number(0, array.dtype), array.shape)
        return self.table(array)

    def table(self, array: np.ndarray) -> LoweredArray:
        if array.dtype.kind not in "iub":
            raise UntranslatableError("a constant array", "an unknown place")
        buffer = Buffer("table", INT, len(self.tables), array.size)
        self.tables += array.reshape(-1).astype(INT).tolist()
        return cast(stored(buffer, array.shape), array.dtype)

    def emit(self, stmt: Stmt) -> None:
        self.blocks[-1].append(stmt)

    @contextmanager
    def block(self) -> Iterator[list[Stmt]]:
        self.blocks.append([])
        yield self.blocks[-1]
        self.blocks.pop()

    def fresh(self, dtype: DTypeLike) -> Var:
        return Var(f"x{next(self._names)}", np.dtype(dtype))

    def let(self, expr: Expr) -> Expr:
        return self.variable(expr) if isinstance(expr, Op) else expr

    def variable(self, expr: Expr) -> Var:
        var = self.fresh(expr.dtype)
        self.emit(Let(var, expr))
        return var

    def allocate(self, dtype: DTypeLike, size: int) -> Buffer:
        dtype = np.dtype(dtype)
        start = self.work.get(dtype, 0)
        self.work[dtype] = start + size
        return Buffer("work", dtype, start, size)

    @contextmanager
    def loops(self, *sizes: int) -> Iterator[list[Expr]]:
        """Nested loops, of `sizes` turns, around the statements that the block emits. Yields their
        counters."""
        counters: list[Expr] = []
        opened: list[tuple[Var, int]] = []
        for n in sizes:
            if n == 1:
                counters.append(number(0, INT))
                continue
            var = Var(f"i{next(self._counters)}", INT)
            counters.append(var)
            opened.append((var, n))
            self.blocks.append([])
        yield counters
        for var, n in reversed(opened):
            body = tuple(self.blocks.pop())
            self.emit(For(var, n, body))

    def copy(self, value: LoweredArray, buffer: Buffer, offset: Index | None = None) -> None:
        """Write a value to a buffer, from the index `offset` on."""
        if value.along is not None:
            with self.loops(*value.shape) as counters:
                places = zip(counters, strides_of(value.shape), strict=True)
                self.emit(Store(buffer, (offset or Index()).plus(*places), value.along(counters)))
            return
        with self.loops(value.size) as (i,):
            target = (offset or Index()).plus((i, 1))
            self.emit(Store(buffer, target, value.at(Index().plus((i, 1)))))

    def stored(self, value: LoweredArray) -> LoweredArray:
        """The value in memory; it is copied there unless it lies there already."""
        if value.buffer is not None or value.size <= 1:
            return value
        buffer = self.allocate(value.dtype, value.size)
        self.copy(value, buffer)
        return stored(buffer, value.shape)

    def flat(self, value: LoweredArray) -> LoweredArray:
        """The value in a form that has a component for each index in row-major order."""
        return value if value.along is None else self.stored(value)

    def built(self, shape: Sequence[int], dtype: DTypeLike, component: Callable) -> LoweredArray:
        """An array in memory whose components are `component(counters)`."""
        if math.prod(shape) == 1:
            return scalar(self.let(component([number(0, INT)] * len(shape))), tuple(shape))
        buffer = self.allocate(dtype, math.prod(shape))
        with self.loops(*shape) as counters:
            expr = component(counters)
            self.emit(Store(buffer, position(counters, strides_of(shape)), expr))
        return stored(buffer, tuple(shape))


def aval_of(eqn: JaxprEqn) -> Any:
    return eqn.outvars[0].aval
