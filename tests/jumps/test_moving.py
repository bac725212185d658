"""Jumps whose times move, of any field, condition and affect. (In closed form, to third order:
tests/engines/compiled/test_event_derivatives.py and test_known_times.py.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ensembleode.jumps.moving import crossing, jumped


def goes_on(affect):
    return lambda u, t: (affect(u, t), False)


def some():
    """Of a state of three and two parameters, all of them of state, parameters and time."""
    rng = np.random.default_rng(3)
    a, b, c = (jnp.asarray(rng.normal(size=(3, 3))) for _ in range(3))

    def field(u, p, t):
        return jnp.sin(a @ u + p[0] * t) + p[1]

    def condition(u, p, t):
        return jnp.cos(b[0] @ u) * t + p[0] * u[1] + p[1] ** 2

    def affect(u, p, t):
        return c @ u + p[1] * u**2 + jnp.cos(t) * p[0]

    return field, condition, affect, jnp.asarray(rng.normal(size=3)), jnp.array([0.7, -0.4]), 0.9


def jump_of_some(u, p, t, order):
    field, condition, affect, *_ = some()

    def fields(u, t):
        return field(u, p, t)

    delta = crossing(fields, lambda u, t: condition(u, p, t), u, t, order)
    found = jumped(fields, goes_on(lambda u, t: affect(u, p, t)), u, t, delta, order=order)
    return found._replace(ends=None)


@pytest.mark.slow
def test_the_saltation_matrix():
    """By the state and by parameters, also in reverse."""
    field, condition, affect, u, p, t = some()
    at = u, p, jnp.asarray(t)
    g_u, g_p, g_t = jax.jit(jax.jacfwd(condition, (0, 1, 2)))(*at)
    r_u, r_p, r_t = jax.jit(jax.jacfwd(affect, (0, 1, 2)))(*at)
    before, after = field(*at), field(affect(*at), p, t)
    speed = g_t + g_u @ before
    kick = r_u @ before + r_t - after
    np.testing.assert_array_equal(jump_of_some(*at, 1).on, affect(*at))
    for jacobian in (jax.jacfwd, jax.jacrev):
        found = jax.jit(jacobian(functools.partial(jump_of_some, order=1), (0, 1)))(*at)
        by_u, by_p = found.on
        np.testing.assert_allclose(by_u, r_u - jnp.outer(kick, g_u) / speed, rtol=1e-12)
        np.testing.assert_allclose(by_p, r_p - jnp.outer(kick, g_p) / speed, rtol=1e-12)
        by_u, by_p = found.time
        np.testing.assert_allclose(by_u, -g_u / speed, rtol=1e-12)
        np.testing.assert_allclose(by_p, -g_p / speed, rtol=1e-12)


@pytest.mark.slow
def test_second_derivatives_are_of_any_nesting():
    *_, u, p, t = some()
    t = jnp.asarray(t)

    def on(u):
        return jump_of_some(u, p, t, 2).on

    forward = jax.jit(jax.jacfwd(jax.jacfwd(on)))(u)
    for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacfwd)):
        found = jax.jit(outer(inner(on)))(u)
        np.testing.assert_allclose(found, forward, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_level_that_is_only_touched():
    """The value remains; the derivative is infinite, or as large as numbers are."""
    t = jnp.asarray(0.0)

    def time(u):
        return crossing(lambda u, t: jnp.ones_like(u), lambda u, t: u**3, u, t, 1)

    assert time(jnp.asarray(0.0)) == 0

    def touched(u):
        return crossing(lambda u, t: jnp.ones_like(u), lambda u, t: u - t, u, t, 1)

    assert touched(jnp.asarray(0.0)) == 0
    assert abs(jax.grad(touched)(0.0)) > 1e300
