"""Integrals along solutions. (On all ensemble algorithms: test_conformance.py; on GPUs:
test_ptx_solves.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .marks import slow_unless
from .problems import decay, linear, lorenz, scaled


TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
ENGINES = ["compiled", slow_unless(False, "diffrax")]


def area(u, p, t):
    """Of the first component, with the integral of t beside it."""
    return {"area": u[..., 0], "time": jnp.stack([t, 2 * t])}


def decaying(rate=0.7, **parts):
    """The area under u0 exp(-rate t) is u0 (1 - exp(-rate t)) / rate."""
    return eo.ODEProblem(linear, [1.0, 2.0], (0.0, 2.0), -rate, integrand=area, **parts)


def exact_area(rate, t):
    return (1 - jnp.exp(-rate * t)) / rate


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options", [{}, {"saveat": 0.5}, {"save_everystep": True}, {"saveat": 0.3, "dt": 0.01}]
)
def test_area_under_a_curve(engine, options):
    alg = eo.RK4() if "dt" in options else eo.Tsit5()
    sol = eo.solve(decaying(), alg, engine=engine, **options, **TIGHT)
    assert set(sol.integral) == {"area", "time"}
    np.testing.assert_allclose(sol.integral["area"], exact_area(0.7, sol.t), atol=2e-9)
    squares = np.stack([sol.t**2 / 2, sol.t**2], axis=1)
    np.testing.assert_allclose(sol.integral["time"], squares, atol=1e-13)


def test_backwards_in_time_it_is_negative():
    prob = eo.ODEProblem(lambda u, p, t: -u, 1.0, (1.0, 0.0), integrand=lambda u, p, t: u)
    sol = eo.solve(prob, **TIGHT)
    assert sol.integral.shape == (2,)
    np.testing.assert_allclose(sol.integral[-1], 1 - np.e, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"saveat": 0.25},
        {"save_everystep": True, "abstol": np.array([1e-6, 1e-9, 1e-7])},
        {"adaptive": False, "dt": 0.01, "saveat": 0.25},
        {"internalnorm": eo.MaxNorm(), "stepsize_controller": eo.IController()},
    ],
)
def test_the_solution_and_its_steps_are_as_without(engine, options):
    """To the last bit, also where the integral grows far faster than the state."""

    def solved(integrand):
        p, u0 = jnp.array([10.0, 28.0, 8 / 3]), jnp.array([1.0, 0.0, 0.0])
        prob = eo.ODEProblem(lorenz, u0, (0.0, 2.0), p, integrand=integrand)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=ctx.sim_id * prob.u0))
        return eo.solve(ens, trajectories=3, engine=engine, **options)

    without = solved(None)
    sim = solved(lambda u, p, t: jnp.exp(50 * t) * u)
    assert without.integral is None
    assert sim.integral.shape == sim.u.shape
    np.testing.assert_array_equal(sim.u, without.u)
    np.testing.assert_array_equal(sim.t, without.t)
    for name in ("naccept", "nreject", "nf"):
        np.testing.assert_array_equal(getattr(sim.stats, name), getattr(without.stats, name))
    if "save_everystep" in options:
        np.testing.assert_array_equal(sim(0.77), without(0.77))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd, jax.hessian])
def test_derivatives(engine, derivative):
    def end(rate, start):
        prob = eo.remake(decaying(rate), u0=start * jnp.array([1.0, 2.0]))
        return eo.solve(prob, engine=engine, **TIGHT).integral["area"][-1]

    def exact(rate, start):
        return start * exact_area(rate, 2.0)

    got, expected = (derivative(fn, argnums=(0, 1))(0.7, 1.5) for fn in (end, exact))
    np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_gradients_of_an_ensemble_by_what_each_has_and_all_share():
    rates = jnp.array([0.3, 0.7, 1.1])

    def total(rates, scale):
        prob = eo.ODEProblem(linear, 1.0, (0.0, 2.0), 0.0)
        prob = eo.remake(prob, integrand=lambda u, p, t: scale * u**2)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=-rates[ctx.index]))
        return jnp.sum(eo.solve(ens, trajectories=3, saveat=1.0, **TIGHT).integral[:, 1:])

    def exact(rates, scale):
        return scale * sum(jnp.sum(exact_area(2 * rates, t)) for t in (1.0, 2.0))

    got, expected = (jax.jit(jax.grad(fn, (0, 1)))(rates, 2.5) for fn in (total, exact))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8)
    mapped = jax.vmap(total, in_axes=(None, 0))(rates, jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(mapped, [exact(rates, 1.0), exact(rates, 2.0)], rtol=1e-8)


@pytest.mark.slow
def test_log_determinant_of_a_flow():
    """d(log det)/dt is the trace of the Jacobian (Chen et al., 2018, section 4)."""
    matrix = jnp.array([[0.3, -1.0, 0.0], [1.0, -0.2, 0.5], [0.1, 0.0, -0.4]])

    def trace_of(u, p, t):
        return jnp.trace(jax.jacfwd(lambda u: p @ u)(u))

    prob = eo.ODEProblem(lambda u, p, t: p @ u, jnp.ones(3), (0.0, 1.5), matrix)
    sol = eo.solve(eo.remake(prob, integrand=trace_of), **TIGHT)
    flow = jax.jacfwd(lambda u0: eo.solve(eo.remake(prob, u0=u0), **TIGHT).u[-1])(prob.u0)
    np.testing.assert_allclose(sol.integral[-1], 1.5 * jnp.trace(matrix), rtol=1e-12)
    np.testing.assert_allclose(sol.integral[-1], jnp.linalg.slogdet(flow)[1], rtol=1e-8)


def test_states_of_other_shapes():
    tree = eo.ODEProblem(
        lambda u, p, t: {"b": -u["b"], "a": u["b"].sum() - u["a"]},
        {"b": jnp.ones((2, 2)), "a": 0.0},
        (0.0, 1.0),
        integrand=lambda u, p, t: u,
        abstol={"a": 1e-10, "b": np.full((2, 2), 1e-10)},
        reltol=1e-10,
    )
    sol = eo.solve(tree, saveat=0.5)
    assert jax.tree.structure(sol.integral) == jax.tree.structure(sol.u)
    np.testing.assert_allclose(sol.integral["b"][-1], np.full((2, 2), 1 - np.exp(-1)), rtol=1e-8)
    # a' = b - a: the integral of a is that of b less a.
    np.testing.assert_allclose(
        sol.integral["a"], sol.integral["b"].sum((1, 2)) - sol.u["a"], atol=1e-8
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_failed_trajectories(engine):
    """NaN where they did not get to, and no part of a gradient."""
    prob = eo.ODEProblem(lambda u, p, t: u**2, 1.0, (0.0, 1.0), integrand=lambda u, p, t: u)

    def sim_of(size):
        def prob_func(prob, ctx):
            return eo.remake(prob, u0=size * (0.5 + ctx.index))

        ens = eo.EnsembleProblem(prob, prob_func)
        return eo.solve(ens, trajectories=2, saveat=0.25, engine=engine, **TIGHT)

    sim = sim_of(1.0)
    np.testing.assert_array_equal(sim.failed, [1])
    np.testing.assert_array_equal(np.isnan(sim.integral), np.isnan(sim.u))
    np.testing.assert_allclose(sim.integral[0], -np.log(1 - 0.5 * sim.t), atol=1e-8)

    def loss(size):
        sim = sim_of(size)
        return jnp.sum(jnp.where(sim.successful, sim.integral[:, -1], 0.0))

    np.testing.assert_allclose(jax.grad(loss)(1.0), 1.0, rtol=1e-7)


@pytest.mark.slow
def test_through_events_and_parameters_that_they_change():
    """A dose of 50 at t = 12 adds its own area; a rate that is tripled at t = 12 its integral."""

    def dosed(integrator):
        return eo.remake(integrator, u=integrator.u + 50.0, p=3 * integrator.p)

    def rate_and_area(u, p, t):
        return {"rate": p, "area": u}

    prob = eo.ODEProblem(lambda u, p, t: -p * u, 100.0, (0.0, 24.0), 0.1, integrand=rate_and_area)
    sol = eo.solve(prob, callback=eo.PresetTimeCallback([12.0], dosed), saveat=6.0, **TIGHT)
    np.testing.assert_allclose(sol.integral["rate"][-1], 12 * 0.1 + 12 * 0.3, rtol=1e-10)
    before = 100 * np.exp(-1.2) + 50
    expected = 100 * exact_area(0.1, 12.0) + before * exact_area(0.3, 12.0)
    np.testing.assert_allclose(sol.integral["area"][-1], expected, rtol=1e-8)
    assert (sol.p, sol.u0) == (0.1, 100.0)


@pytest.mark.slow
def test_derivatives_through_an_event():
    """The area under a ball that bounces once, by gravity and restitution."""

    def bounced(integrator):
        return eo.remake(integrator, u=jnp.array([0.0, -integrator.p[1] * integrator.u[1]]))

    prob = eo.ODEProblem(
        lambda u, p, t: jnp.stack([u[1], -p[0]]), [1.0, 0.0], (0.0, 1.0), jnp.array([9.81, 0.9])
    )
    prob = eo.remake(prob, integrand=lambda u, p, t: u[0])
    bounce = eo.ContinuousCallback(lambda u, t, integrator: u[0], None, bounced)

    def area(p):
        return eo.solve(eo.remake(prob, p=p), callback=bounce, **TIGHT).integral[-1]

    def exact(p):
        g, restitution = p
        t = jnp.sqrt(2 / g)
        v, rest = restitution * g * t, 1 - t
        return t - g * t**3 / 6 + v * rest**2 / 2 - g * rest**3 / 6

    for derivative in (jax.grad, jax.hessian):
        got, expected = derivative(area)(prob.p), derivative(exact)(prob.p)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_integral_that_is_infinite_fails_nothing(engine):
    def pole(u, p, t):
        return 1 / jnp.where(t > 0.5, 0.0, 1.0)

    prob = eo.ODEProblem(lambda u, p, t: -u, 1.0, (0.0, 1.0), integrand=pole)
    sol = eo.solve(prob, saveat=0.25, engine=engine, dtmax=0.2)  # (A step across it has it all.)
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.u[-1], np.exp(-1), rtol=1e-3)
    assert np.isfinite(sol.integral[:2]).all()
    assert not np.isfinite(sol.integral[-1])


@pytest.mark.slow
def test_in_output_func_reruns_and_reductions():
    def output_func(sol, ctx):
        return sol.integral["area"][-1], (ctx.index == 1) & (ctx.repeat == 1)

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=(ctx.sim_id + 10.0 * (ctx.repeat - 1)) * prob.u0)

    ens = eo.EnsembleProblem(decaying(**TIGHT), prob_func, output_func)
    sim = eo.solve(ens, trajectories=3, batch_size=2)
    expected = np.array([1.0, 12.0, 3.0]) * exact_area(0.7, 2.0)
    np.testing.assert_allclose(sim.u, expected, rtol=1e-8)
    assert sim.integral is None
    ens = eo.EnsembleProblem(
        decaying(**TIGHT), scaled, lambda sol, ctx: (sol.integral["area"][-1], False),
        eo.sum_reduction,
    )  # fmt: skip
    np.testing.assert_allclose(eo.solve(ens, trajectories=3).u, 6 * exact_area(0.7, 2.0), rtol=1e-8)


@pytest.mark.slow
def test_batches_xarray_and_stores(tmp_path):
    pytest.importorskip("zarr")
    ens = eo.EnsembleProblem(decaying(), scaled)
    whole = eo.solve(ens, trajectories=5, saveat=0.5)
    kept = eo.solve(ens, trajectories=5, saveat=0.5, store=tmp_path / "s.zarr", batch_size=2)
    batches = eo.solve(ens, trajectories=5, saveat=0.5, batch_size=2)
    for name in whole.integral:
        for sim in (batches, kept, eo.open_ensemble(tmp_path / "s.zarr")):
            np.testing.assert_array_equal(sim.integral[name], whole.integral[name])
            np.testing.assert_array_equal(sim[3].integral[name], whole.integral[name][3])
        labelled = whole.to_xarray()[f"integral.{name}"]
        assert labelled.dims[:2] == ("trajectory", "time")
        np.testing.assert_array_equal(labelled, whole.integral[name])
    with pytest.raises(eo.StoreError, match="integrand"):
        eo.solve(
            eo.EnsembleProblem(eo.remake(decaying(), integrand=lambda u, p, t: u), scaled),
            trajectories=5, saveat=0.5, store=tmp_path / "s.zarr", batch_size=2,
        )  # fmt: skip
    np.testing.assert_array_equal(kept.u0, whole.u0)
    single = eo.ODEProblem(linear, 1.0, (0.0, 1.0), -1.0, integrand=lambda u, p, t: u)
    assert eo.solve(single, saveat=0.5).to_xarray()["integral"].dims == ("time",)


def test_an_integrand_is_taken_away_and_changed_by_remake():
    prob = decaying()
    assert eo.solve(eo.remake(prob, integrand=None)).integral is None
    sol = eo.solve(eo.remake(prob, integrand=lambda u, p, t: 3, p=-0.1), **TIGHT)
    np.testing.assert_allclose(sol.integral, [0.0, 6.0], rtol=1e-12)


@pytest.mark.parametrize(
    ("integrand", "error", "message"),
    [
        (3.0, TypeError, "integrand must be a function"),
        (lambda u, p: u, TypeError, "integrand must take the state"),
        (lambda u, p, t: None, ValueError, "returned nothing"),
        (lambda u, p, t: u.astype(complex), TypeError, "integrand must return the dtype"),
    ],
)
def test_bad_integrands(integrand, error, message):
    with pytest.raises(error, match=message):
        eo.solve(eo.ODEProblem(linear, 1.0, (0.0, 1.0), -1.0, integrand=integrand))


@pytest.mark.parametrize(
    "options",
    [
        {"ensemblealg": eo.EnsembleColumns()},
        {"engine": "compiled", "sensealg": eo.GaussAdjoint()},
        {"engine": "diffrax", "sensealg": eo.BacksolveAdjoint()},
    ],
    ids=str,
)
def test_refused_with_the_remedy(options):
    remedy = "let f return what integrand does|GaussAdjoint.. has no integrands|leave it out"
    with pytest.raises(ValueError, match=remedy):
        eo.solve(eo.EnsembleProblem(decaying()), trajectories=2, **options)


def test_all_trajectories_have_one_or_none():
    def prob_func(prob, ctx):
        shape = (2,) if int(ctx.index) else (3,)
        return eo.remake(prob, integrand=lambda u, p, t: jnp.ones(shape))

    with pytest.raises(ValueError, match="varies the"):
        eo.solve(eo.EnsembleProblem(decay(), prob_func), trajectories=2)
