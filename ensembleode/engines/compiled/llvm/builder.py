"""Writes LLVM IR from Python: functions with loops, branches and arithmetic.

A `Builder` writes the instructions of one function of a module (`module.py`); their results are the
values of `values.py`. A module one lane wide has only scalars (for a thread of a GPU, or for a
single trajectory).

Products are fused with sums here, by a rule of our own, instead of by LLVM. So the same code gives
the same bits at every width and with every version of LLVM, wherever there are fused operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TYPE_CHECKING

import numpy as np
from jax.typing import DTypeLike

from ....solvers.arithmetic import Components, PlainArithmetic
from .function_text import FunctionText
from .values import (
    BOOL as BOOL,
    ElementPointer as ElementPointer,
    F32 as F32,
    F64 as F64,
    FLOATS,
    I32 as I32,
    I64 as I64,
    integer_like as integer_like,
    literal,
    suffix,
    type_of as type_of,
    Value as Value,
    Variable as Variable,
)


if TYPE_CHECKING:
    from .module import Module


def _intrinsic(name: str) -> Callable[[Builder, Value], Value]:
    return lambda self, x: self.intrinsic(name, x)


class Builder(FunctionText, PlainArithmetic):
    """Writes the instructions of a function, one after the other."""

    def __init__(self, module: Module):
        self.module, self.lanes = module, module.lanes
        super().__init__()
        self._fuses = True
        # The lasting arrays that this function is passed by its caller, as arguments of
        # `lasting_array`; None for a function that has its own.
        self.passed: list[tuple[np.dtype, int, Any]] | None = None
        self._passed_to: dict[str, list[ElementPointer]] = {}
        # See `waiting`.
        self.waits: Variable | None = None

    #
    # Instructions
    #

    def value(self, text: str, dtype: np.dtype, lanes: int) -> Value:
        """The result of an instruction."""
        value = Value(self, self.name(), dtype, lanes)
        self.emit(f"{value.name} = {text}")
        return value

    def pure(self, text: str, dtype: np.dtype, lanes: int) -> Value:
        """The result of an instruction that depends on its operands alone. In a block and its inner
        blocks, such an instruction is written once."""
        return self.once_for((text, dtype, lanes), lambda: self.value(text, dtype, lanes))

    def once_for(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make()`, which is called once for this key in a block and its inner
        blocks, and writes no instruction that reads memory which may change in these."""
        found = self.known_result(key)
        if found is None:
            scope = self._scopes[-1]
            scope[key, self._fuses] = found = make()
        return found

    def known_result(self, key: Any) -> Any:
        """The result of `once_for` with this key; None where this block doesn't have it."""
        key = (key, self._fuses)
        return next((scope[key] for scope in reversed(self._scopes) if key in scope), None)

    @contextmanager
    def waiting(self) -> Iterator[Variable]:
        """Within this block, an operation that takes some lanes longer than others may give up
        before it has finished in these, whose results are then of no use; it goes on where the
        same operation is repeated. Yields the lanes where it did."""
        before, self.waits = self.waits, self.variable(BOOL, False)
        try:
            yield self.waits
        finally:
            self.waits = before

    #
    # Memory
    #

    def array(self, dtype: np.dtype, n: int, *, of_lanes: bool = False) -> ElementPointer:
        """Memory for `n` elements; with `of_lanes`, for `n` elements of each lane, where element
        `i` of all lanes lies side by side. It is for this block and its inner blocks."""
        n *= max(1, self.lanes) if of_lanes else 1
        found = None if self.heap is None else self.heap.array(dtype, n, of_lanes=of_lanes)
        return found or self._array_on_stack(dtype, n)

    def lasting_array(self, dtype: np.dtype, n: int, fill: Any = None) -> ElementPointer:
        """Memory for `n` elements of each lane that lasts as long as the kernel runs. `fill`: what
        is in all of it at first; None for anything."""
        if self.passed is not None:
            self.passed.append((dtype, n, fill))
            return ElementPointer(self, f"%lasting{len(self.passed) - 1}", dtype)
        size = n * max(1, self.lanes)
        found = None if self.heap is None else self.heap.lasting_array(dtype, size)
        found = found or self._array_on_stack(dtype, size)
        if fill is not None:
            with self.at_start():
                for i in range(n):
                    value = self.constant(fill, dtype, of_lanes=True)
                    found.store_lanes(i * max(1, self.lanes), value)
        return found

    def passed_to(self, name: str, arrays: list[tuple[np.dtype, int, Any]]) -> list[ElementPointer]:
        """The lasting arrays that are passed to the function of this name."""
        if name not in self._passed_to:
            self._passed_to[name] = [self.lasting_array(*x) for x in arrays]
        return self._passed_to[name]

    def _array_on_stack(self, dtype: np.dtype, n: int) -> ElementPointer:
        stored = np.dtype(np.int8) if dtype == BOOL else dtype
        place = self.on_stack(f"[{max(1, n)} x {type_of(stored)}], align 64")
        return ElementPointer(self, place, dtype)

    def parameter(self, name: str, dtype: np.dtype, lanes: int = 0) -> Value:
        """A parameter of the function; its name begins with `%`."""
        return Value(self, name, dtype, lanes)

    def variable(self, dtype: np.dtype, value: Any = None, *, of_lanes: bool = True) -> Variable:
        return Variable(self, dtype, self.lanes if of_lanes else 0, value)

    #
    # Constants and shapes
    #

    def constant(self, value: Any, dtype: DTypeLike, *, of_lanes: bool = False) -> Value:
        dtype = np.dtype(dtype)
        lanes = self.lanes if of_lanes else 0
        with np.errstate(all="ignore"):  # numbers that don't fit wrap around, or become infinite
            value = np.asarray(value).astype(dtype)[()]
        text = literal(value, dtype)
        if lanes:
            text = f"splat ({type_of(dtype)} {text})"
        found = Value(self, text, dtype, lanes)
        found.constant = value
        return found

    def as_value(self, x: Any, dtype: np.dtype) -> Value:
        """A value as it is; a Python number as a constant of this dtype."""
        return x if isinstance(x, Value) else self.constant(x, dtype)

    def lane_numbers(self) -> Value:
        """The vector 0, 1, 2, ... of int64."""
        if not self.lanes:
            return self.constant(0, I64)
        entries = ", ".join(f"i64 {i}" for i in range(self.lanes))
        return Value(self, f"<{entries}>", I64, self.lanes)

    def spread(self, x: Value) -> Value:
        """A scalar as a vector that has it in each lane."""
        if x.lanes or not self.lanes:
            return x
        if x.constant is not None:
            return self.constant(x.constant, x.dtype, of_lanes=True)
        type_ = type_of(x.dtype, self.lanes)
        first = self.pure(f"insertelement {type_} poison, {x}, i32 0", x.dtype, self.lanes)
        zeros = f"<{self.lanes} x i32> zeroinitializer"
        found = self.pure(f"shufflevector {first}, {type_} poison, {zeros}", x.dtype, self.lanes)
        if x.factors is None:
            return found
        return self._product(found, self.spread(x.factors[0]), self.spread(x.factors[1]))

    def _product(self, value: Value, x: Value, y: Value) -> Value:
        """The value, marked as the product of `x` and `y`, so that a sum may be fused with it."""
        found = Value(self, value.name, value.dtype, value.lanes)
        found.factors = (x, y)
        return found

    def matched(self, *values: Any) -> tuple[Value, ...]:
        """The operands as values of one dtype; if one of them has lanes, all get lanes."""
        dtype = next(x.dtype for x in values if isinstance(x, Value | np.generic))
        found = [self.as_value(x, dtype) for x in values]
        assert all(x.dtype == dtype for x in found), [x.type for x in found]
        if any(x.lanes for x in found):
            found = [self.spread(x) for x in found]
        return tuple(found)

    #
    # Arithmetic
    #

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Within this block products are rounded before they are added; only `fma` is fused."""
        before, self._fuses = self._fuses, False
        try:
            yield
        finally:
            self._fuses = before

    def binary(self, op: str, x: Value | float, y: Any) -> Value:
        x, y = self.matched(x, y)
        return self.pure(f"{op} {x}, {y.name}", x.dtype, x.lanes)

    def add(self, x: Any, y: Any) -> Value:
        x, y = self.matched(x, y)
        if not x.is_real:
            return self.binary("add", x, y)
        if self._fuses and x.factors is not None:
            return self.mul_add(*x.factors, y)
        if self._fuses and y.factors is not None:
            return self.mul_add(*y.factors, x)
        return self.binary("fadd", x, y)

    def sub(self, x: Any, y: Any) -> Value:
        x, y = self.matched(x, y)
        if not x.is_real:
            return self.binary("sub", x, y)
        if self._fuses and x.factors is not None:
            return self.mul_add(*x.factors, -y)
        if self._fuses and y.factors is not None:
            return self.mul_add(-y.factors[0], y.factors[1], x)
        return self.binary("fsub", x, y)

    def mul(self, x: Any, y: Any) -> Value:
        x, y = self.matched(x, y)
        if not x.is_real:
            return self.binary("mul", x, y)
        return self._product(self.binary("fmul", x, y), x, y)

    def mul_add(self, x: Value, y: Value | float, z: Value | float) -> Value:
        """`x * y + z`, rounded once where the machine does that as fast, otherwise twice."""
        x, y, z = self.matched(x, y, z)
        return self.intrinsic("fmuladd", x, y, z)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """`x * y + z`, rounded once, even where that is slow."""
        x, y, z = self.matched(x, y, z)
        return self.intrinsic("fma", x, y, z)

    def intrinsic(self, name: str, x: Value, *more: Value) -> Value:
        """Call an intrinsic of LLVM that is named after the type of its result."""
        return self.call(f"llvm.{name}.{suffix(x.dtype, x.lanes)}", x.dtype, x.lanes, x, *more)

    def call(self, name: str, dtype: np.dtype, lanes: int, *args: Value) -> Value:
        """Call a function that takes and returns values, and reads no memory."""
        type_ = type_of(dtype, lanes)
        if not self.module.has(name):
            self.module.declare(name, f"{type_} @{name}({', '.join(x.type for x in args)})")
        return self.pure(f"call {type_} @{name}({', '.join(map(str, args))})", dtype, lanes)

    #
    # The interface `Arithmetic` of solvers
    #

    def equal(self, x: Value, y: Any) -> Value:
        return self.compare("eq", x, y)

    def largest(self, components: Components) -> Value:
        largest = components[0]
        for x in components[1:]:
            # NaN has to win, whichever operand it is.
            largest = self.where((x > largest) | x.ne(x), x, largest)
        return largest

    #
    # Functions
    #

    def abs(self, x: Value) -> Value:
        if x.is_real:
            return self.intrinsic("fabs", x)
        return self.where(x < 0, -x, x) if x.is_signed else x

    sqrt, floor, trunc = _intrinsic("sqrt"), _intrinsic("floor"), _intrinsic("trunc")
    round_even = _intrinsic("roundeven")

    def sign(self, x: Value) -> Value:
        """-1, 0 or 1; zeros and NaN are returned as they are."""
        one = self.copysign(self.constant(1, x.dtype), x)
        return self.where((x > 0.0) | (x < 0.0), one, x)

    def copysign(self, x: Value, sign: Value) -> Value:
        x, sign = self.matched(x, sign)
        return self.intrinsic("copysign", x, sign)

    def compare(self, how: str, x: Value, y: Any) -> Value:
        """A comparison, one of `lt le gt ge eq ne`; with NaN all but `ne` are false."""
        x, y = self.matched(x, y)
        if x.is_real:
            op = f"fcmp {'une' if how == 'ne' else 'o' + how}"
        elif how in ("eq", "ne"):
            op = f"icmp {how}"
        else:
            op = f"icmp {'s' if x.is_signed else 'u'}{how}"
        return self.pure(f"{op} {x}, {y.name}", BOOL, x.lanes)

    def where(self, mask: Value, x: Any, y: Any) -> Value:
        """`x` in the lanes of the mask, `y` in the others; one of the two may be a number."""
        x, y = self.matched(x, y)
        if mask.lanes:
            x, y = self.spread(x), self.spread(y)
        return self.pure(f"select {mask}, {x}, {y}", x.dtype, x.lanes)

    def minimum(self, x: Value | float, y: Any) -> Value:
        """`x if x < y else y`: the second where one is NaN."""
        x, y = self.matched(x, y)
        return self.where(x < y, x, y)

    def maximum(self, x: Value | float, y: Any) -> Value:
        """`x if x > y else y`: the second where one is NaN."""
        x, y = self.matched(x, y)
        return self.where(x > y, x, y)

    def cast(self, x: Value, dtype: DTypeLike) -> Value:
        """A conversion as in C, but from real to integer it saturates, and NaN becomes zero."""
        dtype, old = np.dtype(dtype), x.dtype
        if dtype == old:
            return x
        if x.constant is not None and not (x.is_real and dtype.kind in "iu"):
            return self.constant(x.constant, dtype, of_lanes=bool(x.lanes))
        if dtype == BOOL:
            return x.ne(0)
        to = type_of(dtype, x.lanes)
        if x.is_real and dtype in FLOATS:
            op = "fpext" if dtype.itemsize > old.itemsize else "fptrunc"
        elif x.is_real:
            how = "fptosi" if dtype.kind == "i" else "fptoui"
            suffixes = f"{suffix(dtype, x.lanes)}.{suffix(old, x.lanes)}"
            return self.call(f"llvm.{how}.sat.{suffixes}", dtype, x.lanes, x)
        elif dtype in FLOATS:
            op = "sitofp" if x.is_signed else "uitofp"
        elif dtype.itemsize == old.itemsize and old != BOOL:
            return Value(self, x.name, dtype, x.lanes)
        elif dtype.itemsize < old.itemsize:
            op = "trunc"
        else:
            op = "sext" if x.is_signed else "zext"
        return self.pure(f"{op} {x} to {to}", dtype, x.lanes)

    def bitcast(self, x: Value, dtype: DTypeLike) -> Value:
        """The same bits as a number of another dtype of the same size."""
        dtype = np.dtype(dtype)
        if type_of(dtype) == type_of(x.dtype):
            return Value(self, x.name, dtype, x.lanes)
        return self.pure(f"bitcast {x} to {type_of(dtype, x.lanes)}", dtype, x.lanes)

    #
    # Lanes
    #

    def any(self, mask: Value) -> Value:
        """Whether the mask is true in any lane, as a scalar."""
        if not mask.lanes:
            return mask
        return self.pure(f"icmp ne {self.bits(mask)}, 0", BOOL, 0)

    def count(self, mask: Value) -> Value:
        """The number of lanes in which the mask is true, as a scalar int64."""
        bits = self.bits(mask)
        name, type_ = f"llvm.ctpop.i{mask.lanes}", f"i{mask.lanes}"
        self.module.declare(name, f"{type_} @{name}({type_})")
        counted = self.pure(f"call {type_} @{name}({bits})", I64, 0)
        if mask.lanes == 64:
            return counted
        return self.pure(f"zext {type_} {counted.name} to i64", I64, 0)

    def bits(self, mask: Value) -> str:
        """The mask as an integer with one bit for each lane, preceded by its type."""
        type_ = f"i{mask.lanes}"
        # (The dtype is arbitrary: nothing computes with these bits.)
        return f"{type_} {self.pure(f'bitcast {mask} to {type_}', I64, 0).name}"

    def entry(self, x: Value, lane: Value) -> Value:
        """The entry of one lane, as a scalar."""
        if not x.lanes:
            return x
        return self.pure(f"extractelement {x}, {lane}", x.dtype, 0)

    def with_entry(self, x: Value, lane: Value, entry: Value) -> Value:
        """The vector with the entry of one lane replaced."""
        if not x.lanes:
            return entry
        return self.pure(f"insertelement {x}, {entry}, {lane}", x.dtype, x.lanes)

    def for_(self, n: int | Value, body: Callable[[Value], None], start: int | Value = 0) -> None:
        """Calls `body(i)` for the int64 `i` from `start` to `n - 1`."""
        i = self.variable(I64, start, of_lanes=False)

        def one():
            now = i.get()
            body(now)
            i.set(now + 1)

        self.while_(lambda: i.get() < n, one)
