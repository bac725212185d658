"""Marks of events in plots, and plots of outcomes against numbers of the trajectories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .test_plotting import entries, figures as figures


def rising(output_func=None, **options):
    """Rises by p, begins anew at one, and passes a half."""
    anew = eo.ContinuousCallback(
        lambda u, t, integrator: u[0] - 1.0, lambda x: eo.remake(x, u=x.u * jnp.array([0.0, 1.0]))
    )
    half = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, lambda x: x, None)
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.stack([p["k"], -u[1]]),
        jnp.array([0.0, 1.0]),
        (0.0, 3.0),
        {"k": 1.0, "name": "rate"},
        callback=eo.CallbackSet(anew, half),
    )
    ens = eo.EnsembleProblem(
        prob,
        lambda prob, ctx: eo.remake(prob, p=prob.p | {"k": 0.4 + 0.2 * ctx.index}),
        output_func,
    )
    return eo.solve(ens, trajectories=4, **options)


@pytest.fixture(scope="module")
def sim():
    return rising(saveat=1.0)


def marks_of(ax):
    """The points of each mark that the legend names."""
    there = [x for x in ax.lines if x.get_linestyle() == "None" and x.get_marker() in ("o", "s")]
    labels = {x.get_marker(): x.get_label() for x in there if not len(x.get_xdata())}
    points = {}
    for x in there:
        if len(x.get_xdata()):
            points.setdefault(labels[x.get_marker()], []).append(x.get_xydata())
    return {label: np.concatenate(several) for label, several in points.items()}


def test_events_are_marked(sim):
    ax = sim.plot(0)
    marks = marks_of(ax)
    assert list(marks) == entries(ax) == ["event 0", "event 1"]
    t, which = np.asarray(sim.events.t), np.asarray(sim.events.which)
    # What begins anew has a mark before and one after.
    expected = [[x, y] for x in t[which == 0] for y in (0.0, 1.0)]
    found = sorted(np.round(marks["event 0"], 10).tolist())
    np.testing.assert_allclose(found, sorted(expected), atol=1e-8)
    np.testing.assert_allclose(sorted(marks["event 1"][:, 0]), sorted(t[which == 1]))
    np.testing.assert_allclose(marks["event 1"][:, 1], 0.5)
    low, high = ax.get_ylim()
    assert low < 0.0 < 1.0 < high


def test_which_and_how(sim):
    assert not marks_of(sim.plot(0, events=False))
    assert list(marks_of(sim.plot(0, events=["anew", "half"]))) == ["anew", "half"]
    some = marks_of(sim.plot(0, trajectories=[0]))
    assert len(some["event 1"]) == (np.asarray(sim.events.which[0]) == 1).sum()
    # In phase portraits, of one trajectory, and into the same axes.
    np.testing.assert_allclose(marks_of(sim.plot((1, 0)))["event 1"][:, 1], 0.5)
    ax = sim[1].plot()
    assert len(marks_of(ax)["event 1"]) == 2 * (np.asarray(sim[1].events.which) == 1).sum()
    sim[2].plot(ax=ax)
    assert entries(ax).count("event 0") == 1
    with pytest.raises(ValueError, match="1 names, and the callback 1 had events"):
        sim.plot(0, events=["anew"])


def test_a_last_state_against_a_parameter(sim):
    ax = sim.plot([1], against="p.k")
    (line,) = (x for x in ax.lines if len(x.get_xdata()))
    np.testing.assert_array_equal(line.get_xdata(), sim.p["k"])
    np.testing.assert_array_equal(line.get_ydata(), sim.u[:, -1, 1])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("p.k", "u1")
    ax = sim.plot(against=np.arange(4.0), trajectories=slice(1, 3))
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [1.0, 2.0])
    assert entries(ax) == ["u0", "u1"]
    with pytest.raises(ValueError, match=r"were given u0\[0\], u0\[1\]|were given p.k, u0"):
        sim.plot(against="p")
    with pytest.raises(ValueError, match="one number for each of the 4"):
        sim.plot(against=[1.0])
    with pytest.raises(ValueError, match="a phase portrait, which is not against"):
        sim.plot((0, 1), against="p.k")


def test_outputs_against_a_parameter():
    sim = rising(lambda sol, ctx: ({"count": sol.events.count, "u": sol.u[-1]}, False))
    ax = sim.plot("count", against="p.k")
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), sim.u["count"])
    ax = sim.plot("u[1]", against="p.k", color=sim.p["k"], label="k")
    np.testing.assert_allclose(ax.collections[0].get_offsets()[:, 1], sim.u["u"][:, 1])
    assert len(ax.figure.axes) == 2
    with pytest.raises(TypeError, match="what output_func returned"):
        sim.plot()


def test_failures_are_crosses():
    prob = eo.ODEProblem(lambda u, p, t: p * u**2, 1.0, (0.0, 1.0), 1.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=0.8 * ctx.index))
    sim = eo.solve(ens, trajectories=3)
    assert sim.failed.tolist() == [2]
    ax = sim.plot(against="p")
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [0.0, 0.8])
    np.testing.assert_allclose(ax.lines[1].get_xdata(), [1.6])
    with pytest.raises(TypeError, match="inside jit"):
        jax.jit(lambda: eo.solve(ens, trajectories=3).plot(against="p") and 0)()
