"""The values that a lowering computes with: arrays described by expressions for their
components."""

import dataclasses as dc
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from ..folding import FOLDED_INTEGERS
from ..gather_scatter import strides_of
from ..ir import Buffer, Const, Expr, Index, Load, Op


INT = np.dtype(np.int64)
BOOL = np.dtype(bool)


@dc.dataclass(frozen=True, slots=True)
class LoweredArray:
    """An array, as a function from an index in row-major order to the component there.

    - `buffer`: the memory that holds the array, if it is stored as it is.
    - `depth`: the number of operations in a component's expression.
    - `along`: a function from a counter for each axis to the component there, for an array that has
        no `at` (a slice of a matrix, for example).
    - `view`: the memory that holds the array in another order (that of a transposed matrix, for
        example), and the distance in it along each axis.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    at: Callable[[Index], Expr]
    buffer: Buffer | None = None
    depth: int = 0
    along: Callable[[Sequence[Expr]], Expr] | None = None
    view: tuple[Buffer, tuple[int, ...]] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[Buffer, tuple[int, ...]] | None:
        """The memory that holds the array, and the distance in it along each axis; None if it isn't
        stored."""
        return self.view if self.buffer is None else (self.buffer, tuple(strides_of(self.shape)))

    @property
    def expr(self) -> Expr:
        """The component of an array with a single component."""
        return self.at(Index())

    def by_axes(self, counters: Sequence[Expr]) -> Expr:
        """The component at a counter for each axis; for an array with a single component, that
        one."""
        if self.along is not None:
            return self.along(counters)
        if self.size == 1:
            return self.expr
        return self.at(position(counters, strides_of(self.shape)))

    def reshaped(self, shape: tuple[int, ...]) -> "LoweredArray":
        assert self.along is None or shape == self.shape
        return dc.replace(self, shape=tuple(shape))


def scalar(expr: Expr, shape: tuple[int, ...] = ()) -> LoweredArray:
    return LoweredArray(shape, expr.dtype, lambda _: expr)


def number(value: Any, dtype: DTypeLike) -> Const:
    with np.errstate(all="ignore"):
        return Const(np.asarray(value).astype(dtype)[()])


def stored(buffer: Buffer, shape: tuple[int, ...]) -> LoweredArray:
    return LoweredArray(shape, buffer.dtype, lambda i: Load(buffer, i), buffer)


def converted(x: Expr, dtype: DTypeLike) -> Expr:
    dtype = np.dtype(dtype)
    if isinstance(x, Const) and (x.dtype.kind in "biu" or dtype.kind == "f"):
        return number(x.value, dtype)
    return x if x.dtype == dtype else Op("convert_element_type", (x,), dtype)


# The integer that changes nothing as an operand.
_CHANGES_NOTHING = {"add": 0, "mul": 1}


def operation(name: str, args: tuple[Expr, ...], dtype: np.dtype, param: Any = None) -> Expr:
    """The elementwise operation of this name; for known integers, its result."""
    if name == "select_n" and isinstance(args[0], Const):
        return args[1 + int(args[0].value)]
    # Sums are folded for any dtype: the order of a derivative, which has to be known, may be a sum.
    if name in FOLDED_INTEGERS and (args[0].dtype.kind in "iub" or name == "add"):
        if all(isinstance(x, Const) for x in args):
            with np.errstate(all="ignore"):
                return number(FOLDED_INTEGERS[name](*(x.value for x in args)), dtype)  # pyright: ignore
        if name in _CHANGES_NOTHING and args[0].dtype.kind in "iub":
            for x, y in (args, args[::-1]):
                if isinstance(x, Const) and x.value == _CHANGES_NOTHING[name]:
                    return y
    return Op(name, args, dtype, param)


def only_by_axes(
    shape: Sequence[int], dtype: np.dtype, along: Callable[[Sequence[Expr]], Expr], depth: int
) -> LoweredArray:
    def at(_: Index) -> Expr:
        raise AssertionError("this array has no row-major order")

    return LoweredArray(tuple(shape), dtype, at, None, depth, along)


def elementwise(
    shape: Sequence[int], dtype: DTypeLike, ins: Sequence[LoweredArray], fn: Callable
) -> LoweredArray:
    """An array whose components are `fn` of the components of the operands."""
    shape, dtype, depth = tuple(shape), np.dtype(dtype), 1 + sum(x.depth for x in ins)
    if any(x.along for x in ins):
        return only_by_axes(shape, dtype, lambda c: fn(*(x.by_axes(c) for x in ins)), depth)
    return LoweredArray(shape, dtype, lambda i: fn(*(x.at(i) for x in ins)), depth=depth)


def cast(value: LoweredArray, dtype: DTypeLike) -> LoweredArray:
    dtype = np.dtype(dtype)
    if value.dtype == dtype:
        return value
    return elementwise(value.shape, dtype, [value], lambda x: converted(x, dtype))


def loaded(group: str, start: int, aval: Any, storage: Any) -> LoweredArray:
    """A parameter, or the state, in memory."""
    buffer = Buffer(group, np.dtype(storage), start, math.prod(aval.shape))
    found, dtype = stored(buffer, aval.shape), np.dtype(aval.dtype)
    if is_stored_as_bits(dtype, buffer.dtype):
        return elementwise(
            aval.shape, dtype, [found], lambda x: Op("bitcast_convert_type", (x,), dtype)
        )
    return cast(found, dtype)


def is_stored_as_bits(dtype: np.dtype, storage: np.dtype) -> bool:
    """Whether numbers are stored by their bits, as numbers of the dtype `storage`: 64-bit integers,
    which reals can't all represent."""
    return dtype.kind in "iu" and storage.kind == "f" and dtype.itemsize == storage.itemsize == 8


def position(counters: Sequence[Expr], strides: Sequence[int], offset: int = 0) -> Index:
    return Index(offset).plus(*zip(counters, strides, strict=True))
