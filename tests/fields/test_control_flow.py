"""Branches, loops and calls, in both forms, compared with JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ensembleode.fields.ir import Switch

from ..problems import with_reverse_rule
from .drawn import reals
from .lowered import agree, Lowered


U, V = reals(4), reals(30)
TABLE = np.linspace(-1.0, 2.0, 7)


def both_sizes(fn, *args, **options):
    """On a small state and on a larger one."""
    return [program for u in (U, V) for program in agree(fn, u, *args, **options)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("k", [-1, 0, 1, 2, 5])
def test_switches(k):
    branches = [jnp.sin, lambda x: x[::-1] * 2, lambda x: jnp.zeros_like(x)]
    both_sizes(lambda u, p, t: lax.switch(p, branches, u), np.int64(k))
    both_sizes(lambda u, p, t: lax.switch(jnp.int32(t), branches, u), (), float(k))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("t", [-0.5, 0.5, 1.5])
def test_nested_branches(t):
    def inner(x, t):
        return lax.cond(t > 1, lambda x: (x, x.sum()), lambda x: (2 * x, x[0]), x)

    def fn(u, p, t):
        u, total = lax.cond(t > 0, inner, lambda x, t: (x[::-1], t), u, t)
        return u * total

    both_sizes(fn, (), t)


@pytest.mark.slow
def test_mapped_loops():
    def root(x, n):
        def step(c):
            y, k = c
            return y - (y**2 - x) / (2 * y), k + n

        return lax.while_loop(lambda c: abs(c[0] ** 2 - x) > 1e-12, step, (1.0, jnp.zeros(2)))

    def fn(u, p, t):
        y, k = jax.vmap(lambda x: root(x, p))(abs(u))
        return y * k.sum(1)

    both_sizes(fn, np.array([1.0, 2.0]))
    both_sizes(lambda u, p, t: fn(u, p, t)[0] + jax.vmap(lambda x: fn(x[None], p, t)[0])(u), U[:2])


@pytest.mark.slow
def test_branches_that_swap_and_pass_through():
    for flag in (True, False):
        both_sizes(
            lambda u, p, t: jnp.subtract(
                *lax.cond(p, lambda x, y: (y, x), lambda x, y: (x, y), u, jnp.cos(u))
            ),
            np.bool_(flag),
        )
        both_sizes(lambda u, p, t: lax.cond(p, lambda: u, lambda: 0 * u), np.bool_(flag))


def test_branches_known_beforehand():
    (*_, program) = both_sizes(lambda u, p, t: lax.cond(True, jnp.sin, jnp.cos, u))
    assert not any(isinstance(s, Switch) for s in program.body)


def test_branches_mapped_over_an_axis():
    both_sizes(lambda u, p, t: jax.vmap(lambda x: lax.cond(x > 0, jnp.sin, lambda x: x * t, x))(u))


#
# Loops that end when a condition holds
#


def test_while_swaps():
    def fn(u, p, t):
        def body(c):
            a, b, x, y, n = c
            return b, a + t, y, x, n - 1

        a, b, x, y, _ = lax.while_loop(lambda c: c[-1] > 0, body, (u, jnp.sin(u), t, u[0], p))
        return a - 2 * b + 3 * x - 4 * y

    for n in range(4):
        both_sizes(fn, np.int64(n))


def test_while_in_while_and_what_they_close_over():
    def fn(u, p, t):
        scale = jnp.cos(u)

        def inner(z, n):
            return lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * scale, c[1] + 1), (z, 0))[0]

        def outer(c):
            z, n = c
            return inner(z, n) + p, n + 1

        return lax.while_loop(lambda c: c[1] < 4, outer, (u, 0))[0]

    both_sizes(fn, 0.3)


def test_while_that_never_runs_and_on_numbers():
    both_sizes(lambda u, p, t: lax.while_loop(lambda z: False, lambda z: z + 1, u))
    agree(lambda u, p, t: lax.while_loop(lambda z: z < 10.0, lambda z: 2 * z + p, u), 1.5, 0.1)
    agree(
        lambda u, p, t: lax.while_loop(lambda z: z[0] < 10.0, lambda z: 2 * z + p, u),
        np.ones(1),
        np.ones(1),
    )


#
# Loops of a known length
#


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans(length, reverse):
    xs = reals(5, 4)[:length]
    scan = functools.partial(lax.scan, reverse=reverse)

    def step(c, x):
        return jnp.sin(c) + x, (c * x, x[0])

    def fn(u, p, t):
        last, (rows, firsts) = scan(step, u, p)
        return jnp.concatenate([last, rows.reshape(-1), firsts])

    agree(fn, U, xs)
    agree(lambda u, p, t: scan(lambda c, x: (c + x, c), t, u[:length])[1], U)
    agree(lambda u, p, t: scan(lambda c, x: (x, c), u, p)[1], U, xs)
    agree(lambda u, p, t: scan(lambda c, _: (c * t, None), u, None, length=length)[0], U)
    agree(lambda u, p, t: scan(lambda _, x: (None, x * t), None, p)[1], U, xs)


def test_scans_that_swap():
    def step(c, _):
        a, b, x, y = c
        return (b, a + x, y, x + a[0]), (a, y)

    def fn(u, p, t):
        (a, b, x, y), (rows, ys) = lax.scan(step, (u, jnp.cos(u), t, p), None, length=5)
        return jnp.concatenate([a, b, x[None], y[None], rows.reshape(-1), ys])

    both_sizes(fn, 0.7)


def test_nested_scans():
    def inner(c, x):
        return c + x, c * x

    def outer(c, row):
        c, ys = lax.scan(inner, c, row)
        return c, ys * c

    def fn(u, p, t):
        last, rows = lax.scan(outer, t, u.reshape(2, -1), reverse=True)
        again = lax.scan(lambda c, r: (lax.scan(inner, c, r)[0], c), last, rows)
        return jnp.concatenate([rows.reshape(-1), again[1], again[0][None]])

    both_sizes(fn)


@pytest.mark.slow
def test_long_scans_are_loops():
    both_sizes(lambda u, p, t: lax.scan(lambda c, x: (0.5 * c + x, None), u, p)[0], reals(600))
    both_sizes(lambda u, p, t: lax.fori_loop(0, 600, lambda i, z: 0.9 * jnp.roll(z, 1) + t, u))


def test_loops_with_indices():
    def trapezoids(u, p, t):
        return lax.fori_loop(0, u.size - 1, lambda i, z: z.at[i + 1].add(u[i] * p[i % 3]), u)

    both_sizes(trapezoids, reals(3))
    both_sizes(lambda u, p, t: lax.fori_loop(0, p, lambda i, z: z.at[i].set(z[i - 1]), u), 3)
    both_sizes(lambda u, p, t: lax.fori_loop(1, 4, lambda i, z: z + u[i] * i, u))


@pytest.mark.slow
def test_branches_in_loops_and_loops_in_branches():
    def step(c, x):
        return lax.cond(x > 0, lambda: c + x, lambda: c[::-1]), c[0]

    def loop(u):
        return lax.fori_loop(0, 3, lambda i, z: jnp.sin(z) + i, u)

    both_sizes(lambda u, p, t: sum(lax.scan(step, u, p)[1]) * u, TABLE)
    for t in (-1.0, 1.0):
        both_sizes(lambda u, p, t: lax.cond(t > 0, loop, jnp.cos, u), (), t)


@pytest.mark.slow
def test_tables():
    def fn(u, p, t):
        wind = jnp.interp(t, jnp.linspace(-2.0, 2.0, 7), jnp.asarray(TABLE))
        return wind * u + jnp.interp(u, jnp.linspace(-2.0, 2.0, 7), p)

    for t in (-3.0, 0.1):
        both_sizes(fn, reals(7), t)


def test_constants_of_all_kinds():
    order, mask = np.array([2, 0, 3, 1]), np.array([True, False, True, True])
    numbers = np.array([0.5, -1.5, 2.5, 0.25])

    def fn(u, p, t):
        inside = lax.fori_loop(0, 3, lambda i, z: z[order] * numbers + jnp.where(mask, 1.0, z), u)
        chosen = lax.cond(t > 0, lambda: u * numbers, lambda: jnp.asarray(numbers))
        return inside + chosen + jax.jit(lambda x: x * numbers)(u) + jnp.full(4, jnp.nan)[0] * 0

    agree(lambda u, p, t: jnp.nan_to_num(fn(u, p, t)) + numbers * u, U)
    agree(lambda u, p, t: jnp.asarray([1.0, 2.0, 3.0, 4.0]), U)
    agree(lambda u, p, t: u, U)
    agree(lambda u, p, t: jnp.zeros(0), U)
    agree(lambda u, p, t: jnp.concatenate([u, jnp.zeros(0), jnp.full(3, jnp.nan)]), U)
    agree(lambda u, p, t: jnp.eye(4) @ u + jnp.arange(4.0) - jnp.arange(1.0), U)
    agree(lambda u, p, t: t, 1.0)


@jax.custom_jvp
def with_rule(x):
    return jnp.sin(x) * x


@with_rule.defjvp
def _(primals, tangents):
    return with_rule(*primals), 7 * tangents[0] * primals[0]


CALLED = {
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * 2),
    "custom_jvp": with_rule,
    "custom_vjp": with_reverse_rule,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "jit": jax.jit(lambda x: jnp.cumsum(x) * x),
    "logsumexp": lambda x: jax.nn.logsumexp(x) * x,
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "softplus": jax.nn.softplus,
    "trace": lambda x: jnp.trace(jnp.outer(x, x)) * x,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLED)
def test_calls_and_their_derivatives(name):
    fn = CALLED[name]
    both_sizes(lambda u, p, t: fn(u) + fn(2 * u))
    both_sizes(lambda u, p, t: lax.fori_loop(0, 3, lambda i, z: fn(z), u))
    both_sizes(lambda u, p, t: lax.cond(t > 0, fn, jnp.cos, u))
    both_sizes(lambda u, p, t: jax.vjp(fn, u)[1](jnp.cos(u))[0])
    if name != "custom_vjp":
        both_sizes(lambda u, p, t: jax.jvp(fn, (u,), (u,))[1])


def test_functions_without_a_float():
    # The groups of the other numbers, and results in memory of their own.
    for fn in (lambda u, p, t: u > t, lambda u, p, t: jnp.int32(u) + p):
        for u in (U, V):
            for apart in (True, False):
                program = Lowered(fn, u, np.int32(3), 0.25, apart=apart)
                want = fn(jnp.asarray(u), np.int32(3), 0.25)
                np.testing.assert_array_equal(program(u, np.int32(3), 0.25), want)
