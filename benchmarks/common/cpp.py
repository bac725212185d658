"""Libraries written by hand in C++."""

import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence

from .contenders import Skip


FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")


def library(
    source: pathlib.Path,
    *includes: pathlib.Path,
    defines: Sequence[str] = (),
    flags: Sequence[str] = (),
):
    """The library of a source, which reads `includes` besides: compiled by g++ (or $CXX), and kept
    in the temporary folder. Its `seconds` are what that took. `flags` come after the usual ones.

    **Raises:** `Skip` where there is no compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Skip("no compiler of C++")
    text = "".join(x.read_text() for x in (source, *includes))
    flags = [*FLAGS, *flags, *(f"-D{x}" for x in defines)]
    key = hashlib.sha256(f"{compiler}{flags}{text}".encode()).hexdigest()[:16]
    path = pathlib.Path(tempfile.gettempdir()) / f"{source.stem}-{key}.so"
    if not path.exists():
        started = time.perf_counter()
        command = [compiler, *flags, str(source), "-o", f"{path}.new", "-lmvec", "-lm"]
        subprocess.run(command, check=True)
        path.with_suffix(".seconds").write_text(str(time.perf_counter() - started))
        os.replace(f"{path}.new", path)
    found = ctypes.CDLL(str(path))
    found.seconds = float(path.with_suffix(".seconds").read_text())
    return found
