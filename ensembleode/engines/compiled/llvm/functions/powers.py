"""Powers and roots."""

from __future__ import annotations

import numpy as np

from ..builder import Builder, Value
from .coefficients import RCBRT
from .exponential import clamp, exponential_pair, limits, nearest, power_of_two, scale
from .formats import format_of
from .logarithms import log_pair
from .pairs import two_product
from .polynomials import polynomial


def sqrt(b: Builder, x: Value) -> Value:
    return b.sqrt(x)


def rsqrt(b: Builder, x: Value) -> Value:
    return 1.0 / b.sqrt(x)


def integer_pow(b: Builder, x: Value, n: int) -> Value:
    """An integer power by repeated squaring, as JAX does it."""
    if n == 0:
        return b.matched(x, 1)[1]
    found, power, left = None, x, abs(n)
    while left:
        if left & 1:
            found = power if found is None else found * power
        left >>= 1
        if left:
            power = power * power
    assert found is not None
    return found if n > 0 else 1.0 / found


def pow(b: Builder, x: Value, y: Value) -> Value:
    """exp(y log |x|) with the right sign; special cases are those of IEEE 754, section 9.2.1."""
    x, y = b.matched(x, y)
    fmt = format_of(x)
    size = abs(x)
    is_whole = b.round_even(y).eq(y)
    half = y * 0.5
    is_odd = is_whole & b.round_even(half).ne(half)

    logarithm = log_pair(b, size)
    # With a larger exponent, every logarithm but zero makes the power over- or underflow.
    most = 2.0 ** (fmt.digits + 12)
    bounded = clamp(b, y, -most, most)
    head, tail = two_product(b, bounded, logarithm.head)
    tail = b.mul_add(bounded, logarithm.tail, tail)
    low, high = limits(fmt)
    near = clamp(b, head, low, high)
    (head, tail), k = exponential_pair(b, near, b.where(near.ne(head), 0.0, tail))
    found = scale(b, head + tail, k)

    infinity, nan = b.constant(np.inf, x.dtype), b.constant(np.nan, x.dtype)
    edge = b.where((size > 1.0) ^ (y < 0.0), infinity, b.constant(0.0, x.dtype))
    edge = b.where(size.ne(size) | y.ne(y), nan, edge)
    found = b.where((size > 0.0) & (size < np.inf), found, edge)
    is_negative = b.bitcast(x, fmt.integer) < 0
    found = b.where(is_negative & is_odd, -found, found)
    found = b.where((x < 0.0) & ~is_whole & (size < np.inf), nan, found)
    return b.where(y.eq(0.0) | x.eq(1.0), 1.0, found)


def cbrt(b: Builder, x: Value) -> Value:
    """The cube root. The significand's root is computed from that of its inverse."""
    fmt = format_of(x)
    size = abs(x)
    small = size < fmt.least_normal
    lifted = b.where(small, size * 2.0 ** (3 * fmt.digits), size)
    # 2^k m, with m between one and two.
    bits = b.bitcast(lifted, fmt.integer)
    large = 2.0**fmt.fraction
    biased = b.bitcast((bits >> fmt.fraction) | fmt.bits(large), x.dtype)
    k = biased - (large + fmt.max_exponent)
    m = b.bitcast((bits & fmt.fraction_mask) | fmt.bits(1.0), x.dtype)
    third = nearest(b, k * (1.0 / 3.0))
    rest = k - third * 3.0  # -1, 0 or 1
    m = m * power_of_two(b, rest)
    factor = b.where(rest > 0.0, b.constant(2.0 ** (-1 / 3), x.dtype), 1.0)
    factor = b.where(rest < 0.0, b.constant(2.0 ** (1 / 3), x.dtype), factor)
    y = polynomial(b, b.bitcast((bits & fmt.fraction_mask) | fmt.bits(1.0), x.dtype), RCBRT)
    y = y * factor
    # (1 - m y^3)^(-1/3) to second order triples the number of correct digits.
    e = 1.0 - m * (y * y * y)
    y = b.mul_add(y * e, b.mul_add(e, 2.0 / 9.0, 1.0 / 3.0), y)
    # The root is cut to a third of its digits, so that its cube is exact; then the rest is added.
    cut = fmt.digits - fmt.digits // 3
    root = m * y * y
    root = b.bitcast(b.bitcast(root, fmt.integer) & (-1 << cut), x.dtype)
    with b.unfused():
        lacking = m - root * root * root
    e = lacking * (y * y * y)
    # (1 - e)^(-1/3) - 1, over e
    series = b.mul_add(e, b.mul_add(e, b.mul_add(e, 35 / 243, 14 / 81), 2 / 9), 1 / 3)
    found = b.mul_add(root * e, series, root) * power_of_two(b, third)
    found = b.where(small, found * 2.0**-fmt.digits, found)
    regular = (size > 0.0) & (size < np.inf)
    return b.where(regular, b.copysign(found, x), x)
