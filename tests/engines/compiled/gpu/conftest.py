"""A GPU that doesn't exist, to compile for and to run on."""

import functools

import jax
import pytest
from jax.experimental import topologies

from ensembleode.engines.compiled.xla import launch
from ensembleode.executors import kernel

from ....marks import slow_unless
from .ptx import xla


# The bytes of memory of the GPUs that are compiled for. (XLA's own target configs of these two, in
# xla/backends/gpu/target_config/specs, differ also in bandwidth, which no program here hinges on.)
MEMORY = {"H100": 84_942_979_072, "H200": 151_397_597_184}


def target_config(name: str) -> str:
    """What XLA wants to know of a GPU to compile such programs."""
    # (With a driver and a runtime that record everything in command buffers, as those of today do.)
    return f"""
gpu_device_info {{
  name: "NVIDIA {name}"
  cuda_compute_capability {{ major: 9 }}
  core_count: 132
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  device_memory_size: {MEMORY[name]}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
"""


def absent(name: str, gpus: int = 1):
    """A mesh of so many GPUs that aren't there."""
    options = {"target_config": target_config(name), "topology": f"1x1x{gpus}"}
    try:
        topology = topologies.get_topology_desc("", "cuda", **options)
    except (NotImplementedError, RuntimeError) as e:
        pytest.skip(f"JAX has no CUDA plugin here, or not with JAX_PLATFORMS=cpu: {e}")
    return topologies.make_mesh(topology, (gpus,), ("x",))


@pytest.fixture(scope="module", params=[slow_unless(x == "H200", x) for x in MEMORY])
def mesh(request):
    return absent(request.param)


@pytest.fixture(scope="module")
def h200s():
    return absent("H200", 2)


@pytest.fixture(scope="module")
def on_ptx():
    """EnsembleGPUKernel runs the very launches that a GPU would get by XLA's custom call, with an
    interpreter for their PTX; the launches, in the order in which they are traced."""
    if kernel.computes_on_nvidia():
        pytest.skip("there is a GPU")
    calls = []
    instead = functools.partial(xla.ffi_call, jax.ffi.ffi_call, calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "computes_on_nvidia", lambda: True)
        patch.setattr(launch, "check", lambda: None)
        patch.setattr(launch, "launcher", lambda: launch.custom_call)
        patch.setattr(jax.ffi, "ffi_call", instead)
        # (What is traced has its launcher in it.)
        jax.clear_caches()
        yield calls
    jax.clear_caches()
