"""Reduction of the argument of a trigonometric function by a multiple of pi / 2.

Small arguments are reduced by parts of pi / 2 (Cody and Waite, "Software Manual for the Elementary
Functions", 1980). All others are reduced one lane at a time, by those digits of 2 / pi that matter
to them (Payne and Hanek, "Radian reduction for trigonometric functions", 1983).
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..across_lanes import for_each_lane
from ..builder import Builder, ElementPointer, F64, I64, Value
from ..module import Module
from .constants import PI, TWO_OVER_PI
from .formats import format_of, FORMATS
from .pairs import fast_two_sum, HeadAndTail, remainder, two_product, two_sum


U64 = np.dtype(np.uint64)
_SLOW = "reduce_large_angle"


class ReducedAngle(NamedTuple):
    """x = `quadrant` pi / 2 + `rest`, where the rest is approximately between -pi / 4 and pi / 4.
    The quadrant is an integer of which only the two lowest bits count."""

    rest: HeadAndTail
    quadrant: Value


def reduce(b: Builder, x: Value) -> ReducedAngle:
    # A sine and a cosine of the same argument share the reduction.
    return b.once_for(("reduced", x.name, x.type), lambda: _reduced(b, x))


def _reduced(b: Builder, x: Value) -> ReducedAngle:
    fmt = format_of(x)
    # The number of parts of pi / 2, their digits, and the largest multiple for which these suffice.
    if b.module.has_fma:
        n, digits, limit = 3, fmt.digits, 2.0 ** (fmt.digits // 2)
    elif fmt.dtype == F64:
        n, digits, limit = 4, 33, 2.0**20
    else:
        n, digits, limit = 5, 14, 2.0**10
    parts = fmt.parts(PI / 2, n - 1, digits)
    parts += fmt.parts(PI / 2 - sum(map(Fraction, parts)), 1)
    t = b.mul_add(x, float(TWO_OVER_PI), fmt.magic)
    rest = _by_parts(b, x, t - fmt.magic, parts)

    of_lanes = bool(x.lanes)
    head = b.variable(x.dtype, rest.head, of_lanes=of_lanes)
    tail = b.variable(x.dtype, rest.tail, of_lanes=of_lanes)
    quadrant = b.variable(x.dtype, t, of_lanes=of_lanes)
    is_large = (abs(x) > limit) & (abs(x) < np.inf)
    found = b.array(F64, 3)
    _define_slow(b.module)

    def one(lane: Value):
        b.emit(f"call void @{_SLOW}({b.cast(b.entry(x, lane), F64)}, ptr {found.base})")
        high, low = found.load(0), found.load(1)
        near = b.cast(high, x.dtype)
        left = b.cast((high - b.cast(near, F64)) + low, x.dtype)
        turn = b.cast(found.load(2), x.dtype) + fmt.magic
        for variable, value in ((head, near), (tail, left), (quadrant, turn)):
            variable.set(b.with_entry(variable.get(), lane, value))

    b.if_(b.any(is_large), lambda: for_each_lane(b, is_large, one), likely=False)
    return ReducedAngle(HeadAndTail(head.get(), tail.get()), b.bitcast(quadrant.get(), fmt.integer))


def _by_parts(b: Builder, x: Value, k: Value, parts: list[float]) -> HeadAndTail:
    """x minus k times the sum of the parts; the first product is subtracted without rounding."""
    first, *middle, last = parts
    rest = remainder(b, x, k, b.matched(x, first)[1]) if b.module.has_fma else x - k * first
    errors = []
    for part in middle:
        if b.module.has_fma:
            high, low = two_product(b, k, part)
            errors.append(-low)
        else:
            high = k * part  # exact
        rest, error = two_sum(b, rest, -high)
        errors.append(error)
    tail = b.mul_add(k, -last, sum(errors[1:], errors[0]))
    return fast_two_sum(b, rest, tail)


def _define_slow(module: Module) -> None:
    """Define a function of a finite double of at least 2^-9, which writes the rest as a pair, and
    the quadrant.
    """
    if module.has(_SLOW):
        return
    fmt = FORMATS[F64]
    # The bits of 2 / pi in words of 32 bits, after two words of zeros.
    bits = TWO_OVER_PI.numerator * (2**1280 // TWO_OVER_PI.denominator)
    words = [0, 0, *((bits >> (1280 - 32 * (i + 1))) & 0xFFFFFFFF for i in range(40))]
    # The words are int64, as the builder's tables have no smaller unsigned integers.
    table = module.table(words, I64)
    with module.function(_SLOW, ["double %x", "ptr noalias %found"], attributes="noinline") as b:
        x = b.parameter("%x", F64)
        pattern = b.bitcast(x, U64)
        significand = (pattern & fmt.fraction_mask) | (1 << fmt.fraction)
        exponent = b.cast((pattern >> fmt.fraction) & 0x7FF, I64) - (1023 + 52)
        # |x| is significand 2^exponent. Words whose products are multiples of four
        # quadrants don't count; seven of the other words make the rest exact to 2^-138.
        start = (exponent + 62) >> 5
        shift = b.cast(((exponent - 2) & 31), U64)
        entries = ElementPointer(b, table, I64)
        taken = [b.cast(entries.load(start + i), U64) for i in range(7)]
        mask = 0xFFFFFFFF
        low, high = significand & mask, significand >> 32
        # The lowest seven words of the product, the last first.
        limbs = []
        carry = b.constant(0, U64)
        below = b.constant(0, U64)
        for word in reversed(taken):
            first, second = low * word, high * word
            sum_ = (first & mask) + (below & mask) + carry
            limbs.append(sum_ & mask)
            carry = (sum_ >> 32) + (first >> 32) + (below >> 32)
            below = second
        limbs.reverse()
        # A shift by which the two highest bits are the quadrant, and those after them the fraction.
        limbs.append(b.constant(0, U64))
        limbs = [((limbs[i] << shift) | (limbs[i + 1] >> (32 - shift))) & mask for i in range(7)]
        quadrant = limbs[0] >> 30
        limbs.append(b.constant(0, U64))
        limbs = [((limbs[i] << 2) | (limbs[i + 1] >> 30)) & mask for i in range(7)]
        # Rounding to the nearest: a fraction of at least one half goes to the next quadrant.
        past = limbs[0] >> 31
        limbs = [limb ^ (past * mask) for limb in limbs]
        reals = [
            b.cast(b.cast(limb, I64), F64) * 2.0 ** (-32 * (i + 1)) for i, limb in enumerate(limbs)
        ]
        head, tail = fast_two_sum(b, reals[0], reals[1])
        head, tail = fast_two_sum(b, head, (tail + reals[2]) + (reals[3] + reals[4]))
        half_pi, rest = fmt.parts(PI / 2, 2)
        angle, low = two_product(b, head, half_pi)
        angle, low = fast_two_sum(b, angle, low + (head * rest + tail * half_pi))
        turns = b.cast(b.cast(quadrant + past, I64), F64)
        is_negative = x < 0.0
        minus = past.ne(0) ^ is_negative
        found = ElementPointer(b, "%found", F64)
        found.store(0, b.where(minus, -angle, angle))
        found.store(1, b.where(minus, -low, low))
        found.store(2, b.where(is_negative, -turns, turns))
        b.return_()
