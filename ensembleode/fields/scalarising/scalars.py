"""Arithmetic on single components. Constants are folded, and operations that change nothing are
left out.

The results have the same bits as the operations themselves: `0 * x` is NaN where `x` is infinite,
and `x + 0` is `0` where `x` is `-0`, so neither is left out for floating-point numbers. Two kinds
of zeros are left out, because each stands for an entry that is absent (see `absent`): a zero that
an `add_any` adds, as only differentiation makes that primitive; and a zero that was converted from
a boolean, as in an identity matrix or a one-hot vector, along which Jacobians are taken.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from ..folding import FOLDED
from .values import fill, is_computed, is_constant


# These primitives turn an absent zero into an absent zero (see `absent`).
_KEPT_ABSENT = ("convert_element_type", "copy", "neg", "stop_gradient")
# The operands of these primitives must have the same shape; some accept scalars.
SAME_SHAPE = ("clamp", "select_n")


def simplify(name: str, args: Sequence, dtype: DTypeLike, params: dict) -> Any:
    """One component of an elementwise primitive, if it can be had without an operation; else
    None."""
    simple = _SIMPLIFY[name](*args) if name in _SIMPLIFY and any(map(_is_absent, args)) else None
    if simple is None and all(map(is_constant, args)):
        simple = _fold(name, params, args, dtype)
    if simple is None and name in _SIMPLIFY:
        simple = _SIMPLIFY[name](*args)
    return simple


@functools.cache
def absent(dtype: DTypeLike) -> ArrayLike:
    """The zero that stands for an absent entry. It is always the same object, by which it is
    recognised."""
    return np.dtype(dtype).type(0)


def _is_absent(x: Any) -> bool:
    return is_constant(x) and _kind(x) == "f" and x is absent(x.dtype)


def level(args: Sequence) -> Sequence:
    """The entries, all with the shape `[1]` of computed ones if there is a computed one."""
    if not any(map(is_computed, args)):
        return args
    return [fill(x, (1,), x.dtype) for x in args]


def power(x: Array, y: int, dtype: DTypeLike) -> Any:
    """An integer power, by repeated multiplication."""
    if y < 0:
        return lax.div(np.dtype(dtype).type(1), power(x, -y, dtype))
    result = None
    while y:
        if y & 1:
            result = x if result is None else lax.mul(result, x)
        y >>= 1
        x = lax.mul(x, x) if y else x
    return np.dtype(dtype).type(1) if result is None else result


def _fold(name: str, params: dict, args: Sequence, dtype: DTypeLike) -> Any:
    dtype = np.dtype(dtype)
    with np.errstate(all="ignore"):
        if name == "select_n":
            return args[1 + int(args[0])]
        if name in _KEPT_ABSENT and jnp.issubdtype(dtype, jnp.floating):
            was_false = args[0].dtype == np.bool_ and not args[0]
            if was_false or _is_absent(args[0]):
                return absent(dtype)
        if name == "div":
            return _quotient(*args)
        if (
            name == "convert_element_type"
            and dtype.kind in "iu"
            and args[0].dtype.kind not in "iub"
        ):
            return None  # the result of a number out of range depends on the platform
        if name == "integer_pow" and dtype.kind not in "iu":
            return dtype.type(np.power(args[0], dtype.type(params["y"])))
        if name in FOLDED:
            return np.asarray(FOLDED[name](*args)).astype(dtype)[()]
    return None


def _quotient(x: Any, y: PyTree) -> PyTree:
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    if y == 0:
        return None
    return x.dtype.type(int(abs(int(x)) // abs(int(y))) * (1 if (x < 0) == (y < 0) else -1))


def _is(x: Any, number: int) -> bool:
    return is_constant(x) and bool(x == number)


def _kind(x: Any) -> str:
    """`"i"` for dtypes with one zero and no infinity, `"f"` for real floating-point ones, else
    `""`."""
    if np.dtype(x.dtype).kind in "iub":
        return "i"
    return "f" if jnp.issubdtype(x.dtype, jnp.floating) else ""


def _is_zero(x: Any, *, negative: bool) -> bool:
    """Whether an entry is the constant zero; for floating-point numbers, the zero of this sign."""
    if not _is(x, 0):
        return False
    kind = _kind(x)
    return kind == "i" or (kind == "f" and bool(np.signbit(x)) == negative)


def _adds_nothing(x: Any) -> bool:
    return _is_zero(x, negative=True) or _is_absent(x)


def _add(x, y):
    return y if _adds_nothing(x) else x if _adds_nothing(y) else None


def _sub(x, y):
    if _is_zero(y, negative=False):
        return x
    return lax.neg(y) if _adds_nothing(x) else None


def _mul(x, y):
    for a, b in ((x, y), (y, x)):
        if _is_absent(a) or (_is(a, 0) and _kind(a) == "i"):
            return a
        if _is(a, 1) and _kind(a):
            return b
    return None


def _div(x, y):
    return x if _is(y, 1) and _kind(y) else None


def _boolean(x, y, neutral):
    for a, b in ((x, y), (y, x)):
        if is_constant(a) and a.dtype == np.bool_:
            return b if a == neutral else a
    return None


def _select_n(which, *cases):
    if is_constant(which):
        return cases[int(which)]
    return cases[0] if all(c is cases[0] for c in cases) else None


_SIMPLIFY: dict[str, Callable] = {
    "add": _add,
    "add_any": lambda x, y: y if _is(x, 0) else x if _is(y, 0) else None,
    "and": functools.partial(_boolean, neutral=True),
    "div": _div,
    "mul": _mul,
    "or": functools.partial(_boolean, neutral=False),
    "select_n": _select_n,
    "sub": _sub,
}
