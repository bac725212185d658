"""Solves by methods that switch. The rule itself is tested in tests/solvers/test_switching.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ...marks import slow_unless
from ..test_julia_steps import recorded
from .test_rosenbrock import FIELDS, robertsons


ALG = eo.AutoTsit5(eo.Rosenbrock23())
METHODS = [
    eo.AutoTsit5(eo.Rodas5P()),
    ALG,
    *(cls(eo.Rodas5P()) for cls in (eo.AutoVern6, eo.AutoVern7, eo.AutoVern8, eo.AutoVern9)),
    eo.AutoVern7(eo.Rosenbrock23()),
]


def name_of(alg):
    return f"{type(alg).__name__}-{type(alg.stiff).__name__}"


few = functools.partial(
    pytest.mark.parametrize,
    "alg",
    [slow_unless(x is METHODS[0], x) for x in METHODS],
    ids=name_of,
)


def van_der_pol(u, p, t):
    return jnp.stack([u[1], p * (1 - u[0] ** 2) * u[1] - u[0]])


def oscillator(mu=1e3, tspan=(0.0, 3.0), **parts):
    return eo.ODEProblem(van_der_pol, jnp.array([2.0, 0.5]), tspan, mu, **parts)


def stiff_steps(solution, alg):
    """The number of steps that the Rosenbrock method tried."""
    return np.asarray(solution.stats.nsolve) // alg.stiff.method.stages


@pytest.mark.slow
@pytest.mark.parametrize("problem", FIELDS)
def test_steps_are_those_of_ordinary_diff_eq(problem):
    f, p = FIELDS[problem]
    found = recorded("stiff")["problems"][problem]
    prob = eo.ODEProblem(f, jnp.array(found["u0"]), tuple(found["tspan"]), jnp.array(p))
    records = [x for x in found["records"] if x["alg"] == "AutoTsit5(Rosenbrock23())"]
    assert len(records) == 2
    for x in records:
        tolerances = {"abstol": x["abstol"], "reltol": x["reltol"]}
        sol = eo.solve(prob, ALG, save_everystep=True, maxiters=10**4, **tolerances)
        assert sol.retcode == eo.ReturnCode.Success
        stats = sol.stats
        counts = stats.naccept, stats.nreject, stats.nf, stats.nw, stats.njac, stats.nsolve
        expected = (*(x[name] for name in ("naccept", "nreject", "nf", "nw")), x["nw"], 3 * x["nw"])
        assert tuple(map(int, counts)) == expected
        np.testing.assert_allclose(np.asarray(sol.t)[x["step"]], x["t"], rtol=2e-5)
        np.testing.assert_allclose(sol.u[-1], x["u_end"], rtol=3e-7)


@pytest.mark.slow
@few()
def test_where_nothing_is_stiff_it_is_the_explicit_method(alg):
    prob = oscillator(1.0)
    sol = eo.solve(prob, alg, save_everystep=True)
    plain = eo.solve(prob, alg.nonstiff, save_everystep=True)
    np.testing.assert_allclose(sol.t, plain.t, rtol=1e-13)
    np.testing.assert_allclose(sol.u, plain.u, rtol=1e-12)
    assert int(sol.stats.nf) == int(plain.stats.nf)
    assert stiff_steps(sol, alg) == 0


@pytest.mark.slow
@few()
def test_where_it_is_stiff_it_is_the_other(alg):
    sol = eo.solve(oscillator(1e5), alg, abstol=1e-8, reltol=1e-6)
    exact = eo.solve(oscillator(1e5), eo.Rodas5P(), abstol=1e-12, reltol=1e-12)
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.u[-1], exact.u[-1], rtol=1e-5)
    assert stiff_steps(sol, alg) >= 4
    explicit = eo.solve(oscillator(1e5), alg.nonstiff, maxiters=1000)
    assert explicit.retcode == eo.ReturnCode.MaxIters


def test_a_rule_of_ones_own():
    """The later the method may switch, the more steps are explicit; if it never may, all are."""
    prob, found = oscillator(1e3, (0.0, 2000.0)), []
    for options in ({}, {"maxstiffstep": 40}, {"nonstifftol": 1e9}):
        alg = eo.AutoTsit5(eo.Rosenbrock23(), **options)
        sol = eo.solve(prob, alg, abstol=1e-7, reltol=1e-5, maxiters=10**4)
        stiff = int(stiff_steps(sol, alg))
        found.append((sol.retcode, stiff, int(sol.stats.naccept + sol.stats.nreject) - stiff))
    (early, _, few), (late, _, more), (never, none, _) = found
    assert early == late == eo.ReturnCode.Success
    assert few + 25 <= more
    assert never == eo.ReturnCode.MaxIters
    assert none == 0


def test_a_component_that_rests_is_not_stiff():
    prob = eo.ODEProblem(lambda u, p, t: jnp.stack([-u[0], 0 * u[1]]), jnp.ones(2), (0.0, 9.0))
    sol = eo.solve(prob, ALG, abstol=1e-9, reltol=1e-9)
    assert int(sol.stats.naccept) > 20
    assert stiff_steps(sol, ALG) == 0


@functools.cache
def mixed(n=13, alg=ALG, **options):
    """An ensemble of trajectories that range from not stiff to stiff for almost all of the time."""
    ens = eo.EnsembleProblem(
        oscillator(), lambda prob, ctx: eo.remake(prob, p=10.0 ** (5 * ((5 * ctx.index) % 13) / 12))
    )
    return eo.solve(ens, alg, eo.EnsembleSerial(), trajectories=n, **options)


def test_neighbours_change_no_bit():
    sim = mixed()
    steps = stiff_steps(sim, ALG)
    assert (steps == 0).any()
    assert (steps > 5).any()
    for i in (0, 5, 8):
        prob = oscillator(10.0 ** (5 * ((5 * np.float64(i)) % 13) / 12))
        alone = eo.solve(prob, ALG)
        np.testing.assert_array_equal(sim.u[i], alone.u)
        assert int(sim.stats.nf[i]) == int(alone.stats.nf)


def test_the_order_changes_no_bit():
    """This holds even if more trajectories wait for a method than there is room for, and with every
    kind of number that a trajectory has to itself."""
    n = 700
    rates = 10.0 ** np.linspace(0.0, 3.0, n)
    seen = eo.ContinuousCallback(
        lambda u, t, integrator: u[0], lambda x: eo.remake(x, u=1.01 * x.u, p=1.01 * x.p)
    )

    def solved(rates):
        prob = oscillator(tspan=(0.0, 5.0), callback=seen)
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, p=jnp.asarray(rates)[ctx.index])
        )
        options = {"saveat": 1.0, "max_events": 4}
        return eo.solve(ens, ALG, eo.EnsembleSerial(), trajectories=n, **options)

    order = np.random.default_rng(0).permutation(n)
    sim, mixed = solved(rates), solved(rates[order])
    assert sim.successful.all()
    assert 30 < np.sum(stiff_steps(sim, ALG) > 0) < n - 30
    assert (np.asarray(sim.events.count) > 0).any()
    for a, b in zip(jax.tree.leaves(sim), jax.tree.leaves(mixed), strict=True):
        if np.shape(a)[:1] == (n,):
            np.testing.assert_array_equal(np.asarray(a)[order], b)


@pytest.mark.slow
def test_failures_are_codes():
    def f(u, p, t):
        return jnp.where(p > 0, jnp.stack([u[0] ** 2, -1e4 * (u[1] - u[0])]), -1e4 * u)

    prob = eo.ODEProblem(f, jnp.ones(2), (0.0, 2.0), 1.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=1.0 * (ctx.index == 1)))
    sim = eo.solve(ens, ALG, trajectories=3)
    assert [eo.ReturnCode(int(x)).name for x in sim.retcode] == ["Success", "Unstable", "Success"]
    np.testing.assert_array_equal(sim.u[0], sim.u[2])


@pytest.mark.slow
@few()
def test_dense_output_is_that_of_the_method_that_made_the_step(alg):
    times = np.array([1e-4, 1e-3, 0.7, 0.9, 1.3, 2.9])
    prob, tolerances = oscillator(3e3), {"abstol": 1e-9, "reltol": 1e-7}
    saved = eo.solve(prob, alg, saveat=times, **tolerances)
    steps = eo.solve(prob, alg, save_everystep=True, **tolerances)
    exact = eo.solve(prob, eo.Rodas5P(), saveat=times, abstol=1e-12, reltol=1e-12)
    assert 0 < stiff_steps(saved, alg) < int(saved.stats.naccept)
    np.testing.assert_allclose(steps(times), saved.u, rtol=1e-9)
    np.testing.assert_allclose(saved.u, exact.u, rtol=1e-3)


@pytest.mark.slow
def test_events_and_integrals():
    """An event doesn't change which method makes the steps."""

    def affect(integrator):
        return eo.remake(integrator, u=integrator.u.at[0].mul(0.5))

    seen = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 0.5, affect)
    tolerances = {"abstol": 1e-10, "reltol": 1e-8}
    prob = robertsons((0.0, 1e3), integrand=lambda u, p, t: t)
    sol = eo.solve(prob, METHODS[0], callback=seen, **tolerances)
    other = eo.solve(prob, eo.Rodas5P(), callback=seen, **tolerances)
    assert int(sol.events.count) == 1
    np.testing.assert_allclose(sol.events.t[0], other.events.t[0], rtol=1e-6)
    np.testing.assert_allclose(sol.u[-1], other.u[-1], rtol=1e-5)
    np.testing.assert_allclose(sol.integral[-1], 5e5, rtol=1e-12)
    without = int(eo.solve(prob, METHODS[0], **tolerances).stats.nsolve)
    assert abs(int(sol.stats.nsolve) - without) < 0.5 * without


@pytest.mark.slow
def test_single_precision():
    prob = eo.remake(robertsons(dtype=np.float32))
    single = eo.solve(prob, ALG, abstol=1e-6, reltol=1e-4)
    exact = eo.solve(robertsons(), eo.Rodas5P(), abstol=1e-12, reltol=1e-10)
    assert single.u.dtype == np.float32
    assert single.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(single.u[-1], exact.u[-1], rtol=1e-3)


def loss(log_mu, alg, times=None, **options):
    prob = oscillator(jnp.exp(log_mu))
    options = {"saveat": times, "abstol": 1e-9, "reltol": 1e-9, "maxiters": 10**5, **options}
    sol = eo.solve(prob, alg, **options)
    return jnp.sum(jnp.cos(jnp.arange(sol.u.size)).reshape(sol.u.shape) * sol.u)


@few()
def test_gradients_replay_each_step_by_its_method(alg):
    """The derivative of a solve with steps by both methods, in forward and reverse mode."""
    options = {"abstol": 1e-7, "reltol": 1e-7} if alg.stiff == eo.Rosenbrock23() else {}
    times = np.array([0.01, 0.3, 1.1, 3.0])
    x = jnp.log(300.0)
    tried = eo.solve(oscillator(300.0), alg, abstol=1e-9, reltol=1e-9)
    assert 0 < stiff_steps(tried, alg) < int(tried.stats.naccept)
    of = functools.partial(loss, alg=alg, times=times, **options)
    backwards = jax.grad(of)(x)
    np.testing.assert_allclose(jax.jvp(of, (x,), (1.0,))[1], backwards, rtol=1e-11)
    exact = jax.grad(functools.partial(loss, alg=eo.Rodas5P(), times=times, reltol=1e-12))(x)
    np.testing.assert_allclose(backwards, exact, rtol=3e-5 if options else 3e-7)


@pytest.mark.slow
def test_second_derivatives():
    x = jnp.log(300.0)
    of = functools.partial(loss, alg=METHODS[0])
    other = functools.partial(loss, alg=eo.Rodas5P(), reltol=1e-12)
    found = jax.grad(jax.grad(of))(x)
    np.testing.assert_allclose(found, jax.jacfwd(jax.grad(of))(x), rtol=1e-9)
    np.testing.assert_allclose(found, jax.grad(jax.grad(other))(x), rtol=1e-5)


@pytest.mark.slow
def test_gradients_with_events_and_of_many():
    """The gradients of stiff and non-stiff trajectories together are those of each alone."""
    hit = eo.ContinuousCallback(
        lambda u, t, i: u[0] - 1.9, lambda i: eo.remake(i, u=i.u.at[0].add(0.05))
    )

    def of(x, alg, **options):
        found = eo.solve(oscillator(jnp.exp(x)), alg, callback=hit, **options)
        return found.u[-1] @ jnp.array([1.0, 2.0])

    x = jnp.log(jnp.array([1.0, 30.0, 300.0, 1e4]))
    tolerances = {"abstol": 1e-9, "reltol": 1e-9}
    found = jax.vmap(jax.grad(lambda x: of(x, METHODS[0], **tolerances)))(x)
    alone = [jax.grad(lambda x: of(x, METHODS[0], **tolerances))(x) for x in x]
    np.testing.assert_allclose(found, alone, rtol=1e-12)
    exact = jax.vmap(jax.grad(lambda x: of(x, eo.Rodas5P(), abstol=1e-12, reltol=1e-12)))(x)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-9)


def test_diffrax_says_what_to_take():
    with pytest.raises(ValueError, match="engine='diffrax' can't run AutoTsit5"):
        eo.solve(oscillator(), ALG, engine="diffrax")


def test_steps_that_are_fixed():
    with pytest.raises(ValueError, match=r"AutoTsit5 switches by how long its steps are"):
        eo.solve(oscillator(), ALG, adaptive=False, dt=0.1)


def test_steps_that_keep_components_positive():
    """The limit of the next step is by the dense output of the method that made this one."""
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.stack([-p * u[0], p * u[0] - u[1]]), [1.0, 0.0], (0.0, 20.0), 1e3
    )
    found, free = (
        eo.solve(prob, eo.AutoTsit5(eo.Rosenbrock23()), callback=x)
        for x in (eo.PositiveDomain(), None)
    )
    assert found.retcode == eo.ReturnCode.Success
    assert int(found.stats.nw) > 0
    np.testing.assert_allclose(found.u[-1], free.u[-1], atol=1e-4)


def test_dense_output_of_states_with_two_axes():
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.ones((2, 3)), (0.0, 1.0), 50.0)
    sol = eo.solve(prob, eo.AutoTsit5(eo.Rosenbrock23()), save_everystep=True)
    t = np.linspace(0.0, 1.0, 7)
    expected = np.exp(-50.0 * t)[:, None, None] * np.ones((2, 3))
    np.testing.assert_allclose(sol(t), expected, atol=2e-3)
