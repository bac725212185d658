"""The printed Julia, compared with golden files, and the numbers that it computes in a model of
Julia.

To write the golden files again after an intended change, and to see the difference:

    WRITE_GOLDEN=1 pytest -n 0 tests/engines/julia/test_source.py -k golden && git diff
"""

import os
import pathlib
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ensembleode.engines.julia.source import julia_source, TYPES
from ensembleode.fields.equations import ELEMENTWISE
from ensembleode.fields.ir import (
    Assign,
    Buffer,
    Const,
    For,
    Function,
    Index,
    Let,
    Load,
    Matrix,
    Op,
    Product,
    Store,
    Var,
)

from ...fields.fields import FIELDS, jacobian, vjp
from ...fields.lowered import Lowered
from ...fields.python_printer import run
from ...fields.test_fields import as_arrays, groups_of
from ...marks import slow_unless
from .model import call, Vector


GOLDEN = pathlib.Path(__file__).parent / "golden"
# All versions of JAX compute these derivatives by the same operations.
SOURCES = [
    *((name, "f") for name in FIELDS),
    *((name, "jacobian") for name in ("kuramoto", "lorenz")),
    *((name, "vjp") for name in ("kuramoto", "lotka_volterra")),
]
F64, INT = np.dtype(np.float64), np.dtype(np.int64)
PRIMITIVES = pathlib.Path(__file__).parents[3] / "julia" / "src" / "primitives.jl"


def lowered(name, what, **options):
    fn, u, p, fewer = FIELDS[name]
    p = as_arrays(p)
    if what == "vjp":
        groups = ["forward", *groups_of(p)]
        return Lowered(vjp(fn), u, (u, p), groups=groups, **options), u, (u, p)
    if what == "jacobian":
        u = u if fewer is None else fewer
        return Lowered(jacobian(fn), u, p, groups=groups_of(p), **options), u, p
    return Lowered(fn, u, p, groups=groups_of(p), **options), u, p


def by_model(program, u, p=(), t=0.25):
    fn = program.function
    definition = julia_source(fn)
    work = [np.full(size, 77).astype(dtype) for dtype, size in fn.work]
    memory = program.memory(p)
    parameters = SimpleNamespace(
        own=Vector(memory["own"]),
        shared=Vector(memory["shared"]),
        forward=lambda time: Vector(memory["forward"]),
        work=SimpleNamespace(f=tuple(map(Vector, work))),
    )
    assert definition.work == tuple((TYPES[dtype.name], size) for dtype, size in fn.work)
    assert definition.in_place == (not fn.is_scalar)
    out = Vector(np.full(fn.size, 77, fn.dtype)) if definition.in_place else None
    u = np.asarray(u)
    return call(definition.source, Vector(u.reshape(-1)), parameters, u.dtype.type(t), out)


def agree(fn, u, p=(), t=0.25, **options):
    """Compares the model's results with those of the printed program, in both forms. Returns the
    sources."""
    sources = []
    for apart in (True, False):
        program = Lowered(fn, u, p, t, apart=apart, **options)
        got, want = by_model(program, u, p, t), program(u, p, t)
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-13)
        sources.append(julia_source(program.function).source)
    return sources


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "what"), SOURCES)
def test_golden(name, what):
    program, *_ = lowered(name, what)
    source = julia_source(program.function).source
    path = GOLDEN / f"{name}_{what}.jl"
    if os.environ.get("WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert source == path.read_text(encoding="utf-8")


@pytest.mark.quick_cases(17)
@pytest.mark.parametrize(
    ("name", "what", "apart"),
    [
        slow_unless(what == "f" or name == "lorenz", name, what, apart)
        for name in FIELDS
        for what in ("f", "jacobian", "vjp")
        for apart in (True, False)
    ],
)
def test_the_source_computes_what_was_lowered(name, what, apart):
    program, u, p = lowered(name, what, apart=apart)
    np.testing.assert_allclose(by_model(program, u, p), program(u, p, 0.25), rtol=1e-12)


def test_single_precision_stays():
    for name in ("chemistry", "network"):
        fn, u, p, _ = FIELDS[name]
        u, p = as_arrays((u, p), np.float32)
        for apart in (True, False):
            program = Lowered(fn, u, p, np.float32(0), apart=apart, storage=np.float32)
            assert "Float64" not in julia_source(program.function).source
            np.testing.assert_allclose(by_model(program, u, p), program(u, p), rtol=1e-5)


def test_all_kinds_of_statements():
    u = np.linspace(-1.0, 2.0, 12)
    order = np.random.default_rng(0).permutation(12)
    several = np.arange(24) * 5 % 12

    def loops(u, p, t):
        z = lax.while_loop(lambda z: jnp.sum(z**2) > p["end"], lambda z: 0.5 * z + t, u)
        z, rows = lax.scan(lambda c, x: (c[::-1] + x, c), z, u[:5], reverse=True)
        joined = jnp.concatenate([z[i : i + 1] for i in several])  # too many pieces for loops
        branches = [jnp.sin, lambda x: x[order], lambda x: x.at[p["k"]].add(joined[5])]
        z = lax.switch(p["k"], branches, z) + jnp.where(p["flags"], z, -rows[2])
        return z + lax.select_n(jnp.int32(u), z, u, 2 * u) * jnp.argmax(u).astype(u.dtype)

    for k in range(3):
        p = {"end": 4.0, "k": np.int32(k), "flags": u > 0}
        _, source = agree(loops, u, p)
        assert "const TABLE_" in source
        assert all(word in source for word in ("while true", "elseif", "else", "ifelse", "@simd"))


def test_operators_and_conversions():
    u = np.array([-3.7, 0.0, 2.5, 1e9, -1e10, np.nan])
    for dtype in (np.int8, np.uint16, np.int32, np.uint32, np.int64):
        agree(lambda u, p, t, d=dtype: (u.astype(d) * 3 - 7).astype(u.dtype), u)
        agree(lambda u, p, t, d=dtype: (~u.astype(d) ^ u.astype(d)[::-1]).astype(jnp.int8), u)
    agree(lambda u, p, t: ~(u > 1) & (u < 3) | (u != u) ^ (u >= 0), u)
    agree(lambda u, p, t: (u > 1).astype(u.dtype) - jnp.sign(u) / 3, u)
    agree(lambda u, p, t: (u > 1).astype(jnp.int32) + jnp.float32(u).astype(jnp.int32), u)
    agree(lambda u, p, t: jnp.copysign(u, u[::-1]) + u % 2 - u**3, u)
    agree(lambda u, p, t: u.astype(jnp.float32).astype(jnp.float16), u)
    agree(lambda u, p, t: -(jnp.negative(u)) - (u - (u - t)) / (u / t), u)
    agree(lambda u, p, t: u.astype(bool).astype(jnp.int64) // jnp.int64(t + 2), u)


LITERALS = [
    (np.float64(0.1), "0.1"),
    (np.float64(3), "3.0"),
    (np.float64(-2.5), "(-2.5)"),
    (np.float64(-0.0), "(-0.0)"),
    (np.float64(1e22), "1e+22"),
    (np.float64(5e-324), "5e-324"),
    (np.float64("nan"), "NaN"),
    (np.float64("inf"), "Inf"),
    (np.float64("-inf"), "(-Inf)"),
    (np.float32(0.1), "0.1f0"),
    (np.float32(1e-45), "1f-45"),
    (np.float32(-1e20), "(-1f20)"),
    (np.float32("-inf"), "(-Inf32)"),
    (np.float32("nan"), "NaN32"),
    (np.float16(0.1), "Float16(0.1)"),
    (np.float16("inf"), "Inf16"),
    (np.bool_(True), "true"),
    (np.bool_(False), "false"),
    (np.int64(7), "7"),
    (np.int64(-7), "(-7)"),
    (np.int64(2**63 - 1), str(2**63 - 1)),
    (np.int64(-(2**63)), "typemin(Int64)"),
    (np.int32(-7), "Int32(-7)"),
    (np.int8(-128), "typemin(Int8)"),
    (np.int16(3), "Int16(3)"),
    (np.uint8(255), "UInt8(255)"),
    (np.uint64(2**64 - 1), f"UInt64({2**64 - 1})"),
]


@pytest.mark.parametrize(("value", "text"), LITERALS, ids=[text for _, text in LITERALS])
def test_literals(value, text):
    fn = Function((), (Const(value),), 1, value.dtype, (), ())
    definition = julia_source(fn)
    assert f"return SVector{{1, {TYPES[value.dtype.name]}}}({text})" in definition.source
    got = call(definition.source, None, None, 0.0)
    assert got.dtype == value.dtype
    assert got.tobytes() == np.array([value]).tobytes() or (value != value and got[0] != got[0])


def test_numbers_read_back_as_they_were():
    rng = np.random.default_rng(0)
    for dtype, bits in ((np.float64, np.int64), (np.float32, np.int32), (np.float16, np.int16)):
        info = np.iinfo(bits)
        values = rng.integers(info.min, info.max, 300, dtype=bits).view(dtype)
        values = values[np.isfinite(values)]
        fn = Function((), tuple(map(Const, values)), values.size, values.dtype, (), ())
        np.testing.assert_array_equal(call(julia_source(fn).source, None, None, 0.0), values)


def simd_lines(fn, u, p=(), **options):
    *_, source = agree(fn, u, p, **options)
    return [line for line in source.splitlines() if "for " in line and "@simd" not in line], source


def test_simd_only_where_turns_may_be_reordered():
    u = np.linspace(0.5, 1.5, 7)
    for fn in (jnp.cumsum, lax.cummax, lambda x: x.at[jnp.int32(x) % 2].add(x)):
        plain, _ = simd_lines(lambda u, p, t, fn=fn: fn(u), u)
        assert len(plain) == 1
    for fn in (jnp.sin, lambda x: x - jnp.sum(x), lambda x: x[::-1] * x, lambda x: jnp.pad(x, 2)):
        plain, source = simd_lines(lambda u, p, t, fn=fn: fn(u), u)
        assert not plain
        assert "@simd" in source
    plain, _ = simd_lines(lambda u, p, t: u - jnp.max(u), u)
    assert len(plain) == 1
    plain, _ = simd_lines(lambda u, p, t: lax.scan(lambda c, x: (x + c * t, None), t, u)[0], u)
    assert plain


def test_simd_of_what_a_turn_leaves_to_the_next():
    i, x, y = Var("i1", INT), Var("x1", F64), Var("x2", F64)
    out, work = (Buffer(group, F64, 0, 4) for group in ("out", "work"))
    at = Index().plus((i, 1))
    one = Const(np.float64(1))
    k = Var("k", INT)

    def is_simd(*body):
        fn = Function((For(i, 4, body),), (), 4, F64, ((F64, 4),), ())
        return "@simd" in julia_source(fn).source

    assert is_simd(Store(out, at, Load(work, at)))
    assert is_simd(Let(x, one), Store(out, at, Op("add", (x, x), F64)))
    assert is_simd(Assign(x, Op("add", (x, Load(work, at)), F64)))
    assert not is_simd(Assign(x, Op("add", (Load(work, at), x), F64)))
    assert not is_simd(Assign(x, Op("add", (x, Op("mul", (x, one), F64)), F64)))
    assert not is_simd(Assign(x, Op("mul", (x, one), F64)))
    assert not is_simd(Assign(x, Op("add", (y, one), F64)))
    assert not is_simd(Store(work, at, Load(work, Index(3))))
    assert not is_simd(Let(k, Const(INT.type(0))), Store(out, Index().plus((k, 1)), one))


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 5), (3, 4, 1), (1, 4, 1), (3, 1, 5)])
def test_products_in_every_orientation(shape, transposed):
    n, k, m = shape
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, k)), rng.normal(size=(k, m))
    memory = [z.T if swapped else z for z, swapped in zip((x, y), transposed, strict=True)]
    buffers = [Buffer(g, F64, 2, z.size) for g, z in zip(("own", "shared"), (x, y), strict=True)]
    left, right = (
        Matrix(b, *z.shape, swapped)
        for b, z, swapped in zip(buffers, (x, y), transposed, strict=True)
    )
    out = Buffer("out", F64, 0, n * m)
    fn = Function((Product(Matrix(out, n, m, False), left, right),), (), n * m, F64, (), ())
    own, shared = (np.concatenate([[np.nan] * 2, z.reshape(-1), [np.nan]]) for z in memory)
    p = SimpleNamespace(own=Vector(own), shared=Vector(shared))
    got = call(julia_source(fn).source, None, p, 0.0, Vector(np.full(n * m, np.nan)))
    np.testing.assert_allclose(got.reshape(n, m), x @ y, rtol=1e-13)
    by_printer = run(fn, np.zeros(0), own, shared)
    np.testing.assert_allclose(by_printer.reshape(n, m), x @ y, rtol=1e-13)


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize(
    "letters",
    [
        *("ij,jk->ik", "ij,kj->ik", "ji,jk->ik", "ji,kj->ik", "ij,jk->ki", "ij,j->i", "ji,j->i"),
        *("j,jk->k", "i,k->ik", "ijl,jlk->ik", "ijl,ljk->ik", "bij,bjk->bik"),
    ],
)
def test_products_that_users_write(letters):
    size, rng = {"b": 3, "i": 9, "j": 8, "k": 10, "l": 2}, np.random.default_rng(0)
    operands = letters.split("->")[0].split(",")
    x, y = (rng.normal(size=[size[c] for c in names]) for names in operands)
    *_, source = agree(lambda u, p, t: jnp.einsum(letters, u, p), x, y)
    assert ("mul!" in source) == ("b" not in letters and "ljk" not in letters)


def test_names_are_those_of_what_is_computed():
    def name(fn, n=3, role="f", **options):
        return julia_source(Lowered(fn, np.ones(n), 0.5, **options).function, role).name

    first = name(lambda u, p, t: jnp.sin(u) * p)
    assert re.fullmatch(r"f_[0-9a-f]{16}", first)
    assert first == name(lambda x, rate, time: jnp.sin(x) * rate)
    different = [
        name(lambda u, p, t: jnp.cos(u) * p),
        name(lambda u, p, t: jnp.sin(u) * p * 2),
        name(lambda u, p, t: jnp.sin(u) * p, 4),
        name(lambda u, p, t: jnp.sin(u) * p, 30),
        name(lambda u, p, t: jnp.sin(u) * p, groups=["shared"]),
        name(lambda u, p, t: jnp.sin(u) * p, storage=np.float32),
        name(lambda u, p, t: jnp.sin(u) * p, role="tgrad"),
    ]
    assert len({first, *different}) == 1 + len(different)


def test_names_tell_tables_apart():
    orders = [np.random.default_rng(seed).permutation(30) for seed in range(2)]
    names = set()
    for order in orders:

        def fn(u, p, t, order=order):
            return jnp.concatenate([u[i : i + 1] for i in order])

        names.add(julia_source(Lowered(fn, np.ones(30), apart=False).function).name)
    assert len(names) == 2


def test_static_jacobians_are_matrices():
    program, *_ = lowered("lorenz", "jacobian")
    source = julia_source(program.function, "jac", columns=3).source
    assert "return SMatrix{3, 3, Float64}(" in source
    assert source.startswith("function jac_")


def test_no_other_primitives_are_called():
    called = set()

    def one(name, n, kind="float64"):
        args = tuple(Var(f"x{i}", np.dtype(kind)) for i in range(n))
        param = {"integer_pow": 3, "round": 0}.get(name)
        return Op(name, args, np.dtype(kind), param)

    operands = {"clamp": 3, "select_n": 3, "regularized_incomplete_beta": 3}
    for name in ELEMENTWISE.split():
        for kind in ("float64", "int64", "bool"):
            for n in {operands.get(name, 1), operands.get(name, 2)}:
                try:
                    fn = Function((), (one(name, n, kind),), 1, np.dtype(kind), (), ())
                    called |= set(re.findall(r"Primitives\.(\w+)", julia_source(fn).source))
                except IndexError:
                    continue  # an operator of two
    convert = Op("convert_element_type", (Const(np.float64(1)),), INT)
    source = julia_source(Function((), (convert,), 1, INT, (), ())).source
    called |= set(re.findall(r"Primitives\.(\w+)", source))
    assert len(called) > 50
    assert called <= set(re.findall(r"\w+", PRIMITIVES.read_text(encoding="utf-8")))


def test_parts_of_callbacks_make_their_memory():
    def fn(u, p, t):
        return jnp.concatenate([p @ u + t, jnp.zeros(1)])

    n = 40
    p, u = np.random.default_rng(0).normal(size=(n, n)), np.arange(float(n))
    source = julia_source(Lowered(fn, u, p).function, "part").source
    source = source.replace(", uprev, tprev, mask)", ")")
    memory = SimpleNamespace(own=Vector(p.reshape(-1)))
    out = call(source, Vector(u), memory, np.float64(0.5))
    np.testing.assert_allclose(out.array, fn(u, p, 0.5), rtol=1e-13)
