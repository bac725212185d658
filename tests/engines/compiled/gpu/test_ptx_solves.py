"""Whole solves and gradients by the PTX that a GPU would get, launched as XLA would. The results
have the same bits as those of the CPU's kernels, since both round in the same places. (Only the
sums of the cotangents of many shared parameters have another order on a CPU.)"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import solves
from ensembleode.engines.compiled.llvm import machine
from ensembleode.engines.compiled.steps import description
from ensembleode.engines.compiled.xla import launch

from ....marks import slow_unless
from ....problems import failing, lorenz, mlp, network
from ...methods import SOLVERS
from ...standard_problems import ensemble as ensemble_of, PROBLEMS
from . import test_gradients
from .test_compiled import as_single, every_function, METHODS


# (A CPU without fused operations rounds in more places.)
TOLERANCE = 0.0 if machine.host().has_fma else 1e-9
ARCHS = ("sm_75", "sm_90", "sm_100")


def by_ptx(solve):
    """What `solve` gives with the kernels of a GPU, and with those of the CPU."""
    return solve(eo.EnsembleGPUKernel()), solve(eo.EnsembleSerial(), engine="compiled")


def same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        size = float(np.max(np.abs(np.nan_to_num(b)), initial=0.0))
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * size)


def numbers(sim):
    events = () if sim.events is None else dataclasses.astuple(sim.events)
    return sim.u, sim.t, sim.retcode, sim.lengths, dataclasses.astuple(sim.stats), events


@pytest.fixture
def arch(request, monkeypatch, on_ptx):
    monkeypatch.setattr(launch, "arch_here", lambda: request.param)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def rising(prob, ctx):
    which = ctx.index % 7
    return eo.remake(prob, p=prob.p.at[1].set(which * 3.0), u0=prob.u0 + 0.1 * which)


def rising_lorenz(dtype=np.float64):
    u0, p = jnp.array([1.0, 0, 0], dtype), jnp.array([10.0, 28.0, 8 / 3], dtype)
    return eo.EnsembleProblem(eo.ODEProblem(lorenz, u0, (0.0, 1.0), p), rising)


def shrunk(integrator, mask=None):
    """Nearer to the origin; with several conditions, by which of them it is."""
    by = 0.9 if mask is None else 0.9 - 0.01 * mask[0].astype(integrator.u.dtype)
    return eo.remake(integrator, u=by * integrator.u)


EVENTS = eo.CallbackSet(
    eo.ContinuousCallback(lambda u, t, integrator: u[0] - 3.0, shrunk, None),
    eo.VectorContinuousCallback(lambda u, t, integrator: u[:2] - 0.7, shrunk, 2),
    eo.DiscreteCallback(lambda u, t, integrator: (u[0] < 0.7) & (t > 0.8), eo.terminate),
)
LATE = np.arange(3) > np.arange(7)[:, None] % 4
OPTIONS = {
    "ends": {},
    "end": {"save_start": False},
    "times": {"saveat": [0.0, 0.1, 0.1, 0.77, 1.0]},
    "own times": {"saveat": np.linspace(0, 0.9, 21).reshape(7, 3)},
    "steps": {"save_everystep": True},
    "fixed": {"adaptive": False, "dt": 0.05, "saveat": 0.3},
    "fixed, some components": {"adaptive": False, "dt": 0.05, "saveat": 0.3, "save_idxs": [2, 0]},
    "fixed, every step": {"adaptive": False, "dt": 0.1, "save_everystep": True},
    "first step": {"dt": 1e-3},
    "tolerances of components": {"abstol": np.array([1e-9, 1e-6, 1e-7]), "reltol": 1e-8},
    "non-FSAL": {"alg": eo.Vern7(), "saveat": 0.2},
    "implicit": {"alg": eo.Rodas5P(), "saveat": 0.2},
    "switching": {
        # (Soon, so that both methods make steps.)
        "alg": eo.AutoTsit5(eo.Rosenbrock23(), maxstiffstep=1, nonstifftol=0.2),
        "saveat": 0.2,
    },
    "implicit, FSAL": {"alg": eo.Rosenbrock23(), "save_everystep": True},
    "series of several lengths": {
        "saveat": np.where(LATE, np.inf, np.arange(21).reshape(7, 3) / 21)
    },
    "known times": {
        "tstops": np.where(LATE, np.inf, np.arange(21).reshape(7, 3) / 21),
        "d_discontinuities": [0.4, 0.0, 0.1],
        "saveat": 0.2,
    },
    "events": {"callback": EVENTS, "saveat": 0.2},
    "bounds of steps": {"saveat": 0.25, "dtmax": 0.03},
    "another controller": {"stepsize_controller": eo.PIDController(0.6, -0.2)},
}
QUICK = {
    ("known times", "float32"),
    ("times", "float64"),
    ("own times", "float32"),
    ("steps", "float32"),
    ("fixed", "float64"),
    ("implicit", "float64"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [slow_unless((x, d) in QUICK, x, d) for x in OPTIONS for d in ("float32", "float64")],
)
def test_options(on_ptx, name, dtype):
    options = dict(OPTIONS[name])
    alg = options.pop("alg", eo.Tsit5())
    ens = rising_lorenz(dtype)
    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, alg, *a, trajectories=7, **options, **k))
    assert got.u.dtype == dtype
    assert got.successful.all()
    assert got.events is None or set(np.ravel(got.events.which)) >= {1, 2}
    same(numbers(got), numbers(expected))


FIXED, ADAPTIVE = {"dt": 0.05}, {"abstol": 0.1, "reltol": 0.1}


@pytest.mark.parametrize(
    ("alg", "dtype", "steps"),
    [
        pytest.param(eo.EM(), "float32", FIXED, id="EM-float32"),
        slow_unless(False, eo.SOSRI(), "float32", FIXED, id="SOSRI-float32"),
        slow_unless(False, eo.SOSRI(), "float64", FIXED, id="SOSRI-float64"),
        slow_unless(False, eo.SRIW1(), "float32", ADAPTIVE, id="adaptive SRIW1-float32"),
        slow_unless(False, eo.SRIW1(), "float64", ADAPTIVE, id="adaptive SRIW1-float64"),
    ],
)
def test_noise(on_ptx, alg, dtype, steps):
    prob = rising_lorenz(dtype).prob
    noisy = eo.SDEProblem(lorenz, lambda u, p, t: u / 10, prob.u0, (0.0, 0.2), prob.p)
    ens, options = eo.EnsembleProblem(noisy, rising), {"trajectories": 5, **steps}

    def solve(*a, **k):
        return eo.solve(ens, alg, *a, saveat=0.1, save_noise=True, **options, **k)

    def gradient(*a, **k):
        def of(scale):
            scaled = eo.EnsembleProblem(eo.remake(noisy, p=scale * prob.p), rising)
            return eo.solve(scaled, alg, *a, **options, **k).u.sum()

        return jax.grad(of)(jnp.ones((), dtype))

    got, expected = by_ptx(solve)
    same((numbers(got), got.W), (numbers(expected), expected.W))
    same(*by_ptx(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("alg", [eo.Tsit5(), eo.Rodas5P()], ids=str)
def test_complex_states(on_ptx, alg):
    def f(u, p, t):
        return -1j * p * jnp.stack([u[1], jnp.exp(1j * t.astype(complex)) * u[0]])

    def turned(prob, ctx):
        return eo.remake(prob, u0=prob.u0 * jnp.exp(1j * ctx.index))

    prob = eo.ODEProblem(f, [1.0 + 0j, 0.5j], (0.0, 1.0), jnp.array(1.5 + 0.2j))
    ens = eo.EnsembleProblem(prob, turned)

    def loss(*ensemblealg, **options):
        def of(p):
            mine = eo.EnsembleProblem(eo.remake(prob, p=p), turned)
            u = eo.solve(mine, alg, *ensemblealg, trajectories=3, **options).u
            return jnp.sum(jnp.abs(u[:, -1, 0]) ** 2)

        return jax.grad(of)(prob.p)

    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, alg, *a, trajectories=3, saveat=0.3, **k))
    assert got.u.dtype == np.complex128
    same(numbers(got), numbers(expected))
    same(*by_ptx(loss))


@pytest.mark.slow
def test_integrands(on_ptx):
    ens = rising_lorenz()
    prob = eo.remake(ens.prob, integrand=lambda u, p, t: {"u": u[0], "t": t * p[:2]})
    ens = eo.EnsembleProblem(prob, rising)

    def loss(*ensemblealg, **options):
        def of(scale):
            scaled = eo.EnsembleProblem(eo.remake(prob, p=scale * prob.p), rising)
            sim = eo.solve(scaled, eo.Tsit5(), *ensemblealg, trajectories=3, **options)
            return jnp.sum(sim.integral["u"][:, -1] ** 2)

        return jax.grad(of)(1.0)

    got, expected = by_ptx(
        lambda *a, **k: eo.solve(ens, eo.Tsit5(), *a, trajectories=3, saveat=0.3, **k)
    )
    same((numbers(got), got.integral), (numbers(expected), expected.integral))
    same(*by_ptx(loss))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [1, slow_unless(False, 128), 130])
def test_trajectories_that_are_no_whole_blocks(on_ptx, n):
    before = len(on_ptx)
    ens = rising_lorenz(np.float32)
    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, eo.Tsit5(), *a, trajectories=n, **k))
    same(numbers(got), numbers(expected))
    (call,) = on_ptx[before:]
    assert (call.blocks, call.block) == (-(-n // 128), 128)


@pytest.mark.parametrize("max_norm", [None, slow_unless(False, 50.0)])
def test_failures_are_alone(on_ptx, max_norm):
    """In one launch with trajectories that succeed."""
    ens = failing(nan_start=4)
    options = {"trajectories": 7, "saveat": 0.25, "abstol": 1e-7, "reltol": 1e-7, "maxiters": 150}
    options["max_norm"] = max_norm
    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, eo.Tsit5(), *a, **options, **k))
    same(numbers(got), numbers(expected))
    codes = eo.ReturnCode
    assert (got.retcode[:5] != codes.Success).all()
    assert (got.retcode[1] == codes.Diverged) == (max_norm is not None)
    assert got.retcode[3] == codes.MaxIters
    assert str(got.engine).endswith("; in one kernel)")
    assert (got.retcode[5:] == codes.Success).all()


def test_spans_and_tolerances_of_their_own_backwards(on_ptx):
    def prob_func(prob, ctx):
        span = (1.0 + ctx.index / 10, -0.1 * ctx.index)
        return eo.remake(prob, tspan=span, reltol=10.0 ** (-3 - ctx.index))

    prob = eo.ODEProblem(lorenz, jnp.ones(3), (0.0, 1.0), jnp.array([1.0, 2.0, 8 / 3]))
    ens = eo.EnsembleProblem(prob, prob_func)
    got, expected = by_ptx(
        lambda *a, **k: eo.solve(ens, eo.Tsit5(), *a, trajectories=5, saveat=0.3, **k)
    )
    same(numbers(got), numbers(expected))
    assert len(np.unique(got.lengths)) > 1


@pytest.mark.slow
def test_numbers_of_other_dtypes(on_ptx):
    """Whole numbers and choices, and more numbers of their own than a thread holds."""
    large = 2**24 + 1

    def f(u, p, t):
        exact = jnp.where(p["whole"] == large, 1.0, -1.0).astype(u.dtype)
        turned = jnp.where(p["choice"], jnp.ones_like(u), -jnp.ones_like(u))
        return u * exact + turned * jnp.sum(p["many"]) / p["many"].size

    def prob_func(prob, ctx):
        many = prob.p["many"] * (1 + ctx.index).astype(np.float32)
        p = {"whole": large + ctx.index % 2, "choice": ctx.index > 2, "many": many}
        return eo.remake(prob, p=p)

    many = jnp.linspace(0.0, 1.0, 70, dtype=np.float32)
    p = {"whole": jnp.array(large), "choice": jnp.array(True), "many": many}
    ens = eo.EnsembleProblem(eo.ODEProblem(f, jnp.ones(2, np.float32), (0.0, 1.0), p), prob_func)
    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, eo.Tsit5(), *a, trajectories=5, **k))
    same(numbers(got), numbers(expected))
    assert len(np.unique(got.u[:, -1, 0])) == 5


@pytest.mark.slow
def test_loops(on_ptx):
    """Over angles that are reduced out of line, and as often as the state says."""

    def f(u, p, t):
        u = jax.lax.scan(lambda c, x: (c * jnp.sin(1e6 * x) + jnp.cos(c), None), u, p)[0]
        times = jnp.minimum((jnp.abs(u[0]) * 3).astype(jnp.int32), 10)

        def body(carry):
            i, x = carry
            return i + 1, x * 0.9 + 0.1 * p[i % 3]

        return -jax.lax.while_loop(lambda x: x[0] < times, body, (jnp.int32(0), u))[1]

    prob = eo.ODEProblem(f, jnp.ones(2), (0.0, 1.0), jnp.linspace(0.0, 1.0, 30))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index)))
    options = {"trajectories": 3, "adaptive": False, "dt": 0.25}
    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, eo.RK4(), *a, **options, **k))
    same(numbers(got), numbers(expected))


@pytest.mark.parametrize("n", [slow_unless(False, 499), 500])
def test_as_many_arrays_as_parameters_of_a_kernel(on_ptx, n):
    """The numbers written in `f`, here `n`, are one array more."""
    p = {str(i): jnp.array(0.1 * (i % 7)) for i in range(n)}
    prob = eo.ODEProblem(lambda u, p, t: -u * sum(p.values()) / n, jnp.ones(1), (0.0, 1.0), p)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index))
    options = {"trajectories": 2, "saveat": 0.5}
    if n == 500:
        with pytest.raises(ValueError, match=r"at most 500 arrays.*501: put several into one"):
            eo.solve(ens, eo.Tsit5(), eo.EnsembleGPUKernel(), **options)
        return
    before = len(on_ptx)
    for transform in (lambda f: f, jax.grad):

        def total(u0, *a, **k):
            prob = eo.remake(ens.prob, u0=u0)
            sim = eo.solve(eo.EnsembleProblem(prob, ens.prob_func), eo.Tsit5(), *a, **options, **k)
            return jnp.sum(sim.u)

        same(*by_ptx(lambda *a, t=transform, f=total, **k: t(f)(prob.u0, *a, **k)))
    # (What an assembler takes, at eight bytes each.)
    assert all(call.code.count(".param .u64") <= 4352 // 8 for call in on_ptx[before:])


@pytest.fixture
def written_out(monkeypatch):
    """The CPU's code has a variable for each component, as a GPU's has: with loops over components,
    LLVM joins other products and sums to one operation, which rounds once."""
    monkeypatch.setattr(description, "least_in_memory", lambda: 10**6)


QUICK_PROBLEMS = {("forced", False), ("pendulum", True)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "single"),
    [slow_unless((x, s) in QUICK_PROBLEMS, x, s) for x in PROBLEMS for s in (False, True)],
)
def test_every_problem(on_ptx, written_out, name, single):
    if single and name == "forced":
        pytest.skip("its table is in double precision")
    problem = PROBLEMS[name]
    ens = as_single(ensemble_of(problem)) if single else ensemble_of(problem)
    prob = eo.remake(ens.prob, tspan=(0.0, problem.end / 20))
    ens = eo.EnsembleProblem(prob, None if single else ens.prob_func)
    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, eo.Tsit5(), *a, trajectories=3, **k))
    same(numbers(got), numbers(expected))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method(on_ptx, method):
    alg = METHODS[method]
    options = {"saveat": 0.1} if alg.adaptive else {"saveat": 0.1, "dt": 0.05}
    ens = rising_lorenz()
    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, alg, *a, trajectories=3, **options, **k))
    same(numbers(got), numbers(expected))


@pytest.mark.slow
@pytest.mark.parametrize("alg", SOLVERS.values(), ids=SOLVERS)
def test_methods_of_other_kinds(on_ptx, alg):
    ens = rising_lorenz()
    options = {"trajectories": 2, "saveat": [0.0, 0.1, 0.2], "abstol": 1e-4, "reltol": 1e-4}

    def total(p, *a, **k):
        chosen = eo.EnsembleProblem(eo.remake(ens.prob, tspan=(0.0, 0.2), p=p), ens.prob_func)
        return jnp.sum(eo.solve(chosen, alg, *a, **options, **k).u)

    same(*by_ptx(lambda *a, **k: jax.value_and_grad(total)(ens.prob.p, *a, **k)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_function(on_ptx, dtype):
    """Far and near, with the tables that they have in memory, and what is called out of line."""
    prob = every_function(dtype)
    given = jnp.array([1e-9, 0.3, 1.5, 7.0, 80.0, 3e4, 1e9], dtype)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=given[ctx.index]))
    options = {"trajectories": 7, "adaptive": False, "dt": 1.0}
    got, expected = by_ptx(lambda *a, **k: eo.solve(ens, eo.Euler(), *a, **options, **k))
    same(numbers(got), numbers(expected))
    assert np.isfinite(got.u[:4]).all()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS, indirect=True)
def test_architectures(on_ptx, arch):
    """Later ones have instructions that earlier ones haven't."""
    # (A network with so few weights that a CPU adds up their cotangents as a GPU does.)
    net = eo.ODEProblem(mlp, jnp.array([1.0, -0.5]), (0.0, 2.0), network(width=8))
    for ens in (as_single(eo.EnsembleProblem(net)), rising_lorenz(np.float32)):

        def solve(p, alg, ens=ens, **options):
            ens = eo.EnsembleProblem(eo.remake(ens.prob, p=p), ens.prob_func)
            return eo.solve(ens, eo.Tsit5(), alg, trajectories=3, saveat=0.5, **options)

        def loss(p, *a, solve=solve, **options):
            return jnp.sum(solve(p, *a, **options).u ** 2)

        p = ens.prob.p
        same(*by_ptx(lambda *a, p=p, solve=solve, **k: numbers(solve(p, *a, **k))))
        same(*by_ptx(lambda *a, p=p, loss=loss, **k: eqx.filter_grad(loss)(p, *a, **k)))


X = test_gradients.X | {"t1": jnp.array(0.5)}
loss = functools.partial(test_gradients.loss, tolerances={})


GRADIENTS = {
    "ends": {},
    "times": {"saveat": jnp.array([0.0, 0.2, 0.2, 0.3, 0.5])},
    "steps": {"save_everystep": True, "maxiters": 200},
    "fixed": {"adaptive": False, "dt": 0.02, "saveat": jnp.array([0.25, 0.5])},
    "non-FSAL": {"alg": eo.Vern7(), "saveat": jnp.array([0.25, 0.4])},
    "forward": {"sensealg": eo.ForwardDiffSensitivity()},
    "forward, times": {"sensealg": eo.ForwardDiffSensitivity(), "saveat": jnp.array([0.2, 0.5])},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(x, d) for x in GRADIENTS for d in ("float32", "float64")],
)
def test_gradients(on_ptx, name, dtype):
    x = jax.tree.map(lambda a: a.astype(dtype), X)
    derivative = jax.jacfwd if "forward" in name else jax.grad
    got, expected = by_ptx(lambda *a, **k: derivative(loss)(x, *a, **GRADIENTS[name], **k))
    same(got, expected)
    assert float(jnp.abs(got["shared"]).min()) > 0


@pytest.mark.slow
def test_cotangents_of_many_shared_parameters(on_ptx):
    """A CPU adds them up in memory, in another order."""
    weights = jax.random.uniform(jax.random.key(0), (2, 30, 2), np.float32, 0.1, 0.5)
    x = {"u0": jnp.array([1.0, 0.5], np.float32), "p": (weights[0], weights[1].T)}
    trajectories, steps, stages = 3, 5, 4

    def final(x, *a, **options):
        prob = eo.ODEProblem(lambda u, p, t: p[1] @ jnp.tanh(p[0] @ u), x["u0"], (0.0, 0.5), x["p"])
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index))
        )
        how = {"trajectories": trajectories, "adaptive": False, "dt": 0.1}
        sim = eo.solve(ens, eo.RK4(), *a, **how, **options)
        return jnp.sum(sim.u[:, -1]), (sim.u, sim.retcode, dataclasses.astuple(sim.stats))

    (got, solved), (expected, solved_here) = by_ptx(
        lambda *a, **k: jax.grad(final, has_aux=True)(x, *a, **k)
    )
    same((got["u0"], solved), (expected["u0"], solved_here))
    # Weights, slopes, cotangents and the coefficients of RK4 are positive, and so are all terms. A
    # sum of n of them, in any order, is off by n times half of eps, relative to the sum.
    n = trajectories * steps * stages
    for a, b in zip(got["p"], expected["p"], strict=True):
        assert (b > 0).all()
        np.testing.assert_allclose(a, b, rtol=n * np.finfo(np.float32).eps)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_threads_that_take_turns(on_ptx, monkeypatch, groups):
    """Fewer threads than trajectories, with records in several segments, and losses mapped over."""
    options = {"maxiters": 400}
    many = jax.tree.map(lambda a: jnp.stack([(1 - 0.1 * i) * a for i in range(groups)]), X)

    def gradients():
        grad = jax.grad(lambda x: loss(x, eo.EnsembleGPUKernel(), n=7, **options))
        found = jax.vmap(grad)(many)
        # (The turns that are recorded, of all threads.)
        assert on_ptx[-1].name == "pull_back_entry"
        return found, np.prod(on_ptx[-1].outputs[3][0])

    expected, room = gradients()
    monkeypatch.setattr(solves.tuning, "TURNS_ON_GPU", 1)
    monkeypatch.setattr(solves.tuning, "WORKSPACE_ON_GPU", 10_000)
    jax.clear_caches()
    got, less = gradients()
    jax.clear_caches()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-12, atol=1e-12)
    assert less < room / 4


@pytest.mark.slow
def test_a_gradient_of_several_blocks(on_ptx):
    got, expected = by_ptx(lambda *a, **k: jax.grad(loss)(X, *a, n=150, **k))
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_failed_trajectory_adds_nothing(on_ptx):
    def final(x, alg, **options):
        def prob_func(prob, ctx):
            # The last one explodes.
            return eo.remake(prob, u0=jnp.where(ctx.index == 2, 1e3, 1.0) * x["u0"])

        prob = eo.ODEProblem(lambda u, p, t: p * u**2, x["u0"], (0.0, 0.5), x["p"])
        ens = eo.EnsembleProblem(prob, prob_func)
        u = eo.solve(ens, eo.Tsit5(), alg, trajectories=3, maxiters=300, **options).u
        return jnp.sum(jnp.where(jnp.isnan(u), 0, u))

    x = {"u0": jnp.array([0.5]), "p": jnp.array(1.0)}
    got, expected = by_ptx(lambda *a, **k: jax.grad(final)(x, *a, **k))
    same(got, expected)
    assert np.isfinite(got["p"])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90"], indirect=True)
def test_gradients_through_events(arch):
    """Of a ball that bounces: the last state and the time, by height, gravity and restitution."""

    def gradient(ensemblealg, **options):
        def loss(x):
            def fall(u, p, t):
                return jnp.stack([u[1], -p[0]])

            def bounce(integrator):
                u, p = integrator.u, integrator.p
                return eo.remake(integrator, u=jnp.stack([0 * u[0], -p[1] * u[1]]))

            floor = eo.ContinuousCallback(lambda u, t, integrator: u[0], bounce)
            u0 = jnp.stack([x[0], 0 * x[0]])
            prob = eo.ODEProblem(fall, u0, (0.0, 1.2), x[1:], callback=floor)
            ens = eo.EnsembleProblem(
                prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 + 0.1 * ctx.index)
            )
            given = {"trajectories": 3, "max_events": 2, **options}
            sim = eo.solve(ens, eo.Tsit5(), ensemblealg, **given)
            return jnp.sum(sim.u[:, -1] ** 2) + jnp.sum(sim.events.t[:, 0] ** 2)

        return jax.grad(loss)(jnp.array([2.0, 9.81, 0.8]))

    got, expected = (
        gradient(eo.EnsembleGPUKernel()),
        gradient(eo.EnsembleSerial(), engine="compiled"),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-12)
