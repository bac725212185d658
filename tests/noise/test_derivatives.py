"""Derivatives through a path."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless
from .problems import brownian, check_derivatives, constant, for_method, METHODS


@pytest.mark.parametrize("name", [slow_unless(name == "EM", name, id=name) for name in METHODS])
def test_gradients_against_differences(name):
    alg = METHODS[name]
    prob = for_method(alg)

    def loss(p, u0):
        ens = eo.EnsembleProblem(eo.remake(prob, p=p, u0=u0))
        return jnp.sin(
            eo.solve(ens, alg, trajectories=5, adaptive=False, dt=0.07, saveat=[0.3, 1.0]).u
        ).sum()

    check_derivatives(loss, prob, 1e-6, rtol=1e-6)


@pytest.mark.slow
def test_second_derivatives():
    prob = brownian()

    def loss(b):
        p = prob.p | {"b": b}
        ens = eo.EnsembleProblem(eo.remake(prob, p=p))
        return jnp.sin(eo.solve(ens, eo.SRIW1(), trajectories=3, adaptive=False, dt=0.1).u).sum()

    by = jax.grad(loss)
    found = jax.hessian(loss)(0.3)
    np.testing.assert_allclose(found, (by(0.3 + 1e-6) - by(0.3 - 1e-6)) / 2e-6, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(by, (0.3,), (1.0,))[1], found, rtol=1e-10)


def test_derivatives_by_the_path_and_by_the_factor():
    t, w = np.linspace(0, 1, 9), np.random.default_rng(0).normal(size=(9, 2))
    factor = np.array([[1.0, 0.0], [0.3, 0.8]])

    def by_path(w):
        return (
            eo.solve(brownian(noise=eo.NoiseGrid(t, w)), eo.EM(), adaptive=False, dt=0.125)
            .u[-1]
            .sum()
        )

    def by_factor(factor):
        prob = brownian(noise=eo.WienerProcess(factor=factor))
        return eo.solve(prob, eo.EM(), adaptive=False, dt=0.125).u[-1].sum()

    for fn, x in ((by_path, w), (by_factor, factor)):
        v = np.random.default_rng(1).normal(size=x.shape)
        expected = (fn(x + 1e-6 * v) - fn(x - 1e-6 * v)) / 2e-6
        np.testing.assert_allclose((jax.grad(fn)(jnp.array(x)) * v).sum(), expected, rtol=1e-6)


def test_the_time_of_a_dose_has_the_derivative_of_the_drift():
    """Additive noise moves both solutions alike, so that the derivative is exact."""

    def end(tau):
        dose = eo.PresetTimeCallback(tau[None], lambda x: eo.remake(x, u=x.u + 1.0))
        prob = brownian(constant, lambda u, p, t: -u, callback=dose)
        return eo.solve(prob, eo.SOSRA(), adaptive=False, dt=1e-2).u[-1, 0]

    np.testing.assert_allclose(jax.grad(end)(jnp.array(0.3337)), math.exp(-0.6663), rtol=1e-5)
