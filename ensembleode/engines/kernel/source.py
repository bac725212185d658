"""A lowered function as C++ source, for the device.

The operations are the functions `do_...` of `primitives.cuh`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..codegen.ir import (
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
from ..codegen.lower import UntranslatableError


TYPES = {"bool", "float32", "float64"} | {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
# What neither CUDA nor C has under any name.
_MISSING = {
    "bessel_i0e",
    "bessel_i1e",
    "digamma",
    "igamma",
    "igammac",
    "polygamma",
    "regularized_incomplete_beta",
    "zeta",
}
_INFIX = {
    "add": "+",
    "and": "&",
    "div": "/",
    "eq": "==",
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "mul": "*",
    "ne": "!=",
    "or": "|",
    "sub": "-",
    "xor": "^",
}


def cpp_source(fn: Function, name: str, argument: str, *, apart: bool) -> str:
    """The definition of a function `name(lane, argument, t, out)`, or of `name(lane, u, argument,
    t, out)` where the argument is called `forward`.

    **Arguments:**

    - `argument`: the group of the IR that it is a function of, besides the parameters and time:
        `"u"`; or `"forward"`, where `u` is one more.
    - `apart`: whether it is called, and not part of its caller: long ones.

    **Raises:** `UntranslatableError` for a dtype or an operation that the device has not got.
    """
    dtype = type_of(fn.dtype)
    printer = _Printer(name)
    body = list(printer.block(fn.body))
    arguments = ["u"] if argument == "u" else ["u", argument]
    pointers = ", ".join(f"const {dtype}* __restrict__ {a}" for a in arguments)
    kind = "APART" if apart else "DEVICE"
    lines = []
    if fn.tables:
        lines += [f"TABLE int64 table_{name}[] = {{{', '.join(map(str, fn.tables))}}};"]
    lines += [f"{kind} void {name}(const Lane& lane, {pointers}, {dtype} t, {dtype}* out) {{"]
    for dtype_of_work, size in fn.work:
        lines += [f"  {type_of(dtype_of_work)} work_{dtype_of_work.name}[{size}];"]
    lines += ["  " + line for line in body]
    # All are computed before any is stored: they may be read from where the results go.
    lines += [f"  const {dtype} out{i} = {printer.expr(x)};" for i, x in enumerate(fn.outputs)]
    lines += [f"  out[{i}] = out{i};" for i in range(len(fn.outputs))]
    return "\n".join([*lines, "}", ""])


def type_of(dtype: np.dtype) -> str:
    """The name of a dtype in C++, by the typedefs of `primitives.cuh`."""
    if dtype.name not in TYPES:
        raise UntranslatableError(f"{dtype.name} numbers", "f")
    return dtype.name


def literal(value: Any) -> str:
    """A NumPy scalar in C++."""
    kind, name = value.dtype.kind, type_of(value.dtype)
    if kind == "b":
        return "true" if value else "false"
    if kind == "f":
        if np.isnan(value):
            return f"nan_of({name}(0))"
        if np.isinf(value):
            return f"(-infinity({name}(0)))" if value < 0 else f"infinity({name}(0))"
        text = str(value)  # the shortest digits that read back as this number
        text += "f" if name == "float32" else ""
        return f"({text})" if text.startswith("-") else text
    if name == "int64":
        least = np.iinfo(np.int64).min
        return f"(-{-(int(value) + 1)}ll - 1)" if value == least else f"({value}ll)"
    return f"{name}({value}{'ull' if kind == 'u' else 'll'})"


class _Printer:
    def __init__(self, name: str):
        self.name = name

    def block(self, stmts: Sequence[Stmt]) -> Iterator[str]:
        for stmt in stmts:
            yield from self.stmt(stmt)

    def inner(self, stmts: Sequence[Stmt]) -> Iterator[str]:
        yield from ("  " + line for line in self.block(stmts))

    def stmt(self, stmt: Stmt) -> Iterator[str]:
        match stmt:
            case Let(var, expr):
                yield f"{type_of(var.dtype)} {var.name} = {self.expr(expr)};"
            case Assign(var, expr):
                yield f"{var.name} = {self.expr(expr)};"
            case Store(buffer, index, expr):
                yield f"{self.element(buffer, index)} = {self.expr(expr)};"
            case For(var, n, body):
                yield f"for (int {var.name} = 0; {var.name} < {n}; ++{var.name}) {{"
                yield from self.inner(body)
                yield "}"
            case While(test, condition, body):
                yield "for (;;) {"
                yield from self.inner(test)
                yield f"  if (!{self.expr(condition)}) break;"
                yield from self.inner(body)
                yield "}"
            case Switch(which, cases):
                yield from self.switch(which, cases)
            case Product(out, x, y):
                yield from self.product(out, x, y)

    def switch(self, which: Expr, cases: Sequence[Sequence[Stmt]]) -> Iterator[str]:
        *others, last = cases
        for i, case in enumerate(others):
            yield f"{'} else ' if i else ''}if ({self.expr(which)} == {i}) {{"
            yield from self.inner(case)
        yield "} else {" if others else "{"
        yield from self.inner(last)
        yield "}"

    def product(self, out: Matrix, x: Matrix, y: Matrix) -> Iterator[str]:
        dtype = type_of(out.buffer.dtype)
        yield f"for (int r = 0; r < {out.rows}; ++r) {{"
        yield f"  for (int c = 0; c < {out.columns}; ++c) {{"
        yield f"    {dtype} sum = 0;"
        yield f"    for (int m = 0; m < {x.columns}; ++m)"
        yield f"      sum += {self.entry(x, 'r', 'm')} * {self.entry(y, 'm', 'c')};"
        yield f"    {self.entry(out, 'r', 'c')} = sum;"
        yield "  }"
        yield "}"

    def entry(self, m: Matrix, row: str, column: str) -> str:
        place = (
            f"{column} * {m.rows} + {row}" if m.transposed else f"{row} * {m.columns} + {column}"
        )
        return self.at(m.buffer, place if not m.buffer.start else f"{m.buffer.start} + {place}")

    #
    # Expressions
    #

    def element(self, buffer: Buffer, index: Index) -> str:
        terms = [f"{s} * {self.expr(e)}" if s != 1 else self.expr(e) for e, s in index.terms]
        offset = buffer.start + index.offset
        return self.at(buffer, " + ".join([*terms, str(offset)] if offset or not terms else terms))

    def at(self, buffer: Buffer, place: str) -> str:
        match buffer.group:
            case "own" | "shared":
                return f"{buffer.group}_{type_of(buffer.dtype)}(lane, {place})"
            case "work":
                return f"work_{type_of(buffer.dtype)}[{place}]"
            case "table":
                return f"table_{self.name}[{place}]"
        return f"{buffer.group}[{place}]"

    def expr(self, expr: Expr) -> str:
        match expr:
            case Const(value):
                return literal(value)
            case Var(name, _):
                return name
            case Load(buffer, index):
                return self.element(buffer, index)
            case Op(name, args, dtype, param):
                return self.op(name, args, dtype, param)

    def op(self, name: str, args: tuple[Expr, ...], dtype: np.dtype, param: Any) -> str:
        if name in _MISSING:
            raise UntranslatableError(f"the primitive {name}", "f")
        xs = list(map(self.expr, args))
        kind = args[0].dtype.kind
        if name in _INFIX and (name != "div" or kind == "f"):
            text = f"({xs[0]} {_INFIX[name]} {xs[1]})"
            # Those of short integers are of ints, in C++.
            return text if kind == "f" or dtype.itemsize >= 4 else f"{type_of(dtype)}{text}"
        if name == "neg":
            return f"(-{xs[0]})" if kind == "f" else f"{type_of(dtype)}(-{xs[0]})"
        if name == "not":
            return f"(!{xs[0]})" if kind == "b" else f"{type_of(dtype)}(~{xs[0]})"
        if name == "select_n":
            return self.select(args[0], xs)
        if name == "convert_element_type":
            return _converted(xs[0], kind, dtype)
        if name == "bitcast_convert_type":
            return f"bitcast<{type_of(dtype)}>({xs[0]})"
        if name == "integer_pow":
            return f"do_integer_pow<{param}>({xs[0]})"
        if name == "round":
            return f"{'do_rint' if param else 'do_round_away'}({xs[0]})"
        return f"do_{name}({', '.join(xs)})"

    def select(self, which: Expr, xs: list[str]) -> str:
        test, *cases = xs
        if which.dtype.kind == "b":
            return f"({test} ? {cases[1]} : {cases[0]})"
        text = cases[-1]
        for i in reversed(range(len(cases) - 1)):
            text = f"({test} == {i} ? {cases[i]} : {text})"
        return text


def _converted(x: str, kind: str, dtype: np.dtype) -> str:
    name = type_of(dtype)
    if dtype.kind == "b":
        return f"({x} != 0)"
    if dtype.kind in "iu" and kind == "f":
        return f"truncated<{name}>({x})"
    return f"{name}({x})"
