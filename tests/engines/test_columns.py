"""EnsembleColumns in compiled code: the steps of the oracle on the matrix, their derivatives, and
the same bits by any number of threads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.columns import solves
from ensembleode.engines.compiled.llvm import machine
from ensembleode.ground.devices import cpu_devices

from .. import oracle
from ..marks import slow_unless
from ..problems import lorenz


def columns_of(n, tspan=(0.0, 1.0), dtype=jnp.float64):
    u0 = jnp.array([1.0, 0.5, 2.0], dtype)
    prob = eo.ODEProblem(lorenz, u0, tspan, (dtype(10.0), dtype(28.0), dtype(8 / 3)))
    shift = jnp.arange(n, dtype=dtype) / n

    def prob_func(prob, ctx):
        return eo.remake(
            prob, u0=prob.u0 + shift[ctx.index], p=(prob.p[0], 20 + shift[ctx.index], prob.p[2])
        )

    return eo.EnsembleProblem(prob, prob_func)


def solved(ens, n, engine="compiled", alg=None, **options):
    how = {"trajectories": n, "engine": engine, **options}
    return eo.solve(ens, alg or eo.Tsit5(), eo.EnsembleColumns(), **how)


def of_matrix(ens, n, alg=None, **options):
    """By the oracle: one problem, whose state is the matrix of all columns."""
    probs = [ens.make(ctx) for ctx in oracle.contexts(n)]
    u0, p = (
        jnp.stack([x.u0 for x in probs], -1),
        jax.tree.map(lambda *x: jnp.stack(x), *(x.p for x in probs)),
    )
    f = jax.vmap(ens.prob.f, (-1, 0, None), -1)
    if np.ndim(options.get("abstol")):
        options = {**options, "abstol": jnp.broadcast_to(options["abstol"][:, None], u0.shape)}
    return oracle.solve(eo.ODEProblem(f, u0, ens.prob.tspan, p), alg, **options)


WAYS = {
    "ends": {},
    "times": {"saveat": jnp.array([0.0, 0.0, 0.25, 0.251, 0.2511, 1.0])},
    "every step": {"save_everystep": True},
    "every step but the start": {"save_everystep": True, "save_start": False},
    "fixed": {"adaptive": False, "dt": 0.013, "saveat": 0.1},
    "every fixed step": {"adaptive": False, "dt": 0.013, "save_everystep": True},
    "largest": {"internalnorm": eo.MaxNorm()},
    "by component": {"abstol": jnp.array([1e-3, 1e-9, 1e-6]), "reltol": 1e-5},
    "known times": {"tstops": [0.3, 0.7001], "saveat": 0.25},
    "jumps": {"d_discontinuities": [0.0, 0.3, 0.7], "tstops": [0.3], "saveat": 0.25},
    "too few": {"maxiters": 12, "saveat": 0.05},
    "without the last stage carried": {"alg": eo.RK4(), "adaptive": False, "dt": 0.02},
    "several estimates": {"alg": eo.Dopri8(), "saveat": 0.1},
    "evaluations for dense output": {"alg": eo.Vern7(), "saveat": 0.1},
    "shortest": {"dtmin": 0.05, "reltol": 1e-12, "abstol": 1e-12},
}


# What columns have code of their own for.
QUICK = ("times", "every step", "every fixed step", "known times", "evaluations for dense output")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("way", "n"),
    [
        *(slow_unless(way in QUICK, way, 21) for way in WAYS),
        *(slow_unless(n == 1, "times", n) for n in (1, 2, 3)),
        *(slow_unless(False, "fixed", n) for n in (1, 2, 3)),
    ],
)
def test_the_steps_of_the_oracle(way, n):
    ens, options = columns_of(n), WAYS[way]
    got, expected = solved(ens, n, **options), of_matrix(ens, n, **options)
    np.testing.assert_array_equal(got.retcode, expected.retcode)
    np.testing.assert_array_equal(got.stats.naccept, expected.naccept)
    np.testing.assert_array_equal(got.stats.nreject, expected.nreject)
    # (Times of steps are chosen in single precision.)
    close = {"rtol": 1e-5, "atol": 1e-5} if "save_everystep" in options else {"rtol": 1e-7}
    for i in range(n):
        rows = np.isfinite(expected.u).all((1, 2))
        np.testing.assert_allclose(np.asarray(got[i].t)[: rows.sum()], expected.t[rows], **close)
        found = np.asarray(got[i].u)[: rows.sum()]
        np.testing.assert_allclose(found, expected.u[rows, :, i], **close)


@pytest.mark.slow
def test_single_precision_and_backwards():
    ens = columns_of(9, (0.3, 0.0), jnp.float32)
    options = {"saveat": jnp.array([0.25, 0.2, 0.0], jnp.float32), "reltol": 1e-4}
    got, expected = solved(ens, 9, **options), of_matrix(ens, 9, **options)
    assert got.u.dtype == np.float32
    np.testing.assert_array_equal(got.stats.naccept, expected.naccept)
    np.testing.assert_allclose(got.u, np.moveaxis(expected.u, -1, 0), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [{"saveat": 0.25}, {"save_everystep": True}])
@pytest.mark.parametrize("how", [{}, {"adaptive": False, "dt": 0.01}])
def test_return_codes(how, saved):
    """u' = u^2 has no solution beyond t = 1 for u(0) = 1. Each column gets the code of the
    matrix."""
    prob = eo.ODEProblem(lambda u, p, t: u * u, jnp.array([1.0]), (0.0, 2.0))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 / (1 + ctx.index)))
    got, expected = solved(ens, 3, **how, **saved), of_matrix(ens, 3, **how, **saved)
    assert (got.retcode == expected.retcode).all()
    assert expected.retcode == eo.ReturnCode.Unstable
    # (Near the end, rounding decides how many steps there are.)
    v = np.moveaxis(expected.u, -1, 0)[:, :40]
    u = np.asarray(got.u)[:, : v.shape[1]]
    np.testing.assert_array_equal(np.isnan(u), np.isnan(v))
    finite = np.abs(v) < 1e6
    np.testing.assert_allclose(
        u[finite], v[finite], rtol=1e-4 if "save_everystep" in saved else 1e-6
    )


@pytest.mark.slow
def test_the_same_bits_by_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(solves.tuning, "WORTH_SHARING", 0)
    monkeypatch.setattr(solves.tuning, "VECTORS", 1)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(cpu_devices, "threads", lambda threads=threads: threads)
        found.append(np.asarray(solved(columns_of(150), 150, saveat=0.1).u))
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def loss_of(begin, end, engine):
    """A function of shifts of the initial states, the end, own and shared parameters, and the saved
    times."""

    @jax.jit
    def loss(x):
        prob = eo.ODEProblem(lorenz, jnp.ones(3) + x[0], (begin, end + x[1]))
        weights = jnp.arange(5) / 5

        def prob_func(prob, ctx):
            return eo.remake(prob, p=(10 + x[2], 20 + x[3] * weights[ctx.index], 8 / 3))

        times = jnp.stack([(begin + end) / 2 + x[4], end + x[1]])
        options = {"saveat": times, "reltol": 1e-9, "abstol": 1e-9, "maxiters": 512}
        u = solved(eo.EnsembleProblem(prob, prob_func), 5, engine, **options).u
        return jnp.sum(jnp.sin(u))

    return loss


SHIFTS = jnp.array([0.1, 0.02, 0.3, 0.4, 0.01])


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "end"), [(0.0, 1.0), (0.15, 0.0)])
def test_gradients(begin, end):
    loss, h = loss_of(begin, end, "compiled"), 1e-5
    slopes = [(loss(SHIFTS + h * e) - loss(SHIFTS - h * e)) / (2 * h) for e in jnp.eye(5)]
    np.testing.assert_allclose(jax.grad(loss)(SHIFTS), jnp.stack(slopes), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_second_derivatives_and_vmap():
    def loss(x):
        prob = eo.ODEProblem(lorenz, jnp.ones(3) * x[0], (0.0, 0.5), (10.0, x[1], 8 / 3))
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index))
        return jnp.sum(solved(ens, 3, saveat=0.25, reltol=1e-9, abstol=1e-9, maxiters=512).u)

    x = jnp.array([1.0, 28.0])
    hessian, h = jax.hessian(loss)(x), 1e-4
    slopes = [(jax.grad(loss)(x + h * e) - jax.grad(loss)(x - h * e)) / (2 * h) for e in jnp.eye(2)]
    np.testing.assert_allclose(hessian, jnp.stack(slopes), rtol=1e-5)
    several = jnp.stack([x, 1.1 * x, 0.9 * x])
    for of in (loss, jax.grad(loss)):
        each = jnp.stack([of(y) for y in several])
        np.testing.assert_allclose(jax.vmap(of)(several), each, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "width"), [(2, 8), (2, 64), (64, 24)])
def test_a_network_with_shared_weights(size, width):
    def f(u, p, t):
        w1, b, w2 = p
        return w2 @ jnp.tanh(w1 @ u + b)

    key1, key2, key3 = jax.random.split(jax.random.key(0), 3)
    w1, w2 = jax.random.normal(key1, (width, size)), jax.random.normal(key2, (size, width))
    p = w1 / size, jnp.zeros(width), w2
    starts = jax.random.normal(key3, (33, size))

    def loss(p, engine):
        prob = eo.ODEProblem(f, starts[0], (0.0, 1.0), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index]))
        return jnp.mean(solved(ens, 33, engine, saveat=0.25, adaptive=False, dt=0.05).u ** 2)

    of_compiled, of_diffrax = (
        jax.tree.leaves(jax.value_and_grad(loss)(p, engine)) for engine in ("compiled", "diffrax")
    )
    for a, b in zip(of_compiled, of_diffrax, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


class MeanNorm(eo.AbstractNorm):
    def __call__(self, xp, values):
        return xp.mean(tuple(xp.abs(x) for x in values))


@pytest.mark.parametrize(
    ("refused", "options"),
    [
        ("explicit Runge-Kutta methods", {"alg": eo.Rodas5P()}),
        ("RMSNorm", {"internalnorm": MeanNorm()}),
        ("1,048,576", {"maxiters": 10**7}),
    ],
)
def test_refusals_name_what_is_missing(refused, options):
    with pytest.raises(ValueError, match=refused):
        solved(columns_of(2), 2, **options)


@pytest.mark.slow
def test_others_are_left_to_diffrax():
    assert solved(columns_of(2), 2, "auto", eo.Kvaerno3()).engine.name == "diffrax"
    large = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1_000), (0.0, 1.0))
    assert solved(eo.EnsembleProblem(large), 2, "auto").engine.name == "compiled"


MODES = {
    "ends": {},
    "times": {"saveat": jnp.array([0.1, 0.45, 0.5])},
    "every fixed step": {"adaptive": False, "dt": 0.05, "save_everystep": True},
    "known times": {"tstops": [0.21]},
    "jumps, largest": {"d_discontinuities": [0.21], "internalnorm": eo.MaxNorm()},
}


def of_size(n, dtype, ensemblealg, **options):
    """The solutions as a function of a scale of the initial states and of a shared number."""

    def f(u, p, t):
        return p * jnp.roll(u, 1) - u * u * (1 + t)

    def at(x):
        prob = eo.ODEProblem(f, jnp.linspace(0.5, 1.0, n, dtype=dtype), (0.0, 0.5), x[1])

        def prob_func(prob, ctx):
            return eo.remake(prob, u0=prob.u0 * x[0] * (1 + ctx.index.astype(dtype) / 10))

        ens = eo.EnsembleProblem(prob, prob_func)
        return eo.solve(ens, eo.Tsit5(), ensemblealg, trajectories=3, maxiters=256, **options).u

    return at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "registers", "mode", "dtype"),
    [
        (n, registers, mode, dtype)
        for registers, sizes in ((16, (1, 15, 16, 17, 49)), (32, (31, 32, 33, 48, 49, 130)))
        for n in sizes
        for mode in MODES
        for dtype in ("float32", "float64")
    ],
)
def test_every_number_of_components(n, registers, mode, dtype):
    """The values and gradients of trajectories by themselves. From some numbers on, states are in
    memory instead of in registers, of which there are few or many."""
    tolerance, rtol = (1e-5, 5e-5) if dtype == "float32" else (1e-9, 1e-7)
    options = {"reltol": tolerance, "abstol": tolerance, **MODES[mode]}
    x = jnp.array([1.0, 0.7], dtype)
    with machine.using(dataclasses.replace(machine.host(), registers=registers)):
        jax.clear_caches()
        columns, threads = (
            of_size(n, jnp.dtype(dtype), alg, **options)
            for alg in (eo.EnsembleColumns(), eo.EnsembleThreads())
        )
        np.testing.assert_allclose(columns(x), threads(x), rtol=rtol)

        def slopes(of):
            return jax.jit(jax.grad(lambda x: jnp.nansum(of(x) ** 2)))(x)

        np.testing.assert_allclose(slopes(columns), slopes(threads), rtol=10 * rtol)
        several = jnp.stack([x, 1.1 * x])
        each = jnp.stack([jax.jit(columns)(x) for x in several])
        np.testing.assert_allclose(jax.vmap(columns)(several), each, rtol=rtol)
    jax.clear_caches()
