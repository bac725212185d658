"""Compiles IR, and wraps it as functions of NumPy arrays."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import llvmlite.binding as llvm
import numpy as np

from ensembleode.engines.compiled.builder import BOOL, Buffer, I64, Value
from ensembleode.engines.compiled.module import Module


llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def host_features() -> str:
    return llvm.get_host_cpu_features().flatten()


class Compiled:
    """The function `run(pointers..., n)` of a module of IR; keeps its code alive."""

    def __init__(self, text: str, pointers: int, features: str | None = None):
        parsed = llvm.parse_assembly(text)
        parsed.verify()
        target = llvm.Target.from_default_triple()
        self._machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(),
            features=host_features() if features is None else features,
            opt=2,
            jit=True,
        )
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        llvm.create_pass_builder(self._machine, options).getModulePassManager().run(
            parsed, llvm.create_pass_builder(self._machine, options)
        )
        self._parsed = parsed
        self._engine = llvm.create_mcjit_compiler(parsed, self._machine)
        self._engine.finalize_object()
        address = self._engine.get_function_address("run")
        kinds = [ctypes.c_void_p] * pointers + [ctypes.c_int64]
        self._run = ctypes.CFUNCTYPE(None, *kinds)(address)

    @property
    def assembly(self) -> str:
        return self._machine.emit_assembly(self._parsed)

    def run(self, arrays: list[np.ndarray], n: int) -> None:
        self._run(*(x.ctypes.data for x in arrays), n)


def compiled(text: str, pointers: int, features: str | None = None) -> Compiled:
    return Compiled(text, pointers, features)


def loop_text(function, dtype, arity: int, width: int, has_fma: bool = True, returns=None) -> str:
    """A module that applies `function(b, *args)` to arrays, a vector after the other; the last
    pointer is the result's.
    """
    dtype = np.dtype(dtype)
    module = Module(width, has_fma=has_fma)
    names = [f"ptr noalias %x{i}" for i in range(arity)] + ["ptr noalias %y", "i64 %n"]
    with module.function("run", names, linkage="external") as b:
        inputs = [Buffer(b, f"%x{i}", dtype) for i in range(arity)]
        output = Buffer(b, "%y", np.dtype(returns or dtype))
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

    def __init__(self, function, dtype, arity=1, width=8, has_fma=True, features=None):
        self.dtype, self.width = np.dtype(dtype), width
        self.code = compiled(loop_text(function, dtype, arity, width, has_fma), arity + 1, features)

    def __call__(self, *args):
        n = len(args[0])
        padded = -(-n // self.width) * self.width
        arrays = [np.zeros(padded, self.dtype) for _ in args]
        for array, x in zip(arrays, args, strict=True):
            array[:n] = x
        found = np.zeros(padded, self.dtype)
        self.code.run([*arrays, found], padded)
        return found[:n]


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
    control = Compiled(_CONTROL, 2)
    before, after = np.zeros(1, np.uint32), np.full(1, 0x1F80 | _FLUSH, np.uint32)
    control.run([before, after], 0)
    try:
        yield
    finally:
        control.run([after, before], 0)
