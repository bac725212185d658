"""Derivatives through Rosenbrock steps of the compiled engine, compared with each other and with
finite differences at tight tolerances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ...problems import forced, ROBERTSON, robertson
from .test_gauss_adjoint import of_test_set, square


SCALE = jnp.array([1.0, 1e3, 0.5])


def by_differences(fn, x, h):
    """By central differences of two sizes, extrapolated."""
    x = np.asarray(x, float)

    def at(h):
        steps = h * np.eye(x.size).reshape(-1, *x.shape)
        return np.stack([(fn(x + e) - fn(x - e)) / (2 * h) for e in steps])

    return (4 * at(h / 2) - at(h)) / 3


def end(factors, alg, tol, tspan=(0.0, 50.0), **options):
    prob = eo.ODEProblem(robertson, jnp.array([1.0, 0.0, 0.0]), tspan, ROBERTSON * factors)
    options = {"reltol": tol, "abstol": tol * 1e-4, "maxiters": 10**5, **options}
    return eo.solve(prob, alg, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alg", "tol", "accuracy"),
    [
        (eo.Rodas5P(), 1e-10, 1e-6),
        (eo.Rodas4(), 1e-10, 1e-6),
        (eo.Rosenbrock23(), 1e-7, 2e-5),
    ],
    ids=lambda x: type(x).__name__,
)
def test_of_robertson_by_its_rates(alg, tol, accuracy):
    def loss(factors):
        return SCALE @ end(factors, alg, tol).u[-1]

    factors = jnp.ones(3)
    backwards = jax.grad(loss)(factors)
    forwards = [jax.jvp(loss, (factors,), (e,))[1] for e in jnp.eye(3)]
    np.testing.assert_allclose(forwards, backwards, rtol=1e-12)
    expected = by_differences(jax.jit(loss), factors, 1e-2)
    np.testing.assert_allclose(backwards, expected, rtol=accuracy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tol", "h"),
    [
        ("HIRES", 1e-10, 1e-5),  # (It ends in the middle of a fall.)
        ("OREGO", 1e-10, 1e-3),
        ("POLLU", 1e-10, 1e-2),
        ("ROBER", 1e-10, 4e-3),
        # (Each relaxation multiplies what steps were wrong by: at 1e-10 it is 3e-6.)
        ("VDP", 1e-12, 1e-3),
    ],
)
def test_of_the_test_set_by_its_constants(name, tol, h):
    of, logarithms = of_test_set(name)
    loss = functools.partial(of, tol=tol)
    found = jax.jit(jax.grad(loss))(logarithms)
    expected = by_differences(jax.jit(loss), logarithms, h)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.max(np.abs(expected)), rtol=0)


@pytest.mark.slow
def test_hessian():
    def loss(factors):
        return SCALE @ end(factors, eo.Rodas5P(), 1e-9, (0.0, 10.0)).u[-1]

    factors = jnp.ones(3)
    hessian = jax.hessian(loss)(factors)
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-12)
    np.testing.assert_allclose(jax.jacrev(jax.jacfwd(loss))(factors), hessian, rtol=1e-11)
    expected = by_differences(jax.jit(jax.grad(loss)), factors, 1e-2)
    np.testing.assert_allclose(hessian, expected, rtol=1e-6, atol=1e-9)


OF_FORCED = jnp.array([1.0, 0.5]), jnp.array([50.0, 3.0, 1.0]), jnp.array(0.1), jnp.array(2.0)


def of_forced(u0, p, t0, t1, alg=None, **options):
    prob = eo.ODEProblem(forced, u0, (t0, t1), p)
    found = eo.solve(prob, alg or eo.Rodas5P(), reltol=1e-10, abstol=1e-12, **options)
    weights = jnp.cos(jnp.arange(found.u.size)).reshape(found.u.shape)
    return jnp.sum(weights * found.u)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("which", range(4), ids=["u0", "p", "t0", "t1"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"saveat": np.linspace(0.3, 1.7, 5)}, marks=pytest.mark.slow),
        pytest.param({"adaptive": False, "dt": 0.01}, marks=pytest.mark.slow),
        pytest.param(
            {"alg": eo.Rosenbrock23(), "adaptive": False, "dt": 2e-3}, marks=pytest.mark.slow
        ),
    ],
    ids=["ends", "saveat", "fixed", "Rosenbrock23"],
)
def test_by_all_that_a_problem_is_made_of(which, options):
    def of(x):
        args = list(OF_FORCED)
        args[which] = x
        return of_forced(*args, **options)

    x = OF_FORCED[which]
    if which > 1 and not options.get("adaptive", True):
        pytest.skip("steps move with the times then, and the solution's error with them")
    got = jax.jit(jax.grad(of))(x)
    np.testing.assert_allclose(got, by_differences(jax.jit(of), x, 1e-3), rtol=2e-6, atol=2e-8)


@pytest.mark.parametrize(
    "alg",
    [
        eo.Rodas5P(),
        pytest.param(eo.Rodas4(), marks=pytest.mark.slow),
        pytest.param(eo.Rosenbrock23(), marks=pytest.mark.slow),
    ],
    ids=lambda x: type(x).__name__,
)
def test_in_steps_much_longer_than_the_adjoint_lasts(alg):
    """For `u' = -k (u - p)`, the derivative of the end is `1 - exp(-k t)` by `p`, and `exp(-k t)`
    by the start. (Along the dense output of this step, a quadrature of the adjoint would give 1.7
    by `p` with Rodas5P, and -5e4 with Rosenbrock23.)"""

    def end(u0, p):
        prob = eo.ODEProblem(lambda u, p, t: -1e6 * (u - p), u0[None], (0.0, 0.1), p)
        return eo.solve(prob, alg, dt=0.1, adaptive=False).u[-1, 0]

    by_start, by_p = jax.grad(end, argnums=(0, 1))(1.0, 2.0)
    np.testing.assert_allclose(by_start, 0.0, atol=2e-4)
    np.testing.assert_allclose(by_start + by_p, 1.0, rtol=1e-9)


def test_continuous_adjoints_are_refused_with_the_remedy():
    prob = eo.ODEProblem(robertson, jnp.array([1.0, 0.0, 0.0]), (0.0, 1.0), jnp.asarray(ROBERTSON))
    for alg in (eo.Rosenbrock23(), eo.Rodas5P(), eo.AutoTsit5(eo.Rosenbrock23())):
        for engine in ("auto", "compiled"):
            with pytest.raises(ValueError, match=r"leave sensealg out, or .*ReplayAdjoint\(\)"):
                eo.solve(prob, alg, sensealg=eo.BacksolveAdjoint(), engine=engine)


@pytest.mark.slow
def test_of_integrals_and_events():
    def fn(u, p, t):
        return jnp.stack([-p[0] * u[0] * u[1], p[0] * u[0] * u[1] - u[1]])

    hit = eo.ContinuousCallback(
        lambda u, t, i: u[1] - i.p[1], lambda i: eo.remake(i, u=i.u.at[1].mul(0.5))
    )

    def loss(p):
        prob = eo.ODEProblem(
            fn, jnp.array([2.0, 0.1]), (0.0, 3.0), p, integrand=lambda u, p, t: u[0] ** 2 * p[0]
        )
        found = eo.solve(prob, eo.Rodas5P(), reltol=1e-10, abstol=1e-12, callback=hit)
        return found.u[-1] @ jnp.array([1.0, 2.0]) + found.integral[-1]

    p = jnp.array([1.5, 0.4])
    got = jax.grad(loss)(p)
    np.testing.assert_allclose(got, by_differences(jax.jit(loss), p, 1e-3), rtol=2e-6)
    forwards = [jax.jvp(loss, (p,), (e,))[1] for e in jnp.eye(2)]
    np.testing.assert_allclose(forwards, got, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("known", [{}, {"jac_prototype": np.eye(2)}, {"jac": "own"}], ids=str)
def test_of_functions_with_reverse_mode_only(known):
    """`u' = -p u^2`, so `u = 1 / (1 / u(0) + p t)`, and the integral of `u^2` its fall over `p`."""
    if "jac" in known:
        known = {"jac": lambda u, p, t: jnp.diag(-2 * p * u)}
    f = eo.ODEFunction(lambda u, p, t: -p * square(u), **known)
    u0 = jnp.array([1.0, 0.5])
    prob = eo.ODEProblem(f, u0, (0.0, 1.0), 1.3, integrand=lambda u, p, t: square(u))

    def fall(p):
        sol = eo.solve(eo.remake(prob, p=p), eo.Rodas5P(), abstol=1e-10, reltol=1e-10)
        return sol.integral[-1].sum()

    def exact(p):
        return jnp.sum((u0 - 1 / (1 / u0 + p)) / p)

    np.testing.assert_allclose(
        jax.value_and_grad(fall)(1.3), jax.value_and_grad(exact)(1.3), rtol=1e-7
    )
    plain = eo.remake(prob, integrand=None)
    sol = eo.solve(plain, eo.Rodas5P(), save_everystep=True, abstol=1e-9, reltol=1e-9)
    np.testing.assert_allclose(sol(0.3), 1 / (1 / u0 + 0.39), rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("n", [14, 20])
def test_of_a_large_dense_problem(n):
    """Its equations are solved by loops, and so are its cotangents summed. (With 20 components, the
    Jacobian itself is computed component by component.)"""
    h, rng = 1e-4, np.random.default_rng(0)
    rates, weights = jnp.logspace(0, 3, n), jnp.asarray(rng.uniform(-1, 1, (n, n)) / n)
    hit = eo.ContinuousCallback(
        lambda u, t, i: u[0] - 0.5, lambda i: eo.remake(i, u=i.u * (1 + i.p[1][0, 1]))
    )

    def f(u, p, t):
        return (p[1] @ (u * u)) * jnp.cos(t) - p[0] * u

    def loss(x, **options):
        u0, rates, weights = x
        prob = eo.ODEProblem(f, u0, (0.0, 1.0), (rates, weights))
        options = {"saveat": [0.3, 1.0], "reltol": 1e-10, "abstol": 1e-10, **options}
        return jnp.sum(eo.solve(prob, eo.Rodas5P(), **options).u ** 2)

    given = jnp.asarray(rng.uniform(0.6, 1.5, n)), rates, weights
    for options in ({}, {"callback": hit}) if n < 20 else ({},):
        gradient, of = jax.grad(loss)(given, **options), jax.jit(lambda x, o=options: loss(x, **o))
        for which, i in ((0, 0), (0, 5), (1, 0), (1, n - 1), (2, (0, 1)), (2, (3, 0)), (2, (7, 9))):
            ends = []
            for step in (h, -h):
                moved = list(given)
                moved[which] = moved[which].at[i].multiply(1 + step)
                ends.append(of(tuple(moved)))
            expected = (ends[0] - ends[1]) / (2 * h * given[which][i])
            np.testing.assert_allclose(gradient[which][i], expected, rtol=1e-5, atol=1e-8)
