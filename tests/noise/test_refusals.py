"""What is refused, and how errors name it."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .problems import brownian, constant, decay, growing, matrix


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
    r"SOSRI\(\) is for an eo.SDEProblem": lambda: eo.solve(
        eo.ODEProblem(decay, [1.0], (0.0, 1.0), {"a": 1.0}), eo.JuliaAlg("SOSRI()"), engine="julia"
    ),
    "JuliaAlg is for ODEs": lambda: eo.solve(brownian(), eo.JuliaAlg("Tsit5()"), dt=0.1),
    r"JuliaAlg\(SRA2\) is for additive": lambda: eo.solve(
        brownian(), eo.JuliaAlg("SRA2()"), dt=0.1
    ),
    r"JuliaAlg\(SRIW2\) is for diagonal or scalar": lambda: eo.solve(
        brownian(matrix, decay, noise_rate_prototype=np.zeros((2, 3))),
        eo.JuliaAlg("SRIW2()"),
        dt=0.1,
    ),
    r"JuliaAlg\(SOSRI2\) is for independent": lambda: eo.solve(
        brownian(noise=eo.WienerProcess(factor=np.eye(2))), eo.JuliaAlg("SOSRI2()"), dt=0.1
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
