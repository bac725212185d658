"""The operations of the small language on NumPy scalars, with the results of XLA."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special


def _bits(x: Any) -> int:
    return x.dtype.itemsize * 8


def _unsigned(x: Any) -> int:
    """The number that the bits of an integer are without a sign."""
    return int(x) % 2 ** _bits(x)


def wrapped(x: int, dtype: Any) -> Any:
    """An integer of any size, modulo what fits."""
    dtype = np.dtype(dtype)
    n = dtype.itemsize * 8
    x %= 2**n
    return dtype.type(x - 2**n if dtype.kind == "i" and x >= 2 ** (n - 1) else x)


def _div(x, y):
    if x.dtype.kind == "f":
        return np.divide(x, y)
    if y == 0:
        return wrapped(-1, x.dtype)
    quotient = abs(int(x)) // abs(int(y))
    return wrapped(quotient if (x < 0) == (y < 0) else -quotient, x.dtype)


def _rem(x, y):
    if x.dtype.kind == "f":
        return np.fmod(x, y)
    remainder = abs(int(x)) % abs(int(y)) if y else abs(int(x))
    return wrapped(-remainder if x < 0 else remainder, x.dtype)


def _round(x, method):
    if method == 1:
        return np.rint(x)
    whole = np.trunc(x)
    return whole + np.copysign(np.abs(x - whole) >= 0.5, x).astype(x.dtype) if x == x else x


def _integer_pow(x, n):
    if x.dtype.kind == "f":
        return np.power(x, x.dtype.type(n))
    return wrapped(int(x) ** n, x.dtype)


def _pow(x, y):
    if y == 0.5 and np.isneginf(x):
        return -x  # the square root is NaN, which some versions of NumPy take
    if y.dtype.kind == "f":
        return np.power(x, y)
    if x.dtype.kind == "f":
        return np.power(x, x.dtype.type(y))
    return wrapped(int(x) ** int(y), x.dtype)


def _shift_left(x, n):
    return wrapped(int(x) << n, x.dtype) if (n := _unsigned(n)) < _bits(x) else x.dtype.type(0)


def _shift_right_arithmetic(x, n):
    signed = wrapped(int(x), f"i{x.dtype.itemsize}")  # the sign is the first bit, of all integers
    return wrapped(int(signed) >> min(_unsigned(n), _bits(x)), x.dtype)


def _shift_right_logical(x, n):
    return wrapped(_unsigned(x) >> min(_unsigned(n), _bits(x)), x.dtype)


def _ordered(x: Any) -> Any:
    """A key for the order of all floats: -NaN, -inf, ..., -0, 0, ..., inf, NaN."""
    if x.dtype.kind != "f":
        return x
    bits = int(x.view(f"i{x.dtype.itemsize}"))
    return bits if bits >= 0 else -(bits + 2 ** (_bits(x) - 1)) - 1


def select_n(which, *cases):
    return cases[int(which)] if 0 <= int(which) < len(cases) else cases[-1]


def _sign(x):
    return np.copysign(x.dtype.type(0), x) if x == 0 and x.dtype.kind == "f" else np.sign(x)


def convert(x, dtype):
    """A number as one of another dtype; a float that no integer is near, as the nearest one."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.bool_(x != 0)
    if dtype.kind in "iu" and x.dtype.kind == "f":
        if np.isnan(x):
            return dtype.type(0)
        info = np.iinfo(dtype)
        return dtype.type(info.max if x >= info.max else info.min if x <= info.min else int(x))
    return wrapped(int(x), dtype) if dtype.kind in "iu" else dtype.type(x)


def bitcast(x, dtype):
    return x.view(dtype)


OPERATIONS: dict[str, Callable] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "add": np.add,
    "and": np.bitwise_and,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "bessel_i0e": special.i0e,
    "bessel_i1e": special.i1e,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "clz": lambda x: x.dtype.type(_bits(x) - _unsigned(x).bit_length()),
    "cos": np.cos,
    "cosh": np.cosh,
    "digamma": special.digamma,
    "div": _div,
    "eq": np.equal,
    "eq_to": lambda x, y: np.bool_(_ordered(x) == _ordered(y)),
    "erf": special.erf,
    "erf_inv": special.erfinv,
    "erfc": special.erfc,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "igamma": special.gammainc,
    "igammac": special.gammaincc,
    "integer_pow": _integer_pow,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "le_to": lambda x, y: np.bool_(_ordered(x) <= _ordered(y)),
    "lgamma": lambda x: special.gammaln(x) if np.isfinite(x) else np.abs(x),
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "logistic": special.expit,
    "lt": np.less,
    "lt_to": lambda x, y: np.bool_(_ordered(x) < _ordered(y)),
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "nextafter": np.nextafter,
    "not": np.bitwise_not,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
    "or": np.bitwise_or,
    "polygamma": lambda n, x: x.dtype.type(special.polygamma(int(n), x)),
    "population_count": lambda x: x.dtype.type(_unsigned(x).bit_count()),
    "pow": _pow,
    "regularized_incomplete_beta": special.betainc,
    "rem": _rem,
    "round": _round,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "select_n": select_n,
    "shift_left": _shift_left,
    "shift_right_arithmetic": _shift_right_arithmetic,
    "shift_right_logical": _shift_right_logical,
    "sign": _sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
    "zeta": special.zeta,
}
