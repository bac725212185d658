"""Factorisations, and systems of linear equations, compared with LAPACK; and their derivatives."""

import itertools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.lax import linalg

from ensembleode.fields import choices

from ..marks import slow_unless
from .drawn import reals
from .lowered import agree, Lowered
from .test_primitives import agree_on


SIZES = [slow_unless(n in (3, 5), n) for n in (1, 2, 3, 4, 5, 6, 9)]
sizes = pytest.mark.parametrize("n", SIZES)
quick = settings(max_examples=10, deadline=None, derandomize=True, database=None)


def square(n, *batch):
    """Whose rows have to be exchanged, if there is more than one."""
    return reals(*batch, n, n) + 2 * np.roll(np.eye(n), 1, 0)


def positive(a):
    product = a @ jnp.swapaxes(a, -1, -2)
    return product + jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def band(x):
    """The three diagonals of a matrix, from a vector."""
    return jnp.sin(x), 0.3 * x, jnp.cos(x)


OF_MATRICES = {
    "solve": lambda a: jnp.linalg.solve(a, a[0]),
    "several": lambda a: jnp.linalg.solve(a, a[:, :1] * jnp.ones((1, 3))),
    "inverse": jnp.linalg.inv,
    "determinant": jnp.linalg.det,
    "logarithm": lambda a: jnp.linalg.slogdet(a)[1],
    "lu": lambda a: linalg.lu(a)[0],
    "transposed": lambda a: jsl.lu_solve(jsl.lu_factor(a), a[0], trans=1),
    "cholesky": lambda a: jnp.linalg.cholesky(positive(a)),
    "by cholesky": lambda a: jsl.cho_solve(jsl.cho_factor(positive(a)), a[0]),
    "qr": lambda a: jnp.concatenate(jnp.linalg.qr(a), -2),
    "triangle": lambda a: jsl.solve_triangular(a + 3 * jnp.eye(len(a)), a[0], lower=True),
    "tridiagonal": lambda a: linalg.tridiagonal_solve(*band(a[0]), a[:, :2]),
    "exponential": lambda a: jsl.expm(a / 4),
    "symmetric": lambda a: jsl.solve(positive(a), a[0], assume_a="pos"),
}


@pytest.mark.quick_cases(2)
@sizes
@pytest.mark.parametrize("name", OF_MATRICES)
def test_values(name, n):
    agree(lambda u, p, t: OF_MATRICES[name](u), square(n), rtol=1e-10)


FEW = [(name, n) for name in OF_MATRICES for n in (2, 3, 5) if (name, n) != ("exponential", 5)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), FEW)
def test_first_and_second_derivatives(name, n):
    a, fn = square(n), OF_MATRICES[name]
    along = np.cos(np.arange(n * n)).reshape(n, n)

    def weighted(u):
        y = fn(u)
        return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    agree(lambda u, p, t: jax.grad(weighted)(u), a, rtol=1e-8)
    agree(lambda u, p, t: jax.jvp(fn, (u,), (p,))[1], a, along, rtol=1e-8)
    agree(lambda u, p, t: jax.jvp(jax.grad(weighted), (u,), (p,))[1], a, along, rtol=1e-7)


@pytest.mark.parametrize("n", [3, slow_unless(False, 6)])
def test_single_precision(n):
    for fn in (OF_MATRICES[name] for name in ("solve", "cholesky", "qr", "tridiagonal")):
        a = square(n).astype(np.float32)
        agree(lambda u, p, t, fn=fn: fn(u), a, t=np.float32(0), rtol=1e-4, storage=np.float32)


FLAGS = list(itertools.product((False, True), repeat=5))


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS)
def test_triangular_systems(flags):
    left, lower, transposed, conjugated, has_ones = flags
    options = {"left_side": left, "lower": lower, "transpose_a": transposed}
    options |= {"conjugate_a": conjugated, "unit_diagonal": has_ones}

    def solve(a, b):
        return linalg.triangular_solve(a, b, **options)

    for n, batch in ((1, ()), (3, ()), (6, (2,)), (2, (2, 3))):
        a, b = reals(*batch, n, n) + 3 * np.eye(n), reals(*batch, *((n, 2) if left else (2, n)))
        # (What is not to be read may be anything.)
        outside = np.triu(np.ones((n, n)), 1) if lower else np.tril(np.ones((n, n)), -1)
        agree_on(solve, np.where(outside, np.nan, a), b)
    a, b = reals(3, 3) + 3 * np.eye(3), reals(*((3, 2) if left else (2, 3)))
    agree_on(lambda a, b: jax.grad(lambda *x: jnp.sum(jnp.sin(solve(*x))), (0, 1))(a, b), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_several_at_once(shape):
    a, b = square(3, *shape), reals(*shape, 3, 2)
    for fn in (
        lambda a, b: linalg.lu(a),
        lambda a, b: jnp.linalg.solve(a, b),
        lambda a, b: jnp.linalg.cholesky(positive(a)),
        lambda a, b: jnp.linalg.qr(b),
        lambda a, b: linalg.tridiagonal_solve(*(band(b[..., 0])), b),
        lambda a, b: jnp.linalg.det(jnp.concatenate([a, a], -1)[..., :3]),
    ):
        agree_on(fn, a, b)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), *((1, 4), (4, 1), (7, 2), (2, 7))])
def test_matrices_that_are_not_square(shape):
    a = reals(*shape)
    agree_on(linalg.lu, a)
    for full in (False, True):
        agree_on(lambda a, full=full: linalg.qr(a, full_matrices=full), a)
    agree_on(lambda a: jnp.linalg.qr(a, mode="raw"), a)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_products_with_reflections(left, transposed):
    a, c = reals(5, 3), reals(5, 2) if left else reals(2, 5)

    def product(a, c):
        vectors, factors = jnp.linalg.qr(a, mode="raw")
        return linalg.ormqr(vectors.T, factors, c, left=left, transpose=transposed)

    agree_on(product, a, c)


@pytest.mark.slow
def test_equal_pivots_and_zeros():
    """The first of equal pivots is taken; of zeros, a column is left as it is."""
    for a in (
        np.array([[1.0, 2], [-1, 1]]),
        np.array([[0.0, 1, 2], [0, 3, 1], [0, 0, 0]]),
        np.ones((3, 3)),
        np.zeros((5, 5)),
        np.diag([2.0, 0, 1, 0, 3]),
    ):
        agree_on(linalg.lu, a)
    agree_on(linalg.qr, np.diag([2.0, 0, -1]))
    agree_on(linalg.qr, np.eye(6)[:, ::-1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [2, 5])
def test_what_has_no_solution(n):
    """Not a number, or infinite."""
    singular, b = np.ones((n, n)), reals(n)
    for fn, a in (
        (lambda a: jnp.linalg.solve(a, b), singular),
        (lambda a: jsl.solve_triangular(a, b), np.triu(singular, 1)),
        (jnp.linalg.cholesky, singular - 2 * np.eye(n)),
        (jnp.linalg.cholesky, np.full((n, n), np.nan)),
        (lambda a: linalg.tridiagonal_solve(0 * a[0], 0 * a[0], a[0], b[:, None]), singular),
    ):
        for apart in (True, False):
            program = Lowered(lambda u, p, t, fn=fn: fn(u), a, apart=apart)
            assert not np.isfinite(program(a)).all()


@pytest.mark.slow
@quick
@given(st.integers(1, 6), st.integers(0, 2**31))
def test_neighbours_are_exchanged(n, seed):
    """Of tridiagonal systems without large numbers on the diagonal."""
    rng = np.random.default_rng(seed)
    below, diagonal, above = rng.normal(size=(3, n))
    diagonal = np.where(rng.random(n) < 0.5, 0.01 * diagonal, diagonal)
    b = rng.normal(size=(n, 2))
    matrix = np.diag(diagonal) + np.diag(below[1:], -1) + np.diag(above[:-1], 1)
    if np.linalg.cond(matrix) < 1e6:
        expected = np.linalg.solve(matrix, b)
        agree(
            lambda u, p, t: linalg.tridiagonal_solve(*p, u),
            b,
            (below, diagonal, above),
            expected=expected,
            rtol=1e-8,
        )


@pytest.mark.slow
def test_permutations():
    swaps = np.array([[2, 1, 2], [0, 2, 2]], np.int32)
    agree_on(lambda s: linalg.lu_pivots_to_permutation(s, 3), swaps, storage=np.int64)
    agree_on(lambda s: linalg.lu_pivots_to_permutation(s, 9), swaps, storage=np.int64)
    many = np.array([5, 3, 2, 5, 4, 5], np.int32)
    agree_on(lambda s: linalg.lu_pivots_to_permutation(s, 6), many, storage=np.int64)


@pytest.mark.slow
def test_loops_and_branches():
    """In which systems are solved."""

    def newton(u, p, t):
        step = lambda _, x: x - jnp.linalg.solve(jnp.diag(2 * x) + p, x**2 + p @ x - u)  # noqa: E731
        return lax.fori_loop(0, 3, step, u)

    agree(newton, np.array([1.0, 2.0]), np.array([[0.1, 0.2], [0.3, 0.1]]), rtol=1e-10)
    agree(
        lambda u, p, t: lax.cond(t > 0, lambda: jnp.linalg.solve(p, u), lambda: u),
        np.array([1.0, 2.0]),
        np.array([[0.1, 0.2], [0.3, 0.1]]),
        rtol=1e-10,
    )


@pytest.mark.slow
def test_small_matrices_need_no_memory():
    for n in (2, 3, 4):
        apart, _ = agree(lambda u, p, t: jnp.linalg.solve(p, u), reals(n), square(n), rtol=1e-9)
        assert apart.is_scalar


@pytest.mark.parametrize("name", ["MOST_ROWS", "MOST_SORTED"])
def test_what_is_chosen_or_moved(monkeypatch, name):
    """On both sides of the numbers that decide on it."""
    for most in (3, 2):
        monkeypatch.setattr(choices.tuning, name, most)
        apart, _ = agree(
            lambda u, p, t: OF_MATRICES["transposed"](p) + u, reals(3), square(3), rtol=1e-9
        )
        assert apart.is_scalar == (most == 3)
