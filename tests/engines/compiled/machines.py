"""Machines that code is generated for in tests: lesser ones than this computer, and different
ones."""

import dataclasses

from ensembleode.engines.compiled.llvm.machine import host, Machine, of_x86


# What the levels of the x86-64 psABI have: SSE2, SSE4.2, AVX2 with FMA, AVX-512.
LEVELS = {
    "x86-64": {},
    "x86-64-v2": {},
    "x86-64-v3": {"avx": True, "fma": True},
    "x86-64-v4": {"avx": True, "fma": True, "avx512f": True, "avx512dq": True},
}


def _level(level: str, triple: str) -> Machine:
    return Machine(level, triple, level, "", **of_x86(LEVELS[level]))


def _aarch64(name: str, triple: str, cpu: str) -> Machine:
    return Machine(name, triple, cpu, "", 16, 32, True)


# What can be compiled for from any computer.
TARGETS = {
    machine.name: machine
    for machine in (
        *(_level(level, "x86_64-unknown-linux-gnu") for level in LEVELS),
        dataclasses.replace(
            _level("x86-64-v3", "x86_64-pc-windows-msvc"), name="x86-64-v3-windows"
        ),
        _aarch64("aarch64-linux", "aarch64-unknown-linux-gnu", "neoverse-n1"),
        _aarch64("aarch64-macos", "arm64-apple-macosx11.0.0", "apple-m1"),
    )
}


def limited(level: str) -> Machine:
    """This computer as if it had a lesser x86 CPU: a level of `LEVELS`.

    **Raises:** `ValueError` where it is no x86, or of a lower level itself.
    """
    here = host()
    lesser = _level(level, here.triple)
    if here.architecture != "x86_64" or lesser.vector_bytes > here.vector_bytes:
        raise ValueError(f"{here.name} ({here.architecture}) can't run code for {level}.")
    return lesser
