"""The ensemble algorithms, which describe where the trajectories of an ensemble run."""

import abc
import dataclasses
from typing import Any

import equinox as eqx
from jax.typing import ArrayLike

from ..ground.devices import cpu_devices
from .options import check_count


class EnsembleAlgorithm(eqx.Module):
    """Base class of the ensemble algorithms.

    Where JAX computes on a GPU, `EnsembleGPUArray`, `EnsembleGPUKernel` and `EnsembleColumns` run
    there, and the others on the CPU, with their results where JAX computes. A program for the GPU
    calls them there, if the compiled engine solves them.
    """


def _as_devices(devices: Any) -> Any:
    if devices is None:
        return None
    if isinstance(devices, list | tuple):
        if not devices:
            raise ValueError("devices must be a count, or a list of JAX devices; it is empty.")
        return tuple(devices)
    return check_count("devices", devices)


class EnsembleSerial(EnsembleAlgorithm):
    """All trajectories on one core, to compare and to debug.

    This is the reference for all other algorithms. With the compiled engine, some trajectories are
    solved at a time, each with its own steps. With diffrax, it runs one trajectory after the other,
    by the program with which `solve` solves a single problem.

    **Cost:** with the compiled engine, that of `EnsembleThreads(1)`. With diffrax,
    one solve for each trajectory, plus about 0.5 ms of Python for each when called eagerly; the
    memory of one trajectory. Under `jit`, it is a loop inside the program.

    **Limitations:** one core; inside of a `jit` for a GPU, only what the compiled engine solves.
    """


class EnsembleColumns(EnsembleAlgorithm):
    """One solve whose state is the matrix of all trajectories (within-ODE batching).

    The state is `[*state, trajectory]`: each trajectory is a column, and `f` is mapped over the
    columns. So the columns are independent by construction, and a product with shared weights is
    one matrix product. All columns take the same steps, chosen by the root-mean-square norm over
    the whole matrix, as in Julia. So a difficult column is outvoted by many easy ones, and where it
    isn't, it makes all of them slower.

    **Cost:** one solve, with as many steps as the matrix as a whole needs, and the memory of all
    columns. In the compiled engine, a step of some columns is made at a time, and threads share the
    columns of a step that takes long enough. That engine has the explicit methods, `RMSNorm` and
    `MaxNorm`; others run on diffrax. With a `batch_size`, the columns of each batch are a matrix of
    their own, with its own steps; so are reruns.

    **Limitations:** there is one return code for all columns (one that fails fails the whole
    solve); the statistics give each trajectory the shared steps, so don't add them up.

    **Throws:** `ValueError` when `tspan`, `saveat`, `abstol`, `reltol` or `dt` differ by
    trajectory.
    """


class EnsembleThreads(EnsembleAlgorithm):
    """Trajectories on every core: the default where JAX computes on the CPU.

    Each trajectory has its own steps, its own end and its own return code. With the compiled
    engine it has the bits that `EnsembleSerial` gives, and threads of XLA take parts of a batch in
    turn; `ENSEMBLEODE_NUM_THREADS` limits their number. The diffrax engine runs on JAX's CPU
    devices, of which there is one unless [`use_cpu_devices`][ensembleode.use_cpu_devices] says
    otherwise.

    - `n`: the number of cores, by default all. `EnsembleThreads(1)` is one core, vectorised.

    **Cost:** no core waits for another within the time loop. On devices, chunks are dealt out in
    turn, so an ensemble of one chunk (up to 128 small trajectories) runs on one core.

    **Limitations:** CPUs only. Where JAX computes on a GPU, a `jit` can contain only what the
    compiled engine solves, whose numbers go to the CPU and come back. On devices, inside `jit`, no
    argument may be committed to one device (by `jax.device_put(x, device)`). With JAX 0.10, a
    Python loop over solves should wait for results now and then (`jax.block_until_ready`), because
    devices may wait for each other for ever if many solves are launched ahead. Inside `shard_map`
    it runs on the device of its shard, and where arrays are on a mesh with explicit axes, each
    device solves all.

    **Throws:** `ValueError` when there are fewer than `n` CPU devices where they are needed, or
    none as `JAX_PLATFORMS` leaves them out. **Warns** once when there is only one CPU device
    although there are more cores.
    """

    n: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        if self.n is not None:
            check_count("n", self.n)


class EnsembleGPUArray(EnsembleAlgorithm):
    """All trajectories of a batch at once, as arrays on one or several devices.

    Each trajectory has its own steps, its own end and its own return code.

    - `devices`: the number of devices, or a list of JAX devices; by default JAX's default device
        (the accelerator where there is one, and otherwise the CPU, in one thread).
    - `backend`: with `engine="julia"`, the package for the GPU on which DiffEqGPU runs: `"CUDA"`,
        `"AMDGPU"`, `"oneAPI"` or `"Metal"`; or `"CPU"` to try it without a GPU.

    **Cost:** one program for each device. On an accelerator, one loop has all trajectories of the
    batch, and runs until the slowest is done; gradients are computed in parts where the memory has
    no room for the steps of all. The memory is that of a batch (`batch_size`), which by default
    takes a quarter of the device's. Devices don't wait for each other within the time loop.

    **Limitations:** inside `jit` with several devices, no argument may be committed to one of them.

    **Throws:** `ValueError` when there are fewer devices.
    """

    devices: int | tuple | None = eqx.field(default=None, static=True, converter=_as_devices)
    backend: str | None = eqx.field(default=None, static=True)


class EnsembleGPUKernel(EnsembleAlgorithm):
    """The whole solve of each trajectory in one GPU kernel, with one thread for each trajectory.

    The kernel is the compiled engine's loop around the field, as PTX: state and stages are in
    registers, and each thread has its own steps, end and return code. Where JAX computes on an
    NVIDIA GPU it is the default for what it can solve, and `EnsembleGPUArray` for the rest.
    Tolerances, time spans, parameters and the number of trajectories can change without compiling
    again. On a machine without an NVIDIA GPU that JAX uses, one core of the CPU takes its place,
    with a message the first time.

    - `devices`: the number of GPUs, or a list of JAX devices; by default JAX's default device.
    - `backend`: with `engine="julia"`, whose kernels are DiffEqGPU's, the package for the GPU:
        `"CUDA"` (the default), `"AMDGPU"`, `"oneAPI"` or `"Metal"`; or `"CPU"` to try it without a
        GPU.

    **Cost:** one launch for each batch and device, which ends with the slowest trajectory.
    Compiling takes a second or two, and as long again in the GPU's driver. Gradients are a second
    kernel, which runs each trajectory again. It is fastest for small fields: see
    [`kernel_report`][ensembleode.kernel_report] for the registers that a field takes.

    **Limitations:** explicit and Rosenbrock methods; `ReplayAdjoint()` and
    `ForwardDiffSensitivity()`; fields whose operations the compiled engine has. Matrix products are
    loops in each thread, so from a few hundred multiplications on EnsembleGPUArray is faster. With
    `engine="julia"`: small fields without loops; the methods that DiffEqGPU has; `saveat`,
    tolerances and `dt` shared by all trajectories; integration forwards in time; no limit on steps
    and no counts of steps (these are 0). DiffEqGPU raises for all trajectories if one of them can't
    begin, or its step underflows.

    **Throws:** `ValueError` for a solve that it can't do, naming the reason, and where there are
    fewer GPUs than `devices`; `KernelError` where there is a GPU, but the software that compiles or
    launches kernels is missing.
    """

    devices: int | tuple | None = eqx.field(default=None, static=True, converter=_as_devices)
    backend: str | None = eqx.field(default=None, static=True)


def _check_costs(costs: Any) -> None:
    if costs is not None and getattr(costs, "ndim", None) != 1:
        raise ValueError(f"costs must be an array of one number a trajectory, got {costs!r}.")


class ClusterAlgorithm(EnsembleAlgorithm):
    """The common part of algorithms on other processes: they are contexts, and have traffic."""

    cluster: Any = eqx.field(default=None, static=True)
    workers: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        if self.workers is not None:
            check_count("workers", self.workers)

    @abc.abstractmethod
    def _sizes(self) -> tuple[int, int]:
        """The number of workers of a cluster of its own, and the number of threads of each."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self) -> None:
        """End the workers that were started for it; the user's own workers are left alone."""
        from ..executors.distributed import local

        local.pool_of(self).close()

    def traffic(self) -> Any:
        """A [`Traffic`][ensembleode.Traffic] with the data that went to its workers and came back
        so far."""
        from ..executors.distributed import local

        return dataclasses.replace(local.pool_of(self).traffic)


class EnsembleDistributed(ClusterAlgorithm):
    """Trajectories dealt out to processes by Dask, on this computer or on a cluster.

    - `cluster`: a Dask client or cluster, or the address of a scheduler; or any executor of
        `concurrent.futures` (such as `mpi4py.futures.MPIPoolExecutor`). By default a
        `dask.distributed.LocalCluster`, which listens only on the loopback interface and has no
        dashboard. It is started when it is first used, and is kept until the end of this process;
        or, if the algorithm is used as a context (`with EnsembleDistributed() as alg:`), until the
        end of the block.
    - `workers`: the number of processes, by default one for each core; for an executor, the number
        of tasks that it runs at a time. (With `engine="julia"`, the processes are Julia's, on this
        computer.)
    - `costs`: the cost of each trajectory, `[trajectory]`, in any unit (such as `sim.stats.nf` of
        an earlier solve): the most expensive ones are sent first. By default the lengths of the
        time spans, where they differ.

    Nothing has to be defined on the workers: they are sent the source of a compiled program once,
    and numbers after that. The results have the bits of `EnsembleSerial`, whichever worker computes
    them and however often a worker dies. Gradients with respect to shared parameters are added up
    chunk by chunk, always in the same order. Workers compute on their CPUs, also where they have
    GPUs.

    **Cost:** some seconds to start the workers, and once the compilation of a program on each of
    them; then a few milliseconds for each task (about half a second of solving), and for sending
    the numbers and the results. With `reduction=sum_reduction`, sums and gradients are sent instead
    of trajectories. An ensemble of one chunk (up to 128 small trajectories) runs on one worker.

    **Limitations:** a script in which it starts its workers needs `if __name__ == "__main__":`.
    Functions that are called on the host (by `jax.pure_callback`) must be picklable.

    **Throws:** `ClusterError`, with the results so far as its `solution`, where the cluster is
    lost; `ImportError` without Dask (the extra `dask`). Trajectories whose workers die repeatedly
    have the return code `Failure`; all others are solved.
    """

    costs: ArrayLike | None = None

    def __check_init__(self):
        _check_costs(self.costs)

    def _sizes(self) -> tuple[int, int]:
        return self.workers or cpu_devices.cores(), 1


class EnsembleSplitThreads(ClusterAlgorithm):
    """Trajectories dealt out to processes, and in each process to threads.

    - `cluster`, `costs`: see [`EnsembleDistributed`][ensembleode.EnsembleDistributed].
    - `workers`: the number of processes, by default 2.
    - `threads`: the number of threads of each process, by default an equal share of the cores;
        required with a `cluster`.

    **Cost:** that of `EnsembleDistributed`, but fewer programs are compiled.

    **Limitations:** those of `EnsembleDistributed`.

    **Throws:** the same errors as `EnsembleDistributed`.
    """

    threads: int | None = eqx.field(default=None, static=True)
    costs: Any = None

    def __check_init__(self):
        if self.threads is not None:
            check_count("threads", self.threads)
        if self.cluster is not None and self.threads is None:
            raise ValueError(
                "threads is missing: say how many each worker of the cluster has, as in "
                "EnsembleSplitThreads(client, threads=8)."
            )
        _check_costs(self.costs)

    def _sizes(self) -> tuple[int, int]:
        workers = self.workers or 2
        return workers, self.threads or max(1, cpu_devices.cores() // workers)
