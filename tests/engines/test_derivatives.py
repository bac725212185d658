"""Derivatives with respect to times; and shared numbers that decide what is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

import ensembleode as eo
from ensembleode.engines import compiled
from ensembleode.fields.equations import ELEMENTWISE
from ensembleode.plan.trajectory_numbers import TrajectoryNumbers
from ensembleode.tracing.program import trace

from ..fields.test_primitives import CASES as PRIMITIVES
from ..marks import slow_unless


TIGHT = {"abstol": 1e-9, "reltol": 1e-9}
REVERSE = {
    "replay": {},
    "gauss": {"sensealg": eo.GaussAdjoint()},
    "kernel": {"ensemblealg": eo.EnsembleGPUKernel()},
    "diffrax": {"engine": "diffrax"},
}
FORWARD = {
    "compiled": {"sensealg": eo.ForwardDiffSensitivity()},
    "kernel": {"ensemblealg": eo.EnsembleGPUKernel(), "sensealg": eo.ForwardDiffSensitivity()},
    "diffrax": {"engine": "diffrax", "sensealg": eo.ForwardDiffSensitivity()},
}
CASES = [
    *(slow_unless(way == "replay", jax.jacrev, way, how) for way, how in REVERSE.items()),
    *(slow_unless(False, jax.jacfwd, way, how) for way, how in FORWARD.items()),
]


def use(way, request):
    if way == "kernel":
        request.getfixturevalue("on_host")


@pytest.mark.slow
@pytest.mark.parametrize(("derivative", "way", "how"), CASES)
@pytest.mark.parametrize("direction", [1, -1])
def test_by_times_at_the_ends(derivative, way, how, direction, request):
    """Of `exp(-(t - t0))`, saved at both ends, twice at the start, and between."""
    use(way, request)
    weights = jnp.array([5.0, 1.0, 2.0, 3.0, 4.0])
    x = {
        "t0": jnp.array(0.1),
        "t1": jnp.array(0.1 + 1.2 * direction),
        "saveat": 0.1 + direction * jnp.array([0.0, 0.0, 0.4, 0.8, 1.2]),
    }

    def loss(x):
        # (Two trajectories, of which the first has times of its own.)
        prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=(1.0 + ctx.index) * prob.u0)
        )
        ens = eo.EnsembleProblem(eo.remake(ens.prob, tspan=(x["t0"], x["t1"])), ens.prob_func)
        sim = eo.solve(ens, trajectories=2, saveat=x["saveat"], **TIGHT, **how)
        return jnp.sum(weights[None] * sim.u[..., 0])

    gradient = derivative(loss)(x)
    u = 3 * np.exp(-(x["saveat"] - x["t0"]))
    np.testing.assert_allclose(gradient["saveat"], -weights * u, rtol=1e-6)
    np.testing.assert_allclose(gradient["t0"], np.sum(weights * u), rtol=1e-6)
    np.testing.assert_allclose(gradient["t1"], 0.0, atol=1e-6)


def by_cond(u, p, t):
    return jax.lax.cond(p > 0, lambda: -jnp.sqrt(p) * u, lambda: 0 * u)


def by_switch(u, p, t):
    branches = [lambda: 0 * u, lambda: u / (p * 0), lambda: -jnp.sqrt(jnp.abs(p)) * u]
    return jax.lax.switch(jnp.where(p > 0, 2, 0), branches)


def by_index(u, p, t):
    table = jnp.stack([0 * p, -jnp.sqrt(jnp.abs(p))])
    return table[jnp.where(p > 0, 1, 0)] * u


def nested(u, p, t):
    """The predicate comes from within a jit, and the branch holds another."""

    @jax.jit
    def positive(p):
        return p > 0

    inner = lambda: jax.lax.cond(p > 100, lambda: u / (0 * p), lambda: -jnp.sqrt(p) * u)  # noqa: E731
    return jax.lax.cond(positive(p), inner, lambda: 0 * u)


DECIDED = {"cond": by_cond, "switch": by_switch, "index": by_index, "nested": nested}
WAYS = {name: how for name, how in REVERSE.items() if name != "kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in DECIDED for way in WAYS],
)
def test_only_the_branch_that_is_taken_is_differentiated(name, way):
    """`u' = -sqrt(p) u`, or zero where p is negative; the square root of that has no derivative."""
    f, how = DECIDED[name], WAYS[way]

    def solved(p, trajectories):
        prob = eo.ODEProblem(f, [1.0], (0.0, 1.0), p)
        if trajectories is None:
            return jnp.sum(eo.solve(prob, saveat=[0.5, 1.0], **TIGHT, **how).u[-1])
        ens = eo.EnsembleProblem(
            prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index))
        )
        sim = eo.solve(ens, trajectories=trajectories, saveat=[0.5, 1.0], **TIGHT, **how)
        return jnp.sum(sim.u[:, -1])

    for trajectories, total in ((None, 1.0), (3, 6.0)):
        gradient = jax.jit(jax.grad(solved), static_argnums=1)
        assert gradient(-1.0, trajectories) == 0
        p = 1.5
        exact = -total * np.exp(-np.sqrt(p)) / (2 * np.sqrt(p))
        np.testing.assert_allclose(gradient(p, trajectories), exact, rtol=1e-6)


REAL_CASES = [
    (name, fn, args)
    for name, cases in sorted(PRIMITIVES.items())
    for fn, *args in cases
    if args[0].dtype == np.float64 and args[0].size
]


def summed(fn):
    """As a field: all real results in each component."""

    def field(u, p, t):
        results = [x for x in jax.tree.leaves(fn(u, *p)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.zeros_like(u) + sum(0.1 * jnp.sum(x).astype(u.dtype) for x in results)

    return field


def traced(field, u, p):
    """The program, and what differs by trajectory: nothing."""
    program, consts = trace(field, u, tuple(p), 0.0)
    nothing = TrajectoryNumbers(False, (False,) * len(p), (False,) * len(consts), *[False] * 7)
    return program, program.out_avals[0], nothing


def test_what_is_translated_has_a_derivative():
    found = set()
    for name, fn, (u, *p) in REAL_CASES:
        asked = traced(summed(fn), u, p)
        if compiled.ENGINE.unreadable(*asked) is None:
            reason = compiled.ENGINE.slower(*asked, is_extended=False)
            found |= {name} if reason and "the derivative of f" in reason else set()
    assert not found


@pytest.mark.parametrize(
    ("backend", "size", "is_slower"),
    [("cpu", 100_000, False), ("gpu", 2000, False), ("gpu", 2001, True)],
)
def test_large_tables_of_each_trajectory_are_kept_as_arrays_on_gpus(
    monkeypatch, backend, size, is_slower
):
    """Their cotangents would be a variable for each number there."""
    field, table = lambda u, p, t: p[0][jnp.int64(100 * t)] - u, jnp.ones(size)
    program, state, nothing = traced(field, jnp.ones(2), [table])
    own = nothing._replace(p=(True,))
    assert own.parameters == (*nothing.consts, True)
    monkeypatch.setattr(compiled, "platform", lambda: backend)
    reason = compiled.ENGINE.slower(program, state, own, is_extended=False)
    assert bool(reason and "each trajectory's own" in reason) == is_slower


def assert_gradients(field, u0, p, atol=1e-7):
    """Those of solves by default, of a field each component of whose result depends on the same
    component of the state, are what differences say; which engine it was."""

    def solve(u0):
        return eo.solve(eo.ODEProblem(field, u0, (0.0, 0.2), p), eo.Euler(), dt=0.1)

    u0, off = jnp.asarray(u0), 1e-5
    found = jax.grad(lambda u0: jnp.sum(solve(u0).u[-1]))(u0)
    by_differences = (solve(u0 + off).u[-1] - solve(u0 - off).u[-1]) / (2 * off)
    np.testing.assert_allclose(found, by_differences, 1e-6, atol)
    return solve(u0).engine.name


# In JAX, with respect to their first operand.
NO_DERIVATIVE = {"nextafter", "regularized_incomplete_beta", "zeta"}


@pytest.mark.slow
def test_gradients_of_elementwise_operations():
    """Of all that are translated, several in one field."""
    chosen = []
    for name, fn, args in REAL_CASES:
        if name not in set(ELEMENTWISE.split()) - NO_DERIVATIVE:
            continue
        u, *p = args = [np.ravel(x)[-1:] for x in args]
        like = jax.tree.leaves(jax.eval_shape(fn, *args))[0]
        asked = traced(lambda u, p, t, fn=fn: jax.tree.leaves(fn(u, *p))[0], u, p)
        is_alike = (like.shape, like.dtype) == (u.shape, u.dtype)
        if is_alike and compiled.ENGINE.unreadable(*asked) is None:
            chosen.append((fn, u, p))
    assert len(chosen) > 40

    def field(u, p, t):
        results = [fn(u[i : i + 1], *p[i]) for i, (fn, *_) in enumerate(chosen)]
        return 0.1 * jnp.concatenate([jax.tree.leaves(x)[0] for x in results])

    u0 = np.concatenate([u for _, u, _ in chosen])
    assert assert_gradients(field, u0, [p for *_, p in chosen]) == "compiled"


@jax.custom_batching.custom_vmap
def with_rule_for_maps(x):
    return jnp.sin(x)


with_rule_for_maps.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))
COMPILED = {
    "incomplete beta": lambda u, p, t: -jax.scipy.special.betainc(1.5, 2.0, u),
    "incomplete gamma": lambda u, p, t: -jax.scipy.special.gammainc(1 + u, 2 * u),
    "Bessel": lambda u, p, t: -jax.scipy.special.i0(u) * jax.scipy.special.i1e(u),
    "custom_vmap": lambda u, p, t: -with_rule_for_maps(u),
    "largest": lambda u, p, t: -u * lax.top_k(u, 1)[0] ** 0,
    "pooling": lambda u, p, t: -lax.reduce_window(u, -jnp.inf, lax.max, (1,), (1,), "SAME"),
    "sparse": lambda u, p, t: -sparse.BCOO.fromdense(jnp.eye(2), nse=2) @ u,
}


@pytest.mark.parametrize("name", [slow_unless(x == "pooling", x) for x in COMPILED])
def test_gradients_of_functions_of_others(name):
    assert assert_gradients(COMPILED[name], np.array([0.3, 0.7]), None) == "compiled"


@pytest.mark.slow
def test_gradients_that_other_engines_have():
    """Where the derivative of f has no translation."""
    assert assert_gradients(lambda u, p, t: -with_rule(u), np.array([0.3, 0.7]), None) == "diffrax"


@jax.custom_jvp
def with_rule(x):
    return x**2


@with_rule.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    nothing = 0.0 * jnp.linalg.eigvalsh(jnp.diag(x))
    return with_rule(x), (nothing + 2 * x) * dx
