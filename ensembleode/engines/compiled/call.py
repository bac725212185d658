"""A kernel, a function of LLVM IR, as an operation inside a JAX program, on the CPU.

Under `jit`, control flow and `shard_map(check_vma=False)` it is an operation like any other, which
reads its operands and writes its results where they are. It has no derivative and no batching rule;
those are for the caller to give.

A program names the kernels that it calls by the hash of their text, and a process can run it once
it has registered them. Where the program is traced, that is done when it is lowered; one that was
traced elsewhere (`jax.export`) comes with its kernels (`kernels_in`), for `register`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import threading
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

from ...tracing.program import is_jaxpr, params_of
from .compiler import available, compiled, CompileError
from .handler import handler, handler_name
from .machine import chosen, host, Machine


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
        """What programs call it by."""
        rest = (self.name, self.operands, self.results, self.machine, self.shared)
        digest = hashlib.sha256(f"{rest}\n{self.text}".encode())
        return f"ensembleode_{digest.hexdigest()}"

    def __repr__(self) -> str:
        return f"Kernel({self.name}, {self.target.removeprefix('ensembleode_')[:8]})"


class Share(NamedTuple):
    """How work is shared out: of how many items it is, how many threads may do it, and how many
    items a thread takes at least (all but the last part are a multiple of that)."""

    n: int
    threads: int
    least: int


def call(
    text: str,
    name: str,
    operands: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    share: Share | None = None,
) -> list[Array]:
    """The `outputs` that a function of a module writes.

    **Arguments:**

    - `text`: the module; made for any width of vectors, as `machine.current()` may be.
    - `name`: of the function, `void @name(ptr a0, ..., ptr r0, ...)`: the pointers are to the
        operands, then to the outputs, each row-major. It has to write all of the outputs, which
        share no memory with the operands, and start as whatever was there before. Sizes that are
        not in its code go as operands. It may be called on several threads at once.
    - `share`: then it is `void @name(i64 first, i64 end, i64 thread, ptr a0, ...)`, which does
        these items, and is called until all are done, on threads of XLA's and on the one that
        calls: `thread` says which of them it is, below `share.threads`.
    - `operands`: arrays of the dtypes that the function reads; nothing checks that it does.

    **Raises:** `CompileError` when the program is compiled; `TypeError` for operands that are no
    arrays of JAX, and would change their dtype.
    """
    if share is not None:
        operands = [np.array(share, np.int32), *operands]
    kernel = Kernel(text, name, len(operands), len(outputs), chosen(), share is not None)
    avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in outputs)
    return _call_p.bind(*map(_of_same_dtype, operands), kernel=kernel, avals=avals)


def _of_same_dtype(x: Any) -> Array:
    """An operand as an array of JAX's.

    **Raises:** `TypeError` where JAX would make half as many bits of it than the kernel reads.
    """
    array = jnp.asarray(x)
    if array.dtype != getattr(x, "dtype", array.dtype):
        raise TypeError(
            f"a kernel reads {x.dtype}, which JAX makes {array.dtype} of: enable x64, or make the "
            "kernel for that."
        )
    return array


_registered: set[str] = set()
_lock = threading.Lock()


def register(kernels: Iterable[Kernel]) -> None:
    """Compile kernels that programs call which are about to be loaded, if that wasn't done.

    **Raises:** `CompileError`.
    """
    for kernel in kernels:
        with _lock:
            if kernel.target in _registered:
                continue
            called = handler(kernel.name, kernel.operands, kernel.results, shared=kernel.shared)
            code = compiled(f"{kernel.text}\n{called}", kernel.machine or _host())
            function = ctypes.c_void_p(code.address(handler_name(kernel.name)))
            # (JAX takes the address that such an object holds.)
            pointer = ctypes.cast(function, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p))
            jax.ffi.register_ffi_target(kernel.target, jax.ffi.pycapsule(pointer), platform="cpu")
            _registered.add(kernel.target)


def _host() -> Machine | None:
    """This computer, whatever is chosen here and now, as kernels say if they are for another.

    Without LLVM it isn't known, and `compiled` says so.
    """
    return None if available() else host()


def kernels_in(jaxpr: Any) -> tuple[Kernel, ...]:
    """The kernels that a program calls at any depth, each once."""
    found: dict[Kernel, None] = {}

    def look(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive is _call_p:
                found[eqn.params["kernel"]] = None
            for inner in filter(is_jaxpr, params_of(eqn)):
                look(inner)

    look(jaxpr)
    return tuple(found)


def safety_checks(kernels: Iterable[Kernel]) -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export` must not check, as it lets no program call what it doesn't know."""
    return [jax.export.DisabledSafetyCheck.custom_call(kernel.target) for kernel in kernels]


#
# The operation
#


_call_p = jex.Primitive("ensembleode_kernel")
_call_p.multiple_results = True


@functools.lru_cache(maxsize=1024)
def _jitted(kernel: Kernel, avals: tuple) -> Any:
    return jax.jit(functools.partial(_call_p.bind, kernel=kernel, avals=avals))


@jax.disable_jit(False)
def _run(*operands, kernel, avals):
    return _jitted(kernel, avals)(*operands)


def _lower(ctx, *operands, kernel, avals):
    try:
        register([kernel])
    except CompileError as e:
        raise CompileError(
            f"{e}\nThe compiled engine can't make code of this: please report it with f, and solve "
            'it with engine="lanes" meanwhile.'
        ) from e
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
