"""Ball arithmetic: bounds on how far the results of a function are from their values at one point,
while the state and the time stay in balls around that point.

A ball has a centre, which is the number computed at the point, and a radius. It contains not only
the exact results but all results that are computed, with rounding, at points in the balls of the
inputs. To allow for this, the radii of the inputs are at least `ROUNDINGS` rounding errors of their
centres: each operation uses up one of these, and products and quotients add more to the radius.

Sources: Rump, "Fast and parallel interval arithmetic", BIT 39 (1999); van der Hoeven, "Ball
arithmetic" (2009).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike

from ....fields import ir
from ....fields.equations import registers
from ....fields.walking import every_part, statements
from ..llvm.builder import BOOL, Builder, Value
from . import tuning


# The least radius of an input, in units of the spacing of floating-point numbers at one. It is more
# than twice the largest number of operations in a row.
ROUNDINGS = 256
# The radii of inputs are multiplied by this, because all radii are rounded themselves.
SLACK = 1.02


def rounded(x: Value) -> Value:
    """The least radius of an input with this value."""
    return abs(x) * _rounding(x.dtype) + _least(x.dtype)


class Ball(NamedTuple):
    """A number with a bound on its change. The `radius` is None if the number is the same
    everywhere; that of a boolean is 0 or infinite."""

    centre: Value
    radius: Value | None

    def rounded(self) -> Value:
        """The radius; for a number that is the same everywhere, a bound on its rounding errors."""
        if self.radius is not None:
            return self.radius
        return abs(self.centre) * _rounding(self.centre.dtype)


class _Traits(NamedTuple):
    """Whether an expression has rules, whether it varies, and the variables that it depends on."""

    has_rules: bool
    varies: bool
    names: frozenset[str] = frozenset()


def bounded(fn: ir.Function) -> tuple[tuple[int, ...], ir.Function]:
    """The numbers of those results of a function that can have finite radii, and the function of
    these results alone. They depend on no loops or branches, and every operation on the state or
    the time has a rule. They are taken in order, as long as the function of them stays short."""
    assigned = {s.var.name for s in statements(fn.body) if isinstance(s, ir.Assign)}
    lets = [s for s in fn.body if isinstance(s, ir.Let) and s.var.name not in assigned]
    found = {"t": _Traits(True, True)}

    def traits(expr: ir.Expr) -> _Traits:
        match expr:
            case ir.Const():
                return _Traits(True, False)
            case ir.Var(name, _):
                return found.get(name, _Traits(False, True))
            case ir.Load(buffer, index):
                has_rules = not index.terms and buffer.group in ("u", "own", "shared")
                return _Traits(has_rules, buffer.group == "u")
            case ir.Op(name, args, dtype, _):
                rules, varies, names = zip(*map(traits, args), strict=True)
                has_rules = all(rules)
                if any(varies):
                    has_rules = has_rules and _has_rule(name, args, dtype, varies)
                return _Traits(has_rules, any(varies), frozenset().union(*names))

    for stmt in lets:
        x = traits(stmt.expr)
        names = x.names | {stmt.var.name}
        is_short = len(names) <= tuning.MOST_BALL_OPERATIONS
        found[stmt.var.name] = x._replace(names=names) if is_short else _Traits(False, True)
    chosen: list[int] = []
    part = dataclasses.replace(fn, body=(), outputs=(), size=0)
    needed: frozenset[str] = frozenset()
    for i, output in enumerate(fn.outputs):
        x = traits(output)
        if not x.has_rules:
            continue
        names = needed | x.names
        body = tuple(s for s in lets if s.var.name in names)
        outputs = (*part.outputs, output)
        longer = dataclasses.replace(part, body=body, outputs=outputs, size=len(outputs))
        if sum(isinstance(x, ir.Op) for x in every_part(longer)) <= tuning.MOST_BALL_OPERATIONS:
            chosen.append(i)
            part, needed = longer, names
    return tuple(chosen), part


def balls(
    b: Builder,
    fn: ir.Function,
    centre: Callable[[ir.Expr], Value],
    of_state: Callable[[int], Value],
    of_time: Callable[[], Value],
) -> list[Ball]:
    """The balls of the results of a function that `bounded` returned. `centre(x)` is the value of
    its expression `x` at the centre, `of_state(c)` the radius of component `c` of the state, and
    `of_time()` that of the time."""
    radii: dict[str, Value | None] = {}
    # The radius of a compared number must be infinite where the number may overflow.
    compares = any(x.dtype == BOOL for x in every_part(fn))

    def ball(expr: ir.Expr) -> Ball:
        return Ball(centre(expr), radius(expr))

    def radius(expr: ir.Expr) -> Value | None:
        match expr:
            case ir.Const():
                return None
            case ir.Var(name, _):
                return of_time() if name == "t" else radii[name]
            case ir.Load(buffer, index):
                return of_state(buffer.start + index.offset) if buffer.group == "u" else None
            case ir.Op(name, args, dtype, _):
                found = list(map(ball, args))
                if all(x.radius is None for x in found):
                    return None
                y = centre(expr)
                of_y = _RULES[name](b, y, np.dtype(dtype), *found)
                return _finite(b, y, of_y) if compares and y.is_real else of_y

    for stmt in fn.body:
        assert isinstance(stmt, ir.Let)
        radii[stmt.var.name] = radius(stmt.expr)
    return list(map(ball, fn.outputs))


def _finite(b: Builder, y: Value, radius: Value) -> Value:
    """The radius of a ball around `y`; infinite if a number in the ball may be infinite."""
    most = float(np.finfo(radius.dtype).max) / 4
    return b.where(abs(y) + radius < most, radius, np.inf)


def _has_rule(name: str, args: Sequence[ir.Expr], dtype: DTypeLike, varies: Sequence[bool]) -> bool:
    if name not in _RULES:
        return False
    dtypes = [np.dtype(x.dtype) for x in args]
    if name in _OF_BOOLEANS:
        return all(x == BOOL for x in dtypes)
    if name == "convert_element_type":
        return dtypes[0].kind == np.dtype(dtype).kind == "f"
    if name == "select_n":
        return dtypes[0] == BOOL and all(x.kind == "f" for x in dtypes[1:])
    if name == "pow":
        return not varies[1]
    return all(x.kind == "f" for x in dtypes)


def _rounding(dtype: np.dtype) -> float:
    return ROUNDINGS * float(np.finfo(dtype).eps)


def _least(dtype: np.dtype) -> float:
    """A bound on the loss when a product underflows."""
    info = np.finfo(dtype)
    return float(info.tiny / info.eps)


#
# Rules: each returns the radius from the value at the centre, the dtype, and the balls of the
# arguments
#

_RULES: dict[str, Callable[..., Value]] = {}
_rule = registers(_RULES)
_OF_BOOLEANS = ("and", "not", "or", "xor")


@_rule("abs neg")
def _as_it_is(b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    return x.rounded()


@_rule("convert_element_type")
def _converted(b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    return b.cast(x.rounded(), dtype) + abs(y) * _rounding(dtype)


@_rule("add sub")
def _sum(b: Builder, y: Value, dtype: np.dtype, x1: Ball, x2: Ball) -> Value:
    return x1.rounded() + x2.rounded()


@_rule("clamp max min")
def _extreme(b: Builder, y: Value, dtype: np.dtype, *xs: Ball) -> Value:
    return b.largest(tuple(x.rounded() for x in xs))


@_rule("mul")
def _product(b: Builder, y: Value, dtype: np.dtype, x1: Ball, x2: Ball) -> Value:
    if x1.centre.name == x2.centre.name:
        return _square(b, y, dtype, x1)
    least = _least(dtype)
    if x1.radius is None or x2.radius is None:
        same, x = (x1, x2) if x1.radius is None else (x2, x1)
        return x.rounded() * abs(same.centre) + least
    return (abs(x1.centre) + x1.radius) * x2.radius + (abs(x2.centre) * x1.radius + least)


@_rule("square")
def _square(b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    return (abs(x.centre) * 2.0 + x.rounded()) * x.rounded() + _least(dtype)


@_rule("div")
def _quotient(b: Builder, y: Value, dtype: np.dtype, x1: Ball, x2: Ball) -> Value:
    least, size = _least(dtype), abs(x2.centre)
    if x2.radius is None:
        return x1.rounded() / size + least
    total = abs(y) * x2.radius + x1.rounded()
    return total / _less(b, size, x2.radius) + least


def _less(b: Builder, size: Value, radius: Value) -> Value:
    """A lower bound of a positive number; zero if its rounding errors could be large."""
    return b.where(radius < size * 0.75, size - radius, 0.0)


@_rule("sqrt")
def _root(b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    return x.rounded() / b.where(x.rounded() < x.centre * 0.75, y, 0.0)


@_rule("rsqrt")
def _inverse_root(b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    # The slope is largest where the number is smallest.
    least = _less(b, x.centre, x.rounded())
    return x.rounded() / (least * b.sqrt(least)) + _least(dtype)


@_rule("log")
def _log(b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    return x.rounded() / _less(b, x.centre, x.rounded()) + _of_function(y)


@_rule("exp")
def _exp(b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    return _exponential(b, y, x.rounded())


@_rule("pow")
def _pow(b: Builder, y: Value, dtype: np.dtype, x: Ball, exponent: Ball) -> Value:
    of_log = x.rounded() / _less(b, x.centre, x.rounded())
    return _exponential(b, y, of_log * abs(b.cast(exponent.centre, dtype)))


def _exponential(b: Builder, y: Value, radius: Value) -> Value:
    """The radius of `y` times `exp` of at most `radius`: `e^r - 1 <= r + r^2` for r up to 1."""
    radius = b.where(radius <= 1.0, radius, np.inf)
    return y * (radius * radius + radius) + _of_function(y)


def _of_function(y: Value) -> Value:
    """A bound on the rounding errors of a function with the value `y`."""
    rounding = _rounding(y.dtype)
    return abs(y) * rounding + rounding


# The largest slopes of functions.
_SLOPES = {"asinh": 1, "atan": 1, "cos": 1, "erf": 1.13, "logistic": 0.25, "sin": 1, "tanh": 1}


def _of_slope(slope: float, b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    return x.rounded() * slope + _of_function(y)


_RULES.update({name: functools.partial(_of_slope, float(x)) for name, x in _SLOPES.items()})


@_rule("eq ge gt le lt ne")
def _comparison(b: Builder, y: Value, dtype: np.dtype, x1: Ball, x2: Ball) -> Value:
    # A number that is the same everywhere may be infinite.
    radii = [x.radius for x in (x1, x2) if x.radius is not None]
    known = abs(x1.centre - x2.centre) > functools.reduce(operator.add, radii)
    return _none_where(b, known, radii[0].dtype)


def _none_where(b: Builder, known: Value, dtype: np.dtype) -> Value:
    return b.where(known, b.constant(0.0, dtype), np.inf)


@_rule("sign")
def _sign(b: Builder, y: Value, dtype: np.dtype, x: Ball) -> Value:
    return _none_where(b, abs(x.centre) > x.rounded(), dtype)


@_rule("and not or xor")
def _logical(b: Builder, y: Value, dtype: np.dtype, *xs: Ball) -> Value:
    return b.largest(tuple(x.radius for x in xs if x.radius is not None))


@_rule("select_n")
def _choice(b: Builder, y: Value, dtype: np.dtype, which: Ball, *cases: Ball) -> Value:
    """The radius is infinite where another case may be chosen."""
    radius = b.where(which.centre, cases[-1].rounded(), cases[0].rounded())
    return radius if which.radius is None else radius + b.cast(which.radius, dtype)
