"""Logarithms: x is 2^k m with m between sqrt(1/2) and sqrt(2), and log m is 2 atanh(s) with
s = (m - 1) / (m + 1).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ..builder import Builder, Value
from .coefficients import LOG, LOG_TAIL, LOG_WHOLE
from .constants import LOG2_E, LOG10_2, LOG10_E
from .exponential import ln2_parts, power_of_two
from .formats import format_of
from .pairs import (
    constant,
    exact,
    fast_two_sum,
    HeadAndTail,
    product,
    quotient,
    two_product,
    two_sum,
)
from .polynomials import polynomial


_SQRT_HALF = 0.5**0.5


def split_exponent(b: Builder, x: Value) -> tuple[Value, Value]:
    """k and m of a positive normal number."""
    fmt = format_of(x)
    least = fmt.bits(_SQRT_HALF)
    shifted = b.bitcast(x, fmt.integer) + (fmt.bits(1.0) - least)
    biased = b.cast(shifted, fmt.unsigned) >> fmt.fraction
    # A large number has a small whole number that is added to it in its lowest bits.
    large = 2.0**fmt.fraction
    k = b.bitcast(b.cast(biased, fmt.integer) | fmt.bits(large), x.dtype)
    m = b.bitcast((shifted & fmt.fraction_mask) + least, x.dtype)
    return k - (large + fmt.max_exponent), m


def split_any(b: Builder, x: Value) -> tuple[Value, Value]:
    """k and m of a positive number, which may be subnormal."""
    fmt = format_of(x)
    small = x < fmt.least_normal
    k, m = split_exponent(b, b.where(small, x * 2.0**fmt.digits, x))
    return b.where(small, k - float(fmt.digits), k), m


def _near_one(b: Builder, f: Value) -> tuple[Value, Value]:
    """s, and f - log(1 + f)."""
    s = f / (2.0 + f)
    z = s * s
    return s, s * (f - z * polynomial(b, z, LOG))


def with_limits(b: Builder, x: Value, found: Value) -> Value:
    """`found` where `x` is positive and finite, and the special values of the logarithm
    elsewhere."""
    outside = b.where(x.eq(0.0), b.constant(-np.inf, x.dtype), b.constant(np.nan, x.dtype))
    return b.where(x > 0.0, b.where(x < np.inf, found, x), outside)


def _log_of_parts(b: Builder, k: Value, m: Value) -> Value:
    """log(2^k m)."""
    high, low = ln2_parts(format_of(m))
    f = m - 1.0
    _, missing = _near_one(b, f)
    return b.mul_add(k, high, f - (missing - k * low))


def log(b: Builder, x: Value) -> Value:
    return with_limits(b, x, _log_of_parts(b, *split_any(b, x)))


def log_of_normal(b: Builder, x: Value) -> Value:
    """The logarithm of a positive normal number. In single precision it is without a division, for
    where there is enough else to do while its terms wait for one another."""
    k, m = split_exponent(b, x)
    if x.dtype not in LOG_WHOLE:
        return _log_of_parts(b, k, m)
    high, low = ln2_parts(format_of(x))
    f = m - 1.0
    rest = b.mul_add(f * f, f * polynomial(b, f, LOG_WHOLE) - 0.5, k * low)
    return b.mul_add(k, high, f + rest)


def log2(b: Builder, x: Value) -> Value:
    k, m = split_any(b, x)
    found = product(b, _pair_near_one(b, m - 1.0), constant(b, x, LOG2_E))
    return with_limits(b, x, (k + found.head) + found.tail)


def log10(b: Builder, x: Value) -> Value:
    fmt = format_of(x)
    k, m = split_any(b, x)
    found = product(b, _pair_near_one(b, m - 1.0), constant(b, x, LOG10_E))
    high = fmt.parts(LOG10_2, 1, fmt.digits - 3 - fmt.max_exponent.bit_length())[0]
    low = float(LOG10_2 - Fraction(high))
    total, rest = fast_two_sum(b, k * high, found.head)
    return with_limits(b, x, total + (rest + found.tail + k * low))


def log_of_sum(b: Builder, x: Value, tail: Value, more: Value | float = 0.0) -> Value:
    """log(x + tail) + more log 2, for positive normal x. The tail counts even where x is one, so
    that the result is log(1 + tail).
    """
    fmt = format_of(x)
    high, low = ln2_parts(fmt)
    k, m = split_exponent(b, x)
    down = power_of_two(b, -b.minimum(fmt.max_exponent - 1.0, k))
    f, rest = two_sum(b, m - 1.0, tail * down)
    s, missing = _near_one(b, f)
    k = k + more
    # The derivative 1 / (1 + f) need only be correct to a few per cent here.
    rest = b.mul_add(rest, b.mul_add(s, s + s - 2.0, 1.0), k * low)
    return b.mul_add(k, high, f - (missing - rest))


def log1p(b: Builder, x: Value) -> Value:
    u, tail = two_sum(b, 1.0, x)
    found = log_of_sum(b, u, tail)
    found = with_limits(b, u, found)
    return b.where(abs(x) < 2.0 ** -format_of(x).digits, x, found)


def _pair_near_one(b: Builder, f: Value) -> HeadAndTail:
    """log(1 + f), with half as many digits more than the format has."""
    divisor = fast_two_sum(b, 2.0, f)
    s = quotient(b, exact(b, f), divisor)
    square, low = two_product(b, s.head, s.head)
    z = HeadAndTail(square, low + (s.head + s.head) * s.tail)
    # 2 s + s z (2 / 3 + z p(z))
    first, first_tail = format_of(f).parts(Fraction(2, 3), 2)
    inner = fast_two_sum(b, first, z.head * polynomial(b, z.head, LOG_TAIL))
    inner = HeadAndTail(inner.head, inner.tail + first_tail)
    cube = product(b, s, z)
    third = product(b, cube, inner)
    head, tail = fast_two_sum(b, s.head + s.head, third.head)
    return fast_two_sum(b, head, tail + (s.tail + s.tail + third.tail))


def log_pair(b: Builder, x: Value, tail: Value | None = None) -> HeadAndTail:
    """log(x + tail) for positive finite x, with half as many digits more than the format has."""
    fmt = format_of(x)
    high, low = ln2_parts(fmt)
    k, m = split_any(b, x)
    near = _pair_near_one(b, m - 1.0)
    if tail is not None:
        near = HeadAndTail(near.head, near.tail + tail / x)
    head, rest = fast_two_sum(b, k * high, near.head)
    return fast_two_sum(b, head, rest + (near.tail + k * low))
