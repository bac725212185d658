"""Reverse mode, which is exact for the steps taken, by all that a solve depends on."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import ensembleode as eo

from ...marks import slow_unless
from ...problems import lotka_volterra
from .test_convergence import METHODS


TIGHT = {"abstol": 1e-12, "reltol": 1e-12}
N = 3
TIMES = np.array([0.0, 0.2, 0.21, 0.22, 0.7, 1.0])
OWN_TIMES = np.stack([TIMES, np.sqrt(TIMES), TIMES**2])
SAVING = {
    "ends": {},
    "end": {"save_start": False},
    "times": {"saveat": TIMES},
    "own times": {"saveat": OWN_TIMES},
    "steps": {"save_everystep": True, "maxiters": 64},
}
X = {
    "u0": jnp.array([1.0, 1.5]),
    "p": jnp.array([1.5, 1.0, 3.0, 1.0]),
    "own": jnp.array([[0.1, -0.2], [0.3, 0.0], [-0.1, 0.5]]),
    "closure": jnp.array([0.7, -0.4]),
}


def solve(x, saving, alg=None, engine="compiled", span=(0.0, 1.0), n=N, **options):
    """Of u0, shared parameters, those of each trajectory and a closure, all varied."""

    def f(u, p, t):
        shared, own = p
        return lotka_volterra(u, shared, t) + own * jnp.sin(x["closure"] * t)

    def prob_func(prob, ctx):
        own = x["own"][ctx.index]
        return eo.remake(prob, u0=prob.u0 * (1 + ctx.index / 20), p=(x["p"], own))

    saving = dict(saving)
    if "saveat" in saving:
        times = jnp.asarray(saving["saveat"])
        saving["saveat"] = span[0] + (span[1] - span[0]) * times
    prob = eo.ODEProblem(f, x["u0"], (span[0], span[1]), (x["p"], x["own"][0]))
    ens = eo.EnsembleProblem(prob, prob_func, saving.pop("output_func", None))
    return eo.solve(ens, alg, trajectories=n, engine=engine, **saving, **options)


def weighed(u):
    """A loss in which every number counts differently, and NaN, where nothing was saved, not."""
    weights = jnp.cos(jnp.arange(u.size, dtype=u.dtype)).reshape(u.shape)
    return jnp.sum(weights * jnp.sin(jnp.where(jnp.isnan(u), 0.0, u)))


def difference(fun, x, v, h=1e-3):
    """The derivative of `fun` at `x` along `v`, by a central difference of sixth order."""

    def at(k):
        return float(fun(jax.tree.map(lambda a, b: a + k * h * b, x, v)))

    return (45 * (at(1) - at(-1)) - 9 * (at(2) - at(-2)) + (at(3) - at(-3))) / (60 * h)


def directions(x, count=3):
    flat, unravel = ravel_pytree(x)
    rng = np.random.default_rng(0)
    for _ in range(count):
        v = rng.normal(size=flat.shape)
        yield unravel(jnp.asarray(v / np.linalg.norm(v)))


def dot(x, y):
    return sum(float(jnp.vdot(a, b)) for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True))


def check(fun, gradient, x, rtol=1e-7):
    norm = np.sqrt(dot(gradient, gradient))
    assert norm > 0.01
    for v in directions(x):
        # Relative to the derivative itself, or to what it is in other directions.
        scale = max(abs(dot(gradient, v)), norm / 10)
        assert abs(dot(gradient, v) - difference(fun, x, v)) < rtol * scale


def assert_close(tree, other, rtol=1e-9):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * (1e-30 + np.abs(b).max()))


@functools.partial(jax.jit, static_argnums=(0, 1))
def fixed(alg, saving, x, span):
    options = {"dt": 1 / 16, "adaptive": False}
    return jax.value_and_grad(
        lambda x: weighed(solve(x, SAVING[saving], alg(), span=span, **options).u)
    )(x)


def check_fixed(alg, saving, span):
    gradient = fixed(alg, saving, X, span)[1]
    check(lambda x: fixed(alg, saving, x, span)[0], gradient, X)
    for name, part in gradient.items():
        assert np.all(np.abs(part) > 1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "alg",
    METHODS,
    ids=lambda cls: cls.__name__,
)
def test_every_method(alg):
    """Whatever its stages, and those of its interpolant; forwards and backwards in time."""
    for span in ((0.0, 1.0), (1.0, 0.0)):
        check_fixed(alg, "times", np.array(span))


@pytest.mark.parametrize(
    "saving", [slow_unless(name == "ends", name) for name in SAVING if name != "times"]
)
def test_every_kind_of_saving(saving):
    for span in ((0.0, 1.0), (1.0, 0.0)):
        check_fixed(eo.Tsit5, saving, np.array(span))


@functools.cache
def reference(saving, span=(0.0, 1.0)):
    """The gradient by diffrax' own adjoint."""

    def loss(x):
        how = {"alg": eo.Dopri8(), "engine": "diffrax", "maxiters": 512, **TIGHT}
        return weighed(solve(x, SAVING[saving], span=span, **how).u)

    return jax.jit(jax.grad(loss))(X)


@pytest.mark.slow
def test_rejected_steps():
    """They are run again in reverse, and count for nothing."""

    def run(x):
        return solve(x, SAVING["times"], dt=0.5, abstol=1e-10, reltol=1e-10)

    sim = jax.jit(run)(X)
    assert np.all(np.asarray(sim.stats.nreject) > 0)
    gradient = jax.jit(jax.grad(lambda x: weighed(run(x).u)))(X)
    assert_close(gradient, reference("times"), 1e-6)


GOOD = jnp.array([[1.0, -0.5], [0.3, 0.2], [-1.0, 0.8], [0.5, 0.5]])


def test_a_failed_trajectory_pulls_back_nothing_though_its_cotangent_is_nan():
    """A loss that does not mask it is NaN, but the gradient is that of the others."""
    u0s = jnp.array([0.5, 3.0, 0.7])

    def loss(u0s, p, mask):
        prob = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.zeros(1), (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0s[ctx.index][None]))
        u = eo.solve(ens, trajectories=3, engine="compiled", **TIGHT).u[:, -1, 0]
        return jnp.sum(jnp.where(mask & jnp.isnan(u), 0.0, u))

    one = jnp.array(1.0)
    (masked, by_p), value = (
        jax.jit(jax.grad(loss, (0, 1)))(u0s, one, True),
        loss(u0s, one, False),
    )
    assert np.isnan(value)
    good = np.array([0.5, 0.7])
    np.testing.assert_allclose(masked, [1 / (1 - 0.5) ** 2, 0, 1 / (1 - 0.7) ** 2], rtol=1e-9)
    np.testing.assert_allclose(by_p, np.sum(good**2 / (1 - good) ** 2), rtol=1e-9)
    assert_close(jax.jit(jax.grad(loss, (0, 1)))(u0s, one, False), (masked, by_p))


@pytest.mark.slow
@pytest.mark.parametrize("saving", ["times", "steps"])
def test_what_ends_at_t1_moves_with_it(saving):
    """A grid over a span that is varied: its first state stays u0, its last is that at t1. So is
    the end of the last step, where every step is saved."""

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        prob = eo.ODEProblem(lotka_volterra, X["u0"], (x["t0"], x["t1"]), X["p"])
        how = {"saveat": jnp.linspace(x["t0"], x["t1"], 5)}
        if saving == "steps":
            how = {"save_everystep": True, "maxiters": 256}
        sol = eo.solve(prob, engine="compiled", **how, **TIGHT)
        return weighed(sol.u if saving == "times" else sol.u[sol.length - 1])

    x = {"t0": jnp.array(0.1), "t1": jnp.array(1.2)}
    check(lambda x: loss(x)[0], loss(x)[1], x, rtol=1e-6)


@pytest.mark.parametrize("saving", ["ends", "times"])
def test_saved_times_are_differentiated(saving):
    """A loss in sim.t, of times that differ by trajectory and are varied."""

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        prob = eo.ODEProblem(lotka_volterra, X["u0"], (0.0, 1.0), X["p"])

        def prob_func(prob, ctx):
            if saving == "ends":
                return eo.remake(prob, tspan=(0.0, x[ctx.index]))
            return eo.remake(prob, saveat=x[ctx.index] * jnp.array([0.5, 1.0]))

        sim = eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=3, engine="compiled")
        return jnp.sum(jnp.sin(sim.t))

    x = jnp.array([0.4, 0.6, 0.9])
    check(lambda x: loss(x)[0], loss(x)[1], x, rtol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dt", [0.1, 0.125, 0.3, None])
def test_the_end_moves_in_forward_mode(dt):
    """With the step that arrives there: cut short or not, or there but for rounding."""
    how = {} if dt is None else {"dt": dt}
    how |= {"alg": eo.RK4() if dt else eo.Tsit5(), "sensealg": eo.ForwardDiffSensitivity()}

    def end(t0, t1):
        prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.5]), (t0, t1), 0.5)
        return eo.solve(prob, engine="compiled", save_start=False, **how).u[0, 0]

    for t1 in (1.0, 1e-4):
        by_t0, by_t1 = jax.jacfwd(end, (0, 1))(0.0, t1)
        slope = -0.75 * np.exp(-t1 / 2)
        np.testing.assert_allclose([by_t0, by_t1], [-slope, slope], rtol=1e-3)


@pytest.mark.slow
def test_steps_are_constants_in_both_modes():
    def end(dt, sensealg):
        prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.5]), (0.0, 1.0), 0.5)
        return eo.solve(prob, eo.Euler(), dt=dt, adaptive=False, sensealg=sensealg).u[-1, 0]

    assert jax.grad(end)(0.1, eo.ReplayAdjoint()) == 0
    assert jax.jacfwd(end)(0.1, eo.ForwardDiffSensitivity()) == 0


def small(x, **options):
    return solve(x, SAVING["times"], abstol=1e-9, reltol=1e-9, **options).u


@pytest.mark.parametrize("wrap", [slow_unless(False, lambda f: f, id="eager"), jax.jit])
def test_the_other_mode_is_an_error_with_the_remedy(wrap):
    continuous = functools.partial(small, sensealg=eo.GaussAdjoint())
    with pytest.raises(TypeError, match=r"sensealg=ForwardDiffSensitivity\(\) for forward mode"):
        jax.jvp(wrap(continuous), (X,), (X,))
    with pytest.raises(TypeError, match="for first derivatives, in reverse mode"):
        jax.grad(lambda x: weighed(jax.grad(lambda x: weighed(wrap(continuous)(x)))(x)["p"]))(X)
    forward = functools.partial(small, sensealg=eo.ForwardDiffSensitivity())
    with pytest.raises(TypeError, match="Leave sensealg out for reverse mode"):
        jax.grad(lambda x: wrap(forward)(x).sum())(X)
