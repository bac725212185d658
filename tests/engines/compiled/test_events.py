"""Events compared with closed forms: bouncing balls, straight lines, and states that stay at a
root. (The comparison with OrdinaryDiffEq is in `tests/engines/test_julia_events.py`.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo


TIGHT = {"abstol": 1e-11, "reltol": 1e-11}
SUCCESS, TERMINATED = (eo.ReturnCode[x].value for x in ("Success", "Terminated"))


def falling(u, p, t):
    return jnp.array([u[1], -p])


def floor(restitution):
    """A ball bounces off the ground, and is at its height exactly then."""

    def bounce(integrator):
        return eo.remake(integrator, u=jnp.array([0.0, -restitution * integrator.u[1]]))

    return eo.ContinuousCallback(lambda u, t, integrator: u[0], None, bounce)


def bounces(height, gravity, restitution, end):
    """The times of the bounces of a ball that is dropped."""
    speed, times = np.sqrt(2 * gravity * height), [np.sqrt(2 * height / gravity)]
    while True:
        speed *= restitution
        times.append(times[-1] + 2 * speed / gravity)
        if times[-1] > end:
            return np.array(times[:-1])


N, END = 11, 6.5
HEIGHTS, GRAVITIES = 1.0 + 0.1 * np.arange(N), 9.8 + 0.1 * np.arange(N)
RESTITUTIONS = 0.95 - 0.01 * np.arange(N)


def balls(prob, ctx):
    height, gravity, restitution = (
        jnp.asarray(x)[ctx.index] for x in (HEIGHTS, GRAVITIES, RESTITUTIONS)
    )
    u0 = jnp.array([height, 0.0])
    return eo.remake(prob, u0=u0, p=gravity, callback=floor(restitution))


BALLS = eo.EnsembleProblem(eo.ODEProblem(falling, [1.0, 0.0], (0.0, END), 9.8), balls)


@pytest.mark.slow
def test_balls_bounce():
    """Each by its own restitution, which the affect closes over."""
    bounced = eo.solve(BALLS, trajectories=N, saveat=0.5, max_events=32, **TIGHT)
    assert (bounced.retcode == SUCCESS).all()
    assert bounced.events.count.max() >= 7
    for i, found in enumerate(bounced):
        expected = bounces(HEIGHTS[i], GRAVITIES[i], RESTITUTIONS[i], END)
        np.testing.assert_allclose(found.events.t, expected, atol=1e-9)
        assert found.events.count == len(expected)
        speeds = np.sqrt(2 * GRAVITIES[i] * HEIGHTS[i]) * RESTITUTIONS[i] ** np.arange(
            len(expected)
        )
        np.testing.assert_allclose(found.events.u_before[:, 1], -speeds, atol=1e-9)
        np.testing.assert_allclose(found.events.u_after[:, 1], RESTITUTIONS[i] * speeds, atol=1e-9)
        assert (found.events.direction == -1).all()
    t, which, count = map(
        np.asarray, (bounced.events.t, bounced.events.which, bounced.events.count)
    )
    after = np.arange(t.shape[1])[None] >= count[:, None]
    assert np.isnan(t[after]).all()
    assert (which[after] == -1).all()
    assert "events   " in repr(bounced)


def test_twenty_bounces():
    """More than there is room for at first."""
    prob = eo.ODEProblem(falling, [1.0, 0.0], (0.0, 7.54), 9.8, callback=floor(0.9))
    sol = eo.solve(prob, **TIGHT)
    expected = bounces(1.0, 9.8, 0.9, 7.54)
    assert len(expected) == 20
    np.testing.assert_allclose(sol.events.t, expected, atol=1e-9)


@pytest.mark.slow
def test_more_than_there_is_room_for():
    prob = eo.ODEProblem(falling, [1.0, 0.0], (0.0, 3.0), 9.8, callback=floor(0.9), saveat=0.1)
    sol = eo.solve(prob, max_events=2, **TIGHT)
    assert sol.retcode == eo.ReturnCode.MaxEvents
    first = bounces(1.0, 9.8, 0.9, 3.0)[:3]
    np.testing.assert_allclose(sol.events.t, first[:2], atol=1e-9)
    reached = np.isfinite(sol.u[:, 0])
    np.testing.assert_array_equal(reached, np.asarray(sol.t) <= first[2])
    whole = eo.solve(prob, **TIGHT)
    np.testing.assert_array_equal(sol.u[reached], whole.u[reached])
    jitted = jax.jit(lambda g: eo.solve(eo.remake(prob, p=g), max_events=2, **TIGHT).events)(9.8)
    np.testing.assert_array_equal(jitted.t, sol.events.t)


def line(callback, *, start=-1.0, tspan=(0.0, 2.0), **options):
    """The state is the time, and a second component that callbacks may change."""
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.array([1.0, 0.0]), [start, 0.0], tspan, callback=callback
    )
    return eo.solve(prob, engine="compiled", **options)


def add(x):
    return lambda integrator: eo.remake(integrator, u=integrator.u + jnp.array([0.0, x]))


def crossing(at, affect, *more, **how):
    return eo.ContinuousCallback(lambda u, t, integrator: u[0] - at, affect, *more, **how)


@pytest.mark.slow
def test_the_root_is_between_two_neighbours():
    for at in (0.25, 1 / 3):
        left, right = (
            line(crossing(at, add(1.0), rootfind=x), start=0.0).events
            for x in (eo.LeftRootFind, eo.RightRootFind)
        )
        (before,), (after,) = np.asarray(left.t), np.asarray(right.t)
        assert before == np.nextafter(after, 0.0) or before == after
        np.testing.assert_allclose(before, at, rtol=4 * np.finfo(float).eps)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_several_in_one_step(sign):
    """The earliest acts first, whatever the order."""
    callbacks = eo.CallbackSet(crossing(0.5 * sign, add(10.0)), crossing(0.25 * sign, add(1.0)))
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.array([1.0, 0.0]), [0.0, 0.0], (0.0, sign), callback=callbacks
    )
    sol = eo.solve(prob, eo.Tsit5(), engine="compiled", dt=1.0, adaptive=False, saveat=0.125)
    assert sol.events.which.tolist() == [1, 0]
    np.testing.assert_allclose(sol.events.t, [0.25 * sign, 0.5 * sign], rtol=1e-14)
    assert sol.events.direction.tolist() == [int(sign)] * 2
    # (What is saved at the time of an event is the state before it; which may be a rounding off.)
    at = np.asarray(sol.events.t)
    saved = np.where(sign * at >= [0.25, 0.5], [0, 1], [1, 11])
    np.testing.assert_array_equal(sol.u[:, 1], [0, 0, saved[0], 1, saved[1], 11, 11, 11, 11])


def test_both_of_a_vector_at_one_time():
    def affect(integrator, mask):
        return eo.remake(
            integrator, u=integrator.u + jnp.array([0.0, mask.astype(float) @ weights])
        )

    weights = jnp.array([1.0, 10.0, 100.0])
    callback = eo.VectorContinuousCallback(
        lambda u, t, integrator: jnp.array([u[0] - 0.5, 0.5 - u[0], u[0] - 0.75]), affect, 3
    )
    sol = line(callback, start=0.0)
    assert sol.events.direction.tolist() == [[1, -1, 0], [0, 0, 1]]
    np.testing.assert_allclose(sol.u[-1], [2.0, -9.0 + 100.0])


def test_a_start_on_the_root():
    """The trajectory leaves it; what comes later in the same step is seen."""
    callback = eo.ContinuousCallback(lambda u, t, _: u[0] * (u[0] - 0.5), add(1.0))
    sol = line(callback, start=0.0)
    np.testing.assert_allclose(sol.events.t, [0.5])
    assert line(crossing(0.0, add(1.0)), start=0.0).events.count == 0


def test_at_the_end():
    """An event at `t1`, and one that a fixed step ends on."""
    sol = line(eo.ContinuousCallback(lambda u, t, _: t - 2.0, add(1.0)))
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_array_equal(sol.events.t, [2.0])
    np.testing.assert_allclose(sol.u[-1], [1.0, 1.0])
    sol = line(crossing(0.0, add(1.0)), dt=0.5, adaptive=False)
    np.testing.assert_allclose(sol.events.t, [1.0], rtol=1e-14)
    assert sol.stats.naccept in (4, 5)  # (by a rounding behind the second)


@pytest.mark.slow
def test_terminated():
    """It is successful, and its last state is the one after the affect."""

    def stop(integrator):
        return eo.terminate(add(1.0)(integrator))

    prob = eo.ODEProblem(lambda u, p, t: jnp.array([1.0, 0.0]), [0.0, 0.0], (0.0, 2.0))

    def prob_func(prob, ctx):
        return eo.remake(prob, callback=crossing(0.75 * (1 + ctx.index), stop))

    ens = eo.EnsembleProblem(prob, prob_func)
    ends = eo.solve(ens, trajectories=3)
    assert ends.retcode.tolist() == [TERMINATED, TERMINATED, SUCCESS]
    assert ends.successful.all()
    assert not len(ends.failed)
    np.testing.assert_allclose(ends.t[:, 1], [0.75, 1.5, 2.0])
    np.testing.assert_allclose(ends.u[:, 1], [[0.75, 1.0], [1.5, 1.0], [2.0, 0.0]])
    sim = eo.solve(ens, trajectories=3, saveat=0.5)
    assert sim.lengths.tolist() == [2, 4, 5]
    np.testing.assert_allclose(sim.u[0, :, 0], [0.0, 0.5, np.nan, np.nan, np.nan])
    every = eo.solve(ens, trajectories=3, save_everystep=True)
    np.testing.assert_allclose(every.t[np.arange(3), every.lengths - 1], [0.75, 1.5, 2.0])
    np.testing.assert_allclose(every(0.6)[:, 0], 0.6)


@pytest.mark.slow
def test_max_norm_is_of_the_state_after_events():
    """And one that ends the trajectory goes first."""

    def code(callback):
        sol = line(callback, start=0.0, max_norm=1.0, internalnorm=eo.MaxNorm(), dtmax=0.3)
        return sol.retcode.name

    def beyond(affect):
        return eo.DiscreteCallback(lambda u, t, integrator: u[0] > 1.0, affect)

    assert code(crossing(0.5, add(0.9))) == code(crossing(0.5, add(1.1))) == "Diverged"
    assert code(beyond(lambda integrator: eo.remake(integrator, u=jnp.zeros(2)))) == "Success"
    assert code(beyond(eo.terminate)) == "Terminated"


@pytest.mark.slow
def test_every_step_and_between_them():
    sol = line(crossing(0.0, add(1.0)), save_everystep=True)
    rows = np.flatnonzero(np.asarray(sol.t) == np.asarray(sol.events.t))
    np.testing.assert_array_equal(sol.u[rows, 1], [0.0, 1.0])
    np.testing.assert_allclose(sol(jnp.array([0.9, 0.999, 1.001, 1.9]))[:, 1], [0, 0, 1, 1])


def test_parameters_and_integrals():
    """What an affect changes in `p` stays changed, of each trajectory; integrals go on."""

    def prob_func(prob, ctx):
        def faster(integrator):
            a, (b, name) = integrator.p
            return eo.remake(integrator, p=(2.0 + ctx.index + 0.0 * a, (b, name)))

        return eo.remake(prob, callback=crossing(0.5, faster))

    prob = eo.ODEProblem(
        lambda u, p, t: {"x": p[0] * p[1][0] * jnp.ones(1)}["x"],
        [0.0],
        (0.0, 1.0),
        (1.0, (1.0, "name")),
        integrand=lambda u, p, t: p[0],
    )
    sim = eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=3, **TIGHT)
    np.testing.assert_allclose(sim.u[:, -1, 0], 0.5 + 0.5 * (2.0 + np.arange(3)))
    np.testing.assert_allclose(sim.integral[:, -1], sim.u[:, -1, 0])
    assert sim.u.shape == (3, 2, 1)
    assert sim.events.u_after.shape == (3, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("alg", ["Vern7", "RK4", "Bosh3", "Dopri8"])
def test_methods_and_single_precision(alg):
    """A state that is a pytree, and half of an oscillation that others interpolate otherwise."""

    def turn(integrator):
        u = integrator.u
        return eo.remake(integrator, u={"x": -u["x"], "v": jnp.zeros_like(u["v"])})

    def f(u, p, t):
        return {"x": u["v"], "v": -u["x"]}

    callback = eo.ContinuousCallback(lambda u, t, integrator: u["v"][0], turn)
    options = TIGHT if alg != "RK4" else {"dt": 0.01, "adaptive": False}
    for dtype, off in ((jnp.float64, 1e-7), (jnp.float32, 1e-3)):
        if dtype == jnp.float32 and alg != "RK4":
            options = {"abstol": 1e-6, "reltol": 1e-6}
        u0 = {"x": jnp.ones(1, dtype), "v": jnp.zeros(1, dtype)}
        prob = eo.ODEProblem(f, u0, (0.0, 9.0), callback=callback)
        sol = eo.solve(prob, getattr(eo, alg)(), **options)
        # (From the other side it begins where it began.)
        np.testing.assert_allclose(sol.events.t, [np.pi, 2 * np.pi][: len(sol.events.t)], rtol=off)
        assert sol.events.u_after["x"].dtype == dtype
        np.testing.assert_allclose(sol.events.u_before["x"][0], -1.0, rtol=off)


def test_what_a_discrete_callback_sees():
    """The step before it; and what acted at the same time."""

    def condition(u, t, integrator):
        return (integrator.tprev < 1.0) & (t >= 1.0)

    def affect(integrator):
        gained = integrator.u[0] - integrator.uprev[0]
        return eo.remake(integrator, u=integrator.u + jnp.array([0.0, gained]))

    callbacks = eo.CallbackSet(
        eo.DiscreteCallback(condition, affect),
        eo.DiscreteCallback(lambda u, t, integrator: u[1] > 0, add(-0.125)),
        eo.DiscreteCallback(
            lambda u, t, integrator: True,
            lambda integrator: integrator,
            save_positions=(False,) * 2,
        ),
    )
    sol = line(callbacks, dt=0.25, adaptive=False)
    np.testing.assert_array_equal(sol.events.t, [1.0, 1.0, 1.25])
    np.testing.assert_array_equal(sol.events.which, [0, 1, 1])
    np.testing.assert_allclose(sol.u[-1], [1.0, 0.0], atol=1e-15)


def test_other_numbers_compile_nothing(compiles):
    def solve(at, by):
        ens = eo.EnsembleProblem(
            eo.ODEProblem(lambda u, p, t: jnp.array([1.0, 0.0]), [-1.0, 0.0], (0.0, 2.0)),
            lambda prob, ctx: eo.remake(prob, callback=crossing(ats[ctx.index], add(by))),
        )
        ats = at * jnp.arange(1.0, 5.0)
        return eo.solve(ens, trajectories=4)

    solve(0.1, 1.0)
    compiles.count = 0
    sim = solve(0.2, 3.0)
    assert compiles.count == 0
    np.testing.assert_allclose(sim.events.t[:, 0], 1.0 + 0.2 * np.arange(1, 5))


@pytest.mark.slow
def test_ended_by_a_callback_and_still_asking_for_a_rerun():
    """Has not succeeded, as one that came to its end has not."""
    ens = eo.EnsembleProblem(
        eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0)),
        output_func=lambda sol, ctx: (sol.u, ctx.index == 1),
    )
    half = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, eo.terminate)
    sim = eo.solve(ens, trajectories=2, callback=half, max_repeats=2)
    assert sim.retcode.tolist() == [eo.ReturnCode.Terminated, eo.ReturnCode.Failure]


def test_an_affect_that_stays_on_the_root():
    """The event is one, and the next one is where the condition comes back to zero."""
    nothing = eo.ContinuousCallback(lambda u, t, i: u[0], lambda i: i)
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.stack([u[1], -u[0]]), [0.0, 1.0], (0.0, 10.0), callback=nothing
    )
    sol = eo.solve(prob, abstol=1e-11, reltol=1e-11)
    np.testing.assert_allclose(sol.events.t, np.pi * np.arange(1, 4), rtol=1e-9)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_at_the_end_of_a_stretch(direction):
    """An event at a known time acts once, whichever of the two comes first by rounding."""
    reset = eo.ContinuousCallback(lambda u, t, i: u[0] - 0.5, lambda i: eo.remake(i, u=0 * i.u))
    prob = eo.ODEProblem(
        lambda u, p, t: direction * jnp.ones(1), [0.0], (0.0, 0.875 * direction), callback=reset
    )
    stop = 0.5 * direction
    sol = eo.solve(prob, tstops=[stop], d_discontinuities=[stop], save_everystep=True)
    np.testing.assert_allclose(sol.events.t, [stop], rtol=1e-14)
    np.testing.assert_allclose(sol.u[-1], 0.375, rtol=1e-12)


@pytest.mark.slow
def test_every_step_inside_jit():
    """Rows and gradients as those of a solve that is not staged."""
    halved = eo.ContinuousCallback(lambda u, t, i: u[0] - 2.0, lambda i: eo.remake(i, u=i.u / 2))

    def solve(p, **options):
        prob = eo.ODEProblem(lambda u, p, t: p * u, [1.0], (0.0, 1.0), p, callback=halved)
        return eo.solve(prob, save_everystep=True, **TIGHT_STEPS, **options)

    eager, staged = solve(2.0), jax.jit(lambda p: solve(p, maxiters=100, max_events=3))(2.0)
    n = len(eager.t)
    np.testing.assert_array_equal(staged.t[:n], eager.t)
    np.testing.assert_allclose(staged.u[:n], eager.u, rtol=1e-14)
    assert np.isnan(staged.t[n:-1]).all()
    np.testing.assert_array_equal([staged.t[-1], staged.u[-1, 0]], [1.0, staged.u[n - 1, 0]])
    assert int(staged.events.count) == 2
    # Both sides of each event, at one time.
    assert (np.diff(eager.t) == 0).sum() == 2

    def end(p):
        sol = solve(p, maxiters=100, max_events=3)
        return sol.u[sol.length - 1, 0]

    value, slope = jax.jit(jax.value_and_grad(end))(2.0)
    np.testing.assert_allclose([value, slope], np.exp(2.0) / 4 * np.ones(2), rtol=1e-7)


TIGHT_STEPS = {"abstol": 1e-9, "reltol": 1e-9}
