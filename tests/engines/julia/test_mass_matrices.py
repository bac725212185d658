"""Mass matrices, and what is known of `f`, in the Julia engine, compared with the compiled one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ...marks import on_julia
from ...test_mass_matrices import BROWN, CIRCLE, coupled, MASS, of_coupled, on_circle, robertson_dae


METHODS = (eo.Rosenbrock23(), eo.Rodas4(), eo.Rodas5P())
PLACES = (
    eo.EnsembleSerial(),
    eo.EnsembleThreads(),
    eo.EnsembleDistributed(workers=2),
    eo.EnsembleSplitThreads(workers=2, threads=1),
)
FULL = eo.ODEFunction(coupled, mass_matrix=MASS)
SPEED = jnp.array(1.3)


def both(prob, alg, *place, **options):
    """The solutions by Julia and by the compiled engine."""
    return [eo.solve(prob, alg, *place, engine=x, **options) for x in ("julia", "compiled")]


def swept():
    """Trajectories whose second start is not consistent, and whose third one is no number."""
    angles = jnp.array([0.2, 0.5, jnp.nan, 0.9])
    off = jnp.array([0.0, 1e-2, 0.0, 0.0])

    def prob_func(prob, ctx):
        at = on_circle(angles[ctx.index], prob.p)
        return eo.remake(at, u0=at.u0.at[1].add(off[ctx.index]))

    return eo.EnsembleProblem(on_circle(0.1, SPEED), prob_func)


def has_same_steps(julia, compiled):
    """The powers of Julia's controller are in single precision, so that a step may be one more."""
    for name in ("naccept", "nreject"):
        of_julia, of_compiled = (getattr(x.stats, name) for x in (julia, compiled))
        np.testing.assert_allclose(of_julia, of_compiled, atol=1, rtol=0, err_msg=name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alg", [on_julia(x) for x in METHODS], ids=str)
def test_the_steps_of_the_compiled_engine(alg):
    rates = jnp.array([0.04, 3e7, 1e4])
    dae = eo.ODEFunction(robertson_dae, mass_matrix=[1.0, 1.0, 0.0])
    probs = [eo.ODEProblem(dae, [1.0, 0.0, 0.0], (0.0, 1e3), rates), on_circle(0.9, SPEED)]
    if not isinstance(alg, eo.Rosenbrock23):
        probs.append(of_coupled(FULL))
    for prob in probs:
        options: Any = {"abstol": 1e-7, "reltol": 1e-4, "saveat": prob.tspan[1] / 7, "dt": 1e-6}
        julia, compiled = both(prob, alg, **options)
        has_same_steps(julia, compiled)
        np.testing.assert_allclose(julia.u, compiled.u, rtol=1e-4, atol=1e-7)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ensemblealg", [on_julia(x) for x in PLACES], ids=str)
def test_starts_that_are_not_consistent(ensemblealg):
    """A trajectory that fails at its start keeps the state that it starts with, if that is
    saved."""
    for options in ({}, {"saveat": [0.0, 0.5]}, {"save_start": True}):
        julia, compiled = both(swept(), eo.Rodas4(), ensemblealg, trajectories=4, **options)
        names = [eo.ReturnCode(x).name for x in np.asarray(julia.retcode)]
        assert names == ["Success", "InitialFailure", "Unstable", "Success"]
        np.testing.assert_array_equal(julia.retcode, compiled.retcode)
        np.testing.assert_array_equal(julia.lengths, compiled.lengths)
        np.testing.assert_allclose(julia.u, compiled.u, atol=1e-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alg", [on_julia(x) for x in METHODS], ids=str)
def test_starts_that_are_made_consistent(alg):
    options: Any = {"trajectories": 4, "initializealg": BROWN, "saveat": 0.25}
    julia, compiled = both(swept(), alg, **options)
    assert julia.successful.tolist() == [True, True, False, True]
    np.testing.assert_allclose(julia.u, compiled.u, atol=1e-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("turn", [on_julia(1), on_julia(-1)])
def test_functions_that_store_their_results(turn):
    """17 components; permuted equations are in the rows of others."""
    rng = np.random.default_rng(3)
    n = 17
    a, mass = rng.normal(size=(n, n)) - 5 * np.eye(n), 0.2 * rng.normal(size=(n, n)) + np.eye(n)
    f = eo.ODEFunction(lambda u, p, t: (a @ jnp.sin(u))[::turn], mass_matrix=mass[::turn])
    prob = eo.ODEProblem(f, jnp.linspace(0.1, 1.0, n), (0.0, 1.0))
    options: Any = {"abstol": 1e-9, "reltol": 1e-7, "initializealg": BROWN, "saveat": 0.25}
    julia, compiled = both(prob, eo.Rodas5P(), **options)
    assert julia.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(julia.u, compiled.u, rtol=0, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("known", [on_julia(True), on_julia(False)], ids=["times", "event"])
def test_events(known):
    """An affect may leave the algebraic equations, or go to another point where they hold."""

    def moved(integrator):
        x = integrator.u[0] / 2
        z = jnp.sqrt(1 - x**2) + jnp.where(integrator.p > 1.2, 0.1, 0.0)
        return eo.remake(integrator, u=jnp.stack([x, z]))

    callback = eo.PresetTimeCallback(jnp.array([0.25]), moved)
    if not known:
        callback = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, moved)
    ens = eo.EnsembleProblem(
        on_circle(0.9, SPEED, callback=callback),
        lambda prob, ctx: eo.remake(prob, p=1.0 + 0.3 * ctx.index),
    )
    julia, compiled = both(ens, eo.Rodas5P(), trajectories=2, abstol=1e-9, reltol=1e-9)
    codes = [eo.ReturnCode.Success, eo.ReturnCode.InitialFailure]
    assert julia.retcode.tolist() == compiled.retcode.tolist() == codes
    np.testing.assert_allclose(julia.u, compiled.u, atol=1e-8)
    np.testing.assert_allclose(julia.events.t, compiled.events.t, atol=1e-8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alg", [on_julia(x) for x in METHODS], ids=str)
def test_the_jacobian_of_the_user(alg):
    """A Jacobian that is wrong changes the steps, in the same way as in the compiled engine."""

    def steady(u, p, t):
        # (For an `f` that depends on the time, Julia's Rosenbrock23 has another error estimate.)
        return coupled(u, p, jnp.ones_like(t))

    def jac(u, p, t):
        return 0.5 * jax.jacfwd(lambda u: steady(u, p, t))(u)

    prototype = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
    of_f, _ = both(of_coupled(steady), alg)
    fs = eo.ODEFunction(steady, jac=jac), eo.ODEFunction(steady, jac_prototype=prototype)
    wrong, right = (both(of_coupled(f), alg) for f in fs)
    has_same_steps(*wrong)
    has_same_steps(*right)
    assert int(wrong[0].stats.naccept) != int(right[0].stats.naccept)
    np.testing.assert_allclose(right[0].u, of_f.u, rtol=1e-10)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("factor", [on_julia(1.0), on_julia(0.5)])
def test_the_jacobian_of_the_user_in_columns(factor):
    """It is mapped over the columns, with the constants that it closes over."""
    matrix = jnp.array([[-1.0, 2.0], [-2.0, 0.0]])

    def steps_and_ends(known):
        def jac(u, p, t):
            return factor * p * matrix * jnp.cos(u)[None]

        def f(u, p, t):
            return p * jnp.matmul(matrix, jnp.sin(u))

        def prob_func(prob, ctx):
            return eo.remake(prob, u0=prob.u0 * ctx.sim_id, p=1.0 + 0.3 * ctx.index)

        f = eo.ODEFunction(f, jac=jac) if known else f
        prob = eo.ODEProblem(f, jnp.array([1.0, 0.3]), (0.0, 1.0), 1.0)
        ens, how = eo.EnsembleProblem(prob, prob_func), {"trajectories": 3, "engine": "julia"}
        sim = eo.solve(ens, eo.Rodas5P(), eo.EnsembleColumns(), **how)
        return int(sim.stats.naccept[0]), np.asarray(sim.u[:, -1])

    (steps, ends), (expected, exact) = steps_and_ends(True), steps_and_ends(False)
    assert steps == expected if factor == 1.0 else steps > 2 * expected
    np.testing.assert_allclose(ends, exact, rtol=1e-12 if factor == 1.0 else 1e-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", [on_julia("Rodas5P()"), on_julia("FBDF()"), on_julia("Kvaerno5()")]
)
def test_methods_known_by_name(name):
    options: Any = {"abstol": 1e-9, "reltol": 1e-9}
    sol = eo.solve(on_circle(0.9, SPEED), eo.JuliaAlg(name), save_everystep=True, **options)
    times = jnp.linspace(0.0, 1.0, 9)
    exact = np.stack([np.sin(0.9 - 1.3 * times), np.cos(0.9 - 1.3 * times)], axis=1)
    np.testing.assert_allclose(sol(times), exact, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mass", [on_julia([1.0, 0.0]), on_julia([2.0, 3.0])], ids=str)
def test_no_derivatives(mass):
    def end(p):
        f = eo.ODEFunction(CIRCLE.f, mass_matrix=mass)
        return eo.solve(on_circle(0.9, p, f=f), eo.Rodas4(), engine="julia").u[-1, 0]

    for derivative in (jax.grad, jax.jacfwd):
        with pytest.raises(TypeError, match=r"mass_matrix.*engine='compiled'"):
            derivative(end)(SPEED)


def test_what_is_refused():
    with pytest.raises(ValueError, match="Rosenbrock23 takes diagonal mass matrices only"):
        eo.solve(of_coupled(FULL), eo.Rosenbrock23(), engine="julia")
    for alg in (eo.Tsit5(), eo.Kvaerno5()):
        with pytest.raises(ValueError, match="mass_matrix is given"):
            eo.solve(of_coupled(FULL), alg, engine="julia")
    for where in (eo.EnsembleGPUKernel(backend="CPU"), eo.EnsembleGPUArray(backend="CPU")):
        with pytest.raises(ValueError, match="without a mass_matrix"):
            eo.solve(swept(), eo.Rodas4(), where, trajectories=4, engine="julia")
