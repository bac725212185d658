"""Compiles LLVM IR: to machine code that this process calls, or to assembly for any machine.

A lock makes sure that only one thread uses LLVM at a time.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Literal

from ....ground.deep_stack import with_deep_stack
from . import object_cache
from .machine import current, gpu, host, Machine


# The oldest version of LLVM that reads our IR.
OLDEST = 20

# The version of the passes that are run on IR. Increment it with every change of these, as object
# code is kept on disk.
_PIPELINE = 2
_LEVEL = 2
# The passes for a CPU. The builder leaves nothing to do to the other passes of this level.
_PASSES = ("sroa", "instruction_combine", "simplify_cfg", "new_gvn", "aggressive_dce")

_lock = threading.RLock()
_codes: weakref.WeakValueDictionary[str, Code] = weakref.WeakValueDictionary()
# The engines of code that nobody needs any more.
_gone: collections.deque[Any] = collections.deque()


class CompileError(RuntimeError):
    """LLVM can't compile this module. The message is LLVM's, with the lines that it is about."""


class Code:
    """Functions in memory, by name, as long as this object exists, and until Python has ended.
    `key` is the hash of all that their code depends on; `origin` says where it comes from."""

    def __init__(self, engine: Any, key: str, origin: Literal["compiled", "disk"]):
        self.key, self.origin = key, origin
        self._engine = engine
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        weakref.finalize(self, _free, engine).atexit = False

    def address(self, name: str) -> int:
        """**Raises:** `KeyError` for a function or variable that is not there, or internal."""
        with _lock:
            found = self._engine.get_function_address(name)
        if not found:
            raise KeyError(name)
        return found


def _free(engine: Any) -> None:
    _gone.append(engine)
    _close_gone()


def _close_gone() -> None:
    """Free the code that nobody needs any more, unless another thread uses LLVM, which does so
    then. (This is called by the collector of garbage, on any thread, at any time: also on the one
    that compiles for a thread that holds the lock, which would wait for itself.)"""
    while _gone and _lock.acquire(blocking=False):
        try:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                engine = _gone.popleft()
                engine.close()
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(engine))
        finally:
            _lock.release()


@functools.cache
def available() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    try:
        import llvmlite
        import llvmlite.binding as llvm
    except (ImportError, OSError) as e:
        return f"LLVM is not there ({e}): `pip install llvmlite`."
    version = llvm.llvm_version_info[0]
    if version < OLDEST:
        return (
            f"llvmlite {llvmlite.__version__} has LLVM {version}, and {OLDEST} or later is needed: "
            "`pip install --upgrade llvmlite`."
        )
    try:
        llvm.check_jit_execution()
    except OSError as e:
        return f"this system does not let programs make code and run it: {e}"
    return None


def compiled(text: str, machine: Machine | None = None) -> Code:
    """Compile a module, unless its code is in memory or on disk, for a machine whose code this
    computer can run (by default `machine.current()`). **Raises:** `CompileError`."""
    with _lock:
        llvm, machine = _llvm(), machine or current()
        key = _key(llvm, text, machine)
        if (found := _codes.get(key)) is not None:
            return found
        if machine.triple != host().triple:
            raise CompileError(f"code for {machine.name} ({machine.triple}) can't run here.")
        # Code for other registers must not be found under this key: it would crash.
        saved = object_code = object_cache.load(key)
        if object_code is None:
            # (By the default code model, code reaches addresses anywhere in memory.)
            object_code = _emitted(llvm, text, machine, "emit_object", jit=True)
        engine = _loaded(llvm, object_code)
        if saved is None:
            object_cache.save(key, object_code)
        code = _codes[key] = Code(engine, key, "compiled" if saved is None else "disk")
    _close_gone()
    return code


def define(name: str, address: int) -> None:
    """Make a function known by this name to all code that is compiled from now on."""
    with _lock:
        _llvm().add_symbol(name, address)


def assembly(text: str, target: Machine) -> str:
    """The assembly code of a module for any machine.

    **Raises:** `CompileError`.
    """
    with _lock:
        return _emitted(_llvm(), text, target, "emit_assembly", codemodel="default")


def ptx(text: str, arch: str) -> str:
    """The PTX of a module for NVIDIA GPUs of this architecture (`"sm_90"`) and later ones.

    **Raises:** `CompileError`; `ValueError` for an unknown architecture.
    """
    return assembly(text, gpu(arch))


def _llvm() -> Any:
    """**Raises:** `CompileError` where there is none."""
    if (reason := available()) is not None:
        raise CompileError(reason)
    return _initialised()


@functools.cache
def _initialised() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm


def _key(llvm: Any, text: str, machine: Machine) -> str:
    """The hash of everything that object code depends on."""
    import llvmlite

    versions = f"{llvmlite.__version__} {llvm.llvm_version_info}"
    options = (versions, _PIPELINE, _LEVEL, machine.triple, machine.cpu, machine.features)
    return hashlib.sha256(f"{options}\n{text}".encode()).hexdigest()


def _emitted(llvm: Any, text: str, machine: Machine, emit: str, **options: Any) -> Any:
    """What LLVM's object for the machine emits, `emit_object` or `emit_assembly`."""

    def made() -> Any:
        with _parsed(llvm, text) as module:
            return getattr(_optimised(llvm, module, machine, **options), emit)(module)

    return with_deep_stack(made)


def _loaded(llvm: Any, object_code: bytes) -> Any:
    """An engine of LLVM that has the object code in memory."""
    target = llvm.Target.from_triple(host().triple).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly("", llvm.create_context()), target)
    try:
        # Only now are the functions known that this process offers.
        missing = [x for x in _undefined(llvm, object_code) if not llvm.address_of_symbol(x)]
        if missing:  # the engine would end the process
            raise CompileError(f"functions are called that are not there: {', '.join(missing)}.")
        engine.add_object_file(llvm.ObjectFileRef.from_data(object_code))
        engine.finalize_object()
    except BaseException:
        engine.close()  # before its context goes
        raise
    return engine


def _optimised(llvm: Any, module: Any, machine: Machine, **options: Any) -> Any:
    """Optimise a module; returns LLVM's object for the machine."""
    try:
        target = llvm.Target.from_triple(machine.triple)
    except RuntimeError as e:
        raise CompileError(f"this LLVM makes no code for {machine.triple}: {e}") from e
    target = target.create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=_LEVEL, **options
    )
    module.triple, module.data_layout = machine.triple, str(target.target_data)
    _check_calls(module, machine)
    tuning = llvm.create_pipeline_tuning_options(speed_level=_LEVEL)
    # Vectors and loops are already written in the form that they should have.
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(target, tuning)
    if machine.is_gpu:
        passes = builder.getModulePassManager()
    else:
        passes = llvm.create_new_module_pass_manager()
        for name in _PASSES:
            getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    return target


@contextlib.contextmanager
def _parsed(llvm: Any, text: str) -> Iterator[Any]:
    """A module, for the duration of the block: it has to be freed before its context, and an
    exception that holds its frames would free the two in any order."""
    with llvm.create_context() as context:
        try:
            module = llvm.parse_assembly(text, context)
        except RuntimeError as e:
            raise _refused(e) from e
        with module:
            try:
                module.verify()
            except RuntimeError as e:
                raise _refused(e) from e
            yield module


def _refused(error: RuntimeError) -> CompileError:
    """The error with the first lines of LLVM's message."""
    lines = [line.rstrip() for line in str(error).strip().splitlines()]
    first = [x if len(x) <= _LONGEST else x[:_LONGEST] + " ..." for x in lines[:_MOST]]
    more = [f"... and {len(lines) - _MOST} lines more"] if len(lines) > _MOST else []
    return CompileError("\n".join(["LLVM refuses this IR.", *first, *more]))


_MOST, _LONGEST = 20, 500


# The architecture that has these intrinsics, by the first word of their names.
_OWN = {"x86": "x86_64", "aarch64": "aarch64", "nvvm": "nvptx64"}
_FOREIGN = (*_OWN, "amdgcn", "arm", "hexagon", "ppc", "r600", "riscv", "s390", "spv", "wasm")
# The functions that the C library offers on a CPU, and nothing offers on a GPU.
_LIBM = (
    *("acos", "asin", "atan", "atan2", "cos", "cosh", "exp", "exp10", "exp2", "ldexp", "frexp"),
    *("log", "log10", "log2", "modf", "pow", "powi", "sin", "sincos", "sincospi", "sinh"),
    *("tan", "tanh"),
)


def _check_calls(module: Any, machine: Machine) -> None:
    """Refuse calls of functions that the machine doesn't have, which would end the process."""
    declared = [f.name for f in module.functions if f.is_declaration]
    refused = [name for name in declared if not _has(machine, name)]
    if refused:
        raise CompileError(f"{machine.name} has no {', '.join(sorted(refused))}.")


def _has(machine: Machine, name: str) -> bool:
    if not name.startswith("llvm."):
        return not machine.is_gpu  # on a CPU, loading the code finds out
    _, first, *rest = name.split(".")
    if first in _FOREIGN:
        is_range = rest[0] == "avx512"  # (the only such instruction: see `largest_magnitude`)
        return _OWN.get(first) == machine.architecture and (machine.has_range or not is_range)
    if not machine.is_gpu or first not in _LIBM:
        return True
    # NVPTX has an instruction for 2^x of single precision.
    return first == "exp2" and rest == ["f32"]


def _undefined(llvm: Any, object_code: bytes) -> list[str]:
    """The names of the functions that object code calls and does not define. (Only ELF can be read
    here, which LLVM loads on Linux and Windows.)"""
    if object_code[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return []
    found, wanted = llvm.ObjectFileRef.from_data(object_code).sections(), (b".symtab", b".strtab")
    tables = {section.name(): section.data() for section in found if section.name() in wanted}
    names = tables[b".strtab"]
    return [
        names[name : names.index(b"\0", name)].decode()
        for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", tables[b".symtab"])
        if section == 0 and name and info >> 4 == _GLOBAL
    ]


_GLOBAL = 1
