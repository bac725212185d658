"""Vector fields over lanes, as users write them, compared with `jax.vmap` of the field."""

import functools

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from ensembleode.fields.lanes.field import LaneField, MOST_OPERATIONS
from jax import lax
from jax.sharding import PartitionSpec

from ensembleode.tracing.program import trace

from ...marks import slow_unless
from ...problems import lorenz, with_reverse_rule


LANES = 4
TABLE = np.array([0.3, -1.0, 2.0, 0.5, 0.1])
rng = np.random.default_rng(0)
MATRIX, BIG_MATRIX = rng.normal(size=(3, 3)), rng.normal(size=(30, 30))
WIDE = jnp.asarray(rng.normal(size=(50,)))
NET = eqx.nn.MLP(2, 2, 50, 1, activation=jnp.tanh, key=jax.random.key(0))
WEIGHTS, STATIC = eqx.partition(NET, eqx.is_array)
RELU_NET = eqx.nn.MLP(2, 2, 16, 2, activation=jax.nn.relu, key=jax.random.key(1))


#
# Fields
#


def lotka_volterra(u, p, t):
    x, y = u
    a, b, c, d = p
    return jnp.stack([a * x - b * x * y, -c * y + d * x * y])


def van_der_pol(u, p, t):
    return jnp.array([u[1], p * (1 - u[0] ** 2) * u[1] - u[0]])


def pendulum(u, p, t):
    return jnp.array([u[1], -p["g"] / p["length"] * jnp.sin(u[0]) + jnp.cos(t)])


def robertson(u, p, t):
    fast = p[2] * u[1] * u[1]
    slow, back = p[0] * u[0], p[1] * u[1] * u[2]
    return jnp.array([back - slow, slow - back - fast, fast])


def arenstorf(u, p, t):
    q, v = u[:2], u[2:]
    mu = 0.012277471
    d1 = jnp.linalg.norm(q + jnp.array([mu, 0.0])) ** 3
    d2 = jnp.sum((q - jnp.array([1 - mu, 0.0])) ** 2) ** 1.5
    pull = (1 - mu) * (q + jnp.array([mu, 0.0])) / d1 + mu * (q - jnp.array([1 - mu, 0.0])) / d2
    return jnp.concatenate([v, q + 2 * jnp.array([v[1], -v[0]]) - pull])


def rigid_body(u, p, t):
    return p * u[np.array([1, 2, 0])] * jnp.roll(u, 1)


def linear(u, p, t):
    return jnp.asarray(MATRIX) @ u + jnp.einsum("ij,j->i", p, u)


def big_linear(u, p, t):
    return u @ jnp.asarray(BIG_MATRIX) - p * u


def matrix_state(u, p, t):
    return p @ u - u.T @ p + jnp.trace(u) * jnp.eye(2)


def big_matrix_state(u, p, t):
    return p @ u + u @ p - jnp.tanh(u).T


def reaction_diffusion(u, p, t):
    laplacian = jnp.roll(u, 1) + jnp.roll(u, -1) - 2 * u
    return p * laplacian + u * (1 - u).at[0].set(0.0)


def lorenz96(u, p, t):
    return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u + p


def branches(u, p, t):
    near = jnp.where(u > 0, u, 0.1 * u)
    return lax.cond(u[0] * t > 0, lambda: jnp.sin(near) * p, lambda: near**3)


def shared_branch(u, p, t):
    return lax.cond(p[0] > 0, lambda: jnp.sqrt(p) * u, lambda: u)


def loops(u, p, t):
    last, seen = lax.scan(lambda c, x: (c * x + t, c), u[0], u)
    polynomial = lax.fori_loop(0, 3, lambda i, z: z * 0.5 + p[i], u)
    return polynomial + last + jnp.cumsum(seen) + u[::-1]


def long_loop(u, p, t):
    return lax.fori_loop(0, 50, lambda i, z: z + 0.01 * jnp.sin(z) * p, u)


def while_loop(u, p, t):
    # Not reverse-differentiable, in JAX either.
    return lax.while_loop(lambda z: jnp.sum(z**2) > 0.1, lambda z: 0.7 * z, u) * p


def updates(u, p, t):
    v = jnp.zeros_like(u).at[0].set(u[1]).at[1:].add(p * u[:-1])
    return v.at[-1].multiply(2.0) + jnp.clip(u, -1, 1) + jnp.pad(u[:1], (1, 1))


def forced(u, p, t):
    wind = jnp.interp(t, jnp.linspace(-2.0, 2.0, 5), jnp.asarray(TABLE))
    rain = jnp.interp(t, jnp.linspace(-2.0, 2.0, 50), WIDE)
    return -p * u + wind * jnp.exp(-(t**2)) + rain


def quadrature(u, p, t):
    return p * jnp.sum(jnp.exp(-u * WIDE**2)) - u


def activations(u, p, t):
    return jax.nn.softplus(p * u) - jax.nn.relu(u) + jax.nn.sigmoid(t) * jax.nn.gelu(u)


def sorting(u, p, t):
    return jnp.sort(u) * p + jnp.linalg.solve(jnp.diag(2 + u**2), u)


def checkpointed(u, p, t):
    return jax.checkpoint(lambda u: jnp.sin(p * u))(u)


def constant(u, p, t):
    return jnp.array([1.0, 2.0])


def only_time(u, p, t):
    return jnp.full(2, t) * p


def network(u, p, t):
    return eqx.combine(p, STATIC)(u)


def closed_over_network(u, p, t):
    return NET(u)


def universal(u, p, t):
    return lotka_volterra(u, p, t) + RELU_NET(u)


@jax.custom_jvp
def with_rule(x):
    return jnp.sin(x)


@with_rule.defjvp
def _(primals, tangents):
    return with_rule(*primals), 7 * tangents[0] * primals[0]


def custom_rules(u, p, t):
    return with_rule(p * u) + with_rule(u[0]) * p


def custom_reverse_rules(u, p, t):
    return with_reverse_rule(p * u) + with_reverse_rule(u[0]) * p


# Each with the shape of its state, parameters, and whether the state is taken apart.
FIELDS = {
    "activations": (activations, (3,), 0.5, True),
    "activations_array": (activations, (30,), 0.5, False),
    "arenstorf": (arenstorf, (4,), (), True),
    "big_linear": (big_linear, (30,), 0.2, False),
    "big_matrix_state": (big_matrix_state, (5, 5), rng.normal(size=(5, 5)), False),
    "branches": (branches, (3,), 0.5, True),
    "branches_array": (branches, (30,), 0.5, False),
    "checkpointed": (checkpointed, (2,), 0.5, True),
    "closed_over_network": (closed_over_network, (2,), (), False),
    "constant": (constant, (2,), (), True),
    "custom_reverse_rules": (custom_reverse_rules, (2,), 0.5, True),
    "custom_reverse_rules_array": (custom_reverse_rules, (30,), 0.5, False),
    "custom_rules": (custom_rules, (2,), 0.5, True),
    "custom_rules_array": (custom_rules, (30,), 0.5, False),
    "forced": (forced, (2,), 0.5, True),
    "linear": (linear, (3,), rng.normal(size=(3, 3)), True),
    "long_loop": (long_loop, (2,), 0.5, True),
    "loops": (loops, (4,), rng.normal(size=3), True),
    "loops_array": (loops, (30,), rng.normal(size=3), False),
    "lorenz": (lorenz, (3,), rng.normal(size=3), True),
    "lorenz96": (lorenz96, (40,), 8.0, False),
    "lotka_volterra": (lotka_volterra, (2,), tuple(rng.uniform(size=4)), True),
    "matrix_state": (matrix_state, (2, 2), rng.normal(size=(2, 2)), True),
    "network": (network, (2,), WEIGHTS, False),
    "number": (lambda u, p, t: -p * u + t, (), 0.5, True),
    "only_time": (only_time, (2,), 0.5, True),
    "pendulum": (pendulum, (2,), {"g": 9.8, "length": 1.5}, True),
    "quadrature": (quadrature, (), 0.5, True),
    "reaction_diffusion": (reaction_diffusion, (8,), 0.5, True),
    "reaction_diffusion_array": (reaction_diffusion, (40,), 0.5, False),
    "rigid_body": (rigid_body, (3,), rng.normal(size=3), True),
    "robertson": (robertson, (3,), np.array([0.04, 1e4, 3e7]), True),
    "shared_branch": (shared_branch, (2,), np.array([0.5, 0.7]), True),
    "sorting": (sorting, (3,), 0.5, True),
    "sorting_array": (sorting, (25,), 0.5, False),
    "universal": (universal, (2,), tuple(rng.uniform(size=4)), False),
    "updates": (updates, (3,), 0.5, True),
    "van_der_pol": (van_der_pol, (2,), 3.0, True),
    "while_loop": (while_loop, (2,), 0.5, True),
}


#
# Helpers
#


def as_arrays(p, dtype=jnp.float64):
    return jtu.tree_map(lambda x: jnp.asarray(x, dtype), p)


def lane_field(fn, shape, p, p_batched, dtype=jnp.float64):
    """The field over lanes, and its constants."""
    u = jax.ShapeDtypeStruct(shape, dtype)
    program, consts = trace(fn, u, p, jax.ShapeDtypeStruct((), dtype))
    n = len(jtu.tree_leaves(p))
    return LaneField(program, u, (False,) * len(consts), (p_batched,) * n), consts


def evaluate(field, consts, u, p, t):
    """du/dt, `[*state, lane]`."""
    args = field.prepare(consts, jtu.tree_leaves(p))
    return field.join(field(args, field.split(u), t))


def inputs(shape, p, p_batched, t_batched, dtype=np.float64):
    rng = np.random.default_rng(1)
    lanes = np.linspace(0.8, 1.2, LANES)

    def spread(x):
        return jnp.asarray(np.asarray(x)[..., None] * lanes, dtype) if p_batched else x

    u = jnp.asarray(rng.normal(size=(*shape, LANES)), dtype)
    t = jnp.asarray(rng.normal(size=(LANES,) if t_batched else ()), dtype)
    return u, jtu.tree_map(spread, p), t


def equations(jaxpr):
    """All equations, those of inner functions in place of their calls."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        params = jtu.tree_leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
        inner = [x for x in params if _is_jaxpr(x)]
        if eqn.primitive.name == "jit":
            for x in inner:
                yield from equations(x)
        else:
            yield eqn


def _is_jaxpr(x):
    return isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)


def names(jaxpr):
    return [eqn.primitive.name for eqn in equations(jaxpr)]


def call_jaxpr(field, consts, p, t_batched=True, dtype=np.float64):
    """The jaxpr of one call, inside of the time loop."""
    u, p, t = inputs(field.shape, p, any(field.batched[len(consts) :]), t_batched, dtype)
    args = field.prepare(consts, jtu.tree_leaves(p))
    return jax.make_jaxpr(field)(args, field.split(u), t)


def assert_close(x, y):
    jtu.tree_map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10), x, y)


#
# Values and derivatives
#


@pytest.mark.parametrize(
    ("name", "p_batched", "t_batched"),
    [
        slow_unless(i % 3 and t_batched == (i % 3 == 1), name, not t_batched, t_batched)
        for i, name in enumerate(FIELDS)
        for t_batched in (True, False)
    ],
)
def test_agrees_with_the_mapped_field(name, p_batched, t_batched):
    fn, shape, p, scalarised = FIELDS[name]
    p = as_arrays(p)
    field, consts = lane_field(fn, shape, p, p_batched)
    if not (name == "closed_over_network" or (name == "network" and p_batched)):
        assert field.scalarised == scalarised
    u, p, t = inputs(shape, p, p_batched, t_batched)
    axes = (-1, -1 if p_batched else None, -1 if t_batched else None)
    mapped = jax.vmap(fn, in_axes=axes, out_axes=-1)
    lanes = functools.partial(evaluate, field, consts)
    tangents = jtu.tree_map(jnp.cos, (u, p, t))
    reverse_only = name.startswith("custom_reverse")
    forward_only = name == "while_loop"

    @functools.partial(jax.jit, static_argnums=0)
    def everything(fn, *primals):
        out = fn(*primals)
        jvp = None if reverse_only else jax.jvp(fn, primals, tangents)
        vjp = None if forward_only else jax.vjp(fn, *primals)[1](jnp.sin(u))
        return out, jvp, vjp

    got, expected = everything(lanes, u, p, t), everything(mapped, u, p, t)
    assert got[0].shape == u.shape
    assert_close(got, expected)


def test_a_rule_that_is_not_the_derivative_is_kept():
    # That the tests above would see it: neither rule is that of the sine.
    for fn in (custom_rules, custom_reverse_rules):
        for n in (2, 30):
            field, consts = lane_field(fn, (n,), jnp.float64(0.5), False)
            u = jnp.ones((n, LANES))
            lanes = functools.partial(evaluate, field, consts, p=0.5, t=jnp.float64(0))
            by_rule = jax.vjp(lanes, u)[1](u)[0]
            true = jnp.cos(0.5 * u) * 0.5
            assert np.abs(by_rule - true).min() > 0.1


def test_constants_that_differ_between_lanes():
    rates = jnp.array([1.0, 2.0])
    u = jax.ShapeDtypeStruct((2,), np.float64)
    program, consts = trace(lambda u, p, t: rates * u, u, (), 0.0)
    assert len(consts) == 1
    field = LaneField(program, u, (True,), ())
    lanes = jnp.arange(2.0 * LANES).reshape(2, LANES)
    args = field.prepare((lanes,), ())
    du = field.join(field(args, field.split(jnp.full((2, LANES), 3.0)), jnp.float64(0)))
    np.testing.assert_array_equal(du, 3 * lanes)


@pytest.mark.parametrize("name", ["lorenz", "loops", "activations", "lorenz96", "network"])
def test_single_precision_stays(name):
    fn, shape, p, _ = FIELDS[name]
    p = as_arrays(p, np.float32)
    field, consts = lane_field(fn, shape, p, False, np.float32)
    jaxpr = call_jaxpr(field, consts, p, dtype=np.float32)
    floats = {v.aval.dtype for eqn in equations(jaxpr) for v in eqn.outvars}
    assert np.dtype(np.float64) not in floats
    assert {x.dtype for x in jaxpr.out_avals} == {np.dtype(np.float32)}


@pytest.mark.parametrize("lanes", [1, 7])
@pytest.mark.parametrize("name", ["lorenz", "loops", "network"])
def test_any_number_of_lanes(name, lanes):
    fn, shape, p, _ = FIELDS[name]
    p = as_arrays(p)
    field, consts = lane_field(fn, shape, p, False)
    u = jnp.asarray(np.random.default_rng(2).normal(size=(*shape, lanes)))
    t = jnp.zeros(lanes)
    expected = jax.vmap(fn, in_axes=(-1, None, -1), out_axes=-1)(u, p, t)
    assert_close(evaluate(field, consts, u, p, t), expected)


def test_the_number_of_lanes_does_not_change_a_bit():
    p = jnp.array([10.0, 28.0, 8 / 3])
    field, consts = lane_field(lorenz, (3,), p, False)
    u = jnp.asarray(np.random.default_rng(3).normal(size=(3, 64)))
    run = jax.jit(functools.partial(evaluate, field, consts))
    whole = run(u, p, jnp.zeros(64))
    for n in (2, 3, 16):
        np.testing.assert_array_equal(run(u[:, :n], p, jnp.zeros(n)), whole[:, :n])


#
# Transformations
#


def euler(field, args, leaves, t):
    du = field(args, leaves, t)
    return tuple(x + 0.1 * d for x, d in zip(leaves, du, strict=True))


@pytest.mark.parametrize("name", ["lorenz", "network", "activations"])
def test_in_loops_maps_and_shards(name):
    fn, shape, p, _ = FIELDS[name]
    p = as_arrays(p)
    field, consts = lane_field(fn, shape, p, False)
    u, p, t = inputs(shape, p, False, True)
    args = field.prepare(consts, jtu.tree_leaves(p))
    leaves = field.split(u)
    step = functools.partial(euler, field)

    expected = leaves
    for _ in range(3):
        expected = step(args, expected, t)

    scanned = lax.scan(lambda y, _: (step(args, y, t), None), leaves, None, length=3)[0]
    assert_close(scanned, expected)
    looped = lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, step(args, c[1], t)), (0, leaves)
    )[1]
    assert_close(looped, expected)

    two = jtu.tree_map(lambda x: jnp.stack([x, 2 * x]), leaves)
    mapped = jax.vmap(step, in_axes=(None, 0, None))(args, two, t)
    for k in range(2):
        one = jtu.tree_map(lambda x, k=k: x[k], two)
        assert_close(jtu.tree_map(lambda x, k=k: x[k], mapped), step(args, one, t))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("lanes",))
    lanes_last = jtu.tree_map(lambda x: PartitionSpec(*(None,) * (x.ndim - 1), "lanes"), leaves)
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), lanes_last, PartitionSpec("lanes")),
        out_specs=lanes_last,
        check_vma=False,
    )
    assert_close(jax.jit(sharded)(args, leaves, t), step(args, leaves, t))


def test_split_and_join():
    for name in ("matrix_state", "big_matrix_state", "number"):
        fn, shape, p, scalarised = FIELDS[name]
        field, _ = lane_field(fn, shape, as_arrays(p), False)
        u = jnp.arange(np.prod(shape) * LANES).reshape((*shape, LANES))
        leaves = field.split(u)
        assert len(leaves) == (np.prod(shape) if scalarised else 1)
        np.testing.assert_array_equal(field.join(leaves), u)


#
# What the code looks like
#


def test_lorenz_is_nothing_but_arithmetic():
    for p_batched in (False, True):
        p = jnp.array([10.0, 28.0, 8 / 3])
        field, consts = lane_field(lorenz, (3,), p, p_batched)
        jaxpr = call_jaxpr(field, consts, p)
        assert sorted(names(jaxpr)) == ["mul"] * 4 + ["sub"] * 4
        assert field.operations == 8
        outs = {v.aval.shape for eqn in equations(jaxpr) for v in eqn.outvars}
        assert outs == {(LANES,)}


def test_a_network_is_two_matrix_products():
    field, consts = lane_field(network, (2,), WEIGHTS, False)
    jaxpr = call_jaxpr(field, consts, WEIGHTS)
    left = [name for name in names(jaxpr) if name != "optimization_barrier"]
    assert sorted(left) == [
        "add",
        "add",
        "dot_general",
        "dot_general",
        "reshape",
        "reshape",
        "tanh",
    ]
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert [e.outvars[0].aval.shape for e in products] == [(50, LANES), (2, LANES)]


def test_the_gradient_of_a_network_is_matrix_products():
    field, consts = lane_field(network, (2,), WEIGHTS, False)
    u, p, t = inputs((2,), WEIGHTS, False, True)
    args = field.prepare(consts, jtu.tree_leaves(p))
    jaxpr = jax.make_jaxpr(lambda a, u: jax.vjp(lambda *x: field(*x, t), a, (u,))[1]((u,)))(args, u)
    # Two forward; backward, one a layer for its weights and one for its input.
    assert names(jaxpr).count("dot_general") == 6


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="for XLA's CPU compiler")
def test_what_is_costly_is_computed_once():
    rod = as_arrays({"g": 9.8, "length": 1.5})
    for fn, shape, p, costly in (
        # Not the quotient: the lanes share it.
        (pendulum, (2,), rod, ["cos", "sin"]),
        (lorenz96, (40,), jnp.float64(8), ["concatenate"] * 3),
    ):
        field, consts = lane_field(fn, shape, p, False)
        jaxpr = call_jaxpr(field, consts, p)
        kept = {e.invars[0] for e in equations(jaxpr) if e.primitive.name == "optimization_barrier"}
        made = [e.primitive.name for e in equations(jaxpr) if kept & set(e.outvars)]
        assert sorted(made) == costly


def test_sparse_jacobians_cost_nothing_for_their_zeros():
    def jacobian(u, p, t):
        return jax.jacfwd(lambda u: lorenz(u, p, t))(u) @ u

    field, _ = lane_field(jacobian, (3,), jnp.ones(3), False)
    assert field.scalarised
    assert field.operations <= 24


def test_code_size_is_bounded():
    def long(u, p, t):
        for _ in range(100):
            u = jnp.sin(u) + 1
        return u

    short, _ = lane_field(long, (1,), (), False)
    assert short.scalarised
    assert short.operations == 200
    # An array takes about as many: the program is long itself.
    pair, _ = lane_field(
        lambda u, p, t: jnp.stack([long(u[0], p, t), long(u[1], p, t)]), (2,), (), False
    )
    assert pair.scalarised
    assert pair.operations == 400
    many, _ = lane_field(long, (10,), (), False)
    assert not many.scalarised
    assert many.operations <= MOST_OPERATIONS


def test_calls_are_traced_once():
    traced = []

    def fn(u, p, t):
        return jnp.sin(u) * p

    field, consts = lane_field(fn, (2,), jnp.float64(1), False)
    run = field._run
    field._run = lambda *a: (traced.append(1), run(*a))[1]
    for _ in range(3):
        call_jaxpr(field, consts, jnp.float64(1))
    assert len(traced) == 1


def test_wrong_shape():
    with pytest.raises(ValueError, match="shape"):
        lane_field(lambda u, p, t: u[:2], (3,), (), False)
