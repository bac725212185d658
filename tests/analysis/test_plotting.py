"""Plots: what they draw, name and refuse. The drawn numbers are compared with those of the
solutions."""

import re
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest


matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import LogNorm, to_rgba, to_rgba_array

import ensembleode as eo
from ensembleode.ground.extras import installing
from ensembleode.ground.logs import log_once
from ensembleode.solution.dense import KeptSlopes

from ..problems import decay, lorenz, scaled
from ..test_solution import M, S, solution, U


DEFAULT = eo.ReturnCode.Default


@pytest.fixture(autouse=True)
def figures():
    yield
    plt.close("all")


def lines_of(ax):
    (lines,) = (c for c in ax.collections if isinstance(c, LineCollection))
    return lines


def segments_of(ax):
    return lines_of(ax).get_segments()


def entries(ax):
    """The texts of the legend; None without one."""
    legend = ax.get_legend()
    return None if legend is None else [text.get_text() for text in legend.get_texts()]


def curves_of(ax):
    """The lines with data, not those that are there for the legend."""
    return [line for line in ax.lines if len(line.get_xdata()) and line.get_marker() != "x"]


def crosses_of(ax):
    """Where trajectories failed: those at their ends, not those at the border of the view."""
    (crosses,) = (
        line.get_xydata()
        for line in ax.lines
        if line.get_marker() == "x" and line.get_transform() == ax.transData
    )
    return crosses


def draw(ax):
    """Raises if matplotlib can't draw it, or warns."""
    ax.figure.canvas.draw()


@pytest.fixture(scope="module")
def attractor():
    """Lorenz trajectories, by rho."""
    u0, p = jnp.array([1.0, 0.0, 0.0]), jnp.array([10.0, 28.0, 8 / 3])
    ens = eo.EnsembleProblem(
        eo.ODEProblem(lorenz, u0, (0.0, 1.0), p),
        lambda prob, ctx: eo.remake(prob, p=prob.p.at[1].multiply(ctx.sim_id / 4)),
    )
    return eo.solve(ens, trajectories=4, saveat=0.1)


@pytest.fixture(scope="module")
def stepped():
    """Two trajectories with every accepted step, of which they have different counts."""
    ens = eo.EnsembleProblem(
        decay(), lambda prob, ctx: eo.remake(prob, p=prob.p * (1 + 9.0 * ctx.index))
    )
    return eo.solve(ens, trajectories=2, save_everystep=True)


@pytest.fixture(scope="module")
def exploding():
    """du/dt = u^2 blows up at t = 1 / u0: three of five do."""
    ens = eo.EnsembleProblem(
        eo.ODEProblem(lambda u, p, t: u**2, jnp.array(0.5), (0.0, 1.0)),
        lambda prob, ctx: eo.remake(prob, u0=jnp.array([0.1, 0.5, 1.5, 2.0, 3.0])[ctx.index]),
    )
    return eo.solve(ens, trajectories=5, saveat=0.05)


def test_all_trajectories():
    sim = solution([S, S, S])
    ax = sim.plot()
    # Trajectory by trajectory, the components of each one after the other.
    expected = [np.column_stack([sim.t, sim.u[i, :, j]]) for i in range(3) for j in range(2)]
    np.testing.assert_array_equal(segments_of(ax), expected)
    blue, orange = to_rgba_array(["C0", "C1"])
    np.testing.assert_array_equal(lines_of(ax).get_colors(), [blue, orange] * 3)
    assert entries(ax) == ["u0", "u1"]
    handles = ax.get_legend().legend_handles
    np.testing.assert_array_equal(to_rgba_array([h.get_color() for h in handles]), [blue, orange])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("t", "")
    draw(ax)


@pytest.mark.parametrize(
    ("idxs", "drawn"), [(1, [1]), ([0], [0]), (-2, [2]), (np.int64(1), [1]), ([3, 0], [3, 0])]
)
def test_some_components(idxs, drawn):
    sim = solution([S, S], state=(4,))
    ax = sim.plot(idxs)
    expected = np.concatenate([u[:, drawn].T for u in np.asarray(sim.u)])
    np.testing.assert_array_equal([s[:, 1] for s in segments_of(ax)], expected)
    assert (entries(ax) or [ax.get_ylabel()]) == [f"u{i}" for i in drawn]


def test_a_phase_portrait():
    sim = solution([S, S], state=(3,))
    ax = sim.plot((2, 0))
    np.testing.assert_array_equal(segments_of(ax), sim.u[..., jnp.array([2, 0])])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("u2", "u0")
    assert entries(ax) is None
    draw(ax)


def test_a_phase_portrait_in_three_dimensions(attractor):
    ax = attractor.plot((0, 1, 2))
    np.testing.assert_array_equal(lines_of(ax)._segments3d, attractor.u)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_zlabel()) == ("u0", "u1", "u2")
    for axis, values in zip("xyz", np.moveaxis(attractor.u, -1, 0), strict=True):
        low, high = getattr(ax, f"get_{axis}lim")()
        assert low <= values.min() < values.max() <= high
    draw(ax)
    (line,) = attractor[2].plot((2, 1, 0)).lines
    np.testing.assert_array_equal(line.get_data_3d(), attractor.u[2].T[::-1])


def test_names():
    sim = solution([S, S])
    assert entries(sim.plot(names=["prey", "predator"])) == ["prey", "predator"]
    ax = sim.plot((1, 0), names=["prey", "predator"])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("predator", "prey")
    assert solution([S], state=()).plot().get_ylabel() == "u"
    assert solution([S], state=()).plot(names="x").get_ylabel() == "x"
    sim = solution([S], state=(2, 2))
    ax = sim.plot()
    assert entries(ax) == ["u[0,0]", "u[0,1]", "u[1,0]", "u[1,1]"]
    np.testing.assert_array_equal(segments_of(ax)[1][:, 1], sim.u[0, :, 0, 1])


@pytest.mark.parametrize(
    ("trajectories", "drawn"),
    [
        (2, [2]),
        (-1, [3]),
        ([3, 0], [3, 0]),
        ((3, 0), [3, 0]),
        (slice(1, None), [1, 2, 3]),
        (np.array([True, False, False, True]), [0, 3]),
        (jnp.array([1, 2]), [1, 2]),
        ([], []),
    ],
)
def test_some_trajectories(trajectories, drawn):
    sim = solution([S] * 4)
    ax = sim.plot(0, trajectories=trajectories)
    segments = segments_of(ax) if drawn else []
    for segment, i in zip(segments, drawn, strict=True):
        np.testing.assert_array_equal(segment[:, 1], sim.u[i, :, 0])
    draw(ax)


def test_many_lines_are_thin_and_faint():
    every = {"trajectories": slice(None), "density": False}
    few, many = (solution([S] * n, times=2).plot(0, **every) for n in (10, 1000))
    assert lines_of(few).get_alpha() == 1
    assert lines_of(many).get_alpha() == pytest.approx(0.1)
    assert lines_of(many).get_linewidth()[0] < 0.5 < lines_of(few).get_linewidth()[0]
    # In the legend they are opaque.
    ax = solution([S] * 1000, times=2).plot(density=False)
    assert [handle.get_alpha() for handle in ax.get_legend().legend_handles] == [None, None]


@pytest.mark.parametrize("color", [None, np.arange(1000.0)], ids=["plain", "numbers"])
def test_a_sample_of_very_many(color, caplog):
    """Spread over all of them, with some of those that failed, and what is left out is said."""
    log_once.cache_clear()
    codes = np.full(1000, S)
    codes[[100, 101]] = U
    codes[[0, 999]] = DEFAULT
    sim = solution(codes, times=2)
    segments = segments_of(sim.plot(0, color=color, density=False))
    first = np.asarray(sim.u[:, 0, 0])
    drawn = np.flatnonzero(np.isin(first, [segment[0, 1] for segment in segments]))
    assert 500 <= len(drawn) == len(segments) <= 502
    assert {1, 100, 101, 998} <= set(drawn)
    assert np.diff(drawn).max() <= 3
    assert "draws 500 of 998 trajectories" in caplog.text
    assert "2 of the 2 that failed" in caplog.text
    assert len(segments_of(sim.plot(0, trajectories=slice(None), density=False))) == 998
    assert len(segments_of(solution([S] * 500, times=2).plot(0))) == 500


def test_options_of_the_lines():
    ax = solution([S, S]).plot(0, lw=3, ls=":", alpha=0.5, label="mine", zorder=7)
    lines = lines_of(ax)
    assert (lines.get_linewidth()[0], lines.get_alpha(), lines.get_zorder()) == (3, 0.5, 7)
    dotted = solution([S]).plot(0, linestyle="dotted", linewidth=3)
    assert lines.get_linestyle() == lines_of(dotted).get_linestyle()
    assert entries(ax) == ["mine"]
    assert ax.get_ylabel() == "u0"
    assert ax.get_legend().legend_handles[0].get_linestyle() == ":"
    assert entries(solution([S]).plot(label="mine")) == ["mine: u0", "mine: u1"]


def test_a_failed_trajectory_ends_in_a_cross():
    u = np.arange(24.0).reshape(3, 4, 2)
    u[1, 2:] = np.nan
    sim = solution([S, M, S], times=4, u=u, lengths=np.array([4, 2, 4], np.int32))
    ax = sim.plot()
    segments = segments_of(ax)
    assert [len(segment) for segment in segments] == [4, 4, 2, 2, 4, 4]
    assert np.isfinite(np.concatenate(segments)).all()
    np.testing.assert_array_equal(segments[3], np.column_stack([sim.t[:2], u[1, :2, 1]]))
    np.testing.assert_array_equal(crosses_of(ax), [[sim.t[1], u[1, 1, 0]], [sim.t[1], u[1, 1, 1]]])
    assert entries(ax) == ["u0", "u1", "failed"]
    assert to_rgba(ax.get_legend().legend_handles[-1].get_color()) == to_rgba("red")
    ax = sim.plot((0, 1))
    np.testing.assert_array_equal(crosses_of(ax), u[[1], 1])
    assert entries(ax) == ["failed"]


def test_a_failed_trajectory_in_three_dimensions():
    u = np.arange(24.0).reshape(2, 4, 3)
    sim = solution([S, M], times=4, u=u, lengths=np.array([4, 2], np.int32))
    ax = sim.plot((0, 1, 2))
    (cross,) = (line.get_data_3d() for line in ax.lines if line.get_marker() == "x")
    np.testing.assert_array_equal(np.ravel(cross), u[1, 1])
    assert entries(ax) == ["failed"]
    draw(ax)


def test_what_was_not_run_is_not_drawn():
    sim = solution([S, DEFAULT, U], lengths=np.array([3, 0, 0], np.int32))
    ax = sim.plot(0)
    assert len(segments_of(ax)) == 1
    assert entries(ax) is None  # a failure that saved nothing has no place


@pytest.mark.slow
@pytest.mark.parametrize("code", [DEFAULT, U])
def test_nothing_to_draw(code):
    sim = solution([code] * 2, lengths=np.zeros(2, np.int32))
    plots = [sim.plot(*x) for x in ((None,), (0,), ((0, 1),))]
    for ax in (*plots, sim.plot(0, color=[1.0, 2.0]), sim[0].plot()):
        draw(ax)
        assert not ax.collections
        assert not curves_of(ax)


def test_explosions_leave_the_others_readable(exploding):
    """u = 1 / (1 / u0 - t) of the others goes up to 1; it starts at up to 3."""
    failed = exploding.failed
    np.testing.assert_array_equal(failed, [2, 3, 4])
    ax = exploding.plot()
    last = exploding.lengths[failed] - 1
    ends = np.column_stack([exploding.t[last], exploding.u[failed, last]])
    np.testing.assert_array_equal(crosses_of(ax), ends)
    assert ends[:, 1].max() > 15
    low, high = ax.get_ylim()
    assert low <= 0.1
    assert 3 < high < 10
    beyond = ends[ends[:, 1] > high]
    assert entries(ax) == [f"failed ({len(beyond)} out of view)"]
    # Those have a cross at the border.
    (border,) = (
        line
        for line in ax.lines
        if line.get_marker() == "x"
        and line.get_transform() != ax.transData
        and len(line.get_xdata())
    )
    np.testing.assert_array_equal(border.get_xdata(), beyond[:, 0])
    draw(ax)
    # They can be looked at, of course.
    ax = exploding.plot(trajectories=failed)
    assert ax.get_ylim()[1] > ends[:, 1].max()
    assert entries(ax) == ["failed"]


def test_a_small_excess_is_in_view():
    u = np.array([[0.0, 0.5, 1.0], [0.0, 2.5, np.nan]])
    ax = solution([S, U], u=u, lengths=np.array([3, 2], np.int32)).plot()
    assert ax.get_ylim()[1] > 2.5
    assert entries(ax) == ["failed"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("idxs", [0, (0, 1), (0, 1, 2)])
def test_numbers_near_overflow(idxs):
    u = np.ones((2, 3, 3))
    u[0] = np.arange(9.0).reshape(3, 3)
    u[1, 1] = [1e300, -1e300, 1e300]
    u[1, 2] = np.nan
    ax = solution([S, U], u=u, lengths=np.array([3, 2], np.int32)).plot(idxs)
    assert np.abs(ax.get_ylim()).max() < 50
    assert entries(ax) == ["failed (1 out of view)"]
    draw(ax)


@pytest.mark.slow
def test_every_step_is_joined_smoothly(stepped):
    counts = stepped.lengths
    assert counts[0] != counts[1]
    ax = stepped.plot(0)
    for i, segment in enumerate(segments_of(ax)):
        steps = counts[i] - 1
        assert len(segment) == 10 * steps + 1
        np.testing.assert_allclose(segment[:, 1], stepped[i](segment[:, 0])[:, 0], rtol=1e-12)
        # At the steps, it is what was saved.
        np.testing.assert_array_equal(segment[::10, 0], stepped.t[i, : counts[i]])
        np.testing.assert_array_equal(segment[::10, 1], stepped.u[i, : counts[i], 0])


def test_slopes_that_overflow():
    """Between the last two steps before a blow-up there may be no interpolation."""
    u = np.array([[[0.0], [1.0], [2.0]]])
    du = np.array([[[1.0], [1.0], [np.inf]]])
    t, length = np.array([[0.0, 1.0, 2.0]]), np.array([3], np.int32)
    (segment,) = segments_of(solution([U], u=u, t=t, lengths=length, _dense=KeptSlopes(du)).plot())
    np.testing.assert_allclose(segment, np.linspace(0, 2, 21)[:, None] * [1, 1])


def test_times_of_their_own():
    ens = eo.EnsembleProblem(
        decay(), lambda prob, ctx: eo.remake(prob, tspan=(0.0, 0.5 * ctx.sim_id))
    )
    sim = eo.solve(ens, trajectories=3, saveat=0.5)
    segments = segments_of(sim.plot(1))
    assert [len(segment) for segment in segments] == [2, 3, 4]
    for segment, sol in zip(segments, sim, strict=True):
        np.testing.assert_array_equal(segment, np.column_stack([sol.t, sol.u[:, 1]]))


@pytest.mark.slow
def test_backwards_in_time():
    ens = eo.EnsembleProblem(decay((1.0, 0.0)), scaled)
    sim = eo.solve(ens, trajectories=2, saveat=0.25)
    ax = sim.plot(0)
    np.testing.assert_array_equal(segments_of(ax)[1], np.column_stack([sim.t, sim.u[1, :, 0]]))
    assert ax.get_xlim()[0] <= 0 < 1 <= ax.get_xlim()[1]
    sol = eo.solve(decay((1.0, 0.0)), save_everystep=True)
    (line,) = curves_of(sol.plot(0))
    np.testing.assert_allclose(line.get_ydata(), sol(line.get_xdata())[:, 0], rtol=1e-12)
    draw(eo.EnsembleSummary(sim).plot())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("idxs", [0, (0, 1), (0, 1, 2)])
def test_a_single_time_is_a_dot(idxs):
    sim = solution([S, S, U], times=1, state=(3,))
    ax = sim.plot(idxs, color=[1.0, 2.0, 3.0])
    (dots,) = (c for c in ax.collections if not isinstance(c, LineCollection))
    if idxs == (0, 1, 2):
        np.testing.assert_array_equal(dots._offsets3d, sim.u[:2, 0].T)
    else:
        expected = (
            sim.u[:2, 0, :2] if idxs else np.column_stack([np.repeat(sim.t, 2), sim.u[:2, 0, 0]])
        )
        np.testing.assert_array_equal(dots.get_offsets(), expected)
        np.testing.assert_array_equal(crosses_of(ax)[0][-1], sim.u[2, 0, 1 if idxs else 0])
    draw(ax)


def test_single_precision():
    sim = solution([S, S], make=lambda x: np.asarray(x, np.float32))
    np.testing.assert_array_equal([s[:, 1] for s in segments_of(sim.plot(0))], sim.u[..., 0])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("idxs", [0, (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("make", [list, np.asarray, jnp.asarray])
def test_colors_by_numbers(attractor, idxs, make):
    rho = 7.0 * np.arange(1, 5)
    ax = attractor.plot(idxs, color=make(rho), label="rho", trajectories=[3, 0, 1])
    relative = (rho[[3, 0, 1]] - 7) / 21
    np.testing.assert_allclose(lines_of(ax).get_colors(), matplotlib.colormaps["viridis"](relative))
    _, bar = ax.figure.axes
    assert "rho" in (bar.get_ylabel(), bar.get_xlabel())
    assert tuple(bar.get_ylim()) == (7, 28)
    assert entries(ax) is None
    draw(ax)


def test_a_colormap_and_its_norm(attractor):
    ax = attractor.plot(0, c=[1, 10, 100, 1000], cmap="plasma", norm=LogNorm())
    expected = matplotlib.colormaps["plasma"](np.linspace(0, 1, 4))
    np.testing.assert_allclose(lines_of(ax).get_colors(), expected)
    assert ax.figure.axes[1].get_yscale() == "log"
    ax = attractor.plot(0, color=np.ones(4))
    draw(ax)
    assert len(np.unique(lines_of(ax).get_colors(), axis=0)) == 1


def test_colors_by_numbers_of_several_components(attractor):
    ax = attractor.plot([0, 2], color=[1, 2, 3, 4])
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 1, 4))
    np.testing.assert_allclose(lines_of(ax).get_colors(), np.repeat(colors, 2, axis=0))
    assert entries(ax) == ["u0", "u2"]
    assert [h.get_linestyle() for h in ax.get_legend().legend_handles] == ["-", "--"]
    (_, solid), (_, dashed) = lines_of(ax).get_linestyle()
    assert solid is None
    assert dashed is not None


def test_one_color():
    ax = solution([S, S]).plot(color=(0.1, 0.2, 0.3))
    np.testing.assert_array_equal(
        np.unique(lines_of(ax).get_colors(), axis=0), [[0.1, 0.2, 0.3, 1]]
    )
    assert entries(ax) == ["u0", "u1"]
    assert [h.get_linestyle() for h in ax.get_legend().legend_handles] == ["-", "--"]
    # With a line style of one's own there is nothing to tell them apart.
    ax = solution([S, S], state=(6,)).plot(color="gray", ls="-")
    assert entries(ax) is None


def test_more_components_than_colors():
    ax = solution([S, S], state=(15,)).plot()
    assert len(np.unique(lines_of(ax).get_colors(), axis=0)) == 15
    assert len(entries(ax)) == 15
    ax = solution([S, S], state=(30,)).plot(list(range(5, 30)))
    expected = matplotlib.colormaps["viridis"](np.linspace(0, 1, 25))
    np.testing.assert_allclose(lines_of(ax).get_colors()[:25], expected)
    assert entries(ax) is None
    assert ax.figure.axes[1].get_ylabel() == "component"
    assert tuple(ax.figure.axes[1].get_ylim()) == (5, 29)
    draw(ax)


def test_into_axes():
    _, axes = plt.subplots(1, 2)
    first, second = solution([S, S]), solution([M, S])
    axes[0].set_xlabel("time (s)")
    assert first.plot(ax=axes[0]) is axes[0]
    assert first[0].plot(0, ax=axes[1]) is axes[1]
    assert plt.get_fignums() == [1]
    assert axes[0].get_xlabel() == "time (s)"
    # A second plot takes other colours, and its entries are added.
    second.plot(0, ax=axes[0], label="second")
    second.plot(1, ax=axes[0], label="third", trajectories=0)
    assert entries(axes[0]) == ["u0", "u1", "second", "failed", "third"]
    used = [handle.get_color() for handle in axes[0].get_legend().legend_handles]
    np.testing.assert_array_equal(
        to_rgba_array(used[:3] + used[4:]), to_rgba_array([f"C{i}" for i in range(4)])
    )
    low, high = axes[0].get_ylim()
    assert low <= 1
    assert high >= np.max(second.u[1])


def test_into_a_subfigure():
    figure = plt.figure(layout="constrained")
    ax = figure.subfigures(1, 2)[1].subplots()
    solution([S, M]).plot(ax=ax, color=[1, 2])
    draw(ax)
    assert len(segments_of(ax)) == 4
    assert len(ax.figure.axes) == 2  # with the colorbar


def test_figures_of_their_own():
    before = dict(matplotlib.rcParams)
    figures = [solution([S]).plot().figure, solution([S])[0].plot((0, 1)).figure]
    assert plt.get_fignums() == [1, 2]
    assert all(f.get_constrained_layout() for f in figures)
    assert dict(matplotlib.rcParams) == before


def legend_box(ax):
    draw(ax)
    return ax.get_legend().get_window_extent()


def test_a_legend_beside_the_axes():
    sim = solution([S], u=np.ones((1, 3, 2)) * [1.0, -1.0])
    _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    sim.plot(ax=ax)
    box, axes, figure = legend_box(ax), ax.get_window_extent(), ax.figure.bbox
    assert axes.x1 < box.x0 < box.x1 <= figure.x1
    assert figure.y0 <= box.y0 < box.y1 <= figure.y1


@pytest.mark.parametrize("layout", ["constrained", None])
def test_a_legend_within_where_there_is_no_room(layout):
    _, ax = plt.subplots(figsize=(3, 2), layout=layout)
    names = ["a name that is longer", "than the other"]
    solution([S], u=np.ones((1, 3, 2)) * [1.0, -1.0]).plot(ax=ax, names=names)
    assert legend_box(ax).x0 < ax.get_window_extent().x1


def test_a_legend_too_large_for_its_figure():
    _, ax = plt.subplots(figsize=(3, 2), layout="constrained")
    draw(solution([S], state=(20,)).plot(ax=ax))
    assert len(entries(ax)) == 20


def test_a_solution():
    sim = solution([S, S])
    ax = sim[1].plot()
    first, second = curves_of(ax)
    np.testing.assert_array_equal(first.get_xydata(), np.column_stack([sim.t, sim.u[1, :, 0]]))
    np.testing.assert_array_equal(second.get_ydata(), sim.u[1, :, 1])
    assert entries(ax) == ["u0", "u1"]
    assert ax.get_xlabel() == "t"
    (line,) = curves_of(sim[1].plot((1, 0), lw=3, marker="s", color="k", names=["a", "b"]))
    np.testing.assert_array_equal(line.get_xydata(), sim.u[1][:, ::-1])
    assert (line.get_linewidth(), line.get_marker(), line.get_color()) == (3, "s", "k")
    assert line.axes.get_xlabel() == "b"
    (line,) = curves_of(solution([S], times=1)[0].plot(0))
    assert line.get_marker() == "o"


def test_a_solution_of_every_step():
    sol = eo.solve(decay(), save_everystep=True)
    ax = sol.plot()
    for i, line in enumerate(curves_of(ax)):
        t, u = line.get_data()
        assert len(t) == 10 * (len(sol) - 1) + 1
        np.testing.assert_allclose(u, sol(t)[:, i], rtol=1e-12)
        np.testing.assert_array_equal(u[::10], sol.u[:, i])


def test_a_solution_that_failed(exploding):
    sol = exploding[3]
    ax = sol.plot()
    (line,) = curves_of(ax)
    np.testing.assert_array_equal(line.get_ydata(), sol.u[: sol.length])
    np.testing.assert_array_equal(crosses_of(ax), line.get_xydata()[-1:])
    assert entries(ax) == ["failed"]
    assert ax.get_ylim()[1] > sol.u[sol.length - 1]


def scattered(state=(), n=7, times=4, lengths=None):
    """Random states; those after `lengths` are not reached."""
    u = np.random.default_rng(1).normal(size=(n, times, *state))
    lengths = np.full(n, times) if lengths is None else np.asarray(lengths)
    u[np.arange(times) >= lengths[:, None]] = np.nan
    codes = np.where(lengths == times, S, U)
    return solution(codes, times=times, u=u, lengths=lengths.astype(np.int32))


def ribbons_of(ax):
    """Of each ribbon, its times, lower and upper values."""
    found = []
    for ribbon in (c for c in ax.collections if isinstance(c, PolyCollection)):
        (path,) = ribbon.get_paths()
        x, y = path.vertices.T
        times = np.unique(x)
        limits = [(y[x == t].min(), y[x == t].max()) for t in times]
        found.append((times, *np.transpose(limits)))
    return found


def bars_of(ax):
    return [c.get_segments() for c in ax.collections if isinstance(c, LineCollection)]


STATES = pytest.mark.parametrize("state", [(), (3,), (2, 2)])


@STATES
def test_a_summary_by_quantiles(state):
    sim = scattered(state)
    summary = eo.EnsembleSummary(sim, quantiles=(0.1, 0.75))
    ax = summary.plot()
    u = np.reshape(sim.u, (7, 4, -1))
    for i, line in enumerate(curves_of(ax)):
        np.testing.assert_allclose(line.get_ydata(), np.median(u[..., i], axis=0))
        np.testing.assert_array_equal(line.get_xdata(), sim.t)
    for i, (t, low, high) in enumerate(ribbons_of(ax)):
        np.testing.assert_array_equal(t, sim.t)
        np.testing.assert_allclose(low, np.quantile(u[..., i], 0.1, axis=0))
        np.testing.assert_allclose(high, np.quantile(u[..., i], 0.75, axis=0))
    assert len(curves_of(ax)) == len(ribbons_of(ax)) == u.shape[-1]
    label = "median, 10% to 75%"
    if state == ():
        assert entries(ax) == [label]
        assert ax.get_ylabel() == "u"
    else:
        assert entries(ax)[0] == label
        assert entries(ax)[1] == ("u0" if state == (3,) else "u[0,0]")
    draw(ax)


@STATES
def test_a_summary_by_standard_errors(state):
    """s / sqrt(n) of those that reached the time, for every shape of state."""
    lengths = [4, 4, 4, 3, 3, 2, 4]
    sim = scattered(state, lengths=lengths)
    counts = np.array([7, 7, 6, 4])
    ax = eo.EnsembleSummary(sim).plot(ci_type="SEM")
    u = np.reshape(sim.u, (7, 4, -1))
    assert len(ribbons_of(ax)) == u.shape[-1]
    for i, (line, ribbon) in enumerate(zip(curves_of(ax), ribbons_of(ax), strict=True)):
        mean = np.nanmean(u[..., i], axis=0)
        error = np.nanstd(u[..., i], axis=0, ddof=1) / np.sqrt(counts)
        np.testing.assert_allclose(line.get_ydata(), mean)
        np.testing.assert_allclose(ribbon[1:], [mean - 1.96 * error, mean + 1.96 * error])
    assert entries(ax)[0] == "mean ± 1.96 SEM"


def test_a_summary_with_several_bands():
    pairs = [(0.05, 0.95), (0.25, 0.75)]
    summary = eo.EnsembleSummary(scattered((2,)), quantiles=pairs)
    ax = summary.plot()
    expected = [
        np.stack([summary.t, x[:, c], y[:, c]])
        for c in range(2)
        for x, y in zip(summary.qlow, summary.qhigh, strict=True)
    ]
    for ribbon, wanted in zip(ribbons_of(ax), expected, strict=True):
        np.testing.assert_allclose(ribbon, wanted)
    assert entries(ax)[0] == "median, 5% to 95% and 25% to 75%"
    draw(ax)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ci_type", ["quantile", "SEM"])
def test_a_summary_with_bars(ci_type):
    summary = eo.EnsembleSummary(scattered((2,)))
    ax = summary.plot(ci_type=ci_type, error_style="bars")
    error = 1.96 * np.sqrt(summary.v / 7)
    low, high = summary.u - error, summary.u + error
    if ci_type == "quantile":
        low, high = summary.qlow, summary.qhigh
    for i, bars in enumerate(bars_of(ax)):
        np.testing.assert_allclose([b[:, 1] for b in bars], np.stack([low, high])[..., i].T)
        np.testing.assert_array_equal([b[:, 0] for b in bars], np.stack([summary.t] * 2, axis=-1))
    assert len(bars_of(ax)) == 2
    assert not ribbons_of(ax)
    label = {"quantile": "median, 5% to 95%", "SEM": "mean ± 1.96 SEM"}[ci_type]
    assert entries(ax) == [label, "u0", "u1"]
    draw(ax)
    # Alone, without bars.
    label = label.replace(",", " ").split()[0]
    ax = summary.plot(1, ci_type=ci_type, error_style="none")
    assert not ax.collections
    assert entries(ax) == [label]
    ax = summary.plot((1, 0), ci_type=ci_type)
    (line,) = curves_of(ax)
    middle = summary.med if ci_type == "quantile" else summary.u
    np.testing.assert_array_equal(line.get_xydata(), middle[:, ::-1])
    assert not ax.collections
    assert entries(ax) == [label]
    draw(eo.EnsembleSummary(scattered((3,))).plot((0, 1, 2)))


def test_options_of_a_summary():
    summary = eo.EnsembleSummary(scattered((2,)))
    ax = summary.plot(0, lw=4, c="purple", label="mine", names=["a", "b"])
    (line,) = curves_of(ax)
    assert (line.get_linewidth(), line.get_color()) == (4, "purple")
    (ribbon,) = ax.collections
    assert tuple(ribbon.get_facecolor()[0, :3]) == to_rgba("purple")[:3]
    assert entries(ax) == ["mine"]
    assert ax.get_ylabel() == "a"
    # Several components have the colours of the cycle, from its first.
    first, second = curves_of(summary.plot())
    assert (first.get_color(), second.get_color()) == tuple(
        matplotlib.rcParams["axes.prop_cycle"].by_key()["color"][:2]
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ci_type", ["quantile", "SEM"])
@pytest.mark.parametrize("error_style", ["ribbon", "bars"])
def test_a_summary_of_few(ci_type, error_style):
    """None or one that reached a time, and a single time."""
    for lengths in ([0, 0], [4, 2], [1, 1], [4, 4]):
        summary = eo.EnsembleSummary(scattered(n=2, lengths=lengths))
        draw(summary.plot(ci_type=ci_type, error_style=error_style))
    summary = eo.EnsembleSummary(scattered(times=1))
    ax = summary.plot(ci_type=ci_type, error_style=error_style)
    assert len(bars_of(ax)) == 1  # a ribbon would have no width
    draw(ax)


def test_a_summary_over_its_ensemble():
    sim = scattered()
    ax = sim.plot(color="gray", label="trajectories")
    eo.EnsembleSummary(sim).plot(ax=ax)
    assert entries(ax) == ["trajectories", "median, 5% to 95%"]
    (ribbon,) = (c for c in ax.collections if isinstance(c, PolyCollection))
    (line,) = curves_of(ax)
    assert lines_of(ax).get_zorder() < ribbon.get_zorder() < line.get_zorder()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"idxs": 2}, ValueError, "idxs has the component 2, and the state has 2, counted from 0"),
        ({"idxs": [0, -3]}, ValueError, "idxs has the component -3"),
        ({"idxs": (0, 5)}, ValueError, "idxs has the component 5"),
        ({"idxs": 0.5}, TypeError, "idxs must be an integer"),
        ({"idxs": [True, False]}, TypeError, "idxs must be an integer"),
        ({"idxs": "x"}, ValueError, "no component has the name 'x'; there are u0, u1"),
        ({"idxs": []}, ValueError, "idxs has no components"),
        ({"idxs": (0,)}, ValueError, r"has 1 components in a tuple.*give a list: idxs=\[0\]"),
        ({"idxs": (0, 1, 0, 1)}, ValueError, "a phase portrait has 2 or 3"),
        (
            {"names": ["a"]},
            ValueError,
            "names must have a name for each of the 2 components.*got 1",
        ),
        ({"color": "no such colour"}, ValueError, "color must be a matplotlib colour"),
        ({"color": "r", "c": "b"}, TypeError, "color is given twice"),
    ],
)
def test_bad_arguments(options, error, message):
    idxs = options.pop("idxs", None)
    for plottable in (solution([S, S]), solution([S])[0]):
        with pytest.raises(error, match=message):
            plottable.plot(idxs, **options)
    if "c" not in options:
        with pytest.raises(error, match=message):
            eo.EnsembleSummary(solution([S, S])).plot(idxs, **options)
    assert not plt.get_fignums()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trajectories": 4}, "trajectories must be indices, a slice or a mask of the 4"),
        ({"trajectories": [True, False]}, "trajectories must be"),
        ({"trajectories": 0.5}, "trajectories must be"),
        ({"color": [1.0, 2.0]}, "one number for each of the 4 trajectories"),
        ({"color": np.ones((4, 1))}, "one number for each of the 4 trajectories"),
        ({"color": ["r", "g", "b", "k"]}, "one number for each of the 4 trajectories"),
        ({"color": 0.5}, "one number for each of the 4 trajectories"),
        ({"color": [1, 2, np.nan, 4]}, "color is nan for trajectory 2"),
    ],
)
def test_bad_arguments_of_an_ensemble(options, message):
    with pytest.raises(ValueError, match=message):
        solution([S] * 4).plot(0, **options)
    assert not plt.get_fignums()


@pytest.mark.parametrize("color", ["r", [1.0, 2.0]])
def test_too_many_components_for_line_styles(color):
    with pytest.raises(ValueError, match=r"there are 4, and 5 components are drawn. Choose some"):
        solution([S, S], state=(5,)).plot(color=color)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ci_type": "sem"}, "ci_type must be one of 'quantile', 'SEM', got 'sem'"),
        (
            {"error_style": "band"},
            "error_style must be one of 'ribbon', 'bars', 'none', got 'band'",
        ),
    ],
)
def test_bad_arguments_of_a_summary(options, message):
    with pytest.raises(ValueError, match=message):
        eo.EnsembleSummary(solution([S, S])).plot(**options)


def test_axes_of_the_wrong_dimension():
    flat, solid = plt.subplot(1, 2, 1), plt.subplot(1, 2, 2, projection="3d")
    sim = solution([S, S], state=(3,))
    for plottable in (sim, sim[0], eo.EnsembleSummary(sim)):
        with pytest.raises(ValueError, match="ax must be 3-D"):
            plottable.plot((0, 1, 2), ax=flat)
        with pytest.raises(ValueError, match="idxs must be a tuple of three"):
            plottable.plot((0, 1), ax=solid)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("outputs", "output_func returned.*plot sim.u with matplotlib"),
        ("reduced", r"was reduced: plot sim.u with matplotlib.*EnsembleSummary"),
    ],
)
def test_no_states(kind, message):
    with pytest.raises(TypeError, match=message):
        solution(u=jnp.ones(4), t=None, kind=kind).plot()


def test_nothing_to_plot_inside_jit():
    sim = solution([S, S])
    for plottable in (sim, sim[0], eo.EnsembleSummary(sim)):
        with pytest.raises(TypeError, match="inside jit, grad or vmap nothing has been computed"):
            jax.jit(lambda x: x.plot() and None)(plottable)
    with pytest.raises(TypeError, match="color is traced"):
        jax.jit(lambda x: sim.plot(0, color=x) and None)(jnp.ones(2))


def test_several_in_one():
    sim = solution([S, S])
    many = jax.tree.map(lambda x: jnp.stack([x, x]), sim)
    with pytest.raises(TypeError, match=r"pick one with jax\.tree\.map"):
        many.plot()
    jax.tree.map(lambda x: x[0], many).plot()
    with pytest.raises(TypeError, match="many solutions in one"):
        jax.vmap(lambda u0: eo.solve(eo.remake(decay(), u0=u0)))(jnp.ones((2, 2))).plot()


def test_complex_states():
    sim = solution([S, S], make=lambda x: np.asarray(x, complex), t=np.linspace(0.0, 1.0, 3))
    for plottable in (sim, sim[0]):
        with pytest.raises(TypeError, match=r"states are complex \(complex128\).*plot real and"):
            plottable.plot()


def test_without_matplotlib(monkeypatch):
    for name in [n for n in sys.modules if n.startswith(("matplotlib", "mpl_toolkits"))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ensembleode.analysis.plotting", raising=False)
    monkeypatch.delattr(eo.analysis, "plotting", raising=False)
    sim = solution([S, S])
    for plottable in (sim, sim[0], eo.EnsembleSummary(sim)):
        with pytest.raises(ImportError, match=re.escape(installing("plot"))):
            plottable.plot()
