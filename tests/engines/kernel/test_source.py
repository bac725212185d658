"""Every primitive and field as C++, against JAX: one program of all, built for the host."""

import ctypes
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
import pytest

from ensembleode.engines.codegen import Inputs, lower, UntranslatableError
from ensembleode.engines.kernel import generate
from ensembleode.engines.kernel.source import cpp_source, literal
from ensembleode.program import trace

from ...host_kernels import COMPILER, load
from ..codegen.fields import FIELDS, jacobian
from ..codegen.test_primitives import CASES


# XLA's are approximations of their own.
LOOSE = {"erf_inv": 1e-11, "lgamma": 1e-12}
MISSING = {
    "bessel_i0e",
    "bessel_i1e",
    "digamma",
    "igamma",
    "igammac",
    "polygamma",
    "regularized_incomplete_beta",
    "zeta",
}


class Case(NamedTuple):
    """A function `fn(u, *p)`, where it is evaluated, and how close the result is to JAX's."""

    fn: Any
    u: np.ndarray
    p: tuple
    close: float = 2e-13


def _cases() -> dict[str, Case]:
    found = {}
    for name, cases in CASES.items():
        for i, (fn, *args) in enumerate(cases):
            first = isinstance(args[0], np.ndarray) and args[0].dtype == np.float64
            u, p = (args[0], tuple(args[1:])) if first else (np.zeros(1), tuple(args))

            def called(u, *p, fn=fn, first=first):
                return fn(*([u] * first), *p)

            outs = jax.eval_shape(called, u, *p)
            for k in range(len(jtu.tree_leaves(outs))):

                def part(u, *p, called=called, k=k):
                    # (A field has its state's dtype.)
                    return jtu.tree_leaves(called(u, *p))[k].astype(np.float64)

                found[f"{name}-{i}-{k}"] = Case(part, u, p, LOOSE.get(name, 2e-13))
    for name, (fn, u, p, fewer) in FIELDS.items():
        found[name] = Case(lambda u, p, fn=fn: fn(u, p, np.float64(0.3)), np.asarray(u), (p,))
        if u.size <= 20 or fewer is not None:
            jac = jacobian(fn)
            at = u if fewer is None else fewer
            found[f"jacobian of {name}"] = Case(
                lambda u, p, jac=jac: jac(u, p, np.float64(0.3)), np.asarray(at), (p,), 1e-12
            )
    return found


ALL = _cases()
LANE = """
struct Lane {{
{fields}
}};
{readers}
"""


class Built(NamedTuple):
    """The cases that can be translated, in a library; of the others, why not."""

    library: Any
    cases: dict[str, tuple]
    refused: dict[str, str]


@pytest.fixture(scope="module")
def built() -> Built:
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++)")
    names = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    names += ("float32", "float64")
    lane = LANE.format(
        fields="\n".join(f"  const {n}* own_{n};" for n in names),
        readers="\n".join(
            f"DEVICE {n} own_{n}(const Lane& lane, int64 j) {{ return lane.own_{n}[j]; }}"
            for n in names
        ),
    )
    texts, cases, refused = [generate._text("primitives.cuh"), lane], {}, {}
    for number, (name, case) in enumerate(ALL.items()):
        program, consts = trace(lambda u, p, t, case=case: case.fn(u, *p), case.u, case.p, 0.0)
        leaves = [np.asarray(x) for x in (*consts, *jtu.tree_leaves(case.p))]
        inputs = Inputs.as_they_are(leaves, ["own"] * len(leaves))
        try:
            fn = lower(program.jaxpr, inputs, 1000)
            text = cpp_source(fn, f"f{number}", "u", apart=True)
        except UntranslatableError as e:
            refused[name] = str(e)
            continue
        out = program.out_avals[0]
        call = f'extern "C" void case{number}(const Lane* lane, const double* u, double* out) '
        texts += [text, call + f"{{ f{number}(*lane, u, 0.3, out); }}\n"]
        cases[name] = (number, leaves, out.size, names)
    return Built(load("\n".join(texts)), cases, refused)


@pytest.mark.parametrize("name", ALL)
def test_agrees_with_jax(built, name):
    case = ALL[name]
    if name in built.refused:
        primitive = name.split("-")[0]
        assert primitive in MISSING, built.refused[name]
        assert f"the primitive {primitive}" in built.refused[name]
        return
    number, leaves, size, names = built.cases[name]
    groups = {
        n: np.concatenate([x.reshape(-1) for x in leaves if x.dtype.name == n] or [np.zeros(0, n)])
        for n in names
    }
    lane = (ctypes.c_void_p * len(names))(*(groups[n].ctypes.data for n in names))
    u, result = np.ascontiguousarray(case.u), np.zeros(max(1, size))
    function = getattr(built.library, f"case{number}")
    function(lane, ctypes.c_void_p(u.ctypes.data), ctypes.c_void_p(result.ctypes.data))
    expected = np.asarray(jax.jit(case.fn)(case.u, *case.p)).reshape(-1)
    np.testing.assert_allclose(result[:size], expected, rtol=case.close, atol=case.close)


def test_numbers():
    values = [1.0, -0.5, np.inf, -np.inf, 1e-300, np.pi]
    text = [literal(np.float64(x)) for x in values]
    assert text[:2] == ["1.0", "(-0.5)"]
    assert text[2:4] == ["infinity(float64(0))", "(-infinity(float64(0)))"]
    assert literal(np.float32(0.1)) == "0.1f"
    assert literal(np.int64(-(2**63))) == "(-9223372036854775807ll - 1)"
    assert literal(np.bool_(True)) == "true"
    assert literal(np.uint32(7)) == "uint32(7ull)"
    assert literal(np.float64(np.nan)) == "nan_of(float64(0))"


def test_half_precision_is_refused():
    program, _ = trace(lambda u, p, t: u * p, np.zeros(2, np.float16), np.float16(1), 0.0)
    fn = lower(program.jaxpr, Inputs.as_they_are([np.float16(1)], ["own"]), 10)
    with pytest.raises(UntranslatableError, match="float16 numbers"):
        cpp_source(fn, "f", "u", apart=False)
