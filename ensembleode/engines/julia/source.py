"""A lowered function as Julia source.

A small function returns a static vector, and needs neither memory nor branches, so that it can run
inside a GPU kernel. A larger function stores its result, and has its scratch memory in `p.work`.
Primitives that have another name in Julia, or that throw in Julia where JAX returns a NaN, are
functions of the module `Primitives` (`julia/src/primitives.jl`).
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ...fields import ir
from ...fields.walking import buffers_of, expressions, loads, parts


Role = Literal["f", "jac", "tgrad", "g", "part"]

# The arguments of a part of a callback besides the state, the parameters and the time.
EXTRAS = ("uprev", "tprev", "mask")

TYPES = {
    "bool": "Bool",
    **{f"float{n}": f"Float{n}" for n in (16, 32, 64)},
    **{f"int{n}": f"Int{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"UInt{n}" for n in (8, 16, 32, 64)},
}


class JuliaDefinition(NamedTuple):
    """A function in Julia."""

    name: str
    source: str
    in_place: bool  # whether it stores its result, `f(du, u, p, t)`, instead of returning it
    work: tuple[tuple[str, int], ...]  # the elements of scratch memory: Julia's type, and how many

    def as_table(self) -> dict[str, Any]:
        """The function's table in a request."""
        return {
            "name": self.name,
            "source": self.source,
            "work_types": [type for type, _ in self.work],
            "work_sizes": [size for _, size in self.work],
        }


def julia_source(
    fn: ir.Function, role: Role = "f", *, columns: int | None = None
) -> JuliaDefinition:
    """The source of a function; equal functions have equal names.

    **Arguments:**

    - `role`: the use that a solver makes of the function. A `part` of a callback has the further
        arguments `EXTRAS`, returns its result, and allocates its memory.
    - `columns`: the number of columns of a result that is a matrix; None for a vector. The function
        returns the matrix transposed, because its row-major order then is Julia's column-major
        order.
    """
    body = list(_body(fn, role, columns))
    digest = hashlib.sha256("\n".join([*body, *map(str, fn.tables)]).encode()).hexdigest()[:16]
    name = f"{role}_{digest}"
    in_place = not (fn.is_scalar or role == "part")
    extras = EXTRAS if role == "part" else ()
    arguments = ", ".join([*(["out"] if in_place else []), "u", "p", "t", *extras])
    lines = [f"const TABLE_{name} = Int64[{', '.join(map(str, fn.tables))}]"] if fn.tables else []
    lines += [f"function {name}({arguments})"]
    lines += [f"    table = TABLE_{name}"] if fn.tables else []
    lines += [*_indented(body), "end"]
    work = tuple((TYPES[dtype.name], size) for dtype, size in fn.work)
    return JuliaDefinition(name, "\n".join(lines) + "\n", in_place, () if role == "part" else work)


#
# Statements
#


def _body(fn: ir.Function, role: Role, columns: int | None) -> Iterator[str]:
    if any(b.group == "forward" for b in buffers_of(fn)):
        yield "forward = p.forward(t)"
    printer = _JuliaPrinter([dtype for dtype, _ in fn.work])
    if fn.work:
        names = [f"work{i + 1}" for i in range(len(fn.work))]
        if role == "part":
            for name, (dtype, size) in zip(names, fn.work, strict=True):
                yield f"{name} = Vector{{{TYPES[dtype.name]}}}(undef, {size})"
        else:
            yield f"({', '.join(names)},) = p.work.{role}"
    if fn.is_scalar:
        yield from printer.block(fn.body)
        dtype = TYPES[fn.dtype.name]
        kind = f"SVector{{{fn.size}, {dtype}}}"
        if columns is not None:
            kind = f"SMatrix{{{fn.size // columns}, {columns}, {dtype}}}"
        yield f"return {kind}({', '.join(map(printer.expr, fn.outputs))})"
    else:
        if role == "part":
            yield f"out = Vector{{{TYPES[fn.dtype.name]}}}(undef, {fn.size})"
        yield "@inbounds begin"
        yield from _indented(printer.block(fn.body))
        yield "end"
        yield f"return {'out' if role == 'part' else 'nothing'}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


class _JuliaPrinter:
    def __init__(self, work: Sequence[np.dtype]):
        self.work = list(work)

    def block(self, stmts: Sequence[ir.Stmt]) -> Iterator[str]:
        for stmt in stmts:
            yield from self.stmt(stmt)

    def stmt(self, stmt: ir.Stmt) -> Iterator[str]:
        match stmt:
            case ir.Let(var, expr) | ir.Assign(var, expr):
                yield f"{var.name} = {self.bare(expr)}"
            case ir.Store(buffer, index, expr):
                yield f"{self.element(buffer, index)} = {self.bare(expr)}"
            case ir.For(var, n, body):
                simd = "@simd " if _is_simple(body) else ""
                yield f"{simd}for {var.name} in 0:{n - 1}"
                yield from _indented(self.block(body))
                yield "end"
            case ir.While(test, condition, body):
                yield "while true"
                yield from _indented(self.block(test))
                yield f"    {self.expr(condition)} || break"
                yield from _indented(self.block(body))
                yield "end"
            case ir.Switch(which, cases):
                yield from self.switch(which, cases)
            case ir.Product(out, x, y):
                yield self.product(out, x, y)

    def switch(self, which: ir.Expr, cases: Sequence[Sequence[ir.Stmt]]) -> Iterator[str]:
        *others, last = cases
        if not others:
            yield from self.block(last)
            return
        for i, case in enumerate(others):
            yield f"{'elseif' if i else 'if'} {self.expr(which)} == {i}"
            yield from _indented(self.block(case))
        yield "else"
        yield from _indented(self.block(last))
        yield "end"

    def product(self, out: ir.Matrix, x: ir.Matrix, y: ir.Matrix) -> str:
        """The product of two matrices. A matrix in row-major order is the transposed matrix in
        Julia's order: `out' = y' x'`."""
        if y.columns == 1:
            target, vector = self.array(out.buffer, out.rows), self.array(y.buffer, y.rows)
            return f"mul!({target}, {self.matrix(x, swapped=False)}, {vector})"
        if x.rows == 1:
            target, vector = self.array(out.buffer, out.columns), self.array(x.buffer, x.columns)
            return f"mul!({target}, {self.matrix(y, swapped=True)}, {vector})"
        target = self.array(out.buffer, out.columns, out.rows)
        return f"mul!({target}, {self.matrix(y, swapped=True)}, {self.matrix(x, swapped=True)})"

    def matrix(self, m: ir.Matrix, swapped: bool) -> str:
        """A matrix; the transposed one if `swapped`."""
        dims = (m.rows, m.columns) if m.transposed else (m.columns, m.rows)
        array = self.array(m.buffer, *dims)
        return array if m.transposed != swapped else f"transpose({array})"

    def array(self, buffer: ir.Buffer, *dims: int) -> str:
        """A buffer as an array of these dimensions, in Julia's order."""
        part = f"view({self.group(buffer)}, {buffer.start + 1}:{buffer.start + buffer.size})"
        return part if len(dims) == 1 else f"reshape({part}, {', '.join(map(str, dims))})"

    #
    # Expressions
    #

    def element(self, buffer: ir.Buffer, index: ir.Index) -> str:
        terms = [f"{s} * {self.expr(e)}" if s != 1 else self.expr(e) for e, s in index.terms]
        offset = buffer.start + index.offset + 1
        return f"{self.group(buffer)}[{' + '.join([*terms, str(offset)])}]"

    def group(self, buffer: ir.Buffer) -> str:
        match buffer.group:
            case "own" | "shared":
                return f"p.{buffer.group}"
            case "work":
                return f"work{self.work.index(buffer.dtype) + 1}"
        return buffer.group

    def expr(self, expr: ir.Expr) -> str:
        match expr:
            case ir.Const(value):
                return _literal(value)
            case ir.Var(name, _):
                return name
            case ir.Load(buffer, index):
                return self.element(buffer, index)
            case ir.Op(name, args, dtype, param):
                return self.op(name, args, dtype, param)

    def bare(self, expr: ir.Expr) -> str:
        """An expression without parentheses around it."""
        text = self.expr(expr)
        is_infix = isinstance(expr, ir.Op) and expr.name in (*_INFIX, "neg")
        return text[1:-1] if text.startswith("(") and is_infix else text

    def op(self, name: str, args: tuple[ir.Expr, ...], dtype: np.dtype, param: Any) -> str:
        xs = list(map(self.expr, args))
        kind = args[0].dtype.kind
        if name in _INFIX and (name != "div" or kind == "f"):
            return f"({xs[0]} {_INFIX[name]} {xs[1]})"
        if name == "neg":
            return f"(-{xs[0]})"
        if name == "not":
            return f"({'!' if kind == 'b' else '~'}{xs[0]})"
        if name == "select_n":
            return self.select(args[0], xs)
        if name == "convert_element_type":
            return _converted(xs[0], kind, dtype)
        if name == "bitcast_convert_type":
            return f"reinterpret({TYPES[dtype.name]}, {xs[0]})"
        if param is not None:
            xs.append(f"Val({param})")
        return f"Primitives.{name}({', '.join(xs)})"

    def select(self, which: ir.Expr, xs: list[str]) -> str:
        test, *cases = xs
        if which.dtype.kind == "b":
            return f"ifelse({test}, {cases[1]}, {cases[0]})"
        text = cases[-1]
        for i in reversed(range(len(cases) - 1)):
            text = f"ifelse({test} == {i}, {cases[i]}, {text})"
        return text


_INFIX = {
    **{"add": "+", "div": "/", "mul": "*", "sub": "-"},
    **{"eq": "==", "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "ne": "!="},
    **{"and": "&", "or": "|", "xor": "⊻"},
}


def _converted(x: str, kind: str, dtype: np.dtype) -> str:
    name = TYPES[dtype.name]
    if dtype.kind == "b":
        return f"({x} != 0)"
    if dtype.kind in "iu":
        return f"Primitives.truncated({name}, {x})" if kind == "f" else f"({x} % {name})"
    return f"{name}({x})"


def _literal(value: Any) -> str:
    kind, name = value.dtype.kind, TYPES[value.dtype.name]
    if kind == "b":
        return "true" if value else "false"
    if kind == "f":
        text = _float(value, name)
        return f"({text})" if text.startswith("-") else text
    if kind == "i" and value == np.iinfo(value.dtype).min:
        return f"typemin({name})"
    if name == "Int64":
        return str(value) if value >= 0 else f"({value})"
    return f"{name}({value})"


def _float(value: Any, name: str) -> str:
    if not np.isfinite(value):
        suffix = name.removeprefix("Float").removesuffix("64")
        text = "NaN" if np.isnan(value) else "Inf"
        return f"{'-' if value < 0 else ''}{text}{suffix}"
    text = str(value)  # the shortest digits that read back as this number
    if name == "Float32":
        digits, _, exponent = text.partition("e")
        return f"{digits}f{int(exponent or 0)}"
    return text if name == "Float64" else f"{name}({text})"


def _is_simple(body: Sequence[ir.Stmt]) -> bool:
    """Whether the turns of a loop may be reordered, as those of a sum and those that carry nothing
    to the next turn."""
    match body:
        case [ir.Assign(var, ir.Op("add", (first, other)))]:
            return first == var and var not in parts(other)
    if not all(isinstance(s, ir.Let | ir.Store) for s in body):
        return False
    own = {s.var for s in body if isinstance(s, ir.Let)}
    read = {x.buffer for s in body for x in loads(expressions(s))}
    # A turn must not read a buffer that is written to, as another turn may write there; nor compute
    # the index that it writes to, as two turns may compute the same one.
    return not any(
        s.buffer in read or any(x in own for e, _ in s.index.terms for x in parts(e))
        for s in body
        if isinstance(s, ir.Store)
    )
