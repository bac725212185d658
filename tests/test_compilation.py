"""What is compiled, and when; and that nothing compiled is used when it is out of date."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled.llvm import compiler
from ensembleode.engines.compiled.xla import call
from ensembleode.ground.recent import jit_recent, RECENT

from .marks import slow_unless
from .test_conformance import ALGORITHMS, QUICK


# Workers compile by themselves, and are reached by a callback: tests/executors says what of that.
# Without a GPU, kernels are arrays.
HERE = [n for n, alg in ALGORITHMS.items() if n != "kernel" and not hasattr(alg, "cluster")]


@pytest.fixture(params=[slow_unless(name in QUICK, name) for name in HERE])
def alg(request):
    return ALGORITHMS[request.param]


def solve_fresh(alg, *, rate, matrix, start, end, tol, times, seed, activation=jnp.tanh):
    """Fresh functions each time, over other closed-over arrays and other numbers."""

    @jax.jit
    def inner(u):
        return matrix @ u

    def f(u, p, t):
        return activation(p["rate"] * inner(u)) * jnp.cos(t)

    prob = eo.ODEProblem(f, start, (0.0, end), {"rate": rate})
    ens = eo.EnsembleProblem(
        prob,
        lambda prob, ctx: eo.remake(prob, u0=prob.u0 + jax.random.uniform(ctx.key, (2,)) + start),
        lambda sol, ctx: (sol.u + matrix[0, 0], False),
    )
    return eo.solve(
        ens, eo.Tsit5(), alg, trajectories=3, abstol=tol, reltol=tol, saveat=times, seed=seed
    )


FIRST = {
    "rate": 1.0,
    "matrix": jnp.eye(2),
    "start": jnp.array([1.0, 2.0]),
    "end": 1.0,
    "tol": 1e-6,
    "times": np.array([0.2, 1.0]),
    "seed": 0,
}
SECOND = {
    "rate": -2.5,
    "matrix": jnp.array([[0.0, 1.0], [-1.0, 0.3]]),
    "start": jnp.array([-1.0, 0.5]),
    "end": 0.7,
    "tol": 1e-9,
    "times": np.array([0.1, 0.6]),
    "seed": 7,
}


@pytest.mark.slow
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.softplus])
def test_other_numbers_compile_nothing_and_are_not_stale(alg, compiles, activation):
    jax.clear_caches()
    solve_fresh(alg, activation=activation, **FIRST)
    assert compiles.count > 0
    compiles.count = 0
    second = solve_fresh(alg, activation=activation, **SECOND)
    assert compiles.count == 0
    assert (second.retcode == eo.ReturnCode.Success).all()

    # What a process that has seen nothing else would say.
    jax.clear_caches()
    anew = solve_fresh(alg, activation=activation, **SECOND)
    np.testing.assert_array_equal(second.u, anew.u)
    first = solve_fresh(alg, activation=activation, **FIRST)
    assert not np.allclose(first.u, anew.u)


def in_a_loop(rate, u):
    def once(u, _):
        return jax.lax.cond(u.sum() < 1e6, rate, lambda u: 0.3 * u, u), None

    return jax.lax.scan(once, u, None, length=1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("within", [lambda rate, u: rate(u), in_a_loop])
def test_numbers_in_f_compile_nothing(compiles, monkeypatch, within):
    """A scan over one, with derivatives, and what is not stale; but a number that code is quicker
    for knowing is code."""
    kernels = []
    real = compiler.compiled
    monkeypatch.setattr(call, "compiled", lambda text, *a: kernels.append(text) or real(text, *a))

    def end(k, u0, p=1.5):
        def f(u, p, t):
            return within(lambda u: -k * p * jnp.where(u > k, u, 0.1 * u) + 0.3, u)

        return eo.solve(eo.ODEProblem(f, u0, (0.0, 1.0), p), eo.Euler(), dt=0.1).u[-1].sum()

    u0 = jnp.array([0.5, 6.0])
    values = [(end(k, u0), jax.grad(end, (1, 2))(k, u0, 1.5)) for k in (3.3,)]
    compiles.count, count = 0, len(kernels)
    scan = (0.7, 5.0, 3.3)
    values += [(end(k, u0), jax.grad(end, (1, 2))(k, u0, 1.5)) for k in scan]
    assert (compiles.count, len(kernels)) == (0, count)
    assert len({float(value) for value, _ in values}) == len(scan)
    for x, y in zip(*map(jax.tree.leaves, (values[0], values[-1])), strict=True):
        np.testing.assert_array_equal(x, y)
    for k in scan:
        expected = np.array(u0)
        for _ in range(10):
            rate = -k * 1.5 * np.where(expected > k, expected, 0.1 * expected) + 0.3
            expected = expected + 0.1 * rate
        np.testing.assert_allclose(end(k, u0), expected.sum(), rtol=1e-12)
    end(2.0, u0)
    assert len(kernels) > count


@pytest.mark.slow
def test_programs_of_old_problems_are_forgotten(compiles):
    """But not those of recent ones."""
    calls = []

    @functools.partial(jit_recent, static=2)
    def f(a, b, x):
        calls.append((a, b))
        return a * x + b

    for a in range(RECENT + 1):
        assert f(a, 1, 2.0) == 2 * a + 1
    compiles.count = 0
    f(RECENT, 1, 3.0)
    f(1, 1, 3.0)
    assert compiles.count == 0
    assert f(0, 1, 3.0) == 1
    assert len(calls) == RECENT + 2


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 2])
def test_eager_gradient_compiles_once(alg, compiles, batch_size):
    def loss(theta):
        prob = eo.ODEProblem(
            lambda u, p, t: p * jax.nn.softplus(u), theta[:1], (0.0, 1.0), theta[1]
        )
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id))
        options = {"trajectories": 3, "maxiters": 256, "batch_size": batch_size}
        return eo.solve(ens, None, alg, **options).u.sum()

    first = jax.grad(loss)(jnp.array([1.0, -1.0]))
    compiles.count = 0
    second = jax.grad(loss)(jnp.array([2.0, -0.5]))
    assert compiles.count == 0
    assert not np.allclose(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"saveat": 0.25}], ids=str)
def test_implicit_methods_compile_once_for_any_number_of_trajectories(compiles, options):
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.0, 2.0]), (0.0, 1.0), 1.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=jnp.float64(ctx.sim_id)))
    sims = []
    for n in (3, 1, 50, 300):
        compiles.count = 0
        sims.append(eo.solve(ens, eo.ImplicitEuler(), trajectories=n, reltol=1e-2, **options))
        assert (compiles.count == 0) == (n != 3)
    for sim in sims:
        assert sim.u.shape[0] == len(sim.retcode) == len(sim)
        np.testing.assert_array_equal(sim.u, sims[-1].u[: len(sim)])


@pytest.mark.slow
def test_custom_derivatives_are_not_confused():
    """Two fields that compute the same, and differ in their derivative rules alone."""

    def make(factor):
        @jax.custom_jvp
        def g(u):
            return -u

        g.defjvp(lambda primals, tangents: (g(*primals), -factor * tangents[0]))
        return g

    def gradient(factor):
        g = make(factor)

        def end(u0):
            prob = eo.ODEProblem(lambda u, p, t: g(u), u0, (0.0, 1.0))
            return eo.solve(prob, abstol=1e-9, reltol=1e-9, maxiters=256).u[-1, 0]

        return jax.grad(end)(jnp.array([1.0]))[0]

    for factor in (1.0, 2.0, 1.0):
        np.testing.assert_allclose(gradient(factor), np.exp(-factor), rtol=1e-6)


@pytest.mark.quick_cases(1)
def test_what_is_met_again_is_called_once(alg):
    calls = []

    def f(u, p, t):
        calls.append("f")
        return -u

    def prob_func(prob, ctx):
        calls.append("prob_func")
        return eo.remake(prob, u0=prob.u0 * ctx.sim_id)

    def output_func(sol, ctx):
        calls.append("output_func")
        return sol.u[-1], False

    prob = eo.ODEProblem(f, jnp.array([1.0]), (0.0, 1.0))
    ens = eo.EnsembleProblem(prob, prob_func, output_func)
    for _ in range(2):
        calls.clear()
        eo.solve(ens, None, alg, trajectories=6, batch_size=3)
    assert calls == ["prob_func", "f", "output_func"]
    calls.clear()
    eo.solve(prob)
    assert calls == ["f"]


def test_shared_weights_are_not_copied():
    """A network that all trajectories share enters the program once."""
    w = jnp.ones((50, 50))

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=prob.u0 * ctx.sim_id)

    prob = eo.ODEProblem(lambda u, p, t: -(p @ u), jnp.ones(50), (0.0, 0.01), w)
    ens = eo.EnsembleProblem(prob, prob_func)

    def ends(w):
        ens_w = eo.EnsembleProblem(eo.remake(ens.prob, p=w), prob_func)
        return eo.solve(ens_w, None, eo.EnsembleGPUArray(), trajectories=7).u

    text = str(jax.make_jaxpr(ends)(w))
    assert "7,50,50]" not in text
    assert "50,50]" in text


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("saveat", [None, 0.25])
@pytest.mark.parametrize("options", [{}, {"dt": 0.1, "adaptive": False}])
def test_no_host_callback(alg, saveat, options):
    prob = eo.ODEProblem(lambda u, p, t: p * u, jnp.array([1.0]), (0.0, 1.0), -1.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id))

    def ends(u0):
        ens_u0 = eo.EnsembleProblem(eo.remake(prob, u0=u0), ens.prob_func)
        return eo.solve(ens_u0, None, alg, trajectories=3, saveat=saveat, **options).u

    text = jax.jit(ends).lower(jnp.array([1.0])).as_text()
    assert "callback" not in text
