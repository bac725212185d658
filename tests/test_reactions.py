"""Reactions that happen at random times, against the chemical master equation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.stats

import ensembleode as eo

from .marks import slow_unless


def birth_and_death(**options):
    return eo.JumpProblem(
        lambda u, p, t: jnp.stack([p[0], p[1] * u[0]]),
        [[1.0], [-1.0]],
        [3],
        (0.0, 2.0),
        jnp.array([10.0, 1.0]),
        **options,
    )


def dimerisation(dtype=float, **options):
    u0 = np.array([20, 0], dtype)
    return eo.JumpProblem.of_reactions(
        [[2, 0], [0, 1]], [[0, 1], [2, 0]], u0, (0.0, 2.0), [0.05, 0.3], **options
    )


def matches(counts, expected):
    """Whether these counts may be drawn from these probabilities (chi-square, rare ones joined)."""
    n, expected = counts.sum(), np.asarray(expected)
    common = expected * n > 5
    found = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], 1 - expected[common].sum()) * n
    found, wanted = (x[wanted > 1] for x in (found, wanted))
    return scipy.stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("n", [slow_unless(True, 10_000), slow_unless(False, 1_000_000)])
def test_birth_and_death(n):
    """Against the master equation, truncated at 60."""
    times, size = [0.3, 2.0], 60
    sim = eo.solve(eo.EnsembleProblem(birth_and_death()), trajectories=n, saveat=times)
    state = np.arange(size)
    matrix = np.diag(np.full(size - 1, 10.0), -1) + np.diag(1.0 * state[1:], 1)
    matrix -= np.diag(matrix.sum(0))
    for i, t in enumerate(times):
        expected = scipy.linalg.expm(matrix * t)[:, 3]
        counts = np.bincount(np.asarray(sim.u[:, i, 0]).astype(int), minlength=size)
        assert matches(counts, expected), t


@pytest.mark.parametrize("dtype", [np.float64, slow_unless(False, np.float32)])
@pytest.mark.parametrize("n", [slow_unless(True, 10_000), slow_unless(False, 1_000_000)])
def test_dimerisation(n, dtype):
    ens = eo.EnsembleProblem(dimerisation(dtype))
    sim = eo.solve(ens, eo.Direct(), trajectories=n, saveat=[0.2, 2.0])
    u = np.asarray(sim.u)
    np.testing.assert_array_equal(u[..., 0] + 2 * u[..., 1], 20)
    pairs = np.arange(11)
    left = 20 - 2 * pairs
    joins, parts = 0.05 * left * (left - 1) / 2, 0.3 * pairs
    matrix = np.diag(joins[:-1], -1) + np.diag(parts[1:], 1) - np.diag(joins + parts)
    for i, t in enumerate((0.2, 2.0)):
        expected = scipy.linalg.expm(matrix * t)[:, 0]
        counts = np.bincount(u[:, i, 1].astype(int), minlength=11)
        assert matches(counts, expected), t


def test_waiting_times_are_exponential():
    """The time of the first reaction, by what is left at many times."""
    prob = eo.JumpProblem(lambda u, p, t: u, [[-1.0]], [1], (0.0, 3.0))
    times = np.linspace(0, 3, 13)
    sim = eo.solve(eo.EnsembleProblem(prob), trajectories=20_000, saveat=times)
    left = np.asarray(sim.u[..., 0]).mean(0)
    np.testing.assert_allclose(left, np.exp(-times), atol=4 * 0.5 / math.sqrt(20_000))


def test_the_same_bits_everywhere():
    def rising(prob, ctx):
        return eo.remake(prob, p=prob.p * (1 + 0.1 * ctx.index))

    ens, options = eo.EnsembleProblem(birth_and_death(), rising), {"saveat": [0.5, 2.0]}
    expected = eo.solve(ens, None, eo.EnsembleSerial(), trajectories=37, **options).u
    for how in (
        {"ensemblealg": eo.EnsembleThreads(2)},
        {"ensemblealg": eo.EnsembleGPUArray()},
        {"batch_size": 10},
        {"batch_size": 1},
    ):
        found = eo.solve(ens, trajectories=37, **options, **how).u
        np.testing.assert_array_equal(found, expected)
    inside = jax.jit(lambda: eo.solve(ens, trajectories=37, **options).u)()
    np.testing.assert_array_equal(inside, expected)
    np.testing.assert_array_equal(eo.solve(ens.prob, **options).u, expected[0])
    assert np.any(np.asarray(eo.solve(ens, trajectories=37, seed=1, **options).u) != expected)


def test_limits_of_many_molecules():
    """The rate equations and the Langevin equation have the mean of the reactions."""
    prob = eo.JumpProblem.of_reactions(
        [[2, 0], [0, 1]], [[0, 1], [2, 0]], [1000, 0], (0.0, 2.0), [0.001, 0.3]
    )
    mean = np.asarray(eo.solve(eo.EnsembleProblem(prob), trajectories=2_000).u[:, -1])
    ode = eo.solve(prob.ode()).u[-1]
    sde = np.asarray(eo.solve(eo.EnsembleProblem(prob.langevin()), trajectories=2_000, dt=0.01).u)
    np.testing.assert_allclose(mean.mean(0), ode, rtol=0.01)
    np.testing.assert_allclose(sde[:, -1].mean(0), ode, rtol=0.01)
    np.testing.assert_allclose(sde[:, -1].std(0), mean.std(0), rtol=0.1)
    assert isinstance(prob.langevin(), eo.SDEProblem)


def test_a_state_that_is_a_pytree_and_own_times():
    prob = eo.JumpProblem(
        lambda u, p, t: jnp.stack([p * u["A"], p * u["B"]]),
        {"A": [-1.0, 0.0], "B": [1.0, -1.0]},
        {"A": jnp.array(50.0), "B": jnp.array(0.0)},
        (0.0, 1.0),
        1.0,
    )
    ens = eo.EnsembleProblem(prob)
    rows = np.array([[0.5, 1.0], [0.2, np.inf]])
    sim = eo.solve(ens, trajectories=2, saveat=rows)
    assert sim.lengths.tolist() == [2, 1]
    sim = eo.solve(ens, trajectories=4_000, saveat=0.5)
    np.testing.assert_allclose(sim.u["A"].mean(0), 50 * np.exp([0, -0.5, -1]), rtol=0.01)


def test_callbacks_act_at_saved_times_and_steps():
    dose = eo.PresetTimeCallback([0.5], lambda x: eo.remake(x, u=x.u + 100.0))
    sim = eo.solve(eo.EnsembleProblem(birth_and_death(callback=dose)), trajectories=20, saveat=0.25)
    np.testing.assert_array_equal(sim.events.u_after - sim.events.u_before, 100.0)
    gone = eo.DiscreteCallback(lambda u, t, x: u[0] >= 8, eo.terminate)
    sim = eo.solve(eo.EnsembleProblem(birth_and_death(callback=gone)), trajectories=200, dt=0.01)
    ended = np.asarray(sim.retcode) == int(eo.ReturnCode.Terminated)
    assert 100 < ended.sum() < 200
    assert set(np.asarray(sim.end.u[ended, 0]).astype(int)) <= {8, 9, 10}


@pytest.mark.parametrize(
    ("u0", "changes"),
    [
        ([7, 2], [[-1, 0], [0, 1]]),
        ((7, 2), ([-1, 0], [0, 1])),
        ((np.array([7, 2]), np.array([1.0])), (np.array([[-1, 0], [0, 1]]), np.zeros((2, 1)))),
        ([jnp.array([7, 2]), 1], [jnp.array([[-1, 0], [0, 1]]), [0, 0]]),
        ({"b": 7, "a": 2.0}, {"b": [-1, 0], "a": [0, 1.0]}),
    ],
    ids=["lists", "tuples", "arrays", "an array and a number", "names"],
)
def test_states_as_people_write_them(u0, changes):
    """As for an ODE; and whole numbers are real ones. (A third component, of 1, stays.)"""
    rates, span = lambda u, p, t: jnp.array([3.0, 2.0]), (0.0, 4.0)
    sol = eo.solve(eo.JumpProblem(rates, changes, u0, span))
    expected = eo.solve(eo.JumpProblem(rates, np.diag([-1.0, 1.0]), [7.0, 2.0], span))
    ends = jnp.concatenate([jnp.ravel(x[-1]) for x in jax.tree.leaves(sol.u)])
    assert set(ends.tolist()) - {1.0} == set(expected.u[-1].tolist())


def test_no_reaction_is_left_and_too_many():
    prob = eo.JumpProblem(lambda u, p, t: u, [[-1.0]], [5], (0.0, 1e9))
    assert eo.solve(prob).u[-1, 0] == 0
    for rate in (-1.0, np.nan):
        wrong = eo.JumpProblem(
            lambda u, p, t: jnp.stack([3 + 0 * u[0], jnp.where(u[0] < 3, p, 1.0)]),
            [[-1.0], [0.0]], [5], (0.0, 1e9), rate,
        )  # fmt: skip
        sol = eo.solve(wrong)
        assert sol.retcode == eo.ReturnCode.Unstable
        assert not sol.successful
    burst = eo.JumpProblem(lambda u, p, t: u * u, [[1.0]], np.array([1.0], np.float32), (0.0, 1e9))
    sim = eo.solve(eo.EnsembleProblem(burst), trajectories=2)
    assert set(sim.retcode.tolist()) == {int(eo.ReturnCode.Unstable)}


def test_what_is_refused_is_named():
    prob = birth_and_death()
    refused = {
        "isn't for a JumpProblem": lambda: eo.solve(prob, eo.Tsit5()),
        "is for an eo.JumpProblem": lambda: eo.solve(prob.ode(), eo.Direct()),
        "saved at times": lambda: eo.solve(prob, save_everystep=True),
        "rates must return an array": lambda: eo.solve(eo.remake(prob, rates=lambda u, p, t: u)),
        "rates must return the dtype": lambda: eo.solve(
            eo.remake(prob, rates=lambda u, p, t: jnp.ones(2, np.float32))
        ),
        "rates depend on the time": lambda: eo.solve(
            eo.remake(prob, rates=lambda u, p, t: t * jnp.ones(2))
        ),
        "changes must be": lambda: eo.remake(prob, changes=[[1.0, 2.0]]),
        "rates must be a function": lambda: eo.remake(prob, rates=3.0),
        "must run forwards": lambda: eo.solve(eo.remake(prob, tspan=(1.0, 0.0))),
        "whole numbers": lambda: eo.JumpProblem.of_reactions(
            [[0.5]], [[1]], [1], (0.0, 1.0), [1.0]
        ),
        "both of one shape": lambda: eo.JumpProblem.of_reactions(
            [[1, 2]], [[1]], [1], (0.0, 1.0), [1.0]
        ),
        "each with one constant": lambda: eo.JumpProblem.of_reactions(
            [[1]], [[0]], [1], (0.0, 1.0), [1.0, 2.0]
        ),
        "has no derivatives": lambda: jax.grad(lambda p: eo.solve(eo.remake(prob, p=p)).u.sum())(
            prob.p
        ),
        "has no ContinuousCallback": lambda: eo.solve(
            prob, callback=eo.ContinuousCallback(lambda u, t, x: u[0] - 5, eo.terminate)
        ),
    }
    for said, solve in refused.items():
        with pytest.raises((ValueError, TypeError), match=said):
            solve()
