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


COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++ or clang++)")
# (Fused as XLA does.)
FLAGS = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-w")


@functools.cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory(prefix="kernels")


@functools.cache
def built(source: str) -> Any:
    """The program's function that runs all threads."""
    folder = pathlib.Path(_folder().name)
    stem = folder / hashlib.sha256(source.encode()).hexdigest()[:24]
    stem.with_suffix(".cpp").write_text(source)
    assert COMPILER is not None
    command = [COMPILER, *FLAGS, "-o", f"{stem}.so", f"{stem}.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(f"{stem}.so").run_on_host


def host_call(kernel: Any, blocks: int, operands: Sequence, outputs: Sequence) -> list:
    """A launcher (see `launch.launcher`)."""
    run = built(kernel.source)

    def call(*arrays):
        ins = [np.ascontiguousarray(x) for x in arrays]
        outs = [np.empty(x.shape, x.dtype) for x in outputs]
        for x in outs:  # whatever was there before
            x.fill(-77)
        pointers = [x.ctypes.data for x in (*ins, *outs)]
        run((ctypes.c_void_p * len(pointers))(*pointers), blocks * kernel.block)
        return outs

    return list(jax.pure_callback(call, list(outputs), *operands))
