"""The interpreter of PTX: the results of instructions, divergence of threads, and what it
refuses."""

import math
from fractions import Fraction

import jax
import numpy as np
import pytest

from .ptx.arithmetic import fma, operation
from .ptx.errors import PtxError
from .ptx.memory import Buffer, Memory
from .ptx.running import run
from .ptx.xla import parse_call


F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
NAN, INF = math.nan, math.inf


def launched(body, *operands, result=(8, np.float64), functions="", blocks=1, block=4):
    """The result of a kernel; pointers to the operands and to it are in `%rd0` and so on."""
    memory = Memory()
    inputs = [Buffer(f"operand {i}", x.nbytes, x.tobytes()) for i, x in enumerate(operands)]
    size, dtype = result
    out = Buffer("result", size * np.dtype(dtype).itemsize)
    addresses = [memory.add(x, 16) for x in [*inputs, out]]
    names = [f"k_param_{i}" for i in range(len(addresses))]
    parameters = ",\n".join(f".param .u64 .ptr .align 1 {x}" for x in names)
    loads = "\n".join(
        f"ld.param.b64 %rd{i}, [{x}];\ncvta.to.global.u64 %rd{i}, %rd{i};"
        for i, x in enumerate(names)
    )
    text = f"""
.version 7.8
.target sm_90
.address_size 64
{functions}
.visible .entry k(
{parameters}
)
{{
.local .align 8 .b8 depot[16];
.reg .b64 %SP;
.reg .b64 %SPL;
.reg .pred %p<9>;
.reg .b16 %rs<9>;
.reg .b32 %r<99>;
.reg .b64 %rd<99>;
mov.b64 %SPL, depot;
cvta.local.u64 %SP, %SPL;
mov.u32 %r9, %tid.x;
mad.lo.s32 %r9, %r8, 0, %r9;
cvt.u64.u32 %rd9, %r9;
shl.b64 %rd9, %rd9, 3;
{loads}
{body}
ret;
}}
"""
    run(text, "k", blocks, block, addresses, memory)
    return out.data[: out.size].view(dtype)


def computed(instruction, *operands):
    name, *modifiers = instruction.split(".")
    op = operation(name, tuple(modifiers))
    given = [np.array(x, d) for x, d in zip(operands, op.operands, strict=True)]
    with np.errstate(all="ignore"):
        found = op.function(*given)
    assert found.dtype == op.result
    return found.tolist()


LARGE, HALF = 2**63 - 1, 2**31
CASES = {
    "max.f64": ([[NAN, 1.0, NAN, -0.0], [2.0, NAN, NAN, 0.0]], [2.0, 1.0, NAN, 0.0]),
    "min.f64": ([[NAN, 1.0, NAN, 0.0], [2.0, NAN, NAN, -0.0]], [2.0, 1.0, NAN, -0.0]),
    "copysign.f64": ([[-1.0, 1.0], [2.0, -3.0]], [-2.0, 3.0]),
    "neg.f64": ([[0.0, -1.0]], [-0.0, 1.0]),
    "rcp.rn.f64": ([[4.0, -0.0]], [0.25, -INF]),
    "setp.lt.f64": ([[1.0, NAN], [2.0, 2.0]], [True, False]),
    "setp.ltu.f64": ([[2.0, NAN], [2.0, 2.0]], [False, True]),
    "setp.ne.f64": ([[1.0, NAN], [2.0, 2.0]], [True, False]),
    "setp.neu.f64": ([[1.0, NAN], [1.0, 2.0]], [False, True]),
    "setp.nan.f64": ([[1.0, NAN], [1.0, 2.0]], [False, True]),
    "setp.num.f64": ([[1.0, NAN], [1.0, 2.0]], [True, False]),
    "setp.gt.s32": ([[-1, 2], [1, 1]], [False, True]),
    "setp.gt.u32": ([[HALF + 1, 0], [1, 1]], [True, False]),
    "selp.b32": ([[1, 2], [3, 4], [True, False]], [1, 4]),
    "shl.b32": ([[1, 1, 1], [31, 32, 99]], [HALF, 0, 0]),
    "shr.s64": ([[-8, -8, 8], [1, 99, 99]], [-4, -1, 0]),
    "shr.u32": ([[HALF, 5], [31, 32]], [1, 0]),
    "bfe.u32": ([[0x3F800000, 0xFFFFFFFF], [23, 0], [8, 32]], [127, 0xFFFFFFFF]),
    "mul.wide.s32": ([[-3, 2**30], [2, 4]], [-6, 2**32]),
    "mul.wide.u32": ([[2**32 - 1], [2]], [2**33 - 2]),
    "mul.lo.s64": ([[LARGE], [2]], [-2]),
    "mul.hi.u64": ([[2**64 - 1, 2**32], [2**64 - 1, 2**32]], [2**64 - 2, 1]),
    "mad.lo.s64": ([[3], [4], [5]], [17]),
    "div.u64": ([[7, 2**64 - 1], [2, 2]], [3, LARGE]),
    "not.pred": ([[True, False]], [False, True]),
    "not.b32": ([[0]], [2**32 - 1]),
    "xor.pred": ([[True, True], [True, False]], [False, True]),
    "cvt.rni.f32.f32": ([[0.5, 1.5, -2.5]], [0.0, 2.0, -2.0]),
    "cvt.rmi.f64.f64": ([[0.5, -0.5]], [0.0, -1.0]),
    "cvt.rzi.s32.f32": ([[-1.5, 3e9, -INF, NAN]], [-1, HALF - 1, -HALF, 0]),
    "cvt.rzi.s64.f64": ([[1e300, NAN]], [LARGE, -LARGE - 1]),
    "cvt.rzi.u32.f32": ([[-1.0, 5e9, 2.0**31]], [0, 2**32 - 1, HALF]),
    "cvt.rn.f32.f64": ([[1 + 2.0**-24, 1e300]], [1.0, INF]),
    "cvt.rn.f64.u64": ([[2**64 - 1]], [2.0**64]),
    "cvt.rn.f32.s32": ([[2**24 + 1]], [2.0**24]),
    "cvt.f64.f32": ([[1.5]], [1.5]),
    "cvt.u32.u64": ([[2**32 + 7]], [7]),
    "cvt.s64.s32": ([[-7]], [-7]),
}


@pytest.mark.parametrize("instruction", CASES)
def test_an_instruction(instruction):
    operands, expected = CASES[instruction]
    found = computed(instruction, *operands)
    np.testing.assert_array_equal(found, expected)
    if ".f" in instruction and "setp" not in instruction:
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize(
    "instruction",
    [
        "add.f32",  # (which may be fused)
        "mul.rz.f64",
        "add.rn.ftz.f32",
        "div.approx.f32",
        "cvt.f32.f64",
        "cvt.f64.s32",
        "cvt.s32.f32",
        "div.s32",
        "mul.s32",
        "vote.all.pred",
    ],
)
def test_an_instruction_that_is_refused(instruction):
    with pytest.raises((PtxError, KeyError, ValueError)):
        computed(instruction, [1], [1])


@pytest.mark.parametrize("dtype", [F32, F64])
def test_fma_is_rounded_once(dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=500).astype(dtype) for _ in range(2))
    # What cancels leaves the rounding of the product, down to the subnormal numbers.
    c = np.where(rng.random(500) < 0.5, -a * b, rng.normal(size=500)).astype(dtype)
    scale = dtype.type(2.0) ** (np.finfo(dtype).minexp // 2)
    a[::5], b[::5], c[::5] = a[::5] * scale, b[::5] * scale, c[::5] * scale * scale
    for x, y, z, found in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(found)) - exact)
        for neighbour in (
            np.nextafter(found, -dtype.type(INF)),
            np.nextafter(found, dtype.type(INF)),
        ):
            assert error <= abs(Fraction(float(neighbour)) - exact)


def test_threads_part_and_meet():
    """Each thread sums as many numbers as its own number says; the odd ones then add 100."""
    body = """
mov.b64 %rd20, 0d0000000000000000;
mov.b32 %r10, 0;
$top:
setp.ge.u32 %p1, %r10, %r9;
@%p1 bra $done;
add.s32 %r10, %r10, 1;
cvt.rn.f64.u32 %rd21, %r10;
add.rn.f64 %rd20, %rd20, %rd21;
bra.uni $top;
$done:
and.b32 %r11, %r9, 1;
setp.eq.b32 %p2, %r11, 0;
@%p2 bra $even;
add.rn.f64 %rd20, %rd20, 0d4059000000000000;
$even:
@!%p2 add.rn.f64 %rd20, %rd20, 0d3FE0000000000000;
add.s64 %rd1, %rd0, %rd9;
st.global.b64 [%rd1], %rd20;
"""
    found = launched(body, result=(4, np.float64))
    assert found.tolist() == [0, 1 + 100.5, 3, 6 + 100.5]


SQUARE = """
.func (.param .b64 func_retval0) square
(
.param .b64 square_param_0,
.param .b64 square_param_1
)
;
.func (.param .b64 func_retval0) square(
.param .b64 square_param_0,
.param .b64 square_param_1
)
{
.reg .b64 %rd<9>;
ld.param.b64 %rd1, [square_param_0];
ld.param.b64 %rd2, [square_param_1];
mul.rn.f64 %rd3, %rd1, %rd1;
st.b64 [%rd2], %rd3;
neg.f64 %rd4, %rd1;
st.param.b64 [func_retval0], %rd4;
ret;
}
"""


def test_a_call_by_some_threads():
    """It writes to where they point, in their own memory."""
    body = """
cvt.rn.f64.u32 %rd20, %r9;
setp.eq.b32 %p1, %r9, 2;
@%p1 bra $after;
{ // callseq 0, 0
.param .b64 param0;
.param .b64 param1;
.param .b64 retval0;
st.param.b64 [param0], %rd20;
st.param.b64 [param1], %SP;
call.uni (retval0), square, (param0, param1);
ld.param.b64 %rd21, [retval0];
} // callseq 0
ld.local.b64 %rd20, [%SPL];
add.rn.f64 %rd20, %rd20, %rd21;
$after:
add.s64 %rd1, %rd0, %rd9;
st.global.b64 [%rd1], %rd20;
"""
    found = launched(body, result=(4, np.float64), functions=SQUARE)
    assert found.tolist() == [0, 0, 2, 6]


def test_shorter_numbers_and_several_at_once():
    body = """
ld.global.nc.b8 %rs1, [%rd0+1];
ld.global.nc.s32 %rd20, [%rd0+4];
cvt.rn.f64.u16 %rd21, %rs1;
cvt.rn.f64.s64 %rd22, %rd20;
st.local.v2.b64 [%SPL], {%rd21, %rd22};
ld.local.v2.b64 {%rd23, %rd24}, [%SPL];
mov.b64 {%r21, %r22}, %rd24;
mov.b64 %rd24, {%r21, %r22};
setp.ne.b32 %p1, %r9, 0;
@%p1 bra $done;
st.global.v2.b64 [%rd1], {%rd23, %rd24};
$done:
"""
    given = np.array([3, 200, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF], np.uint8)
    assert launched(body, given, result=(2, np.float64)).tolist() == [200, -2]


STORE = "add.s64 %rd5, %rd1, %rd9; \nst.global.b64 [%rd5], %rd9;"
WRONG = {
    "past the end": ("ld.global.b64 %rd20, [%rd0+8];", "operand 0: thread 0 at byte 8: is 8 bytes"),
    "before the start": ("ld.global.b64 %rd20, [%rd0+-8];", "at byte -8"),
    "another buffer": ("ld.global.b64 %rd20, [%rd0+80000];", "operand 0: thread 0 at byte 80000"),
    "nowhere": ("mov.b64 %rd20, 64;\nld.global.b64 %rd20, [%rd20];", "in no buffer"),
    "not aligned": ("ld.global.b64 %rd20, [%rd0+4];", "no multiple of 8"),
    "not written": ("ld.global.b64 %rd20, [%rd1];", "result: .* reads what nobody wrote"),
    "an operand": ("st.global.b64 [%rd0], %rd9;", "operand 0 is written"),
    "all at one place": ("st.global.b64 [%rd1], %rd9;", "writes where another thread writes"),
    "of another thread": (
        f"{STORE.replace('; ', ';')}\nxor.b64 %rd6, %rd9, 8;\nadd.s64 %rd5, %rd1, %rd6;"
        "\nld.global.b64 %rd20, [%rd5];",
        "reads what another thread wrote",
    ),
    "as if constant": (
        f"{STORE.replace('; ', ';')}\nld.global.nc.b64 %rd20, [%rd5];",
        "result is read as if nobody ever wrote",
    ),
    "own memory, not written": ("ld.local.b64 %rd20, [%SPL];", "reads what nobody wrote"),
    "own memory, past the end": ("ld.local.b64 %rd20, [%SPL+64];", "outside of a thread's local"),
    "a space for another": ("st.local.b64 [%SP], %rd9;", "outside of a thread's local"),
    "no space": ("ld.b64 %rd20, [%rd0];", "of a space, where one is wanted"),
    "for ever": ("$top:\nbra.uni $top;", "doesn't end"),
    "an unknown register": ("mov.b64 %rx1, %rd1;", "no register %rx1"),
    "a register that is too short": ("mov.b64 %r1, %rd1;", "%r1, of type .b32, holds no"),
    "an unknown access": ("ld.volatile.global.b64 %rd20, [%rd0];", "no access that is known"),
    "an unknown statement": ("@%p1", "isn't understood"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_kernel_may_do(what, monkeypatch):
    from .ptx import running

    monkeypatch.setattr(running, "_MOST_BLOCKS", 1000)
    body, message = WRONG[what]
    with pytest.raises(PtxError, match=message):
        launched(body, np.ones(1))


def test_what_a_kernel_is_given():
    with pytest.raises(PtxError, match="no kernel 'other'"):
        run(".version 7.8\n.target sm_90\n.address_size 64", "other", 1, 1, [], Memory())
    with pytest.raises(PtxError, match="1 blocks of 2048 threads can't be launched"):
        launched("", block=2048)


@pytest.mark.parametrize("indices", [(2,), (3, 2), (2, 2), (2, 3, 4)])
def test_one_place_for_each_result_in_order(indices):
    numbers = dict.fromkeys(("grid_x", "grid_y", "grid_z", "block_y", "block_z"), np.int32(1))
    numbers |= {"block_x": np.int32(128), "shared_mem_bytes": np.int32(0)}
    given = {"name": "k", "kernel_type": "ptx", "kernel_data": "", **numbers}
    outputs = [jax.ShapeDtypeStruct((3,), F32)] * 2
    call = parse_call(outputs, given | {"output_indices": (np.int32(2), np.int32(3))})
    assert call.order(2) == [0, 1, 2, 3]
    with pytest.raises(PtxError, match="one place for each result"):
        parse_call(outputs, given | {"output_indices": tuple(map(np.int32, indices))})
