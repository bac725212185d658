"""Implicit methods: stiff problems, the end of the iteration for a stage, and its failures."""

import functools

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest

import ensembleode as eo
from ensembleode.engines.diffrax.implicit import SimplifiedNewton

from ..marks import slow_unless
from ..problems import of_benchmarks, ROBERTSON, robertson
from .test_diffrax import IMPLICIT


METHODS = [method for method, _ in IMPLICIT]
THEIRS = [
    diffrax.ImplicitEuler(),
    diffrax.HalfSolver(diffrax.ImplicitEuler()),
    diffrax.HalfSolver(diffrax.KenCarp3()),
    diffrax.KenCarp4(),
    diffrax.Kvaerno5(),
    diffrax.Sil3(),
]


def ids(case):
    inner = getattr(case, "solver", None)
    return type(case).__module__.split(".")[0][0] + type(inner or case).__name__ + "2" * bool(inner)


QUICK = {("ROBER", "KenCarp4")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, type(method).__name__)
        for name in ("HIRES", "ROBER", "OREGO", "VDP", "POLLU")
        for method in METHODS
    ],
)
def test_ensembles_of_stiff_problems(name, method):
    """All copies succeed with the default `maxiters`, and are right."""
    stiff = of_benchmarks("stiff_methods")
    problem = stiff.PROBLEMS[name]
    quick = (name, method) in QUICK
    constants = stiff.constants_of(problem, 4 if quick else 64)
    exact = np.asarray(problem.published)
    for abstol in stiff.ABSTOL.get(name, (1e-4,)):
        for reltol in stiff.tolerances(method)[: 1 if quick else 2]:
            ends, succeeded, accepted, rejected = stiff.ours(
                problem, method, constants, reltol, abstol * reltol
            )
            assert succeeded.all()
            # Where each other step is rejected it is not for the error.
            assert (rejected < 0.8 * accepted).all()
            error = np.abs(ends[0] - exact) / (np.abs(exact) + abstol)
            # (Order one loses the phase of an oscillation.)
            assert error.max() < (2.0 if method == "ImplicitEuler" else 100 * reltol**0.75)


def no_root(u, p, t):
    """Each kind of failure: no root where a step is long, an undefined field, an overflow, and an
    iteration that gets nowhere, though the error looks small."""
    kinds = [p[1] * u**2, -1e3 * (jnp.sqrt(u) - 0.5), -1e110 * u**3, ripples(t, u)]
    return jnp.select([p[0] == i for i in range(len(kinds))], kinds)


def ripples(t, u):
    return jnp.cos(t) + 1e-5 * jnp.sin(1e6 * u)


def ensemble_without_roots(growth=1.0):
    prob = eo.ODEProblem(no_root, jnp.array([1.0]), (0.0, 0.9), jnp.array([0.0, 1.0]))
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=jnp.stack([1.0 * ctx.index, growth]))
    )


ENDS = [10.0, 0.25, 0.0, 1 + np.sin(0.9)]


@pytest.mark.slow
@pytest.mark.parametrize("alg", [*METHODS, *THEIRS, eo.Tsit5()], ids=ids)
def test_a_failure_is_a_shorter_step(alg):
    """However long the first step that is tried, a trajectory ends with success, and right."""
    order_one = isinstance(alg, eo.ImplicitEuler) or "Euler" in repr(alg)
    # (diffrax's own iteration takes an infinite Jacobian for convergence; and of an overflow, steps
    # of order one fail more often than the hundred times after which there is no way on.)
    well = [0, 1, 3] if alg in THEIRS or order_one else [0, 1, 2, 3]
    tol = 1e-5 if order_one else 1e-7
    counts = []
    for dt in (1e-4, 0.9):
        sim = eo.solve(
            ensemble_without_roots(),
            alg,
            trajectories=len(ENDS),
            engine="diffrax",
            dt=dt,
            reltol=tol,
            abstol=tol,
        )
        assert sim.successful[np.array(well)].all()
        found, exact = np.asarray(sim.u)[well, -1, 0], np.array(ENDS)[well]
        np.testing.assert_allclose(found, exact, rtol=5e-2 if order_one else 1e-3, atol=1e-3)
        counts.append(sim.stats.nreject)
    # The long step is rejected, but for one that the error estimate is no judge of.
    assert (counts[1][:3] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", [eo.ImplicitEuler(), eo.KenCarp4()], ids=ids)
def test_gradients_after_failures(method):
    """Zero times what failed is zero. (u' = p u^2, u(0) = 1: du/dp = t u^2.)"""

    def end(growth, dt):
        sim = eo.solve(
            ensemble_without_roots(growth),
            method,
            trajectories=len(ENDS),
            dt=dt,
            reltol=1e-5,
            abstol=1e-5,
            maxiters=20_000,
        )
        return sim.u[0, -1, 0] + 0 * sim.u[1:3].sum(), sim.stats.nreject

    gradient, rejected = jax.jit(jax.grad(end, has_aux=True))(1.0, 0.9)
    assert (rejected[:3] > 0).all()
    np.testing.assert_allclose(gradient, 0.9 * 10.0**2, rtol=0.1)


@pytest.mark.slow
def test_return_codes_of_failures():
    """What is undefined is unstable; equations without a solution are a failure if the step is
    fixed; steps that failed count as rejected, and `maxiters` counts them."""
    hole = eo.ODEProblem(
        lambda u, p, t: jnp.where(t < 0.5, 1.0, jnp.nan) * u, jnp.array([1.0]), (0.0, 1.0)
    )
    for options in ({}, {"dt": 0.01, "adaptive": False}):
        assert eo.solve(hole, eo.ImplicitEuler(), **options).retcode == eo.ReturnCode.Unstable
    blow_up = eo.ODEProblem(lambda u, p, t: u**2, jnp.array([1.0]), (0.0, 0.9))
    sol = eo.solve(blow_up, eo.ImplicitEuler(), dt=0.9, adaptive=False)
    assert (sol.retcode, sol.stats.naccept) == (eo.ReturnCode.Failure, 1)
    sol = eo.solve(blow_up, eo.ImplicitEuler(), dt=0.9, maxiters=3)
    assert sol.retcode == eo.ReturnCode.MaxIters
    assert sol.stats.naccept + sol.stats.nreject == 3
    assert sol.stats.nreject >= 1


def counting(f):
    """A field that is `f`, and two lists: to one each evaluation adds an item, to the other each
    evaluation of its derivative."""
    calls, jacobians = [], []

    def zero_and(counted, u):
        def called(u):
            counted.append(u)
            return np.zeros_like(u)

        zero = jax.ShapeDtypeStruct(u.shape, u.dtype)
        return jax.pure_callback(called, zero, u, vmap_method="sequential")

    @jax.custom_jvp
    def field(u, p, t):
        return f(u, p, t) + zero_and(calls, u)

    @field.defjvp
    def _(at, tangents):
        du, change = jax.jvp(f, at, tangents)
        return du, change * (1 + zero_and(jacobians, at[0]))

    return field, calls, jacobians


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (method, options)
        for method in METHODS
        for options in (
            {"dt": 0.9},
            {"dt": 0.09, "adaptive": False},
            {"stepsize_controller": eo.PIController()},
            {"saveat": [0.2, 0.9], "sensealg": eo.DirectAdjoint()},
        )
    ],
    ids=lambda case: ids(case) if isinstance(case, eo.solvers.ODESolver) else "-".join(case),
)
def test_counts_of_evaluations_and_jacobians(method, options):
    """Those of steps that are rejected or fail, and of the first step size, too."""
    field, calls, jacobians = counting(no_root)
    prob = eo.ODEProblem(field, jnp.array([1.0]), (0.0, 0.9), jnp.array([0.0, 1.0]))
    rejected = 0
    for kind in range(len(ENDS)):
        calls.clear()
        jacobians.clear()
        prob = eo.remake(prob, p=jnp.array([1.0 * kind, 1.0]))
        sol = eo.solve(prob, method, reltol=1e-5, abstol=1e-5, maxiters=200, **options)
        jax.block_until_ready(sol.u)
        assert sol.stats.nf == len(calls)
        tried = sol.stats.naccept + sol.stats.nreject
        assert sol.stats.nf > tried
        # (There may be others of explicit stages, which are the identity whatever they are.)
        explicit = sol.stats.nf - sol.stats.nsolve
        assert sol.stats.njac <= len(jacobians) <= sol.stats.njac + 2 * explicit
        assert sol.stats.nw == sol.stats.njac >= tried
        # The first stage of first steps, and what finds the first step size.
        assert 0 < sol.stats.nf - sol.stats.nsolve <= 2 * (sol.stats.nreject + 2)
        rejected += sol.stats.nreject
    assert rejected > 0


@pytest.mark.slow
def test_nf_backwards_and_of_every_step():
    """In single precision; without `f` at the saved states, which is for interpolation."""
    field, calls, _ = counting(lambda u, p, t: jnp.cos(t) - 20 * u)
    prob = eo.ODEProblem(field, jnp.ones(2, jnp.float32), (1.0, 0.8))
    sol = eo.solve(prob, eo.KenCarp3())
    jax.block_until_ready(sol.u)
    assert sol.stats.nf == len(calls)
    assert eo.solve(prob, eo.KenCarp3(), save_everystep=True).stats.nf == sol.stats.nf


@pytest.mark.slow
@pytest.mark.parametrize(
    "sensealg",
    [None, eo.DirectAdjoint(), eo.BacksolveAdjoint(), eo.ForwardDiffSensitivity()],
    ids=lambda sensealg: type(sensealg).__name__,
)
def test_nf_beside_gradients(sensealg):
    def end(growth):
        sim = eo.solve(
            ensemble_without_roots(growth), eo.KenCarp3(), trajectories=2, dt=1e-4, maxiters=300,
            sensealg=sensealg,
        )  # fmt: skip
        return sim.u[0, -1, 0], sim.stats.nf

    expected = end(1.0)[1]
    derivative = jax.jacfwd if isinstance(sensealg, eo.ForwardDiffSensitivity) else jax.grad
    gradient, counts = derivative(end, has_aux=True)(1.0)
    assert np.isfinite(gradient)
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.slow
@pytest.mark.parametrize("alg", [*METHODS, *THEIRS], ids=ids)
def test_single_precision_beside_double(alg):
    """States in single precision stay so, whatever precision a method's coefficients have."""
    u0 = jnp.array([1.0, 2.0], jnp.float32)
    prob = eo.ODEProblem(lambda u, p, t: -p * u, u0, (0.0, 1.0), jnp.array([1.0, 3.0], jnp.float32))
    # (The cubic within a step is for steps that are not as long as the whole.)
    within = {"saveat": 0.25, "reltol": 1e-4}
    cases = [within, {"save_everystep": True, "maxiters": 300}]
    if isinstance(alg, eo.KenCarp4):
        cases += [{**within, "sensealg": eo.BacksolveAdjoint()}]
    for options in cases:
        # (diffrax's own KenCarp relies on promotion.)
        with jax.numpy_dtype_promotion("standard" if alg in THEIRS else "strict"):
            sol = eo.solve(prob, alg, engine="diffrax", **options)
        assert sol.u.dtype == sol.t.dtype == jnp.float32
        exact = np.array([1.0, 2.0]) * np.exp(-np.array([1.0, 3.0]) * np.asarray(sol.t)[:, None])
        np.testing.assert_allclose(sol.u, exact, atol=2e-2)


@pytest.mark.parametrize(
    ("method", "forward"),
    [
        *(slow_unless(False, m, False) for m in METHODS),
        *(slow_unless(False, m, True) for m in METHODS),
    ],
)
def test_gradients_of_a_stiff_problem(method, forward):
    """Of Robertson's problem by the logarithms of its constants, with fixed steps, so that
    differences are exact for the steps taken. It begins where the second component is no longer
    zero: from zero, the third stage of Kvaerno5 has no solution with steps this long."""

    def ends(x, sensealg=None):
        p, u0 = ROBERTSON * jnp.exp(x), jnp.array([0.98517, 3.3864e-5, 0.014796])
        prob = eo.ODEProblem(robertson, u0, (0.0, 1.0), p)
        options = {"dt": 0.05, "adaptive": False, "reltol": 1e-11, "abstol": 1e-15, "maxiters": 30}
        sol = eo.solve(prob, method, sensealg=sensealg, saveat=[0.5, 1.0], **options)
        return (sol.u @ jnp.array([1.0, 1e4, 2.0])).sum()

    x, h = jnp.zeros(3), 1e-4
    both = jax.jit(jax.value_and_grad(ends))
    gradient = both(x)[1]
    if forward:
        ends = functools.partial(ends, sensealg=eo.ForwardDiffSensitivity())
        np.testing.assert_allclose(gradient, jax.jit(jax.jacfwd(ends))(x), rtol=1e-10)
        return
    ends_at = [[both(x.at[i].add(by))[0] for by in (h, -h)] for i in range(3)]
    differences = [(right - left) / (2 * h) for right, left in ends_at]
    np.testing.assert_allclose(gradient, differences, rtol=1e-5)


@pytest.mark.slow
def test_what_diffrax_does_itself():
    """The faults that `engines/implicit.py` is there for. If this fails, diffrax or optimistix has
    mended one: see what of that module, and of docs/stiff.md, is no longer needed."""

    def find(fn, kind, atol=1e-8, **more):
        finder = kind(rtol=0.0, atol=atol, norm=optimistix.rms_norm, **more)
        start = jnp.ones(1)
        state = finder.init(lambda x, _: (x, None), start, None, {}, start, None, frozenset())
        options = {"init_state": state}
        found = optimistix.root_find(fn, finder, start, options=options, max_steps=10, throw=False)
        return found.stats["num_steps"], found.result == optimistix.RESULTS.successful

    in_place = {"y0": jnp.ones(1), "h": 1.0}

    # Iterations stop after the second, however well they converge.
    def slow(x, _):
        return 0.95 * x

    assert find(slow, diffrax.VeryChord) == (2, False), "optimistix iterates on"
    assert find(slow, SimplifiedNewton, **in_place) == (7, True)

    # A change that is less than a rounding of the unknown is one that diverges.
    def rounding(x, _):
        return jnp.maximum(x - 1.0, 1e-20)

    def roundings(x, _):
        return jnp.maximum(x - 1.0, 4e-16)

    assert find(rounding, diffrax.VeryChord) == (2, False), "optimistix knows roundings"
    assert find(rounding, SimplifiedNewton, **in_place) == (1, True)
    assert find(roundings, SimplifiedNewton, atol=1e-15, **in_place) == (1, True)

    # A failure ends the trajectory.
    rober = of_benchmarks("common.ivp_test_set").PROBLEMS["ROBER"]
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, u, p: rober.f(u, p, t)),
        diffrax.ImplicitEuler(),
        0.0,
        rober.end,
        None,
        jnp.asarray(rober.u0),
        jnp.asarray(rober.constants),
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-8),
        throw=False,
    )
    assert sol.stats["num_steps"] < sol.stats["max_steps"]
    assert sol.result != diffrax.RESULTS.successful, "ImplicitEuler tries a shorter step"
    prob = eo.ODEProblem(
        rober.f, jnp.asarray(rober.u0), (0.0, rober.end), jnp.asarray(rober.constants)
    )
    sol = eo.solve(prob, diffrax.ImplicitEuler(), reltol=1e-4, abstol=1e-8, maxiters=3000)
    assert sol.retcode == eo.ReturnCode.MaxIters
