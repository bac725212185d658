"""All that an ODE has: callbacks, integrands, failures, reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .problems import A, brownian


def test_callbacks():
    dose = eo.PresetTimeCallback([0.3, 0.55], lambda x: eo.remake(x, u=x.u + 1.0))
    ens = eo.EnsembleProblem(brownian(callback=dose))
    sim = eo.solve(ens, trajectories=5, adaptive=False, dt=1 / 64, saveat=1 / 8, save_noise=True)
    np.testing.assert_allclose(sim.events.u_after - sim.events.u_before, 1.0)
    plain = eo.solve(
        eo.remake(ens, prob=brownian()), trajectories=5, adaptive=False, dt=1 / 64, saveat=1 / 8
    )
    np.testing.assert_array_equal(sim.u[:, :3], plain.u[:, :3])
    hit = eo.ContinuousCallback(lambda u, t, x: u[0] - 1.0, eo.terminate)
    sim = eo.solve(
        eo.EnsembleProblem(brownian(callback=hit)), trajectories=300, adaptive=False, dt=1 / 64
    )
    ended = np.asarray(sim.retcode) == int(eo.ReturnCode.Terminated)
    assert 50 < ended.sum() < 250
    np.testing.assert_allclose(sim.end.u[ended, 0], 1.0, atol=1e-9)
    halve = eo.DiscreteCallback(lambda u, t, x: u[0] > 1.0, lambda x: eo.remake(x, u=x.u / 2))
    sim = eo.solve(
        eo.EnsembleProblem(brownian(callback=halve)),
        trajectories=300,
        adaptive=False,
        dt=1 / 64,
        saveat=1 / 8,
    )
    assert sim.u[..., 0].max() < 2.0
    doubled = eo.PresetTimeCallback(
        [0.5], lambda x: eo.remake(x, p=jax.tree.map(jnp.add, x.p, x.p))
    )
    sol = eo.solve(brownian(callback=doubled), adaptive=False, dt=1 / 64, saveat=0.25)
    np.testing.assert_allclose(sol.p_at["a"], A * np.array([1, 1, 1, 2, 2]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_an_event_keeps_the_path(dtype):
    """One that changes nothing changes no path, which goes on as a line within the step."""
    still = eo.ContinuousCallback(lambda u, t, x: u[0] - 0.1, lambda x: x)
    prob = eo.SDEProblem(
        lambda u, p, t: 0 * u, lambda u, p, t: jnp.ones_like(u), jnp.zeros(2, dtype), (0.0, 1.0)
    )
    options = {"trajectories": 500, "dt": 0.1, "saveat": 0.1, "save_noise": True}
    plain = eo.solve(eo.EnsembleProblem(prob), eo.EM(), **options)
    sim = eo.solve(eo.EnsembleProblem(eo.remake(prob, callback=still)), eo.EM(), **options)
    assert np.asarray(sim.events.count).sum() > 500
    tolerance = 1e-12 if dtype == np.float64 else 2e-6
    np.testing.assert_allclose(sim.u, plain.u, atol=tolerance)
    np.testing.assert_allclose(sim.W, plain.W, atol=tolerance)


@pytest.mark.slow
def test_integrals_are_those_of_the_steps():
    prob = brownian(integrand=lambda u, p, t: {"u": u, "t": t})
    sol = eo.solve(prob, adaptive=False, dt=1 / 64, save_everystep=True, save_noise=True)
    expected = np.trapezoid(sol.u, sol.t, axis=0)
    np.testing.assert_allclose(sol.integral["u"][-1], expected, rtol=1e-12)
    np.testing.assert_allclose(sol.integral["t"][-1], 0.5, rtol=1e-12)
    plain = eo.solve(brownian(), adaptive=False, dt=1 / 64, save_everystep=True)
    np.testing.assert_array_equal(sol.u, plain.u)


def test_one_that_fails_leaves_the_others():
    def burst(u, p, t):
        return jnp.where(u > 2.0, 1e3 * u**3, 0.0)

    ens = eo.EnsembleProblem(brownian(f=burst, u0=(1.0, 1.0)))
    sim = eo.solve(ens, eo.EM(), trajectories=100, adaptive=False, dt=0.05)
    failed = np.isin(np.arange(100), sim.failed)
    assert 5 < failed.sum() < 80
    assert np.isfinite(np.asarray(sim.u)[~failed]).all()
    short = eo.solve(ens, eo.EM(), trajectories=3, adaptive=False, dt=0.05, maxiters=5)
    assert set(short.retcode.tolist()) == {int(eo.ReturnCode.MaxIters)}


@pytest.mark.slow
def test_histogram_of_many_in_the_memory_of_a_batch():
    edges = np.linspace(0, 2, 41)

    def counted(u, data, indices):
        return u + jnp.histogram(data[:, -1, 0], edges)[0].astype(u.dtype), False

    ens = eo.EnsembleProblem(brownian(), reduction=counted, u_init=jnp.zeros(40, int))
    found = eo.solve(ens, eo.EM(), trajectories=20_000, adaptive=False, dt=0.1, batch_size=3_000).u
    whole = eo.solve(
        eo.EnsembleProblem(brownian()), eo.EM(), trajectories=20_000, adaptive=False, dt=0.1
    ).u
    np.testing.assert_array_equal(found, np.histogram(whole[:, -1, 0], edges)[0])
