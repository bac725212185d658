"""Running a kernel on NVIDIA GPUs, inside of a JAX program.

`launch` is an operation like any other, under `jit`, `scan` and `shard_map`, for a GPU only. It has
no derivative and no batching rule; the caller has to give these. Its two launchers use names that
are no public API, so each of these names is in one function:

- XLA's custom call for PTX, which is older than the oldest JAX that is supported. The driver
    compiles the PTX when the program is loaded.
- The plugin's call for Triton's kernels, which takes any PTX, for when XLA's call is gone. JAX's
    ptxas compiles the PTX when the program is compiled.

Where something of XLA is relied on, a comment names the file and the function that was read, in the
XLA of August 2026 (183fa00). Those of JAX 0.10.2 to 0.12 do the same.
"""

import ctypes
import functools
import glob
import importlib.util
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from ..llvm.compiler import available, ptx
from .entry import entry, entry_name


# Threads of a block: few enough that several blocks fit on a multiprocessor with 255 registers for
# each thread. (XLA checks none of this: `LaunchCudaKernel` in stream_executor/cuda/cuda_stream.cc.)
BLOCK = 128
_TARGET = "__gpu$xla.gpu.ptx"
_WARP = 32


class KernelError(RuntimeError):
    """A kernel can't be run here; the message says which pieces are missing."""


class PtxKernel(NamedTuple):
    """A function of a GPU's threads, in the form that `entry` wants: a module of LLVM IR, the name
    of the function in it, and the numbers of its operands and of its results."""

    text: str
    name: str
    operands: int
    results: int


def launch(
    kernel: PtxKernel,
    threads: int,
    operands: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
) -> list[Array]:
    """The `outputs` that the kernel writes when it is run with at least `threads` threads.

    The kernel's pointers are to the operands, then to the outputs, each row-major. Blocks are
    whole, and there is at least one, so the kernel has to return from the threads past the last.
    Outputs are uninitialised, and share no memory with operands. As a value without side effects,
    the call is made once where it is wanted twice, and isn't made where it isn't wanted.

    **Raises:** `KernelError` when there is nothing to compile or launch the kernel with,
    `CompileError` when it can't be compiled.
    """
    blocks = max(1, -(-threads // BLOCK))
    return launcher()(kernel, blocks, operands, outputs)


def launcher() -> Callable[..., list[Array]]:
    """The function that launches kernels with the plugin that is installed: like `launch`, with the
    number of blocks in place of the number of threads.

    **Raises:** `KernelError` when the installed plugin has neither call.
    """
    if _knows_target():
        return custom_call
    if _triton() is not None:
        return triton_call
    raise KernelError(_NO_CALL)


def check() -> None:
    """Check that kernels can run on this machine.

    **Raises:** `KernelError`, which names every piece that is missing.
    """
    if pieces := missing():
        raise KernelError("Kernels can't run on a GPU here. " + " ".join(pieces))


def missing() -> list[str]:
    """A sentence or two for each piece that is not there: compiler, plugin, driver, GPU."""
    pieces = []
    if (reason := available()) is not None:
        pieces.append(reason)
    if not cuda_devices():
        lacks = [] if _plugin() else ["JAX has no CUDA plugin: `pip install 'jax[cuda13]'`."]
        lacks += [] if _has_driver() else ["There is no NVIDIA driver (libcuda.so.1)."]
        pieces += lacks or ['JAX finds no GPU: `jax.devices("cuda")`, first thing, logs why.']
    if not _knows_target() and _triton() is None:
        pieces.append(_NO_CALL)
    return pieces


def cuda_devices() -> list[jax.Device]:
    """The CUDA devices of all processes; an empty list where there are none."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def custom_call(
    kernel: PtxKernel,
    blocks: int,
    operands: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
) -> list[Array]:
    """Through XLA's custom call for PTX."""
    # - Operands and results are row-major: `ffi_lowering` in jax/_src/ffi.py, and
    #   `AddCustomCallConstraints` in xla/service/layout_assignment.cc, where XLA copies others.
    # - No result shares memory with an operand: `CanShareOperandBufferWithUser` in
    #   xla/hlo/analysis/hlo_dataflow_analysis.cc, `MayAlias` in xla/service/gpu/alias_info.cc.
    # - The call is never done over to save memory: `IsRematerializable` in
    #   xla/hlo/transforms/simplifiers/hlo_rematerialization.cc.
    # - Outside of `shard_map`, each device of several makes the whole call on gathered operands:
    #   `HandleCustomCall` and `DefaultAction` of the partitioner in xla/service/spmd.
    # - Operands are no slices: `IsFfiCustomCall` in xla/service/gpu/gpu_compiler.cc.
    call = jax.ffi.ffi_call(_TARGET, list(outputs))
    # - Attributes are read by `KernelCall::Parse` in xla/service/gpu/kernel_call.cc: all are needed
    #   but `output_indices`, others are ignored, and integers are cut to 32 bits.
    # - The launch is on the stream of what comes before and after, or a node of a CUDA graph:
    #   xla/backends/gpu/runtime/custom_kernel_thunk.cc.
    # - Results are not cleared: `EmitPtxCustomKernelThunk` in custom_kernel_emitter_cuda.cc there.
    results = call(
        *operands,
        name=entry_name(kernel.name),
        kernel_type="ptx",
        kernel_data=ptx_of(kernel, arch_here()),
        grid_x=np.int32(blocks),
        block_x=np.int32(BLOCK),
        **dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), np.int32(1)),
        shared_mem_bytes=np.int32(0),
        # One place for each result, in order, among all pointers (`KernelArguments::Create` in
        # xla/codegen/emitters/kernel_arguments.cc). Without them the order is the same, but some
        # versions pass a buffer that two operands share only once.
        output_indices=tuple(np.int32(len(operands) + i) for i in range(len(outputs))),
    )
    return list(results)


def triton_call(
    kernel: PtxKernel,
    blocks: int,
    operands: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
) -> list[Array]:
    """Through the plugin's call for Triton's kernels; its blocks consist of whole warps."""
    triton = _triton()
    if triton is None:
        raise KernelError("The installed plugin has no call for Triton's kernels.")
    # The exact architecture to assemble for, of which LLVM may know only a predecessor.
    oldest = min(map(capability, cuda_devices()), default=_BASELINE)
    code = ptx_of(kernel, arch_here())
    compiled = triton.TritonKernel(entry_name(kernel.name), BLOCK // _WARP, 1, 0, code, "", oldest)
    # 16: all buffers of XLA are aligned to at least that many bytes, and XLA checks it of arrays
    # that it is given (`CheckAlignment` in xla/service/gpu/gpu_executable_buffer_allocator.cc; 256
    # for what it allocates itself, xla/service/gpu/gpu_constants.h).
    pointers = [triton.create_array_parameter(0, 16)] * (len(operands) + len(outputs))
    launched = triton.TritonKernelCall(compiled, blocks, 1, 1, pointers)
    # (Two pointers more are passed, to scratch and for profiles, which our kernels don't declare:
    # `KernelCall::Launch` in jaxlib/gpu/triton_kernels.cc. A launch reads what is declared.)
    call = jax.ffi.ffi_call("triton_kernel_call_ffi", list(outputs))
    return list(call(*operands, opaque=zlib.compress(launched.to_proto(kernel.name, b""))))


#
# Compilation
#


# The architecture where no device is known: the oldest one that JAX's drivers run.
_BASELINE = 75
# The compute capabilities that every supported LLVM generates code for: 90 is 9.0, and 120 is 12.0.
# PTX runs on its own capability and on all later ones.
_KNOWN = (50, 52, 60, 61, 70, 75, 80, 86, 89, 90, 100, 120)


@functools.lru_cache(maxsize=256)
def ptx_of(kernel: PtxKernel, arch: str) -> str:
    """The PTX of the kernel for this architecture ("sm_90") and later ones, in the oldest version
    possible for old drivers. (XLA hands it to the driver when a program first runs: `LoadPtx` in
    xla/stream_executor/cuda/cuda_executor.cc. The driver has a cache on disk.)

    **Raises:** `KernelError` without LLVM; `CompileError`.
    """
    if available() is not None:
        raise KernelError("Kernels can't be compiled here. " + " ".join(missing()))
    return ptx(f"{kernel.text}\n{entry(kernel.name, kernel.operands, kernel.results)}", arch)


def arch_here() -> str:
    """The architecture of this computer's GPUs; without GPUs, one that all GPUs run."""
    return arch_of(*cuda_devices())


def arch_of(*devices: Any) -> str:
    """The newest known architecture whose PTX runs on all of the CUDA `devices`.

    **Raises:** `KernelError` for a device that is too old.
    """
    oldest = min(map(capability, devices), default=_BASELINE)
    known = [n for n in _KNOWN if n <= oldest]
    if not known:
        raise KernelError(
            f"Kernels are compiled for compute capability {_KNOWN[0] / 10} and later, and the GPU "
            f"has {oldest / 10}."
        )
    return f"sm_{known[-1]}"


def capability(device: Any) -> int:
    """The compute capability as one number: 90 is 9.0, and 121 is 12.1."""
    major, minor = device.compute_capability.split(".")
    return 10 * int(major) + int(minor)


#
# What is installed
#


_NO_CALL = (
    f"The installed CUDA plugin of JAX has neither XLA's {_TARGET} nor a call for Triton's kernels."
)


@functools.cache
def _knows_target() -> bool:
    """Whether the plugin's XLA has the custom call. Without a plugin, True: the XLA of the computer
    that will run it is expected to have it. The compiler recognises the call by its name
    (`IsCustomCallToPtxKernel` in xla/service/gpu/ir_emission_utils.cc) and registers it nowhere."""
    path = _plugin()
    if path is None:
        return True
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return library.find(_TARGET.encode() + b"\0") >= 0


@functools.cache
def _plugin() -> str | None:
    """XLA for CUDA as a shared library, from the package jax-cuda13-pjrt or jax-cuda12-pjrt."""
    spec = importlib.util.find_spec("jax_plugins")
    for folder in (spec and spec.submodule_search_locations) or ():
        if found := glob.glob(os.path.join(folder, "xla_cuda*", "xla_cuda_plugin.so")):
            return max(found)
    return None


def _triton():
    """The module that makes Triton's kernels, if it has everything that is used here."""
    try:
        from jaxlib import gpu_triton
    except ImportError:
        return None
    needed = ("TritonKernel", "TritonKernelCall", "create_array_parameter")
    return gpu_triton if all(hasattr(gpu_triton, name) for name in needed) else None


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
