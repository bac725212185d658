"""Functions of the builder as functions of NumPy arrays."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ensembleode.engines.compiled.llvm import compiler
from ensembleode.engines.compiled.llvm.builder import BOOL, ElementPointer, I64, Value
from ensembleode.engines.compiled.llvm.machine import host
from ensembleode.engines.compiled.llvm.module import Module


def loop_text(function, dtype, arity: int, width: int, has_fma: bool) -> str:
    """A module that applies `function(b, *args)` to arrays, a vector after the other; the last
    pointer is the result's.
    """
    dtype = np.dtype(dtype)
    module = Module(width, has_fma=has_fma)
    names = [f"ptr noalias %x{i}" for i in range(arity)] + ["ptr noalias %y", "i64 %n"]
    with module.function("run", names, linkage="external") as b:
        inputs = [ElementPointer(b, f"%x{i}", dtype) for i in range(arity)]
        output = ElementPointer(b, "%y", dtype)
        n = b.parameter("%n", I64)
        at = b.variable(I64, 0, of_lanes=False)

        def one():
            args: list[Value] = [
                x.load_lanes(at.get()) if b.lanes else x.load(at.get()) for x in inputs
            ]
            found = function(b, *args)
            assert found.dtype != BOOL
            if b.lanes:
                output.store_lanes(at.get(), found)
            else:
                output.store(at.get(), found)
            at.set(at.get() + width)

        b.while_(lambda: at.get() < n, one)
        b.return_()
    return module.text


class OnArrays:
    """`function(b, *args)` as a function of arrays of any length."""

    def __init__(self, function, dtype, arity=1, width=8, machine=None):
        self.dtype, self.width, self.machine = np.dtype(dtype), width, machine or host()
        self.text = loop_text(function, dtype, arity, width, self.machine.has_fma)
        self.run = run_of(self.text, arity + 1, self.machine)

    @property
    def assembly(self):
        return compiler.assembly(self.text, self.machine)

    def __call__(self, *args):
        n = len(args[0])
        padded = -(-n // self.width) * self.width
        arrays = [np.zeros(padded, self.dtype) for _ in args]
        for array, x in zip(arrays, args, strict=True):
            array[:n] = x
        found = np.zeros(padded, self.dtype)
        self.run(*arrays, found, padded)
        return found[:n]


def run_of(text, pointers, machine=None):
    """The function `run(pointers..., n)` of a module of IR, of arrays."""
    kinds = [ctypes.c_void_p] * pointers + [ctypes.c_int64]
    code = compiler.compiled(text, machine)
    run = ctypes.CFUNCTYPE(None, *kinds)(code.address("run"))
    run.code = code  # (which is kept as long)
    return lambda *args: run(*(x.ctypes.data for x in args[:-1]), args[-1])


_CONTROL = """
declare void @llvm.x86.sse.ldmxcsr(ptr)
declare void @llvm.x86.sse.stmxcsr(ptr)
define void @run(ptr %before, ptr %after, i64 %n) {
  call void @llvm.x86.sse.stmxcsr(ptr %before)
  call void @llvm.x86.sse.ldmxcsr(ptr %after)
  ret void
}
"""
_FLUSH = 0x8040  # FTZ and DAZ


@contextmanager
def flushed() -> Iterator[None]:
    """Subnormal numbers are zeros, in this thread, as within XLA's."""
    control = run_of(_CONTROL, 2)
    before, after = np.zeros(1, np.uint32), np.full(1, 0x1F80 | _FLUSH, np.uint32)
    control(before, after, 0)
    try:
        yield
    finally:
        control(after, before, 0)
