"""Rewrites programs that compute with complex numbers as programs of pairs of real numbers."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import PyTree

from ..tracing.evaluation import bound_again, equations, is_jaxpr, params_of
from .combining import as_rows
from .equations import bind, called, interpreted, rewritten
from .fourier import is_short, transformed
from .movements import MOVEMENTS


class NotInPairsError(Exception):
    """A primitive of complex numbers has no rule in this module. `what` it is, and `where` it is in
    the user's source; None as long as that isn't known."""

    def __init__(self, what: str, where: str | None = None):
        super().__init__(what)
        self.what = what
        self.where = where


class ComplexParts(NamedTuple):
    """An array of complex numbers."""

    real: Any
    imag: Any


def with_complex(tree: PyTree, of_parts: Callable = lax.complex) -> PyTree:
    """The tree with each `ComplexParts` replaced by the complex number `of_parts(real, imag)`, or
    by None where its parts are None."""

    def joined(x: Any) -> Any:
        if not isinstance(x, ComplexParts):
            return x
        return None if x.real is None else of_parts(*x)

    return jax.tree.map(joined, tree, is_leaf=lambda x: isinstance(x, ComplexParts))


def without_complex(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """The same program, computed with real numbers. It is left as it is if its inputs or results
    are complex.

    **Raises:** `NotInPairsError` for a primitive without a rule here.
    """
    if not any(map(_has_complex, equations(jaxpr))):
        return jaxpr
    binders: list = [*jaxpr.constvars, *jaxpr.invars]
    if any(is_complex(v.aval) for v in (*binders, *jaxpr.outvars)):
        return jaxpr
    with jax.numpy_dtype_promotion("standard"):
        return rewritten(jaxpr, lambda *xs: interpreted(jaxpr, xs, _known_parts, _equation))


def is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _has_complex(eqn: JaxprEqn) -> bool:
    return any(is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars))


def _known_parts(x: Any) -> Any:
    x = np.asarray(x)
    return ComplexParts(x.real, x.imag) if np.iscomplexobj(x) else x


def _equation(eqn: JaxprEqn, ins: list) -> list:
    try:
        return _in_parts(eqn, ins)
    except NotInPairsError as e:
        # (An equation of a function that JAX wrote has no place itself.)
        e.where = e.where or source_info_util.summarize(eqn.source_info)
        raise


def _in_parts(eqn: JaxprEqn, ins: list) -> list:
    inner, name = called(eqn), eqn.primitive.name
    if inner is not None:
        return interpreted(inner, ins, _known_parts, _equation)
    inside = [eqn for x in filter(is_jaxpr, params_of(eqn)) for eqn in equations(x)]
    with source_info_util.user_context(eqn.source_info.traceback):
        if name in ("cond", "scan", "while") and any(map(_has_complex, [eqn, *inside])):
            return list(bound_again(eqn, ins, _run))
        if not _has_complex(eqn):
            return bind(eqn, ins)
        if name in _RULES:
            return [_RULES[name](eqn, *ins)]
        if name in _BY_PARTS:
            return _by_parts(eqn, ins)
    raise NotInPairsError(f"the primitive {name} of complex numbers")


def _by_parts(eqn: JaxprEqn, ins: list) -> list:
    """The result of a primitive that does the same with the real and with the imaginary parts."""
    reals, imags = (
        bind(eqn, [x[k] if isinstance(x, ComplexParts) else x for x in ins]) for k in range(2)
    )
    return list(map(ComplexParts, reals, imags))


_BY_PARTS = {
    *("add", "add_any", "copy", "copy_p", "cumsum", "dynamic_slice", "dynamic_update_slice"),
    *("gather", "neg", "optimization_barrier", "pad", "reduce_sum", "reduce_window_sum"),
    *("scatter", "scatter-add", "scatter-sub", "select_n", "stop_gradient", "sub", *MOVEMENTS),
}


def _run(jaxpr: ClosedJaxpr, *ins: Any) -> list:
    """The results of a branch, or of a turn of a loop."""
    return jax.tree.map(jnp.asarray, list(interpreted(jaxpr, ins, _known_parts, _equation)))


def _real_dtype(eqn: Any) -> Any:
    aval = eqn.outvars[0].aval
    return np.finfo(aval.dtype).dtype if is_complex(aval) else aval.dtype


def _complex(eqn: Any, x: Any, y: PyTree) -> ComplexParts:
    shape = eqn.outvars[0].aval.shape
    return ComplexParts(jnp.broadcast_to(x, shape), jnp.broadcast_to(y, shape))


def _converted(eqn: JaxprEqn, x: Any) -> Any:
    dtype = _real_dtype(eqn)
    if not is_complex(eqn.outvars[0].aval):
        return lax.convert_element_type(x.real, dtype)
    if isinstance(x, ComplexParts):
        return ComplexParts(*(lax.convert_element_type(part, dtype) for part in x))
    real = lax.convert_element_type(x, dtype)
    return ComplexParts(real, lax.full_like(real, 0))


def _times(x: ComplexParts, y: ComplexParts) -> ComplexParts:
    return ComplexParts(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _quotient(x: ComplexParts, y: ComplexParts) -> ComplexParts:
    """The quotient, scaled by the larger part of the divisor. (Smith, Algorithm 116, 1962.)"""
    swaps = jnp.abs(y.real) < jnp.abs(y.imag)
    large, small = jnp.where(swaps, y.imag, y.real), jnp.where(swaps, y.real, y.imag)
    ratio = small / large
    below = large + small * ratio
    first, second = jnp.where(swaps, x.imag, x.real), jnp.where(swaps, x.real, x.imag)
    imag = jnp.where(swaps, first * ratio - second, second - first * ratio) / below
    return ComplexParts((first + second * ratio) / below, imag)


def _scaled(x: ComplexParts, by: Array) -> ComplexParts:
    return ComplexParts(x.real * by, x.imag * by)


def _size(x: ComplexParts) -> Array:
    """The absolute value, which doesn't overflow before the result does."""
    a, b = jnp.abs(x.real), jnp.abs(x.imag)
    large, small = jnp.maximum(a, b), jnp.minimum(a, b)
    is_plain = (large > 0) & (large < jnp.inf)
    ratio = small / jnp.where(is_plain, large, 1)
    return jnp.where(is_plain, large * jnp.sqrt(1 + ratio * ratio), large)


def _exp(x: ComplexParts) -> ComplexParts:
    size = jnp.exp(x.real)
    return ComplexParts(
        size * jnp.cos(x.imag), jnp.where(x.imag == 0, x.imag, size * jnp.sin(x.imag))
    )


def _log(x: ComplexParts) -> ComplexParts:
    return ComplexParts(jnp.log(_size(x)), jnp.arctan2(x.imag, x.real))


def _sqrt(x: ComplexParts) -> ComplexParts:
    size = _size(x)
    root = jnp.sqrt(0.5 * (size + jnp.abs(x.real)))
    is_zero = size == 0
    other = jnp.where(is_zero, 0, x.imag / jnp.where(is_zero, 1, 2 * root))
    negative = x.real < 0
    real = jnp.where(negative, jnp.abs(other), root)
    imag = jnp.where(negative, jnp.copysign(root, x.imag), other)
    is_infinite = jnp.abs(x.imag) == jnp.inf
    return ComplexParts(jnp.where(is_infinite, jnp.inf, real), jnp.where(is_infinite, x.imag, imag))


def _sinh(x: ComplexParts) -> ComplexParts:
    return ComplexParts(jnp.sinh(x.real) * jnp.cos(x.imag), jnp.cosh(x.real) * jnp.sin(x.imag))


def _cosh(x: ComplexParts) -> ComplexParts:
    return ComplexParts(jnp.cosh(x.real) * jnp.cos(x.imag), jnp.sinh(x.real) * jnp.sin(x.imag))


def _tanh(x: ComplexParts) -> ComplexParts:
    t, s, c = jnp.tanh(x.real), jnp.sin(x.imag), jnp.cos(x.imag)
    # In terms of the cosine, which is zero where the tangent of the imaginary part is infinite.
    below = c * c + (t * s) ** 2
    return ComplexParts(t / below, s * c * (1 - t * t) / below)


def _turned(fn: Callable, x: ComplexParts) -> ComplexParts:
    """`-i fn(i x)`."""
    y = fn(ComplexParts(-x.imag, x.real))
    return ComplexParts(y.imag, -y.real)


def _power(x: ComplexParts, n: int) -> ComplexParts:
    one = ComplexParts(jnp.ones_like(x.real), jnp.zeros_like(x.real))
    if n < 0:
        return _quotient(one, _power(x, -n))
    found = None
    while n:
        if n & 1:
            found = x if found is None else _times(found, x)
        n >>= 1
        x = _times(x, x) if n else x
    return one if found is None else found


def _pow(x: ComplexParts, y: ComplexParts) -> ComplexParts:
    found = _exp(_times(y, _log(x)))
    zero = (x.real == 0) & (x.imag == 0)
    one = (y.real == 0) & (y.imag == 0)
    return ComplexParts(
        jnp.where(zero, jnp.where(one, 1, 0), found.real), jnp.where(zero, 0, found.imag)
    )


def _sign(x: ComplexParts) -> ComplexParts:
    size = _size(x)
    return _scaled(x, 1 / jnp.where(size == 0, 1, size))


def _logistic(x: ComplexParts) -> ComplexParts:
    one = ComplexParts(jnp.ones_like(x.real), jnp.zeros_like(x.real))
    y = _exp(ComplexParts(-x.real, -x.imag))
    return _quotient(one, ComplexParts(1 + y.real, y.imag))


def _log1p(x: ComplexParts) -> ComplexParts:
    # log |1 + z| = log1p(2 a + a^2 + b^2) / 2
    near = 0.5 * jnp.log1p(x.real * (2 + x.real) + x.imag * x.imag)
    far = _log(ComplexParts(1 + x.real, x.imag))
    return ComplexParts(jnp.where(_size(x) < 0.5, near, far.real), far.imag)


def _expm1(x: ComplexParts) -> ComplexParts:
    half = jnp.sin(0.5 * x.imag)
    real = jnp.expm1(x.real) * jnp.cos(x.imag) - 2 * half * half
    return ComplexParts(real, jnp.exp(x.real) * jnp.sin(x.imag))


def _elementwise(fn: Callable) -> Callable:
    def rule(eqn: JaxprEqn, *ins: Any) -> ComplexParts:
        return fn(
            *(x if isinstance(x, ComplexParts) else ComplexParts(x, jnp.zeros_like(x)) for x in ins)
        )

    return rule


def _dot_general(eqn: JaxprEqn, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    params = dict(eqn.params, preferred_element_type=_real_dtype(eqn))
    product = functools.partial(eqn.primitive.bind, **params)
    if not isinstance(x, ComplexParts):
        return ComplexParts(product(x, y.real), product(x, y.imag))
    if not isinstance(y, ComplexParts):
        return ComplexParts(product(x.real, y), product(x.imag, y))
    return ComplexParts(
        product(x.real, y.real) - product(x.imag, y.imag),
        product(x.real, y.imag) + product(x.imag, y.real),
    )


def _fft(eqn: JaxprEqn, x: Array | ComplexParts) -> Array | ComplexParts | None:
    """**Raises:** `NotInPairsError` for a length that isn't written out."""
    lengths = eqn.params["fft_lengths"]
    if not all(map(is_short, lengths)):
        raise NotInPairsError(f"the primitive fft of {math.prod(lengths)} points")
    found = transformed(eqn, x)
    return ComplexParts(*found) if isinstance(found, tuple) else found


def _zeros(aval: Any) -> ComplexParts:
    zeros = jnp.zeros(aval.shape, np.finfo(aval.dtype).dtype)
    return ComplexParts(zeros, zeros)


def _reduce_prod(eqn: JaxprEqn, x: ComplexParts) -> ComplexParts:
    parts = ComplexParts(*(as_rows(part, eqn.params["axes"]) for part in x))
    shape, dtype = parts.real.shape[1:], parts.real.dtype
    one = ComplexParts(jnp.ones(shape, dtype), jnp.zeros(shape, dtype))
    return lax.scan(lambda total, row: (_times(total, row), None), one, parts)[0]


_RULES: dict[str, Callable] = {
    "abs": lambda eqn, x: _size(x),
    "complex": _complex,
    "conj": _elementwise(lambda x: ComplexParts(x.real, -x.imag)),
    "convert_element_type": _converted,
    "cos": _elementwise(lambda x: _cosh(ComplexParts(-x.imag, x.real))),
    "cosh": _elementwise(_cosh),
    "div": _elementwise(_quotient),
    "dot_general": _dot_general,
    "eq": lambda eqn, x, y: (x.real == y.real) & (x.imag == y.imag),
    **dict.fromkeys(("empty", "empty2"), lambda eqn: _zeros(eqn.outvars[0].aval)),
    "exp": _elementwise(_exp),
    "expm1": _elementwise(_expm1),
    "fft": _fft,
    "imag": lambda eqn, x: x.imag,
    "integer_pow": lambda eqn, x: _power(x, eqn.params["y"]),
    "is_finite": lambda eqn, x: jnp.isfinite(x.real) & jnp.isfinite(x.imag),
    "log": _elementwise(_log),
    "log1p": _elementwise(_log1p),
    "logistic": _elementwise(_logistic),
    "mul": _elementwise(_times),
    "ne": lambda eqn, x, y: (x.real != y.real) | (x.imag != y.imag),
    "pow": _elementwise(_pow),
    "real": lambda eqn, x: x.real,
    "reduce_prod": _reduce_prod,
    "rsqrt": _elementwise(lambda x: _power(_sqrt(x), -1)),
    "sign": _elementwise(_sign),
    "sin": _elementwise(lambda x: _turned(_sinh, x)),
    "sinh": _elementwise(_sinh),
    "sqrt": _elementwise(_sqrt),
    "square": _elementwise(lambda x: _times(x, x)),
    "tan": _elementwise(lambda x: _turned(_tanh, x)),
    "tanh": _elementwise(_tanh),
}
