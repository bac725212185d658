"""A machine with GPUs, simulated on the CPU: JAX computes on the devices of a second client, which
is no GPU but is taken for one. Arrays there and on the CPU are as far apart as on a real one, the
threads of GPU kernels run one after the other, and a program for that client reaches kernels for
the CPU through the host.

    ENSEMBLEODE_SIMULATED_GPUS=2 python -m pytest tests/...     runs tests there,
    python tests/gpu_machine.py SCRIPT ARGUMENT ...             a script.
"""

import pathlib
import runpy
import sys


# The number of GPUs of the machine on which tests run; without it, there are those that there are.
VARIABLE = "ENSEMBLEODE_SIMULATED_GPUS"


def simulate(gpus: int = 1) -> None:
    """From now on, this process is on a machine with so many GPUs. JAX must not have computed
    anything yet."""
    import jax
    from jax._src import xla_bridge
    from jax._src.lib import xla_client
    from jax.interpreters import mlir

    from ensembleode.engines.compiled.xla import call, launch
    from ensembleode.ground.devices import placement

    from .host_kernels import host_call

    def client():
        return xla_client.make_cpu_client(num_devices=gpus)

    xla_bridge.register_backend_factory("simulated", client, priority=1_000)
    backend = xla_bridge.get_backend("simulated")
    assert jax.devices()[0].client is backend

    def platform_of(device):
        return "gpu" if device.client is backend else device.platform

    def lowered(ctx, *operands, kernel, **more):
        on_gpu = ctx.module_context.get_backend() is backend
        rule = through_host if on_gpu and not kernel.name.endswith(".on_host") else directly
        return rule(ctx, *operands, kernel=kernel, **more)

    directly, through_host = call._lower, mlir.lower_fun(call._on_host, multiple_results=True)
    mlir.register_lowering(call._call_p, lowered, platform="cpu")
    placement.platform_of = platform_of
    launch.missing = list
    launch.launcher = lambda: host_call


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).parents[1])
    from tests import gpu_machine

    gpu_machine.simulate()
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    runpy.run_path(script, run_name="__main__")
