"""The logarithm of the gamma function, and its derivatives.

Small arguments are moved to the interval from 3/2 to 5/2 by the recurrence, large ones take
Stirling's series, and negative ones are reflected. Sums that cancel are computed with `pairs.py`;
single precision is computed in double.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from ..builder import Builder, F32, F64, Value
from .coefficients import DIGAMMA, LGAMMA, STIRLING
from .constants import EULER, HALF_LOG_TWO_PI, LGAMMA_CURVE, LN_PI, PI
from .formats import format_of
from .logarithms import log_pair
from .pairs import (
    choose,
    constant,
    exact,
    fast_two_sum,
    HeadAndTail,
    product,
    quotient,
    total,
    two_product,
    two_sum,
)
from .polynomials import polynomial
from .powers import integer_pow


_STIRLING_FROM = 8.0  # on


def _negated(x: HeadAndTail) -> HeadAndTail:
    return HeadAndTail(-x.head, -x.tail)


def _positive(b: Builder, x: Value) -> HeadAndTail:
    """lgamma of a positive number or NaN."""
    fmt = format_of(x)
    one = b.matched(x, 1.0)[1]
    is_large = x >= _STIRLING_FROM
    is_tiny, is_small = x < 0.5, x < 1.5

    # (x - 1) (x - 2) ... down to 5 / 2, or x (x + 1) up to 3 / 2.
    moved, factors = b.where(is_large, 2.0, x), exact(b, one)
    for _ in range(6):
        less = moved - 1.0
        is_above = moved > 2.5
        factors = choose(b, is_above, product(b, factors, exact(b, less)), factors)
        moved = b.where(is_above, less, moved)
    square = two_product(b, x, x)
    head, tail = fast_two_sum(b, x, square.head)
    both = HeadAndTail(head, tail + square.tail)
    factors = choose(b, is_small, choose(b, is_tiny, both, exact(b, x)), factors)
    factors = choose(b, is_large, exact(b, x), factors)
    logarithm = log_pair(b, factors.head, factors.tail)

    # lgamma(2 + u)
    u = b.where(is_tiny, x, b.where(is_small, x - 1.0, moved - 2.0))
    near = product(b, constant(b, x, 1 - EULER), exact(b, u))
    square = HeadAndTail(*two_product(b, u, u))
    near = total(b, near, product(b, constant(b, x, LGAMMA_CURVE), square))
    near = total(b, near, exact(b, square.head * u * polynomial(b, u, LGAMMA)))
    near = total(b, near, choose(b, is_small, _negated(logarithm), logarithm))

    inverse = 1.0 / b.where(is_large, x, _STIRLING_FROM)
    rest = inverse * polynomial(b, inverse * inverse, STIRLING)
    less = total(b, logarithm, exact(b, -one))
    far = product(b, exact(b, x - 0.5), less)
    shift = constant(b, x, HALF_LOG_TWO_PI - Fraction(1, 2))
    far = total(b, far, HeadAndTail(shift.head, shift.tail + rest))
    # Larger results overflow; for arguments this large, lgamma(x) is about x log x - x.
    too_large = x > float(np.finfo(x.dtype).max) / (fmt.max_exponent * 0.7)
    found = choose(b, is_large, far, near)
    simple = x * (logarithm.head - 1.0)
    return choose(b, too_large, exact(b, simple), found)


def _alternating(b: Builder, z: HeadAndTail, first: int) -> HeadAndTail:
    """The sum of `(-z)^j / (first + 2 j)!`. With r the square root of `z`, it is cos r for `first`
    = 0, and sin r / r for `first` = 1."""
    every = [Fraction((-1) ** j, math.factorial(first + 2 * j)) for j in range(11)]
    # Half of the digits are enough for what is left after the first three terms.
    head = b.matched(z.head, float(every[-1]))[1]
    for x in every[-2:2:-1]:
        head = b.mul_add(head, z.head, float(x))
    found = exact(b, head)
    for x in every[2::-1]:
        found = total(b, constant(b, z.head, x), product(b, z, found))
    return found


def _half_turns(b: Builder, x: Value) -> tuple[HeadAndTail, HeadAndTail]:
    """sin(pi x) and cos(pi x), computed from the distance of x to the nearest half of a whole
    number."""
    twice = x + x
    nearest = b.round_even(twice)
    angle = product(b, exact(b, (twice - nearest) * 0.5), constant(b, x, PI))
    square = product(b, angle, angle)
    sine = product(b, angle, _alternating(b, square, 1))
    cosine = _alternating(b, square, 0)
    # The angle is the rest plus `nearest` quarters of a turn.
    half = nearest * 0.5
    whole = b.floor(half)
    is_odd = half.ne(whole)
    is_past = (whole * 0.5).ne(b.floor(whole * 0.5))
    first = choose(b, is_odd, cosine, sine)
    second = choose(b, is_odd, _negated(sine), cosine)
    return (
        choose(b, is_past, _negated(first), first),
        choose(b, is_past, _negated(second), second),
    )


def lgamma(b: Builder, x: Value) -> Value:
    """log |gamma(x)|.

    In double precision, the error near the zeros at negative x is small relative to one (2^-54),
    but not relative to the result.
    """
    if x.dtype == F32:
        return b.cast(lgamma(b, b.cast(x, F64)), F32)
    fmt = format_of(x)
    size = abs(x)
    found = _positive(b, size)
    value = b.variable(x.dtype, found.head + found.tail, of_lanes=bool(x.lanes))

    def reflect():
        # gamma(x) gamma(-x) = -pi / (x sin(pi x))
        sine, _ = _half_turns(b, size)
        is_negative = sine.head < 0.0
        sine = choose(b, is_negative, _negated(sine), sine)
        divisor = product(b, sine, exact(b, size))
        logarithm = total(b, log_pair(b, divisor.head, divisor.tail), found)
        head, tail = total(b, constant(b, x, LN_PI), _negated(logarithm))
        is_pole = sine.head.eq(0.0) | (size > 2.0**fmt.fraction)
        # Nearer to zero, lgamma is -log |x| on both sides.
        mask = (x < 0.0) & (size > 2.0 ** -(fmt.digits + 2))
        value.set_where(mask, b.where(is_pole, np.inf, head + tail))

    b.if_(b.any(x < 0.0), reflect)
    is_edge = size.eq(0.0) | size.eq(np.inf)
    return b.where(is_edge, b.constant(np.inf, x.dtype), value.get())


def digamma(b: Builder, x: Value) -> Value:
    """The derivative of lgamma.

    In double precision, the error near the zeros is small relative to one (2^-60), but not relative
    to the result.
    """
    if x.dtype == F32:
        return b.cast(digamma(b, b.cast(x, F64)), F32)
    fmt = format_of(x)
    size = abs(x)
    # The sum of 1 / (size + i) below Stirling's series, as one fraction.
    moved = exact(b, size)
    above, below = exact(b, b.matched(x, 0.0)[1]), exact(b, b.matched(x, 1.0)[1])
    for _ in range(int(_STIRLING_FROM)):
        is_below = moved.head < _STIRLING_FROM
        raised = total(b, product(b, above, moved), below)
        above = choose(b, is_below, raised, above)
        below = choose(b, is_below, product(b, below, moved), below)
        head, tail = two_sum(b, moved.head, 1.0)
        moved = choose(b, is_below, fast_two_sum(b, head, tail + moved.tail), moved)
    shifted = quotient(b, above, below)
    one = exact(b, b.matched(x, 1.0)[1])
    inverse = quotient(b, one, moved)
    half = HeadAndTail(inverse.head * 0.5, inverse.tail * 0.5)
    z = inverse.head * inverse.head
    series = exact(b, z * polynomial(b, z, DIGAMMA))
    found = total(b, log_pair(b, moved.head, moved.tail), _negated(total(b, half, series)))
    found = total(b, found, _negated(shifted))
    value = b.variable(x.dtype, found.head + found.tail, of_lanes=bool(x.lanes))

    def reflect():
        # digamma(-x) = digamma(x) + 1 / x + pi cot(pi x)
        sine, cosine = _half_turns(b, size)
        cotangent = product(b, constant(b, x, PI), quotient(b, cosine, sine))
        more = total(b, cotangent, quotient(b, one, exact(b, size)))
        head, tail = total(b, found, more)
        nan = b.constant(np.nan, x.dtype)
        value.set_where(x < 0.0, b.where(sine.head.eq(0.0), nan, head + tail))

    b.if_(b.any(x < 0.0), reflect)
    # Where the fraction could overflow, digamma is -1 / x; at zero JAX returns NaN.
    is_tiny = size < 2.0 ** -(fmt.digits + 2)
    result = b.where(is_tiny, -1.0 / x, value.get())
    result = b.where(x.eq(0.0), b.constant(np.nan, x.dtype), result)
    return b.where(x.eq(np.inf), x, result)


# The highest supported order of polygamma; higher ones lose digits.
HIGHEST_ORDER = 4
_SUMMED_BELOW = 20.0
# The Bernoulli numbers B_2, B_4, ...
_BERNOULLI = tuple(map(
    Fraction,
    (1, -1, 1, -1, 5, -691, 7, -3617, 43867, -174611, 854513),
    (6, 30, 42, 30, 66, 2730, 6, 510, 798, 330, 138),
))  # fmt: skip


def polygamma(b: Builder, order: Value, x: Value) -> Value:
    """The derivative of digamma of a constant order, a whole number from 1 to `HIGHEST_ORDER`.

    For order `n` it is `(-1)^(n + 1) n! sum_i((x + i)^-(n + 1))`; the tail of the sum is computed
    by the Euler-Maclaurin formula. In double precision, the error of orders from 2 on is at most
    four units in the last place, and the error of even orders near their zeros is small relative to
    one (2^-48), but not relative to the result. JAX's own result is wrong for x below -8, and NaN
    at infinity.
    """
    if x.dtype == F32:
        return b.cast(polygamma(b, b.cast(order, F64), b.cast(x, F64)), F32)
    n, one = int(order.constant), b.matched(x, 1.0)[1]
    at = b.where(x < 0.0, 1.0 - x, x)
    # A sum of more terms of similar size would accumulate too much error.
    is_far = at >= _SUMMED_BELOW
    far = b.where(is_far, at, at + (10.0 + n))
    inverse = 1.0 / far
    z = inverse * inverse
    series = b.matched(x, 0.0)[1]
    for j in range(len(_BERNOULLI), 0, -1):
        term = _BERNOULLI[j - 1] * math.factorial(2 * j + n - 1) / math.factorial(2 * j)
        series = (series + float(term / math.factorial(n))) * z
    found = exact(b, (1.0 / n + (0.5 * inverse + series)) / integer_pow(b, far, n))
    for i in range(9 + n, -1, -1):
        term = b.where(is_far, 0.0, integer_pow(b, at + float(i), -n - 1))
        head, tail = two_sum(b, found.head, term)
        found = HeadAndTail(head, found.tail + tail)
    summed = (found.head + found.tail) * float(math.factorial(n))
    value = b.variable(x.dtype, summed if n % 2 else -summed, of_lanes=bool(x.lanes))

    def reflect():
        # The derivatives of digamma(1 - x) - digamma(x) = pi c, where c = cot(pi x).
        sine, cosine = _half_turns(b, abs(x))
        c = _negated(quotient(b, cosine, sine))
        weights = [0, -1]
        for _ in range(n):
            slope = [i * w for i, w in enumerate(weights)][1:]
            weights = [-x - y for x, y in zip([*slope, 0, 0], [0, 0, *slope], strict=True)]
        found = exact(b, one * float(weights[-1]))
        for w in weights[-2::-1]:
            found = total(b, product(b, found, c), exact(b, one * float(w)))
        found = product(b, constant(b, x, PI ** (n + 1)), found)
        head, tail = total(b, found, exact(b, -summed))
        is_pole = sine.head.eq(0.0) | x.eq(-np.inf)
        value.set_where(x < 0.0, b.where(is_pole, np.inf if n % 2 else np.nan, head + tail))

    b.if_(b.any(x < 0.0), reflect)
    near = float((-1) ** (n + 1) * math.factorial(n)) / integer_pow(b, x, n + 1)
    result = b.where(abs(x) < 2.0**-30, near, value.get())
    return result if n % 2 else b.where(x.eq(0.0), np.nan, result)
