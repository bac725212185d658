"""Large states in the compiled engine: arrays in memory, with loops over their components."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo
from ensembleode.engines.compiled import kernel
from ensembleode.engines.compiled.steps import description, equations


N = 6
ADAPTIVE = {"abstol": 1e-7, "reltol": 1e-7}
FIXED = {"adaptive": False, "dt": 0.05}
slow = pytest.mark.slow


def lorenz96(u, p, t):
    return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u + p * (1 + 0.1 * jnp.sin(t))


def ensemble(u0, p, field=lorenz96, end=0.5, **options):
    """The trajectories that begin in each row of `u0`, with a row of `p` each."""
    prob = eo.ODEProblem(field, u0[0], (0.0, end), p[0])

    def prob_func(prob, ctx):
        return eo.remake(prob, u0=u0[ctx.index], p=p[ctx.index])

    options = {"trajectories": len(u0), "engine": "compiled", **options}
    where = options.pop("where", eo.EnsembleThreads(1))
    alg = options.pop("alg", eo.Tsit5())
    return eo.solve(eo.EnsembleProblem(prob, prob_func), alg, where, **options)


def numbers(size, dtype=np.float64, n=N):
    rng = np.random.default_rng(size)
    u0 = 8 + rng.normal(size=(n, size))
    return jnp.asarray(u0, dtype), jnp.asarray(rng.uniform(5, 8, n), dtype)


def with_gradients(u0, p, **options):
    """Of the limit on steps: solutions, counts and gradients."""

    def run(maxiters):
        def loss(u0, p):
            sim = ensemble(u0, p, maxiters=maxiters, **options)
            u = jnp.nan_to_num(sim.u[:, :100])
            return jnp.sum(u**2), (u, sim.stats.naccept, sim.stats.nreject)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(u0, p)

    return run


LIMITS = itertools.count(1000)


def written_out_and_in_memory(run, monkeypatch):
    """The leaves of `run(maxiters)` with a variable for each component, and with an array of them.
    Fields are functions of their own in both. The limits on steps, which none reaches, differ
    every time, as JAX would not trace one and the same solve again."""
    monkeypatch.setattr(equations.tuning, "LONGEST_INLINED", 0)
    solving, seen = kernel.solving, []

    def noted(d):
        seen.append(d.in_memory)
        return solving(d)

    monkeypatch.setattr(kernel, "solving", noted)
    found = []
    for least in (10**6, 1):
        monkeypatch.setattr(description, "least_in_memory", lambda least=least: least)
        found.append(jax.tree.leaves(run(next(LIMITS))))
    assert set(seen) == {False, True}, "both kinds of code ran"
    return found


CASES = {
    "ends": ADAPTIVE,
    "times": {**ADAPTIVE, "saveat": np.linspace(0, 0.5, 4)},
    "fixed": FIXED,
    "every step": {**ADAPTIVE, "save_everystep": True},
    "float32": {"abstol": 1e-4, "reltol": 1e-4, "saveat": 0.2},
    "tolerances": {"abstol": np.geomspace(1e-8, 1e-5, 5), "reltol": 1e-5},
    "largest": {**ADAPTIVE, "internalnorm": eo.MaxNorm()},
    "stops": {**ADAPTIVE, "tstops": [0.2], "d_discontinuities": [0.3], "saveat": 0.25},
    "own steps": {**FIXED, "alg": eo.RK4(), "saveat": np.linspace(0, 0.5, 3)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "times" else slow) for x in CASES]
)
def test_the_bits_of_code_that_is_written_out(name, monkeypatch):
    """As the order of operations is the same."""
    run = with_gradients(
        *numbers(5, np.float32 if name == "float32" else np.float64), **CASES[name]
    )
    apart, together = written_out_and_in_memory(run, monkeypatch)
    for x, y in zip(apart, together, strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isfinite(apart[0])
    assert np.all(apart[2] > 3), "some steps were taken"


@slow
@settings(max_examples=4, deadline=None)
@given(
    size=st.integers(1, 9),
    alg=st.sampled_from([eo.Tsit5(), eo.Bosh3(), eo.BS5(), eo.Dopri5(), eo.Vern7(), eo.Vern9()]),
    dtype=st.sampled_from([np.float32, np.float64]),
    adaptive=st.booleans(),
    saves=st.booleans(),
)
def test_any_size_and_method_has_the_bits_of_code_that_is_written_out(
    size, alg, dtype, adaptive, saves
):
    u0, p = numbers(size, dtype)
    steps = {"abstol": 1e-5, "reltol": 1e-5} if adaptive else FIXED
    options = {**steps, "alg": alg, **({"saveat": 0.2} if saves else {})}
    run = with_gradients(u0, p, **options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for x, y in zip(*written_out_and_in_memory(run, monkeypatch), strict=True):
            np.testing.assert_array_equal(x, y)


RECORDED = {
    "times": {**ADAPTIVE, "saveat": 0.2},
    "fixed": {**FIXED, "saveat": 0.2},
    "fixed ends": FIXED,
    "last stage is another": {**ADAPTIVE, "alg": eo.BS5(), "saveat": 0.2},
}


@pytest.mark.slow
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "times" else slow) for x in RECORDED]
)
def test_recorded_stages_give_the_same_gradient(name, linear, monkeypatch):
    """With many shared parameters the stages are recorded, and the residuals of a field that has
    some."""
    rng = np.random.default_rng(1)
    u0, first = jnp.asarray(rng.normal(size=(N, 6))), jnp.asarray(rng.normal(size=(9, 6)))
    second = jnp.asarray(rng.normal(size=(6, 9)) / 9)

    def field(u, p, t):
        inner = p[0] @ u
        return p[1] @ (inner if linear else jnp.tanh(inner + t))

    def run(maxiters):
        def loss(u0, p):
            prob = eo.ODEProblem(field, u0[0], (0.0, 0.5), p)
            ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
            options = {"maxiters": maxiters, **RECORDED[name]}
            alg, where = options.pop("alg", eo.Tsit5()), eo.EnsembleThreads(1)
            u = eo.solve(ens, alg, where, trajectories=N, engine="compiled", **options).u
            return jnp.sum(jnp.nan_to_num(u) ** 2), u

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(u0, (first, second))

    # (Products that are written out are added up in another order.)
    apart, together = written_out_and_in_memory(run, monkeypatch)
    for x, y in zip(apart, together, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)
    assert all(np.any(x) for x in apart)


def test_a_large_linear_system_and_its_gradient():
    """Each component decays by itself, so that the solution and its gradient are known."""
    size, end = 150, 0.7
    rates = np.linspace(0.1, 3.0, size)
    starts = 1 + np.arange(3 * size).reshape(3, size) / size

    def solve(u0, p):
        return ensemble(u0, p, lambda u, p, t: -p * u, end, saveat=np.array([0.3, end]), **TIGHT).u

    u0, p = jnp.asarray(starts), jnp.asarray(np.tile(rates, (3, 1)))
    decays = np.exp(-rates * np.array([0.3, end])[:, None])
    np.testing.assert_allclose(solve(u0, p), starts[:, None] * decays, rtol=1e-8)
    to_u0, to_p = jax.grad(lambda u0, p: jnp.sum(solve(u0, p)), argnums=(0, 1))(u0, p)
    np.testing.assert_allclose(to_u0, np.tile(decays.sum(0), (3, 1)), rtol=1e-7)
    slopes = (np.array([0.3, end])[:, None] * decays).sum(0)
    np.testing.assert_allclose(to_p, -starts * slopes, rtol=1e-7)


TIGHT = {"abstol": 1e-10, "reltol": 1e-10}


@slow
def test_the_code_does_not_grow_with_the_state(monkeypatch):
    """The kernels of 60 and of 6,000 components differ in numbers alone."""
    solving, described = kernel.solving, []

    def noted(d):
        described.append(d)
        return solving(d)

    monkeypatch.setattr(kernel, "solving", noted)
    for size in (60, 6000):
        u0, p = numbers(size, n=2)
        jax.make_jaxpr(lambda u0, p: ensemble(u0, p, saveat=0.2).u)(u0, p)
    small, large = described
    for make in (solving, kernel.pulling_back):
        assert len(make(large)[0]) < 1.05 * len(make(small)[0])


@pytest.mark.slow
def test_a_failing_neighbour_changes_nothing():
    """The other lanes of a trajectory that leaves every bound have the bits that they have without
    it."""
    size = 60

    def field(u, p, t):
        return p * u**2 - jnp.roll(u, 1)

    u0 = jnp.asarray(np.linspace(0.5, 1.0, 5)[:, None] * np.ones(size))
    good = jnp.full(5, -0.3)
    sims = [
        ensemble(u0, p, field, 2.0, saveat=0.5, **ADAPTIVE) for p in (good, good.at[2].set(9.0))
    ]
    assert sims[1].retcode[2] != sims[0].retcode[2]
    for i in (0, 1, 3, 4):
        np.testing.assert_array_equal(sims[0].u[i], sims[1].u[i])
        assert sims[1].retcode[i] == eo.ReturnCode.Success


@pytest.mark.slow
def test_as_many_steps_as_can_be_counted():
    """The memory for checkpoints of a gradient doesn't grow with the largest number of steps."""
    u0, p = numbers(50)

    def loss(u0, maxiters):
        sim = ensemble(u0, p, save_everystep=False, maxiters=maxiters, **ADAPTIVE)
        return jnp.sum(sim.u[:, -1] ** 2)

    found = jax.grad(loss)(u0, 2**31 - 2)
    np.testing.assert_array_equal(found, jax.grad(loss)(u0, 1000))
