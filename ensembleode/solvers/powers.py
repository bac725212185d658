"""Powers, logarithms and an arc tangent in single precision, as accurate as step sizes need.

They are written here because the last bits of a library's functions may differ from program to
program.
"""

import math

import numpy as np

from .arithmetic import Arithmetic, Number


def log2(xp: Arithmetic, x: Number) -> Number:
    """The binary logarithm of a positive float32, to within 1e-3; large for infinity and NaN.

    Source: Goldberg, "Fast approximate logarithms, part III: the formulas" (2015), table 2.
    """
    a, b, c = 0.338953, 2.198599, 1.523692
    bits = xp.bitcast(x, np.int32)
    exponent = (bits & 0x7F800000) >> 23
    upper_half = (bits & 0x00400000) > 0  # a significand of at least 1.5 is halved
    base = xp.where(upper_half, np.int32(0x3F000000), np.int32(0x3F800000))
    significand = xp.bitcast((bits & 0x007FFFFF) | base, np.float32)
    whole = exponent - xp.where(upper_half, np.int32(126), np.int32(127))
    s = significand - 1
    return xp.cast(whole, np.float32) + s * (a * s + b) / (s + c)


def exp2(xp: Arithmetic, x: Number) -> Number:
    """Two to the power of a float32, up to rounding, by a Taylor polynomial about the nearest whole
    number."""
    x = xp.minimum(xp.maximum(x, -126.0), 126.0)
    whole = xp.floor(x + 0.5)
    rest = x - whole
    # In pairs, and pairs of pairs, which don't have to wait for each other.
    pairs = [b * rest + a for a, b in zip(_TAYLOR[::2], _TAYLOR[1::2], strict=True)]
    square = rest * rest
    low, high = pairs[1] * square + pairs[0], pairs[3] * square + pairs[2]
    value = high * (square * square) + low
    # (LLVM makes a conversion to integers lane by lane.)
    last_bits = xp.bitcast(whole + _LARGE, np.int32)
    scale = xp.bitcast((last_bits + 127) << 23, np.float32)
    return value * scale


# One unit in its last place is one, so a whole number that is added to it is in its last bits.
_LARGE = 1.5 * 2.0**23
_TAYLOR = [math.log(2) ** k / math.factorial(k) for k in range(8)]


def arctan(xp: Arithmetic, x: Number) -> Number:
    """The arc tangent of a float32, up to a few roundings.

    Source: Moshier, "Methods and Programs for Mathematical Functions" (1989), the polynomial of
    Cephes' `atanf`.
    """
    size = xp.abs(x)
    is_large, is_medium = size > 2.414213562373095, size > 0.4142135623730950
    # The maximum keeps the value that isn't chosen from being a division by zero.
    large = -1.0 / xp.maximum(size, 1.0)
    medium = (size - 1.0) / (size + 1.0)
    z = xp.where(is_large, large, xp.where(is_medium, medium, size))
    angle = xp.where(is_large, np.float32(math.pi / 2), np.float32(math.pi / 4))
    start = xp.where(is_medium, angle, np.float32(0))
    square = z * z
    value = square * 8.05374449538e-2 - 1.38776856032e-1
    for coefficient in (1.99777106478e-1, -3.33329491539e-1):
        value = value * square + coefficient
    value = start + (value * square * z + z)
    return xp.where(x < 0.0, -value, value)
