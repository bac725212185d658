"""This library's explicit methods on the diffrax engine: the steps, the solution within them and
the derivatives are those of the compiled engine."""

import functools

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.solvers import ExplicitRungeKutta

from ..marks import slow_unless
from ..problems import lotka_volterra
from .methods import OfAdams, OfTaylor, Rational


KUTTA3 = eo.ExplicitRK(
    eo.Tableau(
        c=(0, 1 / 2, 1), a=((1 / 2,), (-1, 2)), b=(1 / 6, 2 / 3, 1 / 6), order=3,
        error=(1 / 6, -1 / 3, 1 / 6), embedded_order=2,
    )
)  # fmt: skip
# Those that diffrax doesn't have; then those that it has.
OURS = {
    **{type(x).__name__: x for x in (eo.Vern6(), eo.Vern7(), eo.Vern8(), eo.Vern9())},
    **{type(x).__name__: x for x in (eo.BS5(), eo.SSPRK33(), eo.RK4())},
    "ExplicitRK": KUTTA3,
    "Adams": OfAdams(),
    "Taylor": OfTaylor(),
    "rational": Rational(),
}
THEIRS = {
    type(x).__name__: x for x in (eo.Heun(), eo.Midpoint(), eo.Ralston(), eo.Bosh3(), eo.Tsit5())
}  # (Its Dopri5 has another estimate of the error.)
QUICK = ("Vern7", "BS5", "RK4")
P, U0 = np.array([1.5, 1.0, 3.0, 1.0]), np.array([1.0, 1.0])
TIMES = np.array([0.0, 0.31, 1.7, 1.71, 3.0, 4.0])


def by_name(methods, quick=QUICK):
    return [slow_unless(name in quick, alg, id=name) for name, alg in methods.items()]


def problem(p=P, u0=U0, tspan=(0.0, 4.0), f=lotka_volterra):
    return eo.ODEProblem(f, jnp.asarray(u0), tspan, jnp.asarray(p))


def steps_of(alg):
    """Options by which it takes steps: a fixed one where it has no estimate of its error."""
    if not alg.adaptive:
        return {"dt": 0.02}
    # (Enough for some steps to be rejected.)
    tol = 1e-5 if alg.order > 2 else 1e-3
    return {"abstol": tol, "reltol": tol, "stepsize_controller": eo.PIController()}


def solved(alg, engine, prob=None, **options):
    return eo.solve(prob or problem(), alg, engine=engine, **{**steps_of(alg), **options})


def agree(one, other, rtol=1e-10):
    assert one.retcode == other.retcode == eo.ReturnCode.Success
    for name in ("naccept", "nreject", "nf"):
        np.testing.assert_array_equal(getattr(one.stats, name), getattr(other.stats, name))
    np.testing.assert_allclose(one.u, other.u, rtol=rtol, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="ends"),
        pytest.param({"saveat": TIMES}, id="dense"),
        pytest.param({"dt": 0.011}, id="first"),
        pytest.param({"tstops": [0.77, 2.0]}, id="tstops"),
        pytest.param({"d_discontinuities": [0.77, 2.0]}, id="jumps"),
        pytest.param({"prob": problem(tspan=(4.0, 0.0)), "saveat": TIMES[::-1]}, id="back"),
    ],
)
@pytest.mark.parametrize("alg", by_name(OURS | THEIRS))
def test_the_steps_are_those_of_the_compiled_engine(alg, how):
    if isinstance(alg, eo.Midpoint | eo.Ralston | eo.Heun) and "saveat" in how:
        pytest.skip("diffrax interpolates by another polynomial")
    if not alg.adaptive and not {"saveat", "prob"} & set(how) and how:
        pytest.skip("diffrax lays fixed steps out by itself")
    ours, theirs = (solved(alg, engine, **how) for engine in ("diffrax", "compiled"))
    assert ours.engine.name == "diffrax"
    if isinstance(alg, eo.Vern8) and "dt" in how:
        # Its estimate of the error of so short a first step is rounding.
        assert abs(int(ours.stats.naccept) - int(theirs.stats.naccept)) < 2
        np.testing.assert_allclose(ours.u, theirs.u, rtol=1e-5)
        return
    # (What is rounding in an estimate of an error changes the sizes of steps a little.)
    agree(ours, theirs, rtol=1e-6 if alg.adaptive else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("alg", by_name(OURS))
def test_our_control_is_the_default(alg):
    if not alg.adaptive:
        pytest.skip("fixed steps")
    ours, theirs = (eo.solve(problem(), alg, engine=x) for x in ("diffrax", "compiled"))
    agree(ours, theirs, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("alg", by_name(OURS, ("BS5",)))
def test_between_saved_steps(alg):
    sol = solved(alg, "diffrax", save_everystep=True, maxiters=400)
    at = np.linspace(0.0, 4.0, 37)
    expected = solved(alg, "diffrax", saveat=at)
    np.testing.assert_allclose(sol(at), expected.u, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("alg", by_name(OURS, ("BS5",)))
def test_an_ensemble(alg):
    """Each trajectory has steps of its own; also in single precision."""
    prob = problem(P.astype(np.float32), U0.astype(np.float32))

    def chosen(prob, ctx):
        return eo.remake(prob, p=prob.p * (1 + 0.1 * ctx.index))

    def sim(engine):
        ens = eo.EnsembleProblem(prob, chosen)
        return eo.solve(ens, alg, trajectories=5, engine=engine, saveat=TIMES, **steps_of(alg))

    ours, theirs = sim("diffrax"), sim("compiled")
    assert ours.converged
    assert ours.u.dtype == jnp.float32
    np.testing.assert_allclose(ours.u, theirs.u, rtol=1e-3)


@pytest.mark.parametrize("alg", by_name(OURS, ("Vern6",)))
def test_complex_states(alg):
    if isinstance(alg, Rational):
        pytest.skip("it divides by components, and real and imaginary parts may be zero")
    prob = problem(np.array(2j), np.array([1.0 + 0.5j]), f=lambda u, p, t: p * u)
    how = {"reltol": 1e-8, "abstol": 1e-8} if alg.adaptive else {"dt": 1e-3}
    sol = eo.solve(prob, alg, engine="diffrax", saveat=TIMES, **how)
    exact = (1.0 + 0.5j) * np.exp(2j * TIMES)[:, None]
    np.testing.assert_allclose(sol.u, exact, rtol=1e-4 if alg.order < 3 else 1e-6)


@pytest.mark.slow
def test_a_tree_of_states():
    def f(u, p, t):
        return {"a": -p[0] * u["a"], "b": u["a"].sum() - u["b"]}

    u0 = {"a": jnp.ones((2, 2)), "b": jnp.array(0.5)}
    prob = eo.ODEProblem(f, u0, (0.0, 1.0), jnp.asarray(P))
    ours, theirs = (
        eo.solve(prob, eo.Vern7(), engine=x, saveat=[0.3, 1.0]) for x in ("diffrax", "compiled")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours.u, theirs.u)


@pytest.mark.parametrize("alg", by_name(OURS, ("BS5",)))
def test_with_a_controller_of_diffrax(alg):
    """Of two estimates of the error, the larger counts."""
    if not alg.adaptive:
        pytest.skip("fixed steps")
    controller = diffrax.PIDController(rtol=1e-7, atol=1e-7)
    sol = eo.solve(problem(), alg, stepsize_controller=controller)
    exact = eo.solve(problem(), eo.Vern9(), abstol=1e-12, reltol=1e-12)
    assert sol.engine.name == "diffrax"
    np.testing.assert_allclose(sol.u, exact.u, rtol=1e-4)


@pytest.mark.slow
def test_the_larger_of_two_estimates_counts():
    kutta = KUTTA3.tableau
    error, steps = kutta.error, []
    small = tuple(1e-3 * x for x in error)
    for first, second in ((error, None), (error, small), (small, error)):
        tableau = eo.Tableau(
            c=kutta.c, a=kutta.a, b=kutta.b, order=3, error=first, embedded_order=2,
            second_error=second,
        )  # fmt: skip
        for controller in (eo.PIController(), diffrax.PIDController(rtol=1e-6, atol=1e-6)):
            tight = {} if isinstance(controller, diffrax.PIDController) else {"reltol": 1e-6}
            sol = eo.solve(
                problem(), OfTableau(tableau), engine="diffrax", stepsize_controller=controller,
                **tight,
            )  # fmt: skip
            steps.append((int(sol.stats.naccept), int(sol.stats.nreject)))
    assert steps[0::2] == steps[:1] * 3
    assert steps[1::2] == steps[1:2] * 3


class OfTableau(eo.ExplicitRK):
    """Without a check of its orders."""

    def __check_init__(self):
        pass


def counting(calls):
    def count(u):
        calls.append(1)
        return -u

    return lambda u, p, t: jax.pure_callback(count, jax.ShapeDtypeStruct(u.shape, u.dtype), u)


@pytest.mark.slow
@pytest.mark.parametrize("alg", by_name(OURS, ("BS5",)))
def test_evaluations_are_those_that_are_counted(alg):
    """The further ones for the solution within a step aren't counted, and are made in steps in
    which there is a time to save."""
    if not isinstance(alg, ExplicitRungeKutta):
        pytest.skip("it differentiates f, or evaluates what nothing uses")
    calls = []
    prob = problem(f=counting(calls))
    # (What nothing uses isn't evaluated: the estimate of the error of a fixed step.)
    how = {"dt": 0.2, "dtmax": 0.2, "abstol": 1.0} if alg.adaptive else {"dt": 0.2}
    how = {**how, "engine": "diffrax"}
    sol = eo.solve(prob, alg, **how)
    jax.effects_barrier()
    assert (sol.stats.naccept, sol.stats.nreject) == (20, 0)
    assert sol.stats.nf == len(calls)
    calls.clear()
    eo.solve(prob, alg, saveat=[0.5, 0.55, 1.5], **how)
    jax.effects_barrier()
    interpolant = getattr(getattr(alg.method, "tableau", None), "interpolant", None)
    extra = len(interpolant.extra_c) if interpolant else 0
    assert len(calls) == sol.stats.nf + 2 * extra


WAYS = {
    "default": (jax.jacrev, None),
    "direct": (jax.jacrev, eo.DirectAdjoint()),
    "direct, forward": (jax.jacfwd, eo.DirectAdjoint()),
    "forward": (jax.jacfwd, eo.ForwardDiffSensitivity()),
    "checkpointed": (jax.jacrev, eo.RecursiveCheckpointAdjoint(8)),
}


def loss(x, alg, engine, sensealg=None, **options):
    p, u0 = x
    tight = {"maxiters": 256} if engine == "diffrax" else {}
    how = {"saveat": TIMES, **steps_of(alg), **tight, **options}
    u = eo.solve(problem(p, u0), alg, engine=engine, sensealg=sensealg, **how).u
    return jnp.sum(u**2 * jnp.array([[1.0, 0.7]]))


@pytest.mark.drawn(9)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        slow_unless((name, way) == ("RK4", "direct, forward"), name, way)
        for name in OURS
        for way in WAYS
    ],
)
def test_derivatives_are_those_of_the_compiled_engine(name, way):
    alg, (mode, sensealg), x = OURS[name], WAYS[way], (jnp.asarray(P), jnp.asarray(U0))
    got = jax.jit(mode(functools.partial(loss, alg=alg, engine="diffrax", sensealg=sensealg)))(x)
    expected = jax.grad(loss)(x, alg, "compiled")
    # (The steps may differ by what is rounding in an estimate of an error.)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("alg", by_name(OURS, ("SSPRK33",)))
def test_backsolve_is_refused(alg):
    with pytest.raises(ValueError, match=r"BacksolveAdjoint\(\) can't be used with .*leave it out"):
        solved(alg, "diffrax", sensealg=eo.BacksolveAdjoint())


def bending(u, p, t):
    return -p * u + jnp.sin(t)


def jumping(u, p, t):
    return -p * u + jnp.where(t >= 0.7, 3.0, 0.0)


KNOWN = {
    "tstops": (bending, {"tstops": [0.33, 0.7]}),
    "jumps": (jumping, {"d_discontinuities": [0.7]}),
    "both": (jumping, {"d_discontinuities": [0.7], "tstops": [0.33, 0.7]}),
    "none": (bending, {}),
}
SAVINGS = {"ends": {}, "steps": {"save_everystep": True}, "times": {"saveat": 0.25}}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "alg", [eo.RK4(), slow_unless(False, eo.Tsit5()), slow_unless(False, eo.Vern7())]
)
@pytest.mark.parametrize("saved", ["steps", *(slow_unless(False, x) for x in ("ends", "times"))])
@pytest.mark.parametrize("span", [(0.0, 1.0), slow_unless(False, (1.0, 0.0))])
@pytest.mark.parametrize("known", KNOWN)
def test_fixed_steps_to_known_times(known, span, saved, alg):
    f, times = KNOWN[known]
    prob = eo.ODEProblem(f, jnp.array([1.0, 2.0]), span, 1.3)
    options = {"adaptive": False, "dt": 0.04, **times, **SAVINGS[saved]}
    expected, got = (eo.solve(prob, alg, engine=x, **options) for x in ("compiled", "diffrax"))
    assert got.retcode == expected.retcode == eo.ReturnCode.Success
    assert got.stats.naccept == expected.stats.naccept
    np.testing.assert_allclose(got.t, expected.t, rtol=1e-14)
    np.testing.assert_allclose(got.u, expected.u, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["compiled", "diffrax"])
def test_the_derivative_by_the_time_of_a_jump(engine):
    def f(u, p, t):
        return -u + jnp.where(t >= p, 3.0, 0.0)

    def end(jump):
        prob = eo.ODEProblem(f, jnp.array([1.0]), (0.0, 1.0), jump)
        at = {"adaptive": False, "dt": 0.01, "d_discontinuities": jnp.stack([jump])}
        return eo.solve(prob, eo.RK4(), engine=engine, **at).u[-1, 0]

    # u(1) = exp(-1) + 3 (1 - exp(jump - 1))
    np.testing.assert_allclose(jax.grad(end)(0.7), -3 * np.exp(-0.3), rtol=1e-8)
