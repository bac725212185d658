"""Iteration over the statements and expressions of a lowered function, and estimates of their
cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from . import ir, tuning


def statements(stmts: Sequence[ir.Stmt]) -> Iterator[ir.Stmt]:
    """These statements, and the statements inside of them at any depth."""
    for stmt in stmts:
        yield stmt
        match stmt:
            case ir.For(_, _, body):
                yield from statements(body)
            case ir.While(test, _, body):
                yield from statements((*test, *body))
            case ir.Switch(_, cases):
                for case in cases:
                    yield from statements(case)


def expressions(stmt: ir.Stmt) -> tuple[ir.Expr, ...]:
    """The expressions of a statement itself, not of statements inside of it."""
    match stmt:
        case ir.Let(_, expr) | ir.Assign(_, expr):
            return (expr,)
        case ir.Store(_, index, expr):
            return (expr, *(e for e, _ in index.terms))
        case ir.While(_, condition, _):
            return (condition,)
        case ir.Switch(which, _):
            return (which,)
    return ()


def parts(expr: ir.Expr) -> Iterator[ir.Expr]:
    """An expression and its subexpressions."""
    yield expr
    match expr:
        case ir.Load(_, index):
            for e, _ in index.terms:
                yield from parts(e)
        case ir.Op(_, args, _, _):
            for e in args:
                yield from parts(e)


def every_part(fn: ir.Function) -> Iterator[ir.Expr]:
    """Every expression and subexpression of a function."""
    for expr in (*fn.outputs, *(e for s in statements(fn.body) for e in expressions(s))):
        yield from parts(expr)


def buffers(stmt: ir.Stmt) -> Iterator[ir.Buffer]:
    """The buffers that a statement itself reads and writes."""
    match stmt:
        case ir.Store(buffer, _, _):
            yield buffer
        case ir.Product(out, x, y):
            yield from (out.buffer, x.buffer, y.buffer)
    yield from (x.buffer for x in loads(expressions(stmt)))


def loads(exprs: Iterable[ir.Expr]) -> Iterator[ir.Load]:
    """The loads in these expressions."""
    return (x for e in exprs for x in parts(e) if isinstance(x, ir.Load))


def buffers_of(fn: ir.Function) -> Iterator[ir.Buffer]:
    """The buffers that a function reads and writes."""
    yield from (x.buffer for x in loads(fn.outputs))
    for stmt in statements(fn.body):
        yield from buffers(stmt)


def length(stmts: Sequence[ir.Stmt]) -> int:
    """The number of statements after unrolling all loops; a product counts once for each of its
    terms."""
    total = 0
    for stmt in stmts:
        match stmt:
            case ir.For(_, n, body):
                total += n * length(body)
            case ir.While(test, _, body):
                total += length((*test, *body))
            case ir.Switch(_, cases):
                total += sum(length(case) for case in cases)
            case ir.Product(out, x, _):
                total += out.rows * out.columns * x.columns
            case _:
                total += 1
    return total


def is_flat(stmts: Sequence[ir.Stmt]) -> bool:
    """Whether none of these statements contains others."""
    return all(isinstance(s, ir.Let | ir.Assign | ir.Store) for s in stmts)


_SIMPLE = {
    *("abs", "add", "and", "bitcast_convert_type", "ceil", "clamp", "convert_element_type", "div"),
    *("eq", "floor", "ge", "gt", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not"),
    *("one_minus_square", "or", "round", "select_n", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sqrt", "square", "sub", "xor"),
}


def cost(stmts: Sequence[ir.Stmt]) -> float | int:
    """The cost in units of a simple operation; infinite where one lane may have to wait for
    another."""
    total: float = 0
    for stmt in stmts:
        total += sum(_cost_of(x) for e in expressions(stmt) for x in parts(e))
        match stmt:
            case ir.For(_, n, body):
                total += n * cost(body)
            case ir.Switch(_, cases):
                total += sum(map(cost, cases))
            case ir.While() | ir.Product():
                return float("inf")
    return total


def dear(fn: ir.Function) -> int:
    """The number of expensive operations: functions such as a sine, which cost about twelve simple
    ones."""
    return sum(_cost_of(x) >= tuning.COST_OF_OTHERS for x in every_part(fn))


def _cost_of(expr: ir.Expr) -> float | int:
    """The cost of an expression's own operation, without its operands."""
    if not isinstance(expr, ir.Op):
        return 0
    if expr.name == "brownian_piece":
        return float("inf")
    if expr.name == "integer_pow":
        return abs(expr.param).bit_length()
    if expr.name in ("div", "rem") and expr.dtype.kind != "f":
        return tuning.COST_OF_OTHERS
    return 1 if expr.name in _SIMPLE else tuning.COST_OF_OTHERS
