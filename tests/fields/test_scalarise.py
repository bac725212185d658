"""Programs with a variable for each component, compared with JAX."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from ensembleode.fields.scalarise import scalarise
from ensembleode.fields.tuning import MOST_SCALAR_OPERATIONS
from ensembleode.tracing.program import trace

from ..marks import slow_unless
from ..problems import lorenz
from .cases import CASES, FIELDS


quick = settings(max_examples=5, deadline=None, derandomize=True, database=None)


def written(array):
    """An array of constants, each of which is a number of the program."""
    parts = [lax.full((1,), x.item(), array.dtype) for x in np.asarray(array).ravel()]
    found = jnp.concatenate(parts) if parts else jnp.zeros(0, array.dtype)
    return found.reshape(array.shape)


def scalar_program(fn, *args):
    """The scalar program, and what it computes from the arguments; None if there is none."""
    closed = jax.make_jaxpr(fn)(*args)

    def fully_written(u, p, t):
        return jax.core.eval_jaxpr(closed.jaxpr, list(map(written, closed.consts)), *p)

    program, consts = trace(fully_written, np.zeros(1), jtu.tree_leaves(args), 0.0)
    assert not consts
    scalars = scalarise(program.jaxpr)
    if scalars is None:
        return None
    assert all(v.aval.shape == (1,) for v in (*scalars.invars, *scalars.outvars))

    def run(*args):
        arrays = map(jnp.asarray, (np.zeros(1), *jtu.tree_leaves(args), 0.0))
        ins = [x[None] for array in arrays for x in array.ravel()]
        outs = iter(jax.core.eval_jaxpr(scalars, (), *ins))
        results = [v.aval for v in program.jaxpr.outvars]
        rows = [[next(outs) for _ in range(x.size)] for x in results]
        return [
            jnp.concatenate(row).reshape(x.shape) if row else jnp.zeros(x.shape, x.dtype)
            for row, x in zip(rows, results, strict=True)
        ]

    return scalars, run


def agree(fn, *args, rtol=1e-13):
    """The scalar program has the results of the function. Returns whether there is one."""
    found = scalar_program(fn, *args)
    if found is None:
        return False
    _, run = found
    expected = jtu.tree_leaves(jax.jit(fn)(*args))
    for x, want in zip(jax.jit(run)(*args), expected, strict=True):
        assert (x.shape, x.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(np.asarray(x), np.asarray(want), rtol=rtol, atol=rtol)
    return True


# Numbers that are not real, results that nothing reads, sorting, and indices that are computed:
# these have no program.
ALONE = ("argmin", "complex", "conj", "cumlogsumexp", "cumsum", "imag", "real")
NONE = {
    *((name, 0) for name in ALONE),
    *((name, i) for name in ("argmax", "reduce_window", "sort") for i in (0, 1)),
    *(("dynamic_slice", i) for i in (2, 4)),
    ("dynamic_update_slice", 1),
    ("gather", 6),
    ("reduce_sum", 2),
    ("scatter", 4),
    ("scatter-add", 1),
}
ALL = [(name, i) for name, cases in sorted(CASES.items()) for i in range(len(cases))]
# (Each is run every time where programs are lowered.)
QUICK = ALL[::8]


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize(
    ("name", "i"), [slow_unless(x in QUICK, *x, id=f"{x[0]}-{x[1]}") for x in ALL]
)
def test_primitives(name, i):
    assert agree(*CASES[name][i]) == ((name, i) not in NONE)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", [slow_unless(x in ("arenstorf", "branches", "loops", "universal"), x) for x in FIELDS]
)
def test_fields(name):
    fn, shape, p = FIELDS[name]
    u = np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape)
    p = jtu.tree_map(lambda x: np.asarray(x, np.float64), p)
    large = {"big_linear", "sorting", "sorting_array", "while_loop"}
    assert agree(lambda u, p, t: fn(u, p, t), u, p, np.float64(0.3)) == (name not in large)


@pytest.mark.slow
@settings(quick, max_examples=20)
@given(
    st.sampled_from(["add", "sub", "mul", "div", "max", "min", "pow", "eq", "lt", "rem", "atan2"]),
    st.sampled_from([0, 1, -1, 2.5, -7]),
    st.sampled_from([0, 1, -1, 2.5, -7]),
    st.sampled_from([np.float64, np.float32, np.int64, np.int32]),
)
def test_constants_fold_as_jax_computes(name, x, y, dtype):
    fn = getattr(lax, name)
    if name in ("pow", "atan2") and np.dtype(dtype).kind == "i":
        return
    if name in ("div", "rem") and np.dtype(dtype).kind == "i" and y == 0:
        return
    x, y = np.asarray(x, dtype), np.asarray(y, dtype)
    rtol = 1e-6 if dtype is np.float32 else 1e-13
    assert agree(lambda z: fn(lax.full_like(z, x), lax.full_like(z, y)), x, rtol=rtol)
    assert agree(lambda z: fn(lax.full_like(z, x), z), y, rtol=rtol)
    assert agree(lambda z: fn(z, lax.full_like(z, y)), x, rtol=rtol)


SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan)
BINARY_OPERATIONS = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "max": lax.max,
    "min": lax.min,
    "where": lambda x, y: jnp.where(x > y, x, y),
    "unless": lambda x, y: jnp.where(x == 0, y, -x),
    "prod": lambda x, y: jnp.prod(jnp.stack([x, y])),
}
UNARY_OPERATIONS = {
    "neg": lax.neg,
    "sqrt": lax.sqrt,
    "log": lax.log,
    "abs": lax.abs,
    "sign": lax.sign,
    "floor": lax.floor,
    "to the 0": lambda x: lax.integer_pow(x, 0),
    "to the 3": lambda x: lax.integer_pow(x, 3),
    "to the -1": lambda x: lax.integer_pow(x, -1),
}
leaves = st.one_of(st.sampled_from("xy"), st.sampled_from(SPECIAL))
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY_OPERATIONS)), inner),
        st.tuples(st.sampled_from(sorted(BINARY_OPERATIONS)), inner, inner),
    ),
    max_leaves=6,
)


def meaning(expression, x, y):
    match expression:
        case str():
            return {"x": x, "y": y}[expression]
        case float():
            return lax.full_like(x, expression)
        case (name, a):
            return UNARY_OPERATIONS[name](meaning(a, x, y))
        case (name, a, b):
            return BINARY_OPERATIONS[name](meaning(a, x, y), meaning(b, x, y))


@settings(quick, max_examples=60)
@given(expressions, st.sampled_from([np.float64, np.float32]))
@pytest.mark.slow
def test_special_numbers_are_those_of_jax(expression, dtype):
    def fn(x, y):
        # Of the variables, whatever the expression.
        return jnp.where(jnp.isfinite(x + y), meaning(expression, x, y), meaning(expression, x, y))

    x, y = (np.asarray(a.ravel(), dtype) for a in np.meshgrid(SPECIAL, SPECIAL))
    _, run = scalar_program(fn, x[0], y[0])
    (got,), expected = jax.vmap(run)(x, y), np.asarray(jax.vmap(fn)(x, y))
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)  # whose sign means nothing
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])


#
# What programs look like
#


def names(fn, *args):
    scalars, _ = scalar_program(fn, *args)
    return sorted(eqn.primitive.name for eqn in scalars.eqns)


def test_lorenz_is_nothing_but_arithmetic():
    u = np.ones(3)
    assert names(lambda u, p: lorenz(u, p, 0.0), u, u) == ["mul"] * 4 + ["sub"] * 4


def test_sparse_jacobians_cost_nothing_for_their_zeros():
    def times_jacobian(u, p):
        return jax.jacfwd(lambda u: lorenz(u, p, 0.0))(u) @ u

    assert len(names(times_jacobian, np.ones(3), np.ones(3))) <= 24


def test_nothing_is_computed_that_changes_nothing():
    def fn(x, i):
        one, zero = lax.full_like(x, 1), lax.full_like(x, 0)
        floats = (x * one) / one - zero + lax.neg(zero)
        integers = i * 0 + i * 1 - (0 - 0 * i)
        return floats, integers, jnp.where(zero > one, jnp.sin(x), x)

    x, i = np.ones(3), np.ones(3, int)
    scalars, _ = scalar_program(fn, x, i)
    _, *components, _ = scalars.invars
    assert scalars.outvars == [*components, *components[:3]]
    assert {eqn.primitive.name for eqn in scalars.eqns} <= {"sin"}


def test_code_size_is_bounded():
    def long(u):
        for _ in range(100):
            u = jnp.sin(u) + 1
        return u

    for n in (1, 2, MOST_SCALAR_OPERATIONS // 200):
        assert len(names(long, np.ones(n))) == 200 * n
    assert scalar_program(long, np.ones(MOST_SCALAR_OPERATIONS // 200 + 1)) is None
