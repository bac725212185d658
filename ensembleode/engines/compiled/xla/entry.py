"""A function in LLVM IR as a GPU's kernel, which can be launched.

The function is internal to its module. It takes the number of its thread, the number of threads,
and pointers. The entry, a function that is appended to the module and calls it, gets the two
numbers from the GPU and annotates the pointers as NVPTX wants them.
"""

from __future__ import annotations

from ..llvm.writer import as_pointers


_REGISTERS = ("tid", "ctaid", "ntid", "nctaid")


def entry_name(name: str) -> str:
    """The name of the entry that runs a function."""
    return f"{name}_entry"


def entry(name: str, operands: int, results: int) -> str:
    """The entry that runs `void @name(i64 thread, i64 threads, ptr a0, ..., ptr r0, ...)`."""
    inputs = [f"%a{i}" for i in range(operands)]
    outputs = [f"%r{i}" for i in range(results)]
    # A pointer that is only read, and that no other overlaps, is read through the read-only cache.
    # (Of XLA's buffers, results overlap nothing. Two operands may be one buffer: `noalias` allows
    # that of what is only read.) XLA's alignment, 16 bytes or more, suffices for the elements. XLA
    # passes a pointer for each operand and result of the call (`CudaExecutor::LoadKernel` in
    # xla/stream_executor/cuda/cuda_executor.cc).
    parameters = [f"ptr noalias readonly {x}" for x in inputs]
    parameters += [f"ptr noalias {x}" for x in outputs]
    lines = [f"declare i32 @{_register(x)}()" for x in _REGISTERS]
    lines.append(f"define ptx_kernel void @{entry_name(name)}({', '.join(parameters)}) nounwind {{")
    for x in _REGISTERS:
        lines += [f"  %{x} = call i32 @{_register(x)}()", f"  %{x}.wide = zext i32 %{x} to i64"]
    lines += [
        "  %before = mul i64 %ctaid.wide, %ntid.wide",
        "  %thread = add i64 %before, %tid.wide",
        "  %threads = mul i64 %nctaid.wide, %ntid.wide",
        f"  call void @{name}(i64 %thread, i64 %threads, {as_pointers([*inputs, *outputs])})",
        "  ret void",
        "}",
        "",
    ]
    return "\n".join(lines)


def _register(name: str) -> str:
    return f"llvm.nvvm.read.ptx.sreg.{name}.x"
