"""Polynomials of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..builder import Builder, Value


def polynomial(b: Builder, x: Value, coefficients: Mapping[np.dtype, Sequence[float]]) -> Value:
    """The polynomial in `x` with the coefficients for its dtype, constant term first.

    Neighbouring terms are joined to polynomials in `x`, these to polynomials in `x^2`, and so on
    (Estrin's scheme), so that few operations wait for one another.
    """
    row: list = list(coefficients[x.dtype])
    power = x
    while len(row) > 1:
        pairs = [b.mul_add(power, row[i + 1], row[i]) for i in range(0, len(row) - 1, 2)]
        row = [*pairs, *row[2 * len(pairs) :]]
        if len(row) > 1:
            power = power * power
    return row[0]


def horner(b: Builder, x: Value, coefficients: Mapping[np.dtype, Sequence[float]]) -> Value:
    """`polynomial` by Horner's scheme, with the fewest operations and the smaller rounding errors,
    where there is enough else to do while each waits for the one before."""
    *rest, last = coefficients[x.dtype]
    total = b.constant(last, x.dtype)
    for c in reversed(rest):
        total = b.mul_add(total, x, c)
    return total
