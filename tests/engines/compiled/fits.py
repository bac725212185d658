"""Computes the coefficients of `engines.compiled.functions.coefficients`.

Each polynomial interpolates its function at the Chebyshev points of an interval, so its largest
error is within a few per cent of the least possible one. It is computed with 60 digits.

Run as a program, this writes the module of coefficients.
"""

import pathlib
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import mpmath
from mpmath import mp


DIGITS = 60


class Fit(NamedTuple):
    """`function` on an interval, by polynomials of so many terms in double precision, and in single
    where that is used, or the other way round; the interval may depend on the precision."""

    function: Callable
    doubles: tuple[float, float, int] | None
    singles: tuple[float, float, int] | None


def _erfcx(x):
    return mp.exp(x * x) * mp.erfc(x)


def _inverse_erf(w, near: bool):
    """The inverse error function of x, over x or by itself, where w = -log(1 - x^2)."""
    # (erfc near one and erf near zero say the same without cancellation.)
    x = mp.sqrt(-mp.expm1(-w))
    complement = mp.exp(-w) / (1 + x)
    y = mp.sqrt(w) if w > 4 else x
    if w > 0.5:
        y = mp.findroot(lambda y: mp.log(mp.erfc(y)) - mp.log(complement), y)
    else:
        y = mp.findroot(lambda y: mp.erf(y) - x, x * 0.9)
    return y / x if near else y


SHIFT = 4  # of the variable (x - SHIFT) / (x + SHIFT) of `ERFCX`


def _erfcx_value():
    return 2 * SHIFT * _erfcx(SHIFT)


def _erfcx_slope():
    """The derivative with respect to t at zero."""
    slope = 2 * SHIFT * _erfcx(SHIFT) - 2 / mp.sqrt(mp.pi)
    return 2 * SHIFT * (_erfcx(SHIFT) + 2 * SHIFT * slope)


FITS = {
    # exp(x) = 1 + x + x^2 p(x)
    "EXP": Fit(
        lambda x: (mp.expm1(x) - x) / x**2,
        (-0.34664, 0.34664, 10),
        (-0.34664, 0.34664, 5),
    ),
    # 2^x = 1 + x p(x)
    "EXP2": Fit(
        lambda x: mp.expm1(x * mp.log(2)) / x,
        (-0.50001, 0.50001, 11),
        (-0.50001, 0.50001, 7),
    ),
    # sinh(x) = x + x^3 p(x^2), cosh(x) = 1 + x^2 p(x^2)
    "SINH": Fit(
        lambda z: (mp.sinh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
        (0, 0.12016, 5),
        (0, 0.12016, 3),
    ),
    "COSH": Fit(
        lambda z: (mp.cosh(mp.sqrt(z)) - 1) / z,
        (0, 0.12016, 6),
        (0, 0.12016, 3),
    ),
    # tanh(x) = x + x^3 p(x^2), near zero
    "TANH": Fit(
        lambda z: (mp.tanh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
        (0, 0.090001, 8),
        None,
    ),
    # 2 atanh(s) = 2 s + s^3 p(s^2), with 1 + f = (1 + s) / (1 - s) between sqrt(1/2) and sqrt(2)
    "LOG": Fit(
        lambda z: 2 * (mp.atanh(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
        (0, 0.029438, 7),
        (0, 0.029438, 4),
    ),
    # log(1 + f) = f - f^2 / 2 + f^3 p(f), between sqrt(1/2) and sqrt(2)
    "LOG_WHOLE": Fit(
        lambda f: (mp.log1p(f) - f + f**2 / 2) / f**3,
        None,
        (-0.2929, 0.41422, 8),
    ),
    # 2 atanh(s) = 2 s + (2/3) s^3 + s^5 p(s^2): for twice the digits
    "LOG_TAIL": Fit(
        lambda z: 2 * (mp.atanh(mp.sqrt(z)) / mp.sqrt(z) - 1 - z / 3) / z**2,
        (0, 0.029438, 10),
        (0, 0.029438, 5),
    ),
    # sin(x) = x + x^3 p(x^2), cos(x) = 1 - x^2 / 2 + x^4 p(x^2)
    "SIN": Fit(
        lambda z: (mp.sin(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
        (0, 0.61686, 6),
        (0, 0.61686, 3),
    ),
    "COS": Fit(
        lambda z: (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2,
        (0, 0.61686, 6),
        (0, 0.61686, 3),
    ),
    # asin(x) = x + x^3 p(x^2)
    "ASIN": Fit(
        lambda z: (mp.asin(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
        (0, 0.25, 13),
        (0, 0.25, 6),
    ),
    # atan(x) = x + x^3 p(x^2), up to tan(pi / 8)
    "ATAN": Fit(
        lambda z: (mp.atan(mp.sqrt(z)) / mp.sqrt(z) - 1) / z,
        (0, 0.17158, 11),
        (0, 0.17158, 6),
    ),
    # erf(x) = x (2 / sqrt(pi) + x^2 p(x^2)), up to where it is one half
    "ERF": Fit(
        lambda z: (mp.erf(mp.sqrt(z)) / mp.sqrt(z) - 2 / mp.sqrt(mp.pi)) / z,
        (0, 0.2275, 8),
        (0, 0.2275, 5),
    ),
    # exp(x^2) erfc(x) = (a + b t + t^2 p(t)) / (x + SHIFT), with t = (x - SHIFT) / (x + SHIFT)
    "ERFCX": Fit(
        lambda t: (
            (
                _erfcx(SHIFT * (1 + t) / (1 - t)) * 2 * SHIFT / (1 - t)
                - _erfcx_value()
                - _erfcx_slope() * t
            )
            / t**2
        ),
        ((0.47 - SHIFT) / (0.47 + SHIFT), (28 - SHIFT) / (28 + SHIFT), 21),
        ((0.47 - SHIFT) / (0.47 + SHIFT), (11 - SHIFT) / (11 + SHIFT), 10),
    ),
    # The first guess of the inverse error function: x p(w), and p(sqrt(w)) beyond w = 5
    "ERF_INV": Fit(lambda w: _inverse_erf(w, near=True), (0, 5.01, 9), (0, 5.01, 6)),
    "ERF_INV_TAIL": Fit(
        lambda s: _inverse_erf(s * s, near=False),
        (5**0.5, 6.1, 10),
        (5**0.5, 4.1, 6),
    ),
    # The first guess of x^(-1/3)
    "RCBRT": Fit(lambda x: x ** (-mp.mpf(1) / 3), (1, 2, 5), (1, 2, 5)),
    # lgamma(2 + x) = x (1 - gamma) + x^2 ((zeta(2) - 1) / 2 + x p(x))
    "LGAMMA": Fit(
        lambda x: ((mp.loggamma(2 + x) / x - 1 + mp.euler) / x - (mp.zeta(2) - 1) / 2) / x,
        (-0.5, 0.5, 18),
        None,
    ),
    # lgamma(x) = (x - 1/2) (log x - 1) + log(2 pi) / 2 - 1/2 + p(1 / x^2) / x
    "STIRLING": Fit(
        lambda z: (
            (
                (mp.loggamma(z**-0.5) - (z**-0.5 - 0.5) * (mp.log(z**-0.5) - 1))
                - mp.log(2 * mp.pi) / 2
                + mp.mpf(1) / 2
            )
            * z**-0.5
        ),
        (1e-12, 1 / 64, 7),
        None,
    ),
    # digamma(x) = log x - 1 / (2 x) - p(1 / x^2) / x^2
    "DIGAMMA": Fit(
        lambda z: (mp.log(z**-0.5) - z**0.5 / 2 - mp.digamma(z**-0.5)) / z,
        (1e-12, 1 / 64, 8),
        None,
    ),
}


def polynomial(function: Callable, low: float, high: float, terms: int) -> list:
    """Through the function at the Chebyshev points of the interval; constant first."""
    with mp.workdps(DIGITS):
        centre, half = (mp.mpf(low) + high) / 2, (mp.mpf(high) - low) / 2
        nodes = [centre + half * mp.cos(mp.pi * (2 * i + 1) / (2 * terms)) for i in range(terms)]
        # Newton's divided differences, and their product form multiplied out.
        with mp.workdps(4 * DIGITS):
            # (A node may be near zero, where the functions cancel.)
            table = [mp.mpf(function(x)) for x in nodes]
        for order in range(1, terms):
            for i in range(terms - 1, order - 1, -1):
                table[i] = (table[i] - table[i - 1]) / (nodes[i] - nodes[i - order])
        coefficients = [table[-1]]
        for i in range(terms - 2, -1, -1):
            shifted = [mp.mpf(0), *coefficients]
            for j, c in enumerate(coefficients):
                shifted[j] -= c * nodes[i]
            shifted[0] += table[i]
            coefficients = shifted
        return coefficients


# tanh x = x p(x^2) / q(x^2) in single precision, up to a number from where on it is one; p and q
# have this degree.
TANH_TOP, TANH_DEGREE = 9.011, 4


def tanh_quotient() -> tuple[list, list]:
    """Through the hyperbolic tangent at the Chebyshev points of the interval; q(0) is one."""
    n = TANH_DEGREE
    with mp.workdps(DIGITS):
        size = 2 * n + 1
        rows, values = mp.matrix(size, size), mp.matrix(size, 1)
        for i in range(size):
            x = mp.mpf(TANH_TOP) * (1 - mp.cos(mp.pi * (2 * i + 1) / (2 * size))) / 2
            values[i] = mp.tanh(x) / x
            for j in range(n + 1):
                rows[i, j] = x ** (2 * j)
            for j in range(1, n + 1):
                rows[i, n + j] = -values[i] * x ** (2 * j)
        found = list(mp.lu_solve(rows, values))
        return found[: n + 1], [mp.mpf(1), *found[n + 1 :]]


CONSTANTS = {
    "LN2": lambda: mp.log(2),
    "LOG2_E": lambda: 1 / mp.log(2),
    "LOG10_E": lambda: 1 / mp.log(10),
    "LOG10_2": lambda: mp.log(2) / mp.log(10),
    "PI": lambda: +mp.pi,
    "TWO_OVER_PI": lambda: 2 / mp.pi,
    "TWO_OVER_SQRT_PI": lambda: 2 / mp.sqrt(mp.pi),
    "ERFCX_VALUE": lambda: _erfcx_value(),
    "ERFCX_SLOPE": lambda: _erfcx_slope(),
    "EULER": lambda: +mp.euler,
    "HALF_LOG_TWO_PI": lambda: mp.log(2 * mp.pi) / 2,
    "LGAMMA_CURVE": lambda: (mp.zeta(2) - 1) / 2,
    "LN_PI": lambda: mp.log(mp.pi),
}


def constant(name: str, bits: int) -> int:
    """One of `CONSTANTS` times 2^bits, rounded."""
    with mp.workprec(bits + 64):
        return int(mp.nint(mp.ldexp(CONSTANTS[name](), bits)))


def bits_of(name: str) -> int:
    """How many bits behind the point the package has of a constant."""
    return 1280 if name == "TWO_OVER_PI" else 256


def _constant_lines(name: str) -> list[str]:
    bits = bits_of(name)
    value = constant(name, bits)
    digits = f"{value:X}"
    if bits == 256:
        return [f'{name} = _fraction("{digits}")']
    rows = [digits[i : i + 80] for i in range(0, len(digits), 80)]
    lines = [f'    "{row}"' for row in rows]
    return [f"{name} = _fraction(", *lines[:-1], f"{lines[-1]},", f"    {bits},", ")"]


def _written(name: str, rows: list[list]) -> str:
    lines = []
    for i, row in enumerate(rows):
        if i:
            lines.append("    ;")
        numbers = " ".join(repr(float(c)) for c in row)
        lines += textwrap.wrap(numbers, 100, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join([f'{name} = _coefficients("""', *lines, '""")'])


CONSTANTS_HEAD = '''"""Numbers in more digits than any format has, as fractions of powers of two.

They are written by `tests/engines/compiled/fits.py`.
"""

from fractions import Fraction


def _fraction(digits: str, bits: int = 256) -> Fraction:
    return Fraction(int(digits, 16), 1 << bits)


'''
HEAD = '''"""Coefficients of polynomials, constant term first, for double and single precision.

Each polynomial, and the one quotient of two, interpolates its function at the Chebyshev points of
an interval.
`tests/engines/compiled/fits.py` computes them with 60 digits, and lists the functions and the
intervals.
"""

import numpy as np

from ..builder import F32, F64


def _coefficients(text: str) -> dict[np.dtype, tuple[float, ...]]:
    """The coefficients for doubles, if any, and after a semicolon those for singles, if any."""
    rows = zip((F64, F32), text.split(";"), strict=False)
    return {dtype: tuple(map(float, row.split())) for dtype, row in rows if row.strip()}


'''


def main():
    parts = []
    for name, fit in FITS.items():
        intervals = (fit.doubles, fit.singles) if fit.singles else (fit.doubles,)
        rows = [polynomial(fit.function, *x) if x else [] for x in intervals]
        parts.append(_written(name, rows))
    above, below = tanh_quotient()
    parts += [_written("TANH_ABOVE", [[], above]), _written("TANH_BELOW", [[], below])]
    parts.append(f"# From here on tanh is one in single precision.\nONE_FROM = {TANH_TOP}")
    here = pathlib.Path(__file__).resolve()
    place = here.parents[3] / "ensembleode/engines/compiled/llvm/functions"
    (place / "coefficients.py").write_text(HEAD + "\n".join(parts) + "\n")
    lines = [line for name in CONSTANTS for line in _constant_lines(name)]
    (place / "constants.py").write_text(CONSTANTS_HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    mpmath.mp.dps = DIGITS
    main()
