"""XLA's custom call for PTX, `__gpu$xla.gpu.ptx`, as an operation of JAX on the CPU.

It takes the same arguments as in XLA: `KernelCall::Parse` (xla/service/gpu/kernel_call.cc) reads
the attributes, and `KernelArguments::Create` (xla/codegen/emitters/kernel_arguments.cc) puts the
operands and the results in the order of the kernel's parameters.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ensembleode.ground.host import host_call

from .errors import PtxError
from .memory import Buffer, Memory
from .running import run


TARGET = "__gpu$xla.gpu.ptx"
_STRINGS = ("name", "kernel_type", "kernel_data")
_NUMBERS = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem_bytes")
# What the buffers of a program are aligned to that are parameters of it; others are to more.
_ALIGNMENT = 16
# Subnormal numbers are zeros on the threads of XLA, and not on this one, nor on a GPU.
_apart = concurrent.futures.ThreadPoolExecutor(1)
_apart.submit(int).result()


class Call(NamedTuple):
    """A launch, as the attributes of the custom call say it."""

    name: str
    code: str
    blocks: int
    block: int
    output_indices: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], np.dtype], ...]

    def order(self, operands: int) -> list[int]:
        """Which of the operands, and after these of the results, each parameter points to."""
        inputs, results = iter(range(operands)), iter(range(len(self.outputs)))
        places = range(operands + len(self.outputs))
        order = [
            operands + next(results) if i in self.output_indices else next(inputs) for i in places
        ]
        assert sorted(order) == [*places]
        return order

    def __call__(self, *operands: np.ndarray) -> list[np.ndarray]:
        return _apart.submit(self._run, operands).result()

    def _run(self, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        memory = Memory()
        inputs = [
            Buffer(f"operand {i}", x.nbytes, np.ascontiguousarray(x).tobytes())
            for i, x in enumerate(operands)
        ]
        results = [
            Buffer(f"result {i}", int(np.prod(shape)) * dtype.itemsize)
            for i, (shape, dtype) in enumerate(self.outputs)
        ]
        every = [*inputs, *results]
        addresses = [memory.add(every[i], _ALIGNMENT) for i in self.order(len(operands))]
        run(self.code, self.name, self.blocks, self.block, addresses, memory)
        return [
            x.data[: x.size].view(dtype).reshape(shape)
            for x, (shape, dtype) in zip(results, self.outputs, strict=True)
        ]


def parse_call(outputs: Sequence[jax.ShapeDtypeStruct], attributes: dict[str, Any]) -> Call:
    """
    **Raises:** `PtxError` for attributes that XLA refuses, or doesn't read.
    """
    known = {*_STRINGS, *_NUMBERS, "output_indices"}
    indices = attributes.get("output_indices", ())
    are_right = (
        known - {"output_indices"} <= attributes.keys() <= known
        and all(isinstance(attributes[x], str) for x in _STRINGS)
        and all(type(x) is np.int32 for x in (*(attributes[n] for n in _NUMBERS), *indices))
    )
    if not are_right:
        raise PtxError(f"XLA reads other attributes, or of other types: {attributes}")
    if indices and (len(indices) != len(outputs) or [*indices] != sorted(set(indices))):
        # (As newer versions say: others read what is asked for here in the same way.)
        raise PtxError(f"XLA wants one place for each result, in order, and these are {indices}.")
    grid_y, grid_z, block_y, block_z = (
        attributes[x] for x in ("grid_y", "grid_z", "block_y", "block_z")
    )
    if attributes["kernel_type"] != "ptx" or {grid_y, grid_z, block_y, block_z} != {1}:
        raise PtxError("only PTX of one dimension is run here.")
    if attributes["shared_mem_bytes"] != 0:
        raise PtxError("there is no shared memory here.")
    return Call(
        attributes["name"],
        attributes["kernel_data"],
        int(attributes["grid_x"]),
        int(attributes["block_x"]),
        tuple(map(int, indices)),
        tuple((tuple(x.shape), np.dtype(x.dtype)) for x in outputs),
    )


def ffi_call(
    instead_of: Callable, calls: list[Call], target: str, outputs: Any, **options: Any
) -> Callable:
    """`jax.ffi.ffi_call`, which this is put in the place of; `calls` is told of each."""
    if target != TARGET:
        return instead_of(target, outputs, **options)
    assert not options

    def bound(*operands: Any, **attributes: Any) -> list:
        call = parse_call(outputs, attributes)
        calls.append(call)
        return host_call(call, outputs, *operands)

    return bound
