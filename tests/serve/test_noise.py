"""Stochastic problems over HTTP: the same answers as those of `solve`."""

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .running import Running


def growth():
    return eo.SDEProblem(
        lambda u, p, t: p * u, lambda u, p, t: 0.3 * u, jnp.array([1.0]), (0.0, 1.0), jnp.array(0.5)
    )


def decay():
    return eo.JumpProblem(lambda u, p, t: p * u, [[-1.0]], [50], (0.0, 1.0), jnp.array(1.0))


def test_answers_are_those_of_solve(tmp_path):
    times, starts = jnp.array([0.5, 1.0]), np.array([[1.0], [2.0], [30.0]])
    registry = eo.serve.Registry()
    registry.add("growth", growth(), alg=eo.SOSRI(), saveat=times)
    registry.add("decay", decay(), saveat=times)
    with pytest.raises(ValueError, match="alg is missing"):
        registry.add("other", growth(), saveat=times)
    with Running(registry, store=tmp_path) as running, eo.Client(running.url) as client:
        for name, prob in (("growth", growth()), ("decay", decay())):
            found = client.solve(name, u0=starts)
            expected = eo.solve(eo.EnsembleProblem(prob, u0=jnp.asarray(starts)), saveat=times)
            np.testing.assert_allclose(found.u, expected.u, rtol=1e-12)
