"""Where the trajectories of an ensemble run: plain descriptions, no machinery."""

import abc
import dataclasses
from typing import Any

import equinox as eqx

from .ground import cpu_devices
from .options import check_count


class EnsembleAlgorithm(eqx.Module):
    """Base class of the ensemble algorithms."""


def _as_devices(devices: Any) -> Any:
    if devices is None:
        return None
    if isinstance(devices, list | tuple):
        if not devices:
            raise ValueError("devices must be a count, or a list of JAX devices; it is empty.")
        return tuple(devices)
    return check_count("devices", devices)


class EnsembleSerial(EnsembleAlgorithm):
    """One after the other, on one core.

    The reference for everything else. With the lanes engine it runs chunk after chunk of
    trajectories, each of which has its own steps; with diffrax one trajectory after the other, by
    the program that `solve` runs on its problem alone.

    **Cost:** with the lanes engine that of `EnsembleThreads(1)`. With diffrax one solve a
    trajectory, and about 0.5 ms of Python each when called eagerly; the memory of one trajectory.
    Under `jit` it is a loop inside the program.

    **Limitations:** none.
    """


class EnsembleColumns(EnsembleAlgorithm):
    """One solve whose state is the matrix of all trajectories (within-ODE batching).

    The state is `[*state, trajectory]`: each trajectory is a column, and `f` is mapped over the
    columns, so that they are independent by construction and a product with shared weights
    is one matrix product. All columns take the same steps, chosen by the root-mean-square norm
    over the whole matrix, as in Julia; so a hard column is outvoted by many easy ones, and makes
    them all slower when it is not.

    **Cost:** one solve, with as many steps as the matrix as a whole needs, and the memory of all
    columns. Fastest for neural ODEs whose trajectories are alike. With a `batch_size` the columns
    of each batch are a matrix of their own, with steps of their own; and so are those rerun.

    **Limitations:** one return code for all (a column that fails fails the whole solve); the
    statistics give each trajectory the shared steps, so don't add them up.

    **Throws:** `ValueError` when `tspan`, `saveat`, `abstol`, `reltol` or `dt` differ by
    trajectory.
    """


class EnsembleThreads(EnsembleAlgorithm):
    """Trajectories on every core: the default.

    Each trajectory has its own steps, its own end and its own return code, and the same bits as
    with any other ensemble algorithm. With the compiled engine, threads of XLA's take parts of a
    batch in turn. The others run on JAX's CPU devices, of which there is one a core when
    ensembleode is imported before JAX starts its backend (see `ensembleode.ground.cpu_devices`;
    `ENSEMBLEODE_NUM_THREADS` overrides the number, 0 leaves JAX's configuration alone).

    - `n`: how many cores, by default all. `EnsembleThreads(1)` is one core, vectorised.

    **Cost:** no core waits for another within the time loop. On devices, chunks are dealt out in
    turn: an ensemble of one chunk (up to 128 small trajectories) runs on one core.

    **Limitations:** the CPU only. On devices, inside `jit`, none of the arguments may be committed
    to one device (by `jax.device_put(x, device)`), and with JAX 0.10 a loop should wait for its
    steps now and then (`jax.block_until_ready`): of many that are launched ahead of each other,
    devices may wait for ever. Inside `shard_map` it runs where its shard is.

    **Throws:** `ValueError` when an accelerator is JAX's default backend, or there are fewer than
    `n` CPU devices where they are needed. **Warns** once when there is one CPU device although
    there are more cores.
    """

    n: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        if self.n is not None:
            check_count("n", self.n)


class EnsembleGPUArray(EnsembleAlgorithm):
    """All trajectories of a batch at once, as arrays on one device or several.

    Each has its own steps, its own end and its own return code.

    - `devices`: how many, or a list of JAX devices; by default JAX's default device (the
        accelerator where there is one, and the CPU otherwise, in one thread).
    - `backend`: with `engine="julia"`, the package whose GPU DiffEqGPU runs on: `"CUDA"`,
        `"AMDGPU"`, `"oneAPI"` or `"Metal"`; `"CPU"` to try it without one.

    **Cost:** one program a device; on an accelerator its loop runs until the slowest trajectory of
    the batch is done. Memory is that of a batch (`batch_size`). Devices don't wait for each other
    within the time loop.

    **Limitations:** inside `jit`, with several devices, none of the arguments may be committed to
    one of them.

    **Throws:** `ValueError` when there are fewer devices.
    """

    devices: int | tuple | None = eqx.field(default=None, static=True, converter=_as_devices)
    backend: str | None = eqx.field(default=None, static=True)


class EnsembleGPUKernel(EnsembleAlgorithm):
    """The whole solve of each trajectory in one GPU kernel, a thread each.

    The compiled engine's loop around the field, as PTX: state and stages are in registers, and each
    thread has its own steps, end and return code. Tolerances, spans, parameters and the number of
    trajectories change without compiling a kernel. On a machine without an NVIDIA GPU that JAX
    uses, arrays on the CPU take its place, which it says once.

    - `devices`: how many GPUs, or a list of JAX devices; by default JAX's default device.
    - `backend`: with `engine="julia"`, where the kernels are DiffEqGPU's, the package of the GPU:
        `"CUDA"` (the default), `"AMDGPU"`, `"oneAPI"` or `"Metal"`; `"CPU"` to try it without one.

    **Cost:** one launch a batch and device, which ends with the slowest trajectory; a second or two
    to compile, and as long again for the GPU's driver. Gradients are a second kernel, which runs
    each trajectory again. Fastest for small fields: see
    [`kernel_report`][ensembleode.kernel_report] for the registers that one takes.

    **Limitations:** explicit methods; `ReplayAdjoint()` and `ForwardDiffSensitivity()`; a field of
    operations that the compiled engine has. Matrix products are loops in each thread: from a few
    hundred multiplications on EnsembleGPUArray is faster. With `engine="julia"`: small fields,
    without loops; the methods that DiffEqGPU has; `saveat`, tolerances and `dt` shared by all;
    forwards in time; no step limit and no counts of steps (they are 0); and DiffEqGPU raises for
    all where one trajectory can't begin, or its step underflows.

    **Throws:** `ValueError` for what it can't do, naming it; `KernelError` where there is a GPU,
    and what compiles or launches kernels is missing.
    """

    devices: int | tuple | None = eqx.field(default=None, static=True, converter=_as_devices)
    backend: str | None = eqx.field(default=None, static=True)


def _check_costs(costs: Any) -> None:
    if costs is not None and getattr(costs, "ndim", None) != 1:
        raise ValueError(f"costs must be an array of one number a trajectory, got {costs!r}.")


class OnCluster(EnsembleAlgorithm):
    """What the algorithms on other processes share: a context, and its traffic."""

    cluster: Any = eqx.field(default=None, static=True)
    workers: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        if self.workers is not None:
            check_count("workers", self.workers)

    @abc.abstractmethod
    def _sizes(self) -> tuple[int, int]:
        """How many workers its own cluster has, and how many threads each of them."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self) -> None:
        """End the workers that were started for it; the user's own are left alone."""
        from .executors.distributed import local

        local.close(self)

    def traffic(self) -> Any:
        """A [`Traffic`][ensembleode.Traffic]: what went to its workers and came back, so far."""
        from .executors.distributed import local

        return dataclasses.replace(local.pool_of(self).traffic)


class EnsembleDistributed(OnCluster):
    """Trajectories dealt out to processes, on this computer or a cluster of them, by Dask.

    - `cluster`: a Dask client or cluster, or the address of a scheduler; or any executor of
        `concurrent.futures` (such as `mpi4py.futures.MPIPoolExecutor`). By default a
        `dask.distributed.LocalCluster`, which listens on the loopback interface only and has no
        dashboard. It is started when first used and kept: as a context (`with
        EnsembleDistributed() as alg:`) to the end of it, else as long as this process.
    - `workers`: how many processes, by default one a core; of an executor, how many tasks it runs
        at a time. (With `engine="julia"` they are Julia's, on this computer.)
    - `costs`: what each trajectory costs, `[trajectory]`, by whatever measure (such as
        `sim.stats.nf` of an earlier solve): the longest go first. By default the lengths of the
        time spans, where they differ.

    Nothing has to be defined on the workers: they are sent a compiled program's source, once, and
    then numbers. Results are the bits of `EnsembleSerial`, whoever computes them and however often
    a worker dies. Gradients by shared parameters are added up chunk by chunk, in the same order
    always.

    **Cost:** some seconds to start the workers, and the compilation of a program on each of them,
    once; then a few milliseconds a task (about half a second of solving), and sending the numbers
    and the results. With `reduction=sum_reduction` sums and gradients are sent instead of
    trajectories. An ensemble of one chunk (up to 128 small trajectories) runs on one worker.

    **Limitations:** a script that has it start its workers wants `if __name__ == "__main__":`. What
    calls the host (`jax.pure_callback`) must be picklable.

    **Throws:** `ClusterError`, with what was computed as its `solution`, where the cluster is lost;
    `ImportError` without Dask (the extra `dask`). Trajectories whose workers die of them, time and
    again, have the return code `Failure`; all others are solved.
    """

    costs: Any = None

    def __check_init__(self):
        _check_costs(self.costs)

    def _sizes(self) -> tuple[int, int]:
        return self.workers or cpu_devices.cores(), 1


class EnsembleSplitThreads(OnCluster):
    """Trajectories dealt out to processes, and there to threads.

    - `cluster`, `costs`: as in [`EnsembleDistributed`][ensembleode.EnsembleDistributed].
    - `workers`: how many processes, by default 2.
    - `threads`: how many threads each has, by default the cores shared out among them; of a
        `cluster`, say how many.

    **Cost:** that of `EnsembleDistributed`, with fewer programs compiled.

    **Limitations:** as there.

    **Throws:** as there.
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
