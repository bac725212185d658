"""Kernels in JAX programs, as far as that is possible without a GPU: lowered, and compiled for an
H100 and an H200.

Compiling needs the packages of JAX's CUDA plugin, jax-cuda13-plugin and jax-cuda13-pjrt, without
their dependencies: the plugin is then available for `JAX_PLATFORMS=cpu` only.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ensembleode.engines.compiled.llvm.builder import ElementPointer, F32, I64
from ensembleode.engines.compiled.llvm.module import Module
from ensembleode.engines.compiled.xla import launch


BATCH = 1000


def _saxpy() -> str:
    """`a x` and `a + x`, of as many numbers: what a thread does."""
    m = Module(1, is_gpu=True)
    parameters = ["i64 %thread", "i64 %threads", *(f"ptr {x}" for x in ("%a", "%x", "%y", "%z"))]
    with m.function("saxpy", parameters, attributes="alwaysinline") as b:
        a, x, y, z = (ElementPointer(b, name, F32) for name in ("%a", "%x", "%y", "%z"))
        i = b.parameter("%thread", I64)

        def one():
            y.store(i, a.load(0) * x.load(i))
            z.store(i, a.load(0) + x.load(i))

        b.if_(i < BATCH, one)
        b.return_()
    return m.text


KERNEL = launch.PtxKernel(_saxpy(), "saxpy", 2, 2)


class Device(NamedTuple):
    compute_capability: str


def saxpy(a, x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch.launch(KERNEL, x.size, [a, x], [like, like])


@jax.custom_vjp
def scaled(a, x):
    return saxpy(a, x)[0]


def _backward(kept, cotangent):
    a, x = kept
    return jnp.sum(saxpy(x[0], cotangent)[0]), saxpy(a, cotangent)[0]


scaled.defvjp(lambda a, x: (scaled(a, x), (a, x)), _backward)


def lowered(fn, *args) -> str:
    # (A function anew: JAX would remember one with the launcher of another test.)
    return jax.jit(lambda *a: fn(*a)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def abstract(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


def test_no_threads_are_a_block_all_the_same(monkeypatch):
    monkeypatch.setattr(launch, "launcher", lambda: launch.custom_call)
    assert "grid_x = 1 : i32" in lowered(saxpy, abstract(), abstract(0))


def test_programs_are_cached():
    def fn(a, x):
        return saxpy(a, saxpy(a, x)[0])

    lowered(fn, abstract(), abstract(BATCH))
    before = launch.ptx_of.cache_info().misses
    lowered(fn, abstract(), abstract(BATCH + 1))
    assert launch.ptx_of.cache_info().misses == before


def test_the_launcher_can_be_another(monkeypatch):
    def double(kernel, blocks, operands, outputs):
        assert (kernel, blocks, len(outputs)) == (KERNEL, 8, 2)
        a, x = operands
        return [a * x, a + x]

    monkeypatch.setattr(launch, "launcher", lambda: double)
    x = jnp.arange(BATCH, dtype=np.float32)
    got = jax.jit(lambda *a: saxpy(*a))(np.float32(2), x)
    np.testing.assert_array_equal(got[0], 2 * x)
    np.testing.assert_array_equal(got[1], 2 + x)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(launch, "available", lambda: "No compiler.")
    launch.ptx_of.cache_clear()
    monkeypatch.setattr(launch, "_plugin", lambda: None)
    monkeypatch.setattr(launch, "_has_driver", lambda: False)
    monkeypatch.setattr(launch, "cuda_devices", list)
    with pytest.raises(launch.KernelError, match=r"compiler.*jax\[cuda13\].*libcuda\.so\.1"):
        launch.check()
    monkeypatch.setattr(launch, "launcher", lambda: launch.custom_call)
    with pytest.raises(launch.KernelError, match=r"compiler.*jax\[cuda13\].*libcuda\.so\.1"):
        lowered(saxpy, abstract(), abstract(BATCH))


def test_no_gpu_in_spite_of_plugin_and_driver(monkeypatch):
    monkeypatch.setattr(launch, "_plugin", lambda: __file__)
    monkeypatch.setattr(launch, "_has_driver", lambda: True)
    monkeypatch.setattr(launch, "_knows_target", lambda: True)
    monkeypatch.setattr(launch, "cuda_devices", list)
    (piece,) = launch.missing()
    assert "JAX finds no GPU" in piece


def test_a_plugin_without_the_custom_call(monkeypatch):
    monkeypatch.setattr(launch, "_knows_target", lambda: False)
    monkeypatch.setattr(launch, "_triton", lambda: object())
    assert launch.launcher() is launch.triton_call
    monkeypatch.setattr(launch, "_triton", lambda: None)
    with pytest.raises(launch.KernelError, match="neither XLA's"):
        launch.launcher()


def test_architecture_of_devices():
    assert launch.arch_of(Device("9.0")) == "sm_90"
    assert launch.arch_of(Device("12.0")) == "sm_120"
    # PTX for an earlier one runs on a later one, never the other way.
    assert launch.arch_of(Device("8.7")) == "sm_86"
    assert launch.arch_of(Device("13.0")) == "sm_120"
    assert launch.arch_of(Device("10.0"), Device("9.0")) == "sm_90"
    with pytest.raises(launch.KernelError, match=r"5\.0 and later, and the GPU has 3\.5"):
        launch.arch_of(Device("3.5"))


def test_every_known_architecture_compiles():
    for n in launch._KNOWN:
        assert f".target sm_{n}" in launch.ptx_of(KERNEL, f"sm_{n}")
    assert launch._BASELINE in launch._KNOWN


@pytest.fixture(params=["custom_call", "triton_call"])
def target(request, monkeypatch, mesh):
    """Each launcher; the name in the compiled program."""
    if request.param == "triton_call" and launch._triton() is None:
        pytest.skip("the plugin has no call for Triton's kernels")
    monkeypatch.setattr(launch, "launcher", lambda: getattr(launch, request.param))
    return {"custom_call": "__gpu$xla.gpu.ptx", "triton_call": "triton_kernel_call_ffi"}[
        request.param
    ]


def compiled(mesh, fn, *shapes) -> str:
    """The optimised program for the mesh's GPU."""
    args = [abstract(*s, sharding=NamedSharding(mesh, PartitionSpec())) for s in shapes]
    return optimised(fn, *args)


def optimised(fn, *args) -> str:
    program = jax.jit(lambda *a: fn(*a)).trace(*args).lower(lowering_platforms=("cuda",))
    return program.compile().as_text()


def calls(text: str, target: str) -> int:
    return text.count(f'custom_call_target="{target}"')


def test_the_plugin_knows_a_launcher(mesh):
    assert launch._plugin() is not None
    assert launch.launcher() is launch.custom_call


def in_shard_map(mesh):
    whole, split = PartitionSpec(), PartitionSpec("x")
    return jax.shard_map(
        lambda a, x: tuple(saxpy(a, x)),
        mesh=mesh,
        in_specs=(whole, split),
        out_specs=(split, split),
        check_vma=False,
    )


def scanned(a, x):
    return jax.lax.scan(lambda x, _: (saxpy(a, x)[0], x[0]), x, None, length=5)


def scanned_slices(a, xs):
    """(Slices of a multiple of 256 bytes are passed to other custom calls where they lie.)"""
    return jax.lax.scan(lambda a, x: (a, saxpy(a, x)[1]), a, xs)[1]


# What is compiled, the shapes of its operands, and how many calls it has: one is made once where it
# is wanted twice, and not at all where it isn't.
COMPILED = {
    "itself": (saxpy, [(), (BATCH,)], 1),
    "one operand twice": (lambda x: saxpy(x, x), [(BATCH,)], 1),
    "scan": (scanned, [(), (BATCH,)], 1),
    "slices in scan": (scanned_slices, [(), (5, 1024)], 1),
    "custom_vjp": (
        jax.value_and_grad(lambda a, x: jnp.sum(scaled(a, x) ** 2), argnums=(0, 1)),
        [(), (BATCH,)],
        3,
    ),
    "wanted twice": (lambda *a: (saxpy(*a), saxpy(*a)), [(), (BATCH,)], 1),
    "not wanted": (lambda a, x: (saxpy(a, x), a + 1)[1], [(), (BATCH,)], 0),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [*COMPILED, "shard_map"])
def test_compiles(mesh, target, name):
    fn, shapes, count = COMPILED.get(name) or (in_shard_map(mesh), [(), (BATCH,)], 1)
    text = compiled(mesh, fn, *shapes)
    assert calls(text, target) == count
    assert ("while(" in text) == ("scan" in name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mapped", [True, False])
def test_several_gpus(h200s, mapped):
    """In a `shard_map`, each has its part. A call that XLA partitions is run by each as a whole."""
    a = abstract(sharding=NamedSharding(h200s, PartitionSpec()))
    x = abstract(BATCH, sharding=NamedSharding(h200s, PartitionSpec("x")))
    text = optimised(in_shard_map(h200s) if mapped else saxpy, a, x)
    (call,) = re.findall(r"= (.*) custom-call\(", text)
    assert call.count(f"f32[{BATCH // 2 if mapped else BATCH}]") == 2
    assert ("all-gather" in text) == (not mapped)


@pytest.mark.quick_cases(1)
def test_a_transposed_operand_costs_no_copy_of_what_was_computed(mesh, target):
    # The kernel has the trajectories last; what is computed is written in that order.
    def fn(a, x):
        return saxpy(a, (x * x).T)[0].T.sum(axis=1)

    text = compiled(mesh, fn, (), (BATCH, 3))
    assert calls(text, target) == 1
    assert len(re.findall(r"= \S+ (?:copy|transpose)\(", text.split("ENTRY")[1])) == 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("indices", [(2,), (3, 2), (2, 4)])
def test_xla_reads_where_results_are(mesh, monkeypatch, indices):
    """It refuses places other than two different ones, in order, among four pointers."""
    call = jax.ffi.ffi_call

    def elsewhere(target, outputs):
        to = call(target, outputs)
        return lambda *a, **k: to(*a, **k | {"output_indices": tuple(map(np.int32, indices))})

    monkeypatch.setattr(launch, "launcher", lambda: launch.custom_call)
    monkeypatch.setattr(jax.ffi, "ffi_call", elsewhere)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)output ind|results|inputs"):
        compiled(mesh, saxpy, (), (BATCH,))
