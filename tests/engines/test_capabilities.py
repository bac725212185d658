"""The table of what engines can do is true: what it has is solved, in each mode, and what it lacks
is refused before anything is compiled."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.base.capabilities import cell, FEATURES, LACKS, no_derivative
from ensembleode.engines.choice import NoEngine

from ..marks import slow_unless
from ..problems import decay


def linear(u, p, t):
    return -p * u


CALLBACK = eo.ContinuousCallback(lambda u, t, i: u[0] - 0.5, lambda i: eo.remake(i, u=2 * i.u))
# What asks for each feature: the solver, the options, and what is changed of the problem.
ASKED = {
    "half precision": (eo.Tsit5(), {}, {"u0": np.array([1.0], np.float16)}),
    "step-size controllers of diffrax": (
        eo.Tsit5(),
        {"stepsize_controller": diffrax.PIDController(rtol=1e-6, atol=1e-8)},
        {},
    ),
    "your own step-size controller": (eo.Tsit5(), {"stepsize_controller": eo.IController()}, {}),
    "your own norm": (eo.Tsit5(), {"internalnorm": eo.MaxNorm()}, {}),
    "fixed steps": (eo.Tsit5(), {"adaptive": False, "dt": 0.1}, {}),
    "`save_everystep`": (eo.Tsit5(), {"save_everystep": True, "maxiters": 64}, {}),
    "`tstops`, `d_discontinuities`": (eo.Tsit5(), {"tstops": [0.3, 0.6]}, {}),
    "`dtmin`, `dtmax`": (eo.Tsit5(), {"dtmax": 0.2}, {}),
    "`max_norm`": (eo.Tsit5(), {"max_norm": 10.0}, {}),
    "integrands": (eo.Tsit5(), {}, {"integrand": lambda u, p, t: u}),
    "callbacks": (eo.Tsit5(), {"callback": CALLBACK}, {}),
    "mass matrices": (eo.Rodas5P(), {}, {"f": eo.ODEFunction(linear, mass_matrix=np.eye(1))}),
    **{
        f"`{x.__name__}`": (eo.Tsit5(), {"sensealg": x()}, {})
        for x in (
            eo.ReplayAdjoint,
            eo.ForwardDiffSensitivity,
            eo.GaussAdjoint,
            eo.BacksolveAdjoint,
            eo.RecursiveCheckpointAdjoint,
            eo.DirectAdjoint,
            eo.InterpolatingAdjoint,
        )
    },
    "adjoints of diffrax": (eo.Tsit5(), {"sensealg": diffrax.DirectAdjoint()}, {}),
}
# What asks for more than one thing, or for what is tested with ensembles (`test_conformance.py`).
ELSEWHERE = {
    "every solver",
    "arrays on an accelerator",
    "steps shared by all",
    "noise",
    "`tspan`, `saveat`, tolerances by trajectory",
}


def test_each_feature_is_tested():
    assert set(ASKED) | ELSEWHERE == set(FEATURES)
    assert {x.feature for x in LACKS} <= set(FEATURES)


def ends(engine, feature, p):
    """The end of a solve that asks for the feature, by this engine, with the parameter `p`."""
    alg, options, changes = ASKED[feature]
    prob = eo.remake(eo.ODEProblem(linear, np.array([1.0]), (0.0, 1.0), p), **changes)
    of_diffrax = feature == "step-size controllers of diffrax"  # (They hold tolerances.)
    tight = {} if of_diffrax else {"abstol": 1e-8, "reltol": 1e-8}
    sol = eo.solve(prob, alg, engine=engine, **tight, **options)
    end = jnp.real(sol.u[sol.length - 1]).sum()
    return end if sol.integral is None else end + sol.integral[-1].sum()


REFUSED = ("no", "Rosenbrock methods, on CPUs")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("feature", "engine"),
    [
        slow_unless(engine == "compiled" or cell(feature, engine) in REFUSED, feature, engine)
        for feature in ASKED
        for engine in ("compiled", "diffrax")
    ],
)
def test_the_table_is_true(feature, engine):
    p = jnp.asarray(1.3)
    if cell(feature, engine) in REFUSED:
        with pytest.raises(NoEngine, match=f"engine='{engine}' can't run"):
            ends(engine, feature, p)
        return
    value = ends(engine, feature, p)
    mode = jax.jacfwd if feature == "`ForwardDiffSensitivity`" else jax.grad
    slope = jax.jit(mode(lambda p: ends(engine, feature, p)))(p)
    several = jax.vmap(lambda p: ends(engine, feature, p))(jnp.stack([p, p + 1e-3, p - 1e-3]))
    np.testing.assert_allclose(several[0], value, rtol=1e-10)
    # (Steps differ a little with p.)
    np.testing.assert_allclose(slope, (several[1] - several[2]) / 2e-3, rtol=1e-4)


@pytest.mark.parametrize("feature", ["callbacks", "mass matrices", "`tstops`, `d_discontinuities`"])
def test_what_julia_has_no_derivative_of(feature):
    assert "engine='compiled'" in no_derivative("julia", feature)
    assert no_derivative("compiled", feature) is None


def test_what_an_ensemble_algorithm_lacks_is_said_of_it():
    """And no further engine is tried."""
    ens = eo.EnsembleProblem(decay())
    with pytest.raises(NoEngine, match=r"^EnsembleGPUKernel\(\) runs the methods of the compiled"):
        eo.solve(ens, eo.Kvaerno5(), eo.EnsembleGPUKernel(), trajectories=2)
    with_integrand = eo.EnsembleProblem(eo.remake(decay(), integrand=lambda u, p, t: u))
    with pytest.raises(NoEngine, match=r"^EnsembleColumns has no integrands"):
        eo.solve(with_integrand, eo.Tsit5(), eo.EnsembleColumns(), trajectories=2)


@pytest.mark.slow
def test_why_other_engines_did_not_run():
    sol = eo.solve(decay(), eo.Kvaerno5())
    assert sol.engine.refused[0] == ("compiled", "it runs on diffrax, julia")
    assert "not compiled: it runs on diffrax, julia" in str(sol.engine)
