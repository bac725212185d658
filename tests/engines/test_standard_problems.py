"""The standard problems by the compiled engine, compared with diffrax at tight tolerances."""

import numpy as np
import pytest

import ensembleode as eo

from .standard_problems import ensemble, PROBLEMS


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_answer_is_that_of_diffrax(name):
    problem = PROBLEMS[name]
    ens = ensemble(problem)
    times = np.linspace(0, problem.end, 6)[1:]
    options = {"trajectories": 3, "saveat": times}
    ours = eo.solve(ens, eo.Tsit5(), engine="compiled", abstol=1e-13, reltol=1e-13, **options)
    theirs = eo.solve(ens, eo.Dopri8(), engine="diffrax", abstol=1e-14, reltol=1e-14, **options)
    assert (ours.engine.name, theirs.engine.name) == ("compiled", "diffrax")
    assert (ours.retcode == eo.ReturnCode.Success).all()
    size = np.abs(theirs.u).max()
    np.testing.assert_allclose(ours.u, theirs.u, rtol=0, atol=problem.close * size)
    if problem.vary:
        assert np.abs(ours.u[0] - ours.u[2]).max() > 1e-3 * size
