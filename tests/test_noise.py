"""Stochastic problems: their paths, orders and distributions, and all that an ODE has besides."""

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
from ensembleode.plan.stochastic_field import stochastic_field
from ensembleode.solvers import brownian_tree, philox

from .marks import slow_unless


METHODS = {
    "EM": eo.EM(),
    "EM, not split": eo.EM(split=False),
    "EulerHeun": eo.EulerHeun(),
    "RKMil": eo.RKMil(),
    "RKMil, Stratonovich": eo.RKMil("Stratonovich"),
    "SRIW1": eo.SRIW1(),
    "SOSRI": eo.SOSRI(),
    "SRA1": eo.SRA1(),
    "SOSRA": eo.SOSRA(),
}
A, B = 1.01, 0.87


def growing(u, p, t):
    return p["a"] * u


def proportional(u, p, t):
    return p["b"] * u


def constant(u, p, t):
    return p["b"] * jnp.ones_like(u)


def decay(u, p, t):
    return -p["a"] * u


def brownian(g=proportional, f=growing, u0=(0.5, 0.2), **options):
    p = {"a": jnp.array(A), "b": jnp.array(B)}
    return eo.SDEProblem(f, g, jnp.array(u0), (0.0, 1.0), p, **options)


def for_method(alg, **options):
    """A problem that the method can solve."""
    return brownian(constant, decay, **options) if alg.additive else brownian(**options)


#
# Random numbers
#


def test_words_are_those_of_random123():
    words = functools.partial(philox.philox, philox._by_halves)
    known = {
        ((0, 0), (0, 0, 0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        ): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (key, counter), expected in known.items():
        found = words(*(tuple(map(jnp.uint32, x)) for x in (key, counter)))
        assert " ".join(f"{int(x):08x}" for x in found) == expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compiled_numbers_are_those_of_jax(dtype):
    """Paths that the engine draws, against the same numbers drawn by JAX."""
    prob = eo.SDEProblem(
        lambda u, p, t: 0 * u, lambda u, p, t: jnp.ones_like(u), jnp.zeros(3, dtype), (0.0, 1.0)
    )
    n, key = 5, jax.random.key(7)
    sim = eo.solve(
        eo.EnsembleProblem(prob),
        eo.EM(),
        trajectories=n,
        adaptive=False,
        dt=0.25,
        saveat=0.25,
        key=key,
    )
    steps = np.diff(np.asarray(sim.u), axis=1) / 0.5
    for i in range(n):
        for step in range(4):
            place = (jnp.uint32(step), jnp.uint32(i), jnp.uint32(8))
            drawn = philox.normals(jax.random.key_data(key), place, 3, dtype)
            np.testing.assert_allclose(steps[i, step], drawn, atol=2e-6)


def test_both_precisions_have_the_same_path():
    paths = []
    for dtype in (np.float32, np.float64):
        prob = brownian(u0=np.array([0.5, 0.2], dtype))
        paths.append(eo.solve(prob, adaptive=False, dt=0.1, saveat=0.1, save_noise=True).W)
    np.testing.assert_allclose(*paths, atol=1e-5)


@pytest.mark.parametrize("n", [slow_unless(True, 20_000), slow_unless(False, 4_000_000)])
def test_numbers_are_normal_and_independent(n):
    """Moments, and correlations of neighbouring trajectories, steps, components and seeds."""
    prob = brownian(constant, lambda u, p, t: 0 * u, u0=(0.0, 0.0, 0.0))
    sim = eo.solve(
        eo.EnsembleProblem(prob),
        eo.SRA1(),
        trajectories=n,
        adaptive=False,
        dt=0.25,
        saveat=0.25,
        save_noise=True,
    )
    every = np.stack([np.diff(np.asarray(x), axis=1) for x in (sim.W, sim.Z)]) / 0.5
    count = every.size
    assert abs(every.mean()) < 4.5 / math.sqrt(count)
    assert abs((every**2).mean() - 1) < 4.5 * math.sqrt(2 / count)
    assert abs((every**3).mean()) < 4.5 * math.sqrt(15 / count)
    assert abs((every**4).mean() - 3) < 4.5 * math.sqrt(96 / count)
    for axis in range(every.ndim):
        first, second = (np.delete(every, i, axis) for i in (0, -1))
        assert abs((first * second).mean()) < 4.5 / math.sqrt(first.size), axis
        squares = (first**2 - 1) * (second**2 - 1)
        assert abs(squares.mean()) < 4.5 * 2 / math.sqrt(first.size), axis
    options = {"dt": 0.25, "saveat": 0.25, "save_noise": True, "seed": 1}
    other = eo.solve(eo.EnsembleProblem(prob), eo.EM(), trajectories=n, **options)
    other = np.diff(np.asarray(other.W), axis=1) / 0.5
    assert abs((every[0] * other).mean()) < 4.5 / math.sqrt(other.size)


#
# Methods
#


RECORDED = json.loads((pathlib.Path(__file__).parent / "data" / "julia_sde.json").read_text())
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


def moments(x):
    """The mean and the variance, each with its standard error."""
    x = np.asarray(x, float).ravel()
    mean, spread = x.mean(), (x - x.mean()) ** 2
    root = math.sqrt(len(x))
    return (mean, x.std() / root), (spread.mean(), spread.std() / root)


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


#
# The same path everywhere
#


def rising(prob, ctx):
    return eo.remake(prob, u0=prob.u0 * (1 + 0.01 * ctx.index))


ALGORITHMS = {
    "threads": {"ensemblealg": eo.EnsembleThreads(2)},
    "one thread": {"ensemblealg": eo.EnsembleThreads(1)},
    "arrays": {"ensemblealg": eo.EnsembleGPUArray()},
    "batches of 1": {"batch_size": 1},
    "batches of 10": {"batch_size": 10},
}


@pytest.mark.parametrize("name", [slow_unless(name == "SOSRA", name, id=name) for name in METHODS])
def test_the_same_bits_everywhere(name):
    alg, n = METHODS[name], 37
    ens = eo.EnsembleProblem(for_method(alg), rising)
    options = {"adaptive": False, "dt": 0.07, "saveat": [0.3, 0.5, 1.0]}
    expected = eo.solve(ens, alg, eo.EnsembleSerial(), trajectories=n, **options).u
    for how in ALGORITHMS.values():
        found = eo.solve(ens, alg, trajectories=n, **options, **how).u
        np.testing.assert_array_equal(found, expected)
    inside = jax.jit(lambda: eo.solve(ens, alg, trajectories=n, **options).u)()
    np.testing.assert_array_equal(inside, expected)
    more = eo.solve(ens, alg, trajectories=n + 20, **options).u
    np.testing.assert_array_equal(more[:n], expected)
    alone = eo.solve(ens.prob, alg, **options).u
    np.testing.assert_array_equal(alone, expected[0])
    other = eo.solve(ens, alg, trajectories=n, seed=1, **options).u
    assert not np.any(np.asarray(other) == np.asarray(expected))


def test_keys_that_are_mapped_give_other_paths():
    prob = brownian()
    keys = jax.random.split(jax.random.key(1), 3)
    found = jax.vmap(lambda key: eo.solve(prob, eo.EM(), adaptive=False, dt=0.1, key=key).u[-1])(
        keys
    )
    for key, u in zip(keys, found, strict=True):
        np.testing.assert_array_equal(
            u, eo.solve(prob, eo.EM(), adaptive=False, dt=0.1, key=key).u[-1]
        )
    assert len(np.unique(np.asarray(found)[:, 0])) == 3


def test_reruns_have_other_paths():
    def small(sol, ctx):
        return sol.u[-1, 0], sol.u[-1, 0] < 1.0

    ens = eo.EnsembleProblem(brownian(), output_func=small)
    once = eo.solve(ens, eo.EM(), trajectories=50, adaptive=False, dt=0.1, max_repeats=1).u
    again = eo.solve(ens, eo.EM(), trajectories=50, adaptive=False, dt=0.1, max_repeats=30).u
    kept = np.asarray(once) >= 1.0
    assert 5 < kept.sum() < 45
    np.testing.assert_array_equal(again[kept], once[kept])
    assert np.all(np.asarray(again) >= 1.0)


@pytest.mark.slow
def test_the_same_bits_on_workers_and_in_stores(tmp_path):
    ens = eo.EnsembleProblem(brownian(), rising)
    options = {"trajectories": 500, "adaptive": False, "dt": 0.1, "saveat": 0.5, "save_noise": True}
    expected = eo.solve(ens, eo.SOSRI(), **options)
    with eo.EnsembleDistributed(workers=3) as alg:
        found = eo.solve(ens, eo.SOSRI(), alg, **options)
        np.testing.assert_array_equal(found.u, expected.u)

        def loss(p, how):
            made = eo.EnsembleProblem(eo.remake(ens.prob, p=p), rising)
            return eo.solve(made, eo.EM(), how, trajectories=50, adaptive=False, dt=0.1).u.sum()

        for a, b in zip(
            *(jax.tree.leaves(jax.grad(loss)(ens.prob.p, how)) for how in (alg, None)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-12)
    kept = eo.solve(ens, eo.SOSRI(), batch_size=70, store=tmp_path / "s", **options)
    for name in ("u", "W", "Z"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(expected, name))
    with pytest.raises(eo.StoreError, match="seed"):
        eo.solve(ens, eo.SOSRI(), store=tmp_path / "s", seed=1, **options)


#
# The path itself
#


@pytest.mark.parametrize("name", [slow_unless(name == "SRIW1", name, id=name) for name in METHODS])
def test_a_saved_path_is_replayed(name):
    alg = METHODS[name]
    prob, dt = for_method(alg), 1 / 32
    sim = eo.solve(
        eo.EnsembleProblem(prob),
        alg,
        trajectories=4,
        adaptive=False,
        dt=dt,
        saveat=dt,
        save_noise=True,
    )
    assert sim.W.shape == sim.u.shape
    assert (sim.Z is None) == (alg.draws == 1)

    def path(i):
        return eo.NoiseGrid(sim.t, sim.W[i], None if sim.Z is None else sim.Z[i])

    def replay(prob, ctx):
        return eo.remake(prob, noise=path(ctx.index))

    ens = eo.EnsembleProblem(eo.remake(prob, noise=path(0)), replay)
    again = eo.solve(
        ens, alg, trajectories=4, adaptive=False, dt=dt, saveat=dt, seed=5, save_noise=True
    )
    np.testing.assert_allclose(again.u, sim.u, rtol=1e-12)
    np.testing.assert_allclose(again.W, sim.W, rtol=0, atol=1e-13)
    finer = eo.solve(ens, alg, trajectories=4, adaptive=False, dt=dt / 4, saveat=dt)
    assert 0 < np.abs(finer.u - sim.u).max() < 0.5


def test_every_step_is_saved_and_the_solution_is_linear_between():
    sol = eo.solve(
        brownian(), eo.EM(), adaptive=False, dt=0.25, save_everystep=True, save_noise=True
    )
    assert sol.t.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    exact, w = 0.5 * sol.u[1] + 0.5 * sol.u[2], sol.W
    np.testing.assert_allclose(sol(0.375), exact, rtol=1e-12)
    for i in range(4):
        k = sol.u[i] * (1 + A * 0.25)
        np.testing.assert_allclose(sol.u[i + 1], k + B * k * (w[i + 1] - w[i]), rtol=1e-12)
    data = eo.solve(
        eo.EnsembleProblem(brownian()), trajectories=3, adaptive=False, dt=0.25, save_noise=True
    )
    assert data.to_xarray()["noise.W"].shape == (3, 2, 2)


#
# Adaptive steps
#


ADAPTIVE = [name for name, alg in METHODS.items() if alg.adaptive]


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


#
# Kinds of noise
#


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


def matrix(u, p, t):
    return jnp.stack([jnp.stack([0.1 * u[0], 0.2, 0 * t]), jnp.stack([0 * t, 0.3 * u[1], 0.1])])


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


#
# Derivatives
#


def check_derivatives(loss, prob, size, rtol):
    """In reverse mode, in forward mode and by differences of this size, of `loss(p, u0)`."""
    at, along = (prob.p, prob.u0), ({"a": 0.3, "b": -0.7}, np.linspace(0.5, 1.0, prob.u0.size))
    along = jax.tree.map(lambda x, v: jnp.reshape(v, x.shape), at, along)
    by, tangent = jax.grad(loss, argnums=(0, 1))(*at), jax.jvp(loss, at, along)[1]
    pairs = zip(jax.tree.leaves(by), jax.tree.leaves(along), strict=True)
    np.testing.assert_allclose(sum((a * b).sum() for a, b in pairs), tangent, 1e-9, 1e-14)

    def moved(e):
        return loss(*jax.tree.map(lambda x, v: x + e * v, at, along))

    np.testing.assert_allclose(tangent, (moved(size) - moved(-size)) / (2 * size), rtol, 1e-9)


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


#
# All that an ODE has
#


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


REFUSED = {
    "must cover tspan": lambda: eo.solve(
        brownian(noise=eo.NoiseGrid([0.0, 0.5], np.zeros((2, 2)))), eo.EM(), dt=0.1
    ),
    "is of an eo.SDEProblem": lambda: eo.ODEProblem(
        decay, [1.0], (0.0, 1.0), {"a": 1.0}, noise=eo.WienerProcess()
    ),
    "is for an SDEProblem": lambda: eo.solve(
        eo.ODEProblem(decay, [1.0], (0.0, 1.0), {"a": 1.0}), save_noise=True
    ),
    "steady_state is for ODEs": lambda: eo.steady_state(brownian()),
    "jnp.full_like": lambda: eo.solve(brownian(lambda u, p, t: p["b"]), dt=0.1),
    "is eo.EM\\(split=False\\) here": lambda: eo.solve(brownian(), diffrax.Euler(), dt=0.1),
    "keeps no path": lambda: eo.solve(
        brownian(constant, decay), diffrax.SRA1(), dt=0.1, save_noise=True
    ),
    "Tsit5 is for ODEs": lambda: eo.solve(brownian(), eo.Tsit5(), adaptive=False, dt=0.1),
    "EM is for an eo.SDEProblem": lambda: eo.solve(
        eo.ODEProblem(decay, [1.0], (0.0, 1.0), {"a": 1.0}), eo.EM(), adaptive=False, dt=0.1
    ),
    "dt is missing": lambda: eo.solve(brownian(), eo.EM()),
    "has no error estimate": lambda: eo.solve(brownian(), eo.EM(), dt=0.1, adaptive=True),
    "can't be cut by an event": lambda: eo.solve(
        brownian(), callback=eo.ContinuousCallback(lambda u, t, x: u[0] - 1.0, eo.terminate)
    ),
    "don't end at known times": lambda: eo.solve(brownian(), tstops=[0.3]),
    "draw their own noise": lambda: eo.solve(
        brownian(noise=eo.NoiseGrid([0.0, 1.0], np.zeros((2, 2)), np.zeros((2, 2))))
    ),
    "g depends on the state": lambda: eo.solve(brownian(), eo.SRA1(), adaptive=False, dt=0.1),
    "must run forwards": lambda: eo.solve(
        eo.remake(brownian(), tspan=(1.0, 0.0)), adaptive=False, dt=0.1
    ),
    "no d_discontinuities": lambda: eo.solve(
        brownian(), adaptive=False, dt=0.1, d_discontinuities=[0.5]
    ),
    "has no noise": lambda: eo.solve(
        eo.EnsembleProblem(brownian()),
        eo.EM(),
        eo.EnsembleColumns(),
        trajectories=3,
        adaptive=False,
        dt=0.1,
    ),
    "runs in the compiled engine": lambda: eo.solve(
        brownian(), adaptive=False, dt=0.1, engine="diffrax"
    ),
    "never at rest": lambda: eo.solve(
        brownian(), adaptive=False, dt=0.1, callback=eo.TerminateSteadyState()
    ),
    "can count 8,388,608": lambda: eo.solve(
        brownian(u0=np.ones(2, np.float32)), adaptive=False, dt=0.1, maxiters=10**8
    ),
    "g can't be translated": lambda: eo.solve(
        brownian(lambda u, p, t: jnp.linalg.eigvals(jnp.diag(u)).real), adaptive=False, dt=0.1
    ),
    "for diagonal or scalar noise": lambda: eo.solve(
        brownian(matrix, noise_rate_prototype=np.zeros((2, 3))), eo.SOSRI(), adaptive=False, dt=0.1
    ),
    "for independent noises": lambda: eo.solve(
        brownian(noise=eo.WienerProcess(factor=np.eye(2))), eo.SOSRI(), adaptive=False, dt=0.1
    ),
    "NoiseGrid needs Z": lambda: eo.solve(
        brownian(noise=eo.NoiseGrid([0.0, 1.0], np.zeros((2, 2)))),
        eo.SOSRI(),
        adaptive=False,
        dt=0.1,
    ),
    "give noise_rate_prototype": lambda: eo.solve(brownian(matrix), adaptive=False, dt=0.1),
    "noise_rate_prototype must be like u0": lambda: eo.solve(
        brownian(matrix, noise_rate_prototype=np.zeros((3, 2))), adaptive=False, dt=0.1
    ),
    "g must return the dtype": lambda: eo.solve(
        brownian(lambda u, p, t: u.astype(np.float32)), adaptive=False, dt=0.1
    ),
    "g must return the structure": lambda: eo.solve(
        brownian(lambda u, p, t: (u, u)), adaptive=False, dt=0.1
    ),
    "W of NoiseGrid": lambda: eo.solve(
        brownian(noise=eo.NoiseGrid([0.0, 1.0], np.zeros((2, 3)))), adaptive=False, dt=0.1
    ),
    "factor of WienerProcess": lambda: eo.solve(
        brownian(noise=eo.WienerProcess(factor=np.eye(3))), adaptive=False, dt=0.1
    ),
    "Direct is for an eo.JumpProblem": lambda: eo.solve(brownian(), eo.Direct(), dt=0.1),
    "two or more times": lambda: eo.NoiseGrid([0.0], [1.0]),
    "t of NoiseGrid must increase": lambda: eo.NoiseGrid([1.0, 0.0], np.zeros(2)),
    "must be \\[grid": lambda: eo.NoiseGrid([0.0, 1.0], np.zeros(3)),
    "square matrix": lambda: eo.WienerProcess(factor=np.zeros((2, 3))),
    "has no factor": lambda: eo.WienerProcess(scalar=True, factor=np.eye(2)),
    "interpretation must be": lambda: eo.RKMil("Strat"),
    "no mass_matrix": lambda: eo.solve(
        brownian(f=eo.ODEFunction(growing, mass_matrix=np.eye(2))), adaptive=False, dt=0.1
    ),
    "must be real": lambda: eo.solve(brownian(u0=np.ones(2, complex)), adaptive=False, dt=0.1),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused_is_named(said):
    with pytest.raises((ValueError, TypeError), match=said):
        REFUSED[said]()


@jax.custom_jvp
def flat(x):
    return x * x


flat.defjvp(lambda primals, tangents: (flat(*primals), 0 * tangents[0]))


# Diffusions with a derivative of zero, which depend on the state all the same.
@pytest.mark.parametrize(
    "g",
    {
        "a comparison": lambda u: (u > 0.5).astype(float),
        "an integer": lambda u: u.astype(int).astype(float),
        "a branch": lambda u: jnp.where(u > 0.5, 0.1, 0.2),
        "an index": lambda u: jnp.array([0.1, 0.2])[(u > 0.5).astype(int)],
        "steps": lambda u: jnp.round(u) + jnp.floor(u) + jnp.sign(u),
        "what is finite": lambda u: jnp.isfinite(u).astype(float),
        "a loop": lambda u: jax.lax.fori_loop(0, 2, lambda i, x: (x > 0.5).astype(float), u),
        "no derivative": lambda u: 0.1 * jax.lax.stop_gradient(u),
        "a rule of one's own": lambda u: 0.1 * flat(u),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_is_not_additive(g):
    _, fn = g
    prob = brownian(lambda u, p, t: fn(u), decay)
    with pytest.raises(ValueError, match="g depends on the state"):
        eo.solve(prob, eo.SRA1(), dt=0.1)


def test_times_that_are_arrays():
    """Of the span, of a path, and of the step."""
    prob = brownian(
        noise=eo.NoiseGrid(jnp.linspace(0, 1, 3), jnp.array([[0, 0], [1, 2], [3, 4.0]]))
    )
    expected = eo.solve(prob, eo.EM(), dt=0.25).u
    prob = eo.remake(prob, tspan=(jnp.array(0.0), np.float64(1.0)))
    np.testing.assert_array_equal(eo.solve(prob, eo.EM(), dt=jnp.array(0.25)).u, expected)
    with pytest.raises(ValueError, match="must run forwards"):
        eo.solve(eo.remake(prob, tspan=(jnp.array(1.0), jnp.array(0.0))), eo.EM(), dt=0.25)


def test_whole_numbers_as_noise():
    """Of a path and of a factor."""
    path = eo.NoiseGrid([0, 1], [[0, 0], [1, 2]])
    as_real = eo.NoiseGrid([0.0, 1.0], [[0.0, 0.0], [1.0, 2.0]])
    for whole, real in (
        (path, as_real),
        (eo.WienerProcess(factor=[[1, 0], [0, 2]]), eo.WienerProcess(factor=[[1.0, 0], [0, 2.0]])),
    ):
        assert {x.dtype for x in jax.tree.leaves(whole)} == {np.dtype(float)}
        ends = [eo.solve(brownian(noise=x), eo.EM(), dt=0.25).u[-1] for x in (whole, real)]
        np.testing.assert_array_equal(*ends)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="g must be a function"):
        eo.SDEProblem(growing, jnp.ones(2), [1.0, 2.0], (0.0, 1.0))
    with pytest.raises(TypeError, match="noise must be"):
        brownian(noise=3.0)
    with pytest.raises(ValueError, match="drop one"):
        brownian(noise_rate_prototype=np.zeros((2, 1)), noise=eo.WienerProcess(scalar=True))
    assert isinstance(eo.remake(brownian(), p=3.0), eo.SDEProblem)
