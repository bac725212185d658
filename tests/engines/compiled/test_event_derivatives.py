"""Derivatives of solves with callbacks: of states, and of the events themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ...marks import slow_unless
from ..methods import Lags


N = 5
TIGHT = {"abstol": 1e-11, "reltol": 1e-11}


def finite(x):
    """Zero where there is nothing."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def weighted(x):
    """The sum of squares, each with a weight of its own."""
    return jnp.sum(finite(x) ** 2 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))


def of_all(sim):
    """A number that depends on all there is of a solution."""
    events = sim.events
    return sum(map(weighted, (sim.u, events.t, events.u_before, events.u_after)))


def bounce(i):
    return eo.remake(i, u=jnp.stack([0.0 * i.u[0], -i.p[1] * i.u[1]]))


def ball(x, callback=None, **options):
    """Dropped from x[0] and thrown a little, with gravity and restitution."""

    def fall(u, p, t):
        return jnp.stack([u[1], -p[0]])

    callback = callback or eo.ContinuousCallback(lambda u, t, i: u[0], bounce)
    prob = eo.ODEProblem(fall, jnp.stack([x[0], 0 * x[0]]), (0.0, 1.5), x[1:], callback=callback)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + 0.1 * ctx.index))
    return eo.solve(ens, eo.Tsit5(), trajectories=N, engine="compiled", max_events=3, **options)


def closed(x, t=1.5):
    """Of each ball the state then, the time of the bounce, the speed before it."""
    i = 0.1 * jnp.arange(float(N))
    h, v, g = x[0] + i, i, x[1]
    time = (v + jnp.sqrt(v**2 + 2 * g * h)) / g
    before = v - g * time
    after, rest = -x[2] * before, t - time
    u = jnp.stack([after * rest - g * rest**2 / 2, after - g * rest], axis=1)
    return u, time, before


X = jnp.array([2.0, 9.81, 0.8])


@pytest.mark.slow
def test_a_ball_in_closed_form():
    """By height, gravity and restitution, of first and second order: the last state, the time of
    the bounce, the states before and after it."""

    def found(x):
        sim = ball(x)
        events = sim.events
        parts = sim.u[:, -1], events.t[:, 0], events.u_before[:, 0, 1], events.u_after[:, 0, 1]
        return sum(map(weighted, parts))

    def expected(x):
        u, time, before = closed(x)
        return sum(map(weighted, (u, time, before, -x[2] * before)))

    def derivatives(fn):
        return jax.jit(lambda x: (fn(x), jax.grad(fn)(x), jax.hessian(fn)(x)))(X)

    for a, b in zip(derivatives(found), derivatives(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_ball_in_closed_form_of_third_order():
    def third(fn):
        return jax.jit(jax.jacfwd(jax.jacfwd(jax.grad(fn))))(X)

    found = third(lambda x: weighted(ball(x).u[:, -1]))
    np.testing.assert_allclose(found, third(lambda x: weighted(closed(x)[0])), rtol=1e-9, atol=1e-8)


@pytest.mark.slow
def test_a_saved_time_that_is_the_event():
    """A state saved then is that before, and moves as if nothing would happen: the event comes
    later, or earlier. (SciMLSensitivity #1447.)"""
    event = float(ball(X).events.t[0, 0])
    times = jnp.array([event, 1.4])

    def found(x):
        return ball(x, saveat=times).u[0]

    jacobian = jax.jit(jax.jacrev(found))(X)
    expected = np.array([[1.0, -(event**2) / 2, 0.0], [0.0, -event, 0.0]])
    np.testing.assert_allclose(jacobian[0], expected, atol=1e-9)
    np.testing.assert_allclose(
        jacobian[1], jax.jacfwd(lambda x: closed(x, 1.4)[0][0])(X), rtol=1e-9
    )


def swing(u, p, t):
    return jnp.stack([u[1], -p[0] * jnp.sin(u[0]) - p[1] * u[1]])


def driven(u, p, t):
    return jnp.stack([u[1], -p[0] * u[0] + p[1] * jnp.cos(3 * t)])


def grow(u, p, t):
    return p[0] * u


def kick(i):
    return eo.remake(i, u=jnp.stack([i.u[0], -i.p[2] * i.u[1] + 0.1 * i.t]))


def crosses(condition, affect, **options):
    return eo.ContinuousCallback(lambda u, t, i: condition(u, i.p, t), affect, **options)


def strike(i, mask):
    speed = -i.u[1] * jnp.where(mask[0] != 0, i.p[2], 0.9)
    return eo.remake(i, u=jnp.stack([i.u[0], speed]))


WALLS = eo.VectorContinuousCallback(
    lambda u, t, i: jnp.stack([u[0] - 0.9 * i.p[2] - 0.5, u[0] + i.p[2]]), strike, 2
)
SMALLER = eo.DiscreteCallback(
    lambda u, t, i: u[0] <= i.p[2] + 1e-9, lambda i: eo.remake(i, u=i.u * 1.1 + i.p[1])
)
LATER = eo.DiscreteCallback(
    lambda u, t, i: (t >= 0.5) & (i.tprev < 0.5),
    lambda i: eo.remake(i, u=i.u + 0.2 * i.uprev * i.p[1]),
)
LINE = crosses(lambda u, p, t: u[0] - p[2], kick)
SOME = [1.0, 0.2, 3.0, 0.1, 0.6]
TIMES = {"saveat": jnp.linspace(0.05, 2.0, 8)}
FIXED = {"dt": 0.03, "adaptive": False}

# The field, the callback, the state and the parameters, how many of these are the state, options.
CASES = {
    "condition of p and t": (
        *(swing, crosses(lambda u, p, t: u[0] - p[2] * (1 + 0.3 * jnp.sin(t)), kick), SOME, 2),
        {},
    ),
    # (DiffEqGPU #533.)
    "condition on p": (
        *(grow, crosses(lambda u, p, t: u[0] - p[1], lambda i: eo.remake(i, u=0.3 * i.u))),
        *([1.0, 1.3, 2.0], 1, {}),
    ),
    "ends": (
        *(swing, crosses(lambda u, p, t: u[0] - p[2] * t, lambda i: eo.terminate(kick(i)))),
        *(SOME, 2, {}),
    ),
    "ends, times": (
        *(swing, crosses(lambda u, p, t: u[0] - p[2] * t, eo.terminate), SOME, 2, TIMES),
    ),
    "several": (swing, WALLS, [0.1, 2.4, 6.0, 0.1, 0.6], 2, TIMES),
    "discrete, state before": (swing, LATER, [1.0, 0.4, 6.0, 0.1], 2, FIXED | {"alg": eo.RK4()}),
    "discrete at the event": (swing, eo.CallbackSet(LINE, SMALLER), SOME, 2, TIMES),
    "field of time": (
        *(driven, crosses(lambda u, p, t: u[0] * jnp.cos(t) - p[2], kick)),
        *([1.0, 0.2, 3.0, 0.7, 0.6], 2, {"alg": eo.Vern7()}),
    ),
    "changes p": (
        *(grow, crosses(lambda u, p, t: u[0] - p[1], lambda i: eo.remake(i, p=-i.p[2] * i.p))),
        *([1.0, 1.1, 2.0, 0.6], 1, {}),
    ),
    "every step": (swing, LINE, SOME, 2, {"save_everystep": True, "maxiters": 400}),
    "not kept": (
        *(swing, crosses(lambda u, p, t: u[0] - p[2], kick, save_positions=(False, False))),
        *(SOME, 2, TIMES),
    ),
}


def loss_of(name):
    field, callback, x, n, options = CASES[name]
    options = ({} if "dt" in options else TIGHT) | options
    alg = options.pop("alg", eo.Tsit5())
    last = name == "every step"

    def loss(x):
        prob = eo.ODEProblem(field, x[:n], (0.0, 2.0), x[n:], callback=callback)

        def prob_func(prob, ctx):
            return eo.remake(prob, u0=prob.u0 * (1 + 0.05 * ctx.index))

        ens = eo.EnsembleProblem(prob, prob_func)
        given = {"trajectories": N, "engine": "compiled", "max_events": 8}
        sim = eo.solve(ens, alg, **given, **options)
        if last:  # (Steps are others' with other numbers: but where they end is not.)
            end = jnp.take_along_axis(sim.u, sim.lengths[:, None, None] - 1, 1)
            return weighted(end) + weighted(sim.events.t)
        return weighted(sim.u) if name == "not kept" else of_all(sim)

    return loss, jnp.asarray(x)


def differences(fn, x, along, h=1e-5):
    return (fn(x + h * along) - fn(x - h * along)) / (2 * h)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name",
    [
        slow_unless(x in ("discrete at the event", "ends, times", "condition on p"), x)
        for x in CASES
    ],
)
def test_gradients_are_those_of_differences(name):
    """In reverse, and in forward mode exactly the same."""
    loss, x = loss_of(name)
    value, gradient = jax.jit(loss), jax.jit(jax.grad(loss))(x)
    expected = np.array([differences(value, x, along) for along in jnp.eye(len(x))])
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    _, pushed = jax.jit(lambda x: jax.jvp(loss, (x,), (x,)))(x)
    np.testing.assert_allclose(pushed, gradient @ x, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_those_of_differences(name):
    loss, x = loss_of(name)
    gradient, along = jax.jit(jax.grad(loss)), jnp.cos(1.0 + jnp.arange(float(len(x))))
    expected = differences(gradient, x, along)
    largest = np.abs(expected).max()
    _, found = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (along,)))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * largest)
    found = jax.jit(jax.grad(lambda x: jax.jvp(loss, (x,), (along,))[1]))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("also", [slow_unless(x, x) for x in (False, True)])
def test_doses_in_closed_form(also):
    """By the times of doses, their amount and the rate of elimination, of first and second order:
    states, and the times and states of events; another callback that acts at the same time moves
    with it."""

    def found(x):
        dose = eo.PresetTimeCallback(x[:2], lambda i: eo.remake(i, u=i.u + i.p[0] * i.t))
        halved = eo.DiscreteCallback(
            lambda u, t, i: u[0] > 2.5, lambda i: eo.remake(i, u=0.5 * i.u)
        )
        callback = eo.CallbackSet(dose, halved) if also else dose
        prob = eo.ODEProblem(lambda u, p, t: -p[1] * u, [1.0], (0.0, 3.0), x[2:], callback=callback)
        sol = eo.solve(prob, engine="compiled", max_events=4, saveat=[0.5, 2.0, 3.0], **TIGHT)
        events = sol.events
        return sum(map(weighted, (sol.u, events.t, events.u_before, events.u_after)))

    def expected(x):
        u, t, us, ts, before, after = 1.0, 0.0, [], [], [], []
        for i, at in enumerate(x[:2]):
            us += [u * jnp.exp(-x[3] * 0.5)] if i == 0 else []
            u, t = u * jnp.exp(-x[3] * (at - t)), at
            dosed = u + x[2] * at
            steps = [u, dosed, 0.5 * dosed] if also and i == 1 else [u, dosed]
            before, after, ts = before + steps[:-1], after + steps[1:], ts + [at] * len(steps[1:])
            u = steps[-1]
        us += [u * jnp.exp(-x[3] * (s - t)) for s in (2.0, 3.0)]
        return sum(weighted(jnp.stack(x)) for x in (us, ts, before, after))

    x = jnp.array([0.7, 1.6, 1.5, 0.8])

    def derivatives(fn):
        return jax.jit(lambda x: (fn(x), jax.grad(fn)(x), jax.hessian(fn)(x)))(x)

    for a, b in zip(derivatives(found), derivatives(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("saving", [{}, TIMES])
def test_a_method_that_remembers(saving):
    """What it carries is made anew after an event, backwards, too: as in forward mode."""

    def loss(x):
        prob = eo.ODEProblem(swing, x[:2], (0.0, 2.0), x[2:], callback=LINE)
        given = {"trajectories": 1, "engine": "compiled", "max_events": 8, **FIXED}
        return of_all(eo.solve(eo.EnsembleProblem(prob), Lags(), **given, **saving))

    x = jnp.asarray(SOME)
    gradient = jax.jit(jax.grad(loss))(x)
    _, pushed = jax.jit(lambda x: jax.jvp(loss, (x,), (x,)))(x)
    np.testing.assert_allclose(pushed, gradient @ x, rtol=1e-10)


@pytest.mark.slow
def test_neighbours_that_fail():
    """Only those that succeed have derivatives, of all lanes as of one; trajectories' own numbers,
    under vmap."""
    count = 11

    def loss(x, fails):
        prob = eo.ODEProblem(swing, x[0, :2], (0.0, 2.0), x[0, 2:], callback=LINE)

        def prob_func(prob, ctx):
            own = x[ctx.index]
            u0 = jnp.where(fails & (ctx.index % 3 == 1), jnp.nan, own[:2])
            return eo.remake(prob, u0=u0, p=own[2:])

        given = {"trajectories": count, "engine": "compiled", "max_events": 8, **TIMES}
        sim = eo.solve(eo.EnsembleProblem(prob, prob_func), eo.Tsit5(), **given)
        events = sim.events
        each = jax.vmap(lambda *xs: sum(jnp.sum(finite(x) ** 2) for x in xs))
        return jnp.sum(each(sim.u, events.t, events.u_before))

    x = jnp.outer(1 + 0.02 * jnp.arange(float(count)), jnp.asarray(SOME))
    fails = jnp.array([False, True])
    whole, some = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(x, fails)
    bad = np.arange(count) % 3 == 1
    assert jnp.isfinite(whole).all()
    assert jnp.abs(whole[bad]).max() > 0
    np.testing.assert_array_equal(some[bad], 0)
    np.testing.assert_allclose(some[~bad], whole[~bad], rtol=1e-12)


@pytest.mark.slow
def test_by_times():
    """By the start and the end of the solve: of the state then, and of the event."""

    def loss(x):
        def prob_func(prob, ctx):
            return eo.remake(prob, tspan=(x[0], x[1]))

        prob = eo.ODEProblem(swing, jnp.array(SOME[:2]), (0.0, 2.0), SOME[2:], callback=LINE)
        given = {"trajectories": 1, "engine": "compiled", "max_events": 8, **TIGHT}
        return of_all(eo.solve(eo.EnsembleProblem(prob, prob_func), eo.Tsit5(), **given))

    x = jnp.array([0.1, 1.9])
    expected = [differences(jax.jit(loss), x, along) for along in jnp.eye(2)]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), expected, rtol=1e-6)
