"""Numbers with twice the digits of a format, as pairs: sums of a head and a tail.

The sums and products are exact, by Knuth ("The Art of Computer Programming", volume 2, 4.2.2) and
Dekker ("A floating-point technique for extending the available precision", 1971).
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from ..builder import Builder, Value
from .formats import format_of


class HeadAndTail(NamedTuple):
    """A number, the sum of a head and a tail; the tail is at most about one unit in the head's last
    place."""

    head: Value
    tail: Value


def two_sum(b: Builder, x: Value | float, y: Value | float) -> HeadAndTail:
    """`x + y`, exactly."""
    x, y = b.matched(x, y)
    with b.unfused():
        total = x + y
        of_y = total - x
        return HeadAndTail(total, (x - (total - of_y)) + (y - of_y))


def fast_two_sum(b: Builder, x: Value | float, y: Value) -> HeadAndTail:
    """`x + y`, exactly, if `x` is zero or |x| >= |y|."""
    x, y = b.matched(x, y)
    with b.unfused():
        total = x + y
        return HeadAndTail(total, y - (total - x))


def two_product(b: Builder, x: Value, y: Value | float) -> HeadAndTail:
    """`x y`, exactly except for underflow."""
    x, y = b.matched(x, y)
    # `mul` would allow a later sum to be fused with this product.
    head = b.binary("fmul", x, y)
    if b.module.has_fma:
        return HeadAndTail(head, b.fma(x, y, -head))
    with b.unfused():
        (x0, x1), (y0, y1) = _halves(b, x), _halves(b, y)
        return HeadAndTail(head, ((x0 * y0 - head) + x0 * y1 + x1 * y0) + x1 * y1)


def _halves(b: Builder, x: Value) -> tuple[Value, Value]:
    """x as a sum of two numbers with half the digits each, so that products of such halves are
    exact."""
    fmt = format_of(x)
    mask = -1 << (fmt.digits + 1) // 2
    head = b.bitcast(b.bitcast(x, fmt.integer) & mask, x.dtype)
    return head, x - head


def remainder(b: Builder, n: Value, q: Value, d: Value) -> Value:
    """`n - q d`, where `q` is approximately `n / d`."""
    if b.module.has_fma:
        return b.fma(-q, d, n)
    head, tail = two_product(b, q, d)
    return (n - head) - tail


def quotient(
    b: Builder, n: HeadAndTail, d: HeadAndTail, inverse: Value | None = None
) -> HeadAndTail:
    """`n / d`; `inverse` is approximately one over the head of `d`."""
    if inverse is None:
        inverse = 1.0 / d.head
    q = b.binary("fmul", n.head, inverse)
    rest = remainder(b, n.head, q, d.head) + (n.tail - q * d.tail)
    return fast_two_sum(b, q, rest * inverse)


def exact(b: Builder, x: Value) -> HeadAndTail:
    """A number as a pair."""
    return HeadAndTail(x, b.constant(0.0, x.dtype, of_lanes=bool(x.lanes)))


def constant(b: Builder, like: Value, x: Fraction) -> HeadAndTail:
    """A number with more digits as a pair in the format of `like`."""
    return HeadAndTail(*b.matched(like, *format_of(like).parts(x, 2))[1:])


def choose(b: Builder, mask: Value, x: HeadAndTail, y: HeadAndTail) -> HeadAndTail:
    """The pair `x` in the lanes of the mask, and `y` in the others."""
    return HeadAndTail(b.where(mask, x.head, y.head), b.where(mask, x.tail, y.tail))


def product(b: Builder, x: HeadAndTail, y: HeadAndTail) -> HeadAndTail:
    head, tail = two_product(b, x.head, y.head)
    tail = tail + (x.head * y.tail + x.tail * y.head)
    return fast_two_sum(b, head, tail)


def total(b: Builder, x: HeadAndTail, y: HeadAndTail) -> HeadAndTail:
    """The sum; its error is small relative to the larger summand."""
    head, tail = two_sum(b, x.head, y.head)
    return fast_two_sum(b, head, tail + (x.tail + y.tail))
