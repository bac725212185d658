"""A kernel, which is a function in LLVM IR, as an operation inside a JAX program on the CPU.

Under `jit`, control flow and `shard_map(check_vma=False)` it is an operation like any other: it
reads its operands and writes its results in place. It has no derivative and no batching rule; the
caller has to give these. A program for an accelerator calls the host, which runs the kernel.

A program names the kernels that it calls by the hash of their text. They are registered when the
program is lowered; a program that was traced elsewhere (`jax.export`) comes with its kernels
(`kernels_in`), to be passed to `register` before it is loaded.

Kernels are freed some time after the last program that calls them; see `handler.trampolines`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import ad, batching, mlir

from ....ground.devices.placement import on_cpu
from ....ground.recent import jit_recent
from ....tracing.evaluation import equations
from ..llvm.compiler import available, Code, compiled, CompileError, define
from ..llvm.machine import chosen, host, Machine
from .handler import handler, handler_name, trampoline_name, trampolines
from .sharing import STAYS


@dataclasses.dataclass(frozen=True, repr=False)
class NativeKernel:
    """A function in a module of LLVM IR, whose parameters are pointers to operands and results. It
    can be pickled.

    - `machine`: what the kernel is compiled for; None for the CPU that runs it.
    - `shared`: whether one call does only a part of the work. The first operand then says how the
        work is shared out.
    """

    text: str
    name: str
    operands: int
    results: int
    machine: Machine | None = None
    shared: bool = False

    @functools.cached_property
    def target(self) -> str:
        """The name by which programs call the kernel."""
        rest = (self.name, self.operands, self.results, self.machine, self.shared)
        digest = hashlib.sha256(f"{rest}\n{self.text}".encode())
        return f"ensembleode_{digest.hexdigest()}"

    def __repr__(self) -> str:
        return f"Kernel({self.name}, {self.target.removeprefix('ensembleode_')[:8]})"


def call(
    text: str,
    name: str,
    operands: Sequence,
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    items: int | None = None,
    threads: int = 1,
    least: int = 1,
    in_place: Mapping[int, int] | None = None,
) -> list[Array]:
    """The `outputs` that a function of a module writes.

    **Arguments:**

    - `text`: the module. Its vectors may have any width, for example that of `machine.current()`.
    - `name`: the name of the function `void @name(ptr a0, ..., ptr r0, ...)`. The pointers are to
        the operands, then to the outputs, each row-major. The function has to write all of the
        outputs, which share no memory with the operands and are uninitialised. Sizes that are not
        in its code are passed as operands. Several threads may call it at once.
    - `items`: how many items of work there are. With it, the function is
        `void @name(i64 first, i64 end, i64 thread, ptr a0, ...)`, which does the items from `first`
        to `end`. It is called until all items are done, by threads of XLA and by the calling
        thread; `thread`, which is less than `threads`, says by which. Each call gets at least
        `least` items, and a multiple of `least` in all calls but the last.
    - `in_place`: for each operand that is changed in place, its number and that of the output which
        is the changed array; the function leaves the pointer to the operand alone.
    - `operands`: arrays of the dtypes that the function reads, which nothing checks.

    **Raises:** `CompileError` when the program is compiled; `TypeError` for operands that are no
    JAX arrays and would change their dtype when converted.
    """
    changed = tuple((in_place or {}).items())
    if items is not None:
        operands = [np.array([items, threads, least], np.int32), *operands]
        changed = tuple((i + 1, j) for i, j in changed)
    kernel = NativeKernel(text, name, len(operands), len(outputs), chosen(), items is not None)
    avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in outputs)
    return _call_p.bind(
        *map(_of_same_dtype, operands), kernel=kernel, avals=avals, in_place=changed
    )


def _of_same_dtype(x: Any) -> Array:
    """An operand as a JAX array of the same dtype."""
    array = jnp.asarray(x)
    if array.dtype != getattr(x, "dtype", array.dtype):
        raise TypeError(
            f"a kernel reads {x.dtype}, which JAX makes {array.dtype} of: enable x64, or make the "
            "kernel for that."
        )
    return array


class KeptKernel:
    """Keeps a kernel in memory as long as this object, or a loaded program that calls the kernel,
    exists. If such a program is serialised, the kernel stays for ever."""

    __slots__ = ("__weakref__", "kernel")

    def __init__(self, kernel: NativeKernel):
        self.kernel = kernel

    def __reduce__(self):  # called by `jax.experimental.serialize_executable`
        _serialised.add(self)
        return _kept_kernel, (self.kernel,)


class _Trampoline(NamedTuple):
    """The permanent function by which XLA knows a kernel: the place where the handler's address is
    stored (0 while the kernel isn't in memory), and the number of loaded programs that call it."""

    handler: ctypes.c_uint64
    users: ctypes.c_int64
    address: int


# How many unused kernels stay in memory; the most recently used ones do.
SPARE = 64
# Trampolines are made this many at a time.
_BLOCK = 32

_lock = threading.RLock()
_blocks: list[Code] = []
_trampolines: dict[str, _Trampoline] = {}
# The kernels of serialised programs, which may be loaded at any time.
_serialised: set[KeptKernel] = set()
# In the order of use, the most recent last.
_loaded: dict[str, tuple[Code, weakref.ref[KeptKernel]]] = {}


def register(kernels: Iterable[NativeKernel]) -> list[KeptKernel]:
    """Compile the kernels of a program that is about to be loaded, unless they are in memory. The
    caller holds the result until the program is loaded.

    **Raises:** `CompileError`.
    """
    with _lock:
        held = [_kept_kernel(kernel) for kernel in kernels]
        _free_unused()
    return held


def _kept_kernel(kernel: NativeKernel) -> KeptKernel:
    with _lock:
        code, holder = _loaded.pop(kernel.target, (None, None))
        held = (holder and holder()) or KeptKernel(kernel)
        if code is None:
            trampoline = _trampolines.get(kernel.target) or _new_trampoline()
            called = handler(kernel.name, kernel.operands, kernel.results, shared=kernel.shared)
            code = compiled(f"{kernel.text}\n{called}", kernel.machine or _host())
            trampoline.handler.value = code.address(handler_name(kernel.name))
            if kernel.target not in _trampolines:
                each = jax.ffi.pycapsule(ctypes.c_void_p(trampoline.address))
                stages = {"instantiate": each, "execute": each}
                jax.ffi.register_ffi_target(kernel.target, stages, platform="cpu")
                _trampolines[kernel.target] = trampoline
        _loaded[kernel.target] = code, weakref.ref(held)
    return held


def _new_trampoline() -> _Trampoline:
    block, i = divmod(len(_trampolines), _BLOCK)
    if block == len(_blocks):
        code = compiled(f"{trampolines(_BLOCK)}\n; {block}", _host())
        kind, info = (jax.ffi.pycapsule(ctypes.c_void_p(code.address(x))) for x in ("id", "info"))
        of_state: Any = {"type_id": kind, "type_info": info}
        jax.ffi.register_ffi_type(f"ensembleode_{block}", of_state, platform="cpu")
        for name in STAYS:
            define(name, code.address(name))
        _blocks.append(code)
    code = _blocks[block]
    return _Trampoline(
        ctypes.c_uint64.from_address(code.address("handlers") + 8 * i),
        ctypes.c_int64.from_address(code.address("users") + 8 * i),
        code.address(trampoline_name(i)),
    )


def _free_unused() -> None:
    """Free the unused kernels but for the most recent. No program can be using one of these, as
    programs are only loaded while their kernels are held."""
    unused = [x for x, (_, held) in _loaded.items() if not (held() or _trampolines[x].users.value)]
    for target in unused[: max(0, len(unused) - SPARE)]:
        _trampolines[target].handler.value = 0
        del _loaded[target]


def _host() -> Machine | None:
    """This computer's own machine, even where another one is chosen, to compare with the machine
    that a kernel names. None without LLVM; `compiled` raises the error then."""
    return None if available() else host()


def kernels_in(jaxpr: ClosedJaxpr | Jaxpr) -> tuple[NativeKernel, ...]:
    """The kernels that a program calls at any depth, each once. They include the kernels of
    primitives that are traced only when they are lowered, which their attribute `opened` traces."""
    found: list[NativeKernel] = []
    for eqn in equations(jaxpr):
        if eqn.primitive is _call_p:
            found.append(eqn.params["kernel"])
        elif hasattr(eqn.primitive, "opened"):
            opened = functools.partial(eqn.primitive.opened, **eqn.params)
            found += kernels_in(jax.make_jaxpr(opened)(*(v.aval for v in eqn.invars)).jaxpr)
    return tuple(dict.fromkeys(found))


def safety_checks(kernels: Iterable[NativeKernel]) -> list[jax.export.DisabledSafetyCheck]:
    """The checks that `jax.export` has to skip, as it doesn't know these targets."""
    return [jax.export.DisabledSafetyCheck.custom_call(kernel.target) for kernel in kernels]


_call_p = jex.Primitive("ensembleode_kernel")
_call_p.multiple_results = True


@functools.partial(jit_recent, static=3)
def _called(kernel, avals, in_place, *operands):
    return _call_p.bind(*operands, kernel=kernel, avals=avals, in_place=in_place)


@jax.disable_jit(False)
def _run(*operands, kernel, avals, in_place):
    return _called(kernel, avals, in_place, *operands)


def _lower(ctx, *operands, kernel, avals, in_place):
    try:
        held = register([kernel])
    except CompileError as e:
        raise CompileError(
            f"{e}\nThe compiled engine can't make code of this: please report it with f, and solve "
            'it with engine="diffrax" meanwhile.'
        ) from e
    module = ctx.module_context
    if module.lowering_parameters.for_export:  # an exported module can't hold the kernels itself
        _serialised.update(held)
    else:
        module.add_keepalive(held)
    aliases = dict(in_place) or None
    return jax.ffi.ffi_lowering(kernel.target, operand_output_aliases=aliases)(ctx, *operands)


def _no_rule(what, remedy, *_, kernel, **__):
    raise TypeError(
        f"the kernel {kernel.name!r} has no {what} of its own: whatever calls it has to give one "
        f"({remedy})."
    )


_call_p.def_impl(_run)
_call_p.def_abstract_eval(lambda *_, avals, **__: avals)
ad.primitive_jvps[_call_p] = functools.partial(
    _no_rule, "derivative", "jax.custom_vjp or jax.custom_jvp"
)
batching.primitive_batchers[_call_p] = functools.partial(
    _no_rule, "batching rule", "jax.custom_batching.custom_vmap"
)
mlir.register_lowering(_call_p, _lower, platform="cpu")


def _on_host(*operands, kernel, avals, in_place):
    """The kernel's results, in a program for an accelerator: the host runs the kernel."""

    def called(*operands):
        # (Whatever the precision of the thread that this is called in, the operands keep theirs.)
        with on_cpu(), jax.enable_x64(True):
            outputs = _called(kernel, avals, in_place, *map(np.asarray, operands))
            return [np.asarray(x) for x in outputs]

    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    return jax.pure_callback(called, like, *operands)


mlir.register_lowering(_call_p, mlir.lower_fun(_on_host, multiple_results=True))
