"""The diffrax engine: orders of convergence, any diffrax object, agreement with diffrax itself."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.diffrax import implicit

from ..marks import slow_unless
from ..problems import lorenz, lotka_volterra


solve = functools.partial(eo.solve, engine="diffrax")
EXPLICIT = [
    (eo.Euler(), 1),
    (eo.Heun(), 2),
    (eo.Midpoint(), 2),
    (eo.Ralston(), 2),
    (eo.Bosh3(), 3),
    (eo.Tsit5(), 5),
    (eo.Dopri5(), 5),
    (eo.Dopri8(), 8),
]
IMPLICIT = [
    (eo.ImplicitEuler(), 1),
    (eo.Kvaerno3(), 3),
    (eo.Kvaerno4(), 4),
    (eo.Kvaerno5(), 5),
    (eo.KenCarp3(), 3),
    (eo.KenCarp4(), 4),
    (eo.KenCarp5(), 5),
]


def ids(case):
    return type(case).__name__ if not isinstance(case, int) else ""


# Each method by some of the tests every time, by all with the slow ones.
QUICK = {
    "order": {eo.Midpoint, eo.Tsit5, eo.Kvaerno3},
    "tolerance": {eo.Dopri8, eo.KenCarp3},
    "stiff": {eo.Kvaerno4},
    "stiff in single precision": {eo.KenCarp4},
}


def cases(test, methods):
    return [slow_unless(type(alg) in QUICK[test], alg, order) for alg, order in methods]


def oscillator():
    """u'' = -u to t = 20."""
    prob = eo.ODEProblem(
        lambda u, p, t: jnp.array([u[1], -u[0]]), jnp.array([0.0, 1.0]), (0.0, 20.0)
    )
    return prob, np.array([np.sin(20.0), np.cos(20.0)])


def growth():
    """u' = cos(t) u to t = 2."""
    prob = eo.ODEProblem(lambda u, p, t: jnp.cos(t) * u, jnp.array([1.0]), (0.0, 2.0))
    return prob, np.exp(np.sin([2.0]))


# Two numbers of steps: fine enough to be asymptotic, coarse enough for rounding not to show.
# (On the oscillator, a linear problem, order 8 would show as 9.)
STEPS = {
    1: (oscillator, 10_000, 20_000),
    2: (oscillator, 640, 1280),
    3: (oscillator, 320, 640),
    4: (oscillator, 320, 640),
    5: (oscillator, 400, 800),
    8: (growth, 8, 16),
}


@pytest.mark.slow
@pytest.mark.parametrize(("alg", "order"), cases("order", EXPLICIT + IMPLICIT), ids=ids)
def test_order(alg, order):
    assert alg.order == order
    problem, *numbers = STEPS[order]
    prob, expected = problem()
    length = prob.tspan[1] - prob.tspan[0]
    errors = []
    for steps in numbers:
        sol = solve(prob, alg, dt=length / steps, adaptive=False, abstol=1e-13, reltol=1e-13)
        assert sol.retcode == eo.ReturnCode.Success
        assert sol.stats.naccept == steps
        errors.append(np.linalg.norm(np.asarray(sol.u[-1]) - expected))
    measured = np.log2(errors[0] / errors[1])
    assert abs(measured - order) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("alg", "order"), cases("tolerance", EXPLICIT[1:] + IMPLICIT), ids=ids)
def test_tolerance_is_met(alg, order):
    prob, exact = growth()
    tol = 1e-4 if order < 3 else 1e-7
    sol = solve(prob, alg, abstol=tol, reltol=tol)
    assert sol.retcode == eo.ReturnCode.Success
    assert abs(float(sol.u[-1, 0] - exact[0])) < 300 * tol


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alg", "order"), cases("stiff in single precision", IMPLICIT[1:]), ids=ids
)
@pytest.mark.parametrize("stiffness", [1e2, 1e4])
def test_stiff_in_single_precision(alg, order, stiffness):
    """The residual of a stage is rounding times the stiffness, which no iteration makes smaller."""
    k = jnp.float32(stiffness)
    u0 = jnp.zeros(1, jnp.float32)
    prob = eo.ODEProblem(lambda u, p, t: -k * (u - jnp.cos(t)), u0, (0.0, 5.0))
    sol = solve(prob, alg)
    assert sol.retcode == eo.ReturnCode.Success
    exact = (stiffness * np.cos(5.0) + np.sin(5.0)) * stiffness / (stiffness**2 + 1)
    np.testing.assert_allclose(sol.u[-1], exact, atol=1e-3)


def robertson(u, p, t):
    a, b, c = 0.04 * u[0], 3e7 * u[1] ** 2, 1e4 * u[1] * u[2]
    return jnp.array([-a + c, a - b - c, b])


# field, start, end, step
FIXED = {
    "exponential": (lambda u, p, t: 1 - jnp.exp(u), [2.0], 1.0, 0.1),
    "robertson": (robertson, [1.0, 0.0, 0.0], 1.0, 0.5),
    "stiff": (lambda u, p, t: -u.dtype.type(1e4) * (u - jnp.cos(t)), [0.0], 1.0, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "rtol"),
    [
        (name, dtype, rtol)
        for name in FIXED
        for dtype, rtol in ((jnp.float64, 1e-6), (jnp.float32, 1e-3))
    ],
)
def test_fixed_steps_of_implicit_euler(name, dtype, rtol):
    """Iterations from a rough guess come no closer at first; in single precision the residual of a
    stiff step is never small."""
    f, start, end, dt = FIXED[name]
    prob = eo.ODEProblem(f, jnp.array(start, dtype), (0.0, end))
    sol = solve(prob, eo.ImplicitEuler(), dt=dt, adaptive=False)
    assert (sol.retcode, sol.stats.naccept) == (eo.ReturnCode.Success, round(end / dt))
    u = jnp.array(start, dtype)
    for n in range(1, round(end / dt) + 1):
        u = implicit_euler_step(f, u, dtype(n * dt), dtype(dt))
    np.testing.assert_allclose(sol.u[-1], u, rtol=rtol, atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def implicit_euler_step(f, u, t, dt):
    """By Newton's method to the end."""

    def residual(x):
        return x - u - dt * f(x, None, t)

    def iterate(_, x):
        return x - jnp.linalg.solve(jax.jacfwd(residual)(x), residual(x))

    return jax.lax.fori_loop(0, 30, iterate, u)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alg", "per_step", "once"),
    [
        (eo.Euler(), 1, 0),
        (eo.Heun(), 2, 0),
        (eo.Bosh3(), 3, 1),
        (eo.Tsit5(), 6, 1),
        (eo.Dopri8(), 13, 1),
    ],
    ids=ids,
)
def test_counts_of_work(alg, per_step, once):
    """nf is the number of evaluations that the method needs, the first one included."""
    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.array([1.0]), (0.0, 1.0))
    fixed = solve(prob, alg, dt=0.1, adaptive=False).stats
    assert (fixed.naccept, fixed.nreject, fixed.nf) == (10, 0, 10 * per_step + once)


@pytest.mark.slow
def test_counts_of_work_with_an_automatic_first_step():
    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.array([1.0]), (0.0, 1.0))
    stats = solve(prob, eo.Tsit5()).stats
    assert stats.nf == 6 * (stats.naccept + stats.nreject) + 1 + 2


def theirs_of(alg):
    name = type(alg).__name__
    return implicit.solver(name, True) if alg.implicit else getattr(diffrax, name)()


class _Field(eqx.Module):
    """The field without a function among its leaves, which our implicit steps don't take."""

    def __call__(self, t, u, p):
        return lotka_volterra(u, p, t)


class _OfErrors(diffrax.PIDController):
    """diffrax's controller for our implicit steps, whose errors have counts of their work."""

    def adapt_step_size(self, t0, t1, y0, y1_candidate, args, y_error, *others):
        error = getattr(y_error, "error", y_error)
        return super().adapt_step_size(t0, t1, y0, y1_candidate, args, error, *others)


CASES = [
    ({}, {}),
    ({"saveat": [0.5, 1.0, 2.0]}, {"saveat": diffrax.SaveAt(ts=jnp.array([0.5, 1.0, 2.0]))}),
    ({"dt": 0.01}, {"dt0": 0.01}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "theirs"), CASES)
@pytest.mark.parametrize("alg", [eo.Tsit5(), eo.Kvaerno5()], ids=ids)
def test_agrees_with_diffrax(alg, options, theirs):
    """The same steps and the same values as diffeqsolve itself."""
    p = jnp.array([1.5, 1.0, 3.0, 1.0])
    prob = eo.ODEProblem(lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 2.0), p)
    sol = solve(prob, alg, abstol=1e-8, reltol=1e-6, **options)
    expected = diffrax.diffeqsolve(
        diffrax.ODETerm(_Field()),
        theirs_of(alg),
        0.0,
        2.0,
        theirs.get("dt0"),
        prob.u0,
        p,
        saveat=theirs.get("saveat", diffrax.SaveAt(t0=True, t1=True)),
        stepsize_controller=_OfErrors(rtol=1e-6, atol=1e-8),
    )
    np.testing.assert_allclose(sol.u, expected.ys, rtol=1e-13)
    assert sol.stats.naccept == expected.stats["num_accepted_steps"]
    assert sol.stats.nreject == expected.stats["num_rejected_steps"]


@pytest.mark.slow
def test_diffrax_objects_as_they_are():
    prob = eo.ODEProblem(
        lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 1.0), jnp.array([10.0, 28.0, 8 / 3])
    )
    ours = solve(prob, eo.Tsit5(), abstol=1e-9, reltol=1e-9)
    theirs = solve(prob, diffrax.Tsit5(), abstol=1e-9, reltol=1e-9)
    np.testing.assert_array_equal(ours.u, theirs.u)
    controller = diffrax.PIDController(rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(solve(prob, stepsize_controller=controller).u, ours.u)
    pi = diffrax.PIDController(rtol=1e-9, atol=1e-9, pcoeff=0.3, icoeff=0.4)
    other = solve(prob, stepsize_controller=pi)
    assert other.stats.naccept != ours.stats.naccept
    np.testing.assert_allclose(other.u, ours.u, rtol=1e-7)
    stepped = solve(prob, stepsize_controller=diffrax.StepTo(ts=jnp.linspace(0.0, 1.0, 201)))
    assert stepped.stats.naccept == 200
    np.testing.assert_allclose(stepped.u, ours.u, rtol=1e-6)
    exact = solve(prob, diffrax.HalfSolver(diffrax.Heun()), abstol=1e-6, reltol=1e-6)
    np.testing.assert_allclose(exact.u, ours.u, rtol=1e-3)
    grads = [
        jax.grad(lambda u0, s=s: solve(eo.remake(prob, u0=u0), sensealg=s, maxiters=256).u.sum())(
            prob.u0
        )
        for s in (None, diffrax.RecursiveCheckpointAdjoint())
    ]
    np.testing.assert_array_equal(*grads)


@pytest.mark.slow
def test_dtmin_of_a_controller_is_a_return_code():
    controller = diffrax.PIDController(rtol=1e-9, atol=1e-9, dtmin=1e-2, force_dtmin=False)
    prob = eo.ODEProblem(lambda u, p, t: -1e4 * u, jnp.array([1.0]), (0.0, 1.0))
    assert solve(prob, stepsize_controller=controller).retcode == eo.ReturnCode.DtLessThanMin


@pytest.mark.slow
def test_step_underflow_without_divergence():
    """No step satisfies a tolerance below rounding; that is not a diverging solution."""
    prob = eo.ODEProblem(lambda u, p, t: jnp.cos(1e3 * t) + u, jnp.array([1.0]), (1.0, 2.0))
    sol = solve(prob, abstol=0.0, reltol=1e-100, maxiters=5000)
    assert sol.retcode == eo.ReturnCode.DtLessThanMin
    assert np.isnan(sol.u[-1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dt": 0.01, "adaptive": False}])
def test_vector_field_with_a_hole(options):
    """A trial step into the undefined is rejected; a trajectory that must go there is unstable."""
    prob = eo.ODEProblem(lambda u, p, t: -jnp.sqrt(u), jnp.array([1.0]), (0.0, 1.9))
    sol = solve(prob, **options)
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.u[-1], (1 - 1.9 / 2) ** 2, rtol=0.05)
    hole = eo.ODEProblem(
        lambda u, p, t: jnp.where(t < 0.5, 1.0, jnp.nan) * u, jnp.array([1.0]), (0.0, 1.0)
    )
    assert solve(hole, **options).retcode == eo.ReturnCode.Unstable


@pytest.mark.slow
def test_a_trial_step_to_infinity_is_tried_shorter():
    """Heun's method overflows in its last sum only: state and error are both infinite."""
    prob = eo.ODEProblem(lambda u, p, t: -(u**3), jnp.array([1.0]), (0.0, 1e80))
    sol = solve(prob, eo.Heun(), dt=1e80, abstol=1e-50, reltol=1e-3)
    assert sol.retcode == eo.ReturnCode.Success
    np.testing.assert_allclose(sol.u[-1], (2e80) ** -0.5, rtol=0.1)


@pytest.mark.parametrize("end", [0, 1])
def test_backsolve_by_the_ends_of_time_names_a_remedy(end):
    def loss(t):
        tspan = (t, jnp.array(1.0)) if end == 0 else (jnp.array(0.0), t)
        prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(2), tspan)
        sol = eo.solve(prob, eo.Tsit5(), engine="diffrax", sensealg=eo.BacksolveAdjoint())
        return jnp.sum(sol.u[-1])

    with pytest.raises(TypeError, match=r"ends of its tspan, .* leave sensealg out"):
        jax.grad(loss)(0.5)
