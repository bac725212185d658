"""What a lowered function consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...fields.ir import (
    Assign,
    Buffer,
    Expr,
    For,
    Function,
    Let,
    Load,
    Op,
    Product,
    Stmt,
    Store,
    Switch,
    While,
)


def statements(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    """Also those inside of others."""
    for stmt in stmts:
        yield stmt
        match stmt:
            case For(_, _, body):
                yield from statements(body)
            case While(test, _, body):
                yield from statements((*test, *body))
            case Switch(_, cases):
                for case in cases:
                    yield from statements(case)


def expressions(stmt: Stmt) -> tuple[Expr, ...]:
    """Those of a statement itself."""
    match stmt:
        case Let(_, expr) | Assign(_, expr):
            return (expr,)
        case Store(_, index, expr):
            return (expr, *(e for e, _ in index.terms))
        case While(_, condition, _):
            return (condition,)
        case Switch(which, _):
            return (which,)
    return ()


def parts(expr: Expr) -> Iterator[Expr]:
    """An expression, and what it is made of."""
    yield expr
    match expr:
        case Load(_, index):
            for e, _ in index.terms:
                yield from parts(e)
        case Op(_, args, _, _):
            for e in args:
                yield from parts(e)


def every_part(fn: Function) -> Iterator[Expr]:
    """Of all expressions of a function."""
    for expr in (*fn.outputs, *(e for s in statements(fn.body) for e in expressions(s))):
        yield from parts(expr)


def buffers(stmt: Stmt) -> Iterator[Buffer]:
    """What a statement itself reads and writes."""
    match stmt:
        case Store(buffer, _, _):
            yield buffer
        case Product(out, x, y):
            yield from (out.buffer, x.buffer, y.buffer)
    for expr in expressions(stmt):
        yield from (x.buffer for x in parts(expr) if isinstance(x, Load))


def length(stmts: Sequence[Stmt]) -> int:
    """How many statements these are, loops unrolled."""
    total = 0
    for stmt in stmts:
        match stmt:
            case For(_, n, body):
                total += n * length(body)
            case While(test, _, body):
                total += length((*test, *body))
            case Switch(_, cases):
                total += sum(map(length, cases))
            case Product(out, x, _):
                total += out.rows * out.columns * x.columns
            case _:
                total += 1
    return total


_SIMPLE = {
    *("abs", "add", "and", "bitcast_convert_type", "ceil", "clamp", "convert_element_type", "div"),
    *("eq", "floor", "ge", "gt", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not"),
    *("one_minus_square", "or", "round", "select_n", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sqrt", "square", "sub", "xor"),
}
_OTHERS = 12


def cost(stmts: Sequence[Stmt]) -> float | int:
    """In simple operations; infinite where lanes may wait for each other."""
    total: float = 0
    for stmt in stmts:
        total += sum(_cost_of(x) for e in expressions(stmt) for x in parts(e))
        match stmt:
            case For(_, n, body):
                total += n * cost(body)
            case Switch(_, cases):
                total += sum(map(cost, cases))
            case While() | Product():
                return float("inf")
    return total


def dear(fn: Function) -> int:
    """How many operations are written that cost as much as many others, such as functions."""
    return sum(_cost_of(x) >= _OTHERS for x in every_part(fn))


def _cost_of(expr: Expr) -> float | int:
    """Without what it is made of."""
    if not isinstance(expr, Op):
        return 0
    if expr.name == "integer_pow":
        return abs(expr.param).bit_length()
    if expr.name in ("div", "rem") and expr.dtype.kind != "f":
        return _OTHERS
    return 1 if expr.name in _SIMPLE else _OTHERS
