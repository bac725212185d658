"""The operations of `fields/ir.py`, lane by lane, with the same results as in XLA.

Nothing traps, whatever the numbers are, because lanes whose results aren't used compute too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from ....fields import UntranslatableError
from ....fields.folding import FOLDED_INTEGERS
from ....fields.ir import Const, Function, Load, Op
from ....fields.walking import every_part
from ..llvm.builder import BOOL, Builder, F32, F64, integer_like, Value
from ..llvm.functions import (
    brownian_piece,
    FUNCTIONS,
    HIGHEST_ORDER,
    integer_pow,
    philox_normal,
    philox_normal_of_step,
    philox_uniform,
)


DTYPES = {np.dtype(f"{kind}{n}") for kind in ("int", "uint") for n in (8, 16, 32, 64)}
DTYPES |= {BOOL, F32, F64}


def checked(dtype: DTypeLike) -> np.dtype:
    """The dtype, if the compiled engine supports it.

    **Raises:** `UntranslatableError` if it doesn't.
    """
    dtype = np.dtype(dtype)
    if dtype not in DTYPES:
        raise UntranslatableError(f"{dtype.name} numbers", "f")
    return dtype


def operation(
    b: Builder, name: str, args: list[Value], dtype: DTypeLike, param: Any = None
) -> Value:
    """Write the operation that has the name of this JAX primitive.

    **Raises:** `UntranslatableError` for an operation that isn't supported.
    """
    dtype = checked(dtype)
    if dtype.kind in "biu" and name in _KNOWN and all(x.constant is not None for x in args):
        # The counters of unrolled loops are constants. Folding these makes addresses known.
        with np.errstate(all="ignore"):
            return b.constant(_KNOWN[name](*(x.constant for x in args)), dtype)
    if name == "convert_element_type":
        return b.cast(args[0], dtype)
    if name == "bitcast_convert_type":
        return b.bitcast(args[0], dtype)
    if name == "integer_pow":
        return integer_pow(b, args[0], param)
    if name in DRAWN:
        return DRAWN[name](b, args, dtype, param)
    if name == "round":
        return b.intrinsic("roundeven" if param else "round", args[0])
    if name in OPERATIONS:
        return OPERATIONS[name](b, *args)
    if name in FUNCTIONS and args[0].is_real:
        return FUNCTIONS[name](b, *args)
    raise UntranslatableError(f"the primitive {name}", "f")


def check(fn: Function) -> None:
    """Check that the compiled engine supports all operations and dtypes of a function.

    **Raises:** `UntranslatableError` if it doesn't.
    """
    for part in every_part(fn):
        match part:
            case Op(name, args, dtype, _):
                checked(dtype)
                real = args and np.dtype(args[0].dtype).kind == "f"
                if name not in _NAMED | OPERATIONS.keys() and not (name in FUNCTIONS and real):
                    raise UntranslatableError(f"the primitive {name}", "f")
                if name == "polygamma" and not (
                    isinstance(args[0], Const) and args[0].value in range(1, HIGHEST_ORDER + 1)
                ):
                    what = f"polygamma of an order that is no number from 1 to {HIGHEST_ORDER}"
                    raise UntranslatableError(what, "f")
            case Load(buffer, _):
                checked(buffer.dtype)


# The names that `operation` handles itself.
DRAWN = {
    "brownian_piece": brownian_piece,
    "philox_normal": philox_normal,
    "philox_normal_of_step": philox_normal_of_step,
    "philox_uniform": philox_uniform,
}
_NAMED = {"bitcast_convert_type", "convert_element_type", "integer_pow", "round", *DRAWN}


#
# Real numbers and integers
#


def _sign(b: Builder, x: Value) -> Value:
    if x.dtype == BOOL:
        return x
    # Zeros and NaN are their own signs.
    positive = b.where(x > 0, 1, x)
    return positive if x.dtype.kind == "u" else b.where(x < 0, -1, positive)


def _extreme(how: str) -> Callable[..., Value]:
    """The larger or smaller of two numbers, NaN if either is NaN; 0 counts as more than -0."""

    def extreme(b: Builder, x: Value, y: Value) -> Value:
        x, y = b.matched(x, y)
        return b.intrinsic(how, x, y) if x.is_real else getattr(b, how)(x, y)

    return extreme


_max, _min = _extreme("maximum"), _extreme("minimum")


def _div(b: Builder, x: Value, y: Value) -> Value:
    """The quotient. Integers are rounded towards zero; an integer divided by zero is -1, and the
    least integer divided by -1 is itself."""
    if x.is_real or y.is_real:
        return x / y
    by_zero, unsafe = _unsafe(b, x, y)
    quotient = b.binary("sdiv" if x.is_signed else "udiv", x, b.where(unsafe, 1, y))
    return b.where(by_zero, -1 if x.is_signed else np.iinfo(x.dtype).max, quotient)


def _rem(b: Builder, x: Value, y: Value) -> Value:
    """The remainder, with the first operand's sign; an integer's remainder by zero is itself."""
    if x.is_real:
        return _rem_of_reals(b, x, y)
    by_zero, unsafe = _unsafe(b, x, y)
    rest = b.binary("srem" if x.is_signed else "urem", x, b.where(unsafe, 1, y))
    return b.where(by_zero, x, rest)


def _unsafe(b: Builder, x: Value, y: Value) -> tuple[Value, Value]:
    """Two masks: the lanes whose divisor is zero, and the lanes in which the machine might trap."""
    by_zero = y.eq(0)
    if not x.is_signed:
        return by_zero, by_zero
    return by_zero, by_zero | (x.eq(np.iinfo(x.dtype).min) & y.eq(-1))


def _rem_of_reals(b: Builder, x: Value, y: Value) -> Value:
    """The exact remainder. Each turn subtracts a multiple of the divisor that is exact."""
    x, y = b.matched(x, y)
    info, integer = np.finfo(x.dtype), integer_like(x.dtype)
    with b.unfused():
        undefined = ~((b.abs(x) < np.inf) & (b.abs(y) > 0))
        divisor = b.where(undefined, 1, b.abs(y))
        rest = b.variable(x.dtype, b.where(undefined, 0, b.abs(x)), of_lanes=bool(x.lanes))

        def exponent(z: Value) -> Value:
            return b.bitcast(z, integer) >> info.nmant

        def power(n: Value) -> Value:
            """A power of two."""
            return b.bitcast((n + info.maxexp - 1) << info.nmant, x.dtype)

        up = info.nmant + 2
        is_small = divisor < info.smallest_normal
        enlarged = exponent(divisor * 2.0**up) - up
        of_divisor = b.where(is_small, enlarged, exponent(divisor))

        def turn():
            now = rest.get()
            # The quotient by `larger` has few enough bits that only its last one may be wrong.
            shift = _max(b, exponent(now) - of_divisor - (info.nmant - 2), b.constant(0, integer))
            half = shift >> 1
            larger = divisor * power(half) * power(shift - half)
            left = b.fma(-b.trunc(now / larger), larger, now)
            left = b.where(left < 0, left + larger, left)
            rest.set(b.where(now >= divisor, left, now))

        b.while_(lambda: b.any(rest.get() >= divisor), turn)
        return b.where(undefined, np.nan, b.copysign(rest.get(), x))


def _nextafter(b: Builder, x: Value, y: Value) -> Value:
    x, y = b.matched(x, y)
    integer = integer_like(x.dtype)
    bits = b.bitcast(x, integer)
    away = (y > x).eq(x > 0)
    next_ = b.bitcast(b.where(away, bits + 1, bits - 1), x.dtype)
    least = b.copysign(b.bitcast(b.constant(1, integer), x.dtype), y)
    found = b.where(x.eq(y), y, b.where(x.eq(0), least, next_))
    return b.where(x.ne(x) | y.ne(y), np.nan, found)


#
# Comparisons by the total order, in which -0 is less than 0, and NaN is last
#


def _rank(b: Builder, x: Value) -> Value:
    if not x.is_real:
        return x
    integer = integer_like(x.dtype)
    bits = b.bitcast(b.where(x.ne(x), np.nan, x), integer)
    return b.where(bits < 0, bits ^ np.iinfo(integer).max, bits)


def _ordered(how: str) -> Callable[..., Value]:
    return lambda b, x, y: b.compare(how, _rank(b, x), _rank(b, y))


#
# Bits
#


def _shift(how: str) -> Callable[..., Value]:
    """A shift. By a negative number, or by as many bits as there are, it shifts all out."""

    def shift(b: Builder, x: Value, n: Value) -> Value:
        x, n = b.matched(x, n)
        bits = 8 * x.dtype.itemsize
        by = b.bitcast(n, f"uint{bits}")
        inside = by < bits
        by = b.where(inside, by, bits - 1 if how == "ashr" else 0)
        found = b.binary(how, x, b.bitcast(by, x.dtype))
        return found if how == "ashr" else b.where(inside, found, 0)

    return shift


#
# Choices
#


def _select(b: Builder, which: Value, *cases: Value) -> Value:
    """The case with this number; a boolean chooses among two cases."""
    if which.dtype == BOOL:
        return b.where(which, cases[-1], cases[0])
    found = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        found = b.where(which <= i, cases[i], found)
    return found


def _rounded(how: str) -> Callable[..., Value]:
    return lambda b, x: b.intrinsic(how, x) if x.is_real else x


def _methods(method: str, *names: str) -> dict[str, Callable[..., Value]]:
    """Operations that a method of the builder writes when told the name of the primitive."""
    return {how: lambda b, *xs, how=how: getattr(b, method)(how, *xs) for how in names}


OPERATIONS: dict[str, Callable[..., Value]] = {
    "abs": lambda b, x: b.abs(x),
    "add": lambda b, x, y: b.add(x, y),
    "ceil": _rounded("ceil"),
    "clamp": lambda b, low, x, high: _min(b, _max(b, low, x), high),
    "clz": lambda b, x: b.intrinsic("ctlz", x, b.constant(False, BOOL)),
    "div": _div,
    "floor": _rounded("floor"),
    "is_finite": lambda b, x: b.abs(x) < np.inf if x.is_real else b.constant(True, BOOL),
    "max": _max,
    "min": _min,
    "mul": lambda b, x, y: b.mul(x, y),
    "neg": lambda b, x: -x,
    "nextafter": _nextafter,
    "not": lambda b, x: ~x,
    "one_minus_square": lambda b, x: (1 - x) * (1 + x),
    "population_count": lambda b, x: b.intrinsic("ctpop", x),
    # The exponent may be an integer.
    "pow": lambda b, x, y: FUNCTIONS["pow"](b, x, b.cast(y, x.dtype)),
    "rem": _rem,
    "select_n": _select,
    "shift_left": _shift("shl"),
    "shift_right_arithmetic": _shift("ashr"),
    "shift_right_logical": _shift("lshr"),
    "sign": _sign,
    "square": lambda b, x: x * x,
    "sub": lambda b, x, y: b.sub(x, y),
    **_methods("binary", "and", "or", "xor"),
    **_methods("compare", "eq", "ge", "gt", "le", "lt", "ne"),
    **{f"{how}_to": _ordered(how) for how in ("eq", "le", "lt")},
}
# The operations that the computation of indices consists of.
_OF_INDICES = "add and clamp eq ge gt le lt max min mul ne not or sub"
_KNOWN: dict[str, Callable] = {
    **{name: FOLDED_INTEGERS[name] for name in _OF_INDICES.split()},
    "select_n": lambda which, *cases: cases[min(max(int(which), 0), len(cases) - 1)],
}
