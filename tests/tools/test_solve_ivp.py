"""`solve_ivp` beside SciPy's, on the cases of SciPy's own tests, written for JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

import ensembleode as eo
from ensembleode.tools.solve_ivp import METHODS

from ..marks import slow_unless


QUICK = ("RK45", "Radau")
EVERY_METHOD = pytest.mark.parametrize("method", [slow_unless(x in QUICK, x) for x in METHODS])
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def rational(t, y):
    return jnp.array([y[1] / t, y[1] * (y[0] + 2 * y[1] - 1) / (t * (y[0] - 1))])


def exact_rational(t):
    t = np.asarray(t)
    return np.stack([t / (t + 10), 10 * t / (t + 10) ** 2])


def jac_rational(t, y):
    return jnp.array(
        [
            [0, 1 / t],
            [
                -2 * y[1] ** 2 / (t * (y[0] - 1) ** 2),
                (y[0] + 4 * y[1] - 1) / (t * (y[0] - 1)),
            ],
        ]
    )


def error(y, exact, rtol=1e-3, atol=1e-6):
    return np.linalg.norm((y - exact) / (atol + rtol * np.abs(exact)), axis=0) / y.shape[0] ** 0.5


@pytest.mark.quick_cases(1)
@EVERY_METHOD
@pytest.mark.parametrize("t_span", [(5.0, 9.0), (5.0, 1.0)], ids=["forwards", "backwards"])
@pytest.mark.parametrize("how", ["plain", "vectorized", "jac"])
def test_integration(method, t_span, how):
    """SciPy's main test: the error is within the tolerances, at the steps and between them."""
    options = {"jac": jac_rational} if how == "jac" else {}
    result = eo.solve_ivp(
        (lambda t, y: rational(t, y[:, 0])[:, None]) if how == "vectorized" else rational,
        t_span,
        [1 / 3, 2 / 9],
        method=method,
        dense_output=True,
        vectorized=how == "vectorized",
        rtol=1e-3,
        atol=1e-6,
        **options,
    )
    assert result.t[0] == t_span[0]
    assert (result.t_events, result.y_events) == (None, None)
    assert result.success
    assert result.status == 0
    assert 20 < result.nfev < 200
    if method in ("Radau", "BDF"):
        assert 0 < result.njev < 40
        assert 0 < result.nlu < 40
    elif method != "LSODA":
        assert (result.njev, result.nlu) == (0, 0)
    assert (error(result.y, exact_rational(result.t)) < 5).all()
    tc = np.linspace(*t_span)
    assert (error(result.sol(tc), exact_rational(tc)) < 5).all()
    between = (t_span[0] + t_span[-1]) / 2
    np.testing.assert_allclose(result.sol(between), result.sol([between])[:, 0], rtol=1e-15)
    np.testing.assert_allclose(result.sol(result.t), result.y, rtol=1e-13)


@pytest.mark.parametrize("method", ["RK45", slow_unless(False, "DOP853")])
def test_complex(method):
    result = eo.solve_ivp(
        lambda t, y: -y, [0, 1], [0.5 + 1j], method=method, dense_output=True, **TIGHT
    )
    np.testing.assert_allclose(result.y[0], (0.5 + 1j) * np.exp(-result.t), rtol=1e-6)
    np.testing.assert_allclose(result.sol(0.3)[0], (0.5 + 1j) * np.exp(-0.3), rtol=1e-6)


@pytest.mark.parametrize(
    "method", ["Radau", slow_unless(False, "BDF"), slow_unless(False, "LSODA")]
)
def test_a_stiff_problem(method):
    def robertson(t, y):
        slow, fast = 0.04 * y[0], 1e4 * y[1] * y[2]
        return [-slow + fast, slow - fast - 3e7 * y[1] ** 2, 3e7 * y[1] ** 2]

    result = eo.solve_ivp(robertson, [0, 1e8], [1e4, 0, 0], rtol=1e-6, atol=1e-6, method=method)
    assert result.status == 0
    assert result.nfev < 5000
    assert result.njev < 300  # (Each step has its own Jacobian.)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("method", ["Radau", slow_unless(False, "BDF")])
@pytest.mark.parametrize("kind", ["matrix", "function", "none"])
def test_a_constant_jacobian(method, kind):
    a = np.array([[-1.0, 2.0], [0.0, -3.0]])
    jac = {"matrix": a, "function": lambda t, y: a, "none": None}[kind]
    result = eo.solve_ivp(
        lambda t, y: a @ y, [0, 2], [0, 2], rtol=1e-6, atol=1e-8, method=method, jac=jac
    )
    exact = np.stack([2 * (np.exp(-result.t) - np.exp(-3 * result.t)), 2 * np.exp(-3 * result.t)])
    np.testing.assert_allclose(result.y, exact, rtol=1e-4, atol=1e-6)


def first_event(t, y):
    return y[0] - y[1] ** 0.7


def second_event(t, y):
    return y[1] ** 0.6 - y[0]


def third_event(t, y):
    return t - 7.4


def with_attributes(event, **attributes):
    def copied(*args):
        return event(*args)

    vars(copied).update(attributes)
    return copied


def reference(events, t_span, y0, method="RK45", **options):
    """SciPy's result for the same functions."""
    return scipy.integrate.solve_ivp(
        lambda t, y: np.asarray(rational(t, y)), t_span, y0, method, events=events, **options
    )


ALL = (first_event, second_event, third_event)
EVENTS = {
    "all": ALL,
    "rising": tuple(with_attributes(x, direction=1) for x in ALL),
    "falling": tuple(with_attributes(x, direction=-1) for x in ALL),
    "the first ends it": (with_attributes(first_event, terminal=True), *ALL[1:]),
    "the second ends it": (first_event, with_attributes(second_event, terminal=1), third_event),
    "one alone": third_event,
}
SOME_EVENTS = ("all", "the first ends it")


@pytest.mark.quick_cases(1)
@EVERY_METHOD
@pytest.mark.parametrize(
    "name", [slow_unless(x in ("all", "the first ends it"), x) for x in EVENTS]
)
@pytest.mark.parametrize("t_span", [(5.0, 8.0), slow_unless(False, (8.0, 5.0))], ids=str)
def test_events(method, name, t_span):
    """The times, the states and the status are SciPy's."""
    y0 = exact_rational(t_span[0])
    expected = reference(EVENTS[name], t_span, y0, **TIGHT)
    result = eo.solve_ivp(
        rational, t_span, y0, method, events=EVENTS[name], dense_output=True, **TIGHT
    )
    assert result.status == expected.status
    assert len(result.t_events) == len(expected.t_events)
    for found, wanted in zip(result.t_events, expected.t_events, strict=True):
        assert len(found) == len(wanted)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for found, wanted in zip(result.y_events, expected.y_events, strict=True):
        assert np.shape(found) == (len(wanted), 2) or not len(wanted)
        if len(wanted):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(result.t[-1], expected.t[-1], rtol=1e-5)
    tc = np.linspace(t_span[0], result.t[-1])
    assert (error(result.sol(tc), exact_rational(tc)) < 5).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [2, 1, 3, 20])
def test_as_many_events_as_end_it(n):
    """SciPy's harmonic oscillator, whose zeros are half a period apart."""

    def sine(t, y):
        return [y[1], -y[0]]

    event = with_attributes(lambda t, y: y[0], terminal=n)
    result = eo.solve_ivp(sine, (0, 40), [1.0, 0.0], events=event, **TIGHT)
    zeros = np.pi / 2 + np.pi * np.arange(13)
    np.testing.assert_allclose(result.t_events[0], zeros[:n], rtol=1e-6)
    assert result.status == (1 if n <= 12 else 0)
    assert result.t[-1] == (result.t_events[0][-1] if n <= 12 else 40)


def test_events_take_arguments():
    def lotka(t, y, a, b):
        return [a * y[0] - y[0] * y[1], -b * y[1] + y[0] * y[1]]

    def peak(t, y, a, b):
        return y[1] - a

    peak.direction = -1
    result = eo.solve_ivp(lotka, (0, 10), [1.0, 1.0], events=peak, args=(1.5, 2.0), **TIGHT)
    np.testing.assert_allclose(result.y_events[0][:, 1], 1.5, rtol=1e-6)
    assert len(result.t_events[0]) > 0


@pytest.mark.quick_cases(1)
@EVERY_METHOD
def test_max_step(method):
    result = eo.solve_ivp(
        rational, [5.0, 9.0], [1 / 3, 2 / 9], rtol=1e-3, atol=1e-6, max_step=0.5, method=method
    )
    assert result.status == 0
    assert (np.abs(np.diff(result.t)) <= 0.5 + 1e-15).all()
    with pytest.raises(ValueError, match="dtmax must be"):
        eo.solve_ivp(rational, [5.0, 9.0], [1 / 3, 2 / 9], method=method, max_step=-1)


def test_first_step():
    result = eo.solve_ivp(rational, [5.0, 9.0], [1 / 3, 2 / 9], first_step=0.1, max_step=np.inf)
    np.testing.assert_allclose(result.t[1] - 5, 0.1, rtol=1e-12)
    with pytest.raises(ValueError, match="dt=-1 is negative"):
        eo.solve_ivp(rational, [5.0, 9.0], [1 / 3, 2 / 9], first_step=-1)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("t_span", "t_eval"),
    [
        ((5.0, 9.0), np.linspace(5, 9, 10)),
        ((5.0, 1.0), np.linspace(5, 1, 10)),
        ((5.0, 9.0), [5.01, 7, 8.01, 9]),
        ((5.0, 1.0), [4.99, 3, 1.5, 1.1, 1.01, 1]),
        ((5.0, 9.0), [5.0, 6, 7.5]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dense_output", [False, True])
def test_t_eval(t_span, t_eval, dense_output):
    result = eo.solve_ivp(
        rational, t_span, [1 / 3, 2 / 9], t_eval=t_eval, dense_output=dense_output
    )
    np.testing.assert_array_equal(result.t, t_eval)
    assert result.y.shape == (2, len(t_eval))
    assert (error(result.y, exact_rational(result.t)) < 5).all()
    assert (result.sol is not None) == dense_output


@pytest.mark.parametrize(
    ("t_eval", "message"),
    [
        ([4, 6], "not within t_span"),
        ([6, 10], "not within t_span"),
        ([6, 5.5], "not sorted"),
        ([6, 6], "not sorted"),
        ([[6, 7]], "1-dimensional"),
    ],
)
def test_wrong_t_eval(t_eval, message):
    with pytest.raises(ValueError, match=message):
        eo.solve_ivp(rational, (5.0, 9.0), [1 / 3, 2 / 9], t_eval=t_eval)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dense_output", [False, True])
def test_an_event_before_the_times(dense_output):
    event = with_attributes(lambda t, y: t - 7, terminal=True)
    t_eval = np.array([7.5, 9.0])
    options = {"events": event, "dense_output": dense_output}
    result = eo.solve_ivp(rational, (5.0, 9.0), [1 / 3, 2 / 9], t_eval=t_eval, **options)
    assert result.status == 1
    assert result.t.shape == (0,)
    assert result.y.shape == (2, 0)
    np.testing.assert_allclose(result.t_events[0], 7, rtol=1e-12)
    result = eo.solve_ivp(rational, (5.0, 9.0), [1 / 3, 2 / 9], t_eval=[6.0, 7.5], **options)
    np.testing.assert_array_equal(result.t, [6.0])


@pytest.mark.parametrize("method", ["RK45", slow_unless(False, "Radau")])
def test_no_integration(method):
    result = eo.solve_ivp(lambda t, y: -y, [4, 4], [2, 3], method=method, dense_output=True)
    np.testing.assert_array_equal(result.sol(4), [2, 3])
    np.testing.assert_array_equal(result.y[:, -1], [2, 3])
    assert result.status == 0


def test_arrays_of_tolerances():
    one = eo.solve_ivp(rational, [5.0, 9.0], [1 / 3, 2 / 9], rtol=1e-1, atol=1e-6)
    two = eo.solve_ivp(
        rational, [5.0, 9.0], [1 / 3, 2 / 9], rtol=[1e-1, 1e-3], atol=[1e-6, 1e-6], dt=0.1
    )
    exact = exact_rational(9.0)
    assert np.abs(two.y[:, -1] - exact).max() <= np.abs(one.y[:, -1] - exact).max() + 1e-3


def test_args():
    """One, several, an array; a single number is an error, as in SciPy."""

    def fun(t, y, *p):
        return -sum(jnp.sum(x) for x in p) * y

    for args in ((2.0,), (1.0, 1.0), (np.array([0.5, 1.5]),), [2.0]):
        result = eo.solve_ivp(fun, (0, 1), [1.0], args=args, **TIGHT)
        np.testing.assert_allclose(result.y[0, -1], np.exp(-2), rtol=1e-6)
    with pytest.raises(TypeError, match=r"args must be a tuple, got 2.0: .*\(value,\)"):
        eo.solve_ivp(fun, (0, 1), [1.0], args=2.0)


def test_nothing_moves():
    result = eo.solve_ivp(lambda t, y: [0.0 * y[0]] * 3, [0, 10], np.ones(3))
    assert result.success
    np.testing.assert_array_equal(result.y, 1.0)


def test_a_failure_has_what_was_reached():
    result = eo.solve_ivp(lambda t, y: y**2, (0, 2), [1.0], rtol=1e-6)
    assert (result.status, result.success) == (-1, False)
    assert result.message == "The solve failed: Unstable."
    assert result.t[-1] < 1.001
    inside = result.t < 0.99
    np.testing.assert_allclose(result.y[0, inside], 1 / (1 - result.t[inside]), rtol=1e-3)


def test_a_number_as_the_state_and_an_integer():
    result = eo.solve_ivp(lambda t, y: -y, (0, 1), 1, **TIGHT)
    assert result.y.shape[0] == 1
    np.testing.assert_allclose(result.y[0, -1], np.exp(-1), rtol=1e-6)
    np.testing.assert_array_equal(result["y"], result.y)


def test_our_methods_and_options():
    result = eo.solve_ivp(lambda t, y: -y, (0, 1), [1.0], eo.Vern7(), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(result.y[0, -1], np.exp(-1), rtol=1e-9)
    result = eo.solve_ivp(lambda t, y: -y, (0, 1), [1.0], reltol=1e-10, abstol=1e-10)
    np.testing.assert_allclose(result.y[0, -1], np.exp(-1), rtol=1e-9)
    result = eo.solve_ivp(lambda t, y: -y, (0, 1), [1.0], maxiters=2)
    assert result.retcode == eo.ReturnCode.MaxIters


def test_derivatives():
    """By the state, arguments, times, and of the time of an event."""

    def fun(t, y, k):
        return -k * y

    def half(t, y, k):
        return y[0] - 0.5

    half.terminal = True

    def of(y0, k, t1):
        ends = eo.solve_ivp(fun, (0.0, t1), [y0], t_eval=t1[None], args=(k,), **TIGHT)
        event = eo.solve_ivp(fun, (0.0, 9.0), [y0], events=half, t_eval=[], args=(k,), **TIGHT)
        return ends.y[0, 0] + event.t_events[0][0]

    y0, k, t1 = 1.2, 0.7, jnp.array(0.8)
    found = jax.jit(jax.grad(of, (0, 1, 2)))(y0, k, t1)
    end = y0 * np.exp(-k * t1)
    expected = end / y0 + 1 / (k * y0), -t1 * end - np.log(2 * y0) / k**2, -k * end
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_longest_step_that_is_traced():
    def steps(longest):
        return eo.solve_ivp(lambda t, y: -y, (0, 1), [1.0], t_eval=[1.0], max_step=longest).nfev

    assert jax.jit(steps)(0.01) > 600 > jax.jit(steps)(1.0)


def test_under_vmap():
    def of(k):
        return eo.solve_ivp(lambda t, y, k: -k * y, (0, 1), [1.0], t_eval=[0.5, 1.0], args=(k,)).y

    ks = jnp.array([0.5, 1.0, 2.0])
    expected = np.exp(-np.outer(ks, [0.5, 1.0]))
    np.testing.assert_allclose(jax.vmap(of)(ks)[:, 0], expected, rtol=2e-3)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"method": "RK4"}, ValueError, r"method must be one of RK23, .*; got 'RK4'"),
        ({"t_span": 3.0}, ValueError, r"t_span must be the times \(t0, tf\)"),
        ({"y0": np.ones((2, 2))}, ValueError, "y0 must be 1-dimensional"),
        ({"tol": 1e-3}, TypeError, "solve has no option 'tol'"),
        (
            {"events": with_attributes(third_event, terminal=1.5)},
            ValueError,
            "terminal of an event must be True, False",
        ),
    ],
)
def test_what_is_refused(given, error, message):
    given = {"fun": rational, "t_span": (5.0, 9.0), "y0": [1 / 3, 2 / 9], **given}
    with pytest.raises(error, match=message):
        eo.solve_ivp(**given)
