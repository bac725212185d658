"""States at rest, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ensembleode as eo


REST = eo.TerminateSteadyState()


def slow(u, p, t):
    """The first component is soon at rest, the second one late."""
    return jnp.stack([p["in"] - p["out"] * u[0], 1e-3 * (p["gain"] * u[0] ** 2 - u[1])])


def root(p):
    x = p["in"] / p["out"]
    return jnp.stack([x, p["gain"] * x**2])


P = {"in": 1.5, "out": 0.7, "gain": 1.3}
SLOW = eo.ODEProblem(slow, [0.1, 0.0], (0.0, 4e4), P)


def exchange(u, p, t):
    """A <-> B, from which C is made; A + yield B is conserved."""
    flux = p[0] * u[0] - p[1] * u[1] ** 2
    return jnp.stack([-p[2] * flux, flux, 0.1 * (u[0] - u[2])])


def exchanged(u0, p):
    total, ratio = u0[0] + p[2] * u0[1], p[1] / p[0]
    b = (jnp.sqrt(p[2] ** 2 + 4 * ratio * total) - p[2]) / (2 * ratio)
    return jnp.stack([ratio * b**2, b, ratio * b**2])


def assert_close(found, expected, rtol=1e-9, atol=1e-11):
    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)

    jax.tree.map(close, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"saveat": 500.0},
        {"save_start": False},
        {"saveat": jnp.array([1.0, 2.0])},
        {"save_everystep": True, "maxiters": 400},
    ],
)
def test_derivatives_of_an_end_at_rest(options):
    """They are those of the root, though the state is not yet near it; so are those of the event,
    and those by what `f` closes over. The first row has its own."""

    def solved(p):
        gain = p["gain"]
        prob = eo.remake(SLOW, f=lambda u, p, t: slow(u, p | {"gain": gain}, t), p=p)
        sol = eo.solve(prob, eo.Rodas5P(), callback=REST, **options)
        assert sol.events is not None
        return sol.u[-1], sol.events.u_after[-1], sol.u[0]

    end, event, first = jax.jit(jax.jacrev(solved))(P)
    expected = jax.jacfwd(root)(P)
    assert_close((end, event), (expected, expected))
    if "saveat" in options and np.ndim(options["saveat"]) == 0:
        assert not np.any(first["in"])
    assert np.abs(solved(P)[0] - root(P)).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("which", [1, 0])
def test_second_derivatives(which):
    def of_solve(x, y):
        prob = eo.remake(SLOW, p=P | {"in": x, "gain": y})
        return eo.solve(prob, eo.Rodas5P(), callback=REST).u[-1]

    def of_root(x, y):
        return eo.steady_state(eo.remake(SLOW, p=P | {"in": x, "gain": y})).u

    fn = (of_solve, of_root)[which]
    found = jax.jit(jax.jacfwd(jax.jacrev(fn, (0, 1)), (0, 1)))(1.5, 1.3)
    exact = jax.hessian(lambda x, y: root(P | {"in": x, "gain": y}), (0, 1))(1.5, 1.3)
    assert_close(found, exact)
    # Against finite differences of the states themselves.
    h = 1e-3
    up, at, down = (of_root(1.5 + x, 1.3) for x in (h, 0.0, -h))
    np.testing.assert_allclose((up - 2 * at + down) / h**2, found[0][0], rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_is_conserved(dtype):
    """A conserved quantity whose weights depend on a parameter."""
    u0, p = jnp.array([3.0, 0.5, 0.0], dtype), jnp.array([2.0, 1.0, 0.6], dtype)

    def at_rest(u0, p):
        return eo.steady_state(eo.ODEProblem(exchange, u0, (0.0, 1.0), p)).u

    how = {} if dtype == np.float64 else {"rtol": 2e-5, "atol": 1e-5}
    assert_close(at_rest(u0, p), exchanged(u0, p), **how)
    found = jax.jit(jax.jacrev(at_rest, (0, 1)))(u0, p)
    assert_close(found, jax.jacrev(exchanged, (0, 1))(u0, p), **how)


@pytest.mark.slow
def test_second_derivatives_of_what_is_conserved():
    u0, p = jnp.array([3.0, 0.5, 0.0]), jnp.array([2.0, 1.0, 0.6])

    def at_rest(u0, p):
        return eo.steady_state(eo.ODEProblem(exchange, u0, (0.0, 1.0), p)).u

    found = jax.jit(jax.jacfwd(jax.jacrev(at_rest, (0, 1)), (0, 1)))(u0, p)
    assert_close(found, jax.hessian(exchanged, (0, 1))(u0, p))


@pytest.mark.slow
def test_a_line_of_states_at_rest():
    """The end of an epidemic depends on the way to it; nothing of that is lost."""

    def sir(u, p, t):
        new = p[0] * u[0] * u[1]
        return jnp.stack([-new, new - p[1] * u[1], p[1] * u[1]])

    def final(p):
        def turn(_, s):
            off = s - 0.999 * jnp.exp(-p[0] / p[1] * (1 - s))
            return s - off / (1 - 0.999 * p[0] / p[1] * jnp.exp(-p[0] / p[1] * (1 - s)))

        s = jax.lax.fori_loop(0, 20, turn, 0.2)
        return jnp.stack([s, 0.0, 1 - s])

    def ended(p):
        prob = eo.ODEProblem(sir, [0.999, 0.001, 0.0], (0.0, 1e6), p, abstol=1e-10, reltol=1e-10)
        return eo.solve(prob, eo.Rodas5P(), callback=eo.TerminateSteadyState(1e-11, 1e-11)).u[-1]

    p = jnp.array([2.0, 1.0])
    assert_close(jax.jacfwd(ended)(p), jax.jacfwd(final)(p), rtol=1e-7, atol=1e-8)


def inputs(n):
    return jnp.linspace(0.5, 2.0, n)


def weighted(u):
    return jnp.sum(u @ jnp.array([1.0, 2.0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ensemblealg", "n"),
    [
        (eo.EnsembleThreads(), 1000),
        (eo.EnsembleSerial(), 5),
        (eo.EnsembleGPUArray(), 5),
        (eo.EnsembleGPUKernel(), 5),
        (eo.EnsembleDistributed(workers=1), 5),
    ],
)
def test_ensembles(ensemblealg, n):
    """Ends, outputs and states at rest, by numbers that are shared and those that are not."""

    def ensemble(p, output_func=None):
        def prob_func(prob, ctx):
            return eo.remake(prob, p=p | {"in": p["in"][ctx.index]})

        return eo.EnsembleProblem(SLOW, prob_func, output_func)

    def of_ends(p):
        sim = eo.solve(
            ensemble(p), eo.Rodas5P(), ensemblealg, trajectories=n, callback=REST, save_start=False
        )
        return weighted(sim.end.u)

    def of_outputs(p):
        ens = ensemble(p, lambda sol, ctx: (sol.u[-1], False))
        return weighted(eo.solve(ens, eo.Rodas5P(), ensemblealg, trajectories=n, callback=REST).u)

    def of_rest(p):
        return weighted(eo.steady_state(ensemble(p), None, ensemblealg, trajectories=n).u)

    p = P | {"in": inputs(n)}
    expected = jax.grad(lambda p: weighted(jax.vmap(lambda x: root(p | {"in": x}))(p["in"])))(p)
    for fn in (of_ends, of_outputs, of_rest):
        assert_close(jax.grad(fn)(p), expected)


@pytest.mark.slow
def test_vmap():
    def at_rest(x):
        return eo.steady_state(eo.remake(SLOW, p=P | {"in": x})).u

    xs = inputs(3)
    values, slopes = jax.jit(jax.vmap(lambda x: (at_rest(x), jax.jacfwd(at_rest)(x))))(xs)
    exact = lambda x: root(P | {"in": x})  # noqa: E731
    assert_close((values, slopes), (jax.vmap(exact)(xs), jax.vmap(jax.jacfwd(exact))(xs)))


@pytest.mark.slow
def test_branches():
    """Of one that isn't taken, and has no derivative there, nothing is seen."""

    def f(u, p, t):
        return p - lax.cond(u[0] > 1, lambda: 2 * jnp.sqrt(u - 1) + 1, lambda: u)

    def at_rest(ps):
        prob = eo.ODEProblem(f, [0.3], (0.0, 1.0), ps[0])
        return eo.steady_state(eo.EnsembleProblem(prob, p=ps)).u[:, 0].sum()

    def exact(ps):
        return jnp.where(ps > 1, ((ps - 1) / 2) ** 2 + 1, ps).sum()

    ps = jnp.array([0.4, 0.7, 2.5])
    assert_close(at_rest(ps), exact(ps))
    for by in (jax.grad, jax.jacfwd, jax.hessian):
        assert_close(by(at_rest)(ps), by(exact)(ps))


@pytest.mark.slow
def test_mass_matrix():
    """`M u` is conserved, and an algebraic equation holds."""

    def f(u, p, t):
        flux = p[0] * u[0] - p[1] * u[1]
        return jnp.stack([-flux, flux, u[0] + u[1] * u[2] - p[2]])

    def at_rest(u0, p):
        mass = np.diag([2.0, 1.0, 0.0])
        prob = eo.ODEProblem(eo.ODEFunction(f, mass_matrix=mass), u0, (0.0, 1.0), p)
        return eo.steady_state(eo.remake(prob, initializealg=eo.BrownFullBasicInit())).u

    def exact(u0, p):
        a = (2 * u0[0] + u0[1]) * p[1] / (2 * p[1] + p[0])
        b = a * p[0] / p[1]
        return jnp.stack([a, b, (p[2] - a) / b])

    at = jnp.array([1.0, 1.0, 1.0]), jnp.array([2.0, 1.0, 2.0])
    assert_close(at_rest(*at), exact(*at))
    assert_close(jax.jacrev(at_rest, (0, 1))(*at), jax.jacrev(exact, (0, 1))(*at))


@pytest.mark.slow
def test_other_callbacks():
    """A dose that changes `p` counts; an end by another callback keeps its own derivative."""

    def f(u, p, t):
        return {"x": p["in"] - p["k"] * u["x"], "y": 1e-2 * (u["x"] - u["y"])}

    def doubled(integrator):
        p = integrator.p
        return eo.remake(integrator, p=p | {"in": 2 * p["in"]})

    start = {"x": 0.0, "y": 0.0}
    prob = eo.ODEProblem(
        f, start, (0.0, 1e4), P | {"in": 3.0, "k": 0.5}, integrand=lambda u, p, t: u
    )
    high = eo.ContinuousCallback(lambda u, t, integrator: u["x"] - 5.0, eo.terminate)
    callback = eo.CallbackSet(eo.PresetTimeCallback([2.0], doubled), high, REST)

    def ends(p):
        ens = eo.EnsembleProblem(eo.remake(prob, callback=callback), p=prob.p | {"in": p})
        return eo.solve(ens, eo.Rodas5P()).end.u

    p = jnp.array([0.5, 3.0])
    slopes = jax.jacfwd(ends)(p)
    for name in start:
        np.testing.assert_allclose(slopes[name][0], [4.0, 0.0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(slopes["x"][1], 0.0, atol=1e-9)
    assert abs(slopes["y"][1, 1]) < 0.1
    rest = eo.steady_state(eo.EnsembleProblem(prob, p=prob.p | {"in": p}), callback=callback)
    assert rest.retcode.tolist() == [eo.ReturnCode.Success, eo.ReturnCode.Failure]
    np.testing.assert_allclose(rest.u["y"][0], 2.0, rtol=1e-9, atol=1e-11)
    assert np.isnan(rest.u["x"][1])
    assert rest.successful.tolist() == [True, False]


NONE = {
    "oscillates": (lambda u, p, t: jnp.stack([u[1], -u[0]]), [1.0, 0.0], "MaxIters"),
    "piles up": (lambda u, p, t: jnp.stack([1 - u[0], u[0]]), [0.0, 0.0], "ConvergenceFailure"),
    "dies out": (lambda u, p, t: -u * jnp.exp(-t), [1.0], "ConvergenceFailure"),
    "blows up": (lambda u, p, t: u**2, [1.0], "Unstable"),
    "passes by": (lambda u, p, t: u**2 + 1e-9, [-1.0], "ConvergenceFailure"),
}


SLOW_ONES = [pytest.param(name, marks=pytest.mark.slow) for name in list(NONE)[3:]]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [*list(NONE)[:3], *SLOW_ONES])
def test_no_state_at_rest(name):
    f, u0, code = NONE[name]
    rest = eo.steady_state(eo.ODEProblem(f, u0, (0.0, 1.0)), maxiters=1000)
    assert rest.retcode.name == code
    assert np.isnan(rest.u).all()


@pytest.mark.slow
def test_failures_leave_others_alone():
    """Gradients by numbers that all share, too."""
    prob = eo.ODEProblem(lambda u, p, t: p[0] + p[1] * u**2 - u, 1.0, (0.0, 1.0), jnp.zeros(2))

    def total(scale, p):
        rest = eo.steady_state(eo.EnsembleProblem(eo.remake(prob, f=scaled(scale)), p=p))
        return jnp.sum(jnp.where(rest.successful, rest.u, 0.0)), rest.retcode

    def scaled(scale):
        return lambda u, p, t: p[0] + p[1] * u**2 - scale * u

    p = jnp.array([[1.0, 0.0], [1.0, 2.0], [2.0, 0.0]])
    (by_scale, by_p), codes = jax.grad(total, (0, 1), has_aux=True)(2.0, p)
    assert codes.tolist() == [1, 4, 1]
    np.testing.assert_allclose(by_scale, -3.0 / 4, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(by_p[1], 0.0)
    np.testing.assert_allclose(by_p[:, 0], [0.5, 0.0, 0.5], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_rule_for_reverse_mode_only():
    @jax.custom_vjp
    def square(x):
        return x**2

    square.defvjp(lambda x: (x**2, x), lambda x, ct: (2 * x * ct,))

    def at_rest(p):
        prob = eo.ODEProblem(lambda u, p, t: p[0] - p[1] * square(u), 1.0, (0.0, 1.0), p)
        return eo.steady_state(prob).u

    p = jnp.array([2.0, 3.0])
    np.testing.assert_allclose(jax.grad(at_rest)(p), jax.grad(lambda p: jnp.sqrt(p[0] / p[1]))(p))


def test_refused():
    ens = eo.EnsembleProblem(SLOW, output_func=lambda sol, ctx: (sol.u, False))
    with pytest.raises(ValueError, match="output_func"):
        eo.steady_state(ens, trajectories=2)
    with pytest.raises(ValueError, match="saveat is given"):
        eo.steady_state(SLOW, saveat=1.0)
    with pytest.raises(TypeError, match="ODEProblem or an EnsembleProblem"):
        eo.steady_state(slow)  # pyright: ignore
    other = eo.EnsembleProblem(SLOW, lambda prob, ctx: eo.remake(prob, callback=REST))
    with pytest.raises(ValueError, match="prob_func sets a callback"):
        eo.steady_state(other, trajectories=2)
    with pytest.raises(ValueError, match="steady_state isn't there"):
        eo.steady_state(SLOW, eo.Tsit5(), engine="julia")
