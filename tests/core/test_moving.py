"""Jumps whose times move: values, first and second derivatives, compared with closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ensembleode.core.moving import along, crossing, jumped, shift, switched

from ..marks import slow_unless


def hessian(fn):
    return jax.jit(jax.hessian(fn))


def goes_on(affect):
    return lambda u, t: (affect(u, t), False)


#
# A ball that is dropped from a height and bounces once, in closed form
#


def thrown(u, g, t):
    """A state `[height, speed]` a while later."""
    return jnp.stack([u[0] + u[1] * t - g * t**2 / 2, u[1] - g * t])


# Height, gravity, restitution, and how high the floor is.
NUMBERS = jnp.array([2.0, 9.81, 0.8, 0.1])
END = 1.0


def bounce(x):
    h, g, e, floor = x
    time = jnp.sqrt(2 * (h - floor) / g)
    before = jnp.stack([floor, -g * time])
    after = jnp.stack([floor, e * g * time])
    return thrown(after, g, END - time), before, after, time


def bounce_by_jump(x, order):
    h, g, e, floor = x
    t = jax.lax.stop_gradient(bounce(x)[-1])
    u = thrown(jnp.stack([h, 0.0 * h]), g, t)

    def field(u, t):
        return jnp.stack([u[1], -g])

    def affect(u, t):
        return jnp.stack([u[0], -e * u[1]])

    delta = crossing(field, lambda u, t: u[0] - floor, u, t, order)
    found = jumped(field, goes_on(affect), u, t, delta, order=order)
    return thrown(found.on, g, END - t), found.before, found.after, found.time


@pytest.mark.parametrize("order", [slow_unless(k < 3, k) for k in (1, 2, 3)])
def test_a_ball_that_bounces(order):
    """By its height, gravity, restitution and the floor, which the condition reads; derivatives of
    the state later, of the states at the event, and of its time."""
    found, expected = (lambda x: bounce_by_jump(x, order)), bounce
    for k in range(order + 1):
        for a, b in zip(jax.jit(found)(NUMBERS), jax.jit(expected)(NUMBERS), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * 10**k)
        found, expected = jax.jacfwd(found), jax.jacfwd(expected)


def test_of_first_order_only_first_derivatives_are_right():
    """A higher order is no waste."""
    found = jax.jit(jax.hessian(lambda x: bounce_by_jump(x, 1)[0][0]))(NUMBERS)
    expected = jax.jit(jax.hessian(lambda x: bounce(x)[0][0]))(NUMBERS)
    assert jnp.abs(found - expected).max() > 0.1


#
# Fields, conditions and affects of any kind: the saltation matrix
#


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


#
# A pendulum: its period, by the arithmetic-geometric mean
#


def quarter(amplitude):
    """The time from rest to the lowest point, of length and gravity one."""
    a, b = jnp.ones_like(amplitude), jnp.cos(amplitude / 2)
    for _ in range(6):
        a, b = (a + b) / 2, jnp.sqrt(a * b)
    return jnp.pi / (2 * a)


def swing(u, t):
    return jnp.stack([u[1], -jnp.sin(u[0])])


@pytest.mark.slow
def test_the_period_of_a_pendulum():
    amplitude = jnp.asarray(1.3)
    t, n = quarter(amplitude), 400

    def time(amplitude):
        u = jnp.stack([amplitude, jnp.zeros_like(amplitude)])
        u, _ = jax.lax.scan(lambda u, _: (along(swing, u, 0.0, t / n, 4), None), u, length=n)
        return t + crossing(swing, lambda u, t: u[0], u, t, 3)

    found, expected = time, quarter
    for _ in range(3):
        np.testing.assert_allclose(
            jax.jit(found)(amplitude), jax.jit(expected)(amplitude), rtol=1e-8
        )
        found, expected = jax.jacfwd(found), jax.jacfwd(expected)


#
# Ends, parameters that change, known times
#


def test_a_jump_that_ends_the_solve():
    """The last state is the one at the event, whenever that is."""
    *_, u, p, t = some()
    t = jnp.asarray(t)
    field, condition, affect, *_ = some()

    def ended(u, ends):
        def fields(u, t):
            return field(u, p, t)

        delta = crossing(fields, lambda u, t: condition(u, p, t), u, t, 1)
        found = jumped(fields, lambda u, t: (affect(u, p, t), ends), u, t, delta, order=1)
        return found._replace(ends=None)

    by_u = jax.jit(jax.jacfwd(ended))
    last = by_u(u, jnp.asarray(True))
    np.testing.assert_array_equal(last.on, last.after)
    assert jnp.abs(last.on - by_u(u, jnp.asarray(False)).on).max() > 0.01


def test_a_parameter_that_an_affect_changes():
    """It is a component of the state: growth at the rate `r` until `u = c`, decay at `s` from then;
    in closed form."""

    def field(v, t):
        return jnp.stack([v[1] * v[0], 0.0 * v[1]])

    def by_jump(x):
        r, c, s = x
        t = jax.lax.stop_gradient(jnp.log(c) / r)
        v = jnp.stack([jnp.exp(r * t), r])
        delta = crossing(field, lambda v, t: v[0] - c, v, t, 2)
        affect = goes_on(lambda v, t: jnp.stack([v[0], -s * v[1]]))
        on = jumped(field, affect, v, t, delta, order=2).on
        return on[0] * jnp.exp(on[1] * (2.0 - t))

    def closed(x):
        r, c, s = x
        return c * jnp.exp(-s * r * (2.0 - jnp.log(c) / r))

    x = jnp.array([1.1, 2.0, 0.6])
    np.testing.assert_allclose(by_jump(x), closed(x), rtol=1e-14)
    np.testing.assert_allclose(hessian(by_jump)(x), hessian(closed)(x), rtol=1e-11)


def test_a_dose_at_a_known_time():
    """By the time of the dose, its amount, and the rate of elimination."""

    def by_jump(x):
        at, amount, k = x
        t = jax.lax.stop_gradient(at)
        u = jnp.exp(-k * t)

        def field(u, t):
            return -k * u

        affect = goes_on(lambda u, t: u + amount * t)
        on = jumped(field, affect, u, t, shift(at), order=2).on
        return on * jnp.exp(-k * (3.0 - t))

    def closed(x):
        at, amount, k = x
        return (jnp.exp(-k * at) + amount * at) * jnp.exp(-k * (3.0 - at))

    x = jnp.array([1.0, 2.0, 0.6])
    np.testing.assert_allclose(hessian(by_jump)(x), hessian(closed)(x), rtol=1e-11)


def test_a_field_that_jumps_at_a_known_time():
    """The state itself does not."""

    def by_jump(at):
        t = jax.lax.stop_gradient(at)
        on = switched(lambda u, t: u, lambda u, t: 3.0 * u, jnp.exp(t), t, shift(at), 2)
        return on * jnp.exp(3.0 * (2.0 - t))

    found, expected = by_jump, lambda at: jnp.exp(at + 3.0 * (2.0 - at))
    for _ in range(3):
        np.testing.assert_allclose(jax.jit(found)(0.7), jax.jit(expected)(0.7), rtol=1e-13)
        found, expected = jax.grad(found), jax.grad(expected)


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
