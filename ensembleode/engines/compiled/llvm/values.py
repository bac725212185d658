"""Values of LLVM IR with operators, variables, and memory. A `Builder` writes the instructions.

A value is a scalar, or a vector with an entry for each lane. Operations act lane by lane, so the
bits of a lane's results don't depend on how many lanes there are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from .builder import Builder


BOOL, I32, I64 = np.dtype(bool), np.dtype(np.int32), np.dtype(np.int64)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
FLOATS = {F32: "float", F64: "double"}


def type_of(dtype: np.dtype, lanes: int = 0) -> str:
    """The name of a value's type in LLVM."""
    element = FLOATS.get(dtype) or ("i1" if dtype == BOOL else f"i{8 * dtype.itemsize}")
    return f"<{lanes} x {element}>" if lanes else element


def integer_like(dtype: np.dtype) -> np.dtype:
    """The signed integer dtype with as many bits."""
    return np.dtype(f"int{8 * dtype.itemsize}")


def literal(value: Any, dtype: np.dtype) -> str:
    if dtype in FLOATS:
        # LLVM writes constants of single precision as doubles, too.
        return f"0x{struct.unpack('<Q', struct.pack('<d', float(dtype.type(value))))[0]:016X}"
    if dtype == BOOL:
        return "true" if value else "false"
    return str(int(value))


def _operator(method: str, *how: str, swapped: bool = False) -> Callable[[Value, Any], Value]:
    """An operator that calls a method of the builder with the value and another operand."""
    if swapped:
        return lambda self, other: getattr(self.builder, method)(*how, other, self)
    return lambda self, other: getattr(self.builder, method)(*how, self, other)


class Value:
    """The result of an instruction: `lanes` entries of a dtype, or a scalar where `lanes` is zero.
    The operators are those of NumPy; a Python number takes the dtype of the other operand, and a
    scalar is spread over the lanes. `==` compares objects: use `eq`, and `ne`, which is true for
    NaN."""

    __slots__ = ("builder", "constant", "dtype", "factors", "lanes", "name")

    def __init__(self, builder: Builder, name: str, dtype: np.dtype, lanes: int):
        self.builder, self.name, self.dtype, self.lanes = builder, name, dtype, lanes
        # The number if this is a constant, and the factors if this is a product.
        self.constant: Any = None
        self.factors: tuple[Value, Value] | None = None

    @property
    def type(self) -> str:
        return type_of(self.dtype, self.lanes)

    @property
    def is_real(self) -> bool:
        return self.dtype in FLOATS

    @property
    def is_signed(self) -> bool:
        return self.dtype.kind == "i"

    def __str__(self) -> str:
        return f"{self.type} {self.name}"

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __truediv__ = _operator("binary", "fdiv")
    __rtruediv__ = _operator("binary", "fdiv", swapped=True)
    __and__, __or__ = _operator("binary", "and"), _operator("binary", "or")
    __xor__, __lshift__ = _operator("binary", "xor"), _operator("binary", "shl")
    __lt__, __le__ = _operator("compare", "lt"), _operator("compare", "le")
    __gt__, __ge__ = _operator("compare", "gt"), _operator("compare", "ge")
    eq, ne = _operator("compare", "eq"), _operator("compare", "ne")

    def __rshift__(self, other: Value | int) -> Value:
        """A shift to the right, which keeps the sign if the dtype is signed."""
        return self.builder.binary("ashr" if self.is_signed else "lshr", self, other)

    def __invert__(self) -> Value:
        return self ^ (True if self.dtype == BOOL else -1)

    def __neg__(self) -> Value:
        if not self.is_real:
            return 0 - self
        return self.builder.pure(f"fneg {self}", self.dtype, self.lanes)

    def __abs__(self) -> Value:
        return self.builder.abs(self)


class Variable:
    """A place for a value on the stack, which LLVM turns into registers."""

    def __init__(self, builder: Builder, dtype: np.dtype, lanes: int, value: Any = None):
        self.builder, self.dtype, self.lanes = builder, dtype, lanes
        self.place = builder.on_stack(type_of(dtype, lanes))
        if value is not None:
            self.set(value)

    def get(self) -> Value:
        type_ = type_of(self.dtype, self.lanes)
        return self.builder.value(f"load {type_}, ptr {self.place}", self.dtype, self.lanes)

    def set(self, value: Any) -> None:
        value = self.builder.as_value(value, self.dtype)
        if self.lanes and not value.lanes:
            value = self.builder.spread(value)
        assert (value.dtype, value.lanes) == (self.dtype, self.lanes), (value.type, self.dtype)
        self.builder.emit(f"store {value}, ptr {self.place}")

    def set_where(self, mask: Value, value: Any) -> None:
        self.set(self.builder.where(mask, value, self.get()))


class ElementPointer:
    """Memory with elements of a dtype; `base` is LLVM's name of the pointer to it.

    Booleans are bytes in memory.
    """

    def __init__(self, builder: Builder, base: str, dtype: np.dtype):
        self.builder, self.base, self.dtype = builder, base, dtype

    @property
    def _stored(self) -> np.dtype:
        return np.dtype(np.int8) if self.dtype == BOOL else self.dtype

    def pointer(self, index: Value | int) -> str:
        """A pointer to an element; a vector of pointers where the index has lanes."""
        b = self.builder
        index, place = b.as_value(index, I64), b.name()
        b.emit(f"{place} = getelementptr {type_of(self._stored)}, ptr {self.base}, {index}")
        return place

    def offset(self, index: Value | int) -> ElementPointer:
        """The buffer that begins at this element."""
        return ElementPointer(self.builder, self.pointer(index), self.dtype)

    def load(self, index: Value | int) -> Value:
        """Read one element."""
        b, type_ = self.builder, type_of(self._stored)
        return self._read(b.value(f"load {type_}, ptr {self.pointer(index)}", self._stored, 0))

    def store(self, index: Value | int, value: Value | float) -> None:
        """Write one element."""
        b = self.builder
        value = self._written(b.as_value(value, self.dtype))
        b.emit(f"store {value}, ptr {self.pointer(index)}")

    def load_lanes(self, index: Value | int) -> Value:
        """Read as many elements as there are lanes, from this index on."""
        b, stored, pointer = self.builder, self._stored, self.pointer(index)
        text = f"load {type_of(stored, b.lanes)}, ptr {pointer}, align {stored.itemsize}"
        return self._read(b.value(text, stored, b.lanes))

    def store_lanes(self, index: Value | int, value: Value) -> None:
        """Write as many elements as there are lanes, from this index on."""
        b = self.builder
        value = self._written(b.spread(b.as_value(value, self.dtype)))
        b.emit(f"store {value}, ptr {self.pointer(index)}, align {self._stored.itemsize}")

    def gather(self, index: Value, mask: Value, other: Any) -> Value:
        """Read the elements at these indices in the lanes of the mask; the others get `other`."""
        b, stored = self.builder, self._stored
        if not b.lanes:
            found = Variable(b, self.dtype, 0, other)
            b.if_(mask, lambda: found.set(self.load(index)))
            return found.get()
        other = self._written(b.spread(b.as_value(other, self.dtype)))
        pointers = self.pointer(b.spread(b.as_value(index, I64)))
        ptrs, type_ = f"<{b.lanes} x ptr>", type_of(stored, b.lanes)
        name = f"llvm.masked.gather.v{b.lanes}{suffix(stored)}.v{b.lanes}p0"
        masks = type_of(BOOL, b.lanes)
        b.module.declare(name, f"{type_} @{name}({ptrs}, i32, {masks}, {type_})")
        text = f"call {type_} @{name}({ptrs} {pointers}, i32 {stored.itemsize}, {mask}, {other})"
        return self._read(b.value(text, stored, b.lanes))

    def scatter(self, index: Value, mask: Value, value: Value | float) -> None:
        """Write the elements at these indices in the lanes of the mask."""
        b, stored = self.builder, self._stored
        if not b.lanes:
            b.if_(mask, lambda: self.store(index, value))
            return
        value = self._written(b.spread(b.as_value(value, self.dtype)))
        pointers = self.pointer(b.spread(b.as_value(index, I64)))
        ptrs, masks = f"<{b.lanes} x ptr>", type_of(BOOL, b.lanes)
        name = f"llvm.masked.scatter.v{b.lanes}{suffix(stored)}.v{b.lanes}p0"
        b.module.declare(name, f"void @{name}({value.type}, {ptrs}, i32, {masks})")
        b.emit(f"call void @{name}({value}, {ptrs} {pointers}, i32 {stored.itemsize}, {mask})")

    def _read(self, value: Value) -> Value:
        return value.ne(0) if self.dtype == BOOL else value

    def _written(self, value: Value) -> Value:
        return self.builder.cast(value, self._stored)


def suffix(dtype: np.dtype, lanes: int = 0) -> str:
    """The name of a type as a suffix of an intrinsic's name."""
    element = {F32: "f32", F64: "f64"}.get(dtype) or type_of(dtype)
    return f"v{lanes}{element}" if lanes else element
