"""Jacobians as programs, compared with JAX's."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

from ensembleode.fields.derivatives.jacobian import coloured, jacobian
from ensembleode.tracing.program import trace

from .fields import FIELDS


T = 0.25


def found(fn, u, p, *, apart):
    """The Jacobian and the derivative by the time, dense."""
    program, consts = trace(fn, u, p, jnp.asarray(T, u.dtype))
    made = jacobian(program, apart=apart)
    leaves, t = jtu.tree_leaves(p), jnp.asarray(T, u.dtype)
    values = np.asarray(
        jax.jit(jax.core.eval_jaxpr, static_argnums=0)(made.jaxpr, consts, u, *leaves, t)[0]
    )
    np.testing.assert_allclose(jax.jit(made)(consts, u, leaves, t), values, rtol=1e-13, atol=1e-14)
    n = len(made.pattern)
    matrix = np.zeros((program.out_avals[0].size, u.size))
    for place, x in zip(made.pattern, values[:n], strict=True):
        matrix[place] = x
    assert list(made.pattern) == sorted(made.pattern)
    return matrix, values[n:] if made.has_dfdt else np.zeros(len(matrix)), made


def check(fn, u, p=(), *, apart):
    matrix, dfdt, made = found(fn, u, p, apart=apart)
    expected = jax.jit(jax.jacfwd(lambda u: fn(u, p, T).reshape(-1)))(u).reshape(matrix.shape)
    np.testing.assert_allclose(matrix, expected, rtol=1e-13, atol=1e-14)
    expected = jax.jvp(lambda t: fn(u, p, t).reshape(-1), (T,), (1.0,))[1]
    np.testing.assert_allclose(dfdt, expected, rtol=1e-13, atol=1e-14)
    return made


QUICK = ("forced", "pendulum", "robertson")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in FIELDS]
)
def test_fields(name, apart):
    fn, u, p, fewer = FIELDS[name]
    check(fn, jnp.asarray(u if fewer is None else fewer) + 0.1, p, apart=apart)


ROUNDED = jax.custom_jvp(lambda x: jnp.round(x))
ROUNDED.defjvp(lambda x, dx: (ROUNDED(*x), 3 * dx[0]))

CASES = {
    "by a rule": (lambda u, t: ROUNDED(u) * t, 3, True),
    "chosen": (lambda u, t: jnp.where(u > 0, u * u[0], -jnp.tanh(u)), 5, False),
    "in a loop": (lambda u, t: lax.fori_loop(0, 3, lambda i, z: z * u[i] + t, u), 9, True),
    "in a loop until then": (
        lambda u, t: lax.while_loop(lambda z: z[0] < 9, lambda z: z + jnp.abs(u) + 1, u),
        3,
        False,
    ),
    "of constants": (lambda u, t: jnp.stack([2.0 + 0 * u[0], -u[2], u[1] - u[0]]), 3, False),
    "of the time alone": (lambda u, t: jnp.full(3, jnp.sin(t)), 0, True),
    "of nothing": (lambda u, t: jnp.ones(3), 0, False),
    "largest": (lambda u, t: jnp.stack([jnp.max(u), jnp.min(u), u.sum()]), 9, False),
}


MATRIX = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)))
DENSE = {
    "network": lambda u, t: MATRIX @ jnp.tanh(MATRIX @ u - t) - 2 * u,
    "scaled and summed": lambda u, t: (u * u / 3 + jnp.sin(u)) @ MATRIX + u.sum() * t,
    "not in order": lambda u, t: (MATRIX * u[None, :] * u[::-1, None]).sum(1) + jnp.roll(u, 1),
    "a diagonal": lambda u, t: jnp.diag(MATRIX @ jnp.diag(u) @ MATRIX) + u.prod(),
    "chosen": lambda u, t: jnp.where(MATRIX @ u > 0, MATRIX @ u, t * u.sum()),
    "in a loop": lambda u, t: lax.scan(lambda z, m: (z + m * u.sum(), None), u, MATRIX)[0],
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", DENSE)
def test_dense_by_arrays(name):
    made = check(lambda u, p, t: DENSE[name](u, t), jnp.array([0.3, -1.2, 2.5]), apart=False)
    assert len(made.pattern) == 9


def test_columns_are_scaled_without_a_product_of_matrices():
    program, _ = trace(lambda u, p, t: p @ (u * u) - u, jnp.ones(3), MATRIX, jnp.asarray(T))
    assert "dot_general" not in str(jacobian(program, apart=False).jaxpr)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_cases(name, apart):
    fn, entries, has_dfdt = CASES[name]
    made = check(lambda u, p, t: fn(u, t), jnp.array([0.3, -1.2, 2.5]), apart=apart)
    assert made.has_dfdt == has_dfdt
    if apart and name not in ("in a loop",):
        assert len(made.pattern) == entries


STEPS = jax.custom_jvp(lambda x: jnp.round(4 * x) / 4)
STEPS.defjvp(lambda x, dx: (STEPS(*x), dx[0] * (1 + STEPS(*x))))
RULED = {
    "a rule that calls its function": lambda u, p: STEPS(p * u) * u[0] - u,
    "a linear system": lambda u, p: jnp.linalg.solve(MATRIX + p * jnp.outer(u, jnp.sin(u)), u),
    "an inverse": lambda u, p: jnp.linalg.inv(MATRIX + jnp.diag(p * u)) @ u,
    "a branch": lambda u, p: lax.cond(u[0] > 1, lambda: jnp.sqrt(u - 1), lambda: p * u**2),
    "softplus": lambda u, p: MATRIX @ jax.nn.softplus(MATRIX @ u * p),
    "a system and zeros": lambda u, p: u.at[:2].set(jnp.linalg.solve(MATRIX[:2, :2] * p, u[:2])),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", RULED)
def test_its_derivatives_follow_the_rules_of_what_f_calls(name, apart):
    """Those of JAX: not those of how a linear system, or a function with a rule, is computed."""
    fn, u, p = RULED[name], jnp.array([0.3, -1.2, 2.5]), jnp.array(0.7)
    program, consts = trace(lambda u, p, t: fn(u, p), u, p, jnp.asarray(T))
    made = jacobian(program, apart=apart)
    places = tuple(np.array(made.pattern).T)

    def entries(u, p):
        return made(consts, u, [p], jnp.asarray(T))[: len(made.pattern)]

    def expected(u, p):
        return jax.jacfwd(fn)(u, p)[places]

    for mine, theirs in zip(
        jax.jit(jax.jacrev(entries, (0, 1)))(u, p),
        jax.jit(jax.jacfwd(expected, (0, 1)))(u, p),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-13)


def test_what_entries_have_in_common_is_computed_once():
    def fn(u, p, t):
        return jnp.stack([jnp.exp(u[0] * u[1])] * 3)

    made = check(fn, jnp.array([0.3, -1.2, 2.5]), apart=True)
    assert [eqn.primitive.name for eqn in made.jaxpr.eqns].count("exp") == 1


def test_columns_of_a_colour_have_no_row_in_common():
    places = np.random.default_rng(0).random((40, 40)) < 0.1
    colours = coloured(places)
    assert max(colours) < 20
    for colour in range(max(colours) + 1):
        columns = [places[:, j] for j in range(40) if colours[j] == colour]
        assert np.sum(columns, axis=0).max() <= 1
    tridiagonal = np.abs(np.subtract.outer(np.arange(9), np.arange(9))) <= 1
    assert max(coloured(tridiagonal)) == 2


def _root(u):
    """A root by Newton's method."""

    def once(now):
        z, _ = now
        change = (z + z**3 - u) / (1 + 3 * z**2)
        return z - change, change

    start = u, jnp.ones_like(u)
    return lax.while_loop(lambda now: jnp.max(jnp.abs(now[1])) > 1e-13, once, start)[0]


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_through_a_loop_that_ends_by_a_condition(size, apart):
    made = check(lambda u, p, t: _root(u * u) * t, jnp.array([0.3, -1.2])[:size], apart=apart)
    assert made.has_dfdt
