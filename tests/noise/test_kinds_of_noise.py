"""Diagonal, scalar, general and correlated noise, however it is written."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless
from .problems import A, brownian, check_derivatives, constant, decay, matrix, METHODS


@pytest.mark.parametrize(
    "name", [slow_unless(x in ("EM", "SOSRI"), x, id=x) for x in (*METHODS, "diffrax")]
)
def test_constants_of_python(name):
    """Of a drift and a diffusion: numbers, which tracing leaves what they are."""
    alg = METHODS.get(name) or diffrax.EulerHeun()

    def ends(f, g):
        ens = eo.EnsembleProblem(eo.SDEProblem(f, g, 1.0, (0.0, 1.0)))
        how = [{"dt": 0.125}, {}] if getattr(alg, "adaptive", False) else [{"dt": 0.125}]
        return [eo.solve(ens, alg, trajectories=3, **x).u[:, -1] for x in how]

    expected = ends(lambda u, p, t: 0 * u + 0.5, lambda u, p, t: jnp.full_like(u, 0.1))
    found = ends(lambda u, p, t: 0.5, lambda u, p, t: 0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.ptp(found) > 0.01
    still = ends(lambda u, p, t: 0.0, lambda u, p, t: 0.0)
    np.testing.assert_array_equal(still, np.ones_like(still))


def times(*values):
    """A diffusion, with these numbers."""
    return lambda u, p, t: np.array(values)


# Drifts and diffusions as people write them, the start, and the noise.
WRITTEN = {
    "numbers": (lambda u, p, t: 0.5, lambda u, p, t: 0.3, 1.0, {}),
    "functions of time": (lambda u, p, t: 2 * t, lambda u, p, t: 0.3 * jnp.sin(t), 1.0, {}),
    "a parameter": (decay, lambda u, p, t: p["b"], 1.0, {}),
    "arrays": (times(1.0, 2.0), times(0.1, 0.2), (1.0, 2.0), {}),
    "the state itself": (lambda u, p, t: u, lambda u, p, t: u, (1.0, 2.0), {}),
    "nothing": (lambda u, p, t: 0 * u, lambda u, p, t: jnp.zeros_like(u), (1.0, 2.0), {}),
    "a matrix of numbers": (
        decay,
        times((0.1, 0.2, 0.3), (0.3, 0.2, 0.1)),
        (1.0, 2.0),
        {"noise_rate_prototype": np.zeros((2, 3))},
    ),
    "a matrix of the state": (
        decay,
        lambda u, p, t: jnp.diag(u),
        (1.0, 2.0),
        {"noise_rate_prototype": np.zeros((2, 2))},
    ),
    "one noise": (decay, times(0.5, 0.1), (1.0, 2.0), {"noise": eo.WienerProcess(scalar=True)}),
    "one noise of a number": (
        decay,
        lambda u, p, t: 0.5,
        1.0,
        {"noise": eo.WienerProcess(scalar=True)},
    ),
    "branches": (
        lambda u, p, t: jnp.where(u > 1, -u, u),
        lambda u, p, t: jax.lax.cond(t > 0.5, lambda: 0.1 * u, lambda: p["b"] * u),
        (1.5, 0.4),
        {},
    ),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", WRITTEN)
def test_as_by_hand_however_it_is_written(name):
    f, g, u0, options = WRITTEN[name]
    prob = brownian(g, f, u0, **options)
    how = {"alg": eo.EM(split=False), "dt": 0.125, "saveat": np.linspace(0, 1, 9)}
    sol = eo.solve(prob, **how, save_noise=True)
    u = prob.u0
    for t, dw in zip(sol.t, jnp.diff(sol.W, axis=0), strict=False):
        rate = jnp.asarray(g(u, prob.p, t))
        u = u + 0.125 * f(u, prob.p, t) + (rate @ dw if rate.ndim == 2 else rate * dw)
    np.testing.assert_allclose(sol.u[-1], u, rtol=1e-14)

    def loss(p, u0):
        return eo.solve(eo.remake(prob, p=p, u0=u0), **how).u[-1].sum()

    check_derivatives(loss, prob, 1e-6, rtol=1e-6)


def test_a_matrix_of_noises():
    prob = brownian(matrix, decay, noise_rate_prototype=np.zeros((2, 3)))
    sol = eo.solve(
        prob, eo.EM(split=False), adaptive=False, dt=0.05, save_everystep=True, save_noise=True
    )
    u = np.array([0.5, 0.2])
    for dw in np.diff(sol.W, axis=0):
        u = u - 0.05 * A * u + np.asarray(matrix(jnp.array(u), None, jnp.array(0.0))) @ dw
    np.testing.assert_allclose(sol.u[-1], u, rtol=1e-12)
    assert eo.solve(prob, adaptive=False, dt=0.05).engine.solver == "EM"
    assert np.isfinite(eo.solve(prob, eo.EulerHeun(), adaptive=False, dt=0.05).u).all()
    additive = brownian(
        lambda u, p, t: (1 + t) * jnp.ones((2, 3)), decay, noise_rate_prototype=np.zeros((2, 3))
    )
    assert eo.solve(additive, adaptive=False, dt=0.05).engine.solver == "SOSRA"


def test_a_scalar_noise_drives_all_components():
    prob = brownian(noise=eo.WienerProcess(scalar=True))
    for alg in (eo.EM(), eo.SOSRI()):
        sol = eo.solve(prob, alg, adaptive=False, dt=0.1, save_noise=True, saveat=0.1)
        assert sol.W.shape == (11,)
        np.testing.assert_allclose(sol.u[:, 0] / sol.u[:, 1], 2.5, rtol=1e-12)


def test_correlated_noises():
    factor = np.linalg.cholesky(np.array([[1, -0.7], [-0.7, 1]]))
    prob = brownian(constant, lambda u, p, t: 0 * u, noise=eo.WienerProcess(factor=factor))
    sim = eo.solve(
        eo.EnsembleProblem(prob),
        trajectories=20_000,
        adaptive=False,
        dt=0.5,
        saveat=[1.0],
        save_noise=True,
    )
    for x in (sim.u[:, -1], sim.W[:, -1]):
        assert abs(np.corrcoef(np.asarray(x).T)[0, 1] + 0.7) < 0.02


def test_a_state_that_is_a_pytree():
    def f(u, p, t):
        return {"x": -u["x"] + u["y"].sum(), "y": -p["a"] * u["y"]}

    def g(u, p, t):
        return {"x": 0.1 * u["x"], "y": p["b"] * jnp.ones(2)}

    def flat(u):
        return jnp.concatenate([u["x"][None], u["y"]])

    def state(v):
        return {"x": v[0], "y": v[1:]}

    u0 = {"y": jnp.array([1.0, 2.0]), "x": jnp.array(0.5)}
    prob = brownian(g, f, u0=[0.0])
    tree = eo.remake(prob, u0=u0)
    vector = eo.SDEProblem(
        lambda u, p, t: flat(f(state(u), p, t)),
        lambda u, p, t: flat(g(state(u), p, t)),
        flat(u0),
        (0.0, 1.0),
        prob.p,
    )
    options = {"adaptive": False, "dt": 0.1, "saveat": 0.5, "save_noise": True}
    found, expected = eo.solve(tree, eo.SOSRI(), **options), eo.solve(vector, eo.SOSRI(), **options)
    np.testing.assert_allclose(found.u["y"], expected.u[:, 1:], rtol=1e-12)
    np.testing.assert_array_equal(found.W, expected.W)

    def rows(u, p, t):
        return {"x": jnp.array([0.1, 0.2]), "y": jnp.ones((2, 2)) * 0.3}

    prototype = {"x": np.zeros(2), "y": np.zeros((2, 2))}
    several = eo.remake(tree, g=rows, noise_rate_prototype=prototype)
    sol = eo.solve(several, adaptive=False, dt=0.1, save_noise=True)
    assert sol.W.shape == (2, 2)
    assert sol.u["y"].shape == (2, 2)
