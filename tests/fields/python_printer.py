"""A lowered function as Python, to run it: a printer that shares nothing with those of engines.

It is strict. Every value must have the dtype that the program says; an index must be inside of its
buffer; memory must be written before it is read; a variable may only be used where a language with
scopes of loops and branches has it; and all of the result must be written.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ensembleode.fields.ir import (
    Assign,
    Buffer,
    Const,
    Expr,
    For,
    Function,
    Index,
    Let,
    Load,
    Matrix,
    Op,
    Product,
    Stmt,
    Store,
    Switch,
    Var,
    While,
)

from .operations import bitcast, convert, OPERATIONS


def run(
    fn: Function,
    u: np.ndarray,
    own: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    forward: np.ndarray | None = None,
    t: Any = 0.0,
) -> np.ndarray:
    """What the function computes, flat."""
    printer = _Printer()
    text = "\n".join(printer.function(fn))
    given = {"u": u, "own": own, "shared": shared, "forward": forward}
    given["table"] = np.array(fn.tables, np.int64)
    sizes = dict(fn.work)
    memories = {}
    for group, dtype in printer.groups:
        if group in ("work", "out"):
            size = sizes[dtype] if group == "work" else fn.size
            memories[f"{group}_{dtype}"] = Memory(np.zeros(size, dtype), written=False)
        else:
            assert given[group].dtype == dtype, (group, given[group].dtype, dtype)
            memories[f"{group}_{dtype}"] = Memory(given[group].reshape(-1), written=True)
    scope = {
        "convert": convert,
        "bitcast": bitcast,
        "ops": OPERATIONS,
        "of": of,
        "np": np,
        "nan": np.nan,
        "inf": np.inf,
        **memories,
    }
    exec(text, scope)
    with np.errstate(all="ignore"):
        result = scope["f"](np.dtype(printer.time or float).type(t))
    if fn.outputs or not fn.size:
        assert not fn.work
        return np.array(result, fn.dtype)
    out = memories[f"out_{fn.dtype}"]
    assert out.written.all(), "not all of the result is written"
    return out.array


class Memory:
    """The numbers of a group, and which of them have been written."""

    def __init__(self, array: np.ndarray, written: bool):
        self.array = array
        self.written = np.full(array.shape, written)

    def load(self, start: int, size: int, i: int) -> Any:
        self.check(start, size, i)
        assert self.written[start + i], "read before it is written"
        return self.array[start + i]

    def store(self, start: int, size: int, i: int, x: Any) -> None:
        self.check(start, size, i)
        self.array[start + i] = of(x, self.array.dtype)
        self.written[start + i] = True

    def check(self, start: int, size: int, i: int) -> None:
        if not (0 <= i < size and start + size <= self.array.size):
            raise IndexError((start, size, i, self.array.size))

    def matrix(self, start: int, rows: int, columns: int, transposed: bool) -> np.ndarray:
        part = self.array[start : start + rows * columns]
        assert part.size == rows * columns
        return part.reshape(columns, rows).T if transposed else part.reshape(rows, columns)

    def filled(self, start: int, size: int) -> None:
        assert self.written[start : start + size].all(), "read before it is written"

    def fill(self, start: int, size: int) -> None:
        self.written[start : start + size] = True


def of(x: Any, dtype: np.dtype) -> Any:
    assert isinstance(x, np.generic), x
    assert x.dtype == dtype, (x, x.dtype, dtype)
    return x


class _Printer:
    def __init__(self) -> None:
        self.groups: set[tuple[str, np.dtype]] = set()
        self.time: np.dtype | None = None
        self.scopes: list[set[str]] = [{"t"}]

    def function(self, fn: Function) -> Iterator[str]:
        yield "def f(t):"
        yield from self.block(fn.body, inner=False)
        yield f"    return [{', '.join(map(self.expr, fn.outputs))}]"

    def block(self, stmts: Sequence[Stmt], inner: bool = True) -> Iterator[str]:
        self.scopes += [set()] * inner
        for stmt in stmts:
            yield from ("    " + line for line in self.stmt(stmt))
        yield "    pass"
        del self.scopes[len(self.scopes) - inner :]

    def stmt(self, stmt: Stmt) -> Iterator[str]:
        match stmt:
            case Let(var, expr):
                assert not self.knows(var.name), f"{var.name} is there already"
                yield f"{var.name} = {self.expr(expr)}"
                self.scopes[-1] |= {var.name}
                assert expr.dtype == var.dtype
            case Assign(var, expr):
                assert self.knows(var.name), f"{var.name} is not there"
                assert expr.dtype == var.dtype
                yield f"{var.name} = {self.expr(expr)}"
            case Store(buffer, index, expr):
                yield f"{self.place(buffer, 'store')}, {self.index(index)}, {self.expr(expr)})"
            case For(var, n, body):
                yield f"for {var.name} in map(np.int64, range({n})):"
                self.scopes.append({var.name})
                yield from self.block(body)
                self.scopes.pop()
            case While(test, condition, body):
                yield "while True:"
                self.scopes.append(set())
                yield from self.block(test, inner=False)
                yield f"    if not {self.expr(condition)}: break"
                yield from self.block(body)
                self.scopes.pop()
            case Switch(which, cases):
                assert which.dtype == np.int64
                yield f"which = {self.expr(which)}"
                yield f"assert 0 <= which < {len(cases)}"
                for i, case in enumerate(cases):
                    yield f"{'elif' if i else 'if'} which == {i}:"
                    yield from self.block(case)
            case Product(out, x, y):
                yield from self.product(out, x, y)

    def product(self, out: Matrix, x: Matrix, y: Matrix) -> Iterator[str]:
        assert (out.rows, out.columns, x.columns) == (x.rows, y.columns, y.rows)
        assert {out.buffer.dtype} == {x.buffer.dtype, y.buffer.dtype}
        for m in (x, y):
            yield f"{self.place(m.buffer, 'filled')})"
        z, x, y = map(self.matrix, (out, x, y))
        yield f"{z}[...] = {x} @ {y}"
        yield f"{self.place(out.buffer, 'fill')})"

    def matrix(self, m: Matrix) -> str:
        name, start = self.memory(m.buffer), m.buffer.start
        assert m.buffer.size == m.rows * m.columns
        return f"{name}.matrix({start}, {m.rows}, {m.columns}, {m.transposed})"

    def place(self, buffer: Buffer, what: str) -> str:
        return f"{self.memory(buffer)}.{what}({buffer.start}, {buffer.size}"

    def memory(self, buffer: Buffer) -> str:
        self.groups.add((buffer.group, buffer.dtype))
        return f"{buffer.group}_{buffer.dtype}"

    def index(self, index: Index) -> str:
        for e, _ in index.terms:
            assert e.dtype == np.int64
        return " + ".join([str(index.offset), *(f"{s} * {self.expr(e)}" for e, s in index.terms)])

    def knows(self, name: str) -> bool:
        return any(name in scope for scope in self.scopes)

    def expr(self, expr: Expr) -> str:
        match expr:
            case Const(value):
                return repr(value)
            case Var(name, dtype):
                assert self.knows(name), f"{name} is not there"
                if name == "t":
                    self.time = dtype
                return name
            case Load(buffer, index):
                return f"{self.place(buffer, 'load')}, {self.index(index)})"
            case Op("convert_element_type" | "bitcast_convert_type" as name, (x,), dtype):
                function = "bitcast" if name.startswith("bit") else "convert"
                return f"of({function}({self.expr(x)}, np.{dtype!r}), np.{dtype!r})"
            case Op(name, args, dtype, param):
                xs = [*map(self.expr, args), *([] if param is None else [repr(param)])]
                return f"of(ops[{name!r}]({', '.join(xs)}), np.{dtype!r})"
