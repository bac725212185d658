"""Elementwise operations for numbers that are known while tracing; NumPy computes these as XLA
does."""

from collections.abc import Callable

import numpy as np


# For numbers of any dtype; integers have to stay in range.
FOLDED: dict[str, Callable] = {
    **{name: getattr(np, name) for name in ("abs", "add", "ceil", "floor", "sign", "sqrt")},
    **dict.fromkeys(("convert_element_type", "copy", "stop_gradient"), lambda x: x),
    "add_any": np.add,
    "and": np.bitwise_and,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.bitwise_not,
    "or": np.bitwise_or,
    "square": np.square,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The quotient of integers, rounded towards zero as XLA rounds it."""
    whole = np.abs(x) // np.where(y == 0, 1, np.abs(y))
    return np.where(y == 0, ~np.zeros_like(y), np.where((x < 0) == (y < 0), whole, -whole))


# For integers alone: the operations from which indices are computed.
FOLDED_INTEGERS: dict[str, Callable] = {
    **FOLDED,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "div": _divided,
    "rem": lambda x, y: np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y))),
}
