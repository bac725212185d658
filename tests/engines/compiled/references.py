"""Points at which functions are tested, and the exact values there.

NumPy's extended precision is the reference where the machine has it: its functions are accurate to
some units of 64 digits, which is 2^-8 units of double precision. Elsewhere, and for functions that
NumPy doesn't have, mpmath is the reference.
"""

import math
from collections.abc import Callable

import mpmath
import numpy as np
from mpmath import mp


HAS_EXTENDED = np.finfo(np.longdouble).nmant >= 63
PRECISION = 160  # bits of mpmath's


def _even(low: float, high: float) -> Callable:
    return lambda rng, n: rng.uniform(low, high, n)


def _powers(low: float, high: float, signs=(-1.0, 1.0)) -> Callable:
    """Even in the logarithm to base two."""
    return lambda rng, n: 2.0 ** rng.uniform(low, high, n) * rng.choice(signs, n)


def _about(centre: float, low: float, high: float, signs=(-1.0, 1.0)) -> Callable:
    return lambda rng, n: centre + _powers(low, high, signs)(rng, n)


_POSITIVE, _NEGATIVE = (1.0,), (-1.0,)
_ANGLES = (_even(-10, 10), _even(-1e5, 1e5), _powers(-30, 1023), _powers(-10, 60))
_SINES = (_even(-1, 1), _powers(-300, 0), _about(1.0, -60, -1, _NEGATIVE), _even(-0.6, 0.6))
_ALL_POSITIVE = (_powers(-1022, 1023, _POSITIVE), _even(0.4, 2.1), _about(1.0, -50, -1))

# What each function's points are drawn from, in equal parts.
POINTS: dict[str, tuple] = {
    "acos": _SINES,
    "acosh": (_about(1.0, -52, 5, _POSITIVE), _powers(0, 1023, _POSITIVE), _even(1, 4)),
    "asin": _SINES,
    "asinh": (_even(-3, 3), _powers(-300, 1023), _powers(-30, 40)),
    "atan": (_even(-3, 3), _powers(-300, 1023), _powers(-8, 8)),
    "atanh": _SINES,
    "cbrt": (_powers(-1022, 1023), _even(-9, 9)),
    "cos": _ANGLES,
    "cosh": (_even(-4, 4), _even(-710, 710), _even(-89, 89)),
    "digamma": (_even(0, 1.4), _even(1.5, 20), _powers(-300, 1000, _POSITIVE), _powers(-60, 0)),
    "erf": (_even(-1, 1), _even(-6, 6), _powers(-300, 0), _even(0.4, 0.8)),
    "erf_inv": (_even(-1, 1), _about(1.0, -53, -1, _NEGATIVE), _powers(-300, 0), _even(0.4, 0.6)),
    "erfc": (_even(-1, 1), _even(-6, 26.4), _even(0.4, 3), _even(-6, 9.1), _powers(-60, 0)),
    "exp": (_even(-708, 709.7), _even(-87, 88.7), _even(-1, 1), _powers(-300, 0)),
    "exp2": (_even(-1022, 1024), _even(-126, 128), _even(-1, 1), _powers(-300, 0)),
    "expm1": (_even(-40, 709), _even(-18, 88), _even(-2, 2), _powers(-300, 0)),
    "lgamma": (
        _even(0, 10),
        _powers(-300, 1000, _POSITIVE),
        _even(0.4, 3.2),
        _about(1.0, -50, -2),
        _about(2.0, -50, -2),
        _powers(-60, -2),
    ),
    "log": _ALL_POSITIVE,
    "log10": _ALL_POSITIVE,
    "log1p": (_powers(-300, 1023, _POSITIVE), _even(-1, 2), _even(-0.3, 0.5), _powers(-60, -1)),
    "log2": _ALL_POSITIVE,
    "logistic": (_even(-708, 40), _even(-87, 20), _even(-4, 4), _powers(-300, 0)),
    "rsqrt": _ALL_POSITIVE,
    "sin": _ANGLES,
    "sinh": (_even(-4, 4), _even(-710, 710), _even(-89, 89), _powers(-300, 0)),
    "sqrt": _ALL_POSITIVE,
    "tan": _ANGLES,
    "tanh": (_even(-2, 2), _even(-20, 20), _powers(-300, 0)),
}
OF_TWO = {
    "atan2": ((_even(-2, 2), _even(-2, 2)), (_powers(-100, 100), _powers(-100, 100)),
              (_powers(-1000, 1000), _powers(-1000, 1000))),
    "pow": ((_powers(-60, 60, _POSITIVE), _even(-15, 15)), (_even(0.5, 2), _even(-1020, 1020)),
            (_about(1.0, -40, -2), _powers(0, 40)), (_even(0.5, 2), _even(-127, 127)),
            (_powers(-2, 2), lambda rng, n: rng.integers(-50, 50, n).astype(float))),
}  # fmt: skip
NAMES = sorted([*POINTS, *OF_TWO])


def points(name: str, dtype, n: int, seed: int = 0) -> list[np.ndarray]:
    """Arguments about `n` times, normal numbers at which the function is finite and not zero."""
    rng = np.random.default_rng(seed)
    info = np.finfo(dtype)
    if name in OF_TWO:
        rows = [
            [np.resize(draw(rng, n // len(OF_TWO[name])), n // len(OF_TWO[name])) for draw in two]
            for two in OF_TWO[name]
        ]
        columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
    else:
        columns = [np.concatenate([d(rng, n // len(POINTS[name])) for d in POINTS[name]])]
    with np.errstate(over="ignore", under="ignore"):
        columns = [x.astype(dtype) for x in columns]
    good = np.ones(len(columns[0]), bool)
    for x in columns:
        good &= np.isfinite(x) & (abs(x) >= info.tiny)
    columns = [x[good] for x in columns]
    x = columns[0]
    inside = np.ones(len(x), bool)
    if name in ("asin", "acos", "atanh", "erf_inv"):
        inside = abs(x) < 1
    if name == "log1p":
        inside = x > -1
    if name == "acosh":
        inside = x > 1
    return [x[inside] for x in columns]


def _extended(name: str) -> Callable | None:
    names = {
        "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh",
        "atan": "arctan", "atanh": "arctanh", "atan2": "arctan2", "pow": "power",
    }  # fmt: skip
    if name == "logistic":
        return lambda x: 1 / (1 + np.exp(-x))
    if name == "rsqrt":
        return lambda x: 1 / np.sqrt(x)
    return getattr(np, names.get(name, name), None)


EXACT: dict[str, Callable] = {
    "atan2": mpmath.atan2,
    "cbrt": lambda x: mp.sign(x) * mp.cbrt(abs(x)),
    "erf_inv": mpmath.erfinv,
    "exp2": lambda x: mp.mpf(2) ** x,
    "lgamma": lambda x: mp.log(abs(mp.gamma(x))) if x < 0 else mp.loggamma(x),
    "log2": lambda x: mp.log(x, 2),
    "logistic": lambda x: 1 / (1 + mp.exp(-x)),
    "polygamma": lambda n, x: mp.psi(int(n), x),
    "pow": mpmath.power,
    "rsqrt": lambda x: 1 / mp.sqrt(x),
}


def exact(name: str, args, found: float):
    """By mpmath."""
    function = EXACT.get(name) or getattr(mpmath, name)
    args = [mp.mpf(float(x)) for x in args]
    if name == "erf_inv" and math.isfinite(found) and abs(found) > 0:
        # (A step of Newton's method from what was found is enough, and much faster.)
        y = mp.mpf(found)
        if abs(y) < 1:
            error = mp.erf(y) - args[0]
        else:
            error = mp.sign(y) * (1 - abs(args[0]) - mp.erfc(abs(y)))
        return y - error * mp.exp(y * y) * mp.sqrt(mp.pi) / 2
    return function(*args)


def _exact_error(name: str, args, found, dtype) -> float:
    info = np.finfo(dtype)
    with mp.workprec(PRECISION):
        true = exact(name, args, float(found))
        if abs(true) < info.tiny:  # (and what is subnormal may be flushed to zero)
            return 0.0 if abs(found) <= info.tiny else math.inf
        if abs(true) > info.max:
            return 0.0 if abs(found) >= info.max else math.inf
        if not np.isfinite(found):
            return math.inf
        unit = mp.ldexp(1, mp.frexp(true)[1] - info.nmant - 1)
        return float(abs(mp.mpf(float(found)) - true) / unit)


def errors(name: str, args, found: np.ndarray, *, bound: float = 1.9) -> np.ndarray:
    """In units in the last place of the true results.

    What extended precision says is above the bound is looked at again by mpmath.
    """
    dtype, function = found.dtype, _extended(name)
    info = np.finfo(dtype)
    if not HAS_EXTENDED or function is None:
        pairs = zip(zip(*args, strict=True), found, strict=True)
        return np.array([_exact_error(name, x, y, dtype) for x, y in pairs])
    with np.errstate(all="ignore"):
        true = function(*(x.astype(np.longdouble) for x in args))
        unit = np.ldexp(np.longdouble(1), np.frexp(true)[1] - info.nmant - 1)
        result = (abs(found.astype(np.longdouble) - true) / unit).astype(float)
    for i in np.flatnonzero(~(result < bound) | (abs(true) < info.tiny)):
        result[i] = _exact_error(name, [x[i] for x in args], found[i], dtype)
    return result
