"""Rosenbrock methods on the "Test Set for IVP Solvers": the published solutions at the end, and
ensembles of copies whose constants differ by about 10%. An explicit one on standard problems."""

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ...problems import of_benchmarks
from ..standard_problems import ensemble, PROBLEMS as STANDARD


PROBLEMS = of_benchmarks("common.ivp_test_set").PROBLEMS
constants_of = of_benchmarks("common.ivp_test_set").constants_of

# The digits of a component that is smaller than this aren't checked. (E5 ends at 9e-23.)
LEAST = {"ROBER": 1e-10, "E5": 1e-21}

# The allowed errors at the end, in tolerances: 1 or 2, and more for methods of order two, after
# very steep times, and for a circuit that oscillates some hundred times.
ERRORS = {"RING": 40, "Rosenbrock23": 20, "Rosenbrock23 OREGO": 300, "Rosenbrock23 RING": 4000}


def ends(name, alg, tol, copies):
    problem = PROBLEMS[name]
    constants = jnp.asarray(constants_of(problem, copies))
    prob = eo.ODEProblem(
        problem.f, jnp.asarray(problem.u0, float), (0.0, problem.end), constants[0]
    )
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=constants[ctx.index]))
    options = {"abstol": tol * LEAST.get(name, 1e-4), "reltol": tol, "maxiters": 10**6}
    sim = eo.solve(ens, alg, trajectories=copies + 1, save_start=False, **options)
    assert sim.successful.all()
    return np.asarray(sim.u)[:, -1]


def in_tolerances(found, expected, name, tol):
    """The largest error of a component, for each trajectory."""
    unit = tol * (np.abs(expected) + LEAST.get(name, 1e-4))
    return np.max(np.abs(found - expected) / unit, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "alg"),
    [
        pytest.param(name, alg, id=f"{name}-{alg}")
        for name in PROBLEMS
        for alg in (eo.Rodas5P(), eo.Rodas4(), eo.Rosenbrock23())
    ],
)
def test_published_ends_and_copies(name, alg):
    method = type(alg).__name__
    most = ERRORS.get(f"{method} {name}", ERRORS.get(method, ERRORS.get(name, 2)))
    loose = ends(name, alg, 1e-5, 64)
    assert in_tolerances(loose[0], PROBLEMS[name].published, name, 1e-5) < most
    if method == "Rosenbrock23":
        return
    tight = ends(name, alg, 1e-7, 64)
    assert in_tolerances(tight[0], PROBLEMS[name].published, name, 1e-7) < most
    assert np.median(in_tolerances(loose, tight, name, 1e-5)) < 4 * most


@pytest.mark.slow
@pytest.mark.parametrize("name", STANDARD)
def test_the_standard_problems_by_an_explicit_method(name):
    """Compared with diffrax at tight tolerances."""
    problem = STANDARD[name]
    ens = ensemble(problem)
    times = np.linspace(0, problem.end, 6)[1:]
    options = {"trajectories": 3, "saveat": times}
    ours = eo.solve(ens, eo.Tsit5(), engine="compiled", abstol=1e-13, reltol=1e-13, **options)
    theirs = eo.solve(ens, eo.Dopri8(), engine="diffrax", abstol=1e-14, reltol=1e-14, **options)
    assert (ours.engine.name, theirs.engine.name) == ("compiled", "diffrax")
    assert (ours.retcode == eo.ReturnCode.Success).all()
    size = np.abs(theirs.u).max()
    np.testing.assert_allclose(ours.u, theirs.u, rtol=0, atol=problem.close * size)
    if problem.vary:
        assert np.abs(ours.u[0] - ours.u[2]).max() > 1e-3 * size
