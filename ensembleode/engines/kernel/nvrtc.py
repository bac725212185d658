"""CUDA C++ to PTX by NVRTC, NVIDIA's compiler as a library. Needs no GPU, and no driver.

The library is looked for in the wheels that `jax[cuda13]` and `jax[cuda12]` install, in a CUDA
toolkit, and where the loader of shared libraries looks. Architectures are named as NVRTC does:
"compute_90" for what has compute capability 9.0.
"""

import ctypes
import functools
import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable


# What `supported` may be without: compiled for where no device is known. All releases have it.
BASELINE = "compute_75"

# The version of PTX that the code is said to be in. NVRTC writes its own, newest one, and a driver
# refuses all that came after itself; but the code of our kernels is older. 7.8 is CUDA 11.8's, and
# has all that NVRTC uses up to compute capability 9.0; later architectures need the version that
# they came with, which any driver that knows them knows as well.
_ISA = (7, 8)
_ISA_OF = {
    88: (9, 0),
    100: (8, 6),
    101: (8, 6),
    103: (8, 8),
    110: (9, 0),
    120: (8, 7),
    121: (8, 8),
}
_LAST_WITH_ISA = 90

_INSTALL = (
    "Install `nvidia-cuda-nvrtc` (CUDA 13) or `nvidia-cuda-nvrtc-cu12`: "
    "`pip install 'jax[cuda13]'` or `'jax[cuda12]'` brings one."
)


class NvrtcError(RuntimeError):
    """NVRTC is not there, or refuses a program: the message has the compiler's log."""


class Usage(NamedTuple):
    """What one thread of a kernel takes: registers of 32 bit, and bytes.

    `stack` is its frame in local memory, where arrays are that are indexed by variables, and what
    is spilled; `spill_stores` and `spill_loads` are the instructions that do that, in the bytes
    that each moves once.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int


@runtime_checkable
class Device(Protocol):
    """A CUDA device of JAX."""

    @property
    def compute_capability(self) -> str: ...


def available() -> bool:
    """Whether there is an NVRTC."""
    try:
        _library()
    except NvrtcError:
        return False
    return True


@functools.cache
def supported() -> tuple[int, ...]:
    """The architectures that this NVRTC compiles for, ascending: 90 is "compute_90".

    **Raises:** `NvrtcError` when there is no NVRTC.
    """
    library, count = _library(), ctypes.c_int()
    _check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(library.nvrtcGetSupportedArchs(numbers))
    return tuple(sorted(numbers))


def arch_of(*devices: Device) -> str:
    """The newest architecture whose PTX runs on all `devices`, and that this NVRTC knows.

    PTX runs on its own and on all later architectures.

    **Raises:** `NvrtcError` when there is no NVRTC, or a device is too old for it.
    """
    oldest = min(capability(device) for device in devices)
    known = [n for n in supported() if n <= oldest]
    if not known:
        raise NvrtcError(
            f"This NVRTC compiles for compute capability {_dotted(supported()[0])} and later, and "
            f"the GPU has {_dotted(oldest)}. Install an older one: `nvidia-cuda-nvrtc-cu12`."
        )
    return f"compute_{known[-1]}"


def capability(device: Device) -> int:
    """The compute capability as one number: 90 is 9.0, and 121 is 12.1."""
    major, minor = device.compute_capability.split(".")
    return 10 * int(major) + int(minor)


def number(arch: str) -> int:
    """90 for "compute_90"."""
    return int(arch.removeprefix("compute_"))


@functools.lru_cache(maxsize=256)
def ptx(source: str, arch: str) -> str:
    """The program as PTX, for `arch` ("compute_90") and later, and drivers as old as may be.

    **Raises:** `NvrtcError` with the compiler's log, or when there is no NVRTC.
    """
    with _Program(source) as program:
        program.compile(f"--gpu-architecture={arch}")
        return _with_oldest_isa(program.ptx(), number(arch))


@functools.lru_cache(maxsize=256)
def usage(source: str, arch: str) -> dict[str, Usage]:
    """What each `__global__` function takes on just `arch` ("compute_90"), by its name.

    Assembled, not guessed: takes about as long again as `ptx`, more for large programs.

    **Raises:** `NvrtcError` with the compiler's log, or when there is no NVRTC.
    """
    with _Program(source) as program:
        program.compile(f"--gpu-architecture=sm_{number(arch)}", "--ptxas-options=-v")
        return parse_usage(program.log())


def parse_usage(log: str) -> dict[str, Usage]:
    """The numbers in what ptxas says with `-v`."""
    found: dict[str, Usage] = {}
    kernel, described = "", ""
    frame = (0, 0, 0)
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(.+?)'", line):
            kernel, frame = match[1], (0, 0, 0)
        elif match := re.search(r"Function properties for (\S+)", line):
            # (Of functions that weren't inlined as well.)
            described = match[1]
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            if described == kernel:
                frame = (int(match[1]), int(match[2]), int(match[3]))
        elif kernel and (match := re.search(r"Used (\d+) registers", line)):
            # With those of the functions that it calls.
            total = re.search(r"(\d+) bytes cumulative stack size", line)
            stack, stores, loads = frame
            found[kernel] = Usage(int(match[1]), stores, loads, int(total[1]) if total else stack)
    return found


def _with_oldest_isa(code: str, arch: int) -> str:
    """`code` under the oldest version of PTX that `arch` allows; never under a later one."""
    oldest = _ISA if arch <= _LAST_WITH_ISA and arch not in _ISA_OF else _ISA_OF.get(arch)
    match = re.search(r"^\.version (\d+)\.(\d+)", code, re.MULTILINE)
    if oldest is None or match is None or (int(match[1]), int(match[2])) <= oldest:
        return code
    return f"{code[: match.start()]}.version {oldest[0]}.{oldest[1]}{code[match.end() :]}"


def _dotted(number: int) -> str:
    return f"{number // 10}.{number % 10}"


class _Program:
    """A program of NVRTC's, destroyed on leaving the block."""

    def __init__(self, source: str):
        self._library, self._handle = _library(), ctypes.c_void_p()
        name = b"kernel.cu"  # what the log calls it
        create = self._library.nvrtcCreateProgram
        _check(create(ctypes.byref(self._handle), source.encode(), name, 0, None, None))

    def __enter__(self) -> "_Program":
        return self

    def __exit__(self, *_) -> None:
        self._library.nvrtcDestroyProgram(ctypes.byref(self._handle))

    def compile(self, *options: str) -> None:
        every = [o.encode() for o in ("--std=c++17", *options)]
        array = (ctypes.c_char_p * len(every))(*every)
        result = self._library.nvrtcCompileProgram(self._handle, len(every), array)
        if result:
            raise NvrtcError(f"NVRTC: {_message(result)}\n{self.log()}")

    def ptx(self) -> str:
        return self._text("PTX")

    def log(self) -> str:
        return self._text("ProgramLog")

    def _text(self, what: str) -> str:
        size = ctypes.c_size_t()
        _check(getattr(self._library, f"nvrtcGet{what}Size")(self._handle, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        _check(getattr(self._library, f"nvrtcGet{what}")(self._handle, buffer))
        return buffer.value.decode(errors="replace")


def _check(result: int) -> None:
    if result:
        raise NvrtcError(f"NVRTC: {_message(result)}")


def _message(result: int) -> str:
    return _library().nvrtcGetErrorString(result).decode()


@functools.cache
def _library() -> ctypes.CDLL:
    refused = []
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as e:
            if os.path.isabs(path):
                refused.append(str(e))
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise NvrtcError(" ".join(["NVRTC, the compiler of CUDA, is not there.", *refused, _INSTALL]))


def _candidates() -> Iterator[str]:
    """Where NVRTC may be: wheels first, which were installed for this Python."""
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield from _newest_first(os.path.join(folder, "*", "lib", "libnvrtc.so.*"))
    toolkits = (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr/local/cuda-*")
    for toolkit in filter(None, toolkits):
        yield from _newest_first(os.path.join(toolkit, "lib64", "libnvrtc.so*"))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _newest_first(pattern: str) -> list[str]:
    """By the numbers in their names; so 13 is before 9."""
    return sorted(
        glob.glob(pattern), key=lambda p: [int(n) for n in re.findall(r"\d+", p)], reverse=True
    )
