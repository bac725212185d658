"""Random conditions whose roots are known."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo


KNOTS, N = np.arange(8.0), 8
VALUES = st.lists(
    st.tuples(st.booleans(), st.floats(0.1, 1.0)), min_size=KNOTS.size, max_size=KNOTS.size
)


def roots(values):
    """Of the polygon, and whether it rises there."""
    a, b = values[:-1], values[1:]
    (crosses,) = np.nonzero(a * b < 0)
    return KNOTS[crosses] + a[crosses] / (a - b)[crosses], np.sign((b - a)[crosses])


def found(values, tspan):
    """Events of a state that is the time, without an effect."""
    here = eo.ContinuousCallback(
        lambda u, t, integrator: jnp.interp(u[0], KNOTS, integrator.p),
        lambda integrator: integrator,
    )
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.ones_like(u), np.array([tspan[0]]), tspan, values[0], callback=here
    )
    ens = eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=jnp.asarray(values)[ctx.index])
    )
    return eo.solve(ens, eo.Tsit5(), trajectories=N, dtmax=0.2, max_events=KNOTS.size)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(VALUES, min_size=N, max_size=N), st.booleans())
def test_roots_of_polygons(drawn, backwards):
    values = np.array([[size if up else -size for up, size in row] for row in drawn])
    tspan = (KNOTS[0], KNOTS[-1])
    sim = found(values, tspan[::-1] if backwards else tspan)
    assert (np.asarray(sim.retcode) == eo.ReturnCode.Success).all()
    for i, row in enumerate(values):
        times, signs = roots(row)
        if backwards:
            times, signs = times[::-1], -signs[::-1]
        count = int(sim.events.count[i])
        assert count == len(times)
        np.testing.assert_allclose(sim.events.t[i, :count], times, rtol=1e-13)
        np.testing.assert_array_equal(sim.events.direction[i, :count], signs)
        np.testing.assert_allclose(sim.events.u_before[i, :count, 0], times, rtol=1e-13)
