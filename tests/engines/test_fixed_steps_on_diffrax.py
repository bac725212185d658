"""Fixed steps to known times by diffrax, which are those of the compiled engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless


def bending(u, p, t):
    return -p * u + jnp.sin(t)


def jumping(u, p, t):
    return -p * u + jnp.where(t >= 0.7, 3.0, 0.0)


KNOWN = {
    "tstops": (bending, {"tstops": [0.33, 0.7]}),
    "jumps": (jumping, {"d_discontinuities": [0.7]}),
    "both": (jumping, {"d_discontinuities": [0.7], "tstops": [0.33, 0.7]}),
    "none": (bending, {}),
}
SAVED = {"ends": {}, "steps": {"save_everystep": True}, "times": {"saveat": 0.25}}


@pytest.mark.parametrize(
    "alg", [eo.RK4(), slow_unless(False, eo.Tsit5()), slow_unless(False, eo.Vern7())]
)
@pytest.mark.parametrize("saved", ["steps", *(slow_unless(False, x) for x in ("ends", "times"))])
@pytest.mark.parametrize("span", [(0.0, 1.0), slow_unless(False, (1.0, 0.0))])
@pytest.mark.parametrize("known", KNOWN)
def test_the_steps_of_the_compiled_engine(known, span, saved, alg):
    f, times = KNOWN[known]
    prob = eo.ODEProblem(f, jnp.array([1.0, 2.0]), span, 1.3)
    options = {"adaptive": False, "dt": 0.04, **times, **SAVED[saved]}
    expected, got = (eo.solve(prob, alg, engine=x, **options) for x in ("compiled", "diffrax"))
    assert got.retcode == expected.retcode == eo.ReturnCode.Success
    assert got.stats.naccept == expected.stats.naccept
    np.testing.assert_allclose(got.t, expected.t, rtol=1e-14)
    np.testing.assert_allclose(got.u, expected.u, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("engine", ["compiled", "diffrax"])
def test_the_derivative_by_the_time_of_a_jump(engine):
    def f(u, p, t):
        return -u + jnp.where(t >= p, 3.0, 0.0)

    def end(jump):
        prob = eo.ODEProblem(f, jnp.array([1.0]), (0.0, 1.0), jump)
        at = {"adaptive": False, "dt": 0.01, "d_discontinuities": jnp.stack([jump])}
        return eo.solve(prob, eo.RK4(), engine=engine, **at).u[-1, 0]

    # u(1) = exp(-1) + 3 (1 - exp(jump - 1))
    np.testing.assert_allclose(jax.grad(end)(0.7), -3 * np.exp(-0.3), rtol=1e-8)
