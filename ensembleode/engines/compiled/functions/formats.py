"""What the functions have to know of single and double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from ..builder import F32, F64, I32, I64, Value


@dataclass(frozen=True)
class Format:
    """A binary format of floating point.

    `digits` counts the bits of a significand, the implied one included; `max_exponent` is that of
    the largest numbers, and the bias too.
    """

    dtype: np.dtype
    integer: np.dtype
    digits: int
    max_exponent: int
    # Added to a small whole number, these leave it, or it and the bias once or twice, in the lowest
    # bits.
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
        """How many bits of a significand are stored."""
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
        """The bits of a number, as an integer."""
        return int(np.array(x, self.dtype).view(self.integer))

    def parts(self, x: Fraction, n: int, digits: int | None = None) -> list[float]:
        """A number as a sum of `n` of this format, or of at most so many digits, largest first."""
        found = []
        for _ in range(n):
            part = _rounded(x, digits or self.digits)
            found.append(float(part))
            x = x - part
        return found


def _rounded(x: Fraction, digits: int) -> Fraction:
    """A fraction rounded to so many binary digits."""
    if x == 0:
        return x
    # (The doubles nearest to a number have its exponent, or the next.)
    unit = Fraction(2) ** (math.frexp(float(x))[1] - digits)
    return round(x / unit) * unit


FORMATS = {F64: Format(F64, I64, 53, 1023), F32: Format(F32, I32, 24, 127)}


def format_of(x: Value) -> Format:
    return FORMATS[x.dtype]
