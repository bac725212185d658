"""The machine that code is generated for: the CPU of this computer, another CPU, or a GPU.

`current()` is the machine for which kernels are made and on which they run. It is this computer's
CPU, unless `using` replaces it by a lesser one, so that code for AVX2 or SSE2 can be tried on a CPU
with AVX-512.

What differs on GPUs is listed in `gpu_engine.py`.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import re
import sys
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine that code can be generated for; `name` is for people.

    - `triple`, `cpu`, `features`: LLVM's description of it.
    - `vector_bytes`, `registers`: the bytes of a vector register, and how many there are; on a GPU
        0, and the number of 32-bit registers of a thread.
    - `has_fma`: whether a product and a sum are one instruction, rounded once.
    - `has_range`: whether the larger of two magnitudes is one instruction (that of AVX-512).
    """

    name: str
    triple: str
    cpu: str
    features: str
    vector_bytes: int
    registers: int
    has_fma: bool
    has_range: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.architecture == "nvptx64"

    @property
    def architecture(self) -> str:
        """The architecture as LLVM spells it: `x86_64`, `aarch64`, `nvptx64`."""
        found = self.triple.split("-")[0]
        return {"arm64": "aarch64", "amd64": "x86_64"}.get(found, found)

    def lanes(self, dtype: np.dtype) -> int:
        """How many numbers a vector register holds."""
        return max(1, self.vector_bytes // np.dtype(dtype).itemsize)


@functools.cache
def host() -> Machine:
    """This computer.

    **Raises:** `ImportError` without llvmlite.
    """
    import llvmlite.binding as llvm

    triple, cpu = llvm.get_process_triple(), llvm.get_host_cpu_name() or "generic"
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # where LLVM can't find out, a CPU has what its name says
        flat, has = "", {}
    else:
        flat, has = features.flatten(), dict(features)
    # (Vectors whose length is fixed when code is compiled have 16 bytes on all ARM CPUs.)
    machine = Machine(cpu, triple, cpu, flat, 16, 32, True)
    is_x86 = machine.architecture == "x86_64"
    return dataclasses.replace(machine, **of_x86(has)) if is_x86 else machine


def of_x86(has: dict[str, bool]) -> dict:
    """The fields of an x86 CPU with these features: its vectors, and what instructions it has."""
    wide = has.get("avx512f", False)
    return {
        "vector_bytes": 64 if wide else 32 if has.get("avx", False) else 16,
        "registers": 32 if wide else 16,
        "has_fma": wide or has.get("fma", False),
        "has_range": wide and has.get("avx512dq", False),
    }


_current: contextvars.ContextVar[Machine | None] = contextvars.ContextVar("machine", default=None)


def current() -> Machine:
    """The machine for which kernels are made in this thread at this moment."""
    return chosen() or host()


def chosen() -> Machine | None:
    """The machine that `using` chose; None outside of `using`."""
    return _current.get()


@contextlib.contextmanager
def using(machine: Machine) -> Iterator[None]:
    """Within this block, and in this thread, kernels are made for `machine`. JAX keeps traced
    functions, so make the functions that use this machine within the block, and use them only
    there."""
    token = _current.set(machine)
    try:
        yield
    finally:
        _current.reset(token)


@functools.cache
def stack_bytes() -> int:
    """The bytes of the stack of a new thread, on which XLA calls kernels."""
    if sys.platform == "win32":
        return 2**20
    library, size = ctypes.CDLL(None), ctypes.c_size_t()
    attributes = ctypes.create_string_buffer(256)  # (of 36 to 64 bytes)
    library.pthread_attr_init(attributes)
    library.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    library.pthread_attr_destroy(attributes)
    return size.value


# Pairs of a compute capability and the version of PTX from there on: 7.8, which drivers take since
# CUDA 11.8, or the version that first supported a later GPU.
_PTX = ((120, 87), (110, 90), (103, 88), (100, 86), (0, 78))


def gpu(arch: str) -> Machine:
    """An NVIDIA GPU, by its architecture: `"sm_90"` (or `"compute_90"`) is an H100 or H200.

    **Raises:** `ValueError` for an unknown architecture.
    """
    match = re.fullmatch(r"(?:sm|compute)_(\d+)([af]?)", arch)
    if match is None:
        raise ValueError(f'a GPU\'s architecture is "sm_80", "sm_90" or so, got {arch!r}.')
    version = next(v for start, v in _PTX if int(match[1]) >= start)
    name = f"sm_{match[1]}{match[2]}"
    return Machine(name, "nvptx64-nvidia-cuda", name, f"+ptx{version}", 0, 255, True)
