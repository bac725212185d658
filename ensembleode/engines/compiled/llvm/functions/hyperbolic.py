"""Hyperbolic functions and their inverses.

With x = k log 2 + r, c = cosh r and s = sinh r, a = 2^k / 2 and b = 2^-k / 2: sinh x is
c (a - b) + s (a + b), and cosh x is c (a + b) + s (a - b), without cancellation where x is small.
"""

from __future__ import annotations

import numpy as np

from ..builder import Builder, F32, Value
from .coefficients import COSH, ONE_FROM, SINH, TANH, TANH_ABOVE, TANH_BELOW
from .constants import LN2
from .exponential import limits, power, power_of_two, reduce, scale
from .formats import format_of
from .logarithms import log_of_sum, with_limits
from .pairs import exact, fast_two_sum, HeadAndTail, quotient, two_product, two_sum
from .polynomials import horner, polynomial


def _sinh_and_cosh(b: Builder, x: Value) -> tuple[HeadAndTail, HeadAndTail, Value]:
    """sinh x and cosh x, divided by 2^k, for x >= 0, each as a sum of two numbers; and k."""
    k, rest, low = reduce(b, x)
    z = rest * rest
    s = b.mul_add(rest * z, polynomial(b, z, SINH), low) + rest
    c = z * polynomial(b, z, COSH)  # cosh r - 1
    # Here k is limited, as the 2^(-2 k) of a larger one is too small to matter.
    least = b.minimum(float(format_of(x).digits), k)
    small = power_of_two(b, (-2.0 * least) - 1.0)
    minus, lost = fast_two_sum(b, 0.5, -small)
    plus, lost_too = fast_two_sum(b, 0.5, small)
    return (
        HeadAndTail(minus, b.mul_add(s, plus, b.mul_add(c, minus, lost))),
        HeadAndTail(plus, b.mul_add(s, minus, b.mul_add(c, plus, lost_too))),
        k,
    )


def sinh(b: Builder, x: Value) -> Value:
    (head, tail), _, k = _sinh_and_cosh(b, b.minimum(limits(format_of(x))[1], abs(x)))
    return b.copysign(scale(b, head + tail, k), x)


def cosh(b: Builder, x: Value) -> Value:
    _, (head, tail), k = _sinh_and_cosh(b, b.minimum(limits(format_of(x))[1], abs(x)))
    return scale(b, head + tail, k)


def tanh(b: Builder, x: Value) -> Value:
    """e / (e + 2) with e = exp(2 |x|) - 1. If p is defined by exp(2 |x|) = 2^k (1 + p), then e is
    2^k p + (2^k - 1). Near zero, where rounding errors would add up, it is a polynomial.

    In single precision, the activations of networks, it is a quotient of two polynomials, which
    takes half as many operations. Its error is up to 5.3 units in the last place.
    """
    if x.dtype == F32:
        bounded = _limited(b, x, ONE_FROM)
        square = bounded * bounded
        above = bounded * horner(b, square, TANH_ABOVE)
        return _limited(b, above / horner(b, square, TANH_BELOW), 1.0)
    fmt = format_of(x)
    size = abs(x)
    bounded = b.minimum((fmt.digits / 2 + 2) * float(LN2), size)  # tanh is one for larger x
    biased, p = power(b, bounded + bounded, fmt.magic_biased)
    scale = b.bitcast(b.bitcast(biased, fmt.integer) << fmt.fraction, x.dtype)
    e = b.mul_add(p, scale, scale - 1.0)
    square = x * x
    near = b.mul_add(size * square, polynomial(b, square, TANH), size)
    return b.copysign(b.where(size < 0.3, near, e / (e + 2.0)), x)


def _limited(b: Builder, x: Value, most: float) -> Value:
    """The number of this size at most that is nearest; NaN stays."""
    return b.minimum(most, b.maximum(-most, x))


def asinh(b: Builder, x: Value) -> Value:
    """log(1 + |x| + x^2 / (1 + sqrt(1 + x^2))), or log(2 |x|) for large x."""
    size = abs(x)
    is_large = size > 2.0 ** (format_of(x).digits // 2 + 2)
    near = b.where(is_large, 1.0, size)
    square = near * near
    root = b.sqrt(1.0 + square)
    argument = fast_two_sum(b, near, square / (1.0 + root))
    return b.copysign(_log1p_or_log(b, argument, size, is_large), x)


def acosh(b: Builder, x: Value) -> Value:
    """log(1 + t + sqrt(2 t + t^2)) with t = x - 1, or log(2 x) for large x."""
    is_large = x > 2.0 ** (format_of(x).digits // 2 + 2)
    t = b.where(is_large, 1.0, x - 1.0)
    square, low = two_product(b, t, t)
    radicand, rest = two_sum(b, t + t, square)
    root = b.sqrt(radicand)
    high, lost = two_product(b, root, root)
    with b.unfused():
        lacking = ((radicand - high) - lost) + (rest + low)
    # A root of zero has no rounding error to be corrected.
    more = lacking * 0.5 / b.where(root > 0.0, root, 1.0)
    head, tail = two_sum(b, root, t)
    argument = fast_two_sum(b, head, tail + more)
    found = _log1p_or_log(b, argument, x, is_large)
    return b.where(x < 1.0, b.constant(np.nan, x.dtype), found)


def _log1p_or_log(b: Builder, argument: HeadAndTail, x: Value, is_large: Value) -> Value:
    """log(1 + argument), or log(2 x) where `is_large`."""
    head, tail = two_sum(b, 1.0, argument.head)
    head = b.where(is_large, x, head)
    tail = b.where(is_large, 0.0, tail + argument.tail)
    more = b.where(is_large, b.matched(x, 1.0)[1], 0.0)
    found = log_of_sum(b, head, tail, more)
    small = argument.head < 2.0 ** -format_of(x).digits
    return with_limits(b, head, b.where(small, argument.head, found))


def atanh(b: Builder, x: Value) -> Value:
    """log(1 + 2 |x| / (1 - |x|)) / 2"""
    size = abs(x)
    inside = b.where(size < 1.0, size, 0.0)
    argument = quotient(b, exact(b, inside + inside), fast_two_sum(b, 1.0, -inside))
    never = argument.head < 0.0
    found = _log1p_or_log(b, argument, size, never) * 0.5
    edge = b.where(size.eq(1.0), b.constant(np.inf, x.dtype), b.constant(np.nan, x.dtype))
    return b.copysign(b.where(size < 1.0, found, edge), x)
