"""The error function, its complement and its inverse.

Where erf is below one half it is a polynomial. Beyond, its complement is exp(-x^2) times a
polynomial in (x - a) / (x + a), over x + a; similar to Shepherd and Laframboise, "Chebyshev
approximation of (1 + 2 x) exp(x^2) erfc x in 0 <= x < infinity", 1981.
"""

from __future__ import annotations

import numpy as np

from ..builder import Builder, Value
from .coefficients import ERF, ERF_INV, ERF_INV_TAIL, ERFCX
from .constants import ERFCX_SLOPE, ERFCX_VALUE, TWO_OVER_SQRT_PI
from .exponential import clamp, exp, exponential_pair, power_of_two, scale
from .formats import format_of
from .logarithms import log
from .pairs import fast_two_sum, HeadAndTail, product, quotient, two_product, two_sum
from .polynomials import polynomial


_SHIFT = 4.0
_HALF_AT = 0.4769362762044699  # where erf is one half


def _near(b: Builder, x: Value) -> HeadAndTail:
    """erf(x), for x up to the point where erf is one half."""
    z = x * x
    value, rest = format_of(x).parts(TWO_OVER_SQRT_PI, 2)
    head, tail = two_product(b, x, value)
    return HeadAndTail(head, b.mul_add(x, b.mul_add(z, polynomial(b, z, ERF), rest), tail))


def _far(b: Builder, x: Value) -> tuple[HeadAndTail, HeadAndTail, Value]:
    """erfc, for x from the point where it is one half, as the product of two numbers and a power of
    two. Returns the two numbers and the exponent.
    """
    square, low = two_product(b, x, x)
    gauss, k = exponential_pair(b, -square, -low)
    divisor = two_sum(b, x, _SHIFT)
    inverse = 1.0 / divisor.head
    t, rest = quotient(b, two_sum(b, x, -_SHIFT), divisor, inverse)
    # The first two terms partly cancel, so they are exact.
    fmt = format_of(x)
    value, value_tail = fmt.parts(ERFCX_VALUE, 2)
    slope, slope_tail = fmt.parts(ERFCX_SLOPE, 2)
    linear, low = two_product(b, t, slope)
    first = ERFCX[x.dtype]
    derivative: Value = b.matched(t, 5.0 * first[3])[1]
    for c in (4.0 * first[2], 3.0 * first[1], 2.0 * first[0], slope):  # roughly
        derivative = b.mul_add(derivative, t, c)
    low = low + b.mul_add(rest, derivative, b.mul_add(t, slope_tail, value_tail))
    head, lost = fast_two_sum(b, value, linear)
    head, tail = fast_two_sum(b, head, t * t * polynomial(b, t, ERFCX))
    ratio = quotient(b, HeadAndTail(head, tail + (lost + low)), divisor, inverse)
    return gauss, ratio, k


def _complement(b: Builder, x: Value) -> Value:
    largest = 27.5 if format_of(x).digits > 24 else 10.5  # beyond it erfc is zero
    gauss, ratio, k = _far(b, clamp(b, x, _HALF_AT - 0.001, largest))
    head, tail = product(b, gauss, ratio)
    return scale(b, head + tail, k)


def erf(b: Builder, x: Value) -> Value:
    size = abs(x)
    head, tail = _near(b, size)
    far = 1.0 - _complement(b, size)
    return b.copysign(b.where(size < _HALF_AT, head + tail, far), x)


def erfc(b: Builder, x: Value) -> Value:
    far = _complement(b, abs(x))
    far = b.where(x < 0.0, 2.0 - far, far)
    head, tail = _near(b, clamp(b, x, -1.0, 1.0))
    head, rest = fast_two_sum(b, 1.0, -head)
    return b.where(abs(x) < _HALF_AT, head + (rest - tail), far)


def erf_inv(b: Builder, x: Value) -> Value:
    """The inverse of erf: a first guess, improved by a step of Halley's method."""
    size = abs(x)
    inside = b.where(size < 1.0, size, 0.0)
    complement = 1.0 - inside
    w = -log(b, complement * (1.0 + inside))
    tail = polynomial(b, b.sqrt(b.maximum(5.0, w)), ERF_INV_TAIL)
    y = b.where(w < 5.0, inside * polynomial(b, b.minimum(w, 5.0), ERF_INV), tail)

    gauss, ratio, k = _far(b, b.maximum(_HALF_AT - 0.01, y))
    head, rest = product(b, gauss, ratio)
    unit = power_of_two(b, k)
    # The error erf(y) - x, from erfc where that is smaller; then divided by a rough derivative.
    far = (complement - head * unit) - rest * unit
    value, rest = _near(b, y)
    near = (value - inside) + rest
    step = b.where(inside < 0.5, near, far) * exp(b, y * y) * float(1 / TWO_OVER_SQRT_PI)
    y = y - step / b.mul_add(y, step, 1.0)
    # The correction of a tiny guess may be subnormal.
    is_tiny = inside < 2.0 ** -format_of(x).digits
    y = b.where(is_tiny, inside * float(1 / TWO_OVER_SQRT_PI), y)
    edge = b.where(size.eq(1.0), b.constant(np.inf, x.dtype), b.constant(np.nan, x.dtype))
    return b.copysign(b.where(size < 1.0, y, edge), x)
