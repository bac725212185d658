"""The published result of SciML's data-parallel training tutorial."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ensembleode as eo

from .marks import slow_unless
from .test_conformance import ALGORITHMS, QUICK


PUBLISHED = [1.094120061965113, -0.41178007289727964]


def loss(theta, ensemblealg, **options):
    prob = eo.ODEProblem(lambda u, p, t: 1.01 * u * p, theta[:1], (0.0, 1.0), theta[1:])

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=0.5 + ctx.sim_id / 100 * prob.u0)

    ens = eo.EnsembleProblem(prob, prob_func=prob_func)
    sim = eo.solve(ens, eo.Tsit5(), ensemblealg, saveat=0.1, trajectories=100, **options)
    return jnp.sum((1.0 - sim.u) ** 2)


def trained(ensemblealg, **options):
    """The parameters after 99 updates."""
    optimizer = optax.adam(0.1)
    theta = jnp.array([3.0, 1.0])
    state = optimizer.init(theta)

    @jax.jit
    def update(theta, state):
        gradient = jax.grad(loss)(theta, ensemblealg, **options)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(theta, updates), state

    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        for _ in range(99):
            theta, state = update(theta, state)
    return theta


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", [slow_unless(name in QUICK, name) for name in ALGORITHMS])
@pytest.mark.parametrize(
    "options", [{}, slow_unless(False, {"abstol": 1e-10, "reltol": 1e-10})], ids=str
)
def test_training(name, options):
    """At the default tolerances, too: the steps are those of OrdinaryDiffEq."""
    theta = trained(ALGORITHMS[name], **options)
    np.testing.assert_allclose(theta, PUBLISHED, atol=2e-6, rtol=0)
