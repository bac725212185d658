"""The same path everywhere, saved, and replayed."""

import math

import jax
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless
from .problems import A, ALGORITHMS, B, brownian, for_method, METHODS, rising


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
    # (Along lines between the ends of coarse steps, Itô's integral is Stratonovich's.)
    off, shift = np.abs(finer.u - sim.u), math.exp(B**2 / 2) - 1
    assert off.max() > 0
    assert np.all(off < 0.1 + (0.1 + shift) * np.abs(sim.u))


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
