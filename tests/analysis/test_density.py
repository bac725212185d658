"""Densities of very many trajectories. Their numbers are compared with those of NumPy's
histograms."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import Normalize, to_rgba

import ensembleode as eo
from ensembleode.analysis import density

from ..problems import decay
from ..test_solution import S, solution, U
from .test_plotting import draw, entries, figures as figures


def meshes_of(ax):
    return [x for x in ax.collections if isinstance(x, QuadMesh)]


def cells_of(mesh):
    """The values `[x, y]`, and the edges along both axes."""
    corners = mesh.get_coordinates()
    return np.ma.filled(mesh.get_array(), 0.0).T, corners[0, :, 0], corners[:, 0, 1]


def walks(n=600, times=5, state=(2,), **changes):
    u = np.random.default_rng(0).normal(size=(n, times, *state)).cumsum(axis=1)
    return solution([S] * n, times=times, **{"u": jnp.asarray(u)} | changes)


def lines_at(sim, times):
    """The states on the lines between the saved ones, `[trajectory, time, component]`."""
    u = np.asarray(sim.u)
    return np.stack(
        [[np.interp(times, sim.t, x[:, j]) for j in range(x.shape[1])] for x in u]
    ).swapaxes(1, 2)


def test_density_at_each_time():
    sim = walks()
    ax = sim.plot()
    meshes = meshes_of(ax)
    assert not [x for x in ax.collections if isinstance(x, LineCollection)]
    assert len(meshes) == 2
    for j, mesh in enumerate(meshes):
        cells, t, y = cells_of(mesh)
        values = lines_at(sim, (t[1:] + t[:-1]) / 2)[..., j]
        expected = [np.histogram(x, y)[0] / (600 * np.diff(y)) for x in values.T]
        # (A value on an edge may be on either side of it.)
        assert np.mean(np.isclose(cells, expected)) > 0.999
        np.testing.assert_allclose(cells @ np.diff(y), 1.0)
        assert (t[0], t[-1]) == (0.0, 1.0)
    assert (y[0], y[-1]) == (np.min(sim.u), np.max(sim.u))
    assert entries(ax) == ["u0", "u1"]
    assert ax.get_title() == "density of 600 trajectories"
    assert ax.figure.axes[1].get_ylabel() == "probability density at each time"
    draw(ax)


def test_density_of_a_phase_portrait():
    sim = walks(state=(3,))
    ax = sim.plot((2, 0), names=["a", "b", "c"], units={"a": "m"})
    (mesh,) = meshes_of(ax)
    cells, x, y = cells_of(mesh)
    np.testing.assert_allclose(np.diff(x) @ cells @ np.diff(y), 1.0)
    points = lines_at(sim, (np.arange(300) + 0.5) / 300)
    expected, *_ = np.histogram2d(*points[..., [2, 0]].reshape(-1, 2).T, [x, y], density=True)
    assert np.mean(np.isclose(cells, expected)) > 0.99
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("c", "a (m)")
    assert ax.figure.axes[1].get_ylabel() == "probability density over all times"
    draw(ax)


def test_when_it_is_a_density():
    few, many = walks(500), walks(501, state=(3,))

    def is_density(sim, *idxs, **options):
        return bool(meshes_of(sim.plot(*idxs, **options)))

    assert not is_density(few)
    assert is_density(few, density=True)
    assert is_density(few, trajectories=slice(3), density=True)
    assert is_density(many)
    assert is_density(many, color="gray")
    assert is_density(many, trajectories=np.arange(501))
    # Colours by numbers, options of lines, and three dimensions are for lines.
    assert not is_density(many, density=False)
    assert not is_density(many, 0, color=np.arange(501.0))
    assert not is_density(many, lw=1)
    assert not is_density(many, (0, 1, 2))
    assert not is_density(many, trajectories=[], density=True)
    with pytest.raises(ValueError, match="leave out one of the three components"):
        many.plot((0, 1, 2), density=True)
    with pytest.raises(ValueError, match="leave out the numbers of color"):
        many.plot(density=True, color=np.arange(501.0))
    with pytest.raises(ValueError, match="color must be a matplotlib colour"):
        many.plot(color="no such colour")


def test_options_of_a_density():
    sim = walks()
    ax = sim.plot(0, color="red", label="walks", alpha=0.5)
    (mesh,) = meshes_of(ax)
    assert mesh.cmap(1.0) == pytest.approx(to_rgba("red", 0.5), abs=0.01)
    assert entries(ax) == ["walks"]
    _, ax = plt.subplots()
    ax.set_title("mine")
    (mesh,) = meshes_of(sim.plot(0, ax=ax, cmap="magma", norm=Normalize(0, 1), zorder=3))
    assert (mesh.cmap.name, mesh.norm.vmax, mesh.zorder) == ("magma", 1, 3)
    assert ax.get_title() == "mine"
    draw(sim.plot(color="gray"))
    draw(walks(state=(25,), times=2).plot())


def test_failed_ones_are_drawn_as_far_as_they_came():
    n = 600
    u = np.ones((n, 5, 1)) * np.linspace(0.0, 1.0, n)[:, None, None]
    codes, lengths = np.full(n, S), np.full(n, 5, np.int32)
    codes[:30], lengths[:30] = U, 3
    u[:30, 2], u[:30, 3:] = 100.0, np.nan
    codes[30] = eo.ReturnCode.Default
    ax = solution(codes, times=5, u=u, lengths=lengths).plot()
    assert ax.get_title() == "density of 599 trajectories (30 failed)"
    cells, t, y = cells_of(meshes_of(ax)[0])
    assert y[-1] == 1.0  # the view is that of the others
    mass = cells @ np.diff(y)
    np.testing.assert_allclose(mass[t[1:] < 0.25], 1.0)
    np.testing.assert_allclose(mass[(t[:-1] > 0.26) & (t[1:] < 0.5)], 569 / 599)
    np.testing.assert_allclose(mass[t[:-1] > 0.5], 1.0)
    assert entries(ax) == ["failed (20 out of view)"]
    draw(ax)
    draw(solution([U] * n, times=5, u=u, lengths=np.ones(n, np.int32)).plot())


@pytest.mark.parametrize("times", [1, 2])
def test_a_single_value(times):
    sim = solution([S] * 600, times=times, u=np.ones((600, times, 1)))
    cells, _, y = cells_of(meshes_of(sim.plot())[0])
    np.testing.assert_allclose(cells @ np.diff(y), 1.0)
    draw(sim.plot(0))


def test_backwards_in_time():
    sim = walks(t=np.linspace(1.0, 0.0, 5))
    forwards = walks(u=sim.u[:, ::-1])
    np.testing.assert_allclose(
        meshes_of(sim.plot(0))[0].get_array(), meshes_of(forwards.plot(0))[0].get_array()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["steps", "own times", "ended"])
def test_every_kind_of_times(kind, monkeypatch):
    """The same as that of a grid of times."""

    def make(prob, ctx):
        end = 1.0 + ctx.index / 100 if kind == "own times" else 2.0
        return eo.remake(prob, p=prob.p * (0.5 + ctx.index / 100), tspan=(0.0, end))

    low = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.3, eo.terminate)
    prob = decay(callback=low if kind == "ended" else None)
    ens = eo.EnsembleProblem(prob, make)
    options = {"trajectories": 100, "abstol": 1e-9, "reltol": 1e-9}
    how = {"save_everystep": True} if kind == "steps" else {"saveat": 0.01}
    sim = eo.solve(ens, **how, **options)
    assert np.ndim(sim.t) == 2 or kind == "ended"
    cells, t, y = cells_of(meshes_of(sim.plot(0, density=True))[0])
    at = (t[1:] + t[:-1]) / 2
    exact = [
        np.interp(at, sol.t[: len(sol.u)], sol.u[:, 0], right=np.nan)
        if kind != "steps"
        else np.asarray(sol(at))[:, 0]
        for sol in sim
    ]
    expected = []
    for x in np.transpose(exact):
        x = x[np.isfinite(x)]
        expected.append(np.histogram(x, y)[0] / (max(1, len(x)) * np.diff(y)))
    assert np.mean(np.isclose(cells, expected)) > 0.999
    # The same in other chunks.
    monkeypatch.setattr(density, "_MOST_NUMBERS", 12_000)
    again, *_ = cells_of(meshes_of(sim.plot(0, density=True))[0])
    np.testing.assert_allclose(again, cells, rtol=1e-12)


def test_of_a_store(tmp_path):
    ens = eo.EnsembleProblem(
        decay(), lambda prob, ctx: eo.remake(prob, p=prob.p * (1 + ctx.index / 600))
    )
    sim = eo.solve(ens, trajectories=600, saveat=0.25, store=str(tmp_path / "store"))
    memory = eo.solve(ens, trajectories=600, saveat=0.25)
    for one, other in zip(meshes_of(sim.plot()), meshes_of(memory.plot()), strict=True):
        np.testing.assert_array_equal(one.get_array(), other.get_array())
    ax = sim.plot(0, trajectories=slice(5))
    assert ax.figure.axes[1].get_ylabel() == "p"
