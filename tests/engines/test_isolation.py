"""No trajectory, even one that fails, changes a bit of another trajectory's gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo

from ..marks import slow_unless


N = 11
# The places of trajectories in trouble, and the parameter that makes it: a derivative of NaN in a
# success, a singularity, too many steps, a parameter of NaN, an infinite one.
TROUBLE = {0: -1.0, 3: 100.0, 4: 20.0, 7: np.nan, 8: np.inf, 10: -2.0}
CODES = {0: "Success", 3: "Unstable", 4: "MaxIters", 7: "Unstable", 8: "Unstable", 10: "Success"}
HEALTHY = np.linspace(1.0, 2.0, N)
ILL = HEALTHY.copy()
ILL[list(TROUBLE)] = list(TROUBLE.values())
GOOD = np.setdiff1d(np.arange(N), list(TROUBLE))


def rate(q):
    """Its derivative below zero is zero times infinity."""
    return jnp.where(q <= 0, 0.0, jnp.sqrt(q))


def small(u, p, t):
    q, w, _ = p
    stiff = jnp.where((q > 10) & (q < 50), 1e5, 0.0)
    return -rate(q) * w * jnp.sin(u) - stiff * u + jnp.where(q > 50, 100 * u * u, 0.0)


def large(u, p, t):
    q, _, matrix = p
    stiff = jnp.where((q > 10) & (q < 50), 1e5, 0.0)
    product = matrix @ jnp.sin(u)
    return -rate(q) * product - stiff * u + jnp.where(q > 50, 100 * u * u, 0.0)


SIZE = 26  # too large for scalars
MATRIX = np.eye(SIZE) + 0.1 * np.sin(np.arange(SIZE * SIZE)).reshape(SIZE, SIZE)
FIELDS = {"small": (small, np.array([1.0, 0.5])), "large": (large, np.full(SIZE, 0.8))}
TIMES = np.array([0.0, 0.0, 0.35, 1.0])
WAYS = {
    "replay": {},
    "replay, saveat": {"saveat": TIMES},
    "replay, fixed": {"adaptive": False, "dt": 0.02},
    "replay, non-FSAL": {"alg": eo.Vern7(), "saveat": TIMES},
    "gauss": {"sensealg": eo.GaussAdjoint(), "saveat": TIMES},
    "backsolve": {"sensealg": eo.BacksolveAdjoint(), "saveat": TIMES},
    "threads": {"ensemblealg": eo.EnsembleThreads(), "saveat": TIMES},
    "kernel": {"ensemblealg": eo.EnsembleGPUKernel(), "saveat": TIMES},
    "diffrax": {"engine": "diffrax", "saveat": TIMES},
    "diffrax, backsolve": {"engine": "diffrax", "sensealg": eo.BacksolveAdjoint()},
}
CASES = [
    slow_unless((field, way) == ("small", "replay, saveat"), field, way)
    for field in FIELDS
    for way in WAYS
    if (field, way) != ("large", "kernel")
]


@pytest.mark.slow
@pytest.mark.parametrize(("field", "way"), CASES)
def test_trouble_stays_where_it_is(field, way, request):
    if way == "kernel":
        request.getfixturevalue("on_host")
    f, u0 = FIELDS[field]
    options = {"ensemblealg": eo.EnsembleSerial(), "maxiters": 400, **WAYS[way]}
    alg, ensemblealg = options.pop("alg", eo.Tsit5()), options.pop("ensemblealg")

    def loss(x, moved, w, matrix):
        def prob_func(prob, ctx):
            t0 = 0.0 * ctx.index + moved[0]
            p = (x["q"][ctx.index], w, matrix)
            return eo.remake(prob, u0=x["u0"][ctx.index] * prob.u0, p=p, tspan=(t0, 1.0))

        prob = eo.ODEProblem(f, u0, (0.0, 1.0), (1.0, w, matrix))
        ens = eo.EnsembleProblem(prob, prob_func)
        sim = eo.solve(ens, alg, ensemblealg, trajectories=N, **options)
        kept = jnp.zeros(N, bool).at[GOOD].set(True)
        u = jnp.where(kept.reshape(-1, *(1,) * (sim.u.ndim - 1)), sim.u, 0.0)
        return jnp.sum(jnp.cos(u)), sim.retcode

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(q, by_time):
        x = {"q": q, "u0": jnp.linspace(0.9, 1.1, N)}
        more = (jnp.zeros(1), jnp.array(1.1), jnp.asarray(MATRIX))
        argnums = (0, 1, 2, 3) if by_time else (0, 2, 3)
        return jax.grad(loss, argnums, has_aux=True)(x, *more)

    by_time = "backsolve" not in way
    own, *shared = gradient(jnp.asarray(HEALTHY), by_time)[0]
    (own_ill, *shared_ill), codes = gradient(jnp.asarray(ILL), by_time)
    failed = np.asarray(codes) != eo.ReturnCode.Success
    np.testing.assert_array_equal(np.flatnonzero(failed), [3, 4, 7, 8])
    if "fixed" not in way and not any(x in way for x in ("diffrax", "backsolve")):  # (diffrax's)
        expected = [eo.ReturnCode[code] for code in CODES.values()]
        np.testing.assert_array_equal(codes[np.array(list(CODES))], expected)
    for name, healthy in own.items():
        assert np.isfinite(healthy).all()
        np.testing.assert_array_equal(own_ill[name][GOOD], healthy[GOOD], err_msg=name)
        # What failed adds nothing, and what is masked little.
        np.testing.assert_array_equal(own_ill[name][failed], 0.0)
    for healthy, ill in zip(shared, shared_ill, strict=True):
        # (A sum over the trajectories, those in trouble left out.)
        np.testing.assert_allclose(ill, healthy, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("alg", [eo.Ralston(), eo.Bosh3()], ids=["not FSAL", "FSAL"])
def test_those_that_have_ended_are_not_differentiated_where_they_are(alg):
    """Its derivative is zero times infinity from t = 1 on, where no stage of its own steps is."""

    def f(u, p, t):
        own, shared = p
        return -shared * u * jnp.sqrt(own * jnp.maximum(1.0 - t, 0.0))

    def loss(own, shared, ends):
        prob = eo.ODEProblem(f, [1.0], (0.0, 1.0), (own[0], shared))
        ens = eo.EnsembleProblem(
            prob,
            lambda prob, ctx: eo.remake(
                prob, p=(own[ctx.index], shared), tspan=(ctx.index - ctx.index, ends[ctx.index])
            ),
        )
        how = {"adaptive": False, "dt": 0.125}
        return jnp.sum(eo.solve(ens, alg, eo.EnsembleSerial(), trajectories=2, **how).u[0, -1])

    # (Stages of Bosh3 are at the end of a step, too.)
    ends = jnp.array([0.875, 1.0] if alg == eo.Bosh3() else [1.0, 0.75])
    own = jnp.array([1.0, 1.5])
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    alone = gradient(own, jnp.array(1.0), ends.at[1].set(ends[0] / 2))
    beside = gradient(own, jnp.array(1.0), ends.at[1].set(1.75))
    assert np.isfinite(alone[0][0])
    np.testing.assert_array_equal(alone[0][0], beside[0][0])
