"""Products by AMX in the compiled engine, and what is computed where there is none."""

import ctypes
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import ensembleode as eo
from ensembleode.engines.compiled import machine, tiles
from ensembleode.engines.compiled.builder import Buffer, F32, I32, I64
from ensembleode.engines.compiled.compiler import assembly, compiled, CompileError
from ensembleode.engines.compiled.module import Module
from ensembleode.fields import Inputs, ir, lower
from ensembleode.fields.walking import statements
from ensembleode.tracing.program import trace

from .machines import limited, TARGETS
from .test_networks import ends, FIXED, gradient, network, same, states, weights


X3 = tiles.ALGORITHM
# The error of three passes, relative to the sum of the magnitudes of all terms: 2^-17 of a weight
# and of a value are lost, and the product of both low parts, 2^-16.
LOST = 2.0**-15

needs_amx = pytest.mark.skipif(
    not (machine.host().has_tiles and machine.tiles_permitted()), reason="this computer has no AMX"
)


def products(lanes, rows, terms):
    """The module whose functions are `packed(w, to)` and `product(packed, x, y)`."""
    m = Module(lanes, has_tiles=True)
    with m.function("packed", ["ptr %w", "ptr %to"], linkage="external") as b:
        weights = ir.Matrix(ir.Buffer("shared", F32, 0, rows * terms), rows, terms, False)
        tiles.Tiles(weights).write(Buffer(b, "%w", F32), Buffer(b, "%to", I32))
        b.return_()
    with m.function("product", ["ptr %p", "ptr %x", "ptr %y"], linkage="external") as b:
        memory = b.array(I32, tiles.values_size(terms, lanes))
        x, y = ((Buffer(b, f"%{name}", F32), lanes) for name in "xy")
        tiles.multiply(b, Buffer(b, "%p", I32), x, y, rows, terms, memory)
        b.return_()
    return m.text


def product(w, x):
    """`w @ x`, where `x` has the lanes along its last axis."""
    code = compiled(products(x.shape[1], *w.shape))
    packed = np.empty(tiles.packed_size(*w.shape), np.int32)
    y = np.full((w.shape[0] + 1, x.shape[1]), 7, np.float32)
    for name, *arrays in (("packed", w, packed), ("product", packed, x, y)):
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays))
        function(code.address(name))(*(z.ctypes.data for z in arrays))
    assert np.all(y[-1] == 7)  # nothing is written behind the result
    return y[:-1]


def matrices(seed, rows, terms, lanes, spread=0):
    """Numbers with magnitudes from `2^-spread` to `2^spread`."""
    rng = np.random.default_rng(seed)
    shapes = (rows, terms), (terms, lanes)
    return [
        (rng.normal(size=s) * 2.0 ** rng.integers(-spread, spread + 1, s)).astype(np.float32)
        for s in shapes
    ]


@needs_amx
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 100),
    st.integers(1, 100),
    st.sampled_from((16, 32, 64)),
    st.sampled_from((0, 20)),
)
def test_products_have_a_small_error(seed, rows, terms, lanes, spread):
    """Of any sizes, multiples of a tile's or not."""
    w, x = matrices(seed, rows, terms, lanes, spread)
    exact = w.astype(float) @ x.astype(float)
    size = np.abs(w).astype(float) @ np.abs(x).astype(float)
    assert np.all(np.abs(product(w, x) - exact) <= (LOST + terms * 2.0**-23) * size)


@needs_amx
def test_products_of_few_bits_are_exact():
    """Both parts of a number count: with 16 bits, each product of three passes is exact."""
    rng = np.random.default_rng(3)
    w, x = (rng.integers(-(2**9), 2**9, s).astype(np.float32) for s in ((40, 8), (8, 16)))
    w[:, ::2] = rng.integers(-(2**7), 2**7, (40, 4))
    x[1::2] = rng.integers(-(2**7), 2**7, (4, 16))
    np.testing.assert_array_equal(product(w, x), w.astype(float) @ x.astype(float))


@needs_amx
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0x7F800001])
@pytest.mark.parametrize("where", ["weights", "values"])
def test_what_is_not_finite_stays_so(bits, where):
    w, x = matrices(1, 20, 33, 16)
    bad = np.array([bits], np.uint32).view(np.float32)[0]
    (w if where == "weights" else x)[9, 5] = bad
    found = np.isfinite(product(w, x))
    expected = np.ones_like(found)
    expected[9 if where == "weights" else slice(None), slice(None) if where == "weights" else 5] = 0
    np.testing.assert_array_equal(found, expected)


CALLER = """
@mine = private constant [64 x i8] [
  i8 1, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0,
  i8 8, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0,
  i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0,
  i8 3, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0, i8 0
], align 64
declare void @llvm.x86.tilerelease()
define void @caller(ptr %p, ptr %x, ptr %y, ptr %before, ptr %after) {
  call void @llvm.x86.ldtilecfg(ptr @mine)
  call void @llvm.x86.sttilecfg(ptr %before)
  call void @product(ptr %p, ptr %x, ptr %y)
  call void @llvm.x86.sttilecfg(ptr %after)
  call void @llvm.x86.tilerelease()
  ret void
}
"""


@needs_amx
def test_a_caller_finds_its_tiles_as_it_left_them():
    """As XLA's own products may have configured them on the same thread."""
    w, x = matrices(1, 32, 32, 16)
    code = compiled(products(16, 32, 32) + CALLER)
    before, after = np.zeros((2, 64), np.uint8)
    arrays = np.zeros(2048, np.int32), x, np.empty_like(w), before, after
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5)
    function(code.address("caller"))(*(z.ctypes.data for z in arrays))
    assert before[48] == 3
    np.testing.assert_array_equal(after, before)


#
# Solves
#


def asked(*args, of=ends, **how):
    with jax.default_matmul_precision(X3):
        return of(*args, **how)


SINGLE: Any = np.float32


@needs_amx
def test_solves_and_gradients_are_close_to_those_of_float32():
    u0, p = states(40, dtype=SINGLE), weights(2, 72, 60, 2, dtype=SINGLE)
    for of in (ends, gradient):
        given = network, u0, p, "compiled"
        found, expected = asked(*given, of=of, **FIXED), of(*given, **FIXED)
        same(found, expected, np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        assert any(np.any(x != y) for x, y in pairs)


@needs_amx
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize(("calls", "rows", "columns"), [(1, 16, 32), (5, 70, 37), (8, 33, 100)])
def test_sums_of_outer_products(width, calls, rows, columns):
    """Added to what is there, for any sizes, and where the columns don't fill the rows."""
    rng = np.random.default_rng(0)
    parts, each = width // tiles.LANES, (rows + columns + 1) * width
    factors = rng.normal(size=(calls, rows + columns + 1, width)).astype(np.float32)
    m = Module(tiles.LANES, has_tiles=True)
    with m.function("outer", ["ptr %f", "ptr %s", "ptr %m"], linkage="external") as b:
        f = Buffer(b, "%f", F32)
        sides = (tiles.Factors(f, each, start * width, width) for start in (1, 1 + rows))
        to, size = (Buffer(b, "%s", F32), columns + 3), (rows, columns)
        n, memory = b.constant(calls, I64), Buffer(b, "%m", I32)
        tiles.add_outer(b, *sides, n, parts, to, size, memory)
        b.return_()
    before = rng.normal(size=(rows, columns + 3)).astype(np.float32)
    sums, memory = before.copy(), np.empty(tiles.outer_size(rows, calls * parts), np.int32)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)
    code = compiled(m.text)
    function(code.address("outer"))(*(z.ctypes.data for z in (factors, sums, memory)))
    left, right = (x.astype(float) for x in (factors[:, 1 : 1 + rows], factors[:, 1 + rows :]))
    exact = before[:, :columns] + np.einsum("kil,kjl->ij", left, right)
    size = np.abs(before[:, :columns]) + np.einsum("kil,kjl->ij", abs(left), abs(right))
    assert np.all(np.abs(sums[:, :columns] - exact) <= 2 * LOST * size)
    np.testing.assert_array_equal(sums[:, columns:], before[:, columns:])


@needs_amx
def test_a_product_may_ask_by_itself():
    def field(u, p, t):
        (w, b), (v, c), (z, d) = p
        h = jnp.tanh(w @ u + b)
        return z @ jnp.tanh(jnp.dot(v, h, precision=X3) + c) + d

    u0, p = states(5, dtype=SINGLE), weights(2, 72, 72, 2, dtype=SINGLE)
    found = ends(field, u0, p, "compiled", **FIXED)
    same(found, asked(network, u0, p, "compiled", **FIXED))


@needs_amx
@pytest.mark.parametrize(
    "options", [FIXED, pytest.param({"abstol": 1e-5, "reltol": 1e-5}, marks=pytest.mark.slow)]
)
def test_bits_depend_on_no_neighbours_and_threads(options):
    u0, p = states(70, dtype=SINGLE), weights(2, 72, 60, 2, dtype=SINGLE)
    whole = asked(network, u0, p, "compiled", **options)
    for some in (slice(1), slice(3, 10), slice(40, 70)):
        same(asked(network, u0[some], p, "compiled", **options), whole[some])
    same(asked(network, u0, p, "compiled", threads=2, **options), whole)
    alone, both = (
        asked(network, u0, p, "compiled", of=gradient, threads=n, **options) for n in (1, 2)
    )
    same(alone, both)


def branching(u, p, t):
    """Lanes take different branches, and one of the weights is the other one transposed."""
    w = p
    return -lax.cond(u[0, 0] > 0, lambda: jnp.tanh(w @ u), lambda: jnp.tanh(u.T @ w).T)


@needs_amx
def test_products_in_branches_and_of_several_columns():
    rng = np.random.default_rng(0)
    u0 = jnp.asarray(rng.normal(size=(20, 72, 3)), SINGLE)
    w = jnp.asarray(rng.normal(size=(72, 72)) / 9, SINGLE)
    found, expected = (run(branching, u0, w, "compiled", **FIXED) for run in (asked, ends))
    same(found, expected, np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    assert np.any(found != expected)


@needs_amx
def test_weights_that_are_computed_are_multiplied_in_float32():
    """To pack them at each product would take longer than the product."""

    def field(u, p, t):
        w, v = p
        return jnp.tanh((w * jnp.cos(v)) @ u) - u

    rng = np.random.default_rng(0)
    u0 = jnp.asarray(rng.normal(size=(20, 72)), SINGLE)
    p = tuple(jnp.asarray(rng.normal(size=(72, 72)) / 9, SINGLE) for _ in range(2))
    same(*(run(field, u0, p, "compiled", **FIXED) for run in (asked, ends)))


@needs_amx
def test_columns_have_them_too():
    u0, p = states(40, dtype=SINGLE), weights(2, 72, 60, 2, dtype=SINGLE)
    ens = eo.EnsembleProblem(
        eo.ODEProblem(network, u0[0], (0.0, 0.5), p),
        lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]),
    )
    options = {"trajectories": 40, "save_start": False, "engine": "compiled", **FIXED}

    def columns():
        return eo.solve(ens, eo.Tsit5(), eo.EnsembleColumns(), **options).u

    found, expected = asked(of=columns), columns()
    same(found, expected, np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    assert np.any(found != expected)


#
# Without AMX
#


def test_a_lesser_machine_computes_in_float32():
    u0, p = states(9, dtype=SINGLE), weights(2, 72, 72, 2, dtype=SINGLE)
    try:
        lesser = limited("x86-64-v3")
    except ValueError as e:
        pytest.skip(str(e))
    with machine.using(lesser):
        found, expected = in_both(u0, p)
    same(found, expected)


def in_both(u0, p):
    """The ends within and without the context, by functions that are traced now and forgotten."""
    jax.clear_caches()
    found = [run(network, u0, p, "compiled", **FIXED) for run in (asked, ends)]
    jax.clear_caches()
    return found


def test_where_linux_refuses_products_are_of_float32(monkeypatch):
    monkeypatch.setattr(machine, "tiles_permitted", lambda: False)
    u0, p = states(9, dtype=SINGLE), weights(2, 72, 72, 2, dtype=SINGLE)
    same(*in_both(u0, p))


def test_float64_stays_float64():
    u0, p = states(9), weights(2, 72, 72, 2)
    same(*(run(network, u0, p, "compiled", **FIXED) for run in (asked, ends)))


def test_the_lanes_engine_computes_in_float32():
    u0, p = states(9, dtype=SINGLE), weights(2, 72, 72, 2, dtype=SINGLE)
    found, expected = (run(network, u0, p, "lanes", **FIXED) for run in (asked, ends))
    same(found, expected, np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


AMX = dataclasses.replace(
    TARGETS["x86-64-v4"],
    name="sapphirerapids",
    cpu="sapphirerapids",
    features="+amx-tile,+amx-bf16,+avx512bf16",
    has_tiles=True,
)


def test_code_can_be_made_on_any_machine():
    found = assembly(products(32, 40, 40), AMX)
    assert found.count("tdpbf16ps") >= 12
    assert all(x in found for x in ("tileloadd", "ldtilecfg", "sttilecfg"))


def test_code_with_tiles_is_refused_for_a_machine_without():
    with pytest.raises(CompileError, match=r"x86-64-v4 has no .*tdpbf16ps"):
        assembly(products(32, 40, 40), TARGETS["x86-64-v4"])


def test_a_program_has_the_precision_of_its_products():
    """So the same solve within and without the context runs different programs."""
    w, u, t = jnp.ones((20, 20), SINGLE), jnp.ones(20, SINGLE), jnp.ones((), SINGLE)

    def field(u, w, t):
        return w @ u

    plain, _ = trace(field, u, w, t)
    within, _ = asked(field, u, w, t, of=trace)
    itself, _ = trace(lambda u, w, t: jnp.dot(w, u, precision=X3), u, w, t)
    assert plain != within == itself
    inputs = Inputs.laid_out([w], ["shared"])
    for program, algorithm in ((plain, None), (within, X3)):
        stmts = statements(lower(program.jaxpr, inputs, apart=False).body)
        (found,) = [x for x in stmts if isinstance(x, ir.Product)]
        assert found.algorithm == algorithm


@needs_amx
def test_jitted_solves_are_compiled_again_within_the_context():
    u0, p = states(9, dtype=SINGLE), weights(2, 72, 72, 2, dtype=SINGLE)
    run = jax.jit(lambda u0, p: ends(network, u0, p, "compiled", **FIXED))
    plain, within, again = run(u0, p), asked(u0, p, of=run), run(u0, p)
    same(plain, again)
    same(within, asked(network, u0, p, "compiled", **FIXED))
    assert np.any(plain != within)
