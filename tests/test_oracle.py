"""The oracle of other tests is right: it has closed-form solutions, to the order of its methods,
and takes the steps of the compiled engine."""

import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from .oracle import solve


TIGHT = {"abstol": 1e-11, "reltol": 1e-11}
KNOWN = {
    "none": {},
    "tstops": {"tstops": [2.0, 0.5, 0.6, 7.0]},
    "jumps": {"d_discontinuities": [0.0, 0.8, 2.2, 3.0], "tstops": [0.8, 1.0]},
}
SAVED = {
    "ends": {},
    "end": {"save_start": False},
    "times": {"saveat": [0.0, 0.0, 0.3, 0.31, 0.8, 2.9, 3.0]},
    "spacing": {"saveat": 0.7},
    "steps": {"save_everystep": True},
}
SPANS = {"forwards": (0.0, 3.0), "backwards": (3.0, 0.0)}


def turning(u, p, t):
    """A rotation about the origin, at the rate `p (1 + t)`."""
    return p * (1 + t) * jnp.stack([-u[1], u[0]])


def turned(t, t0, p=1.5):
    angle = p * (t - t0 + (t**2 - t0**2) / 2)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def problem(span, dtype=np.float64, **options):
    p = np.asarray(1.5, dtype)
    return eo.ODEProblem(turning, np.array([1.0, 0.0], dtype), span, p, **options)


def in_order(options, span):
    """The options, with `saveat` in the direction of time."""
    times = options.get("saveat")
    if isinstance(times, list) and span[1] < span[0]:
        return {**options, "saveat": times[::-1]}
    return options


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "alg", [eo.Tsit5(), eo.Vern7(), eo.Rodas5P()], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("saved", SAVED)
def test_rows_are_on_the_solution(alg, span, saved):
    """Each of the times that were asked for."""
    tol = 1e-8 if isinstance(alg, eo.Rodas5P) else 1e-11
    found = solve(problem(span), alg, abstol=tol, reltol=tol, **in_order(SAVED[saved], span))
    assert found.retcode == eo.ReturnCode.Success
    assert found.t[-1] == span[1]
    assert (found.t[0] == span[0]) == (saved != "end")
    expected = {"ends": 2, "end": 1, "times": 7, "spacing": 6, "steps": found.naccept + 1}
    assert len(found.t) == len(found.u) == expected[saved]
    np.testing.assert_allclose(found.u, turned(found.t, span[0]), rtol=0, atol=3e3 * tol)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "alg", [eo.RK4(), eo.BS5(), eo.Rosenbrock23()], ids=lambda x: type(x).__name__
)
def test_fixed_steps_converge_with_the_order_of_the_method(alg):
    errors = []
    for steps in (64, 128):
        found = solve(problem((0.0, 1.0)), alg, dt=1 / steps, adaptive=False)
        assert (found.naccept, found.nreject) == (steps, 0)
        errors.append(np.abs(found.u[-1] - turned(1.0, 0.0)).max())
    assert abs(np.log2(errors[0] / errors[1]) - alg.order) < 0.25


def test_steps_end_at_known_times_and_f_is_on_its_side_of_a_jump():
    """A rate that jumps is integrated exactly by steps that end at the jump."""

    def f(u, p, t):
        return jnp.where(t < 0.3, 1.0, 5.0)[None]

    for span in ((0.0, 1.0), (1.0, 0.0)):
        prob = eo.ODEProblem(f, [0.0], span)
        found = solve(prob, d_discontinuities=[0.3], tstops=[0.6], save_everystep=True)
        assert {0.3, 0.6} < set(found.t)
        exact = np.where(found.t < 0.3, found.t, 0.3 + 5 * (found.t - 0.3))
        exact -= 0.0 if span[0] == 0 else 0.3 + 5 * 0.7
        np.testing.assert_allclose(found.u[:, 0], exact, rtol=0, atol=1e-14)
        without = solve(prob)
        assert without.nreject > found.nreject


def assert_same_solve(prob, alg, rtol, **options):
    """Of the compiled engine."""
    sol = eo.solve(prob, alg, engine="compiled", **options)
    found = solve(prob, alg, **options)
    counts = found.retcode, found.naccept, found.nreject
    assert counts == (int(sol.retcode), int(sol.stats.naccept), int(sol.stats.nreject))
    assert found.u.dtype == sol.u.dtype
    rows = int(sol.length)
    assert rows == np.isfinite(found.t).sum()
    np.testing.assert_allclose(found.t, np.asarray(sol.t)[:rows], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(found.u, np.asarray(sol.u)[:rows], rtol=rtol, atol=rtol)


def competing(span, dtype=np.float64):
    """Two species. (Even the first, short steps have errors that are more than rounding.)"""

    def f(u, p, t):
        x, y = u
        return jnp.stack([p[0] * x - x * y, x * y - p[1] * y * (1 + 0.1 * jnp.sin(t))])

    return eo.ODEProblem(f, np.array([1.0, 0.7], dtype), span, np.array([1.5, 2.0], dtype))


METHODS = [
    *(
        (x, {})
        for x in (eo.Tsit5(), eo.Vern7(), eo.BS5(), eo.Dopri8(), eo.Rodas5P(), eo.Rosenbrock23())
    ),
    (eo.RK4(), {"dt": 0.07, "adaptive": False}),
    (eo.Tsit5(), {"dt": 0.5, "dtmax": 0.2}),
    (eo.Tsit5(), {"internalnorm": eo.MaxNorm(), "abstol": np.array([1e-3, 1e-8])}),
    (eo.Tsit5(), {"stepsize_controller": eo.PIDController(0.7, -0.4)}),
]


@pytest.mark.slow
@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize(
    ("alg", "how"),
    [pytest.param(*x, id=f"{type(x[0]).__name__}-{i}") for i, x in enumerate(METHODS)],
)
def test_as_the_compiled_engine(alg, how, span, known):
    """(Sizes of steps have single precision.)"""
    for saved in ("times", "steps"):
        options = {**how, **KNOWN[known], **in_order(SAVED[saved], span)}
        assert_same_solve(competing(span), alg, 3e-5 if saved == "steps" else 1e-6, **options)


@pytest.mark.slow
def test_single_precision():
    """(By a method whose estimates are more than rounding, also in single precision.)"""
    for known in KNOWN.values():
        assert_same_solve(competing((0.0, 3.0), np.float32), eo.Bosh3(), 1e-4, saveat=0.3, **known)


Code = eo.ReturnCode
ENDS = {
    "at infinity": (Code.Unstable, lambda u, t: u**2, {}),
    "at infinity, by fixed steps": (
        Code.Unstable,
        lambda u, t: u**2,
        {"adaptive": False, "dt": 0.5},
    ),
    "at NaN": (Code.Unstable, lambda u, t: jnp.where(t > 1.5, jnp.nan, u), {}),
    "where tolerances can't be met": (
        Code.DtLessThanMin,
        lambda u, t: jnp.cos(t) - u,
        {"abstol": 1e-60, "reltol": 1e-60},
    ),
    "below dtmin": (Code.DtLessThanMin, lambda u, t: -1e4 * (u - jnp.cos(t)), {"dtmin": 1e-2}),
    "below what time resolves": (
        Code.DtLessThanMin,
        lambda u, t: -u,
        {"adaptive": False, "dt": 1e-20},
    ),
    "for want of steps": (Code.MaxIters, lambda u, t: -1e6 * u, {"maxiters": 50}),
    "for want of fixed steps": (
        Code.MaxIters,
        lambda u, t: -u,
        {"adaptive": False, "dt": 0.01, "maxiters": 299},
    ),
    "with no fixed step to spare": (
        Code.Success,
        lambda u, t: -u,
        {"adaptive": False, "dt": 0.01, "maxiters": 300},
    ),
    "too far": (Code.Diverged, lambda u, t: 2 * u, {"max_norm": 50.0}),
    "too far, by fixed steps": (
        Code.Diverged,
        lambda u, t: 2 * u,
        {"max_norm": 50.0, "adaptive": False, "dt": 0.01},
    ),
    "well": (Code.Success, lambda u, t: -u, {}),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", ENDS)
def test_return_codes(how):
    code, f, options = ENDS[how]
    prob = eo.ODEProblem(lambda u, p, t: f(u, t), [1.0], (1.0, 4.0))
    found = solve(prob, **options)
    sol = eo.solve(prob, eo.Tsit5(), engine="compiled", **options)
    assert found.retcode == sol.retcode == code
    # (On the way to infinity, or to the least of steps, rounding decides.)
    close = {"rtol": 0.1, "atol": 3} if code in (Code.Unstable, Code.DtLessThanMin) else {"rtol": 0}
    np.testing.assert_allclose(found.naccept, int(sol.stats.naccept), **close)
    assert np.isfinite(found.u[-1]).all() == (code == Code.Success)


@pytest.mark.parametrize("options", [{}, {"saveat": [1.0, 1.0]}])
def test_no_time_and_no_number(options):
    prob = eo.ODEProblem(lambda u, p, t: -u, [2.0], (1.0, 1.0))
    found = solve(prob, **options)
    assert (found.retcode, found.naccept) == (Code.Success, 0)
    np.testing.assert_array_equal(found.u, [[2.0], [2.0]])
    assert solve(eo.remake(prob, u0=[np.nan], tspan=(1.0, 2.0))).retcode == Code.Unstable
