"""Elementary functions: their accuracy, their special values, and the independence of lanes."""

import dataclasses
import functools
import platform

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import mpmath
import numpy as np
import pytest
from jax import lax

from ensembleode.engines.compiled.llvm.across_lanes import largest_magnitude
from ensembleode.engines.compiled.llvm.builder import ElementPointer
from ensembleode.engines.compiled.llvm.functions import (
    coefficients,
    constants,
    FUNCTIONS,
    HIGHEST_ORDER,
    integer_pow,
)
from ensembleode.engines.compiled.llvm.machine import host
from ensembleode.engines.compiled.llvm.module import Module

from ...marks import slow_unless
from . import fits
from .harness import flushed, OnArrays
from .references import errors, NAMES, OF_TWO, points


DOUBLE, SINGLE = np.dtype(np.float64), np.dtype(np.float32)
DTYPES = pytest.mark.parametrize("dtype", [DOUBLE, slow_unless(False, SINGLE)], ids=str)
EVERY = pytest.mark.parametrize("name", NAMES)
ON_X86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="about instructions of x86"
)

# In units in the last place; where these two are less than that at negative arguments, their errors
# are said to be less than this.
LIMIT = 2.0
# Activations are quick rather than accurate in single precision.
LIMITS = {("tanh", SINGLE): 5.4}
ABSOLUTE = {"lgamma": (1.0, 2.0**-54), "digamma": (2.0**-9, 2.0**-60)}


def arity(name: str) -> int:
    return 2 if name in OF_TWO else 1


@functools.cache
def on_arrays(name: str, dtype: np.dtype, width: int = 8, has_fma: bool = True) -> OnArrays:
    machine = host()
    if not has_fma:
        features = machine.features + ",-fma,-fma4,-avx512f"
        machine = dataclasses.replace(machine, features=features, has_fma=False)
    return OnArrays(FUNCTIONS[name], dtype, arity(name), width, machine)


def assert_accurate(name, args, found, limit=None):
    error, limit = errors(name, args, found), limit or LIMITS.get((name, found.dtype), LIMIT)
    worst = int(np.argmax(error))
    assert error[worst] <= limit, (name, [float(x[worst]) for x in args], found[worst])


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("many", [False, slow_unless(False, True)])
@DTYPES
@EVERY
def test_results_are_within_two_units_in_the_last_place(name, dtype, many):
    # (mpmath takes as long for fewer of these.)
    most = 5_000 if name in ("erf", "erfc", "erf_inv", "lgamma", "digamma") else 200_000
    args = points(name, dtype, most if many else 2_000, seed=int(many))
    assert len(args[0]) > 1_000
    assert_accurate(name, args, on_arrays(name, dtype)(*args))


@pytest.mark.parametrize("width", [1, 4, 16, 32])
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE], ids=str)
def test_the_largest_magnitude(dtype, width):
    """In one instruction where the machine has it, also for vectors of several registers."""

    def largest(b, *xs):
        b.module.has_range = host().has_range
        return largest_magnitude(b, xs)

    rng = np.random.default_rng(0)
    xs = rng.normal(size=(3, 100)).astype(dtype)
    xs[:, :3] = [[-np.inf, 0.0, -1.0], [2.0, -0.0, 1.0], [-2.0, 0.0, 0.0]]
    function = OnArrays(largest, dtype, 3, width)
    np.testing.assert_array_equal(function(*xs), np.abs(xs).max(0))
    uses = host().has_range and width * dtype.itemsize >= 64
    assert ("vrange" in function.assembly) == uses


@pytest.mark.quick_cases(10)
@ON_X86
@DTYPES
@EVERY
def test_results_are_as_good_without_fused_operations(name, dtype):
    function = on_arrays(name, dtype, has_fma=False)
    assert "vfmadd" not in function.assembly
    args = points(name, dtype, 400 if dtype == DOUBLE else 20_000, seed=2)
    assert_accurate(name, args, function(*args))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_angles_next_to_multiples_of_a_quarter_turn_are_as_good(name):
    # The doubles nearest to multiples of pi / 2, of all sizes, by continued fractions.
    close = [6381956970095103.0 * 2.0**797]
    with mpmath.workprec(1200):
        for exponent in range(-52, 971, 3):
            ratio = mpmath.pi / 2 / mpmath.mpf(2) ** exponent
            k = mpmath.nint(mpmath.mpf(2) ** 52 * 1.3 / ratio)
            close.extend(float(mpmath.nint((k + i) * ratio)) * 2.0**exponent for i in (0, 1))
            # Convergents p / q of the ratio: q times it is nearly whole.
            p0, q0, p1, q1, rest = 0, 1, 1, 0, ratio
            while p1 < 2**53:
                whole = int(mpmath.floor(rest))
                p0, q0, p1, q1 = p1, q1, whole * p1 + p0, whole * q1 + q0
                rest = 1 / (rest - whole)
            if 0 < p0 < 2**53:
                close.append(float(p0) * 2.0**exponent)
    x = np.array([y for y in close if 0.1 < y < 1e308])
    assert_accurate(name, [x], on_arrays(name, DOUBLE)(x))
    small = x[x < 1e38].astype(np.float32)
    assert_accurate(name, [small], on_arrays(name, SINGLE)(small))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", list(ABSOLUTE))
def test_negative_arguments_of_gamma_functions(name):
    x = -np.random.default_rng(3).uniform(0, 30, 1_000)
    x = np.concatenate([x, -np.arange(1, 20) + 1e-9, -np.arange(1, 20) - 0.5])
    if name == "digamma":
        zeros = [float(mpmath.findroot(mpmath.digamma, (-n - 0.9, -n - 0.1))) for n in range(9)]
        x = np.concatenate([x, *(np.array(zeros) + off for off in (0.0, 1e-5, -1e-3, 1e-2))])
    found = on_arrays(name, DOUBLE)(x)
    error = errors(name, [x], found)
    small, absolute = ABSOLUTE[name]
    is_small = abs(found) < small
    assert error[~is_small].max() <= LIMIT
    assert np.max((error * np.spacing(abs(found)))[is_small]) <= absolute
    single = x.astype(np.float32)
    single = single[single != np.round(single)]
    assert_accurate(name, [single], on_arrays(name, SINGLE)(single))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "dtype"),
    [(order, dtype) for order in range(1, HIGHEST_ORDER + 1) for dtype in (DOUBLE, SINGLE)],
)
def test_derivatives_of_digamma(order, dtype):
    def of_order(b, x):
        return FUNCTIONS["polygamma"](b, b.constant(order, x.dtype), x)

    polygamma = OnArrays(of_order, dtype)
    rng = np.random.default_rng(order)
    size = 2.0 ** rng.uniform(-20, 20, 30)
    x = np.concatenate([rng.uniform(0, 2, 20), rng.uniform(2, 40, 20), size, -size[:10]])
    x = np.concatenate([x, rng.uniform(-30, 0, 20), -np.arange(1, 20) + 2.0**-12]).astype(dtype)
    x = x[x != np.round(x)]
    found, many = polygamma(x), np.full(len(x), order)
    error = errors("polygamma", [many, x], found)
    # (Even orders have zeros at negative arguments.)
    is_small = (x < 0) & (abs(found) < 1.0) & (order % 2 == 0) & (dtype == DOUBLE)
    assert error[~is_small].max() <= (LIMIT if order == 1 or dtype == SINGLE else 2 * LIMIT)
    assert np.max((error * np.spacing(abs(found)))[is_small], initial=0.0) <= 2.0**-48
    pole = np.inf if order % 2 else np.nan
    edges = polygamma(np.array([0.0, -0.0, -1.0, -40.0, np.inf, np.nan], dtype))
    np.testing.assert_array_equal(edges, [pole, pole, pole, pole, 0.0, np.nan])


def special_values(name: str, dtype: np.dtype) -> list[np.ndarray]:
    info = np.finfo(dtype)
    one = dtype.type(1)
    values = [
        0.0, np.inf, 1.0, 2.0, 0.5, 3.0, 1.5, 4.0, 7.0, 28.0, 89.0, 104.0, 171.0, 710.0, 745.2,
        1e-20, 1e20, info.max, info.tiny, np.nextafter(one, one + 1), np.nextafter(one, one - 1),
    ]  # fmt: skip
    row = np.array([np.nan, *values, *(-x for x in values)], dtype)
    if arity(name) == 1:
        return [row]
    return [x.ravel() for x in np.meshgrid(row, row)]


@DTYPES
def test_special_values_are_those_of_jax(dtype):
    ours = {"log2": jnp.log2, "log10": jnp.log10}
    functions = {name: ours.get(name) or getattr(lax, name) for name in NAMES}
    args = {name: special_values(name, dtype) for name in NAMES}
    expected = jax.jit(lambda args: {n: functions[n](*args[n]) for n in NAMES})(args)
    for name in NAMES:
        found, true = on_arrays(name, dtype)(*args[name]), np.asarray(expected[name])
        np.testing.assert_array_equal(np.isnan(found), np.isnan(true), err_msg=name)
        np.testing.assert_array_equal(found == np.inf, true == np.inf, err_msg=name)
        np.testing.assert_array_equal(found == -np.inf, true == -np.inf, err_msg=name)
        # (JAX flushes what is subnormal, and its lgamma is not zero at one.)
        finite = np.isfinite(true)
        np.testing.assert_allclose(found[finite], true[finite], 1e-4, 1e-6, err_msg=name)
        zero = finite & (true == 0) & (abs(found) < 1e-30)
        np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(true[zero]), err_msg=name)


@DTYPES
@EVERY
def test_bits_depend_on_neither_the_width_nor_other_lanes(name, dtype):
    columns = points(name, dtype, 300, seed=4)
    extra = special_values(name, dtype)
    columns = [np.concatenate([x, y]) for x, y in zip(columns, extra, strict=True)]
    bits = np.dtype(f"i{dtype.itemsize}")
    expected = on_arrays(name, dtype)(*columns)
    is_nan = np.isnan(expected)
    order = np.random.default_rng(5).permutation(len(expected))
    moved = np.empty_like(expected)
    moved[order] = on_arrays(name, dtype)(*(x[order] for x in columns))
    others = [moved, *(on_arrays(name, dtype, width)(*columns) for width in WIDTHS)]
    for found in others:
        np.testing.assert_array_equal(np.isnan(found), is_nan)
        np.testing.assert_array_equal(found[~is_nan].view(bits), expected[~is_nan].view(bits))


WIDTHS = (1, 4, 16)


@pytest.mark.quick_cases(10)
@ON_X86
@DTYPES
@EVERY
def test_normal_results_are_the_same_where_subnormal_numbers_are_flushed(name, dtype):
    args = points(name, dtype, 500, seed=6)
    expected = on_arrays(name, dtype)(*args)
    with flushed():
        found = on_arrays(name, dtype)(*args)
    # (Of what is nearly subnormal tails are lost.)
    is_normal = abs(expected) >= np.finfo(dtype).tiny
    assert_accurate(name, [x[is_normal] for x in args], found[is_normal])
    least = np.finfo(dtype).tiny * 2.0 ** (2 * np.finfo(dtype).nmant)
    is_far = np.logical_and.reduce([abs(x) > least for x in [*args, expected]])
    assert is_far.sum() > 100
    np.testing.assert_array_equal(found[is_far], expected[is_far])


@DTYPES
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 10, -1, -2, -5])
def test_integer_powers_are_those_of_jax(n, dtype):
    x = np.array([1.5, -2.25, 0.0, -0.0, 3.1, np.inf, -np.inf, np.nan, 1e-3], dtype)
    found = OnArrays(lambda b, x: integer_pow(b, x, n), dtype)(x)
    expected = np.asarray(lax.integer_pow(x, n))
    np.testing.assert_allclose(found, expected, 4 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(np.signbit(found)[:7], np.signbit(expected)[:7])


def test_functions_take_scalars_beside_lanes():
    """A scalar of a module with lanes has the bits that a lane has."""

    def both(b, x):
        scalar = b.constant(1e6, DOUBLE) * 1.25
        product = b.spread(FUNCTIONS["sin"](b, scalar))
        return b.where(x > 0.0, product, FUNCTIONS["sin"](b, x))

    found = OnArrays(both, DOUBLE)(np.array([-1.25e6, 1.0, 2.0]))
    assert found[0] == -found[1]
    np.testing.assert_allclose(found[1], np.sin(1.25e6), rtol=1e-15)


def gpu_module() -> Module:
    """All functions, one after the other, for a thread."""
    module = Module(1, is_gpu=True)
    for dtype, type_ in ((DOUBLE, "double"), (SINGLE, "float")):
        for name, function in FUNCTIONS.items():
            parameters = [f"{type_} %x{i}" for i in range(arity(name))]
            with module.function(
                f"try_{name}_{dtype}", [*parameters, "ptr %y"], linkage="external"
            ) as b:
                args = [b.parameter(f"%x{i}", dtype) for i in range(arity(name))]
                args = [b.constant(1.0, dtype), *args] if name == "polygamma" else args
                ElementPointer(b, "%y", dtype).store(0, function(b, *args))
                b.return_()
    return module


def test_nothing_of_a_library_is_called_and_gpus_can_run_it():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed = llvm.parse_assembly(gpu_module().text)
    allowed = {"fabs", "fma", "fmuladd", "sqrt", "floor", "roundeven", "copysign", "cttz"}
    declared = {f.name.split(".")[1] for f in parsed.functions if f.is_declaration}
    assert declared <= allowed
    triple = "nvptx64-nvidia-cuda"
    parsed.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="sm_80", opt=1)
    ptx = machine.emit_assembly(parsed)
    assert ptx.count(".visible .func") == 2 * len(FUNCTIONS)
    assert ".extern" not in ptx


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("name", list(fits.FITS))
def test_coefficients_are_what_is_said_of_them(name):
    fit, rows = fits.FITS[name], getattr(coefficients, name)
    for dtype, interval in ((DOUBLE, fit.doubles), (SINGLE, fit.singles)):
        assert (interval is None) == (dtype not in rows)
        if interval is not None:
            derived = fits.polynomial(fit.function, *interval)
            np.testing.assert_array_equal(rows[dtype], [float(c) for c in derived])


def test_the_quotient_for_tanh_is_what_is_said_of_it():
    for name, derived in zip(("TANH_ABOVE", "TANH_BELOW"), fits.tanh_quotient(), strict=True):
        assert getattr(coefficients, name) == {SINGLE: tuple(float(c) for c in derived)}
    assert coefficients.ONE_FROM == fits.TANH_TOP


@pytest.mark.parametrize("name", list(fits.CONSTANTS))
def test_constants_are_what_is_said_of_them(name):
    bits = fits.bits_of(name)
    assert getattr(constants, name) * 2**bits == fits.constant(name, bits)
