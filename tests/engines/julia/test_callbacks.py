"""Callbacks in Julia, compared with those of the compiled engine, which follow the same rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ...julia_powers import JuliasController
from ...marks import julia_marks
from ..test_julia_steps import robertson


pytestmark = julia_marks()

ENGINES = ("julia", "compiled")
# With smaller tolerances, the error of a step up to a known time would be mere rounding.
TOLERANCES = {"abstol": 1e-5, "reltol": 1e-5}
PLACES = {
    "serial": eo.EnsembleSerial(),
    "threads": eo.EnsembleThreads(),
    "distributed": eo.EnsembleDistributed(workers=2),
}


def swing(u, p, t):
    return jnp.stack([u[1], -p["k"] * jnp.sin(u[0])])


def kicked(integrator):
    return eo.remake(integrator, u=integrator.u * jnp.array([1.0, -0.9]))


def stiffer(integrator):
    return eo.remake(integrator, p=integrator.p | {"k": 1.1 * integrator.p["k"]})


def dosed(integrator):
    return eo.remake(integrator, u=integrator.u + integrator.p["dose"])


def dosed_by(x):
    return lambda integrator: eo.remake(integrator, u=integrator.u + x)


FALLS = eo.ContinuousCallback(lambda u, t, _: u[0], None, kicked)
PASSES = eo.VectorContinuousCallback(
    lambda u, t, integrator: jnp.stack([u[0] - 0.2, u[1], u[0] - integrator.p["dose"]]),
    lambda integrator, mask: eo.remake(
        integrator, u=integrator.u + jnp.where(mask[:2] != 0, 0.01, 0.0)
    ),
    3,
)
TURNS = eo.DiscreteCallback(
    lambda u, t, integrator: (integrator.uprev[1] < 0) & (u[1] >= 0), stiffer
)
CASES = {
    "continuous": FALLS,
    "vector": PASSES,
    "discrete": TURNS,
    "set": eo.CallbackSet(TURNS, FALLS, PASSES),
    "periodic": eo.PeriodicCallback(dosed, 0.7, phase=0.2, initial_affect=True, final_affect=True),
    "ends": eo.ContinuousCallback(lambda u, t, _: u[0] + 0.5, eo.terminate),
    "on a circle": eo.ManifoldProjection(
        lambda u, p, t: u[1] ** 2 / 2 - p["k"] * jnp.cos(u[0]) - p["energy"]
    ),
}


def both(callback, n=3, place=None, alg=None, **options):
    """The solutions by Julia and by the compiled engine, with different numbers for each
    trajectory."""

    def prob_func(prob, ctx):
        k, angle = 1.0 + 0.3 * ctx.index, 1.0 + 0.2 * ctx.index
        energy = -k * jnp.cos(angle)
        p = {"k": k, "dose": 0.1 * (1 + ctx.index), "energy": energy}
        return eo.remake(prob, u0=jnp.stack([angle, jnp.zeros(())]), p=p)

    p = {"k": 1.0, "dose": 0.1, "energy": 0.0}
    prob = eo.ODEProblem(swing, [1.0, 0.0], (0.0, 10.0), p)
    ens = eo.EnsembleProblem(prob, prob_func)
    options = {"trajectories": n, "callback": callback, **TOLERANCES, **options}
    place = place or eo.EnsembleSerial()
    sim = eo.solve(ens, alg, place, engine="julia", **options)
    # With Julia's powers, the times of steps agree to rounding errors.
    return sim, eo.solve(ens, alg, stepsize_controller=JuliasController(), **options)


def agree(sim, ours, near=1e-8):
    assert sim.engine.name == "julia"
    np.testing.assert_array_equal(sim.retcode, ours.retcode)
    np.testing.assert_array_equal(sim.stats.naccept, ours.stats.naccept)
    np.testing.assert_array_equal(sim.stats.nreject, ours.stats.nreject)
    np.testing.assert_allclose(sim.u, ours.u, rtol=near, atol=near)
    np.testing.assert_allclose(sim.t, ours.t, rtol=near, atol=near)
    if ours.events is not None:
        np.testing.assert_array_equal(sim.events.count, ours.events.count)
        np.testing.assert_array_equal(sim.events.which, ours.events.which)
        np.testing.assert_array_equal(sim.events.direction, ours.events.direction)
        for name in ("t", "u_before", "u_after"):
            found, expected = (getattr(x.events, name) for x in (sim, ours))
            np.testing.assert_allclose(found, expected, rtol=near, atol=near)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("saving", ["ends", "times", "steps"])
@pytest.mark.parametrize("name", CASES)
def test_as_the_compiled_engine(name, saving):
    options = {"ends": {}, "times": {"saveat": 0.5}, "steps": {"save_everystep": True}}[saving]
    sim, ours = both(CASES[name], **options)
    if ours.events is None:
        assert name == "on a circle"
    else:
        assert np.asarray(ours.events.count).min() > 0
    # Within a step that an event cuts, Julia interpolates over the part before the event. After a
    # short step up to a known time, rounding errors decide the size of the next step.
    rough = name == "periodic" and saving == "steps"
    agree(sim, ours, near=2e-3 if rough else 1e-5 if saving == "times" else 1e-8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", PLACES)
def test_places(place):
    sim, ours = both(CASES["set"], 5, PLACES[place], saveat=1.0)
    agree(sim, ours, near=1e-5)


def test_lazy_interpolants():
    sim, ours = both(FALLS, alg=eo.Vern7())
    agree(sim, ours)


def test_times_of_each():
    """Doses at times that are computed from p, for each trajectory."""

    def prob_func(prob, ctx):
        lag = prob.p["lag"] * (1 + ctx.index)
        doses = eo.PresetTimeCallback(jnp.stack([lag + 4.0, lag, jnp.inf]), dosed)
        return eo.remake(prob, p=prob.p | {"lag": lag}, callback=doses)

    p = {"lag": jnp.array(0.75), "dose": 2.0}
    prob = eo.ODEProblem(lambda u, p, t: -0.5 * u, [1.0], (0.0, 10.0), p)
    ens = eo.EnsembleProblem(prob, prob_func)
    options = {"trajectories": 3, "saveat": 2.0, **TOLERANCES}
    sim, ours = (eo.solve(ens, engine=engine, **options) for engine in ENGINES)
    agree(sim, ours, near=1e-6)
    lags = 0.75 * np.arange(1, 4)
    np.testing.assert_array_equal(sim.events.t[:, :2], np.stack([lags, lags + 4], axis=1))
    inside = jax.jit(lambda: eo.solve(ens, engine="julia", max_events=2, **options).u)()
    np.testing.assert_array_equal(inside, sim.u)


def test_more_events_than_there_is_room_for():
    sim, ours = both(PASSES, max_events=3)
    agree(sim, ours)
    assert (sim.retcode == eo.ReturnCode.MaxEvents).all()


def test_more_room_where_nobody_says_how_much():
    every = eo.DiscreteCallback(lambda u, t, _: True, lambda integrator: integrator)
    sim, ours = both(every)
    agree(sim, ours)
    assert np.asarray(sim.events.count).min() > 16


def test_large_fields():
    """Large states are solved in place, and conditions and affects allocate their own memory."""
    n = 100
    a = jnp.asarray(np.random.default_rng(0).normal(size=(n, n)) / n)

    def f(u, p, t):
        return p @ jnp.tanh(u) - 0.1 * u

    half = eo.ContinuousCallback(lambda u, t, _: jnp.sum(u) / n - 0.7, eo.terminate)
    doubled = eo.PresetTimeCallback(
        [1.0], lambda integrator: eo.remake(integrator, u=integrator.u + 0.1 * (a @ integrator.u))
    )
    prob = eo.ODEProblem(f, np.ones(n), (0.0, 10.0), a, callback=eo.CallbackSet(half, doubled))
    sim, ours = (eo.solve(prob, engine=engine, **TOLERANCES) for engine in ENGINES)
    agree(sim, ours, near=1e-6)
    assert sim.retcode == eo.ReturnCode.Terminated


def test_no_component_below_zero():
    prob = eo.ODEProblem(
        lambda u, p, t: -p * u, [1.0], (0.0, 5.0), 100.0, callback=eo.PositiveDomain(), abstol=1e-2
    )
    sim, ours = (eo.solve(prob, engine=engine, save_everystep=True) for engine in ENGINES)
    agree(sim, ours, near=1e-6)
    assert (np.asarray(sim.u) >= 0).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alg", [eo.Rosenbrock23(), eo.Rodas5P()], ids=str)
def test_stiff_methods(alg):
    def halved(integrator):
        return eo.remake(integrator, u=integrator.u * jnp.array([0.5, 1.0, 1.0]))

    low = eo.ContinuousCallback(lambda u, t, _: u[0] - 0.9, halved)
    p = jnp.array([0.04, 3e7, 1e4])
    prob = eo.ODEProblem(robertson, jnp.array([1.0, 0.0, 0.0]), (0.0, 5.0), p, callback=low)
    how = TOLERANCES | ({"saveat": 0.02} if isinstance(alg, eo.Rodas5P) else {})
    sim, ours = (eo.solve(prob, alg, engine=engine, **how) for engine in ENGINES)
    agree(sim, ours, near=1e-6)
    assert sim.events.count == 1


def test_no_derivatives():
    def end(p):
        prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 2.0), p)
        doses = eo.PresetTimeCallback([1.0], dosed_by(1.0))
        return eo.solve(prob, callback=doses, engine="julia").u[-1, 0]

    with pytest.raises(TypeError, match=r"has callbacks, .* engine='compiled'"):
        jax.grad(end)(1.0)
