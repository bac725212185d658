"""Steps are those of OrdinaryDiffEq, one for one, as recorded from Julia.

The numbers of steps are equal. The times agree to the single precision of the controller's powers,
with one exception: where the first error estimate is nothing but rounding, the step after it, and
all that follow, depend on the order of a sum (here as between two builds of Julia). The states then
agree to about the tolerance of the solve.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..julia_powers import JuliasController
from ..problems import lorenz, lotka_volterra


DATA = pathlib.Path(__file__).parents[1] / "data"


def recorded(name):
    return json.loads((DATA / f"julia_{name}.json").read_text())


STEPS = recorded("steps")
CASES = {case["name"]: case for case in STEPS["cases"]}
MLP = {name: jnp.array(value) for name, value in STEPS["mlp"].items()}


def network(u, p, t):
    b1, b2 = (MLP[b].reshape(-1, *(1,) * (u.ndim - 1)) for b in ("b1", "b2"))
    return MLP["W2"] @ jnp.tanh(MLP["W1"] @ u + b1) + b2


def robertson(u, p, t):
    slow, back, fast = p[0] * u[0], p[2] * u[1] * u[2], p[1] * u[1] ** 2
    return jnp.array([back - slow, slow - fast - back, fast])


FIELDS = {
    "linear": lambda u, p, t: 1.01 * u * p[0],
    "lorenz": lorenz,
    "lotka_volterra": lotka_volterra,
    "pendulum": lambda u, p, t: jnp.array([u[1], -p[0] * jnp.sin(u[0])]),
    "blowup": lambda u, p, t: u**2,
    "robertson": robertson,
    "mlp": network,
}
# Where the first error estimate is rounding: how far times are off, of the time gone by.
NOISE = {
    "Tsit5_lorenz_0.001": 0.5,
    "Tsit5_pendulum_0.001": 0.2,
    "Tsit5_linear_f32": 0.3,
    "Vern7_linear_1.0e-9": 5e-3,
    "Vern7_lorenz_0.001": 0.5,
    "Vern7_pendulum_0.001": 0.5,
    "Vern7_mlp_1.0e-9": 1e-3,
    "Vern9_linear_1.0e-9": 0.2,
    "Vern9_lorenz_0.001": 0.5,
    "Vern9_lotka_volterra_1.0e-9": 3e-3,
    "Vern9_pendulum_0.001": 0.4,
    "Vern9_pendulum_1.0e-9": 1e-3,
    "Vern9_mlp_1.0e-9": 3e-3,
}
# What it does to the end, of its size: only loose tolerances let it show. (All of Lorenz' attractor
# lies between two ends 1e-3 apart at the start.)
NOISY_END = {
    "Tsit5_lorenz_0.001": 2e-2,
    "Tsit5_pendulum_0.001": 2e-2,
    "Vern7_lorenz_0.001": 1e-3,
    "Vern7_pendulum_0.001": 1e-3,
    "Vern9_lorenz_0.001": 1e-4,
    "Vern9_pendulum_0.001": 1e-3,
    "Tsit5_linear_f32": 1e-6,
    # Of 5.6e15: a rounding of time from infinity.
    "Tsit5_blowup": 1,
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def solve(field, alg, how, u0, tspan, p, numbers):
    prob = eo.ODEProblem(FIELDS[field], u0, (tspan[0], tspan[1]), p)
    return eo.solve(prob, getattr(eo, alg)(), engine="compiled", **dict(how), **numbers)


def solved(case):
    """By one program for cases that differ in numbers alone."""
    dtype = np.dtype(case["dtype"].lower())
    options = {"abstol": 1e-6, "reltol": 1e-3, **case["options"]}
    if "saveat" in options:
        how = {}
    else:
        # Room for the steps; too little would show.
        how = {"save_everystep": True, "maxiters": options.pop("maxiters", 1500)}
    if "adaptive" in options:
        how["adaptive"] = options.pop("adaptive")
        del options["abstol"], options["reltol"]
    numbers = {name: np.asarray(value, dtype) for name, value in options.items()}
    sol = solve(
        case["field"],
        case["alg"],
        tuple(how.items()),
        np.asarray(case["u0"], dtype),
        np.asarray(case["tspan"], dtype),
        np.asarray(case["p"], dtype),
        numbers,
    )
    return jax.tree.map(np.asarray, sol)


def check_counts(sol, case):
    counts = (sol.stats.naccept, sol.stats.nreject, sol.stats.nf)
    assert eo.ReturnCode(int(sol.retcode)).name == case["retcode"]
    expected = (case["naccept"], case["nreject"], case["nf"])
    if case["name"] == "Tsit5_blowup":
        # Its last steps are a few roundings of time long, which count as steps here: one or two.
        assert np.abs(np.subtract(counts[:2], expected[:2])).max() <= 1
        assert np.abs(counts[2] - expected[2]) <= 12
        return
    assert counts == expected
    assert sol.u.dtype == case["dtype"].lower()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_steps(name):
    case = CASES[name]
    sol = solved(case)
    check_counts(sol, case)
    tight = case["options"].get("reltol") == 1e-9
    rtol = NOISY_END.get(name, 1e-11 if tight else 5e-8)
    if "u" in case:
        np.testing.assert_array_equal(sol.t, case["t"])
        np.testing.assert_allclose(sol.u, case["u"], rtol=0, atol=2e-9)
    elif "t" in case:
        assert np.isnan(sol.t[int(sol.length) : -1]).all()
        t = np.array(case["t"])[: int(sol.length)]
        off = np.abs(sol.t[: len(t)] - t)
        assert np.all(off <= NOISE.get(name, 5e-5) * np.abs(t - t[0]))
    end, expected = sol.u[int(sol.length) - 1], np.array(case["u_end"])
    np.testing.assert_allclose(end, expected, rtol=0, atol=rtol * np.abs(expected).max())


def test_most_times_agree_to_single_precision():
    """What is said of noise is said of few cases, and of no case more than it needs."""
    with_times = [name for name, case in CASES.items() if "t" in case and "u" not in case]
    assert len(with_times) - len(NOISE) == 24
    assert set(NOISE) | set(NOISY_END) <= set(with_times)


# With errors that are far larger than the roundings of the sum that they are. (At 1e-9 these are a
# part in 1e5 of a step's error, in Julia as here.)
LARGE_ERRORS = [
    f"Tsit5_{x}" for x in ("lotka_volterra_0.001", "linear_0.001", "linear_matrix", "mlp_0.001")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_ERRORS)
def test_steps_to_the_bit(name):
    """With Julia's powers times agree to roundings: nothing else is approximate."""
    case = CASES[name]
    p, options = np.array(case["p"]), {"abstol": 1e-6, "reltol": 1e-3, **case["options"]}
    prob = eo.ODEProblem(FIELDS[case["field"]], np.array(case["u0"]), tuple(case["tspan"]), p)
    sol = eo.solve(
        prob,
        eo.Tsit5(),
        engine="compiled",
        save_everystep=True,
        stepsize_controller=JuliasController(),
        **options,
    )
    length = int(sol.length)
    np.testing.assert_allclose(sol.t[:length], case["t"], rtol=1e-14, atol=0)


def kepler(u, p, t):
    cubed = (u[0] ** 2 + u[1] ** 2) ** 1.5
    return jnp.array([u[2], u[3], -p * u[0] / cubed, -p * u[1] / cubed])


def ends_of_steps(f, tableau, u, t1, dt, tol):
    """By OrdinaryDiffEq's formulas for a method with two error estimates, in plain NumPy: when the
    accepted steps end, how many are rejected, and which estimate was the larger in each attempt."""
    times, rejected, larger, t, old = [0.0], 0, [], 0.0, 1e-4
    while t < t1:
        dt = min(dt, t1 - t)
        ks = [f(u, None, t)]
        for c, row in zip(tableau.c[1:], tableau.a, strict=True):
            ks.append(f(u + dt * np.dot(row, ks), None, t + c * dt))
        new = u + dt * np.dot(tableau.b, ks)
        scale = tol + tol * np.maximum(np.abs(u), np.abs(new))
        both = [
            np.sqrt(np.mean((dt * np.dot(weights, ks) / scale) ** 2))
            for weights in (tableau.error, tableau.second_error)
        ]
        larger.append(int(np.argmax(both)))
        error = max(both)
        q11 = error ** (7 / 50)
        if error <= 1:
            t, u = t + dt, new
            times.append(t)
            q = min(5.0, max(0.1, q11 / old ** (2 / 25) / 0.9))
            old = max(error, 1e-4)
        else:
            rejected += 1
            q = min(5.0, q11 / 0.9)
        dt /= q
    return np.array(times), rejected, larger


@pytest.mark.slow
def test_the_larger_of_two_error_estimates():
    """On an eccentric orbit, where each of them is the larger one at times."""
    prob = eo.ODEProblem(kepler, jnp.array([0.1, 0.0, 0.0, 19**0.5]), (0.0, 7.0), 1.0)
    sol = eo.solve(
        prob, eo.BS5(), engine="compiled", abstol=1e-4, reltol=1e-4, dt=1e-3, save_everystep=True
    )

    def f(u, p, t):
        return np.array([u[2], u[3], *(-u[:2] / np.hypot(*u[:2]) ** 3)])

    t, rejected, larger = ends_of_steps(f, eo.BS5.tableau, np.array(prob.u0), 7.0, 1e-3, 1e-4)
    assert 0.1 < np.mean(larger) < 0.9
    assert int(sol.stats.nreject) == rejected > 0
    np.testing.assert_allclose(sol.t[: len(t)], t, rtol=1e-4)
    assert np.isnan(sol.t[len(t) : -1]).all()


def test_tutorial_ensemble():
    """All 100 x 11 values at [3, 1], and at default tolerances."""
    prob = eo.ODEProblem(FIELDS["linear"], jnp.array([3.0]), (0.0, 1.0), jnp.array([1.0]))
    ens = eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=0.5 + ctx.sim_id / 100 * prob.u0)
    )
    sim = eo.solve(ens, eo.Tsit5(), trajectories=100, saveat=0.1, engine="compiled")
    np.testing.assert_allclose(sim.u[:, :, 0], recorded("tutorial")["sim_theta0"], rtol=1e-7)


def test_lorenz64():
    """The steps of 64 trajectories, and their ends."""
    expected = recorded("lorenz64")
    prob = eo.ODEProblem(
        lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 10.0), jnp.array([10.0, 0.0, 8 / 3])
    )
    ens = eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=prob.p.at[1].set(21 * ctx.index / 63))
    )
    options = {"saveat": 0.5, "abstol": 1e-9, "reltol": 1e-9, "engine": "compiled"}
    sim = eo.solve(ens, eo.Tsit5(), trajectories=64, **options)
    np.testing.assert_array_equal(sim.stats.naccept, expected["naccept"])
    np.testing.assert_array_equal(sim.stats.nf, expected["nf"])
    np.testing.assert_allclose(sim.u[:, -1], expected["u_end"], rtol=1e-9, atol=1e-9)
