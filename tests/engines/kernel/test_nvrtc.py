"""Compiling CUDA C++, where there is an NVRTC. (No GPU is needed.)"""

import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

from ensembleode.engines.kernel import nvrtc


SAXPY = """
extern "C" __global__ void saxpy(const float* a, const float* x, float* scaled, float* shifted) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= 1000) return;
  scaled[i] = *a * x[i];
  shifted[i] = *a + x[i];
}
"""

# An array that is indexed by data can't be in registers.
LOCAL = """
extern "C" __global__ void local(const double* x, const int* at, double* y) {
  double all[3000];
  for (int k = 0; k < 3000; ++k) all[k] = x[k] * k;
  y[threadIdx.x] = all[at[threadIdx.x]] + all[at[threadIdx.x + 1]];
}
"""

# One that needs more registers than there are for so many threads.
SPILLED = """
extern "C" __global__ void __launch_bounds__(1024) spilled(const double* x, double* y) {
  double all[60];
  #pragma unroll
  for (int k = 0; k < 60; ++k) all[k] = x[1024 * k + threadIdx.x];
  for (int r = 0; r < 100; ++r) {
    #pragma unroll
    for (int k = 0; k < 60; ++k) all[k] = all[k] * all[(k + 7) % 60] + all[3 * k % 60];
  }
  double sum = 0;
  #pragma unroll
  for (int k = 0; k < 60; ++k) sum += all[k] * all[59 - k];
  y[threadIdx.x] = sum;
}
"""

# A frame of its own, of a function that isn't inlined.
CALLING = """
__device__ __noinline__ double among(const double* x, int n) {
  double all[200];
  for (int k = 0; k < 200; ++k) all[k] = x[k + n] * k;
  return all[(int)x[n] % 200];
}
extern "C" __global__ void calling(const double* x, double* y) {
  y[threadIdx.x] = among(x, threadIdx.x) + among(x, 2);
}
"""

# What generated code has: functions of libdevice, integers of 64 bit, loops, a division.
MATHEMATICS = """
extern "C" __global__ void mathematics(const double* x, float* y, unsigned long long* bits) {
  int i = threadIdx.x;
  double v = sin(x[i]) * pow(x[i], 1.3) + exp(-x[i]) / tanh(x[i]) + erf(x[i]) + lgamma(x[i]);
  while (v > 1 && isfinite(v)) v = fma(v, 0.25, atan2(v, 3.0)) / 2;
  y[i] = (float)v + rsqrtf(y[i]) + __powf(y[i], 0.1f);
  bits[i] = __umul64hi(bits[i], 0xD2511F53ull) ^ (bits[i] << 13);
}
"""


def why_not() -> str:
    """Why nothing can be compiled here; empty where it can."""
    try:
        nvrtc.supported()
    except nvrtc.NvrtcError as e:
        return str(e)
    return ""


needs_nvrtc = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is an NVRTC")


class Device(NamedTuple):
    compute_capability: str


def version(code: str) -> tuple[int, int]:
    match = re.search(r"^\.version (\d+)\.(\d+)$", code, re.MULTILINE)
    assert match is not None
    return int(match[1]), int(match[2])


@needs_nvrtc
def test_ptx_has_the_kernel_and_the_architecture():
    code = nvrtc.ptx(SAXPY, "compute_90")
    assert ".visible .entry saxpy(" in code
    assert ".target sm_90" in code


@needs_nvrtc
def test_a_program_is_compiled_once():
    assert nvrtc.ptx(SAXPY, "compute_80") is nvrtc.ptx(SAXPY, "compute_80")
    assert nvrtc.usage(SAXPY, "compute_80") is nvrtc.usage(SAXPY, "compute_80")


@needs_nvrtc
def test_drivers_of_cuda_11_8_can_read_it():
    assert version(nvrtc.ptx(SAXPY, "compute_80")) == version(nvrtc.ptx(SAXPY, "compute_90"))
    assert version(nvrtc.ptx(SAXPY, "compute_90")) == (7, 8)


@needs_nvrtc
def test_every_architecture_compiles():
    for n in nvrtc.supported():
        code = nvrtc.ptx(MATHEMATICS, f"compute_{n}")
        assert f".target sm_{n}" in code
        assert version(code) >= (7, 8)


@needs_nvrtc
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="there is no ptxas")
def test_an_assembler_takes_the_older_version(tmp_path):
    ptxas = shutil.which("ptxas")
    assert ptxas is not None
    known = subprocess.run([ptxas, "--help"], check=True, capture_output=True, text=True).stdout
    for n in nvrtc.supported():
        if f"'sm_{n}'" not in known:
            continue
        (tmp_path / "kernel.ptx").write_text(nvrtc.ptx(MATHEMATICS, f"compute_{n}"))
        args = [ptxas, f"-arch=sm_{n}", "kernel.ptx", "-o", "kernel.cubin"]
        made = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(
    ("arch", "written", "read"),
    [
        (75, "9.5", "7.8"),
        (90, "8.4", "7.8"),
        (100, "9.5", "8.6"),
        (120, "9.5", "8.7"),
        (121, "9.5", "8.8"),
        # Never later than it was, and as it was for what we don't know.
        (90, "7.0", "7.0"),
        (100, "8.6", "8.6"),
        (107, "9.5", "9.5"),
        (200, "10.2", "10.2"),
    ],
)
def test_version_is_only_lowered_to_what_the_architecture_came_with(arch, written, read):
    code = f"//\n.version {written}\n.target sm_{arch}\n// .version 9.9\n"
    expected = f"//\n.version {read}\n.target sm_{arch}\n// .version 9.9\n"
    assert nvrtc._with_oldest_isa(code, arch) == expected


@needs_nvrtc
def test_errors_have_the_log_of_the_compiler():
    wrong = SAXPY.replace("*a * x[i]", "*a * z[i]")
    with pytest.raises(nvrtc.NvrtcError, match=r'kernel.cu\(5\): error: identifier "z" is undef'):
        nvrtc.ptx(wrong, "compute_90")
    with pytest.raises(nvrtc.NvrtcError, match=r'identifier "z" is undefined'):
        nvrtc.usage(wrong, "compute_90")
    with pytest.raises(nvrtc.NvrtcError, match="gpu-architecture"):
        nvrtc.ptx(SAXPY, "compute_1")


@needs_nvrtc
def test_usage_of_a_small_kernel():
    used = nvrtc.usage(SAXPY, "compute_90")
    assert set(used) == {"saxpy"}
    assert 4 <= used["saxpy"].registers <= 32
    assert used["saxpy"][1:] == (0, 0, 0)


@needs_nvrtc
def test_usage_of_several():
    used = nvrtc.usage(SAXPY + LOCAL + SPILLED + CALLING, "compute_90")
    assert set(used) == {"saxpy", "local", "spilled", "calling"}
    # Arrays are no spills.
    assert used["local"].stack >= 8 * 3000
    assert used["local"].spill_stores == used["local"].spill_loads == 0
    assert used["spilled"].registers <= 64
    assert used["spilled"].spill_stores > 0
    assert used["spilled"].spill_loads > 0
    assert used["spilled"].stack > 0
    assert used["calling"].stack >= 8 * 200
    assert used["calling"].spill_stores == 0
    assert used["saxpy"] == nvrtc.usage(SAXPY, "compute_90")["saxpy"]


def test_usage_is_read_from_the_log():
    # Of CUDA 12.4 (the second without "cumulative"), and of what isn't inlined.
    log = """
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
ptxas         .     1184 bytes stack frame, 2576 bytes spill stores, 2760 bytes spill loads
ptxas info    : Used 64 registers, 1600 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers
ptxas info    : Function properties for _Z1fPKdi
ptxas         .     99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
"""
    assert nvrtc.parse_usage(log) == {
        "first": nvrtc.Usage(64, 2576, 2760, 1600),
        "second": nvrtc.Usage(255, 8, 4, 16),
    }


def test_architecture_of_devices(monkeypatch):
    monkeypatch.setattr(nvrtc, "supported", lambda: (75, 80, 90, 100, 120))
    assert nvrtc.arch_of(Device("9.0")) == "compute_90"
    assert nvrtc.arch_of(Device("12.0")) == "compute_120"
    # PTX for an earlier one runs on a later one, never the other way.
    assert nvrtc.arch_of(Device("8.9")) == "compute_80"
    assert nvrtc.arch_of(Device("13.0")) == "compute_120"
    assert nvrtc.arch_of(Device("10.0"), Device("9.0")) == "compute_90"
    with pytest.raises(nvrtc.NvrtcError, match=r"7\.5 and later, and the GPU has 7\.0"):
        nvrtc.arch_of(Device("7.0"))


@needs_nvrtc
def test_every_release_compiles_for_the_baseline():
    assert nvrtc.number(nvrtc.BASELINE) in nvrtc.supported()


def test_no_nvrtc(monkeypatch):
    nvrtc._library.cache_clear()
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libnothing.so", "/no/libnvrtc.so.13"]))
    try:
        assert not nvrtc.available()
        with pytest.raises(nvrtc.NvrtcError, match=r"/no/libnvrtc.so.13.*nvidia-cuda-nvrtc"):
            nvrtc._library()
    finally:
        nvrtc._library.cache_clear()
