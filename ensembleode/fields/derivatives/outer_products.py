"""Cotangents of parameters as sums of outer products, taken out of the program that computes them.

The cotangent of a weight matrix that is multiplied by a vector is the outer product of two vectors,
which have far fewer numbers than the matrix. Here, a program returns the vectors, and its caller
adds up the products of many evaluations at once. In the same way, the cotangent of a table that is
looked up at an index is zero but for that entry, so only the entry and its index are returned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from ...ground.recursion import Call, result_of, results_of
from ...tracing.program import structs_of, with_constants
from ..gather_scatter import padded, Windows
from ..movements import MOVEMENTS
from ..products import layouts
from ..scalarise import inlined


class MatrixPlaces(NamedTuple):
    """The places `start + i * first + j * second` of a matrix in row-major memory."""

    start: int
    first: int
    second: int = 0


class OuterProductTerm(NamedTuple):
    """A summand of the cotangents: `to[i, j] += sum_c left[i, c] * right[c, j]`, where `rows`,
    `columns` and `inner` are the numbers of `i`, `j` and `c`. Without `right` it is
    `to[i, 0] += left[i, 0]`.

    - `to`: places among all the parameters that were taken out, one after the other.
    - `left`, `right`: places among the numbers that the program returns instead.
    """

    rows: int
    columns: int
    inner: int
    to: MatrixPlaces
    left: MatrixPlaces
    right: MatrixPlaces | None = None

    def side_by_side(self) -> OuterProductTerm:
        """The same sums, where rows and columns are exchanged if columns don't lie side by side."""
        if self.right is None or self.to.second == 1:
            return self
        swapped = (
            MatrixPlaces(x.start, x.second, x.first) for x in (self.to, self.left, self.right)
        )
        to, left, right = swapped
        return self._replace(rows=self.columns, columns=self.rows, to=to, left=right, right=left)


class ScatteredTerm(NamedTuple):
    """A summand of the cotangents: `to[number[i], 0] += left[i, 0]`, where `rows` is the number of
    `i`.

    - `to`, `left`: see `OuterProductTerm`.
    - `number`: places among the numbers that the program returns; those hold the indices as whole
        numbers.
    """

    rows: int
    to: MatrixPlaces
    left: MatrixPlaces
    number: MatrixPlaces


class FactoredProgram(NamedTuple):
    """A program that returns factors in place of the cotangents of some parameters: `size` numbers
    at the end of its results, which are the factors of `terms` and of the terms that are
    `scattered`."""

    jaxpr: jex.Jaxpr
    terms: tuple[OuterProductTerm, ...]
    scattered: tuple[ScatteredTerm, ...]
    size: int


def taken_out(jaxpr: jex.Jaxpr, kept: int) -> FactoredProgram:
    """Replace all but the first `kept` numbers of a program's result, which is a concatenation, by
    their factors."""
    inner: Any = inlined(jaxpr)
    (out,) = inner.outvars
    made_by: dict = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    joined = made_by[out].invars if made_by[out].primitive.name == "concatenate" else [out]
    remaining: list = []
    found = _Terms(made_by)
    start = 0
    for v in joined:
        size = math.prod(v.aval.shape)
        if start < kept:
            assert start + size <= kept, (start, size, kept)
            remaining.append(v)
        elif size:
            found.add(v, start - kept + np.arange(size).reshape(v.aval.shape))
        start += size
    arrays = list(found.arrays)
    changed = inner.replace(eqns=[*inner.eqns, *found.eqns], outvars=[*remaining, *arrays])
    jaxpr = with_constants(changed, inner.constvars, inner.invars)
    return FactoredProgram(jaxpr, tuple(found.terms), tuple(found.scattered), found.size)


class _Terms:
    """Collects the terms of cotangents, the `arrays` that hold their factors, and further equations
    that compute some of these arrays."""

    def __init__(self, made_by: dict):
        self._made_by = made_by
        self.arrays: dict[Any, int] = {}
        self.size = 0
        self.terms: list[OuterProductTerm] = []
        self.scattered: list[ScatteredTerm] = []
        self.eqns: list = []

    def add(self, v: Any, to: np.ndarray) -> None:
        """Add the cotangent `v`, whose components belong at the places `to`."""
        if not result_of(self._split(v, to)):
            assert self._whole(v, to)

    def _start(self, v: Any) -> int:
        """Where the components of this array begin among the results."""
        if v not in self.arrays:
            self.arrays[v] = self.size
            self.size += math.prod(v.aval.shape)
        return self.arrays[v]

    def _maker(self, v: Any) -> Any:
        """The equation that computes this array from arrays of the same dtype; None if there is
        none."""
        eqn: Any = None if isinstance(v, jex.Literal) else self._made_by.get(v)
        if eqn is None or any(x.aval.dtype != eqn.outvars[0].aval.dtype for x in eqn.invars):
            return None
        return eqn

    def _split(self, v: Any, to: np.ndarray) -> Call[bool]:
        """Add a cotangent as the products and looked up entries that it is the sum of; False if it
        is no such sum."""
        if self._looked_up(v, to):
            return True
        eqn = self._maker(v)
        if eqn is None:
            return False
        name = eqn.primitive.name
        if name in _MOVES:
            return (yield self._split(*_before(eqn, to)))
        if name == "broadcast_in_dim":
            return self._is_zero(v)
        if name == "pad":
            return (yield self._padded(eqn, to))
        if name in ("add", "add_any") and all(x.aval.shape == to.shape for x in eqn.invars):
            before = dict(self.arrays), self.size, list(self.terms), list(self.scattered)
            are_split = yield results_of(self._split(x, to) for x in eqn.invars)
            others = [x for x, done in zip(eqn.invars, are_split, strict=True) if not done]
            if any(are_split) and all(self._whole(x, to) for x in others):
                return True
            self.arrays, self.size, self.terms, self.scattered = before
            return False
        return name == "dot_general" and self._product(eqn, to)

    def _is_zero(self, v: Any) -> bool:
        """Whether this is an array of zeros."""
        eqn = None if isinstance(v, jex.Literal) else self._made_by.get(v)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        return isinstance(eqn.invars[0], jex.Literal) and not np.any(eqn.invars[0].val)

    def _looked_up(self, v: Any, to: np.ndarray) -> bool:
        """Add a cotangent that is zero but for a few numbers at computed indices."""
        eqn: Any = None if isinstance(v, jex.Literal) else self._made_by.get(v)
        if eqn is None or eqn.primitive.name not in ("dynamic_update_slice", "scatter-add"):
            return False
        aval, places = eqn.outvars[0].aval, _affine(to.reshape(-1, 1))
        # (The numbers of components have to be whole numbers of the dtype.)
        is_large = to.size > 1 / jnp.finfo(aval.dtype).eps
        is_unsigned = any(x.aval.dtype.kind == "u" for x in eqn.invars)
        if places is None or is_large or is_unsigned or not self._is_zero(eqn.invars[0]):
            return False
        update, number = self._append(_entries, eqn)
        rows = math.prod(update.aval.shape)
        if 2 * rows > to.size or any(isinstance(x, jex.Literal) for x in (update, number)):
            return False
        left, number = (MatrixPlaces(self._start(x), 1) for x in (update, number))
        self.scattered.append(ScatteredTerm(rows, places, left, number))
        return True

    def _padded(self, eqn: Any, to: np.ndarray) -> Call[bool]:
        """Add a cotangent that is zero but for a few numbers at known indices."""
        x, value = eqn.invars
        _, numbers = padded(np, x.aval.shape, eqn.params["padding_config"])
        is_zero = isinstance(value, jex.Literal) and not value.val
        if not is_zero or numbers.shape != x.aval.shape or 2 * numbers.size > to.size:
            return False
        inside = to.reshape(-1)[numbers]
        return (yield self._split(x, inside)) or self._whole(x, inside)

    def _append(self, fn: Callable, eqn: JaxprEqn) -> list:
        """Append the equations of `fn(eqn, *operands)`, with the operands of `eqn`; returns the
        results."""
        closed = jax.make_jaxpr(functools.partial(fn, eqn))(*structs_of(eqn.invars))
        assert not closed.consts
        inner: Any = inlined(closed.jaxpr)
        known = dict(zip(inner.invars, eqn.invars, strict=True))

        def renamed(x: Any) -> Any:
            return x if isinstance(x, jex.Literal) else known.get(x, x)

        self.eqns += [x.replace(invars=list(map(renamed, x.invars))) for x in inner.eqns]
        return list(map(renamed, inner.outvars))

    def _whole(self, v: Any, to: np.ndarray) -> bool:
        """Add a cotangent as it is; False if its components don't go to places at equal
        distances."""
        moved = [(v, to)]
        while (eqn := self._maker(v)) is not None and eqn.primitive.name in _MOVES:
            v, to = _before(eqn, to)
            moved.append((v, to))
        for v, to in reversed(moved):
            places = _affine(to.reshape(-1, 1))
            if places is not None and not isinstance(v, jex.Literal):
                self.terms.append(
                    OuterProductTerm(to.size, 1, 1, places, MatrixPlaces(self._start(v), 1))
                )
                return True
        return False

    def _product(self, eqn: Any, to: np.ndarray) -> bool:
        """Add a cotangent that is a product of matrices with fewer numbers than it has."""
        x, y = eqn.invars
        left, right = layouts(eqn, x.aval.shape, y.aval.shape)
        batch, rows, inner = left.shape
        columns = right.shape[1]
        if batch != 1 or (rows + columns) * inner > rows * columns:
            return False
        places = [_affine(m) for m in (to.reshape(rows, columns), left[0], right[0].T)]
        if None in places:
            return False
        at, of_left, of_right = (p for p in places if p is not None)
        of_left = of_left._replace(start=of_left.start + self._start(x))
        of_right = of_right._replace(start=of_right.start + self._start(y))
        self.terms.append(OuterProductTerm(rows, columns, inner, at, of_left, of_right))
        return True


def _entries(eqn: JaxprEqn, x: Array, *operands: Any) -> tuple[Array, Array]:
    """The numbers that an equation adds to an array of zeros, and the numbers of the components to
    which it adds them."""
    if eqn.primitive.name == "dynamic_update_slice":
        update, *columns = operands
        windows = Windows.whole_array(x.shape, update.shape)
    else:
        indices, update = operands
        windows = Windows.of_scatter(eqn)
        columns = list(jnp.moveaxis(indices, -1, 0))
    wide = any(c.dtype.itemsize == 8 for c in columns)
    numbers, inside = windows.numbers(jnp, columns, np.int64 if wide else np.int32)
    if inside is not None:
        update = lax.select(inside, update, lax.full_like(update, 0))
    return update, lax.convert_element_type(numbers, update.dtype)


_MOVES = ("reshape", "squeeze", "transpose")


def _before(eqn: Any, to: np.ndarray) -> tuple[Any, np.ndarray]:
    """The operand of an equation that moves components, and where its components go."""
    (x,) = eqn.invars
    numbers = np.arange(to.size).reshape(x.aval.shape)
    (moved,) = MOVEMENTS[eqn.primitive.name](np, [numbers], eqn.params, ())
    back = np.empty(to.size, to.dtype)
    back[np.asarray(moved).reshape(-1)] = to.reshape(-1)
    return x, back.reshape(x.aval.shape)


def _affine(numbers: np.ndarray) -> MatrixPlaces | None:
    """These numbers as places of a matrix; None if they are not at equal distances."""
    rows, columns = numbers.shape
    start = int(numbers[0, 0])
    first = int(numbers[1, 0]) - start if rows > 1 else 0
    second = int(numbers[0, 1]) - start if columns > 1 else 0
    i, j = np.indices(numbers.shape)
    same = np.array_equal(numbers, start + first * i + second * j)
    return MatrixPlaces(start, first, second) if same else None
