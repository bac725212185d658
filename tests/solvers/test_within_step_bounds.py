"""The bound on the states within a step holds for any stages, and can't be much less."""

import numpy as np
import pytest

import ensembleode as eo
from ensembleode.solvers.explicit_runge_kutta import polynomial
from ensembleode.solvers.within_step_bounds import reach


POINTS = [j / 9 for j in range(9)]
METHODS = [eo.Bosh3, eo.Dopri5, eo.Tsit5]


@pytest.mark.parametrize("has_errors", [True, False])
@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.__name__)
def test_the_reach_of_a_step(cls, has_errors):
    """Signs of the stages are tried, too, as a bound by absolute values is met by signs."""
    method, dtype = cls().method, np.float32
    tableau, rng = method.tableau, np.random.default_rng(0)
    found = reach(method, POINTS, dtype, has_errors=has_errors)
    assert found is not None
    n = len(tableau.b)
    assert len(found.stages) == n - has_errors
    k = rng.normal(size=(n, 20_000))
    k[:, ::2] = np.sign(k[:, ::2])
    error = np.array(tableau.errors[0]) @ k * has_errors
    weights = np.array(tableau.interpolant.weights)
    largest = np.zeros(k.shape[1])
    for theta in POINTS:
        at = np.array([polynomial(tuple(w), theta) for w in weights])
        largest = np.maximum(largest, np.abs((at - tableau.b) @ k))
    bound = found.of_error * np.abs(error)
    bound += found.of_stages * np.abs(k[list(found.stages)]).max(0)
    assert np.all(largest <= bound)
    assert np.max(largest / bound) > 0.9


def test_methods_of_which_nothing_is_known():
    """A method that evaluates more for its dense output, and one that is implicit."""
    for alg in (eo.Vern7(), eo.Rodas5P()):
        assert reach(alg.method, POINTS, np.float64, has_errors=True) is None
