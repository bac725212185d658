"""Kernels of GPUs on this computer's CPU: the same code, with a loop over the threads."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ensembleode.engines.compiled.xla import launch
from ensembleode.engines.compiled.xla.call import call
from ensembleode.executors import kernel


def on_host(name: str, pointers: int) -> str:
    """A function that runs one for each thread of a launch, to be appended to its module."""
    names = [f"%p{i}" for i in range(pointers)]
    parameters = ", ".join(["ptr %count", *(f"ptr noalias {x}" for x in names)])
    arguments = ", ".join(["i64 %thread", "i64 %threads", *(f"ptr {x}" for x in names)])
    return f"""
define void @{name}.on_host({parameters}) {{
  %narrow = load i32, ptr %count
  %threads = zext i32 %narrow to i64
  br label %one
one:
  %thread = phi i64 [ 0, %0 ], [ %next, %one ]
  call void @{name}({arguments})
  %next = add i64 %thread, 1
  %more = icmp slt i64 %next, %threads
  br i1 %more, label %one, label %done
done:
  ret void
}}
"""


def host_call(kernel: Any, blocks: int, operands: Sequence, outputs: Sequence) -> list:
    """A launcher (see `launch.launcher`)."""
    assert (len(operands), len(outputs)) == (kernel.operands, kernel.results)
    text = f"{kernel.text}\n{on_host(kernel.name, kernel.operands + kernel.results)}"
    count = np.array(blocks * launch.BLOCK, np.int32)
    return call(text, f"{kernel.name}.on_host", [count, *operands], list(outputs))


def replace_gpu(monkeypatch: Any) -> None:
    """EnsembleGPUKernel runs on the CPU as if that were a GPU; on one, where it is there."""
    if kernel.computes_on_nvidia():
        return
    monkeypatch.setattr(kernel, "computes_on_nvidia", lambda: True)
    monkeypatch.setattr(launch, "check", lambda: None)
    monkeypatch.setattr(launch, "launcher", lambda: host_call)
