"""check_columns: finds coupled columns, names a pair, and clears independent ones."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

import ensembleode as eo

from ..marks import slow_unless
from ..problems import network


def matrix_problem(f, columns=5, p=None):
    u0 = jnp.linspace(-1.0, 1.0, 3 * columns).reshape(3, columns)
    return eo.ODEProblem(f, u0, (0.0, 1.0), p)


INDEPENDENT = {
    "linear": lambda u, p, t: jnp.cos(t) * u,
    "product": lambda u, p, t: jnp.tanh(jnp.array([[0.0, 1, 2], [3, 4, 5], [6, 7, 8]]) @ u),
    "softmax over the state": lambda u, p, t: jax.nn.softmax(u, axis=0),
    "by column": lambda u, p, t: jax.vmap(lambda c: c * jnp.sum(c**2), 1, 1)(u),
}
COUPLED = {
    "mean": lambda u, p, t: u - u.mean(),
    "softmax over the columns": lambda u, p, t: jax.nn.softmax(u, axis=1),
    "neighbours": lambda u, p, t: jnp.roll(u, 1, axis=1) - u,
    "later": lambda u, p, t: u + t * jnp.sum(u**2),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.parametrize("columns", [1, 5, *(slow_unless(False, x) for x in (2, 8))])
def test_independent(name, columns):
    report = eo.check_columns(matrix_problem(INDEPENDENT[name], columns))
    assert report
    assert report.coupled is None
    assert report.states == 4
    assert "independent" in repr(report)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("columns", [2, 5, 8])
def test_coupled(name, columns):
    report = eo.check_columns(matrix_problem(COUPLED[name], columns))
    assert not report
    i, j = report.coupled
    assert i != j
    assert f"f(u)[..., {j}] depends on u[..., {i}]" in repr(report)


@pytest.mark.slow
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_the_pair_is_named(data):
    """One weak coupling among many columns is found, wherever it is."""
    columns = data.draw(st.integers(2, 40))
    i = data.draw(st.integers(0, columns - 1))
    j = data.draw(st.integers(0, columns - 1).filter(lambda j: j != i))
    report = eo.check_columns(
        matrix_problem(lambda u, p, t: u.at[0, j].add(1e-6 * u[2, i] ** 3), columns)
    )
    assert report.coupled == (i, j)


@pytest.mark.slow
def test_network_and_float32():
    net = jax.tree.map(
        lambda x: x.astype(jnp.float32) if isinstance(x, jax.Array) else x, network()
    )
    u0 = jnp.ones((2, 4), jnp.float32)
    prob = eo.ODEProblem(lambda u, p, t: jax.vmap(p, 1, 1)(u), u0, (0.0, 1.0), net)
    assert eo.check_columns(prob)


def test_states_where_f_is_undefined_are_left_out():
    prob = eo.ODEProblem(lambda u, p, t: jnp.sqrt(u), jnp.ones((2, 3)), (0.0, 1.0))
    report = eo.check_columns(prob, states=5)
    assert report
    assert 1 <= report.states < 6


def test_errors():
    with pytest.raises(ValueError, match=r"u0 must be a matrix.*got the shape \(3,\)"):
        eo.check_columns(eo.ODEProblem(lambda u, p, t: u, jnp.ones(3), (0.0, 1.0)))
    bad = eo.ODEProblem(lambda u, p, t: jnp.log(u), -jnp.ones((2, 3)), (0.0, 1.0))
    with pytest.raises(ValueError, match="not finite at the initial state"):
        eo.check_columns(bad)


@pytest.mark.slow
def test_matrix_by_hand_is_ensemble_columns():
    """A matrix u0 with f for matrices, and EnsembleColumns with f for one column, are one solve."""
    u0 = jnp.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    net = network()
    by_hand = eo.ODEProblem(lambda u, p, t: jax.vmap(p, 1, 1)(u), u0, (0.0, 1.0), net)
    assert eo.check_columns(by_hand)
    sol = eo.solve(by_hand, saveat=0.25)
    prob = eo.ODEProblem(lambda u, p, t: p(u), u0[:, 0], (0.0, 1.0), net)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[:, ctx.index]))
    sim = eo.solve(ens, None, eo.EnsembleColumns(), trajectories=3, saveat=0.25)
    assert jnp.allclose(jnp.moveaxis(sim.u, 0, -1), sol.u, rtol=1e-12)
    assert (sim.stats.naccept == sol.stats.naccept).all()
