"""Which times are saved."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ensembleode.plan.saving import grid, resolve_saving, Saving, Spacing
from ensembleode.problem.options import DEFAULTS


DOUBLE = np.dtype(np.float64)
DTYPES = [np.dtype(np.float32), DOUBLE]
EPS = {dtype: float(np.finfo(dtype).eps) for dtype in DTYPES}


def saving_of(t0=0.0, t1=1.0, dtype=DOUBLE, index=0, *, defer=False, **options):
    return resolve_saving({**DEFAULTS, **options}, t0, t1, dtype, index, defer=defer)


def times_of(saveat, t0=0.0, t1=1.0, dtype=DOUBLE, **options):
    return saving_of(t0, t1, dtype, saveat=saveat, **options)[1]


settings = hypothesis.settings(deadline=None, derandomize=True)


@st.composite
def spans(draw, furthest=100.0, directions=(1, -1)):
    """A start, a direction, a spacing and a number of intervals (whole, or not)."""
    t0 = draw(st.floats(-furthest, furthest))
    step = draw(st.floats(0.05, 10))
    intervals = draw(
        st.integers(1, 60)
        | st.builds(lambda n, part: n + part, st.integers(0, 60), st.floats(0.05, 0.95))
    )
    return t0, draw(st.sampled_from(directions)), step, intervals


def laid_out(span, dtype, start=True):
    t0, sign, step, intervals = span
    # As a user would have it: numbers of the dtype of time.
    t0, t1, step = (float(dtype.type(x)) for x in (t0, t0 + sign * intervals * step, step))
    times, count = grid(Spacing(step, start), t0, t1, dtype)
    return t0, t1, step, times, count


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings
@hypothesis.given(span=spans(furthest=0.0) | spans())
def test_grid_from_zero_and_from_anywhere(dtype, span):
    """From t0 to t1 by the spacing, each way, whatever the precision."""
    _, sign, _, intervals = span
    t0, t1, step, times, count = laid_out(span, dtype)
    assert times.dtype == dtype
    assert times.shape == (count,)
    assert count == np.ceil(intervals) + 1
    assert times[0] == t0
    assert times[-1] == t1
    assert (np.diff(times) * sign > 0).all()
    expected = (t0 + sign * step * np.arange(count - 1)).astype(dtype)
    np.testing.assert_array_equal(times[:-1], expected)
    # The last interval is a whole one, or the rest.
    rounding = 64 * EPS[dtype] * max(abs(t0), abs(t1))
    assert abs(times[-1] - times[-2]) <= step + rounding


@pytest.mark.parametrize("span", [(100.0, 100.2), (1000.0, 1000.1)], ids=str)
def test_whole_steps_far_from_zero(span):
    times, count = grid(Spacing(0.1, True), *span, DOUBLE)
    assert count == round((span[1] - span[0]) / 0.1) + 1
    assert times[-1] == span[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings
@hypothesis.given(span=spans(directions=(1,)))
def test_grid_backwards_mirrors_that_forwards(dtype, span):
    t0, t1, step, forwards, _ = laid_out(span, dtype)
    backwards, _ = grid(Spacing(step, True), -t0, -t1, dtype)
    np.testing.assert_array_equal(backwards, -forwards)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings
@hypothesis.given(span=spans())
def test_grid_without_the_start(dtype, span):
    *_, whole, count = laid_out(span, dtype)
    *_, times, shorter = laid_out(span, dtype, start=False)
    np.testing.assert_array_equal(times, whole[1:])
    assert shorter == count - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("step", "span", "expected"),
    [
        (0.1, (0, 1), [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
        (0.1, (0, 0.3), [0, 0.1, 0.2, 0.3]),  # 0.3 / 0.1 is less than 3
        (0.1, (0, 0.7), [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),  # 0.7 / 0.1 as well
        (0.1, (0.2, 0.5), [0.2, 0.3, 0.4, 0.5]),
        (0.3, (0, 1), [0, 0.3, 0.6, 0.9, 1]),
        (1 / 3, (0, 1), [0, 1 / 3, 2 / 3, 1]),
        (1 / 3, (0, 2), [0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2]),
        (0.3, (1, 0), [1, 0.7, 0.4, 0.1, 0]),
        (0.25, (1, -1), [1, 0.75, 0.5, 0.25, 0, -0.25, -0.5, -0.75, -1]),
        (1.0, (0, 1), [0, 1]),
        (5.0, (0, 1), [0, 1]),
        (5.0, (1, 0), [1, 0]),
    ],
)
def test_grid_of(dtype, step, span, expected):
    times, count = grid(Spacing(step, True), *span, dtype)
    assert count == len(expected)
    np.testing.assert_allclose(times, expected, rtol=8 * EPS[dtype], atol=8 * EPS[dtype])
    assert times[0] == dtype.type(span[0])
    assert times[-1] == dtype.type(span[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [10, 999, 10_000])
def test_a_long_span_of_whole_steps_has_no_extra_point(dtype, n):
    end = dtype.type(0.1) * dtype.type(n)
    for t1 in (end, np.nextafter(end, dtype.type(0)), np.nextafter(end, dtype.type(np.inf))):
        times, count = grid(Spacing(0.1, True), 0.0, t1, dtype)
        assert count == n + 1
        assert times[-1] == t1
        assert (np.diff(times) > 0).all()


def test_a_very_long_span_does_not_overshoot():
    times, count = grid(Spacing(1.0, True), 0.0, 1e6, np.dtype(np.float32))
    assert count == 1_000_001
    assert times.max() == 1e6
    assert (np.diff(times) > 0).all()


def test_grid_of_several_spans():
    t0 = np.array([0.0, 0.0, 1.0])
    t1 = np.array([1.0, 0.5, 0.3])
    times, counts = grid(Spacing(0.3, True), t0, t1, DOUBLE)
    assert times.shape == (3, 5)
    np.testing.assert_array_equal(counts, [5, 3, 4])
    np.testing.assert_allclose(times[0], [0, 0.3, 0.6, 0.9, 1])
    np.testing.assert_allclose(times[1], [0, 0.3, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(times[2], [1, 0.7, 0.4, 0.3, 0.3])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("start", [True, False])
@settings
@hypothesis.given(
    ends=st.lists(st.floats(-5, 5).filter(lambda t: abs(t) > 0.1), min_size=1, max_size=5),
    step=st.floats(0.05, 3),
    extra=st.integers(0, 4),
)
def test_grid_of_several_spans_is_each_alone_filled_up(start, ends, step, extra):
    spacing = Spacing(step, start)
    alone = [grid(spacing, 0.0, t1, DOUBLE)[0] for t1 in ends]
    rows = max(map(len, alone)) + extra
    times, counts = grid(spacing, 0.0, np.array(ends), DOUBLE, rows)
    assert times.shape == (len(ends), rows)
    for row, count, t1, expected in zip(times, counts, ends, alone, strict=True):
        assert count == len(expected)
        np.testing.assert_array_equal(row[:count], expected)
        assert (row[count:] == t1).all()


def test_ends_by_default():
    assert saving_of() == (Saving("ends", True, 2), None)
    assert saving_of(save_start=True) == (Saving("ends", True, 2), None)
    assert saving_of(save_start=False) == (Saving("ends", False, 1), None)


def test_every_step():
    assert saving_of(save_everystep=True) == (Saving("steps", True, 0), None)
    assert saving_of(save_everystep=True, save_start=False) == (Saving("steps", False, 0), None)


@pytest.mark.parametrize("saveat", [0.25, np.float32(0.25), np.array(0.25), jnp.asarray(0.25)])
def test_a_number_is_a_spacing(saveat):
    saving, times = saving_of(saveat=saveat)
    assert saving == Saving("times", True, 5)
    np.testing.assert_array_equal(times, [0, 0.25, 0.5, 0.75, 1])


def test_an_integer_is_a_spacing():
    np.testing.assert_array_equal(times_of(1, 0, 3), [0, 1, 2, 3])


def test_a_spacing_may_wait_for_its_span():
    assert saving_of(saveat=0.25, defer=True) == (Spacing(0.25, True), None)
    found = {}

    def go(t1):
        found["late"] = saving_of(0.0, t1, saveat=0.25, save_start=False)
        found["early"] = saving_of(t1, 0.0, saveat=0.25)

    jax.eval_shape(go, 1.0)
    assert found == {"late": (Spacing(0.25, False), None), "early": (Spacing(0.25, True), None)}


@pytest.mark.parametrize(
    "saveat",
    [[0.25, 0.5], (0.25, 0.5), np.array([0.25, 0.5], np.float32), jnp.array([0.25, 0.5])],
    ids=["list", "tuple", "numpy", "jax"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_is_saved_as_it_is(saveat, dtype):
    saving, times = saving_of(dtype=dtype, saveat=saveat)
    assert saving == Saving("times", False, 2)
    assert times.dtype == dtype
    np.testing.assert_array_equal(times, [0.25, 0.5])


def test_integer_times():
    np.testing.assert_array_equal(times_of([0, 1, 3], 0, 3), [0.0, 1.0, 3.0])


def test_repeated_times_are_allowed():
    np.testing.assert_array_equal(times_of([0.5, 0.5, 1.0]), [0.5, 0.5, 1.0])


def test_the_row_of_a_trajectory():
    rows = np.array([[0.1, 0.2], [0.3, 0.4]])
    saving, times = saving_of(index=1, saveat=rows)
    assert saving == Saving("times", False, 2)
    np.testing.assert_array_equal(times, [0.3, 0.4])
    picked = jax.jit(lambda i: saving_of(index=i, saveat=rows)[1])
    np.testing.assert_array_equal(picked(0), [0.1, 0.2])


def test_traced_times():
    """They are not looked at."""
    times = jax.jit(lambda ts: times_of(ts, dtype=DTYPES[0]))(np.array([0.5, 7.0]))
    assert times.dtype == np.float32
    np.testing.assert_array_equal(times, [0.5, 7.0])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings
@hypothesis.given(span=spans())
def test_times_over_an_end_by_rounding_are_the_end_and_others_what_they_are(dtype, span):
    t0, sign, step, intervals = span
    t1 = t0 + sign * step * intervals
    size = EPS[dtype] * max(abs(t0), abs(t1))
    low, high = (dtype.type(t) for t in (t0, t1))
    for slip in (-3 * size, 0.0, 3 * size):
        given = np.array([t0 + slip, t1 + slip]).astype(dtype)
        times = times_of(given, t0, t1, dtype)
        np.testing.assert_array_equal(times, np.clip(given, min(low, high), max(low, high)))


@settings
@hypothesis.given(span=spans())
def test_times_of_single_precision_end_where_the_span_does(span):
    """As they are read from a file: the last one may be rounded to beyond the end."""
    t0, sign, step, intervals = span
    t1 = t0 + sign * step * intervals
    given = np.array([t0, t1], np.float32)
    times = times_of(given, t0, t1, DOUBLE)
    np.testing.assert_array_equal(times, np.clip(given.astype(DOUBLE), min(t0, t1), max(t0, t1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_than_rounding_over_an_end_raises(dtype):
    for over in (-1e-4, 1.0001):
        with pytest.raises(ValueError, match="outside tspan"):
            times_of(sorted([0.5, over]), dtype=dtype)
