"""The message about trajectories that run out of steps: it says what bounded their steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode import solvers
from ensembleode.executors import stiffness
from ensembleode.executors.stiffness import real_stability_boundary
from ensembleode.ground.logs import log_once

from .marks import slow_unless
from .problems import decay, lorenz, lotka_volterra, ROBERTSON, robertson


def van_der_pol(u, p, t):
    return jnp.array([u[1], p * (1 - u[0] ** 2) * u[1] - u[0]])


def oscillator(u, p, t):
    return jnp.array([u[1], -u[0]])


def heat(u, p, t):
    return p * (jnp.roll(u, 1) + jnp.roll(u, -1) - 2 * u)


def backwards(u, p, t):
    return -van_der_pol(u, p, t)


def run(f, u0, end, p=None, **options):
    log_once.cache_clear()
    return eo.solve(eo.ODEProblem(f, jnp.asarray(u0), (0.0, end), p), **options)


STIFF = {
    "van der Pol": (van_der_pol, [2.0, 0.0], 2e3, 1e3, {"maxiters": 2000}),
    "van der Pol, the step from the last": (van_der_pol, [2.0, 0.0], 2e3, 1e3, {"maxiters": 40}),
    "backwards in time": (backwards, [2.0, 0.0], -2e3, 1e3, {"maxiters": 500}),
    "diffrax": (van_der_pol, [2.0, 0.0], 2e3, 1e3, {"maxiters": 500, "engine": "diffrax"}),
    "Robertson": (robertson, [1.0, 0.0, 0.0], 1e4, ROBERTSON, {"maxiters": 5000, "saveat": 1e3}),
    "a large state": (heat, np.sin(np.arange(100.0)), 1e3, 1e4, {"maxiters": 500}),
}
NOT_STIFF = {
    "an oscillator": (oscillator, [1.0, 0.0], 1e6, None, {"maxiters": 100}),
    "an oscillator, loosely": (oscillator, [1.0, 0.0], 1e6, None, {"maxiters": 500, "reltol": 0.1}),
    "a predator": (
        lotka_volterra,
        [1.0, 1.0],
        1e5,
        jnp.array([1.5, 1.0, 3.0, 1.0]),
        {"maxiters": 300},
    ),
    "chaos, tightly": (
        lorenz,
        [1.0, 0.0, 0.0],
        1e3,
        jnp.array([10.0, 28.0, 8 / 3]),
        {"maxiters": 500, "reltol": 1e-12, "abstol": 1e-12},
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("f", "u0", "end", "p", "options"),
    [slow_unless(i % 2 == 0, *case, id=name) for i, (name, case) in enumerate(STIFF.items())],
)
def test_a_stiff_problem_is_called_one(f, u0, end, p, options, caplog):
    sol = run(f, u0, end, p, **options)
    assert sol.retcode == eo.ReturnCode.MaxIters
    assert "looks stiff" in caplog.text
    assert ("eo.Kvaerno5()" if "engine" in options else "eo.Rodas5P()") in caplog.text


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("f", "u0", "end", "p", "options"), NOT_STIFF.values(), ids=NOT_STIFF)
def test_a_long_integration_is_not(f, u0, end, p, options, caplog):
    sol = run(f, u0, end, p, **options)
    assert sol.retcode == eo.ReturnCode.MaxIters
    assert not caplog.records


def ensemble(stiff):
    """Van der Pol's oscillator, so many trajectories of five with a large mu."""
    prob = eo.ODEProblem(van_der_pol, jnp.array([2.0, 0.0]), (0.0, 2e3), 1.0)

    def prob_func(prob, ctx):
        first = ctx.index < stiff
        return eo.remake(prob, p=jnp.where(first, 1e3, 1.0), tspan=(0.0, jnp.where(first, 2e3, 1)))

    return eo.EnsembleProblem(prob, prob_func)


def test_most_of_an_ensemble(caplog):
    log_once.cache_clear()
    options = {"trajectories": 5, "maxiters": 200, "throw": True}
    with pytest.raises(eo.EnsembleError, match=r"MaxIters 4.*looks stiff.*eo\.Rodas5P\(\)"):
        eo.solve(ensemble(4), **options)
    assert len(caplog.records) == 1
    with pytest.raises(eo.EnsembleError) as raised:
        eo.solve(ensemble(1), **options)
    assert "stiff" not in str(raised.value)


@pytest.mark.parametrize(
    ("alg", "options"),
    [
        pytest.param(eo.Kvaerno5(), {}, marks=pytest.mark.slow),
        (eo.RK4(), {"dt": 1e-3}),
        (eo.Tsit5(), {"dt": 1e-3, "adaptive": False}),
    ],
)
def test_methods_whose_steps_stability_does_not_bound(alg, options, caplog):
    log_once.cache_clear()
    prob = eo.ODEProblem(van_der_pol, jnp.array([2.0, 0.0]), (0.0, 2e3), 1e3)
    assert eo.solve(prob, alg, maxiters=10, **options).retcode == eo.ReturnCode.MaxIters
    assert not caplog.records


def test_a_field_without_forward_mode(caplog):
    """Nothing can be said, and nothing is raised."""

    @jax.custom_vjp
    def f(u):
        return -1e3 * u

    f.defvjp(lambda u: (f(u), None), lambda _, ct: (-1e3 * ct,))
    assert run(lambda u, p, t: f(u), [1.0], 1e3, maxiters=200).retcode == eo.ReturnCode.MaxIters
    assert not caplog.records


def test_it_costs_nothing_where_there_are_steps_enough(monkeypatch):
    monkeypatch.setattr(stiffness, "note", None)
    eo.solve(eo.EnsembleProblem(decay()), trajectories=2)
    eo.solve(decay())


def test_stability_boundaries():
    assert real_stability_boundary(eo.Euler().method) == pytest.approx(2.0)
    assert real_stability_boundary(eo.RK4().method) == pytest.approx(2.785, abs=0.05)
    for alg in vars(solvers).values():
        if hasattr(alg, "tableau") and alg.order > 2:
            assert 2.0 < real_stability_boundary(alg().method) < 10.0
