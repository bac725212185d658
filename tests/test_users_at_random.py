"""Random programs of users: problems as people write them, with known solutions.

All decay, u' = -k(p) u. So the solution, and with it the gradient of any loss, is known in closed
form whatever the containers, solvers and transformations are. A program may be refused only by an
error that names an argument, and before anything is compiled.
"""

import re
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, HealthCheck, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ensembleode as eo
from ensembleode.engines.compiled.xla import call

from .marks import slow_unless


N = 3


class Pair(NamedTuple):
    x: Any
    y: Any


class Cell(eqx.Module):
    a: Any
    b: Any


#
# States and parameters
#


reals = st.floats(0.2, 2.0).map(lambda x: round(x, 2))
ARRAYS = st.one_of(
    reals.map(np.array),
    reals.map(lambda x: jnp.array([x, 2 * x])),
    reals.map(lambda x: np.array([[x, 0.5], [1.0, x], [x, x]])),
)


def containers(leaves, most):
    """Nested containers, in any order."""

    def around(inner):
        return st.one_of(
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2),
            st.lists(inner, min_size=1, max_size=2),
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
            st.builds(Cell, inner, inner),
        )

    return st.recursive(leaves, around, max_leaves=most)


COMPLEX = st.one_of(
    reals.map(lambda x: np.array(complex(x, 0.4))),
    reals.map(lambda x: jnp.array([[complex(x, -x), 0.3j], [1.0, complex(0.2, x)]])),
)
STATES = st.one_of(
    reals,
    reals.map(lambda x: [x, 1.0]),
    reals.map(lambda x: [x, 0.7j]),
    ARRAYS,
    containers(ARRAYS, most=3),
    containers(COMPLEX, most=3),
)
NUMBERS = st.one_of(
    reals,
    ARRAYS,
    reals.map(np.float64),
    reals.map(lambda x: jnp.array([complex(x, 0.3)])),
    reals.map(lambda x: pd.Series([x, 0.1], index=["k", "l"])),
)
ASIDE = st.one_of(st.none(), st.integers(0, 3), st.just("first order"), st.booleans())
PARAMETERS = st.one_of(
    NUMBERS,
    containers(st.one_of(NUMBERS, ASIDE), most=4),
    st.integers(0, 3).map(
        lambda i: eqx.nn.MLP(1, 1, 2, 1, activation=jnp.tanh, key=jax.random.key(i))
    ),
)


def numbers_in(tree):
    """The sum of all numbers, each counted for what it is."""
    leaves = [x for x in jax.tree.leaves(tree) if not isinstance(x, str) and not callable(x)]
    parts = [jnp.asarray(x.to_numpy() if isinstance(x, pd.Series) else x) for x in leaves]
    # (A complex number takes part by both of its parts.)
    both = [
        jnp.real(x) + 0.5 * jnp.imag(x) if jnp.iscomplexobj(x) else x.astype(float) for x in parts
    ]
    return sum((jnp.sum(jnp.sin(x.astype(float))) for x in both), jnp.asarray(0.0))


def rate(p):
    return 0.3 + 0.1 * numbers_in(p)


def decay(u, p, t):
    k = rate(p)
    return jax.tree.map(lambda x: -like(x, k) * x, u)


def like(x, number):
    """The number in the dtype of the array."""
    return jnp.asarray(number).astype(x.dtype)


#
# Programs
#


def by_index(prob, ctx):
    return eo.remake(prob, u0=jax.tree.map(lambda x: x * (1.0 + ctx.index), prob.u0))


def by_parameters(prob, ctx):
    def moved(x):
        return x * (1.0 + 0.1 * ctx.index) if eqx.is_inexact_array(x) else x

    return eo.remake(prob, p=jax.tree.map(moved, prob.p))


def by_keys(prob, ctx):
    shift = jax.random.uniform(ctx.key)
    return eo.remake(prob, u0=jax.tree.map(lambda x: x + like(x, shift), prob.u0))


SOLVERS = [
    (eo.Tsit5(), {}),
    (eo.Vern7(), {}),
    (eo.RK4(), {"adaptive": False, "dt": 0.01}),
    (eo.Rodas5P(), {}),
    (eo.AutoTsit5(eo.Rosenbrock23()), {}),
]
# (A program of diffrax's implicit methods takes twenty times as long to compile, 7 s: one in 41 of
# the slow tests.)
AND_OF_DIFFRAX = 8 * SOLVERS + [(eo.Kvaerno5(), {})]
SAVED = [{}, {"saveat": [0.25, 0.5]}, {"saveat": 0.25}]
WHERE = [eo.EnsembleSerial(), eo.EnsembleThreads(), eo.EnsembleGPUArray(), eo.EnsembleColumns()]
AROUND = ["plain", "jit", "vmap", "scan", "shard_map", "unchecked shard_map", "explicit mesh"]


class Case(NamedTuple):
    u0: Any
    p: Any
    prob_func: Any
    solver: tuple
    saved: dict
    where: Any
    around: str


def is_known_to_fail(case):
    """On a mesh, diffrax's implicit methods end in errors of the library that solves their linear
    equations."""
    is_on_mesh = "mesh" in case.around.replace("shard_map", "mesh")
    return is_on_mesh and isinstance(case.solver[0], eo.Kvaerno5)


def cases(solvers):
    drawn = st.builds(
        Case,
        STATES,
        PARAMETERS,
        st.sampled_from([None, by_index, by_parameters, by_keys]),
        st.sampled_from(solvers),
        st.sampled_from(SAVED),
        st.sampled_from(WHERE),
        st.sampled_from(AROUND),
    )
    return drawn.filter(lambda case: not is_known_to_fail(case))


KEY = jax.random.key(7)
TSPAN = (0.0, 0.5)


def times_of(case):
    saveat = case.saved.get("saveat", 0.5)
    if isinstance(saveat, list):
        return np.array(saveat)
    return np.arange(0, 0.6, saveat) if case.saved else np.array([0.0, 0.5])[-1:]


def by_solve(case, u0, p):
    """The saved states of all trajectories, each as one vector."""
    alg, options = case.solver
    prob = eo.ODEProblem(decay, u0, TSPAN, p)
    ens = eo.EnsembleProblem(prob, case.prob_func)
    tight = {} if options else {"abstol": 1e-9, "reltol": 1e-9}
    sim = eo.solve(ens, alg, case.where, trajectories=N, key=KEY, **tight, **options, **case.saved)
    count = len(times_of(case))
    rows = [jnp.reshape(x, (N, -1, *x.shape[2:])) for x in jax.tree.leaves(sim.u)]
    return jnp.concatenate([x[:, -count:].reshape(N, count, -1) for x in rows], axis=-1)


def by_hand(case, u0, p):
    """The same by a loop over the trajectories, and the closed form."""
    prob, found = eo.ODEProblem(decay, u0, TSPAN, p), []
    for i in range(N):
        mine = prob
        if case.prob_func is not None:
            mine = case.prob_func(prob, eo.EnsembleContext(i, 1, KEY))
        start = jnp.concatenate([jnp.ravel(jnp.asarray(x)) for x in jax.tree.leaves(mine.u0)])
        found.append(jnp.outer(like(start, jnp.exp(-rate(mine.p) * times_of(case))), start))
    return jnp.stack(found)


def value_and_slopes(case, solved):
    """The sum of the sines of the states, with its gradient by all numbers of `u0` and `p`; within
    what is around the solve."""
    numbers, rest = eqx.partition((case.u0, case.p), eqx.is_inexact_array)

    def loss(numbers, scale=1.0):
        u0, p = eqx.combine(numbers, rest)
        u0 = jax.tree.map(lambda x: x * like(x, scale) if eqx.is_inexact_array(x) else x, u0)
        found = jnp.sin(solved(case, u0, p))
        return jnp.sum(jnp.real(found) + 0.5 * jnp.imag(found))

    if case.around == "jit":
        return jax.jit(jax.value_and_grad(loss))(numbers)
    scales = jnp.array([1.0, 1.1])
    if case.around == "vmap":
        whole = jax.vmap(loss, (None, 0))
        return jax.value_and_grad(lambda numbers: jnp.sum(whole(numbers, scales)))(numbers)
    if case.around == "scan":

        def total(numbers):
            return jax.lax.scan(lambda sum, x: (sum + loss(numbers, x), None), 0.0, scales)[0]

        return jax.value_and_grad(total)(numbers)
    if "shard_map" in case.around:
        mesh = jax.make_mesh((1,), ("i",), (AxisType.Auto,))
        checked = case.around == "shard_map"

        def mine(numbers, scales):
            return jax.lax.psum(jax.vmap(loss, (None, 0))(numbers, scales).sum(), "i")

        total = jax.shard_map(
            mine, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=checked
        )
        return jax.jit(jax.value_and_grad(lambda numbers: total(numbers, scales)))(numbers)
    if case.around == "explicit mesh":
        mesh = jax.make_mesh((1,), ("i",), (AxisType.Explicit,))
        with jax.set_mesh(mesh):
            put = jax.device_put(numbers, NamedSharding(mesh, P()))
            return jax.jit(jax.value_and_grad(loss))(put)
    return jax.value_and_grad(loss)(numbers)


# An error names one of these.
NAMED = (
    r"\b(u0?|p|f|prob_func|alg|engine|ensemblealg|saveat|mass_matrix|EnsembleColumns|check_vma)\b"
)


def check(case):
    compiled = []
    with pytest.MonkeyPatch.context() as patch:
        of = call.compiled
        patch.setattr(call, "compiled", lambda *x: compiled.append(x) or of(*x))
        refusal = None
        try:
            value, slopes = value_and_slopes(case, by_solve)
        except (TypeError, ValueError, NotImplementedError) as e:
            refusal = e
    if refusal is not None:
        assert not compiled, "refused after something was compiled"
        assert re.search(NAMED, str(refusal)), str(refusal)
        return
    expected, true_slopes = value_and_slopes(case, by_hand)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), slopes, true_slopes
    )


QUICK = 1


# (In parts, as tests run beside each other.)
@pytest.mark.drawn(10)
@pytest.mark.parametrize("seed", [slow_unless(i < QUICK, i) for i in range(1000 + QUICK)])
def test_right_or_refused(seed):
    quick = seed < QUICK

    @settings(
        max_examples=20 if quick else 10,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(SOLVERS if quick else AND_OF_DIFFRAX))
    def run(case):
        check(case)

    hypothesis.seed(seed)(run)()
