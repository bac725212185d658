"""Elementary functions in IR, inlined where they are used.

`FUNCTIONS` has them by the names of JAX's primitives, for float32 and float64: within two units in
the last place everywhere, or what the function says of itself. They call nothing of a library of
C, so that they run on a GPU too, and have the same bits in vectors of any width.
"""

from __future__ import annotations

from collections.abc import Callable

from ..builder import Value
from .error_functions import erf, erf_inv, erfc
from .exponential import exp, exp2, expm1, logistic
from .gamma import digamma, HIGHEST_ORDER as HIGHEST_ORDER, lgamma, polygamma
from .hyperbolic import acosh, asinh, atanh, cosh, sinh, tanh
from .inverse_trigonometric import acos, asin, atan, atan2
from .logarithms import log, log1p, log2, log10
from .powers import cbrt, integer_pow as integer_pow, pow, rsqrt, sqrt
from .trigonometric import cos, sin, tan


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "acos": acos,
    "acosh": acosh,
    "asin": asin,
    "asinh": asinh,
    "atan": atan,
    "atan2": atan2,
    "atanh": atanh,
    "cbrt": cbrt,
    "cos": cos,
    "cosh": cosh,
    "digamma": digamma,
    "erf": erf,
    "erf_inv": erf_inv,
    "erfc": erfc,
    "exp": exp,
    "exp2": exp2,
    "expm1": expm1,
    "lgamma": lgamma,
    "log": log,
    "log10": log10,
    "log1p": log1p,
    "log2": log2,
    "logistic": logistic,
    "polygamma": polygamma,
    "pow": pow,
    "rsqrt": rsqrt,
    "sin": sin,
    "sinh": sinh,
    "sqrt": sqrt,
    "tan": tan,
    "tanh": tanh,
}
