"""Elementary functions in LLVM IR, inlined where they are used.

`FUNCTIONS` maps the names of JAX's primitives to these functions, for float32 and float64. Their
error is at most two units in the last place, unless a function's docstring says otherwise. They
call no function of the C library, so they also run on a GPU, and their results have the same bits
at any width of vectors.
"""

from __future__ import annotations

from collections.abc import Callable

from ..builder import Value
from .brownian_tree import brownian_piece as brownian_piece
from .error_functions import erf, erf_inv, erfc
from .exponential import exp, exp2, expm1, logistic
from .gamma import digamma, HIGHEST_ORDER as HIGHEST_ORDER, lgamma, polygamma
from .hyperbolic import acosh, asinh, atanh, cosh, sinh, tanh
from .inverse_trigonometric import acos, asin, atan, atan2
from .logarithms import log, log1p, log2, log10
from .powers import cbrt, integer_pow as integer_pow, pow, rsqrt, sqrt
from .random_numbers import (
    philox_normal as philox_normal,
    philox_normal_of_step as philox_normal_of_step,
    philox_uniform as philox_uniform,
)
from .trigonometric import cos, sin, tan


_EVERY = (
    *(acos, asin, atan, atan2, cos, sin, tan),
    *(acosh, asinh, atanh, cosh, sinh, tanh),
    *(cbrt, exp, exp2, expm1, log, log10, log1p, log2, logistic, pow, rsqrt, sqrt),
    *(digamma, erf, erf_inv, erfc, lgamma, polygamma),
)
FUNCTIONS: dict[str, Callable[..., Value]] = {fn.__name__: fn for fn in _EVERY}
