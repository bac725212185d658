"""What plots show without being asked: what varies, the direction of time; and units."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import LogNorm, to_rgba_array
from matplotlib.patches import FancyArrowPatch

import ensembleode as eo
from ensembleode.analysis.drawing import norm_of

from ..problems import lorenz
from .test_plotting import draw, entries, figures as figures, lines_of, segments_of


RATES = 0.5 + np.arange(4.0)


def decays(make, u0=(1.0, 2.0), p=None, n=4, **options):
    """du/dt = -k u, where `make` says what differs."""
    p = {"k": 1.0, "shape": jnp.ones(3), "name": "rate"} if p is None else p
    prob = eo.ODEProblem(lambda u, p, t: -p["k"] * u, jnp.array(u0), (0.0, 1.0), p)
    return eo.solve(eo.EnsembleProblem(prob, make), trajectories=n, saveat=0.25, **options)


def by_rate(prob, ctx):
    return eo.remake(prob, p=prob.p | {"k": 0.5 + ctx.index})


@pytest.fixture(scope="module")
def sim():
    return decays(by_rate)


def bar_of(ax):
    """The label and the range of the colorbar; None without one."""
    bars = [x for x in ax.figure.axes if x is not ax]
    return (bars[0].get_ylabel(), *bars[0].get_ylim()) if bars else None


def viridis(numbers):
    return plt.cm.viridis((numbers - numbers.min()) / np.ptp(numbers))


@pytest.mark.parametrize("idxs", [0, (0, 1)])
def test_a_parameter_that_differs_colors_trajectories(sim, idxs):
    ax = sim.plot(idxs)
    assert bar_of(ax) == ("p.k", 0.5, 3.5)
    np.testing.assert_allclose(lines_of(ax).get_colors(), viridis(RATES))
    assert entries(ax) is None
    draw(ax)
    some = sim.plot(idxs, trajectories=[2, 1])
    np.testing.assert_allclose(lines_of(some).get_colors(), viridis(np.array([2.0, 1.0])))


def test_several_components_have_shades(sim):
    ax = sim.plot()
    colors = lines_of(ax).get_colors().reshape(4, 2, 4)
    blue, orange = to_rgba_array(["C0", "C1"])
    # From light to dark, each component in its hue.
    assert (np.diff(colors[..., :3].sum(axis=-1), axis=0) < 0).all()
    for shades, color in zip(np.swapaxes(colors, 0, 1), (blue, orange), strict=True):
        order = np.argsort(color[:3])
        assert (np.diff(shades[:, order], axis=1) >= 0).all()
    assert entries(ax) == ["u0", "u1"]
    assert bar_of(ax) == ("p.k", 0.5, 3.5)
    draw(ax)


def test_a_colormap_for_what_varies(sim):
    norm = LogNorm(0.1, 10.0)
    ax = sim.plot(norm=norm)
    assert ax.figure.axes[1].get_yscale() == "log"
    ax = sim.plot(cmap="plasma", norm=norm)
    colors = lines_of(ax).get_colors()[::2]
    np.testing.assert_allclose(colors, plt.colormaps["plasma"](norm(RATES)))
    draw(sim.plot(trajectories=1, cmap="plasma", norm=norm))


def test_the_color_by_what_varies_is_turned_off(sim):
    blue, orange = to_rgba_array(["C0", "C1"])
    for options in ({"color": None}, {"label": "mine"}):
        ax = sim.plot(**options)
        assert bar_of(ax) is None
        np.testing.assert_array_equal(lines_of(ax).get_colors(), [blue, orange] * 4)
    # A second plot in the same axes has a colour of its own.
    _, ax = plt.subplots()
    ax.plot([0.0, 1.0], [0.0, 1.0])
    assert bar_of(sim.plot(0, ax=ax)) is None
    assert bar_of(sim.plot(0, trajectories=1)) is None
    assert bar_of(sim.plot(0, c="red")) is None


def test_which_number_it_is():
    """The first, the parameters before the initial states; what differs, not what is there."""
    both = decays(lambda prob, ctx: eo.remake(by_rate(prob, ctx), u0=prob.u0 * (1.0 + ctx.index)))
    assert bar_of(both.plot(0))[0] == "p.k"
    assert bar_of(both.plot(0, color="u0[1]")) == ("u0[1]", 2.0, 8.0)
    starts = decays(lambda prob, ctx: eo.remake(prob, u0=prob.u0.at[1].set(ctx.index)))
    assert bar_of(starts.plot(0))[0] == "u0[1]"
    alike = decays(lambda prob, ctx: eo.remake(prob, p=prob.p | {"k": 0.0 * ctx.index}))
    assert bar_of(alike.plot(0)) is None
    # Not one of very many, nor what no colour has.
    wide = {"k": 1.0, "w": jnp.ones(50)}
    network = decays(
        lambda prob, ctx: eo.remake(prob, p=prob.p | {"w": prob.p["w"] * ctx.index}), p=wide
    )
    assert bar_of(network.plot(0)) is None
    odd = decays(
        lambda prob, ctx: eo.remake(prob, p=prob.p | {"x": jnp.where(ctx.index == 1, jnp.nan, 1)}),
        p={"k": 1.0, "x": 1.0},
    )
    assert bar_of(odd.plot(0)) is None


def test_a_number_by_its_name(sim):
    ax = sim.plot(color="p.k")
    np.testing.assert_allclose(lines_of(ax).get_colors()[::2], viridis(RATES))
    assert [h.get_linestyle() for h in ax.get_legend().legend_handles] == ["-", "--"]
    assert bar_of(ax)[0] == "p.k"
    assert bar_of(sim.plot(1, color="p.k", label="rate"))[0] == "rate"
    ax = sim.plot(0, color="p.k", against="u0[0]")
    assert bar_of(ax)[0] == "p.k"
    assert bar_of(sim.plot(0, against="p.k")) is None
    with pytest.raises(
        ValueError, match=r"color is 'p.x', and trajectories were given p.k, p.shape"
    ):
        sim.plot(0, color="p.x")


def test_a_logarithmic_scale():
    rng = np.random.default_rng(0)
    assert isinstance(norm_of(np.geomspace(1e-3, 1e3, 9)), LogNorm)
    assert isinstance(norm_of(np.exp(rng.normal(0.0, 2.0, 200))), LogNorm)
    for numbers in (np.linspace(0.001, 1.0, 9), np.geomspace(1.0, 50.0, 9), -np.arange(3.0), []):
        assert norm_of(np.asarray(numbers)) is None
    assert norm_of(rng.uniform(size=1000)) is None
    sim = decays(lambda prob, ctx: eo.remake(prob, p=prob.p | {"k": 10.0**-ctx.index}))
    ax = sim.plot(0)
    assert ax.figure.axes[1].get_yscale() == "log"
    np.testing.assert_allclose(lines_of(ax).get_colors(), plt.cm.viridis([1.0, 2 / 3, 1 / 3, 0.0]))


#
# Units
#


def labels_of(ax):
    return ax.get_xlabel(), ax.get_ylabel()


def test_units(sim):
    units = {"t": "h", "u0": "mg/L", "u1": "K", "p.k": "1/h"}
    ax = sim.plot(0, units=units)
    assert labels_of(ax) == ("t (h)", "u0 (mg/L)")
    assert bar_of(ax)[0] == "p.k (1/h)"
    ax = sim.plot(units=units)
    assert labels_of(ax) == ("t (h)", "")
    assert entries(ax) == ["u0 (mg/L)", "u1 (K)"]
    # One unit for all is that of the axis.
    ax = sim.plot(units={"u": "mg/L"})
    assert (labels_of(ax), entries(ax)) == (("t", "mg/L"), ["u0", "u1"])
    assert labels_of(sim.plot((1, 0), units=units)) == ("u1 (K)", "u0 (mg/L)")
    ax = sim.plot("a", names=["a", "b"], against="p.k", units={"a": "m", "p.k": "1/h"})
    assert labels_of(ax) == ("p.k (1/h)", "a (m)")
    assert labels_of(sim[0].plot(0, units=units)) == ("t (h)", "u0 (mg/L)")
    assert labels_of(eo.EnsembleSummary(sim).plot(1, units=units)) == ("t (h)", "u1 (K)")


def test_units_of_leaves():
    start = {"place": jnp.array([1.0, 2.0]), "speed": jnp.zeros(2)}
    prob = eo.ODEProblem(
        lambda u, p, t: {"place": u["speed"], "speed": -u["place"]}, start, (0.0, 1.0)
    )
    units = {"place": "m", "speed[1]": "m/s"}
    ax = eo.solve(prob, saveat=0.5).plot(["place", "speed[1]"], units=units)
    assert entries(ax) == ["place[0] (m)", "place[1] (m)", "speed[1] (m/s)"]


def test_bad_units(sim):
    for plottable in (sim, sim[0], eo.EnsembleSummary(sim)):
        with pytest.raises(
            TypeError, match=r"units must be a dictionary .* 'u0': 'mg/L'.* got 'm'"
        ):
            plottable.plot(units="m")
        with pytest.raises(ValueError, match="units has 'hares', and there are t, u0, u1"):
            plottable.plot(units={"hares": "1/km²"})


#
# The direction of time
#


def arrows_of(ax):
    return [x for x in ax.artists + ax.patches if isinstance(x, FancyArrowPatch)]


def spiral(u, p, t):
    return jnp.stack([-0.1 * u[0] - u[1], u[0] - 0.1 * u[1], 0.0 * u[0] + 1.0])


@pytest.fixture(scope="module")
def spirals():
    prob = eo.ODEProblem(spiral, jnp.array([1.0, 0.0, 0.0]), (0.0, 8.0))
    return eo.solve(prob, saveat=0.1)


def test_arrows_point_along_time(spirals):
    ax = spirals.plot((0, 1))
    draw(ax)
    arrows = arrows_of(ax)
    assert len(arrows) == 3
    for arrow in arrows:
        tail, head = np.array(arrow._posA_posB)
        assert np.cross([*tail, 0], [*head, 0])[2] > 0  # anticlockwise
    (starts,) = (x.get_offsets() for x in ax.collections)
    np.testing.assert_array_equal(starts, [[1.0, 0.0]])
    assert not arrows_of(spirals.plot((0, 1), arrows=False))
    assert not arrows_of(spirals.plot())


def test_arrows_in_three_dimensions(spirals):
    ax = spirals.plot((0, 1, 2))
    draw(ax)
    assert len(arrows_of(ax)) == 3
    for arrow in arrows_of(ax):
        assert arrow._ends[1, 2] > arrow._ends[0, 2]


def test_arrows_of_an_ensemble(sim):
    ax = sim.plot((0, 1))
    draw(ax)
    assert len(arrows_of(ax)) == 4 * 3
    np.testing.assert_allclose([x.get_facecolor() for x in arrows_of(ax)[::3]], viridis(RATES))
    (starts,) = (x for x in ax.collections if x is not lines_of(ax))
    np.testing.assert_array_equal(starts.get_offsets(), sim.u[:, 0])
    many = decays(by_rate, n=50)
    ax = many.plot((0, 1))
    assert len(arrows_of(ax)) == 24
    assert len(segments_of(ax)) == 50
    assert not arrows_of(sim.plot((0, 1), arrows=False))


def test_no_arrow_where_nothing_moves():
    sol = eo.solve(eo.ODEProblem(lambda u, p, t: 0 * u, jnp.ones(2), (0.0, 1.0)), saveat=0.5)
    ax = sol.plot((0, 1))
    assert not arrows_of(ax)
    draw(ax)
    prob = eo.ODEProblem(
        lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 20.0), jnp.array([10.0, 28, 8 / 3])
    )
    draw(eo.solve(prob, save_everystep=True).plot((0, 1, 2)))
