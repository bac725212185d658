"""Adaptive steps, over a tree of the path."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.plan.stochastic_field import stochastic_field
from ensembleode.solvers import brownian_tree

from ..marks import slow_unless
from .problems import (
    A,
    ADAPTIVE,
    ALGORITHMS,
    B,
    brownian,
    check_derivatives,
    constant,
    for_method,
    METHODS,
    rising,
)


@pytest.mark.parametrize("name", [slow_unless(x == "SRIW1", x, id=x) for x in ADAPTIVE])
def test_the_path_does_not_depend_on_tolerances(name):
    alg = METHODS[name]
    ens = eo.EnsembleProblem(for_method(alg))
    options = {"trajectories": 40, "save_noise": True}
    loose, tight = (eo.solve(ens, alg, abstol=x, reltol=x, **options) for x in (0.1, 1e-3))
    assert (tight.stats.naccept > 2 * loose.stats.naccept).all()
    np.testing.assert_allclose(tight.W[:, -1], loose.W[:, -1], atol=1e-12)
    halves = eo.solve(ens, alg, abstol=1e-2, reltol=1e-2, saveat=0.5, **options)
    np.testing.assert_allclose(halves.W[:, -1], loose.W[:, -1], atol=1e-12)
    if not alg.additive:
        errors = [
            np.abs(x.u[:, -1] - ens.prob.u0[None] * np.exp(A - B**2 / 2 + B * x.W[:, -1])).mean()
            for x in (loose, tight)
        ]
        assert errors[1] < min(1e-3, errors[0] / 5)
    u0, p = jax.tree.map(lambda x: x.astype(np.float32), (ens.prob.u0, ens.prob.p))
    half = eo.solve(eo.EnsembleProblem(eo.remake(ens.prob, u0=u0, p=p)), alg, **options)
    np.testing.assert_allclose(half.W[:, -1], loose.W[:, -1], atol=1e-4)


def test_adaptive_steps_are_halves_of_halves():
    sol = eo.solve(brownian(), eo.SRIW1(), save_everystep=True)
    steps = np.diff(sol.t)
    exponents = np.log2(steps)
    np.testing.assert_allclose(exponents, np.round(exponents), atol=1e-9)
    starts = np.asarray(sol.t[:-1]) / steps
    np.testing.assert_allclose(starts, np.round(starts), atol=1e-9)
    assert sol.t[0] == 0.0
    assert sol.t[-1] == 1.0
    assert eo.solve(brownian(), eo.SRIW1(), dtmax=0.01).stats.naccept >= 128
    first = eo.solve(brownian(), eo.SRIW1(), adaptive=True, dt=1e-3, save_everystep=True).t[1]
    assert first == 2.0**-10


@pytest.mark.parametrize("n", [slow_unless(True, 4_000), slow_unless(False, 200_000)])
def test_pieces_of_the_tree_are_a_brownian_path(n):
    """The increments of both processes in pieces of different lengths: their variances, and that
    nothing is correlated."""
    prob = brownian(constant, lambda u, p, t: 0 * u, u0=[0.0])

    ens, pieces = eo.EnsembleProblem(prob), {"adaptive": True, "dt": 1 / 8, "dtmax": 1 / 8}
    sim = eo.solve(
        ens, eo.SRA1(), trajectories=n, saveat=1 / 8, save_noise=True, abstol=1e3, **pieces
    )
    every = np.stack([np.diff(np.asarray(x[..., 0]), axis=1) for x in (sim.W, sim.Z)], -1)
    every = every.reshape(n, -1) * math.sqrt(8)
    found = np.cov(every.T)
    np.testing.assert_allclose(found, np.eye(16), atol=5 * math.sqrt(2 / n))
    assert np.abs(every.mean(0)).max() < 4.5 / math.sqrt(n)
    # Longer pieces are made of the same.
    whole = eo.solve(
        ens, eo.SRA1(), trajectories=n, abstol=1e3, adaptive=True, dt=1.0, save_noise=True
    )
    assert set(whole.stats.naccept.tolist()) == {1}
    np.testing.assert_allclose(whole.W[:, -1], sim.W[:, -1], atol=1e-12)
    # The integral of the path, by all pieces and by one.
    parts = np.diff(np.asarray(sim.W[..., 0]), axis=1), np.diff(np.asarray(sim.Z[..., 0]), axis=1)
    area = 0.5 * (parts[0] + parts[1] / math.sqrt(3)) / 8
    area = (area + np.asarray(sim.W[:, :-1, 0]) / 8).sum(1)
    one = 0.5 * (np.asarray(whole.W[:, -1, 0]) + np.asarray(whole.Z[:, -1, 0]) / math.sqrt(3))
    np.testing.assert_allclose(area, one, atol=1e-12)


def test_callbacks_act_once_at_each_adaptive_step():
    """Also in the turns in which other lanes wait for their pieces."""
    prob = brownian(
        lambda u, p, t: p["b"] * u * jnp.array([1.0, 0.0]),
        lambda u, p, t: p["a"] * u * jnp.array([1.0, 0.0]),
        u0=(0.5, 0.0),
    )
    counts = eo.DiscreteCallback(
        lambda u, t, integrator: t < 0.75,
        lambda integrator: eo.remake(integrator, u=integrator.u.at[1].add(1.0)),
        save_positions=(False, False),
    )
    ens, options = eo.EnsembleProblem(prob), {"callback": counts, "max_events": 500}
    sim = eo.solve(ens, eo.SRIW1(), trajectories=100, save_everystep=True, **options)
    assert sim.successful.all()
    assert len(set(sim.stats.naccept.tolist())) > 10
    for sol in sim:
        assert float(sol.u[-1, 1]) == (np.asarray(sol.t)[1:] < 0.75).sum()
    alone = eo.solve(ens, eo.SRIW1(), trajectories=100, batch_size=1, **options)
    np.testing.assert_array_equal(alone.end.u, sim.end.u)


def jumping(u, p, t):
    """A drift for which steps are too long again and again, at other times for each component."""
    turns = jnp.sin((40 + 7 * jnp.arange(u.size, dtype=u.dtype)) * t + u)
    return jnp.where(turns > 0, 30.0, -30.0).astype(u.dtype)


# More trajectories than lanes, with steps of many lengths, which are code of the loop (of one
# component) or a function of their own.
SEVERAL = [(1, 0.3, 200), (3, 0.1, 100), (20, 0.3, 40)]


@pytest.mark.parametrize(
    ("size", "tolerance", "trajectories", "dtype"),
    [
        slow_unless((size, dtype) == (3, "float32"), size, tolerance, n, dtype)
        for size, tolerance, n in SEVERAL
        for dtype in ("float32", "float64")
    ],
)
def test_pieces_that_are_remembered_are_those_from_the_root(size, tolerance, trajectories, dtype):
    """Of every step the increments, against those of its piece, by halves of the whole span."""
    u0, key = jnp.zeros(size, dtype), jax.random.key(5)
    prob = eo.SDEProblem(jumping, lambda u, p, t: 0.3 + 0 * u, u0, (0.0, 1.0))
    sim = eo.solve(
        eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + 0.1 * ctx.index)),
        eo.SOSRA(),
        eo.EnsembleThreads(1),
        trajectories=trajectories,
        save_everystep=True,
        save_noise=True,
        abstol=tolerance,
        reltol=tolerance,
        key=key,
    )
    units = brownian_tree.units_of(dtype)
    words, stream = jax.random.key_data(key), jnp.uint32(8 + 2)

    @jax.jit
    @jax.vmap
    def expected(index, start, length):
        place = words, index, stream, start, length
        return brownian_tree.from_the_root(*place, size, np.dtype(dtype)).reshape(-1)

    places, found = [], []
    for i in range(0, trajectories, 7):
        starts = np.round(np.asarray(sim[i].t, float) * units).astype(np.uint32)
        lengths = np.diff(starts)
        places.append([np.full_like(lengths, i), starts[:-1], lengths])
        found.append([np.diff(np.asarray(x), axis=0) for x in (sim[i].W, sim[i].Z)])
    places = np.concatenate(places, axis=1)
    w, a = np.split(np.asarray(expected(*places)), 2, axis=1)
    tol = {"atol": 2e-5 if dtype == "float32" else 1e-13}
    for x, y in zip(np.concatenate(found, axis=1), (w, a * 12**0.5), strict=True):
        np.testing.assert_allclose(x, y, **tol)
    assert len(set(places[2].tolist())) > 2
    assert sim.stats.nreject.sum() > 20


def test_more_noises_than_are_remembered(monkeypatch):
    """The path is the same on both sides of the limit, and so are derivatives."""
    found = []
    for most in (2, 3):
        monkeypatch.setattr("ensembleode.plan.tuning.MOST_REMEMBERED", most)
        stochastic_field.cache_clear()
        prob = brownian(lambda u, p, t: p["b"] * u, u0=[0.5, 0.2, 0.1])
        ens, options = eo.EnsembleProblem(prob), {"trajectories": 20, "save_noise": True}
        sim = eo.solve(ens, eo.SRIW1(), **options)

        def loss(b, prob=prob):
            ens = eo.EnsembleProblem(eo.remake(prob, p={**prob.p, "b": b}))
            return eo.solve(ens, eo.SRIW1(), trajectories=20).u.sum()

        found.append((sim.u, sim.W, sim.stats.naccept, jax.grad(loss)(0.87)))
    stochastic_field.cache_clear()
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def drift_by_iteration(u, p, t):
    """A drift with a root of the state by Newton's method, which has no end where that is
    negative."""

    def goes_on(s):
        return ~(jnp.abs(s * s - u[0]) < 1e-4 * jnp.abs(u[0]))

    root = jax.lax.while_loop(goes_on, lambda s: 0.5 * (s + u[0] / s), jnp.ones_like(u[0]))
    return -200 * (root * root - 1) * jnp.ones_like(u)


def test_steps_that_wait_leave_the_domain_of_a_field_no_more_than_others():
    prob = eo.SDEProblem(drift_by_iteration, lambda u, p, t: 1.0 + 0 * u, [1.0], (0.0, 1.0))
    options = {"abstol": 1e-3, "reltol": 1e-3, "dt": 1e-4, "adaptive": True, "seed": 1}
    sim = eo.solve(eo.EnsembleProblem(prob), eo.SOSRA(), trajectories=64, **options)
    assert sim.successful.all()
    # (The distribution after some time is normal, with the variance 1/400.)
    np.testing.assert_allclose(sim.u[:, -1].mean(), 1.0, atol=0.03)


@pytest.mark.parametrize("name", [slow_unless(x == "SOSRI", x, id=x) for x in ADAPTIVE])
def test_adaptive_solves_are_the_same_everywhere_and_have_derivatives(name):
    alg = METHODS[name]
    prob = eo.remake(for_method(alg), tspan=(0.3, 1.7))
    ens, options = eo.EnsembleProblem(prob, rising), {"saveat": [0.5, 1.7]}
    expected = eo.solve(ens, alg, eo.EnsembleSerial(), trajectories=37, **options)
    assert expected.successful.all()
    for how in ALGORITHMS.values():
        found = eo.solve(ens, alg, trajectories=37, **options, **how)
        np.testing.assert_array_equal(found.u, expected.u)

    def loss(p, u0):
        made = eo.EnsembleProblem(eo.remake(prob, p=p, u0=u0))
        return jnp.sin(eo.solve(made, alg, trajectories=5, **options).u).sum()

    # (Other steps, where a tolerance is just met, would show in larger differences.)
    check_derivatives(loss, prob, 1e-7, rtol=1e-5)
