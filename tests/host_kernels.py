"""Kernels on this computer's CPU: the same source, built by the host's compiler."""

import ctypes
import functools
import hashlib
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from ensembleode.engines.kernel import launch
from ensembleode.executors import kernel


COMPILER = shutil.which("g++") or shutil.which("clang++")
# (Fused as XLA does.)
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fexpensive-optimizations",
    "-march=native",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
    "-w",
)


@functools.cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory(prefix="kernels")


@functools.cache
def load(source: str) -> Any:
    """The program as a library."""
    folder = pathlib.Path(_folder().name)
    stem = folder / hashlib.sha256(source.encode()).hexdigest()[:24]
    stem.with_suffix(".cpp").write_text(source)
    assert COMPILER is not None
    command = [COMPILER, *FLAGS, "-o", f"{stem}.so", f"{stem}.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(f"{stem}.so")


def host_call(kernel: Any, blocks: int, operands: Sequence, outputs: Sequence) -> list:
    """A launcher (see `launch.launcher`)."""
    run = load(kernel.source).run_on_host

    def call(*arrays):
        ins = [np.ascontiguousarray(x) for x in arrays]
        outs = [np.empty(x.shape, x.dtype) for x in outputs]
        for x in outs:  # whatever was there before
            x.fill(-77)
        pointers = [x.ctypes.data for x in (*ins, *outs)]
        run((ctypes.c_void_p * len(pointers))(*pointers), blocks * kernel.block)
        return outs

    return list(jax.pure_callback(call, list(outputs), *operands))


def replace_gpu(monkeypatch: Any) -> None:
    """EnsembleGPUKernel runs on the CPU as if that were a GPU; on one, where it is there."""
    if kernel.computes_on_gpu():
        return
    if COMPILER is None:
        pytest.skip("no C++ compiler (g++ or clang++)")
    monkeypatch.setattr(kernel, "computes_on_gpu", lambda: True)
    monkeypatch.setattr(launch, "check", lambda: None)
    monkeypatch.setattr(launch, "launcher", lambda: host_call)
