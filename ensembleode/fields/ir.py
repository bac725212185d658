"""A small language of scalars, buffers and loops: what a field is lowered to, and printed from.

Every value is a scalar; an array is a part of a flat buffer in row-major order. Loop counters and
indices count from 0. Printers are one a language (see `engines/julia/source.py`).
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any, Literal, TypeAlias

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
    """An operation on scalars, named as JAX's primitive; `param` is its static argument."""

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
    """`offset + sum(stride * counter)`: where in a buffer."""

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
    """`size` elements of a group of numbers, from `start`.

    The groups: `u` the state and `tangent` one of it, `own` and `shared` the parameters of one
    trajectory and of all, `forward` the forward solution (in an adjoint), `work` scratch memory,
    `table` constants, `out` the result.
    """

    group: Literal["u", "tangent", "own", "shared", "forward", "work", "table", "out"]
    dtype: np.dtype
    start: int
    size: int


@dc.dataclass(frozen=True, slots=True)
class Let:
    """A new variable."""

    var: Var
    expr: Expr


@dc.dataclass(frozen=True, slots=True)
class Assign:
    """A new value for a variable."""

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
    """`test` is run, then `body` as long as `condition` holds, and so on."""

    test: tuple[Stmt, ...]
    condition: Expr
    body: tuple[Stmt, ...]


@dc.dataclass(frozen=True, slots=True)
class Switch:
    """The statements of the case with the number `which`, counted from 0."""

    which: Expr
    cases: tuple[tuple[Stmt, ...], ...]


@dc.dataclass(frozen=True, slots=True)
class Matrix:
    """A buffer as a matrix `[rows, columns]`; `transposed`: it lies in memory by columns."""

    buffer: Buffer
    rows: int
    columns: int
    transposed: bool


@dc.dataclass(frozen=True, slots=True)
class Product:
    """`out = x @ y`, matrices."""

    out: Matrix
    x: Matrix
    y: Matrix


Stmt: TypeAlias = Let | Assign | Store | For | While | Switch | Product


@dc.dataclass(frozen=True)
class Function:
    """A vector field, or another function of a state, parameters and the time.

    - `body`: the statements.
    - `outputs`: the components of the result as expressions; empty where the body stores them.
    - `size`: how many there are.
    - `dtype`: their dtype.
    - `work`: how many elements of scratch memory it needs, by dtype.
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
        """Whether it needs no memory: only variables, of which its results are some."""
        return bool(self.outputs) or not self.size
