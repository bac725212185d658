"""A kernel, a function of LLVM IR, as an operation inside a JAX program, on the CPU.

Under `jit`, control flow and `shard_map(check_vma=False)` it is an operation like any other, which
reads its operands and writes its results where they are. It has no derivative and no batching rule;
those are for the caller to give.

A program names the kernels that it calls by the hash of their text, and a process can load it once
it has registered them. Where the program is traced, that is done when it is lowered; one that was
traced elsewhere (`jax.export`) comes with its kernels (`kernels_in`), for `register`.

Kernels are freed some time after the last program that calls them; see `handler.trampolines`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.interpreters import ad, batching, mlir

from ...ground.recent import jit_recent
from ...tracing.program import equations
from .compiler import available, Code, compiled, CompileError, define
from .handler import handler, handler_name, trampoline_name, trampolines
from .machine import chosen, host, Machine
from .sharing import STAYS


@dataclasses.dataclass(frozen=True, repr=False)
class Kernel:
    """A function in a module of LLVM IR, of pointers to operands and results; can be pickled.

    - `machine`: what it is compiled for, where that is not what the CPU is that runs it.
    - `shared`: whether it does a part of the work, and the first operand says how it is shared out.
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
    operands: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    items: int | None = None,
    threads: int = 1,
    least: int = 1,
) -> list[Array]:
    """The `outputs` that a function of a module writes.

    **Arguments:**

    - `text`: the module; made for any width of vectors, as `machine.current()` may be.
    - `name`: of the function, `void @name(ptr a0, ..., ptr r0, ...)`: the pointers are to the
        operands, then to the outputs, each row-major. It has to write all of the outputs, which
        share no memory with the operands, and start as whatever was there before. Sizes that are
        not in its code go as operands. It may be called on several threads at once.
    - `items`: how many items of work there are; then it is `void @name(i64 first, i64 end, i64
        thread, ptr a0, ...)`, which does these items, and is called until all are done, on threads
        of XLA's and on the one that calls: `thread` says which of them it is, below `threads`. Each
        takes `least` items at least (all parts but the last are a multiple of that).
    - `operands`: arrays of the dtypes that the function reads; nothing checks that it does.

    **Raises:** `CompileError` when the program is compiled; `TypeError` for operands that are no
    arrays of JAX, and would change their dtype.
    """
    if items is not None:
        operands = [np.array([items, threads, least], np.int32), *operands]
    kernel = Kernel(text, name, len(operands), len(outputs), chosen(), items is not None)
    avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in outputs)
    return _call_p.bind(*map(_of_same_dtype, operands), kernel=kernel, avals=avals)


def _of_same_dtype(x: Any) -> Array:
    """An operand as a JAX array of the same dtype."""
    array = jnp.asarray(x)
    if array.dtype != getattr(x, "dtype", array.dtype):
        raise TypeError(
            f"a kernel reads {x.dtype}, which JAX makes {array.dtype} of: enable x64, or make the "
            "kernel for that."
        )
    return array


class Held:
    """Keeps a kernel in memory: for as long as somebody holds this object, or a program has been
    loaded that calls the kernel; for ever, where that program is serialised."""

    __slots__ = ("__weakref__", "kernel")

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __reduce__(self):  # in `jax.experimental.serialize_executable`
        _serialised.add(self)
        return _held, (self.kernel,)


class _Trampoline(NamedTuple):
    """What XLA knows a kernel by, for ever: where the handler's address is stored (0 where the
    kernel isn't in memory), and how many loaded programs call it."""

    handler: ctypes.c_uint64
    users: ctypes.c_int64
    address: int


# How many kernels stay in memory that nobody needs: those used last.
SPARE = 64
# Trampolines are made so many at a time.
_BLOCK = 32

_lock = threading.RLock()
_blocks: list[Code] = []
_trampolines: dict[str, _Trampoline] = {}
# The kernels of serialised programs, which may be loaded at any time.
_serialised: set[Held] = set()
# In the order of use.
_loaded: dict[str, tuple[Code, weakref.ref[Held]]] = {}


def register(kernels: Iterable[Kernel]) -> list[Held]:
    """Compile the kernels that programs call which are about to be loaded, where they are not in
    memory; the caller holds them until the programs are loaded.

    **Raises:** `CompileError`.
    """
    with _lock:
        held = [_held(kernel) for kernel in kernels]
        _free_unused()
    return held


def _held(kernel: Kernel) -> Held:
    with _lock:
        code, holder = _loaded.pop(kernel.target, (None, None))
        held = (holder and holder()) or Held(kernel)
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
    """Free the kernels that no program needs, but for some that were used last. (Programs are only
    loaded while their kernels are held.)"""
    unused = [x for x, (_, held) in _loaded.items() if not (held() or _trampolines[x].users.value)]
    for target in unused[: max(0, len(unused) - SPARE)]:
        _trampolines[target].handler.value = 0
        del _loaded[target]


def _host() -> Machine | None:
    """This computer, whatever machine is chosen, as kernels name the machine if they are for
    another. (Without LLVM it isn't known, and `compiled` says so.)"""
    return None if available() else host()


def kernels_in(jaxpr: Any) -> tuple[Kernel, ...]:
    """The kernels that a program calls at any depth, each once.

    What a primitive computes that is only traced where it is lowered is traced here, if the
    primitive says what that is (its `opened`).
    """
    found: list[Kernel] = []
    for eqn in equations(jaxpr):
        if eqn.primitive is _call_p:
            found.append(eqn.params["kernel"])
        elif hasattr(eqn.primitive, "opened"):
            opened = functools.partial(eqn.primitive.opened, **eqn.params)
            found += kernels_in(jax.make_jaxpr(opened)(*(v.aval for v in eqn.invars)).jaxpr)
    return tuple(dict.fromkeys(found))


def safety_checks(kernels: Iterable[Kernel]) -> list[jax.export.DisabledSafetyCheck]:
    """The checks that `jax.export` has to skip: it lets no program call what it doesn't know."""
    return [jax.export.DisabledSafetyCheck.custom_call(kernel.target) for kernel in kernels]


#
# The operation
#


_call_p = jex.Primitive("ensembleode_kernel")
_call_p.multiple_results = True


@functools.partial(jit_recent, static=2)
def _called(kernel, avals, *operands):
    return _call_p.bind(*operands, kernel=kernel, avals=avals)


@jax.disable_jit(False)
def _run(*operands, kernel, avals):
    return _called(kernel, avals, *operands)


def _lower(ctx, *operands, kernel, avals):
    try:
        held = register([kernel])
    except CompileError as e:
        raise CompileError(
            f"{e}\nThe compiled engine can't make code of this: please report it with f, and solve "
            'it with engine="lanes" meanwhile.'
        ) from e
    module = ctx.module_context
    if module.lowering_parameters.for_export:  # (which holds nothing)
        _serialised.update(held)
    else:
        module.add_keepalive(held)
    return jax.ffi.ffi_lowering(kernel.target)(ctx, *operands)


def _jvp(primals, tangents, *, kernel, **_):
    raise TypeError(
        f"the kernel {kernel.name!r} has no derivative of its own: whatever calls it has to give "
        "one (jax.custom_vjp or jax.custom_jvp)."
    )


def _batched(operands, dims, *, kernel, **_):
    raise TypeError(
        f"the kernel {kernel.name!r} has no batching rule of its own: whatever calls it has to "
        "give one (jax.custom_batching.custom_vmap)."
    )


_call_p.def_impl(_run)
_call_p.def_abstract_eval(lambda *_, avals, **__: avals)
ad.primitive_jvps[_call_p] = _jvp
batching.primitive_batchers[_call_p] = _batched
mlir.register_lowering(_call_p, _lower, platform="cpu")
