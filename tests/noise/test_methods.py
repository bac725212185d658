"""The methods: paths of others, orders, and distributions."""

import functools
import json
import math
import operator
import pathlib

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless
from .problems import A, B, brownian, constant, decay, METHODS, moments


RECORDED = json.loads((pathlib.Path(__file__).parents[1] / "data" / "julia_sde.json").read_text())
OF_JULIA = {
    "gbm": (lambda u, p, t: 1.01 * u, lambda u, p, t: 0.87 * u, 0.5),
    "additive": (
        lambda u, p, t: 0.1 / jnp.sqrt(1 + t) - u / (2 * (1 + t)),
        lambda u, p, t: 0.005 / jnp.sqrt(1 + t),
        1.0,
    ),
}
FIRST = {record["alg"]: record for record in RECORDED["records"]}


@pytest.mark.parametrize(
    "record",
    [
        slow_unless(x is FIRST[x["alg"]], x, id=f"{x['alg']}-{x['problem']}-{x['steps']}")
        for x in RECORDED["records"]
    ],
)
def test_paths_are_those_of_julia(record):
    f, g, u0 = OF_JULIA[record["problem"]]
    noise = eo.NoiseGrid(*(np.array(RECORDED[name]) for name in ("grid_t", "W", "Z")))
    prob = eo.SDEProblem(f, g, u0, (0.0, 1.0), noise=noise)
    sol = eo.solve(
        prob, METHODS[record["alg"]], adaptive=False, dt=1 / record["steps"], saveat=1 / 16
    )
    np.testing.assert_allclose(sol.u, record["u"], rtol=0, atol=1e-12)


def coarser(t, w, every):
    """The paths W and Z at every so many points of a fine path of W, whose integrals they have."""
    ends = w[::every]
    h, dw = t[every] - t[0], np.diff(ends, axis=0)
    within = w[:-1].reshape(len(dw), every, *w.shape[1:])
    after = w[1:].reshape(within.shape)
    integral = (0.5 * (within + after) - within[:, :1]).sum(1) * (t[1] - t[0])
    dz = math.sqrt(3) * (2 * integral / h - dw)
    return eo.NoiseGrid(t[::every], ends, np.concatenate([0 * dz[:1], dz.cumsum(0)]))


@functools.cache
def fine_paths(n, steps):
    rng = np.random.default_rng(3)
    w = rng.normal(scale=steps**-0.5, size=(n, steps, 1)).cumsum(1)
    return np.linspace(0, 1, steps + 1), np.concatenate([np.zeros((n, 1, 1)), w], axis=1)


STRATONOVICH = {"EulerHeun", "RKMil, Stratonovich"}
QUICK = {("EM", "multiplicative"), ("SRIW1", "multiplicative"), ("SOSRA", "additive")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        slow_unless((name, kind) in QUICK, name, kind)
        for name, alg in METHODS.items()
        for kind in ("multiplicative", "additive")
        if kind == "additive" or not alg.additive
    ],
)
def test_strong_order(name, kind):
    """Against the exact solution on the same paths: geometric Brownian motion, and a process with
    additive noise that depends on the time."""
    alg, n, fine = METHODS[name], 60, 2**14
    t, w = fine_paths(n, fine)
    if kind == "multiplicative":
        order, drift = alg.order, A if name in STRATONOVICH else A - B**2 / 2
        order = 1.0 if name == "EulerHeun" else order  # (The noise is scalar.)
        prob, exact = brownian(u0=[0.5]), 0.5 * np.exp(drift + B * w[:, -1])
    else:
        order = max(1.0, alg.order)
        prob = brownian(lambda u, p, t: p["b"] * (1 + t) + 0 * u, decay, u0=[0.5])
        middle = 0.5 * (t[1:] + t[:-1])
        steps = np.exp(-A * (1 - middle))[:, None] * B * (1 + middle)[:, None]
        exact = 0.5 * math.exp(-A) + (steps * np.diff(w, axis=1)).sum(1)
    errors, sizes = [], (2**6, 2**9)
    for size in sizes:
        grids = [coarser(t, x, fine // size) for x in w]
        paths = jax.tree.map(lambda *xs: jnp.stack(xs), *grids)

        def one(prob, ctx, paths=paths):
            return eo.remake(prob, noise=jax.tree.map(operator.itemgetter(ctx.index), paths))

        ens = eo.EnsembleProblem(eo.remake(prob, noise=grids[0]), one)
        sim = eo.solve(ens, alg, trajectories=n, adaptive=False, dt=1 / size, saveat=[1.0])
        errors.append(np.sqrt(np.mean((np.asarray(sim.u[:, -1]) - exact) ** 2)))
    found = math.log(errors[0] / errors[1]) / math.log(sizes[1] / sizes[0])
    assert found > order - 0.2, (found, errors)


def heston(u, p, t):
    return jnp.stack([p["mu"] * u[0], p["kappa"] * (p["theta"] - u[1])])


def heston_noise(u, p, t):
    root = jnp.sqrt(jnp.maximum(u[1], 0.0))
    return jnp.stack([root * u[0], p["xi"] * root])


@pytest.mark.parametrize("n", [slow_unless(True, 10_000), slow_unless(False, 1_000_000)])
@pytest.mark.parametrize("name", ["Ornstein-Uhlenbeck", "geometric", "Heston", "CIR"])
def test_means_and_variances(name, n):
    """Within four standard errors, with steps whose bias is smaller."""
    dt, where = 1 / 128, 0
    if name == "Ornstein-Uhlenbeck":
        prob, alg = brownian(constant, decay, u0=[0.5]), eo.SOSRA()
        expected = 0.5 * math.exp(-A), B**2 * (1 - math.exp(-2 * A)) / (2 * A)
    elif name == "geometric":
        p = {"a": jnp.array(0.5), "b": jnp.array(0.3)}
        prob, alg = eo.remake(brownian(u0=[0.5]), p=p), eo.SOSRI()
        mean = 0.5 * math.exp(0.5)
        expected = mean, mean**2 * (math.exp(0.3**2) - 1)
    elif name == "Heston":
        p = {"mu": 0.1, "kappa": 2.0, "theta": 0.04, "xi": 0.3}
        factor = np.linalg.cholesky(np.array([[1, -0.7], [-0.7, 1]]))
        noise = eo.WienerProcess(factor=factor)
        u0 = jnp.array([1.0, 0.04])
        prob, alg = eo.SDEProblem(heston, heston_noise, u0, (0.0, 1.0), p, noise=noise), eo.EM()
        dt, expected = 1 / 512, (math.exp(0.1), None)
    else:
        # Near zero, which it may reach: 2 a b < sigma^2.
        a, b, sigma, x = 1.0, 0.05, 0.4, 0.05
        prob, alg = (
            eo.SDEProblem(
                lambda u, p, t: a * (b - u),
                lambda u, p, t: sigma * jnp.sqrt(jnp.maximum(u, 0.0)),
                jnp.array([x]),
                (0.0, 1.0),
            ),
            eo.EM(split=False),
        )
        dt, decayed = 1 / 512, math.exp(-a)
        variance = sigma**2 / a * (x * (decayed - decayed**2) + b / 2 * (1 - decayed) ** 2)
        expected = x * decayed + b * (1 - decayed), variance
    sim = eo.solve(
        eo.EnsembleProblem(prob), alg, trajectories=n, adaptive=False, dt=dt, saveat=[1.0]
    )
    assert not len(sim.failed)
    for (found, error), exact in zip(moments(sim.u[:, -1, where]), expected, strict=True):
        # (The bias of a step: of the order of dt.)
        assert exact is None or abs(found - exact) < 4 * error + dt * abs(exact) * 0.5


@pytest.mark.slow
@pytest.mark.parametrize("alg", [diffrax.SRA1(), diffrax.ShARK()])
def test_methods_of_diffrax(alg):
    prob = brownian(constant, decay)
    options = {"trajectories": 500, "dt": 0.05, "saveat": [0.5, 1.0]}
    sim = eo.solve(eo.EnsembleProblem(prob), alg, **options)
    assert sim.engine.name == "diffrax"
    (mean, error), (variance, spread) = moments(sim.u[:, -1, 0])
    assert abs(mean - 0.5 * math.exp(-A)) < 4 * error
    assert abs(variance - B**2 * (1 - math.exp(-2 * A)) / (2 * A)) < 4 * spread
    alone = eo.solve(prob, alg, dt=0.05, saveat=[0.5, 1.0]).u
    np.testing.assert_allclose(alone, sim.u[0], rtol=1e-9)

    def loss(a):
        made = eo.EnsembleProblem(eo.remake(prob, p=prob.p | {"a": a}))
        return eo.solve(made, alg, trajectories=3, dt=0.1).u[:, -1].sum()

    expected = (loss(A + 1e-5) - loss(A - 1e-5)) / 2e-5
    np.testing.assert_allclose(jax.grad(loss)(A), expected, rtol=1e-6)
