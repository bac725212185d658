"""The properties of single and double precision that the functions use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from ..builder import F32, F64, I32, I64, Value


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    `digits` is the number of bits of a significand, including the implied one. `max_exponent` is
    the exponent of the largest numbers, and also the bias.
    """

    dtype: np.dtype
    integer: np.dtype
    digits: int
    max_exponent: int
    # Adding one of these numbers to a small whole number leaves that number, or its sum with once
    # or twice the bias, in the lowest bits of the result.
    magic: float = field(init=False)
    magic_biased: float = field(init=False)
    magic_twice_biased: float = field(init=False)

    def __post_init__(self):
        magic = 1.5 * 2.0 ** (self.digits - 1)
        object.__setattr__(self, "magic", magic)
        object.__setattr__(self, "magic_biased", magic + self.max_exponent)
        object.__setattr__(self, "magic_twice_biased", magic + 2 * self.max_exponent)

    @property
    def fraction(self) -> int:
        """The number of stored bits of a significand."""
        return self.digits - 1

    @property
    def unsigned(self) -> np.dtype:
        return np.dtype(f"u{self.integer}")

    @property
    def fraction_mask(self) -> int:
        return (1 << self.fraction) - 1

    @property
    def least_normal(self) -> float:
        return 2.0 ** (1 - self.max_exponent)

    def bits(self, x: float) -> int:
        """The bits of a number as an integer."""
        return int(np.array(x, self.dtype).view(self.integer))

    def parts(self, x: Fraction, n: int, digits: int | None = None) -> list[float]:
        """A number as a sum of `n` numbers of this format, the largest first, of at most `digits`
        digits each."""
        found = []
        for _ in range(n):
            part = _rounded(x, digits or self.digits)
            found.append(float(part))
            x = x - part
        return found


def _rounded(x: Fraction, digits: int) -> Fraction:
    """A fraction rounded to `digits` binary digits."""
    if x == 0:
        return x
    # The double nearest to a number has the number's exponent, or the next one.
    unit = Fraction(2) ** (math.frexp(float(x))[1] - digits)
    return round(x / unit) * unit


FORMATS = {F64: Format(F64, I64, 53, 1023), F32: Format(F32, I32, 24, 127)}


def format_of(x: Value) -> Format:
    return FORMATS[x.dtype]
