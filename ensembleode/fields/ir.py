"""A small language of scalars, buffers and loops, to which fields are lowered.

Every value is a scalar; an array is a part of a flat buffer in row-major order. Loop counters and
indices count from 0. Each target language has one printer (see `engines/julia/source.py`).
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any, TypeAlias

import numpy as np


@dc.dataclass(frozen=True, slots=True)
class Const:
    """A number."""

    value: Any  # a NumPy scalar

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype


@dc.dataclass(frozen=True, slots=True)
class Var:
    """A local variable, or a loop counter."""

    name: str
    dtype: np.dtype


@dc.dataclass(frozen=True, slots=True)
class Op:
    """An operation on scalars, which has the name of JAX's primitive; `param` is its static
    argument."""

    name: str
    args: tuple[Expr, ...]
    dtype: np.dtype
    param: Any = None


@dc.dataclass(frozen=True, slots=True)
class Load:
    """An element of a buffer."""

    buffer: Buffer
    index: Index

    @property
    def dtype(self) -> np.dtype:
        return self.buffer.dtype


Expr: TypeAlias = Const | Var | Op | Load


@dc.dataclass(frozen=True, slots=True)
class Index:
    """An index into a buffer, `offset + sum(stride * counter)`."""

    offset: int = 0
    terms: tuple[tuple[Expr, int], ...] = ()

    def shifted(self, offset: int, stride: int = 1) -> Index:
        """`offset + stride * self`."""
        terms = tuple((e, s * stride) for e, s in self.terms if s * stride)
        return Index(offset + stride * self.offset, terms)

    def plus(self, *terms: tuple[Expr, int]) -> Index:
        offset, added = self.offset, []
        for expr, stride in terms:
            if isinstance(expr, Const):
                offset += int(expr.value) * stride
            elif stride:
                added.append((expr, stride))
        return Index(offset, (*self.terms, *added))


@dc.dataclass(frozen=True, slots=True)
class Buffer:
    """`size` elements of a group of numbers, from `start` on.

    The groups are `u`, the state; `tangent`, a tangent of the state; `own` and `shared`, the
    parameters that each trajectory has of its own and those that all share; `forward`, the forward
    solution (in an adjoint); `work`, scratch memory; `table`, constants; `out`, the result; and the
    further inputs of callbacks, by the names of `plan.events.CallbackProgram.extras`.
    """

    group: str
    dtype: np.dtype
    start: int
    size: int


@dc.dataclass(frozen=True, slots=True)
class Let:
    """The declaration of a variable."""

    var: Var
    expr: Expr


@dc.dataclass(frozen=True, slots=True)
class Assign:
    """An assignment to a variable."""

    var: Var
    expr: Expr


@dc.dataclass(frozen=True, slots=True)
class Store:
    buffer: Buffer
    index: Index
    expr: Expr


@dc.dataclass(frozen=True, slots=True)
class For:
    var: Var
    n: int
    body: tuple[Stmt, ...]


@dc.dataclass(frozen=True, slots=True)
class While:
    """A loop: runs `test`, then `body` if `condition` holds, and repeats both until it doesn't
    hold."""

    test: tuple[Stmt, ...]
    condition: Expr
    body: tuple[Stmt, ...]


@dc.dataclass(frozen=True, slots=True)
class Switch:
    """Runs the statements of case number `which`, counted from 0."""

    which: Expr
    cases: tuple[tuple[Stmt, ...], ...]


@dc.dataclass(frozen=True, slots=True)
class Matrix:
    """A buffer as a matrix `[rows, columns]`; `transposed` says that it is stored column by
    column."""

    buffer: Buffer
    rows: int
    columns: int
    transposed: bool

    @property
    def strides(self) -> tuple[int, int]:
        """The distances in the buffer from row to row, and from column to column."""
        return (1, self.rows) if self.transposed else (self.columns, 1)

    @property
    def swapped(self) -> Matrix:
        """The transposed matrix."""
        return Matrix(self.buffer, self.columns, self.rows, not self.transposed)


@dc.dataclass(frozen=True, slots=True)
class Product:
    """The matrix product `out = x @ y`."""

    out: Matrix
    x: Matrix
    y: Matrix


Stmt: TypeAlias = Let | Assign | Store | For | While | Switch | Product


@dc.dataclass(frozen=True)
class Function:
    """A vector field, or another function of a state, parameters and the time.

    - `body`: the statements.
    - `outputs`: the components of the result as expressions; empty where the body stores them.
    - `size`: the number of components of the result.
    - `dtype`: the dtype of the result.
    - `work`: for each dtype, how many elements of scratch memory the function needs.
    - `tables`: the constants of the group `table`, one after the other.
    """

    body: tuple[Stmt, ...]
    outputs: tuple[Expr, ...]
    size: int
    dtype: np.dtype
    work: tuple[tuple[np.dtype, int], ...]
    tables: tuple[int, ...]

    @property
    def is_scalar(self) -> bool:
        """Whether the function needs no memory: its results are expressions in variables alone."""
        return bool(self.outputs) or not self.size
