"""The registers and memory that a kernel takes on a GPU, from NVIDIA's assembler of PTX; no GPU is
needed.

`ptxas` is looked for in the packages that `jax[cuda13]` and `jax[cuda12]` install, in a CUDA
toolkit, and on the path.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from ..llvm.machine import gpu


class PtxasError(RuntimeError):
    """There is no ptxas, or it rejects the code; the message is then that of ptxas."""


class Usage(NamedTuple):
    """What one thread of a kernel takes: 32-bit registers, and bytes of memory. `stack` is the size
    of its frame in local memory, for spilled registers and arrays. The bytes of spilling are those
    that the spilling instructions move when each is executed once."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int


def available() -> bool:
    """Whether ptxas is installed."""
    return _path() is not None


@functools.lru_cache(maxsize=256)
def usage(ptx: str, arch: str) -> dict[str, Usage]:
    """What one thread takes on this architecture (`"sm_90"`), for each kernel by its name.

    **Raises:** `PtxasError`; `ValueError` for an unknown architecture.
    """
    if (path := _path()) is None:
        raise PtxasError(
            "ptxas, NVIDIA's assembler, is not there: `pip install nvidia-cuda-nvcc` (CUDA 13) or "
            "`nvidia-cuda-nvcc-cu12` brings one."
        )
    with tempfile.TemporaryDirectory() as folder:
        source, made = (pathlib.Path(folder, f"kernel.{x}") for x in ("ptx", "cubin"))
        source.write_text(ptx, encoding="utf-8")
        command = [path, "-v", f"-arch={gpu(arch).cpu}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PtxasError(done.stderr.strip() or done.stdout.strip())
    return parse_usage(done.stderr + done.stdout)


def parse_usage(log: str) -> dict[str, Usage]:
    """The numbers in the output of `ptxas -v`."""
    found: dict[str, Usage] = {}
    kernel, described = "", ""
    frame = (0, 0, 0)
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(.+?)'", line):
            kernel, frame = match[1], (0, 0, 0)
        elif match := re.search(r"Function properties for (\S+)", line):
            # The output also describes functions that weren't inlined.
            described = match[1]
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            if described == kernel:
                frame = tuple(map(int, match.groups()))
        elif kernel and (match := re.search(r"Used (\d+) registers", line)):
            # This includes the stacks of the functions that the kernel calls.
            total = re.search(r"(\d+) bytes cumulative stack size", line)
            stack, stores, loads = frame
            found[kernel] = Usage(int(match[1]), stores, loads, int(total[1]) if total else stack)
    return found


@functools.cache
def _path() -> str | None:
    return next(filter(os.path.isfile, _candidates()), None) or shutil.which("ptxas")


def _candidates() -> Iterator[str]:
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield from sorted(glob.glob(os.path.join(folder, "*", "bin", "ptxas*")), reverse=True)
    for toolkit in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        yield os.path.join(toolkit, "bin", "ptxas")
