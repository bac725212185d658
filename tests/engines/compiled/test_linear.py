"""The linear equations of steps as generated code, compared with NumPy."""

import ctypes

import numpy as np
import pytest

from ensembleode.engines.compiled.algebra.linear import LinearEquations
from ensembleode.engines.compiled.llvm.builder import ElementPointer, F64
from ensembleode.engines.compiled.llvm.module import Module
from ensembleode.fields.derivatives.elimination import eliminated

from .field_harness import compiled


LANES = 4
rng = np.random.default_rng(0)


def solved(pattern, jacobian, gamma_h, right, *, transposed=False):
    """The solutions `[component, lane]` of two right-hand sides, one after the other, by the
    Jacobians `[entry, lane]`."""
    n, entries = right.shape[1], len(pattern)
    module = Module(LANES)
    names = "jacobian", "gamma_h", "right", "out"
    with module.function("run", [f"ptr noalias %{x}" for x in names], linkage="external") as b:
        inputs, scale, given, out = (ElementPointer(b, f"%{name}", F64) for name in names)

        def read(buffer, start, count):
            return [buffer.load_lanes((start + i) * LANES) for i in range(count)]

        solver = LinearEquations(b, eliminated(n, pattern), pattern)
        factors = solver.factorise(read(inputs, 0, entries), scale.load_lanes(0))
        for i in range(2):
            solve = solver.solve_transposed if transposed else solver.solve
            x = solve(factors, tuple(read(given, i * n, n)))
            for k, y in enumerate(x):
                out.store_lanes((i * n + k) * LANES, y)
        b.return_()
    engine = compiled(module.text)
    arrays = [np.ascontiguousarray(x, F64) for x in (jacobian, gamma_h, right)]
    arrays.append(np.full((2, n, LANES), -1, F64))
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(engine.get_function_address("run"))
    function(*(x.ctypes.data for x in arrays))
    return arrays[-1]


def matrices(n, pattern, jacobian, gamma_h):
    found = np.zeros((LANES, n, n))
    for (i, j), x in zip(pattern, jacobian, strict=True):
        found[:, i, j] = x
    return np.eye(n) - gamma_h[:, None, None] * found


def example(n, density, seed=0):
    rng = np.random.default_rng(seed)
    places = (rng.random((n, n)) < density) | np.eye(n, dtype=bool)
    pattern = tuple(map(tuple, np.argwhere(places).tolist()))
    # The scales are far apart, as in a stiff system.
    scales = 10.0 ** rng.uniform(-3, 3, n)
    jacobian = [
        (-n if i == j else rng.normal()) * scales[i] * rng.uniform(0.5, 2, LANES)
        for i, j in pattern
    ]
    gamma_h = np.array([1e-4, 1e-2, 1.0, 1e2])
    return pattern, np.array(jacobian).reshape(-1, LANES), gamma_h, rng.normal(size=(2, n, LANES))


# The last one is factorised by loops.
SIZES = [(1, 1.0), (3, 1.0), (7, 0.4), (12, 0.2), (16, 1.0)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "density"), [*SIZES, pytest.param(40, 0.3, marks=pytest.mark.slow)])
def test_random_matrices(n, density, transposed):
    pattern, jacobian, gamma_h, right = example(n, density)
    got = solved(pattern, jacobian, gamma_h, right, transposed=transposed)
    m = matrices(n, pattern, jacobian, gamma_h)
    m = m.transpose(0, 2, 1) if transposed else m
    for b, x in zip(right, got, strict=True):
        expected = np.linalg.solve(m, b.T[..., None])[..., 0].T
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-12)


DENSE2 = ((0, 0), (0, 1), (1, 0), (1, 1))


def two_by_two(*rows):
    """Jacobians by which `1 - J` are these matrices."""
    every = np.eye(2) - np.array(rows, float)
    return every.reshape(LANES, 4).T, np.ones(LANES), np.ones((2, 2, LANES))


def test_what_is_not_solved_is_nan_and_neighbours_are_not():
    well, singular = [[2, 1], [1, 3]], [[1, 2], [2, 4]]
    # Without row exchanges, all digits are lost.
    small, not_a_number = [[1e-17, 1], [1, 1]], [[np.nan, 1], [1, 1]]
    got = solved(DENSE2, *two_by_two(well, singular, small, not_a_number))
    alone = solved(DENSE2, *two_by_two(well, well, well, well))
    assert not np.isfinite(got[0, 0, 1:]).any()
    np.testing.assert_array_equal(got[:, :, 0], alone[:, :, 0])
    np.testing.assert_allclose(alone[0, :, 0], [0.4, 0.2])


def test_scales_far_apart_are_no_failure():
    """Equations whose coefficients differ by many orders of magnitude are solved accurately."""
    rows = [[1 + 4e7, -1e4], [-4e7, 1 + 1e4]], [[1, 1e-9], [1e9, 2]], [[1e-8, 0], [1, 1e8]]
    jacobian, gamma_h, right = two_by_two(*rows, [[1, 0], [0, 1]])
    got = solved(DENSE2, jacobian, gamma_h, right)
    assert np.isfinite(got).all()
    m = matrices(2, DENSE2, jacobian, gamma_h)
    rest = np.einsum("lij,jl->il", m, got[0]) - 1
    sums = np.einsum("lij,jl->il", abs(m), abs(got[0])) + 1
    assert (abs(rest) <= 1e-14 * sums).all()


def test_the_smallest_numbers_are_no_failure():
    """Products near the smallest number are rounded to its multiples, and have few digits."""
    rows = [[1 + 4e7, -1e4], [-4e7, 1 + 1e4]]
    jacobian, gamma_h, right = two_by_two(rows, rows, rows, rows)
    got = solved(DENSE2, jacobian, gamma_h, right * [1e-300, 1e-308, 1e-315, 1e-322])
    assert np.isfinite(got).all()
