"""The coefficients of stochastic Runge-Kutta methods, by their order conditions."""

import numpy as np
import pytest

import ensembleode as eo


def rows(triangle, size):
    """A lower triangle, without its first row, as a matrix."""
    found = np.zeros((size, size))
    for i, row in enumerate(triangle, start=1):
        found[i, : len(row)] = row
    return found


@pytest.mark.parametrize("cls", [eo.SRIW1, eo.SOSRI])
def test_diagonal_noise(cls):
    """Conditions of order 1 and 3/2 of Roessler (2010), theorem 4.1, that are linear in the
    matrices; and the nodes are the sums of rows."""
    x, one = cls.coefficients, np.ones(4)
    a0, a1, b0, b1 = (rows(m, 4) for m in (x.a0, x.a1, x.b0, x.b1))
    alpha, beta1, beta2, beta3, beta4 = map(np.array, (x.alpha, x.beta1, x.beta2, x.beta3, x.beta4))
    sums = {
        1.0: [
            *(alpha @ one, beta1 @ one, beta2 @ b1 @ one, alpha @ b0 @ one, beta1 @ a1 @ one),
            beta4 @ b1 @ b1 @ one,
        ],
        0.0: [
            *(beta2 @ one, beta3 @ one, beta4 @ one, beta1 @ b1 @ one, beta3 @ b1 @ one),
            *(beta2 @ a1 @ one, beta4 @ a1 @ one),
        ],
        0.5: [alpha @ a0 @ one],
        -1.0: [beta3 @ a1 @ one],
    }
    for expected, found in sums.items():
        np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(x.c0, a0 @ one, atol=1e-14)
    np.testing.assert_allclose(x.c1, a1 @ one, atol=1e-14)


@pytest.mark.parametrize("cls", [eo.SRA1, eo.SOSRA])
def test_additive_noise(cls):
    """The conditions of Roessler (2010), theorem 5.1."""
    x = cls.coefficients
    size = len(x.alpha)
    a0, b0 = (rows(m, size) for m in (x.a0, x.b0))
    one, alpha, beta1, beta2 = np.ones(size), *map(np.array, (x.alpha, x.beta1, x.beta2))
    c1 = np.array(x.c1)
    sums = {
        1.0: [alpha @ one, beta1 @ one, beta1 @ c1, alpha @ b0 @ one],
        0.5: [alpha @ a0 @ one],
        1.5: [alpha @ (b0 @ one) ** 2],
        0.0: [beta2 @ one],
        -1.0: [beta2 @ c1],
    }
    for expected, found in sums.items():
        np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(x.c0, a0 @ one, atol=1e-14)
