"""Whole solves by the compiled engine: they have the same bits however they are run, and agree with
the oracle."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import ensembleode as eo
from ensembleode import solvers
from ensembleode.engines.compiled import solves
from ensembleode.engines.compiled.llvm import machine
from ensembleode.engines.compiled.llvm.compiler import CompileError
from ensembleode.engines.compiled.xla import call

from ... import oracle
from .machines import limited


N = 23


def lotka_volterra(u, p, t):
    x, y = u
    return jnp.stack([p[0] * x - x * y, x * y - p[1] * y * (1 + 0.1 * jnp.sin(t))])


def numbers(seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {
        "u0": rng.uniform(0.5, 2.0, (N, 2)).astype(dtype),
        "p": rng.uniform(0.5, 3.0, (N, 2)).astype(dtype),
        "t0": rng.uniform(-1.0, 1.0, N).astype(dtype),
        "span": rng.choice([-1.0, 0.0, 0.3, 2.0, 4.0], N).astype(dtype),
        "tol": 10.0 ** rng.uniform(-8, -3, N).astype(dtype),
    }


def ensemble(x, own_spans=True):
    x = {k: jnp.asarray(v) for k, v in x.items()}
    prob = eo.ODEProblem(lotka_volterra, x["u0"][0], (0.0, 2.0), x["p"][0])

    def prob_func(prob, ctx):
        i = ctx.index
        own = {"u0": x["u0"][i], "p": x["p"][i], "abstol": x["tol"][i], "reltol": x["tol"][i]}
        if own_spans:
            own["tspan"] = (x["t0"][i], x["t0"][i] + x["span"][i])
        return eo.remake(prob, **own)

    return eo.EnsembleProblem(prob, prob_func)


def solved(ens, alg=None, n=N, ensemblealg=None, **options):
    ensemblealg = ensemblealg or eo.EnsembleThreads(1)
    alg = alg or eo.Tsit5()
    return eo.solve(ens, alg, ensemblealg, trajectories=n, engine="compiled", **options)


# Of the components, with numbers (which aren't combined with each other: Python would round).
NUMBERS = (-1.0, -0.7, 0.0, 0.3, 0.5, 1.0, 2.0, 3.0, 7.1, 1e-3)
OPERATIONS = {
    "add": jnp.add,
    "sub": lambda x, y: y - x,
    "mul": jnp.multiply,
    "div": lambda x, y: x / (1.5 + y * y),
    "over": lambda x, y: jnp.where(y == 0, x, x / jnp.where(y == 0, 1.0, y)),
    "max": jnp.maximum,
    "where": lambda x, y: jnp.where(x > y, x, 0.1 * x),
    "soft": lambda x, y: jax.nn.softplus(-jnp.abs(x)) * y,
    "power": lambda x, y: jnp.abs(x) ** (0.5 + y * y),
}
expressions = st.recursive(
    st.sampled_from((0, 1)),
    lambda inner: st.tuples(
        st.sampled_from(sorted(OPERATIONS)), inner, st.one_of(inner, st.sampled_from(NUMBERS))
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
@settings(max_examples=2, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_numbers_may_be_written_or_closed_over_or_parameters(size, data):
    """The bits are the same, also those of gradients."""
    trees = data.draw(st.lists(expressions, min_size=size, max_size=size))

    def value(tree, u, number):
        if isinstance(tree, float):
            return number[tree]
        if isinstance(tree, int):
            return u[tree]
        name, *operands = tree
        return OPERATIONS[name](*(value(x, u, number) for x in operands))

    def run(how):
        arrays = {x: jnp.asarray(x) for x in NUMBERS}
        written = dict(zip(NUMBERS, NUMBERS, strict=True))

        def f(u, p, t):
            number = {"written": written, "closed over": arrays, "parameters": p["numbers"]}[how]
            return p["scale"] * jnp.tanh(jnp.stack([value(x, u, number) for x in trees]))

        def end(u0):
            prob = eo.ODEProblem(f, u0, (0.0, 1.0), {"scale": 0.3, "numbers": arrays})
            return eo.solve(prob, eo.Euler(), dt=0.1, engine="compiled").u[-1]

        u0 = jnp.linspace(-1.0, 2.0, size)
        return end(u0) if size < 8 else jax.grad(lambda u0: end(u0).sum())(u0)

    expected = run("written")
    for how in ("closed over", "parameters"):
        np.testing.assert_array_equal(run(how), expected)


def same_bits(sim, other, rows=slice(None)):
    np.testing.assert_array_equal(np.asarray(sim.u)[rows], np.asarray(other.u))
    np.testing.assert_array_equal(np.asarray(sim.t)[rows] if sim.t.ndim == 2 else sim.t, other.t)
    np.testing.assert_array_equal(np.asarray(sim.retcode)[rows], other.retcode)
    np.testing.assert_array_equal(np.asarray(sim.stats.naccept)[rows], other.stats.naccept)
    np.testing.assert_array_equal(np.asarray(sim.stats.nreject)[rows], other.stats.nreject)


FIXED = {"adaptive": False, "dt": 0.05, "abstol": 1e-3, "reltol": 1e-3}
SAVINGS = [{}, {"save_everystep": True}, {"saveat": 0.21}]


@pytest.mark.slow
@pytest.mark.parametrize("saving", SAVINGS, ids=["ends", "steps", "times"])
@pytest.mark.parametrize("steps", [{}, FIXED], ids=["adaptive", "fixed"])
def test_the_same_bits_at_every_width(steps, saving, monkeypatch):
    """Lanes are refilled in another order then, and trajectories fail in between."""
    x = numbers()
    x["u0"][[3, 11]] = [[np.nan, 1.0], [1e200, 1e200]]
    alg = eo.Bosh3() if steps else eo.Tsit5()
    found = solved(ensemble(x), alg, **steps, **saving)
    assert set(np.unique(found.retcode)) > {1}
    for width in (1, 8, 32):
        asked = []
        monkeypatch.setattr(
            solves, "width_of", lambda *_, width=width, asked=asked, **__: asked.append(0) or width
        )
        # (Another number of steps is another program.)
        same_bits(found, solved(ensemble(x), alg, maxiters=10_000 + width, **steps, **saving))
        assert asked


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([np.float32, np.float64]))
def test_the_same_bits_in_every_order(seed, dtype):
    x = numbers(seed, dtype)
    found = solved(ensemble(x))
    order = np.random.default_rng(seed).permutation(N)
    moved = {k: v[order] for k, v in x.items()}
    same_bits(found, solved(ensemble(moved)), order)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alg", [eo.EnsembleThreads(1), eo.EnsembleSerial(), eo.EnsembleGPUArray()])
@pytest.mark.parametrize("batch_size", [None, 1, 5])
def test_the_same_bits_wherever_they_are_solved(alg, batch_size):
    x = numbers(1)
    found = solved(ensemble(x), saveat=0.3)
    same_bits(found, solved(ensemble(x), saveat=0.3, ensemblealg=alg, batch_size=batch_size))


def test_alone_as_among_others():
    x = numbers(2)
    found = solved(ensemble(x))
    for i in (0, 7, 22):
        one = {k: v[[i]] for k, v in x.items()}
        same_bits(found, solved(ensemble(one), n=1), [i])


QUICK = {eo.RK4, eo.Tsit5, eo.Vern7}
METHODS = [
    pytest.param(cls(), marks=() if cls in QUICK else pytest.mark.slow)
    for cls in vars(solvers).values()
    if hasattr(cls, "tableau")
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "saving",
    [
        pytest.param(SAVINGS[0], marks=pytest.mark.slow, id="ends"),
        pytest.param(SAVINGS[1], marks=pytest.mark.slow, id="steps"),
        pytest.param(SAVINGS[2], id="times"),
    ],
)
@pytest.mark.parametrize("alg", METHODS, ids=lambda x: type(x).__name__)
def test_as_the_oracle(alg, saving):
    """The same steps of every method, and so the same numbers but for rounding."""
    x = numbers(3)
    if alg.method.order == 2:  # (Of which the oracle takes minutes for many digits.)
        x["tol"] = np.maximum(x["tol"], 1e-4)
    steps = {} if alg.adaptive else FIXED
    found = solved(ensemble(x), alg, **steps, **saving)
    expected = oracle.solve_each(ensemble(x), alg, n=N, **steps, **saving)
    evaluations = alg.method.evaluations(found.stats.naccept + found.stats.nreject)
    of_first_step = 0 if "dt" in steps else 2
    np.testing.assert_array_equal(found.stats.nf, evaluations + of_first_step)
    # (Step sizes have single precision, and the states that are saved at every step theirs. The
    # first error estimate of Vern8 is rounding, which decides the size of the second step.)
    atol = 0.2 if isinstance(alg, eo.Vern8) else 2e-3
    close = {"rtol": 1e-4, "atol": atol} if "save_everystep" in saving else {"rtol": 1e-6}
    oracle.assert_same_steps(found, expected, **close)


CODES = eo.ReturnCode


def test_fixed_steps_of_states_whose_sum_overflows():
    """They are finite, and succeed; their neighbours fail."""
    prob = eo.ODEProblem(lambda u, p, t: p * jnp.ones(2), [1.5e308, 1.5e308], (0.0, 1.0), 0.0)
    rates = jnp.array([0.0, 1e308, 0.0])
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=rates[ctx.index]))
    sim = solved(ens, eo.RK4(), n=3, adaptive=False, dt=0.125)
    success, unstable = CODES.Success.value, CODES.Unstable.value
    np.testing.assert_array_equal(sim.retcode, [success, unstable, success])
    # (The largest number is 1.7977e308.)
    np.testing.assert_array_equal(sim.stats.naccept, [8, 2, 8])
    np.testing.assert_array_equal(sim.u[0, -1], 1.5e308)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3"])
def test_lesser_machines(level):
    """Without fused operations the last bits are others, and nothing else."""
    if machine.host().architecture != "x86_64":
        pytest.skip("levels are those of x86-64")
    x = numbers(4)
    found = solved(ensemble(x))
    with machine.using(limited(level)):
        jax.clear_caches()
        other = solved(ensemble(x))
    jax.clear_caches()
    np.testing.assert_array_equal(found.retcode, other.retcode)
    np.testing.assert_allclose(found.u, other.u, rtol=1e-7)


@pytest.mark.slow
def test_vmap_makes_one_call_wider():
    """Chains times subjects are trajectories of one call, and each has the bits of its own."""
    x = numbers(5)
    factors = jnp.array([0.9, 1.0, 1.1])

    def of(factor):
        scaled = {**x, "p": jnp.asarray(x["p"]) * factor}
        return solved(ensemble(scaled, own_spans=False), saveat=jnp.array([0.5, 2.0])).u

    wide = jax.jit(jax.vmap(of))(factors)
    text = jax.jit(jax.vmap(of)).lower(factors).as_text()
    assert text.count("custom_call @ensembleode_") == 1
    for i, factor in enumerate(factors):
        np.testing.assert_array_equal(wide[i], jax.jit(of)(factor))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alone", [True, False])
def test_what_llvm_refuses_is_solved_by_diffrax(alone, monkeypatch, caplog):
    """By itself with engine="auto", which is said; asked for, the engine raises."""

    made = call.compiled

    def refuse(text, machine):
        if "@solve(" not in text:  # what diffrax needs, too, to be stopped
            return made(text, machine)
        raise CompileError(f"LLVM can't select this (alone: {alone})")

    monkeypatch.setattr(call, "compiled", refuse)
    rate = np.random.default_rng(0).uniform()  # of a program that no other test has compiled
    prob = eo.ODEProblem(lambda u, p, t: -p * u + rate * jnp.cos(rate * u), [1.0], (0.0, 1.0), 2.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=prob.p + ctx.index))

    def solve(**options):
        return eo.solve(prob, **options) if alone else eo.solve(ens, trajectories=5, **options)

    with pytest.raises(CompileError, match="can't select this"):
        solve(engine="compiled")
    with caplog.at_level("INFO", "ensembleode"):
        found = solve()
    assert found.engine.name == "diffrax"
    assert "can't select this" in caplog.text
    np.testing.assert_array_equal(found.u, solve(engine="diffrax").u)
