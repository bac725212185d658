"""The steps of Rosenbrock methods, in NumPy and with dense matrices, compared with the theory."""

import functools

import numpy as np
import pytest

import ensembleode as eo
from ensembleode.solvers.arithmetic import NUMBERS
from ensembleode.solvers.method import Equations


METHODS = [eo.Rosenbrock23(), eo.Rodas4(), eo.Rodas5P()]
methods = functools.partial(pytest.mark.parametrize, "alg", METHODS, ids=lambda x: type(x).__name__)


def equations(f, jacobian, dfdt):
    return Equations(
        f,
        lambda y, t, dy, dt: y,
        lambda y, t: (np.asarray(jacobian(y, t)), None if dfdt is None else dfdt(y, t)),
        lambda matrix, gamma_h: np.eye(len(matrix)) - gamma_h * matrix,
        lambda matrix, b: tuple(np.linalg.solve(matrix, np.array(b))),
    )


def stepped(alg, eqs, y, end, steps):
    """The attempts of so many equal steps, each with the state and the time that it began in."""
    method, h = alg.method, end / steps
    carry = method.init(NUMBERS, eqs, y, 0.0)
    for i in range(steps):
        attempt = method.step(NUMBERS, eqs, y, carry, i * h, h)
        yield y, i * h, attempt
        y, carry = attempt.y2, attempt.carry


def moving():
    """A nonlinear system with the time in it, and its solution."""

    def solution(t):
        return np.sin(t), np.exp(-t)

    def f(y, t):
        (a, b), (s, e) = y, solution(t)
        return np.cos(t) + np.sin(t) * (b - e) - a * a + s * s, -e + a * b - s * e

    def jacobian(y, t):
        a, b = y
        return [[-2 * a, np.sin(t)], [b, a]]

    def dfdt(y, t):
        b, (s, e), c = y[1], solution(t), np.cos(t)
        return -s + c * (b - e) + s * e + 2 * s * c, e - c * e + s * e

    return equations(f, jacobian, dfdt), solution


def rates(errors):
    return np.log2(np.array(errors[:-1]) / np.array(errors[1:]))


@methods()
def test_order_of_the_steps_of_the_interpolant_and_of_the_estimate(alg):
    eqs, solution = moving()
    method, at_end, within, estimates = alg.method, [], [], []
    for steps in (8, 16, 32):
        worst, inside, estimated = 0.0, 0.0, 0.0
        for y, t, attempt in stepped(alg, eqs, solution(0.0), 1.0, steps):
            h = 1.0 / steps
            dense = method.dense(NUMBERS, eqs, y, attempt.dense, t, h)
            for theta in (0.3, 0.7):
                u = method.interpolate(NUMBERS, y, dense, h, theta)
                inside = max(inside, np.abs(np.subtract(u, solution(t + theta * h))).max())
            ends = [method.interpolate(NUMBERS, y, dense, h, x) for x in (0.0, 1.0)]
            np.testing.assert_allclose(ends, [y, attempt.y2], rtol=1e-14, atol=1e-14)
            worst = max(worst, np.abs(np.subtract(attempt.y2, solution(t + h))).max())
            estimated = max(estimated, np.abs(attempt.error).max())
        at_end.append(worst)
        within.append(inside)
        estimates.append(estimated)
    assert np.all(np.abs(rates(at_end) - alg.order) < 0.45)
    degree = {2: 2, 4: 4, 5: 5}[alg.order]
    assert np.all(rates(within) > degree - 0.7)
    local = min(alg.order, method.embedded_order) + 1
    assert np.all(np.abs(rates(estimates) - local) < 0.7)


@methods()
def test_integrals_of_polynomials_are_exact_within_a_step_too(alg):
    """To rounding: a misprint in the twelfth digit of a coefficient shows."""
    method, h, t = alg.method, 0.5, 0.25
    for power in range(alg.order):
        eqs = equations(
            lambda y, t, n=power: (t**n,),
            lambda y, t: [[0.0]],
            lambda y, t, n=power: (n * t ** max(0, n - 1),),
        )
        exact = functools.partial(np.polyval, np.polyint([1.0, *[0.0] * power]))
        y = (exact(t),)
        attempt = method.step(NUMBERS, eqs, y, method.init(NUMBERS, eqs, y, t), t, h)
        assert abs(attempt.y2[0] - exact(t + h)) < 5e-15
        if power == method.degree:
            continue  # (The interpolant is of one order less.)
        dense = method.dense(NUMBERS, eqs, y, attempt.dense, t, h)
        for theta in (0.1, 0.4, 0.8):
            (u,) = method.interpolate(NUMBERS, y, dense, h, theta)
            assert abs(u - exact(t + theta * h)) < 2e-14, (power, theta)


@pytest.mark.parametrize("alg", [eo.Rodas4, eo.Rodas5P])
def test_consistency_of_the_coefficients(alg):
    """The nodes and the factors of df/dt follow from the other coefficients (Hairer and Wanner
    (7.15)): a stage of the form with products by the Jacobian has `alpha = a Gamma^-1` there."""
    method = alg.method
    n = method.stages
    a, coupling = np.zeros((2, n, n))
    for i in range(1, n):
        a[i, :i], coupling[i, :i] = method.a[i - 1], method.coupling[i - 1]
    gamma = np.linalg.inv(np.eye(n) / method.gamma - coupling)
    np.testing.assert_allclose((a @ gamma).sum(1), method.c, atol=1e-13)
    np.testing.assert_allclose(gamma.sum(1), method.d, atol=2e-13)


def forced(rate):
    """Prothero and Robinson's problem: `y' = rate (y - phi(t)) + phi'(t)`."""

    def phi(t):
        return np.sin(t + np.pi / 4)

    def slope(t):
        return np.cos(t + np.pi / 4)

    return equations(
        lambda y, t: (rate * (y[0] - phi(t)) + slope(t),),
        lambda y, t: [[rate]],
        lambda y, t: (-rate * slope(t) - phi(t),),
    ), phi


@methods()
def test_order_reduction_is_as_published(alg):
    """Where steps are far longer than the fast mode lives, errors are of the order of h^2, of
    Rodas4 of h / rate, and of Rodas5P of h^3 / rate (Steinebach (2023), section 3)."""
    order, exponent = {2: (2, 0), 4: (1, 1), 5: (3, 1)}[alg.order]
    found = []
    for rate in (-1e4, -1e6):
        eqs, phi = forced(rate)
        errors = []
        for steps in (16, 32, 64):
            attempts = stepped(alg, eqs, (phi(0.0),), 2.0, steps)
            errors.append(max(abs(a.y2[0] - phi(t + 2 / steps)) for _, t, a in attempts))
        assert np.all(np.abs(rates(errors) - order) < 0.2)
        found.append(errors[1])
    assert abs(np.log10(found[0] / found[1]) - 2 * exponent) < 0.1


@methods()
def test_what_is_infinitely_fast_is_gone_after_a_step(alg):
    eqs = equations(lambda y, t: (-1e12 * y[0],), lambda y, t: [[-1e12]], None)
    (_, _, attempt), *_ = stepped(alg, eqs, (1.0,), 1.0, 1)
    assert 0 < abs(attempt.y2[0]) < 2e-11


@methods()
def test_stable_for_whatever_decays(alg):
    for z in -np.logspace(-2, 14, 33):
        eqs = equations(lambda y, t, z=z: (z * y[0],), lambda y, t, z=z: [[z]], None)
        (_, _, attempt), *_ = stepped(alg, eqs, (1.0,), 1.0, 1)
        assert abs(attempt.y2[0]) < 1


def test_what_is_said_of_them():
    for alg in METHODS:
        assert alg.implicit
        assert alg.adaptive
        assert alg.engines == ("compiled", "julia")
        assert alg.method.is_implicit
        assert not alg.method.remembers
        assert alg.stages == alg.method.stages
    assert [alg.order for alg in METHODS] == [2, 4, 5]
    assert [alg.method.evaluations(10) for alg in METHODS] == [21, 60, 80]
    assert [tuple(alg.method.linear_algebra(10)) for alg in METHODS] == [
        (10, 10, 30),
        (10, 10, 60),
        (10, 10, 80),
    ]
