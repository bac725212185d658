"""The structure of Jacobians, compared with dense Jacobians at many points."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

from ensembleode.fields.derivatives.sparsity import structure
from ensembleode.tracing.program import trace

from .cases import FIELDS as FIELDS_AS_WRITTEN
from .fields import FIELDS


rng = np.random.default_rng(0)


def found(fn, u, p=(), t=0.25, numbers=False):
    program, consts = trace(fn, jnp.asarray(u), p, t)
    return structure(program, consts if numbers else None)


def dense(fn, u, p=(), t=0.25, points=6, by=jax.jacfwd):
    """Where the Jacobian is not zero, at one of many points."""
    jacobian = jax.jit(by(lambda u: fn(u.reshape(np.shape(u)), p, t).reshape(-1)))
    points = [rng.normal(size=np.shape(u)) for _ in range(points)]
    found = [np.asarray(jacobian(x)).reshape(-1, np.size(u)) for x in points]
    return np.any([~(x == 0) for x in found], axis=0)


# Those of which no zero is one of the numbers alone.
EXACT = ("brusselator", "forced", "heat", "kuramoto", "lorenz", "lorenz96", "lotka_volterra")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    fn, u, p, fewer = FIELDS[name]
    u = u if fewer is None else fewer
    got, want = found(fn, u, p), dense(fn, u, p)
    assert got.shape == want.shape
    assert (got >= want).all()
    if name in (*EXACT, "pendulum", "robertson"):
        np.testing.assert_array_equal(got, want)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FIELDS_AS_WRITTEN)
def test_fields_as_users_write_them(name):
    fn, shape, p = FIELDS_AS_WRITTEN[name]
    p = jtu.tree_map(lambda x: jnp.asarray(x, np.float64), p)
    by = jax.jacrev if "reverse" in name else jax.jacfwd
    got, want = found(fn, np.zeros(shape), p), dense(fn, np.zeros(shape), p, by=by)
    assert got.shape == want.shape
    assert (got >= want).all()


N = 7
BAND = np.eye(N) - 2 * np.eye(N, k=1)
EYE, LATER = np.eye(N, dtype=bool), np.tri(N, dtype=bool)
BEFORE, AFTER = np.eye(N, k=-1, dtype=bool), np.eye(N, k=1, dtype=bool)
NEXT, ALL = np.roll(EYE, 1, axis=1), np.ones((N, N), bool)
ROWS = np.arange(N)[:, None]


ROUNDED = jax.custom_jvp(lambda x: jnp.round(x))
ROUNDED.defjvp(lambda x, dx: (ROUNDED(*x), dx[0]))
PULLED = jax.custom_vjp(jnp.sin)
PULLED.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,))

CASES = {
    "component by component": (lambda u: jnp.sin(u) * u, EYE),
    "neighbours": (lambda u: jnp.roll(u, -1), NEXT),
    "gathered": (lambda u: u[(jnp.arange(N) + 1) % N], NEXT),
    "scattered": (lambda u: jnp.zeros(N).at[(jnp.arange(N) + 1) % N].set(u), NEXT.T),
    "added to": (lambda u: u.at[jnp.arange(N - 1)].add(u[1:]), EYE | AFTER),
    "replaced": (lambda u: u.at[0].set(u[1]).at[2:].set(0.0), (ROWS < 2) & (ROWS.T == 1)),
    "accumulated": (jnp.cumsum, LATER),
    "backwards": (lambda u: lax.cumsum(u, reverse=True), LATER.T),
    "in a loop": (lambda u: lax.fori_loop(0, N, lambda i, z: z.at[i].multiply(u[i]), u), EYE),
    "scanned": (lambda u: lax.scan(lambda c, x: (c + x, c), 0.0, u)[1], LATER & ~EYE),
    "padded": (lambda u: lax.pad(u, 0.0, [(1, -1, 0)]), BEFORE),
    "by no derivative": (lambda u: u * (jnp.max(u) > 0).astype(float), EYE),
    "of the largest": (lambda u: u * jnp.argmax(u).astype(float), EYE),
    "of a branch": (lambda u: lax.cond(u[0] > 0, lambda: u, lambda: jnp.roll(u, -1)), EYE | NEXT),
    "of a branch that is known": (lambda u: lax.switch(2, [jnp.cumsum, jnp.sin, jnp.cos], u), EYE),
    "one by one": (
        lambda u: jnp.stack([jnp.tile(x, 2) for x in u])[:, 0] * u[0],
        EYE | (ROWS.T == 0),
    ),
    "of unsigned indices": (lambda u: u[(jnp.arange(N, dtype=np.uint32) * 3 + 3) // 3 % N], NEXT),
    "masked": (
        lambda u: jnp.where(jnp.arange(N) < 3, u, jnp.sum(u)),
        EYE | (ROWS >= 3),
    ),
    "by a matrix of zeros and ones": (lambda u: jnp.eye(N, k=1) @ u, AFTER),
    "of a matrix": (lambda u: jnp.outer(u, u) @ jnp.ones(N), ALL),
    "convolved": (lambda u: jnp.convolve(u, jnp.ones(3), "same"), BEFORE | EYE | AFTER),
    "the largest nearby": (
        lambda u: lax.reduce_window(u, -jnp.inf, lax.max, (3,), (1,), "SAME"),
        BEFORE | EYE | AFTER,
    ),
    "sorted": (jnp.sort, ALL),
    "as its rule says": (lambda u: ROUNDED(u), EYE),
    "an activation": (lambda u: jax.nn.softplus(u) + jax.nn.relu(u), EYE),
    "with a rule backwards": (lambda u: PULLED(u), ALL),
    "while": (lambda u: lax.while_loop(lambda z: z[0] < 9, lambda z: z + jnp.abs(u) + 1, u), EYE),
}


@pytest.mark.quick_cases(26)
@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    fn, expected = CASES[name]
    got = found(lambda u, p, t: fn(u), np.zeros(N))
    np.testing.assert_array_equal(got, expected)
    if name not in ("sorted", "with a rule backwards"):
        assert (got >= dense(lambda u, p, t: fn(u), np.zeros(N))).all()


def test_zeros_of_constants():
    """A matrix that is closed over is an input: its zeros count where its numbers are given."""

    def fn(u, p, t):
        return jnp.asarray(BAND) @ u

    assert found(fn, np.zeros(N)).all()
    np.testing.assert_array_equal(found(fn, np.zeros(N), numbers=True), BAND != 0)


def test_results_of_any_shape():
    def fn(u, p, t):
        return jnp.stack([u[:2], p * u[1:]]) * t

    expected = [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]
    np.testing.assert_array_equal(found(fn, np.zeros(3), np.ones(2)), np.array(expected, bool))
    assert found(lambda u, p, t: u[:0], np.zeros(3)).shape == (0, 3)


def test_long_loops_are_not_unrolled():
    def fn(u, p, t):
        return lax.fori_loop(0, 10_000, lambda i, z: z.at[0].add(jnp.sin(z[1])), u)

    expected = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 1]], bool)
    got = found(fn, np.zeros(3))
    assert (got >= expected).all()
