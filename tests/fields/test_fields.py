"""Whole fields, their Jacobians and vector-Jacobian products, compared with JAX."""

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from ensembleode.fields.ir import For, Product

from ..marks import slow_unless
from .cases import FIELDS as FIELDS_AS_WRITTEN
from .fields import FIELDS, jacobian, vjp
from .lowered import agree, Lowered


FEW = [slow_unless(name in ("lorenz", "heat", "network"), name) for name in FIELDS]


def as_arrays(tree, dtype=np.float64):
    return jtu.tree_map(lambda x: np.asarray(x, dtype), tree)


def groups_of(p):
    """Some of the parameters are each trajectory's own, the others are shared."""
    n = len(jtu.tree_leaves(p))
    return ["own" if i % 2 == 0 else "shared" for i in range(n)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FIELDS)
def test_functions(name):
    fn, u, p, _ = FIELDS[name]
    agree(fn, u, as_arrays(p), groups=groups_of(p))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FEW)
def test_jacobians(name):
    fn, u, p, fewer = FIELDS[name]
    u = u if fewer is None else fewer
    agree(jacobian(fn), u, as_arrays(p), groups=groups_of(p))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FEW)
def test_vector_jacobian_products(name):
    fn, u, p, _ = FIELDS[name]
    w = np.cos(np.arange(u.size)).reshape(u.shape)
    agree(vjp(fn), w, (u, as_arrays(p)), groups=["forward", *groups_of(p)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bodies", "chemistry", "network"])
def test_single_precision(name):
    fn, u, p, _ = FIELDS[name]
    u, p, t = *as_arrays((u, p), np.float32), np.float32(0.3)
    options = {"storage": np.float32, "groups": groups_of(p)}
    agree(fn, u, p, t, 2e-5, **options)
    agree(jacobian(fn), u, p, t, 2e-5, **options)
    options["groups"] = ["forward", *options["groups"]]
    agree(vjp(fn), np.cos(u), (u, p), t, 2e-5, **options)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [name for name in FIELDS_AS_WRITTEN if "sorting" not in name])
def test_fields_as_users_write_them(name):
    fn, shape, p = FIELDS_AS_WRITTEN[name]
    agree(fn, np.random.default_rng(0).normal(size=shape), as_arrays(p), rtol=1e-10)


def test_small_results_are_returned_or_stored():
    fn, u, p, _ = FIELDS["lorenz"]
    for field in (fn, jacobian(fn)):
        returned, stored = (
            Lowered(field, u, as_arrays(p), largest_returned=n) for n in (u.size**2, 0)
        )
        assert returned.function.is_scalar
        assert not stored.function.is_scalar
        assert not stored.function.work
        np.testing.assert_array_equal(returned(u, p), stored(u, p))


def test_integers_and_booleans():
    def fn(u, p, t):
        cases = jnp.where(p["flags"], u, -u)
        return cases * p["rate"] + u[p["index"]] ** 2 + jnp.float64(p["count"]) - u[p["order"]]

    p = {
        "flags": np.array([True, False, True]),
        "rate": np.float64(0.5),
        "index": np.int64(2),
        "count": np.uint8(200),
        "order": np.array([2, 0, 1], np.int32),
    }
    agree(fn, np.array([0.3, -1.0, 2.0]), p)
    agree(lambda u, p, t: jnp.tile(fn(u[:3], p, t), 20), np.arange(60.0), p)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["chemistry", "lorenz", "network_large"])
def test_parameters_of_another_precision(name):
    # Stored with more digits than the field takes, and with fewer.
    fn, u, p, _ = FIELDS[name]
    groups = groups_of(p)

    def wide(u, p, t):
        return fn(u, jtu.tree_map(lambda x: x.astype(u.dtype), p), t)

    agree(wide, u, as_arrays(p, np.float32), groups=groups)
    agree(wide, u, as_arrays(p, np.float32), groups=groups, storage=np.float32)
    single = as_arrays(u, np.float32), as_arrays(p, np.float32), np.float32(0)
    agree(wide, *single, 2e-5, groups=groups)


#
# What the programs look like
#


def statements(stmts):
    for s in stmts:
        yield s
        if isinstance(s, For):
            yield from statements(s.body)


def test_small_fields_need_no_memory():
    for name in ("forced", "lorenz", "lotka_volterra", "pendulum", "robertson", "chemistry"):
        fn, u, p, _ = FIELDS[name]
        for program in (
            Lowered(fn, u, as_arrays(p)),
            Lowered(jacobian(fn), u, as_arrays(p)),
            Lowered(vjp(fn), u, (u, as_arrays(p)), groups=["forward", *groups_of(p)]),
        ):
            assert program.function.is_scalar
            assert not program.function.work


def test_networks_are_matrix_products():
    fn, u, p, _ = FIELDS["network_large"]
    p = as_arrays(p)
    for program, n in (
        (Lowered(fn, u, p), 2),
        (Lowered(jacobian(fn), u, p), 4),
        (Lowered(vjp(fn), u, (u, p), groups=["forward", *groups_of(p)]), 5),
    ):
        found = [s for s in statements(program.function.body) if isinstance(s, Product)]
        assert len(found) <= n


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "fn",
    [
        lambda u, w, t: w.T @ u,
        lambda u, w, t: u @ w.T.T,
        lambda u, w, t: jnp.einsum("ij,i->j", w, u),
        lambda u, w, t: jnp.transpose(w.reshape(6, 4, 9), (2, 0, 1)).reshape(9, 24) @ u,
        lambda u, w, t: (w.T @ u[:, None])[:, 0],
        lambda u, w, t: (w[:, :, None].T @ u)[0],
    ],
)
def test_transposed_weights_are_read_where_they_are(fn):
    """They aren't copied at each evaluation."""
    rng = np.random.default_rng(0)
    u, w = rng.normal(size=24), rng.normal(size=(24, 9))
    _, function = agree(fn, u, w, groups=["shared"])
    stmts = list(statements(function.body))
    assert len([s for s in stmts if isinstance(s, Product)]) == 1
    assert sum(n for _, n in function.work) < w.size
