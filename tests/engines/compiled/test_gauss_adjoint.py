"""The adjoint ODE of Rosenbrock methods, compared with closed forms, with the adjoint of the steps,
and with finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import gauss_adjoint

from ...problems import forced, of_benchmarks, ROBERTSON, robertson
from .test_replay_adjoint import assert_close


slow = pytest.mark.slow
GAUSS, REPLAY = eo.GaussAdjoint(), eo.ReplayAdjoint()
RATES = jnp.asarray(ROBERTSON)


def relaxed(u, p, t):
    """Prothero and Robinson's problem, with the solution `sin(p[1] t)` once the start is
    forgotten."""
    return -p[0] * (u - jnp.sin(p[1] * t)) + p[1] * jnp.cos(p[1] * t)


def weighed(u):
    return jnp.vdot(jnp.cos(jnp.arange(u.size, dtype=u.dtype)).reshape(u.shape), u)


def of_forced(x, alg=None, sensealg=GAUSS, tol=1e-9, tspan=(0.0, 2.0), **options):
    u0, p = x
    prob = eo.ODEProblem(forced, u0, tspan, p)
    options = {"reltol": tol, "abstol": tol, **options}
    return weighed(eo.solve(prob, alg or eo.Rodas5P(), sensealg=sensealg, **options).u)


def of_test_set(name, absolute=1e-4):
    """A function of the logarithms of the constants: the sum of all components at the end, each in
    parts of its size. And where these are zero."""
    problem = of_benchmarks("common.ivp_test_set").PROBLEMS[name]
    weights = jnp.cos(jnp.arange(len(problem.u0))) / jnp.asarray(problem.published)

    def loss(logarithms, sensealg=None, tol=1e-9):
        p = jnp.asarray(problem.constants) * jnp.exp(logarithms)
        prob = eo.ODEProblem(problem.f, jnp.asarray(problem.u0, float), (0.0, problem.end), p)
        options = {"reltol": tol, "abstol": tol * (1e-10 if name == "ROBER" else absolute)}
        return weights @ eo.solve(prob, eo.Rodas5P(), sensealg=sensealg, **options).u[-1]

    return loss, jnp.zeros(len(problem.constants))


OF_FORCED = jnp.array([1.0, 0.5]), jnp.array([50.0, 3.0, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alg", "tol", "accuracy"),
    [
        (eo.Rodas5P(), 1e-6, 1e-8),
        pytest.param(eo.Rodas4(), 1e-6, 1e-4, marks=slow),
        pytest.param(eo.Rosenbrock23(), 1e-6, 2e-5, marks=slow),
        pytest.param(eo.AutoTsit5(eo.Rodas5P()), 1e-6, 1e-6, marks=slow),
    ],
    ids=lambda x: type(x).__name__,
)
def test_where_the_adjoint_lasts_a_millionth_of_the_time(alg, tol, accuracy):
    """By its start, nothing is left of `relaxed` at the saved times; by `p[1]`, `t cos(p[1] t)`.
    The jumps at saved times, and those between them, each begin a fall of the adjoint anew."""
    times = jnp.linspace(0.2, 1.0, 5)

    def loss(u0, p):
        prob = eo.ODEProblem(relaxed, u0[None], (0.0, 1.0), p)
        options = {"saveat": times, "reltol": tol, "abstol": tol, "sensealg": GAUSS}
        return weighed(eo.solve(prob, alg, **options).u)

    by_start, by_p = jax.jit(jax.grad(loss, argnums=(0, 1)))(0.3, jnp.array([1e6, 3.0]))
    np.testing.assert_allclose(by_start, 0.0, atol=1e-20)
    expected = jnp.cos(jnp.arange(5)) @ (times * jnp.cos(3.0 * times))
    np.testing.assert_allclose(by_p, [0.0, expected], rtol=accuracy, atol=1e-9)


@slow
@pytest.mark.parametrize(
    ("name", "tol", "accuracy"),
    [("HIRES", 1e-9, 1e-5), ("OREGO", 1e-9, 1e-5), ("POLLU", 1e-9, 1e-5), ("ROBER", 1e-9, 1e-5)],
)
def test_of_the_test_set_by_its_constants(name, tol, accuracy):
    loss, at = of_test_set(name)
    assert_close(jax.grad(loss)(at, GAUSS, tol), jax.grad(loss)(at, REPLAY, 1e-11), accuracy)


@slow
@pytest.mark.parametrize("below", [1.0, 1e-1, 1e-2, 1e-3])
def test_no_step_back_passes_over_a_jump(monkeypatch, below):
    """The Oregonator's jumps are much shorter than the time between them. Whatever the steps back
    are, and so where they end, none misses one."""
    monkeypatch.setattr(gauss_adjoint, "_BELOW", below)
    jax.clear_caches()
    loss, at = of_test_set("OREGO", 1e-2)
    assert_close(jax.grad(loss)(at, GAUSS, 1e-4), jax.grad(loss)(at, REPLAY, 1e-10), 1e-2)


@slow
@pytest.mark.parametrize(
    ("alg", "order"), [(eo.Rodas5P(), 0.7), (eo.Rodas4(), 0.7), (eo.Rosenbrock23(), 0.35)], ids=str
)
def test_it_converges_with_the_tolerance(alg, order):
    expected = jax.grad(of_forced)(OF_FORCED, sensealg=REPLAY, tol=1e-12)
    first = 1e-3 if order < 0.5 else 1e-5
    errors = []
    for tol in (first, first * 1e-3):
        found = jax.grad(of_forced)(OF_FORCED, alg, tol=tol)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        errors.append(max(np.max(np.abs(x - y)) for x, y in pairs))
    assert errors[1] < errors[0] * 1e-3**order, errors


@slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_start": False},
        {"saveat": 0.25},
        {"saveat": [0.0, 0.3, 0.3, 1.7]},
        {"save_everystep": True, "maxiters": 300},
        {"save_everystep": True, "maxiters": 300, "save_start": False},
        {"tspan": (2.0, 0.5), "saveat": [1.9, 1.0]},
        {"tstops": [0.7, 1.1], "dtmax": 0.1},
        {"abstol": jnp.array([1e-9, 1e-10]), "reltol": jnp.array([1e-9, 1e-8])},
    ],
    ids=str,
)
def test_is_that_of_the_steps(options):
    def loss(x, sensealg, tol):
        options_ = {"tol": tol, **options}
        prob = eo.ODEProblem(forced, x[0], options_.pop("tspan", (0.0, 2.0)), x[1])
        options_ = {"reltol": tol, "abstol": options_.pop("tol"), **options_}
        u = eo.solve(prob, eo.Rodas5P(), sensealg=sensealg, **options_).u
        return weighed(jnp.where(jnp.isnan(u), 0.0, u))

    tol = 1e-9
    reference = 1e-9 if "save_everystep" in options else 1e-11
    expected = jax.grad(loss)(OF_FORCED, REPLAY, reference)
    assert_close(jax.grad(loss)(OF_FORCED, GAUSS, tol), expected, 1e-5)


@slow
def test_where_f_jumps():
    """`u' = -k (u - s)` with `s` from 1 to p at 0.5."""
    k, end = 1e3, 0.6

    def loss(p, sensealg):
        prob = eo.ODEProblem(
            lambda u, p, t: -k * (u - jnp.where(t > 0.5, p, 1.0)), jnp.array([0.0]), (0.0, end), p
        )
        options = {"reltol": 1e-8, "abstol": 1e-8, "d_discontinuities": [0.5]}
        sol = eo.solve(prob, eo.Rodas5P(), sensealg=sensealg, saveat=[0.3, 0.501, end], **options)
        return sol.u.sum()

    expected = 2 - np.exp(-k * 1e-3)
    np.testing.assert_allclose(jax.grad(loss)(2.0, GAUSS), expected, rtol=1e-6)


@slow
def test_by_the_times():
    def loss(x, sensealg):
        t0, t1, times = x
        prob = eo.ODEProblem(forced, OF_FORCED[0], (t0, t1), OF_FORCED[1])
        options = {"reltol": 1e-10, "abstol": 1e-10, "sensealg": sensealg}
        ends = eo.solve(prob, eo.Rodas5P(), **options)
        return weighed(ends.u) + weighed(eo.solve(prob, eo.Rodas5P(), saveat=times, **options).u)

    x = jnp.array(0.1), jnp.array(2.0), jnp.array([0.3, 1.1])
    assert_close(jax.grad(loss)(x, GAUSS), jax.grad(loss)(x, REPLAY), 1e-6)


def of_ensemble(x, n, sensealg, ensemblealg=None, **options):
    u0, (shared, rate, own) = x

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=u0 * (1 + 0.1 * ctx.index), p=(shared, rate, own[ctx.index]))

    def f(u, p, t):
        return jnp.stack([p[0][0] * (jnp.cos(p[0][1] * t) - u[0]) + u[1], -p[1] * u[1] ** 3 * p[2]])

    ens = eo.EnsembleProblem(eo.ODEProblem(f, u0, (0.0, 2.0), (shared, rate, own[0])), prob_func)
    options = {"reltol": 1e-8, "abstol": 1e-8, "saveat": [0.4, 2.0], **options}
    sim = eo.solve(ens, eo.Rodas5P(), ensemblealg, trajectories=n, sensealg=sensealg, **options)
    return weighed(sim.u)


def ensemble(n):
    return OF_FORCED[0], (jnp.array([50.0, 3.0]), jnp.array(1.0), jnp.linspace(0.5, 2.0, n))


@slow
@pytest.mark.parametrize(
    "ensemblealg",
    [eo.EnsembleSerial(), eo.EnsembleThreads(), eo.EnsembleThreads(1), eo.EnsembleSplitThreads()],
    ids=str,
)
def test_of_ensembles(ensemblealg):
    x = ensemble(11)
    expected = jax.grad(of_ensemble)(x, 11, REPLAY, eo.EnsembleThreads(1))
    assert_close(jax.grad(of_ensemble)(x, 11, GAUSS, ensemblealg), expected, 1e-5)
    assert_close(jax.grad(of_ensemble)(x, 11, GAUSS, ensemblealg, batch_size=4), expected, 1e-5)


@slow
def test_in_parts(monkeypatch):
    """Parts of trajectories, of which the last is not full, change nothing."""
    x, n = ensemble(11), 11
    expected = jax.grad(of_ensemble)(x, n, GAUSS, eo.EnsembleThreads(1))
    monkeypatch.setattr(gauss_adjoint, "_ROOM", 0)
    monkeypatch.setattr(gauss_adjoint, "_LEAST", 4)
    found = jax.jit(lambda x: jax.grad(of_ensemble)(x, n, GAUSS, eo.EnsembleThreads(1)))(x)
    assert_close(found, expected, 1e-9)


@slow
def test_under_vmap():
    factors = jnp.array([1.0, 1.5, 0.7])

    def gradient(factor):
        return jax.grad(of_forced)((OF_FORCED[0], OF_FORCED[1] * factor), saveat=[0.5, 2.0])

    together = jax.jit(jax.vmap(gradient))(factors)
    for i, factor in enumerate(factors):
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), gradient(factor), 1e-7)

    def ends(p, sensealg):
        prob = eo.ODEProblem(forced, OF_FORCED[0], (0.0, 2.0), p)
        return eo.solve(prob, eo.Rodas5P(), reltol=1e-9, abstol=1e-9, sensealg=sensealg).u[-1]

    rows = (jax.jacrev(ends)(OF_FORCED[1], x) for x in (GAUSS, REPLAY))
    assert_close(*rows, 1e-6)


@slow
def test_in_single_precision():
    u0, p = (x.astype(jnp.float32) for x in OF_FORCED)
    found = jax.grad(of_forced)((u0, p), tol=1e-4, saveat=[0.5, 2.0])
    assert {x.dtype for x in found} == {jnp.dtype("float32")}
    assert_close(found, jax.grad(of_forced)(OF_FORCED, sensealg=REPLAY, saveat=[0.5, 2.0]), 1e-3)


@jax.custom_vjp
def square(u):
    return u**2


square.defvjp(lambda u: (u**2, u), lambda u, ct: (2 * u * ct,))


@slow
@pytest.mark.parametrize("known", [{}, {"jac": lambda u, p, t: jnp.diag(-2 * p * u)}])
def test_of_what_is_known_of_f(known):
    """`u' = -p u^2`, so `u = 1 / (1 / u(0) + p t)`."""
    f, u0 = eo.ODEFunction(lambda u, p, t: -p * square(u), **known), jnp.array([1.0, 0.5])

    def end(p):
        prob = eo.ODEProblem(f, u0, (0.0, 1.0), p)
        return eo.solve(prob, eo.Rodas5P(), reltol=1e-9, abstol=1e-9, sensealg=GAUSS).u[-1].sum()

    exact = jax.grad(lambda p: jnp.sum(1 / (1 / u0 + p)))(1.3)
    np.testing.assert_allclose(jax.grad(end)(1.3), exact, rtol=1e-7)


def test_it_is_linear_in_the_cotangents():
    """The tolerances are those of cotangents of about one."""

    def gradient(factor):
        prob = eo.ODEProblem(lambda u, p, t: -p * u**2, jnp.array([1.0]), (0.0, 1.0), 2.0)

        def loss(p):
            options = {"reltol": 1e-6, "abstol": 1e-6, "sensealg": GAUSS}
            return factor * eo.solve(eo.remake(prob, p=p), eo.Rosenbrock23(), **options).u[-1, 0]

        return jax.grad(loss)(2.0)

    np.testing.assert_allclose(gradient(1.0), -1 / 9, rtol=1e-4)
    assert gradient(2.0**-60) == gradient(1.0) * 2.0**-60
    assert gradient(0.0) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("sensealg", [GAUSS, REPLAY], ids=str)
def test_neighbours_that_fail_have_no_derivative_and_change_none(sensealg):
    def solved(p):
        prob = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.array([1.0]), (0.0, 1.0), p)
        return eo.solve(prob, eo.Rodas5P(), reltol=1e-8, abstol=1e-8, sensealg=sensealg)

    rates = jnp.array([[-1.0], [2.0], [-3.0], [jnp.nan]])
    gradient = jax.jit(jax.vmap(jax.grad(lambda p: solved(p).u[-1, 0])))
    got = np.asarray(gradient(rates))
    np.testing.assert_array_equal(got[[0, 2]], gradient(rates[jnp.array([0, 2, 0, 2])])[:2])
    np.testing.assert_array_equal(got[[1, 3]], 0.0)
    expected = 1 / (1 - np.asarray(rates)[[0, 2], 0]) ** 2
    np.testing.assert_allclose(got[[0, 2], 0], expected, rtol=1e-6)


def test_the_adjoint_may_be_larger_than_max_norm():
    @jax.jit
    def loss(p, limit):
        prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.0]), (0.0, 1.0), p)
        return 1e6 * eo.solve(prob, eo.Rodas5P(), sensealg=GAUSS, max_norm=limit).u[-1, 0]

    slope = jax.grad(loss)
    np.testing.assert_array_equal(slope(1.0, 2.0), slope(1.0, jnp.inf))
    assert slope(1.0, 2.0) < -3e5
    assert slope(1.0, 0.3) == 0


@pytest.mark.slow
def test_an_adjoint_that_can_not_be_solved_is_nan():
    """Each trajectory takes few steps forwards, and many back; those of the first are enough."""

    def ends(rates, p):
        def prob_func(prob, ctx):
            return eo.remake(prob, p=jnp.stack([rates[ctx.index], p]))

        prob = eo.ODEProblem(relaxed, jnp.array([0.0]), (0.0, 1e-2), jnp.ones(2))
        options = {"maxiters": 12, "reltol": 1e-6, "abstol": 1e-6, "sensealg": GAUSS}
        ens = eo.EnsembleProblem(prob, prob_func)
        sim = eo.solve(ens, eo.Rodas5P(), trajectories=2, save_start=False, **options)
        return sim.u[:, 0, 0].sum(), sim.retcode

    rates = jnp.array([1.0, 1e9])
    gradient = jax.jit(jax.grad(ends, argnums=(0, 1), has_aux=True))
    (by_rates, by_p), codes = gradient(rates, 1.0)
    assert (codes == eo.ReturnCode.Success).all()
    assert np.isfinite(by_rates[0])
    assert np.isnan(by_rates[1])
    assert np.isnan(by_p)


REFUSED = {
    "fixed steps": {"adaptive": False, "dt": 0.1},
    "callbacks": {"callback": eo.PresetTimeCallback([0.5], lambda i: i)},
    "integrands": {},
    "mass matrices": {},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_does_not_have_is_refused_with_the_remedy(what):
    f = eo.ODEFunction(robertson, mass_matrix=np.diag([1.0, 1.0, 2.0]))
    prob = eo.ODEProblem(
        f if what == "mass matrices" else robertson,
        jnp.array([1.0, 0.0, 0.0]),
        (0.0, 1.0),
        RATES,
        integrand=(lambda u, p, t: u) if what == "integrands" else None,
    )
    for engine in ("auto", "compiled"):
        match = rf"GaussAdjoint\(\) has no {what} in this engine.*ReplayAdjoint\(\)"
        with pytest.raises(ValueError, match=match):
            eo.solve(prob, eo.Rodas5P(), sensealg=GAUSS, engine=engine, **REFUSED[what])


@slow
def test_by_the_times_of_jumps_is_refused():
    def end(t):
        prob = eo.ODEProblem(
            lambda u, p, t: -u + jnp.where(t > p, 1.0, 0.0), jnp.array([1.0]), (0.0, 1.0), t
        )
        options = {"sensealg": GAUSS, "d_discontinuities": jnp.stack([t])}
        return eo.solve(prob, eo.Rodas5P(), **options).u[-1, 0]

    with pytest.raises(NotImplementedError, match=r"d_discontinuities.*ReplayAdjoint\(\)"):
        jax.grad(end)(0.5)
