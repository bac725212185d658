"""A method is a protocol: two methods that are not Runge-Kutta methods, on two engines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .. import oracle
from ..marks import slow_unless
from .methods import Rational, SOLVERS


ENGINES = ("compiled", "diffrax")
by_engine = pytest.mark.parametrize("engine", [slow_unless(x == "compiled", x) for x in ENGINES])
by_solver = pytest.mark.parametrize("alg", SOLVERS.values(), ids=SOLVERS)
N, END = 5, 2.0


def driven(u, p, t):
    """Both depend on time; the first is closed."""
    x, y = u
    return jnp.stack([-p[0] * x * jnp.sin(t), x * y * jnp.cos(p[1] * t) - 0.3 * y])


def ensemble(p, u0):
    prob = eo.ODEProblem(driven, u0, (0.0, END), p)

    def chosen(prob, ctx):
        return eo.remake(prob, p=prob.p * (1 + 0.1 * ctx.index), u0=prob.u0 + 0.05 * ctx.index)

    return eo.EnsembleProblem(prob, chosen)


P, U0 = np.array([1.5, 2.0]), np.array([1.0, 0.5])


def solved(alg, engine, p: Any = P, u0: Any = U0, **options) -> Any:
    how = {"trajectories": N, "engine": engine, **options}
    return eo.solve(ensemble(jnp.asarray(p), jnp.asarray(u0)), alg, eo.EnsembleSerial(), **how)


def reference(**options):
    return solved(eo.Vern9(), "compiled", abstol=1e-13, reltol=1e-13, **options)


@pytest.mark.slow
@by_engine
@by_solver
@pytest.mark.parametrize(
    "saveat", [pytest.param(None, id="ends"), pytest.param([0.3, 0.77, END], id="dense")]
)
def test_order(alg, engine, saveat):
    exact = reference(saveat=saveat).u
    steps = [0.04, 0.02, 0.01]
    errors = [
        np.abs(solved(alg, engine, dt=h, adaptive=False, saveat=saveat).u - exact).max()
        for h in steps
    ]
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    np.testing.assert_allclose(orders, alg.order, atol=0.2)
    assert errors[-1] < 1e-3


@by_engine
@by_solver
def test_error_control(alg, engine):
    exact = reference().u
    errors, steps = [], []
    for tol in (1e-4, 1e-6):
        sim = solved(alg, engine, abstol=tol, reltol=tol)
        assert sim.converged
        errors.append(np.abs(sim.u - exact).max())
        steps.append(np.sum(sim.stats.naccept))
        assert np.all(sim.stats.nf > 0)
    assert errors[0] < 1e-2
    assert errors[1] < errors[0] / 10
    assert steps[1] > 3 * steps[0]


@pytest.mark.quick_cases(1)
@by_solver
@pytest.mark.parametrize("options", [{}, {"saveat": 0.3}, {"adaptive": False, "dt": 0.01}])
def test_the_steps_are_those_of_its_formulas(alg, options):
    ens = ensemble(jnp.asarray(P), jnp.asarray(U0))
    expected = oracle.solve_each(ens, alg, n=N, **options)
    oracle.assert_same_steps(solved(alg, "compiled", **options), expected, rtol=1e-6, atol=1e-6)


FIXED = {"adaptive": False, "dt": 0.02}


def loss(alg, engine, options):
    def of(x):
        u = solved(alg, engine, *jnp.split(x, 2), **options).u
        return jnp.sum(jnp.where(jnp.isfinite(u), u, 0.0) ** 2 * jnp.array([[[1.0, 0.7]]]))

    return of


X = jnp.concatenate([P, U0])


def differences(fn, x):
    each = [(fn(x + e) - fn(x - e)) / 2e-5 for e in 1e-5 * jnp.eye(len(x))]
    return np.stack(each)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
@pytest.mark.parametrize("alg", [*SOLVERS.values(), Rational()], ids=[*SOLVERS, "rational"])
@pytest.mark.parametrize(
    "saveat", [slow_unless(False, [END], id="end"), pytest.param([0.0, 0.31, END], id="dense")]
)
def test_gradients_of_fixed_steps(alg, engine, saveat):
    fn = loss(alg, engine, {**FIXED, "saveat": saveat})
    np.testing.assert_allclose(jax.grad(fn)(X), differences(fn, X), rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("alg", [pytest.param(SOLVERS[k], id=k) for k in SOLVERS])
def test_hessian(alg):
    gradient = jax.grad(loss(alg, "compiled", {**FIXED, "saveat": [0.31, END]}))
    np.testing.assert_allclose(jax.jacfwd(gradient)(X), differences(gradient, X), rtol=1e-6)


@pytest.mark.slow
@by_solver
def test_the_continuous_adjoint(alg):
    how = {"saveat": [0.31, END], "abstol": 1e-6, "reltol": 1e-6}
    got = jax.grad(loss(alg, "compiled", {**how, "sensealg": eo.GaussAdjoint()}))(X)
    np.testing.assert_allclose(got, jax.grad(loss(alg, "compiled", how))(X), rtol=1e-2)


@by_solver
@pytest.mark.slow
def test_between_steps(alg):
    """As `saveat` has it, also where a step can't be made again from the state alone."""
    ts = np.linspace(0.0, END, 23)
    found = solved(alg, "compiled", save_everystep=True)(ts)
    np.testing.assert_allclose(found, solved(alg, "compiled", saveat=ts).u, rtol=0, atol=1e-13)
