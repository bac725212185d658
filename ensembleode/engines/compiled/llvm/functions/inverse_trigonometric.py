"""Inverse trigonometric functions: the arc sine by the half-angle formula, the arc tangent from an
argument that is reduced by pi / 4 or pi / 2."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from ..builder import Builder, Value
from .coefficients import ASIN, ATAN
from .constants import PI
from .formats import format_of
from .pairs import choose, constant, fast_two_sum, HeadAndTail, quotient, two_sum
from .polynomials import polynomial


_TAN_EIGHTH = math.sqrt(2.0) - 1.0  # of pi


def _angle(b: Builder, like: Value, turns: float) -> HeadAndTail:
    """The angle of this many turns, with the precision of a pair."""
    return constant(b, like, PI * Fraction(turns))


def _half_angle(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """The argument of the arc sine's series: where |x| is above one half, the sine of half the
    angle between the arc sine and pi / 2, elsewhere |x|. Also the value of the series, less one,
    and the mask of the lanes above one half.
    """
    size = abs(x)
    is_large = size > 0.5
    z = b.where(is_large, (1.0 - size) * 0.5, x * x)
    root = b.where(is_large, b.sqrt(z), size)
    return root, z * polynomial(b, z, ASIN), is_large


def _sum(b: Builder, base: HeadAndTail, x: Value, more: Value) -> Value:
    """base + x (1 + more)"""
    head, tail = fast_two_sum(b, base.head, x)
    return head + b.mul_add(x, more, tail + base.tail)


def asin(b: Builder, x: Value) -> Value:
    root, more, is_large = _half_angle(b, x)
    base = choose(b, is_large, _angle(b, x, 0.5), _angle(b, x, 0.0))
    return b.copysign(_sum(b, base, b.where(is_large, -2.0 * root, root), more), x)


def acos(b: Builder, x: Value) -> Value:
    root, more, is_large = _half_angle(b, x)
    is_negative = x < 0.0
    far = choose(b, is_negative, _angle(b, x, 1.0), _angle(b, x, 0.0))
    base = choose(b, is_large, far, _angle(b, x, 0.5))
    part = b.where(is_large, root + root, -root)
    return _sum(b, base, b.where(is_negative, -part, part), more)


def _arc(b: Builder, y: Value, x: Value, is_left: Value | None = None) -> Value:
    """The angle of a point in the first quadrant, neither at the origin nor infinite; where
    `is_left`, the angle of its mirror image with negative x.
    """
    is_steep = y > x * (1.0 / _TAN_EIGHTH)
    is_middle = (y > x * _TAN_EIGHTH) & ~is_steep
    difference, lost = two_sum(b, y, -x)
    total, lost_too = two_sum(b, y, x)
    zero = _angle(b, y, 0.0).tail
    n = HeadAndTail(
        b.where(is_steep, -x, b.where(is_middle, difference, y)), b.where(is_middle, lost, zero)
    )
    d = HeadAndTail(
        b.where(is_steep, y, b.where(is_middle, total, x)), b.where(is_middle, lost_too, zero)
    )
    ratio = quotient(b, n, d)
    base = choose(b, is_middle, _angle(b, y, 0.25), _angle(b, y, 0.0))
    base = choose(b, is_steep, _angle(b, y, 0.5), base)
    if is_left is not None:
        left = choose(b, is_steep, base, _angle(b, y, 1.0))
        left = choose(b, is_middle, _angle(b, y, 0.75), left)
        base = choose(b, is_left, left, base)
        ratio = choose(b, is_left, HeadAndTail(-ratio.head, -ratio.tail), ratio)
    z = ratio.head * ratio.head
    more = b.mul_add(ratio.head * z, polynomial(b, z, ATAN), ratio.tail)
    head, tail = fast_two_sum(b, base.head, ratio.head)
    return head + (more + (tail + base.tail))


def atan(b: Builder, x: Value) -> Value:
    # For larger arguments the result is pi / 2; their inverses may be subnormal.
    size = b.minimum(2.0 ** (2 * format_of(x).digits), abs(x))
    return b.copysign(_arc(b, size, b.matched(x, 1.0)[1]), x)


def atan2(b: Builder, y: Value, x: Value) -> Value:
    y, x = b.matched(y, x)
    fmt = format_of(y)
    high, wide = abs(y), abs(x)
    # Infinities become ones, and finite numbers beside them zeros; for two zeros, x becomes one.
    is_far = (high.eq(np.inf) | wide.eq(np.inf)) & high.eq(high) & wide.eq(wide)
    high = b.where(is_far, b.where(abs(y).eq(np.inf), b.matched(y, 1.0)[1], 0.0), high)
    wide = b.where(is_far, b.where(abs(x).eq(np.inf), b.matched(y, 1.0)[1], 0.0), wide)
    wide = b.where(high.eq(0.0) & wide.eq(0.0), 1.0, wide)
    # Scaled so that neither the sum nor an inverse overflows, and the remainder doesn't underflow.
    largest = b.maximum(high, wide)
    step = 2.0 ** (fmt.max_exponent // 4)
    factor = b.where(largest > step * step * step, b.constant(1.0 / step, y.dtype), 1.0)
    factor = b.where(largest < 1.0 / (step * step), step, factor)
    is_left = b.bitcast(x, fmt.integer) < 0
    return b.copysign(_arc(b, high * factor, wide * factor, is_left), y)
