"""Fields as LLVM IR on lanes, compared with `jax.vmap`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, Phase, settings, strategies as st
from jax import lax

from ensembleode.engines.compiled.field.operations import OPERATIONS
from ensembleode.engines.compiled.llvm.functions import FUNCTIONS
from ensembleode.fields.equations import ELEMENTWISE

from ...fields.test_primitives import ALONE, BOTH, CASES
from .field_harness import (
    Case,
    cotangent_of,
    expected_of,
    flat_pull,
    in_lanes,
    Kernels,
    LANES,
    lowered,
    same_bits,
)


OTHERS = {"bitcast_convert_type", "integer_pow", "round"}
# (Of polygamma, the case is of orders that are no constants.)
MISSING = set(ELEMENTWISE.split()) - {*OPERATIONS, *FUNCTIONS, *OTHERS} | {"polygamma"}


def cases_of(fn, *args) -> list[Case]:
    """Whatever the function takes and returns: each of its results alone."""
    state = isinstance(args[0], np.ndarray) and args[0].dtype == np.float64
    lanes = [in_lanes(x) for x in args]
    u, p = (lanes[0], lanes[1:]) if state else (np.zeros((LANES, 1)), lanes)

    def result(k, u, p, t):
        return jtu.tree_leaves(fn(*([u] * state), *p))[k]

    n = len(jax.tree.leaves(jax.eval_shape(fn, *args)))
    return [Case(functools.partial(result, k), u, tuple(p)) for k in range(n)]


def all_cases() -> dict[str, Case]:
    found = {}
    for name, cases in sorted(CASES.items()):
        for i, (fn, *args) in enumerate(cases if name not in MISSING else ()):
            for k, case in enumerate(cases_of(fn, *args)):
                found[f"{name}-{i}-{k}"] = case
    return found


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_primitives(apart):
    cases = all_cases()
    expected = expected_of(cases.values())
    fields = [lowered(case, apart=apart) for case in cases.values()]
    kernels = Kernels(fields, 4)
    for i, (name, want) in enumerate(zip(cases, expected, strict=True)):
        got = kernels(i)
        assert got.dtype == want.dtype, name
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14, err_msg=name)


def special_cases() -> dict[str, Case]:
    """Of every function of one or two numbers, at all pairs of special ones."""
    found = {}
    for name in sorted({*OPERATIONS, *OTHERS} & set(CASES)):
        fn, *args = CASES[name][0]
        kinds = {np.asarray(x).dtype.kind for x in args}
        if len(args) > 2 or not kinds < set(ALONE):
            continue
        numbers = [ALONE[kinds.pop()]] if len(args) == 1 else BOTH[kinds.pop()]
        for dtype in (np.float64, np.float32) if numbers[0].dtype.kind == "f" else (np.int64,):
            with np.errstate(over="ignore"):
                each = -(-len(numbers[0]) // LANES)
                lanes = [np.resize(x.astype(dtype), (LANES, each)) for x in numbers]
            for k in range(len(jax.tree.leaves(jax.eval_shape(fn, *(x[0] for x in lanes))))):

                def result(u, p, t, fn=fn, k=k):
                    return jtu.tree_leaves(fn(*p))[k]

                found[f"{name}-{np.dtype(dtype)}-{k}"] = Case(result, np.zeros((LANES, 1)), lanes)
    return found


def test_special_numbers():
    cases = special_cases()
    assert len(cases) > 50
    expected = expected_of(cases.values())
    kernels = Kernels([lowered(case) for case in cases.values()], 4)
    for i, (name, want) in enumerate(zip(cases, expected, strict=True)):
        got = kernels(i)
        ulps = 1e-6 if "32" in name else 1e-13
        np.testing.assert_allclose(got, want, rtol=ulps, atol=ulps, err_msg=name)
        if want.dtype.kind == "f":
            there = ~np.isnan(want)
            where = np.signbit(got)[there] != np.signbit(want)[there]
            assert not where.any(), (name, got[there][where], want[there][where])


rng = np.random.default_rng(0)
SMALL, LARGE = rng.normal(size=(LANES, 3)), rng.normal(size=(LANES, 30))
WHICH = np.arange(LANES) * 7 % 5 - 1
TIMES = np.linspace(-1.0, 2.0, LANES)
TABLE = np.sort(rng.normal(size=40))


def collatz(n):
    """How many steps to one."""

    def step(c):
        n, k = c
        return lax.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1), k + 1

    return lax.while_loop(lambda c: c[0] > 1, step, (n, 0))[1]


def sorted_by_insertion(x):
    """Loops in a loop, of other lengths in each lane, over memory."""

    def insert(i, x):
        def swap(c):
            j, x = c
            a, b = x[j - 1], x[j]
            return j - 1, x.at[j - 1].set(b).at[j].set(a)

        return lax.while_loop(lambda c: (c[0] > 0) & (c[1][c[0] - 1] > c[1][c[0]]), swap, (i, x))[1]

    return lax.fori_loop(1, x.shape[0], insert, x)


def newton(x, n):
    """In a test of a loop, another loop."""

    def off(y):
        return abs(lax.fori_loop(0, n, lambda i, z: z * y, 1.0) - x) > 1e-9

    return lax.while_loop(off, lambda y: y - (y**3 - x) / (3 * y**2), 1.0 + 0 * x)


def nested(u, p, t):
    def inner(x):
        return lax.cond(x[1] > t, lambda x: (x * 2, x.sum()), lambda x: (jnp.exp(x), x[0]), x)

    def outer(x):
        return lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] * 0.9, c[1] + abs(u[0]) + 0.3), x)

    return lax.switch(p, [outer, lambda x: inner(x[0]), lambda x: x], (u, 0.5 * t))[0]


def interpolated(u, p, t):
    """In a table that all lanes share."""
    i = jnp.clip(jnp.searchsorted(p, u), 1, p.shape[0] - 1)
    return p[i] - p[i - 1] + u


def wandering(u, p, t):
    """Memory that is written where a lane is, in a loop that lanes leave one by one."""

    def step(c):
        x, i, k = c
        return x.at[i].add(jnp.cos(x[i]) + k), (i * 5 + 3) % x.shape[0], k + 1

    return lax.while_loop(lambda c: c[2] < p, step, (u, p % u.shape[0], 0))[0]


def turned(i, x):
    return x[::-1] + jnp.sin(x)


def branch_of_loops(u, p, t):
    def total(x):
        return lax.fori_loop(0, 70, lambda i, s: s + jnp.sin(s + i), x)

    return jnp.where(u > 0, lax.cond(p > 1, lambda: jax.vmap(total)(u), lambda: u[::-1]), t)


CONTROL = {
    "cond": Case(
        lambda u, p, t: lax.cond(u[0] > u[1], lambda: u * 2, lambda: u[::-1] / (u + t)), SMALL
    ),
    "cond of all": Case(
        lambda u, p, t: lax.cond(t > 0, lambda: u * 2, lambda: u[::-1]), LARGE, (), 0.5
    ),
    "cond by a shared number": Case(
        lambda u, p, t: lax.cond(p > 0, lambda: jnp.exp(u), lambda: u), LARGE, 1.0, 0.0, (True,)
    ),
    "switch": Case(
        lambda u, p, t: lax.switch(p, [jnp.sin, lambda x: x[::-1] * t, jnp.exp], u),
        SMALL,
        WHICH,
        TIMES,
    ),
    "switch in memory": Case(
        lambda u, p, t: lax.switch(p, [jnp.sin, lambda x: x[::-1] * t, jnp.exp], u),
        LARGE,
        WHICH,
        TIMES,
    ),
    "collatz": Case(lambda u, p, t: u * collatz(p), SMALL, np.arange(LANES) * 3 + 1),
    "insertion": Case(lambda u, p, t: sorted_by_insertion(u), LARGE[:, :9]),
    "newton": Case(lambda u, p, t: jax.vmap(lambda x: newton(x, 3))(abs(u)), SMALL, (), TIMES),
    "newton of one": Case(lambda u, p, t: newton(abs(u[0]), 3)[None], SMALL),
    "nested": Case(nested, SMALL, WHICH, TIMES),
    "nested in memory": Case(nested, LARGE, WHICH, TIMES),
    "interpolated": Case(interpolated, SMALL, TABLE, 0.0, (True,)),
    "interpolated in memory": Case(interpolated, LARGE, TABLE, 0.0, (True,)),
    "interpolated in own": Case(interpolated, SMALL, np.sort(rng.normal(size=(LANES, 40)))),
    "wandering": Case(wandering, LARGE, np.arange(LANES) % 7),
    "branch of loops": Case(branch_of_loops, SMALL, WHICH, TIMES),
    "picked": Case(lambda u, p, t: u[p] * u[jnp.int32(t)], LARGE, WHICH, 2.0),
    "picked from few": Case(lambda u, p, t: (u[p] + u[jnp.int32(t)])[None], SMALL, WHICH, TIMES),
    "put": Case(lambda u, p, t: u.at[p].set(t).at[1].add(u[p]), LARGE, WHICH, TIMES),
    "scan": Case(
        lambda u, p, t: lax.scan(lambda c, x: (c * x + t, c + p), u[:3], u[3:].reshape(-1, 3))[1],
        LARGE,
        SMALL,
        TIMES,
    ),
    "while of all": Case(
        lambda u, p, t: lax.fori_loop(0, p, lambda i, x: x * t + i, u),
        SMALL,
        np.int64(5),
        1.5,
        (True,),
    ),
    # (Computed in place, but for the array that all share.)
    "turned": Case(lambda u, p, t: lax.fori_loop(0, 3, turned, u), LARGE),
    "turned array of all": Case(
        lambda u, p, t: u + lax.fori_loop(0, 3, turned, p), LARGE, LARGE[0], 0.0, (True,)
    ),
    "permuted": Case(
        lambda u, p, t: u[np.random.default_rng(1).permutation(30)] * jnp.arange(30.0), LARGE
    ),
    "constants": Case(
        lambda u, p, t: jnp.where(p, jnp.arange(3.0), 2.0), SMALL, True, 0.0, (True,)
    ),
    "singles": Case(
        lambda u, p, t: lax.while_loop(lambda x: jnp.sum(x * x) > 1, lambda x: x * p, u),
        LARGE.astype(np.float32),
        np.linspace(0.5, 0.9, LANES, dtype=np.float32),
        np.float32(0),
    ),
}


@functools.cache
def control_fields():
    return {name: lowered(case) for name, case in CONTROL.items()}


@functools.cache
def control_by_jax():
    return dict(zip(CONTROL, expected_of(CONTROL.values()), strict=True))


@functools.cache
def control_one_by_one():
    return results(control_fields(), 1)


def results(fields, width, way="inline", masks=None):
    kernels = Kernels(list(fields.values()), width, way, masks)
    return {name: kernels(i) for i, name in enumerate(fields)}


def assert_close(found, expected, rtol=1e-12):
    for name, want in expected.items():
        ulps = 1e-5 if want.dtype == np.float32 else rtol
        np.testing.assert_allclose(found[name], want, rtol=ulps, atol=ulps, err_msg=name)


def assert_same(found, others):
    for name, x in others.items():
        same_bits(found[name], x, name)


@pytest.mark.slow
def test_branches_loops_and_indices():
    assert_close(control_one_by_one(), control_by_jax())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "way"),
    [(4, "apart"), (8, "inline"), (1, "apart")],
)
def test_lanes_have_the_same_bits_however_many_there_are(width, way):
    assert_same(results(control_fields(), width, way), control_one_by_one())


def test_without_being_taken_apart():
    fields = {name: lowered(case, apart=False) for name, case in CONTROL.items()}
    assert_close(results(fields, 4), control_by_jax())


def test_lanes_that_do_not_count():
    """Their loops never end, but nobody waits; what they read and write harms nobody."""

    def deep(u, p, t):
        def inner(x):
            return lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: x + p, x)

        x = lax.cond(u[0] > 0, inner, lambda x: lax.cond(u[1] > 0, jnp.exp, inner, x), u)
        return lax.while_loop(
            lambda x: jnp.sum(x) > 1, lambda x: (x / 2).at[jnp.int32(p)].mul(0.1), x
        )

    masks = np.arange(LANES) % 3 != 1
    p = np.where(masks, 1.0, -np.inf)
    u = np.where(masks[:, None], SMALL, np.nan)
    u[1::3] = [[1, 2, 3], [-1, -1, 3], [-1, 1, np.nan], [np.inf, 1, 1], [1, 1, 1]]
    cases = {
        "loops": Case(lambda u, p, t: deep(u, p, t), u, p),
        "in memory": Case(lambda u, p, t: deep(u, p, t), np.repeat(u, 10, 1), p),
    }
    fields = {name: lowered(case) for name, case in cases.items()}
    count = np.nonzero(masks)[0]
    cases = {
        name: case._replace(u=np.where(masks[:, None], case.u, 1.0), p=np.ones(LANES))
        for name, case in cases.items()
    }
    expected = dict(zip(cases, expected_of(cases.values()), strict=True))
    for width, way in ((1, "inline"), (4, "apart"), (8, "inline")):
        found = results(fields, width, way, masks)
        for name, x in expected.items():
            np.testing.assert_allclose(found[name][count], x[count], rtol=1e-12, err_msg=name)


def network(width, dtype=np.float64, seed=0):
    g = np.random.default_rng(seed)
    w, b, v = g.normal(size=(width, 2)), g.normal(size=width), g.normal(size=(2, width))
    return [x.astype(dtype) for x in (w, b, v / width**0.5)]


def mlp(u, p, t):
    w, b, v = p
    return v @ jnp.tanh(w @ u + b)


def mlp_by_rows(u, p, t):
    w, b, v = p
    return jnp.tanh(u @ w.T + b) @ v.T + t


def lorenz96(u, p, t):
    return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u + p


def deep(u, p, t):
    a, b = p
    x = jnp.tanh(a @ u.reshape(6, 5)) @ b
    return (x.T @ x).reshape(-1)


FIELDS = {
    "network": Case(mlp, SMALL[:, :2], network(50), 0.0, (True,) * 3),
    "network by rows": Case(mlp_by_rows, SMALL[:, :2], network(50), TIMES, (True,) * 3),
    "network of singles": Case(
        mlp, SMALL[:, :2].astype("f"), network(50, np.float32), np.float32(0), (True,) * 3
    ),
    "network of its own": Case(mlp, SMALL[:, :2], [in_lanes(x) for x in network(9)]),
    "deep": Case(
        deep, LARGE, (rng.normal(size=(13, 6)), rng.normal(size=(5, 4))), 0.0, (True, True)
    ),
    "lorenz 96": Case(lorenz96, rng.normal(size=(LANES, 40)), TIMES),
    "closed over": Case(lambda u, p, t: jnp.sin(u @ TABLE[:9].reshape(3, 3)) * p, SMALL, TIMES),
    "cond": Case(
        lambda u, p, t: lax.cond(u[0] > p, lambda: jnp.exp(u * p), lambda: u[::-1] / p),
        SMALL,
        TIMES + 0.05,
    ),
    "scan": Case(
        lambda u, p, t: lax.scan(lambda c, x: (c * x + p, c), u[:3], u[3:].reshape(-1, 3))[0],
        LARGE,
        SMALL,
    ),
    "picked": Case(lambda u, p, t: u[p[0]] * u * p[1], LARGE, (WHICH, TIMES)),
    "picked from the table": Case(
        lambda u, p, t: u * p[0][p[1]], SMALL, (TABLE, WHICH), 0.0, (True, False)
    ),
}


@pytest.mark.slow
def test_fields():
    fields = {name: lowered(case) for name, case in FIELDS.items()}
    narrow = results(fields, 1)
    assert_close(narrow, dict(zip(FIELDS, expected_of(FIELDS.values()), strict=True)))
    assert_same(results(fields, 8), narrow)


@pytest.mark.slow
def test_transposed_fields():
    """What pulls a cotangent back: to the state, and to parameters of each lane and of all."""

    def pulled(fn):
        def pulled(u, p, t):
            out = jax.eval_shape(fn, u, p, t)
            return flat_pull(lambda u, p: fn(u, p, t), u, p, jnp.asarray(cotangent_of(out)))

        return pulled

    fields = {name: lowered(case, transposed=True) for name, case in FIELDS.items()}
    references = [case._replace(fn=pulled(case.fn)) for case in FIELDS.values()]
    narrow = results(fields, 1)
    assert_close(narrow, dict(zip(FIELDS, expected_of(references), strict=True)))
    assert_same(results(fields, 4, "apart"), narrow)


# (Small whole numbers and halves, of which sums and products are exact.)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -3.0, np.inf, -np.inf, np.nan)
UNARY = {"neg": lax.neg, "abs": lax.abs, "floor": lax.floor, "sign": lax.sign, "square": lax.square}
BINARY = {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min}
leaves = st.sampled_from(["u0", "u1", "p", "carry", *NUMBERS])


def _larger(inner):
    return st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), inner),
        st.tuples(st.sampled_from(sorted(BINARY)), inner, inner),
        st.tuples(st.sampled_from(["where", "cond"]), inner, inner, inner, inner),
        st.tuples(st.just("while"), inner, inner),
        st.tuples(st.just("take"), inner),
    )


expressions = st.recursive(leaves, _larger, max_leaves=8)


def meaning(e, env):
    match e:
        case str():
            return env[e]
        case float():
            return jnp.asarray(e)
        case ("where" | "cond" as name, a, b, x, y):
            below = meaning(a, env) < meaning(b, env)
            if name == "where":
                return jnp.where(below, meaning(x, env), meaning(y, env))
            return lax.cond(below, lambda: meaning(x, env), lambda: meaning(y, env))
        case ("while", x, body):

            def turn(c):
                return meaning(body, env | {"carry": c[0]}), c[1] + 1

            def goes_on(c):
                return (c[1] < env["n"]) & ~(abs(c[0]) > 20)

            return lax.while_loop(goes_on, turn, (meaning(x, env), 0))[0]
        case ("take", x):
            # (Never of a constant, which NumPy would warn of.)
            index = jnp.where(env["n"] < 9, meaning(x, env), 0.0)
            return env["table"][index.astype(int)]
        case (name, *args):
            return (UNARY | BINARY)[name](*(meaning(x, env) for x in args))


@settings(max_examples=3, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(st.lists(expressions, min_size=12, max_size=12))
def test_expressions_at_random(some):
    """Exactly as JAX; and the same bits at every width, also of subnormal numbers."""
    u = np.array([*itertools.product(NUMBERS, NUMBERS)])[:: 100 // LANES][:LANES]
    u[-3:] = [[5e-324, 2.0], [-3e-310, 0.5], [1.0, 2.5e-308]]
    p = np.resize(NUMBERS, LANES), np.arange(LANES) % 5

    def field(e, u, p, t):
        env = {"u0": u[0], "u1": u[1], "p": p[0], "n": p[1], "carry": t}
        x = meaning(e, env | {"table": jnp.asarray(NUMBERS)[:7] * u[0]})
        return jnp.stack([x, -x])

    cases = [Case(functools.partial(field, e), u, p) for e in some]
    fields = {
        f"{e} {k}": lowered(c, apart=k) for e, c in zip(some, cases, strict=True) for k in (0, 1)
    }
    narrow = results(fields, 1)
    for e, want in zip(some, expected_of(cases), strict=True):
        for k in (0, 1):
            # (XLA takes subnormal numbers for zero, and adds zeros up as it likes.)
            np.testing.assert_array_equal(narrow[f"{e} {k}"][:-3], want[:-3], str(e))
    for width in (4, 8):
        assert_same(results(fields, width), narrow)
