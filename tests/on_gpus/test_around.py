"""Fits, predictions and services where JAX computes on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ensembleode as eo
from ensembleode.ground.devices import placement
from ensembleode.serve.registry import RegistryEntry
from ensembleode.serve.solving import BatchSolver
from ensembleode.tools import doctor

from ..marks import slow_unless
from .test_solves import pytestmark as there_are_gpus


pytestmark = there_are_gpus

WAYS = {
    "one GPU": {},
    "all GPUs": {"dist": True},
    "kernels on two GPUs": {"ensemblealg": eo.EnsembleGPUKernel(devices=2)},
    "arrays on two GPUs": {"ensemblealg": eo.EnsembleGPUArray(devices=2)},
    "the CPU": {"ensemblealg": eo.EnsembleSerial()},
    "CPUs": {"ensemblealg": eo.EnsembleThreads(2)},
}
STARTS = np.linspace(0.5, 1.5, 8)[:, None]


def decayed(rate, starts):
    prob = eo.ODEProblem(lambda u, p, t: -p * u, starts[0], (0.0, 1.0), rate)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index]))
    return eo.solve(ens, trajectories=len(starts), reltol=1e-8, abstol=1e-8).u[:, -1, 0]


def loss(rate, batch):
    return (decayed(rate, batch["starts"]) - batch["ends"]) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_fit_and_predict(way):
    data = {"starts": STARTS, "ends": STARTS[:, 0] * np.exp(-2.0)}
    how = {"optimizer": optax.sgd(0.1), "maxiters": 3, "batch_size": 5, "progress": False}
    result = eo.fit(loss, jnp.array(1.0), data, **how, **WAYS[way])
    with placement.on_cpu():
        expected = eo.fit(loss, jnp.array(1.0), data, **how)
    np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-9)
    np.testing.assert_allclose(result.params, expected.params, rtol=1e-9)
    assert np.isfinite(result.params + jax.device_put(1.0, jax.devices()[1]))
    ends = eo.predict(decayed, 2.0, STARTS, **WAYS[way])
    np.testing.assert_allclose(ends, STARTS[:, 0] * np.exp(-2.0), rtol=1e-7)


@pytest.mark.parametrize(
    "ensemblealg",
    [slow_unless(x is None, x) for x in (None, eo.EnsembleThreads(), eo.EnsembleGPUArray())],
)
def test_a_service(ensemblealg):
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.ones(1), (0.0, 1.0), jnp.ones(1))
    registry = eo.serve.Registry()
    registry.add("decay", prob, reltol=1e-8, abstol=1e-8)
    (entry,) = registry
    assert isinstance(entry, RegistryEntry)
    solver = BatchSolver(entry, ensemblealg)
    for program in solver.programs()[:2]:
        sample = solver._sample(program, 3)
        (answer,) = solver.run(program, [sample])
        np.testing.assert_allclose(answer.u[:, -1, 0], np.exp(-1), rtol=1e-6)


def test_the_doctor():
    assert "EnsembleGPUKernel() run on" in doctor.report()["gpu"]
