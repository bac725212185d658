"""Rules for the factorisations of matrices, and for linear systems.

Each is a loop whose turns change a whole matrix, except where a mask is false. Where the loop is
unrolled into scalars, the masks are known, so excluded entries are never computed. All numbers are
real, so nothing is conjugated.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from .. import tuning
from ..equations import of_each
from .writing import rule


def _turns(n: int, turn: Callable, state: PyTree) -> PyTree:
    """The state after `state = turn(k, state)` for each number below `n`."""
    if n > tuning.MOST_TURNS_WRITTEN_OUT:
        return lax.fori_loop(0, n, turn, state)
    for k in range(n):
        state = turn(k, state)
    return state


def _rule_of_each(name: str, axes: int = 2) -> Callable[[Callable], Callable]:
    """A decorator that makes a function of one matrix the rule of a primitive of arrays of
    matrices. The first operand has this number of `axes` for each matrix."""

    def entered(fn: Callable) -> Callable:
        @rule(name, apart=True)
        def _(eqn: JaxprEqn, x: Array, *others: Any) -> list:
            found = of_each(fn, x.ndim - axes)(x, *others)
            return list(found) if isinstance(found, tuple) else [found]

        return fn

    return entered


def _row(x: Any, k: Any, axis: int = 0) -> Any:
    index = lax.index_in_dim if isinstance(k, int) else lax.dynamic_index_in_dim
    return index(x, k, axis, keepdims=False)


def _column(x: Any, k: Any) -> Any:
    return _row(x, k, axis=1)


def _numbers(n: int) -> Array:
    return lax.iota(np.int64, n)


def _absent(dtype: DTypeLike) -> Array:
    """A zero that stands for an absent entry: where a program is taken apart into scalars, it
    causes no operations (see `scalarising/scalars.py`)."""
    return lax.convert_element_type(lax.full((), np.False_), dtype)


@_rule_of_each("lu")
def _lu(a: Array) -> tuple:
    """L and U in one matrix; for each row, the row that it was exchanged with; and the final
    order."""
    m, n = a.shape
    rows, columns = _numbers(m), _numbers(n)

    def turn(k: Any, state: tuple) -> tuple:
        a, exchanged, order = state
        column = _column(a, k)
        best = _largest(lax.abs(column), rows, k)
        pivots, others = _row_from(a, best, k), _row(a, k)
        pivot = _row(pivots, k)
        factors = jnp.where(rows == best, _row(column, k), column)
        factors = factors / jnp.where(pivot == 0, 1, pivot)
        # (One expression, so that the matrix is read and written once.)
        a = jnp.where((rows == best)[:, None], others, a)
        inside = (rows > k)[:, None] & (columns > k)
        a = a - jnp.where(inside, factors[:, None] * pivots, 0)
        a = jnp.where((rows > k)[:, None] & (columns == k), factors[:, None], a)
        a = jnp.where((rows == k)[:, None], pivots, a)
        first, other = _row_from(order, best, k), _row(order, k)
        order = jnp.where(rows == best, other, order)
        order = jnp.where(rows == k, first, order)
        return a, jnp.where(_numbers(min(m, n)) == k, best, exchanged), order

    start = a, lax.full((min(m, n),), np.int64(0)), rows
    a, exchanged, order = _turns(min(m, n), turn, start)
    return a, exchanged.astype(np.int32), order.astype(np.int32)


def _largest(x: Array, rows: Array, k: Any) -> Array:
    """The number of the largest component from number `k` on, the first of equal ones."""
    if not isinstance(k, int):
        x = jnp.where(rows < k, -1, x)
        wins = (x == jnp.max(x)) | (x != x)
        return jnp.min(jnp.where(wins, rows, x.size - 1))
    best, largest = lax.full((), np.int64(k)), x[k]
    for i in range(k + 1, x.size):
        wins = x[i] > largest
        best, largest = jnp.where(wins, i, best), jnp.where(wins, x[i], largest)
    return best


def _row_from(x: Array, i: Array, first: ArrayLike) -> Array:
    """Row number `i`, which is `first` at least; a choice where `first` is known."""
    if not isinstance(first, int):
        return _row(x, i)
    found = _row(x, first)
    for j in range(first + 1, x.shape[0]):
        found = jnp.where(i == j, _row(x, j), found)
    return found


@rule("lu_pivots_to_permutation", apart=True)
def _lu_pivots_to_permutation(eqn: JaxprEqn, exchanged: Array) -> list:
    rows = _numbers(eqn.params["permutation_size"])

    def of_one(exchanged: Array) -> Array:
        def turn(k: Any, order: Array) -> Array:
            other = _row(exchanged, k).astype(rows.dtype)
            # (Pivots of the user's own may also name earlier rows.)
            first = _row(order, k)
            second = _row_from(order, other, 0 if isinstance(k, int) else k)
            order = jnp.where(rows == other, first, order)
            return jnp.where(rows == k, second, order)

        return _turns(exchanged.shape[0], turn, rows).astype(np.int32)

    return [of_each(of_one, exchanged.ndim - 1)(exchanged)]


@rule("triangular_solve", apart=True)
def _triangular_solve(eqn: JaxprEqn, a: Array, b: Array) -> list:
    params = eqn.params
    transposed, lower = params["transpose_a"], params["lower"]
    if not params["left_side"]:  # x a = b, so that a' x' = b'
        b, transposed = jnp.swapaxes(b, -1, -2), not transposed

    def solve(a: Array, b: Array) -> Array:
        return _triangular(a, b, transposed, lower != transposed, params["unit_diagonal"])

    x = of_each(solve, a.ndim - 2)(a, b)
    return [x if params["left_side"] else jnp.swapaxes(x, -1, -2)]


def _triangular(a: Array, b: Array, transposed: bool, forwards: bool, has_ones: bool) -> Array:
    """The solution `[n, column]` for one triangular matrix, from its first row or from its last."""
    n = a.shape[0]
    rows = _numbers(n)

    def turn(k: Any, x: Array) -> Array:
        i = k if forwards else n - 1 - k
        coefficients = _row(a, i) if transposed else _column(a, i)
        found = _row(x, i)
        found = found if has_ones else found / _row(coefficients, i)
        left = rows > i if forwards else rows < i
        others = x - jnp.where(left[:, None], coefficients[:, None] * found, 0)
        return jnp.where((rows == i)[:, None], found, others)

    return _turns(n, turn, b)


@_rule_of_each("tridiagonal_solve", axes=1)
def _tridiagonal_solve(below: Array, diagonal: Array, above: Array, b: Array) -> Array:
    """The solution `[n, column]` of one system. Neighbouring rows are exchanged where that makes
    the pivot larger. (Anderson et al., LAPACK Users' Guide, 1999: `gtsv`.)"""
    zero = lax.full((), diagonal.dtype.type(0))
    above = lax.concatenate([above[:-1], zero[None]], 0)  # (the last is not to be read)

    def eliminate(kept: tuple, row: tuple) -> tuple:
        (d, up, x), (low, next_d, next_up, next_x) = kept, row
        swaps = jnp.abs(low) > jnp.abs(d)
        pivot = jnp.where(swaps, low, d)
        first = jnp.where(swaps, next_d, up), jnp.where(swaps, next_up, zero)
        at_pivot = jnp.where(swaps, next_x, x)
        factor = jnp.where(swaps, d, low) / pivot
        kept = (
            jnp.where(swaps, up, next_d) - factor * first[0],
            jnp.where(swaps, zero, next_up) - factor * first[1],
            jnp.where(swaps, x, next_x) - factor * at_pivot,
        )
        return kept, (pivot, *first, at_pivot)

    start = diagonal[0], above[0], b[0]
    (last, _, x), rows = lax.scan(eliminate, start, (below[1:], diagonal[1:], above[1:], b[1:]))

    def substitute(after: tuple, row: tuple) -> tuple:
        pivot, first, second, x = row
        x = (x - first * after[0] - second * after[1]) / pivot
        return (x, after[0]), x

    x = x / last
    _, others = lax.scan(substitute, (x, lax.full_like(x, 0)), rows, reverse=True)
    is_regular = jnp.all(rows[0] != 0) & (last != 0)
    found = lax.concatenate([others, x[None]], 0)
    return jnp.where(is_regular, found, np.nan)


@_rule_of_each("cholesky")
def _cholesky(a: Array) -> Array:
    """The lower triangle; NaN where the matrix isn't positive definite."""
    n = a.shape[0]
    rows = _numbers(n)
    lower = rows[:, None] >= rows

    def turn(k: Any, state: tuple) -> tuple:
        a, is_positive = state
        column = _column(a, k)
        pivot = _row(column, k)
        root = jnp.sqrt(pivot)
        column = jnp.where(rows == k, root, column / root)
        a = a - jnp.where(lower & (rows > k), column[:, None] * column, 0)
        a = jnp.where((rows >= k)[:, None] & (rows == k), column[:, None], a)
        return a, is_positive & (pivot > 0)

    a, is_positive = _turns(n, turn, (a, lax.full((), np.True_)))
    return jnp.where(is_positive, jnp.where(lower, a, 0), np.nan)


@_rule_of_each("geqrf")
def _reflections(a: Array) -> tuple:
    """R, with the vectors of Householder's reflections below of it; and their factors."""
    m, n = a.shape
    rows, columns, numbers = _numbers(m), _numbers(n), _numbers(min(m, n))

    def turn(k: Any, state: tuple) -> tuple:
        a, factors = state
        column = _column(a, k)
        first = _row(column, k)
        tail = jnp.where(rows > k, column, _absent(a.dtype))
        squares = jnp.sum(tail * tail)
        norm = jnp.sqrt(first * first + squares)
        is_zero = squares == 0  # there is nothing to reflect
        corner = jnp.where(is_zero, first, jnp.where(first < 0, norm, -norm))
        factor = jnp.where(is_zero, 0, (corner - first) / jnp.where(is_zero, 1, corner))
        tail = tail / jnp.where(is_zero, 1, first - corner)
        v = jnp.where(rows == k, 1, tail)
        below = (rows >= k)[:, None]
        a = a - jnp.where(below & (columns > k), factor * v[:, None] * (v @ a), 0)
        a = jnp.where(below & (columns == k), jnp.where(rows == k, corner, tail)[:, None], a)
        return a, jnp.where(numbers == k, factor, factors)

    return _turns(min(m, n), turn, (a, lax.full((min(m, n),), a.dtype.type(0))))


def _reflected(a: Array, factors: Array, x: Array, backwards: bool) -> Array:
    """The rows of `x`, reflected by all of the reflections, from the first or from the last on."""
    rows, n = _numbers(a.shape[0]), factors.shape[0]

    def turn(k: Any, x: Array) -> Array:
        i = n - 1 - k if backwards else k
        v = jnp.where(rows > i, _column(a, i), _absent(a.dtype))
        v = jnp.where(rows == i, 1, v)
        return x - jnp.where((rows >= i)[:, None], _row(factors, i) * v[:, None] * (v @ x), 0)

    return _turns(n, turn, x)


@_rule_of_each("householder_product")
def _product(a: Array, factors: Array) -> Array:
    """The first columns of the product of all reflections."""
    m, n = a.shape
    identity = _numbers(m)[:, None] == _numbers(n)
    return _reflected(a, factors, identity.astype(a.dtype), True)


@rule("ormqr", apart=True)
def _ormqr(eqn: JaxprEqn, a: Array, factors: Array, x: Array) -> list:
    left, transposed = eqn.params["left"], eqn.params["transpose"]

    def product(a: Array, factors: Array, x: Array) -> Array:
        if left:
            return _reflected(a, factors, x, not transposed)
        return _reflected(a, factors, x.T, transposed).T

    return [of_each(product, a.ndim - 2)(a, factors, x)]


@rule("qr", apart=True)
def _qr(eqn: JaxprEqn, x: Array) -> list:
    has_all = eqn.params["full_matrices"]

    def of_matrix(a: Array) -> tuple:
        m, n = a.shape
        r, factors = _reflections(a)
        vectors = r[:, :m]
        if has_all and m > n:
            vectors = lax.pad(r, r.dtype.type(0), [(0, 0, 0), (0, m - n, 0)])
        q = _product(vectors, factors)
        r = r[: q.shape[1]]
        return q, jnp.where(_numbers(r.shape[0])[:, None] <= _numbers(n), r, 0)

    return list(of_each(of_matrix, x.ndim - 2)(x))
