"""Sine, cosine and tangent: polynomials of the angle reduced by a multiple of pi / 2."""

from __future__ import annotations

from ..builder import Builder, Value
from .coefficients import COS, SIN
from .formats import format_of
from .pairs import choose, fast_two_sum, HeadAndTail, quotient
from .polynomials import polynomial
from .reduction import reduce


def _sine(b: Builder, rest: HeadAndTail) -> tuple[Value, Value]:
    """The sine of an angle up to pi / 4 as two summands, the smaller one last."""
    x, tail = rest
    z = x * x
    # sin(x + tail) = sin x + tail cos x
    return x, b.mul_add(x * z, polynomial(b, z, SIN), b.mul_add(tail * z, -0.5, tail))


def _cosine(b: Builder, rest: HeadAndTail) -> HeadAndTail:
    """The cosine of an angle up to pi / 4 as two summands, the smaller one last."""
    x, tail = rest
    z = x * x
    half = b.binary("fmul", *b.matched(z, 0.5))
    head, lost = fast_two_sum(b, 1.0, -half)
    return HeadAndTail(head, b.mul_add(z * z, polynomial(b, z, COS), b.mul_add(x, -tail, lost)))


def _with_sign(b: Builder, x: Value, quadrant: Value) -> Value:
    """x, negated where the second bit of the quadrant is set."""
    fmt = format_of(x)
    sign = (quadrant & 2) << (8 * x.dtype.itemsize - 2)
    return b.bitcast(b.bitcast(x, fmt.integer) ^ sign, x.dtype)


def _rotated_sine(b: Builder, rest: HeadAndTail, quadrant: Value) -> Value:
    """The sine of rest + quadrant pi / 2."""
    sine, cosine = _sine(b, rest), _cosine(b, rest)
    is_odd = (quadrant & 1).ne(0)
    found = choose(b, is_odd, cosine, HeadAndTail(*sine))
    return _with_sign(b, found.head + found.tail, quadrant)


def sin(b: Builder, x: Value) -> Value:
    rest, quadrant = reduce(b, x)
    return b.where(x.eq(0.0), x, _rotated_sine(b, rest, quadrant))


def cos(b: Builder, x: Value) -> Value:
    rest, quadrant = reduce(b, x)
    return _rotated_sine(b, rest, quadrant + 1)


def tan(b: Builder, x: Value) -> Value:
    rest, quadrant = reduce(b, x)
    sine = fast_two_sum(b, *_sine(b, rest))
    cosine = fast_two_sum(b, *_cosine(b, rest))
    is_odd = (quadrant & 1).ne(0)
    ratio = quotient(b, choose(b, is_odd, cosine, sine), choose(b, is_odd, sine, cosine)).head
    # -1 / tan
    return b.where(x.eq(0.0), x, _with_sign(b, ratio, quadrant << 1))
