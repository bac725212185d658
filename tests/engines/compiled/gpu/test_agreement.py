"""The code of a GPU's thread, run on the host, compared with that of a core: every method on
twelve problems."""

import dataclasses

import numpy as np
import pytest

import ensembleode as eo
from ensembleode import solvers

from ....marks import slow_unless
from ...standard_problems import ensemble, PROBLEMS


METHODS = {name: cls() for name, cls in sorted(vars(solvers).items()) if hasattr(cls, "tableau")}
# Rounding grows along these; only the first part is compared.
SENSITIVE = {"arenstorf": 0.03, "lorenz96": 0.3, "pleiades": 0.2}
# Of a short first step, their error estimates are rounding: the size of the next is chance. And
# what cancels in a step leaves a digit less.
LARGE_WEIGHTS = {"Vern6", "Vern8"}
QUICK = {
    ("Tsit5", "forced"),
    *((method, "lorenz") for method in ("RK4", "Tsit5", "Vern7")),
}
CASES = [
    slow_unless((method, problem) in QUICK, method, problem)
    for method in METHODS
    for problem in PROBLEMS
]

pytestmark = pytest.mark.usefixtures("on_host")


def both(ens, alg, **options):
    """By compiled code for a core, and by the kernel."""
    core = eo.solve(ens, alg, eo.EnsembleSerial(), engine="compiled", **options)
    return core, eo.solve(ens, alg, eo.EnsembleGPUKernel(), **options)


def agree(core, kernel, close=1e-12):
    np.testing.assert_array_equal(kernel.retcode, core.retcode)
    np.testing.assert_array_equal(kernel.lengths, core.lengths)
    for ours, theirs in zip(
        dataclasses.astuple(kernel.stats), dataclasses.astuple(core.stats), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(kernel.t, core.t, rtol=close)
    size = np.nanmax(np.abs(core.u))
    np.testing.assert_allclose(kernel.u, core.u, rtol=0, atol=close * size)


@pytest.mark.parametrize(("method", "name"), CASES)
def test_every_method_and_problem(method, name):
    alg, problem = METHODS[method], PROBLEMS[name]
    end = problem.end * SENSITIVE.get(name, 1)
    ens = ensemble(problem)
    ens = eo.EnsembleProblem(eo.remake(ens.prob, tspan=(0.0, end)), ens.prob_func)
    # Tight: what rounding does to the size of a step, it does to the error of that step.
    tolerance = 1e-10 if alg.order > 5 else 1e-9 if alg.order == 5 else 1e-7
    options = {"abstol": tolerance, "reltol": tolerance}
    is_rounded = method in LARGE_WEIGHTS and name != "lorenz"
    if not alg.adaptive or is_rounded or name == "forced":
        # (Steps that are chosen where a field has kinks may turn with the last bit.)
        options = {"adaptive": False, "dt": end / 200}
    elif name == "mlp":
        options["dt"] = 0.1  # the automatic one is so short that its error is all rounding
    core, kernel = both(ens, alg, trajectories=3, saveat=end / 3, **options)
    assert (core.retcode == eo.ReturnCode.Success).all()
    assert core.stats.naccept.min() > 2
    # (As many roundings as there are steps add up: Midpoint takes eight thousand here.)
    roundings = core.stats.naccept.max() * np.finfo(float).eps
    agree(core, kernel, 1e-11 if method in LARGE_WEIGHTS else max(1e-12, roundings))
