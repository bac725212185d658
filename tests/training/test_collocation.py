"""Derivatives of data, compared with exact ones and with weighted least squares by NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo
from ensembleode.training.collocation import KERNELS

from ..marks import slow_unless


# At zero, and where they end; from the literature.
PEAKS = {
    "epanechnikov": 3 / 4,
    "uniform": 1 / 2,
    "triangular": 1,
    "quartic": 15 / 16,
    "triweight": 35 / 32,
    "tricube": 70 / 81,
    "gaussian": 1 / np.sqrt(2 * np.pi),
    "cosine": np.pi / 4,
    "logistic": 1 / 4,
    "sigmoid": 1 / np.pi,
    "silverman": 1 / (2 * np.sqrt(2)),
}
UNBOUNDED = {"gaussian", "logistic", "sigmoid", "silverman"}
TS = jnp.linspace(0.0, 6.0, 61)


def moment(kernel, power):
    x = np.linspace(-60, 60, 240_001)
    return np.trapezoid(np.asarray(kernel(x)) * x**power, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name):
    kernel = KERNELS[name]
    np.testing.assert_allclose(kernel(jnp.zeros(())), PEAKS[name], rtol=1e-14)
    x = jnp.linspace(0.01, 30.0, 500)
    np.testing.assert_array_equal(kernel(x), kernel(-x))
    assert bool(jnp.any(kernel(x[x > 1]) != 0)) == (name in UNBOUNDED)
    if name != "silverman":
        assert jnp.all(kernel(x) >= 0)
        np.testing.assert_allclose(moment(kernel, 0), 1.0, atol=3e-4)  # (uniform: its edges)
    assert np.isfinite(jax.vmap(jax.grad(kernel))(jnp.array([0.0, 1.0, -1.0, 2.0, 1e4]))).all()


def test_kernel_of_silverman_has_a_second_moment():
    """As it is in the literature it integrates to one and has none: no line can be fitted."""

    def literature(x):
        scaled = np.abs(x) / np.sqrt(2)
        return np.exp(-scaled) * np.sin(scaled + np.pi / 4) / 2

    np.testing.assert_allclose(moment(literature, 0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(moment(literature, 2), 0.0, atol=1e-6)
    assert moment(KERNELS["silverman"], 2) > 1


def by_numpy(ts, data, kernel, bandwidth, at):
    """As in the paper: (T'WT)^-1 T'W data."""
    width = bandwidth * (ts[-1] - ts[0])
    du, u = [], []
    for t in at:
        x = ts - t
        w = np.diag(np.asarray(KERNELS[kernel](x / width)) / width)
        line, parabola = np.vander(x, 2, increasing=True), np.vander(x, 3, increasing=True)
        u.append((np.linalg.solve(line.T @ w @ line, line.T @ w @ data))[0])
        du.append((np.linalg.solve(parabola.T @ w @ parabola, parabola.T @ w @ data))[1])
    return np.array(du), np.array(u)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_weighted_least_squares(kernel):
    rng = np.random.default_rng(0)
    ts = np.sort(rng.uniform(-2.0, 3.0, 21))
    data = rng.normal(size=(21, 2))
    at = np.array([-2.1, 0.7, 3.0])
    for bandwidth in (0.5, 1.0):
        got = eo.collocate_data(ts, data, kernel, bandwidth, at=at)
        expected = by_numpy(ts, data, kernel, bandwidth, at)
        np.testing.assert_allclose(got.du, expected[0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(got.u, expected[1], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@given(
    gaps=st.lists(st.floats(0.1, 2.0), min_size=5, max_size=20),
    start=st.floats(-10.0, 10.0),
    kernel=st.sampled_from(sorted(KERNELS)),
    bandwidth=st.floats(1.05, 3.0),
    coefficients=st.tuples(*[st.floats(-5.0, 5.0)] * 3),
)
@settings(max_examples=40, deadline=None)
def test_polynomials_are_exact(gaps, start, kernel, bandwidth, coefficients):
    ts = start + np.cumsum(gaps)
    # (As many times in each example, so that it is compiled once for each kernel.)
    ts = np.concatenate([ts, ts[-1] + 0.1 * np.arange(1, 22 - len(ts))])
    a, b, c = coefficients
    x = ts - ts[0]
    at = np.array([ts[0], (ts[0] + ts[-1]) / 2, ts[-1]])
    data = np.stack([a + b * x, a + b * x + c * x**2], axis=1)
    du, u = eo.collocate_data(ts, data, kernel, bandwidth, at=at)
    scale = np.abs(data).max() + 1
    np.testing.assert_allclose(u[:, 0], a + b * (at - ts[0]), atol=1e-9 * scale)
    np.testing.assert_allclose(du[:, 0], b + 0 * at, atol=1e-8 * scale)
    np.testing.assert_allclose(du[:, 1], b + 2 * c * (at - ts[0]), atol=1e-8 * scale)


def test_default_bandwidth():
    n = len(TS)
    h = n ** (-1 / 5) * n ** (-3 / 35) * np.log(n) ** (-1 / 16)
    expected = eo.collocate_data(TS, jnp.sin(TS), "triangular", h)
    got = eo.collocate_data(TS, jnp.sin(TS))
    np.testing.assert_array_equal(got.du, expected.du)
    np.testing.assert_array_equal(got.u, expected.u)


def test_units_of_time():
    du, u = eo.collocate_data(TS, jnp.sin(TS), "cosine", 0.2)
    slow, same = eo.collocate_data(1e6 + 100 * TS, jnp.sin(TS), "cosine", 0.2)
    np.testing.assert_allclose(100 * slow, du, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(same, u, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_times_may_come_several_times():
    ts = jnp.repeat(TS, 2)
    data = jnp.stack([jnp.sin(TS) - 0.5, jnp.sin(TS) + 0.5], axis=1).ravel()
    got, expected = (eo.collocate_data(*x, "quartic", 0.1) for x in ((ts, data), (TS, jnp.sin(TS))))
    np.testing.assert_allclose(got.du[::2], expected.du, atol=1e-11)
    np.testing.assert_allclose(got.u[1::2], expected.u, atol=1e-12)


@pytest.mark.slow
def test_long_data():
    """More times than are estimated at once."""
    ts = jnp.linspace(0.0, 6.0, 1001)
    du, u = eo.collocate_data(ts, jnp.sin(ts), "uniform", 0.01)
    np.testing.assert_allclose(du, jnp.cos(ts), atol=2e-3)
    np.testing.assert_allclose(u, jnp.sin(ts), atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "state"),
    [
        (dtype, state)
        for dtype in (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128)
        for state in ((), (2, 3))
    ],
)
def test_dtypes_and_shapes(dtype, state):
    data = jnp.broadcast_to(jnp.sin(TS).reshape(-1, *[1] * len(state)), (61, *state)).astype(dtype)
    got = eo.collocate_data(TS, data, "epanechnikov", 0.05)
    expected = eo.collocate_data(TS, jnp.sin(TS), "epanechnikov", 0.05)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == data.shape
        assert x.dtype == dtype
        y = jnp.broadcast_to(y.reshape(-1, *[1] * len(state)), x.shape)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=3e-5)


@pytest.mark.slow
def test_transformations():
    data = jnp.stack([jnp.sin(TS), jnp.exp(-TS)], axis=1)

    def collocate(ts, data, bandwidth):
        return eo.collocate_data(ts, data, "triweight", bandwidth, at=ts[::7])

    expected = collocate(TS, data, 0.2)
    jitted = jax.jit(collocate)(TS, data, 0.2)
    mapped = jax.vmap(lambda x: collocate(TS, x, 0.2), in_axes=1, out_axes=1)(data)
    closed = jax.jit(lambda: collocate(TS, data, 0.2))()
    for got in (jitted, mapped, closed):
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    # Linear in the data.
    _, tangent = jax.jvp(lambda x: collocate(TS, x, 0.2), (2.5 * data,), (data,))
    np.testing.assert_allclose(tangent.du, expected.du, rtol=1e-10, atol=1e-12)
    total = jax.grad(lambda x: jnp.sum(collocate(TS, x, 0.2).du))(data)
    np.testing.assert_allclose(jnp.sum(total * data), jnp.sum(expected.du), rtol=1e-9)


@pytest.mark.slow
def test_gradient_by_the_bandwidth():
    """As a search for the best bandwidth takes it."""

    def error(bandwidth):
        return jnp.sum((eo.collocate_data(TS, jnp.sin(TS), "gaussian", bandwidth).u) ** 2)

    got = jax.grad(error)(0.1)
    np.testing.assert_allclose(got, (error(0.1001) - error(0.0999)) / 0.0002, rtol=1e-5)


def enough_for(ts, kernel, bandwidth, message):
    """The bandwidth that the error of a smaller one advises."""
    with pytest.raises(ValueError, match=message) as e:
        eo.collocate_data(ts, ts**2, kernel, bandwidth)
    return float(re.search(r"is about ([\d.e-]+)\.$", str(e.value))[1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "kernel",
    [
        slow_unless(name in ("triangular", "gaussian", "uniform"), name)
        for name in sorted(set(KERNELS) - {"silverman"})
    ],
)
def test_bandwidth_that_is_too_small(kernel):
    data = TS**2
    needed = enough_for(TS, kernel, 1e-4, f"parabola around t=.*{kernel} kernel")
    if kernel not in UNBOUNDED:
        assert 2 / 60 <= needed < 2.01 / 60
    eo.collocate_data(TS, data, kernel, needed)
    with pytest.raises(ValueError, match="bandwidth"):
        eo.collocate_data(TS, data, kernel, 0.99 * needed)


def test_weights_that_cancel():
    enough = enough_for(TS, "silverman", 0.1, "silverman kernel")
    du, _ = eo.collocate_data(TS, TS**2, "silverman", enough)
    np.testing.assert_allclose(du, 2 * TS, atol=1e-10)


@pytest.mark.slow
def test_traced_estimates_that_can_not_be_made_are_nan():
    """Of a gap in the data, and not of the times around it."""
    ts = jnp.concatenate([TS[:20], TS[40:]])
    at = jnp.array([1.0, 3.0, 5.0])
    du, u = jax.jit(lambda ts: eo.collocate_data(ts, ts**2, "uniform", 0.1, at=at))(ts)
    np.testing.assert_allclose(du, [2.0, np.nan, 10.0], rtol=1e-9)
    assert jnp.isnan(u).tolist() == [False, True, False]
    gradient = jax.grad(
        lambda x: jnp.nansum(eo.collocate_data(x * ts, ts**2, "uniform", 0.1, at=at).du)
    )(1.0)
    assert jnp.isfinite(gradient)
    # Where the times are known inside jit, it is an error there, too.
    with pytest.raises(ValueError, match=r"about 0\.0334"):
        jax.jit(lambda data: eo.collocate_data(TS, data, bandwidth=1e-3))(TS)


@pytest.mark.slow
def test_half_the_digits_at_least():
    """With the smallest bandwidth that is let through."""
    for dtype, tolerance in ((jnp.float32, 3e-3), (jnp.float64, 1e-6)):
        ts = TS.astype(dtype)
        for kernel in ("triweight", "gaussian"):
            needed = enough_for(ts, kernel, 1e-4, "bandwidth")
            du, _ = eo.collocate_data(ts, ts**2, kernel, needed)
            np.testing.assert_allclose(du, 2 * ts, atol=12 * tolerance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "boxcar"}, "kernel must be one of epanechnikov, .*'boxcar'"),
        ({"bandwidth": 0.0}, "bandwidth must be a positive number"),
        ({"bandwidth": -1}, "bandwidth must be a positive number"),
        ({"bandwidth": np.nan}, "bandwidth must be a positive number"),
        ({"bandwidth": "wide"}, "bandwidth must be a positive number"),
        ({"bandwidth": [0.1, 0.2]}, "bandwidth must be a positive number"),
        ({"ts": TS[:-1]}, r"a row for each of the 60 times in ts.*\(61,\)"),
        ({"data": 1.0}, "a row for each of the 61 times"),
        ({"ts": TS[::-1]}, "ts must be increasing"),
        ({"ts": 0 * TS}, "ts spans no time: all of it is 0"),
        ({"ts": TS[None]}, r"ts must be an array of times.*\(1, 61\)"),
        ({"ts": TS.at[7].set(jnp.nan)}, "ts has a time that is not finite, at 7"),
        ({"data": TS.at[5].set(jnp.inf)}, "data has a value that is not finite, at 5"),
        ({"data": jnp.stack([TS, TS.at[3].set(jnp.nan)], 1)}, r"not finite, at \(3, 1\)"),
        ({"data": [[1.0, 2.0], [3.0]]}, "data must be one array"),
        ({"data": ["x"] * 61}, "data must be an array of numbers"),
        ({"at": jnp.array([jnp.nan])}, "at has a time that is not finite, at 0"),
        ({"at": jnp.array(1.0)}, r"at must be an array of times.*shape \(\)"),
        ({"ts": jnp.arange(2.0), "data": jnp.arange(2.0)}, "three times at least"),
    ],
)
def test_bad_input(change, message):
    given = {"ts": TS, "data": jnp.sin(TS), "kernel": "triangular", "bandwidth": 0.1} | change
    with pytest.raises((ValueError, TypeError), match=message):
        eo.collocate_data(**given)


def test_integers_and_lists():
    du, u = eo.collocate_data(range(5), [0, 1, 4, 9, 16], bandwidth=0.6)
    np.testing.assert_allclose(du, 2.0 * np.arange(5), atol=1e-12)
    assert u.dtype == jnp.float64
