"""Exponentials. For x = k log 2 + r, the result is a polynomial of r, times 2^k."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..builder import Builder, Value
from .coefficients import EXP, EXP2
from .constants import LN2, LOG2_E
from .formats import Format, format_of
from .pairs import choose, exact, fast_two_sum, HeadAndTail, quotient, two_sum
from .polynomials import polynomial


class ReducedExponent(NamedTuple):
    """x = `k` log 2 + `rest` (+ `tail`), where `k` is a whole number."""

    k: Value
    rest: Value
    tail: Value


def ln2_parts(fmt: Format) -> list[float]:
    """log 2 as a sum of two parts; the product of the first with any exponent is exact."""
    head = fmt.parts(LN2, 1, fmt.digits - 3 - fmt.max_exponent.bit_length())[0]
    return [head, fmt.parts(LN2 - LN2.from_float(head), 1)[0]]


def nearest(b: Builder, x: Value) -> Value:
    """The nearest whole number, for x with few digits before the point."""
    magic = format_of(x).magic
    return (x + magic) - magic


def reduce(b: Builder, x: Value) -> ReducedExponent:
    """x as a multiple of log 2 and a rest, for x whose exponential neither over- nor underflows."""
    fmt = format_of(x)
    high, low = ln2_parts(fmt)
    k = b.mul_add(x, float(LOG2_E), fmt.magic) - fmt.magic
    first = b.mul_add(k, -high, x)
    with b.unfused():
        correction = k * low
        rest = first - correction
        return ReducedExponent(k, rest, (first - rest) - correction)


def power_of_two(b: Builder, k: Value) -> Value:
    """2^k for a whole number k that is the exponent of a normal number."""
    fmt = format_of(k)
    shifted = b.bitcast(k + fmt.magic_biased, fmt.integer) << fmt.fraction
    return b.bitcast(shifted, k.dtype)


def scale(b: Builder, x: Value, k: Value) -> Value:
    """x 2^k for a whole number k, rounded once even if the result is subnormal."""
    return _scale(b, x, k + format_of(x).magic_twice_biased)


def _scale(b: Builder, x: Value, biased: Value) -> Value:
    """x 2^k, from a number that has k plus twice the bias in its lowest bits."""
    fmt = format_of(x)
    # Each factor has half of the exponent, so that the first product is normal.
    exponent = b.cast(b.bitcast(biased, fmt.integer) << fmt.fraction, fmt.unsigned)
    half = (exponent >> 1) & ~np.array(fmt.fraction_mask, fmt.unsigned)
    return (x * b.bitcast(half, x.dtype)) * b.bitcast(exponent - half, x.dtype)


def clamp(b: Builder, x: Value, low: float, high: float) -> Value:
    """x limited to the interval from `low` to `high`; NaN is unchanged."""
    return b.minimum(high, b.maximum(low, x))


def limits(fmt: Format) -> tuple[float, float]:
    """The arguments below which the exponential underflows to zero, and above which it
    overflows."""
    log2 = float(LN2)
    return -(fmt.max_exponent + fmt.digits + 2) * log2, (fmt.max_exponent + 3) * log2


def exponential_pair(b: Builder, x: Value, tail: Value | None = None) -> tuple[HeadAndTail, Value]:
    """exp(x + tail) as a pair near one, and the exponent of the power of two that multiplies it."""
    k, rest, low = reduce(b, x)
    low = low if tail is None else low + tail
    square, series = rest * rest, polynomial(b, rest, EXP)
    # The tail enters to first order; the derivative of the exponential is the exponential itself.
    low = b.mul_add(low, b.mul_add(square, series, rest), low)
    less_one = b.mul_add(square, series, low) + rest
    return fast_two_sum(b, b.matched(rest, 1.0)[1], less_one), k


def exp(b: Builder, x: Value) -> Value:
    fmt = format_of(x)
    biased, p = power(b, clamp(b, x, *limits(fmt)), fmt.magic_twice_biased)
    return _scale(b, 1.0 + p, biased)


def power(b: Builder, x: Value, magic: float) -> tuple[Value, Value]:
    """exp(x) as 2^k (1 + p). Returns the sum of k and `magic`, which has k in its lowest bits; and
    p."""
    high, low = ln2_parts(format_of(x))
    sum_ = b.mul_add(x, float(LOG2_E), magic)
    k = sum_ - magic
    rest = b.mul_add(k, -low, b.mul_add(k, -high, x))
    p = b.mul_add(rest * rest, polynomial(b, rest, EXP), rest)
    return sum_, p


def exp2(b: Builder, x: Value) -> Value:
    fmt = format_of(x)
    x = clamp(b, x, -(fmt.max_exponent + fmt.digits + 2.0), fmt.max_exponent + 3.0)
    biased = x + fmt.magic_twice_biased
    rest = x - (biased - fmt.magic_twice_biased)
    return _scale(b, b.mul_add(rest, polynomial(b, rest, EXP2), 1.0), biased)


def expm1(b: Builder, x: Value) -> Value:
    fmt = format_of(x)
    bounded = clamp(b, x, -(fmt.digits + 4) * float(LN2), limits(fmt)[1])
    k, rest, low = reduce(b, bounded)
    # 2^k exp r - 1 = 2^k (exp r - 1 + (1 - 2^-k)). Here k is limited, as the 2^-k of
    # a larger one is too small to matter.
    one = 1.0 - power_of_two(b, -b.minimum(2.0 * fmt.digits, k))
    head, lost = fast_two_sum(b, one, rest)
    series = b.mul_add(rest * rest, polynomial(b, rest, EXP), low)
    return b.where(x.eq(0.0), x, scale(b, head + (lost + series), k))


def logistic(b: Builder, x: Value) -> Value:
    """1 / (1 + exp(-x)), computed from exp(-|x|)."""
    fmt = format_of(x)
    (head, tail), k = exponential_pair(b, b.maximum(limits(fmt)[0], -abs(x)))
    small = HeadAndTail(scale(b, head, k), scale(b, tail, k))
    one = exact(b, b.matched(x, 1.0)[1])
    divisor, low = two_sum(b, 1.0, small.head)
    found = quotient(b, choose(b, x < 0.0, small, one), HeadAndTail(divisor, low + small.tail))
    return found.head
