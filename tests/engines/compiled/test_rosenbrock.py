"""Solves by Rosenbrock methods. (Their steps are compared with the theory in
tests/solvers/test_rosenbrock.py, and run on all ensemble algorithms in test_conformance.py.)"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import ensembleode as eo

from ...marks import on_julia, slow_unless
from ...solvers.test_rosenbrock import METHODS
from ..test_julia_steps import recorded, robertson


methods = functools.partial(pytest.mark.parametrize, "alg", METHODS, ids=lambda x: type(x).__name__)
RODAS5P = METHODS[-1]
few = functools.partial(
    pytest.mark.parametrize,
    "alg",
    [slow_unless(x is not METHODS[1], x) for x in METHODS],
    ids=lambda x: type(x).__name__,
)


def oregonator(u, p, t):
    s, q, w = p
    return jnp.array(
        [
            s * (u[1] + u[0] * (1 - q * u[0] - u[1])),
            (u[2] - (1 + u[0]) * u[1]) / s,
            w * (u[0] - u[2]),
        ]
    )


FIELDS = {
    "ROBER": (robertson, [0.04, 3e7, 1e4]),
    "OREGO": (oregonator, [77.27, 8.375e-6, 0.161]),
}


def robertsons(tspan=(0.0, 1e5), dtype=float, **parts):
    f, p = FIELDS["ROBER"]
    return eo.ODEProblem(f, jnp.array([1.0, 0, 0], dtype), tspan, jnp.array(p, dtype), **parts)


def following(u, p, t):
    """Of the time, stiff and not linear: u follows cos(t) at the rate p."""
    return -p * (u**3 - jnp.cos(t) ** 3) - jnp.sin(t)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["compiled", on_julia("julia")])
@pytest.mark.parametrize("problem", FIELDS)
@methods()
def test_steps_are_those_of_ordinary_diff_eq(alg, problem, engine):
    """At both tolerances, which are one program."""
    f, p = FIELDS[problem]
    found = recorded("stiff")["problems"][problem]
    prob = eo.ODEProblem(f, jnp.array(found["u0"]), tuple(found["tspan"]), jnp.array(p))
    records = [x for x in found["records"] if x["alg"] == type(alg).__name__]
    assert len(records) == 2
    for x in records:
        tolerances = {"abstol": x["abstol"], "reltol": x["reltol"]}
        how = {"save_everystep": True, "maxiters": 10**4, "engine": engine}
        sol = eo.solve(prob, alg, **how, **tolerances)
        assert sol.retcode == eo.ReturnCode.Success
        counts = (sol.stats.naccept, sol.stats.nreject, sol.stats.nf)
        assert tuple(map(int, counts)) == (x["naccept"], x["nreject"], x["nf"])
        # (A step is a Jacobian, a factorisation and a solution a stage, accepted or not. Julia has
        # its own way of counting Jacobians and solutions.)
        ntried = x["naccept"] + x["nreject"]
        of_matrices = (sol.stats.njac, sol.stats.nw, sol.stats.nsolve)
        expected = (ntried, ntried, ntried * alg.method.stages)
        counted = slice(1, 2) if engine == "julia" else slice(None)
        assert tuple(map(int, of_matrices))[counted] == expected[counted]
        np.testing.assert_allclose(np.asarray(sol.t)[x["step"]], x["t"], rtol=2e-5)
        # (Times of relaxation in the Oregonator move by what steps do.)
        np.testing.assert_allclose(sol.u[-1], x["u_end"], rtol=3e-7)


@pytest.mark.quick_cases(1)
@few()
def test_where_the_time_is_in_f(alg):
    prob = eo.ODEProblem(following, jnp.array([1.0]), (0.0, 2.0), 1e4)
    times, errors = np.array([0.3, 1.1, 2.0]), []
    for dt in (0.04, 0.02):
        sol = eo.solve(prob, alg, dt=dt, adaptive=False, saveat=times)
        errors.append(np.abs(sol.u[:, 0] - np.cos(times)).max())
    order = {2: 2, 4: 1, 5: 3}[alg.order]  # (which is reduced: see test_order_reduction...)
    assert errors[1] < 1.3 * errors[0] / 2**order
    sol = eo.solve(prob, alg, abstol=1e-8, reltol=1e-8, saveat=times)
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.u[:, 0], np.cos(times), atol=1e-7)


@pytest.mark.slow
@few()
def test_a_step_that_is_hardly_shorter_is_as_long(alg):
    """After one that was accepted; with `qsteady_max=1` it never is."""
    f, p = FIELDS["OREGO"]
    prob, steps = eo.ODEProblem(f, jnp.array([1.0, 2.0, 3.0]), (0.0, 360.0), jnp.array(p)), {}
    for qsteady_max in (None, 1.2, 1.0):
        controller = eo.PIController(qsteady_max=qsteady_max)
        sol = eo.solve(prob, alg, save_everystep=True, stepsize_controller=controller)
        steps[qsteady_max] = np.diff(sol.t)
    np.testing.assert_array_equal(steps[None], steps[1.2])
    held = {x: np.sum(np.abs(np.diff(h[:-1]) / h[:-2]) < 1e-9) for x, h in steps.items()}
    assert held[1.2] >= 3
    assert held[1.0] == 0


@pytest.mark.quick_cases(1)
@few()
def test_dense_output_is_what_is_saved(alg):
    prob, times = robertsons(), np.array([1e-3, 1.3, 1e2, 7e4])
    saved = eo.solve(prob, alg, saveat=times)
    dense = eo.solve(prob, alg, save_everystep=True)(times)
    np.testing.assert_allclose(dense, saved.u, rtol=1e-12)
    exact = eo.solve(prob, RODAS5P, saveat=times, abstol=1e-13, reltol=1e-11)
    np.testing.assert_allclose(saved.u, exact.u, rtol=2e-2)


@pytest.mark.quick_cases(1)
@few()
def test_events(alg):
    """When half is left is found to the tolerance, and an affect starts anew from there."""

    def affect(integrator):
        return eo.remake(integrator, u=integrator.u.at[0].mul(0.5))

    seen = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, affect)
    tolerances = {"abstol": 1e-10, "reltol": 1e-8}
    sol = eo.solve(robertsons((0.0, 1e3)), alg, callback=seen, **tolerances)
    assert sol.retcode == eo.ReturnCode.Success
    assert int(sol.events.count) == 1
    np.testing.assert_allclose(sol.events.t[0], 268.324725, rtol=3e-6)
    np.testing.assert_allclose(np.sum(sol.u[-1]), 0.75, rtol=1e-12)


@pytest.mark.quick_cases(1)
@few()
def test_integrals(alg):
    """Of what flows from the second to the third component, which is that."""
    prob = robertsons((0.0, 1e3), integrand=lambda u, p, t: {"flow": p[1] * u[1] ** 2, "t": t})
    sol = eo.solve(prob, alg, abstol=1e-9, reltol=1e-6)
    without = eo.solve(robertsons((0.0, 1e3)), alg, abstol=1e-9, reltol=1e-6)
    np.testing.assert_allclose(sol.u, without.u, rtol=1e-9)
    assert int(sol.stats.naccept) == int(without.stats.naccept)
    np.testing.assert_allclose(sol.integral["flow"][-1], sol.u[-1][2], rtol=1e-12)
    np.testing.assert_allclose(sol.integral["t"][-1], 5e5, rtol=1e-12)


@pytest.mark.quick_cases(1)
@few()
def test_single_precision(alg):
    single = eo.solve(robertsons(dtype=np.float32), alg, abstol=1e-6, reltol=1e-4)
    exact = eo.solve(robertsons(), RODAS5P, abstol=1e-12, reltol=1e-10)
    assert single.u.dtype == np.float32
    assert single.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(single.u[-1], exact.u[-1], rtol=1e-3)


def test_a_singular_matrix_is_no_step():
    """Of u' = 8 u, Rodas4 with a step of 1/2 divides by 1 - 1/4 1/2 8: that step is rejected; where
    it is fixed, the trajectory ends."""
    prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.ones(2), (0.0, 1.0), jnp.array([8.0, 1.0]))
    sol = eo.solve(prob, eo.Rodas4(), dt=0.5, abstol=1e-9, reltol=1e-9)
    assert sol.retcode == eo.ReturnCode.Success
    assert int(sol.stats.nreject) >= 1
    np.testing.assert_allclose(sol.u[-1], np.exp([8.0, 1.0]), rtol=1e-7)
    fixed = eo.solve(prob, eo.Rodas4(), dt=0.5, adaptive=False)
    assert fixed.retcode == eo.ReturnCode.Unstable
    assert np.isnan(fixed.u[-1]).all()


def one_of_several(gamma):
    """What can be wrong with a trajectory, by its number: nothing, NaN, an infinite solution, a
    Jacobian that is NaN (where u has arrived at zero), and a first step of 1/2 by which 1 - gamma h
    J is singular."""

    def f(u, p, t):
        nan = jnp.where(t > 0.5, jnp.nan, -1.0) * u
        no_slope = -jnp.sqrt(jnp.abs(u - 1)) * jnp.sqrt(u - 1) - 0 * u
        stiff = jnp.stack([-1e3 * (u[0] - jnp.cos(t) * u[1]), -u[1]])
        return lax.select_n(p, stiff, nan, 10 * u**2, no_slope, 2 / gamma * u)

    return f


GAMMAS = {"Rosenbrock23": 1 / (2 + 2**0.5), "Rodas4": 0.25, "Rodas5P": 0.21193756319429014}


@pytest.mark.quick_cases(1)
@few()
def test_whichever_lane_fails_the_others_keep_their_bits(alg):
    n, gamma = 19, GAMMAS[type(alg).__name__]
    prob = eo.ODEProblem(one_of_several(gamma), jnp.ones(2), (0.0, 1.0), jnp.array(0))

    @jax.jit
    def solve(kinds):
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=kinds[ctx.index]))
        sim = eo.solve(ens, alg, eo.EnsembleThreads(1), trajectories=n, dt=0.5)
        return sim.u, sim.retcode, sim.stats.nreject

    sound = np.asarray(solve(jnp.zeros(n, int))[0])
    lanes = st.lists(st.sampled_from([0, 0, 1, 2, 3, 4]), min_size=n, max_size=n)

    @settings(max_examples=30, deadline=None, database=None, derandomize=True)
    @given(lanes)
    def check(kinds):
        kinds = np.array(kinds)
        u, retcodes, rejected = map(np.asarray, solve(jnp.asarray(kinds)))
        failed = np.isin(kinds, [1, 2, 3])
        assert (retcodes[~failed] == eo.ReturnCode.Success).all()
        assert np.isin(
            retcodes[failed], [eo.ReturnCode.Unstable, eo.ReturnCode.DtLessThanMin]
        ).all()
        assert (rejected[kinds == 4] > 0).all()
        np.testing.assert_array_equal(u[kinds == 0], sound[kinds == 0])
        np.testing.assert_allclose(u[kinds == 4, -1], np.exp(2 / gamma), rtol=0.1)

    check()


def with_own_rule(kind):
    """tanh, with derivatives by a rule: forwards, or backwards alone."""
    f = kind(jnp.tanh)
    if kind is jax.custom_jvp:
        f.defjvp(lambda x, dx: (f(*x), dx[0] * (1 - jnp.tanh(x[0]) ** 2)))
    else:
        f.defvjp(lambda x: (f(x), x), lambda x, c: (c * (1 - jnp.tanh(x) ** 2),))
    return f


@pytest.mark.parametrize("kind", [slow_unless(False, jax.custom_jvp), jax.custom_vjp])
def test_fields_with_derivative_rules_of_their_own(kind):
    """As without the rule, gradients, too."""

    def end(p, function):
        prob = eo.ODEProblem(
            lambda u, p, t: p * (function(u[::-1] * function(t)) - u), jnp.ones(2), (0.0, 1.0), p
        )
        return jnp.sum(eo.solve(prob, RODAS5P, abstol=1e-8, reltol=1e-8).u[-1] ** 2)

    both = [
        jax.value_and_grad(end)(jnp.array([1e3, 2.0]), x) for x in (jnp.tanh, with_own_rule(kind))
    ]
    np.testing.assert_allclose(both[1][0], both[0][0], rtol=1e-10)
    np.testing.assert_allclose(both[1][1], both[0][1], rtol=1e-8)


def test_diffrax_says_that_rules_backwards_alone_are_not_enough():
    f = with_own_rule(jax.custom_vjp)
    prob = eo.ODEProblem(lambda u, p, t: -f(u), jnp.ones(2), (0.0, 1.0))
    with pytest.raises(TypeError, match=r"alg=Kvaerno5\(\).*custom_vjp.*custom_jvp.*eo\.Rodas5P"):
        eo.solve(prob, eo.Kvaerno5())


def test_diffrax_says_what_to_take():
    with pytest.raises(ValueError, match=r"engine='diffrax' can't run Rodas5P.*eo\.Kvaerno5\(\)"):
        eo.solve(robertsons(), RODAS5P, engine="diffrax")


@pytest.mark.slow
def test_what_cannot_be_compiled_has_other_methods():
    def f(u, p, t):
        return -jnp.linalg.eigvalsh(jnp.outer(u, u))

    prob = eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0))
    sol = eo.solve(prob, RODAS5P)
    assert (sol.engine.name, sol.engine.solver) == ("diffrax", "Kvaerno5")
    assert "eigh" in sol.engine.reason
    jump = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, eo.terminate)
    with pytest.raises(ValueError, match=r"no engine can run Rodas5P.*eigh.*eo\.Kvaerno5\(\)"):
        eo.solve(prob, RODAS5P, callback=jump)
