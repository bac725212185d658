"""The results of instructions, on arrays with an entry for each thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ensembleode.engines.compiled.llvm.compiler import compiled

from .errors import PtxError


_LETTERS = {"b": "u", "u": "u", "s": "i", "f": "f"}


def dtype_of(name: str) -> np.dtype:
    """The dtype of a type of PTX: bits are whole numbers without a sign."""
    if name == "pred":
        return np.dtype(bool)
    if name[:1] not in _LETTERS or name[1:] not in ("8", "16", "32", "64") or name in ("f8", "f16"):
        raise PtxError(f"the type .{name} is unknown.")
    return np.dtype(f"{_LETTERS[name[0]]}{int(name[1:]) // 8}")


class Operation(NamedTuple):
    """A function of arrays, with the dtype of its result and of its operands."""

    function: Callable[..., Any]
    result: np.dtype
    operands: tuple[np.dtype, ...]


@functools.cache
def operation(name: str, modifiers: tuple[str, ...]) -> Operation:
    """What `name.modifiers` computes.

    **Raises:** `PtxError` for what isn't known: above all floating point without a rounding, which
    an assembler may fuse as it likes.
    """
    flags, kind = modifiers[:-1], modifiers[-1]
    dtype = dtype_of(kind)
    if name == "cvt":
        return _conversion(flags[:-1], dtype_of(flags[-1]), dtype)
    if name == "setp":
        return Operation(_comparison(flags, kind), np.dtype(bool), (dtype, dtype))
    if name == "selp":
        return Operation(lambda a, b, p: np.where(p, a, b), dtype, (dtype, dtype, np.dtype(bool)))
    if name == "mul" and flags == ("wide",):
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return Operation(lambda a, b: a.astype(wide) * b.astype(wide), wide, (dtype, dtype))
    key = name, flags, {"f": "float", "p": "bits", "b": "bits"}.get(kind[0], "whole")
    if key not in _TABLE:
        raise PtxError(f"the instruction {'.'.join([name, *modifiers])} is unknown.")
    function, *operands = _TABLE[key]
    return Operation(function, dtype, tuple(dtype if x is None else np.dtype(x) for x in operands))


def _copysign(sign: Any, magnitude: Any) -> Any:
    return np.copysign(magnitude, sign)


def _maximum(a: Any, b: Any) -> Any:
    """Of a number and NaN the number, and of zeros the positive one."""
    return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))


def _minimum(a: Any, b: Any) -> Any:
    return np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))


def _shift(shift: Callable) -> Callable:
    """A shift by as many bits as there are, or more, shifts all out."""

    def function(a: Any, by: Any) -> Any:
        bits = 8 * a.dtype.itemsize
        found = shift(a, np.minimum(by, bits - 1).astype(a.dtype))
        rest = np.where(a < 0, -1, 0) if a.dtype.kind == "i" else 0
        return np.where(by < bits, found, rest).astype(a.dtype)

    return function


def _field(a: Any, start: Any, length: Any) -> Any:
    """Bits from `start` on, without a sign."""
    mask = _shift(np.left_shift)(np.ones_like(a), length) - a.dtype.type(1)
    return _shift(np.right_shift)(a, start) & mask


def _high(a: Any, b: Any) -> Any:
    """The upper half of a product of numbers of 64 bits without a sign."""
    if a.dtype != np.uint64:
        raise PtxError("the upper half of a product of other numbers.")
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + (a0 * b0 >> half)
    return a1 * b1 + (middle >> half) + ((middle & low) + a0 * b1 >> half)


def _whole_division(a: Any, b: Any) -> Any:
    """Of numbers without a sign; by zero it is not said what."""
    if a.dtype.kind != "u" or (b == 0).any():
        raise PtxError("a division of whole numbers, signed or by zero.")
    return a // b


def _not(a: Any) -> Any:
    return ~a


_ROUNDED = ("rn",)
# By name, flags and kind of type: the function, and the dtypes of its operands (None: that of the
# instruction).
_TABLE: dict[tuple, tuple] = {
    **{
        (name, _ROUNDED, "float"): (function, None, None)
        for name, function in {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "div": np.divide,
        }.items()
    },
    ("fma", _ROUNDED, "float"): (lambda a, b, c: fma(a, b, c), None, None, None),
    ("sqrt", _ROUNDED, "float"): (np.sqrt, None),
    ("rcp", _ROUNDED, "float"): (lambda a: a.dtype.type(1) / a, None),
    ("abs", (), "float"): (np.abs, None),
    ("neg", (), "float"): (np.negative, None),
    ("copysign", (), "float"): (_copysign, None, None),
    ("max", (), "float"): (_maximum, None, None),
    ("min", (), "float"): (_minimum, None, None),
    ("add", (), "whole"): (np.add, None, None),
    ("sub", (), "whole"): (np.subtract, None, None),
    ("neg", (), "whole"): (np.negative, None),
    ("mul", ("lo",), "whole"): (np.multiply, None, None),
    ("mul", ("hi",), "whole"): (_high, None, None),
    ("mad", ("lo",), "whole"): (lambda a, b, c: a * b + c, None, None, None),
    ("div", (), "whole"): (_whole_division, None, None),
    ("max", (), "whole"): (np.maximum, None, None),
    ("min", (), "whole"): (np.minimum, None, None),
    ("shr", (), "whole"): (_shift(np.right_shift), None, "u4"),
    ("bfe", (), "whole"): (_field, None, "u4", "u4"),
    ("popc", (), "bits"): (lambda x: np.bitwise_count(x).astype(np.uint32), None),
    ("shl", (), "bits"): (_shift(np.left_shift), None, "u4"),
    ("and", (), "bits"): (np.bitwise_and, None, None),
    ("or", (), "bits"): (np.bitwise_or, None, None),
    ("xor", (), "bits"): (np.bitwise_xor, None, None),
    ("not", (), "bits"): (_not, None),
    **{("mov", (), kind): (lambda a: a, None) for kind in ("float", "whole", "bits")},
}


_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _comparison(flags: tuple[str, ...], kind: str) -> Callable:
    """With NaN all are false but `nan` and those that end in u, which are true."""
    (name,) = flags
    if kind[0] != "f":
        return _COMPARISONS[name]
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    compare = _COMPARISONS[name.removesuffix("u")]
    if name.endswith("u"):
        return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)
    return lambda a, b: compare(a, b) & ~(np.isnan(a) | np.isnan(b))


# To the nearest, to zero, down and up.
_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _conversion(flags: tuple[str, ...], result: np.dtype, source: np.dtype) -> Operation:
    to_float, from_float = result.kind == "f", source.kind == "f"
    rounded = _ROUNDINGS.get(flags[0]) if len(flags) == 1 else None
    # (A rounding is written exactly where one can be needed.)
    narrows = to_float and not (from_float and result.itemsize > source.itemsize)
    if from_float and rounded and (not to_float or result == source):
        function = rounded if to_float else lambda a: _saturated(rounded(a), result)
    elif flags == (("rn",) if narrows and result != source else ()) and not (
        from_float and not to_float
    ):
        function = lambda a: a.astype(result)  # noqa: E731
    else:
        raise PtxError(f"a conversion from {source} to {result}, .{'.'.join(flags)}, is unknown.")
    return Operation(function, result, (source,))


def _saturated(a: Any, result: np.dtype) -> Any:
    """Whole numbers of floats, the nearest that there is."""
    least, most = np.iinfo(result).min, np.iinfo(result).max
    bits = 8 * result.itemsize
    # (As floats, the largest is one more, or the last that there is.)
    inside = (a >= float(least)) & (a < 2.0 ** (bits - (result.kind == "i")))
    found = np.where(inside, a, 0).astype(result)
    found = np.where(~inside & (a > 0), result.type(most), found)
    found = np.where(~inside & (a < 0), result.type(least), found)
    of_nan = 0
    if a.dtype.itemsize == 8 or result.itemsize == 8:
        of_nan = least if result.kind == "i" else 1 << (bits - 1)
    return np.where(np.isnan(a), result.type(of_nan), found)


_FMA = """
define void @{name}(ptr %a, ptr %b, ptr %c, i64 %n) {{
  br label %next
next:
  %i = phi i64 [ 0, %0 ], [ %after, %next ]
  %at.a = getelementptr {type}, ptr %a, i64 %i
  %at.b = getelementptr {type}, ptr %b, i64 %i
  %at.c = getelementptr {type}, ptr %c, i64 %i
  %x = load {type}, ptr %at.a
  %y = load {type}, ptr %at.b
  %z = load {type}, ptr %at.c
  %w = call {type} @llvm.fma.{short}({type} %x, {type} %y, {type} %z)
  store {type} %w, ptr %at.a
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, %n
  br i1 %more, label %next, label %done
done:
  ret void
}}
declare {type} @llvm.fma.{short}({type}, {type}, {type})
"""
_TYPES = {4: ("float", "f32"), 8: ("double", "f64")}


class _Fma:
    """`a * b + c`, rounded once: NumPy has none, and the CPU has."""

    def __init__(self, dtype: np.dtype):
        type_, short = _TYPES[dtype.itemsize]
        self.code = compiled(_FMA.format(name="fused", type=type_, short=short))
        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64)
        self.call = signature(self.code.address("fused"))
        self.room = np.zeros((3, 0), dtype)

    def __call__(self, *numbers: Any) -> Any:
        size = max(x.size for x in numbers)
        if size == 0:
            return np.zeros(0, self.room.dtype)
        if size > self.room.shape[1]:
            self.room = np.zeros((3, size), self.room.dtype)
            self.addresses = [row.ctypes.data for row in self.room]
        for row, x in zip(self.room, numbers, strict=True):
            row[:size] = x
        self.call(*self.addresses, size)
        return self.room[0, :size]


@functools.cache
def _fma_of(dtype: np.dtype) -> _Fma:
    return _Fma(dtype)


def fma(a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` of arrays of one dtype, rounded once; valid until the next call."""
    return _fma_of(a.dtype)(a, b, c)
