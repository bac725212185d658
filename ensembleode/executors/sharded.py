"""EnsembleThreads and EnsembleGPUArray: the trajectories of a batch on one device or several.

Every device runs its own loop over time: the devices share nothing until the results are gathered.
On CPUs, an engine may itself share the work out to threads, within a program for one device.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..engines import Engine
from ..ground.devices import cpu_devices
from ..ground.devices.alone import is_on_mesh
from ..ground.devices.moving import uncommitted
from ..ground.devices.placement import has_accelerator, platform, platform_of
from ..ground.recent import jit_recent
from ..plan.plan import Outcome, Plan, Result, shared_times
from ..plan.trajectory_numbers import TrajectoryNumbers
from ..problem.ensemble import EnsembleGPUArray, EnsembleGPUKernel, EnsembleThreads
from ..running.executor import Executor
from ..running.interrupts import finished
from ..running.job import compiler_options, finish_lanes, Job, solve_lanes
from ..tracing.evaluation import equations
from ..tracing.program import being_staged
from .on_devices import AXIS, is_on_one_device, on_each_device
from .places import brought_here


@dataclasses.dataclass(frozen=True)
class DevicesExecutor(Executor):
    """The executor on these devices; without any, on the device where JAX computes, with `threads`
    threads for an engine that shares its work out."""

    devices: tuple[jax.Device, ...] = ()
    threads: int = 1
    vectorised = True

    def run(self, job: Job, indices: Any, repeat: ArrayLike) -> Outcome:
        if self.threads > 1:
            job = job.replan(threads=self.threads)
        lanes = job.trajectories.lanes(indices, repeat)
        numbers = (lanes, indices, repeat, job.key, job.output_consts)
        numbers = brought_here(numbers)
        mesh = None
        if not is_on_mesh(lanes):
            mesh = _mesh(self.devices, job.plan, indices.shape[0])
        if mesh is None:
            solve = _solve if job.traced else _fastest(_solve)
            return finished(job, solve, job.plan, *numbers)
        if being_staged():
            return _solve_sharded(job.plan, mesh, *numbers)
        # Numbers that are committed to one device can't be used with the others. With `src`, their
        # cotangents stay on all devices, as those that they are added to may be there.
        everywhere = NamedSharding(mesh, PartitionSpec())
        put = functools.partial(jax.device_put, device=everywhere, src=everywhere)
        if job.traced:
            # (One by one: of several arrays that are put at once, all get a tangent if one has
            # one.)
            outcome = _solve_sharded(job.plan, mesh, *jax.tree.map(put, numbers))
            if not has_accelerator():
                return outcome
            # It goes on to the accelerator from one device; cotangents from there go to all.
            back = functools.partial(jax.device_put, device=self.devices[0], src=everywhere)
            return jax.tree.map(back, outcome)
        outcome = finished(job, _fastest(_solve_sharded), job.plan, mesh, *put(numbers))
        return _brought_home(outcome, numbers)


def threads(ensemblealg: EnsembleThreads, engine: Engine) -> DevicesExecutor:
    if ensemblealg.n == 1:
        return DevicesExecutor()
    if engine.shares_work:
        return DevicesExecutor(threads=ensemblealg.n or cpu_devices.threads())
    return DevicesExecutor(tuple(cpu_devices.devices(ensemblealg.n)))


def arrays(ensemblealg: EnsembleGPUArray | EnsembleGPUKernel, engine: Engine) -> DevicesExecutor:
    """**Raises:** `ValueError` when there are fewer devices."""
    devices = ensemblealg.devices or ()
    if isinstance(devices, int):
        there = jax.local_devices()
        if devices > len(there):
            raise ValueError(
                f"{type(ensemblealg).__name__}(devices={devices}) wants {devices} devices, and JAX "
                f"has {len(there)}: {there}."
            )
        devices = tuple(there[:devices])
    if engine.shares_work and len(devices) > 1 and platform_of(devices[0]) == "cpu":
        return DevicesExecutor(threads=len(devices))
    return DevicesExecutor(devices)


def _mesh(devices: tuple, plan: Plan, n: int) -> Mesh | None:
    """The mesh of the devices that get trajectories; None for the one where JAX computes anyway."""
    field: Any = plan.field
    if is_on_one_device() or field.jaxpr.effects:
        # (Copies in the remaining places of a device would have the effects, too.)
        return None
    parts = -(-n // plan.width)
    used = devices[: max(1, parts)]
    if len(used) > 1 and platform_of(used[0]) == "cpu" and _WAITS_IN_LAPACK and _factorises(plan):
        used = used[:1]
    if not used or (len(used) == 1 and len(devices) > 1):
        return None
    return Mesh(np.array(used), (AXIS,), axis_types=(AxisType.Auto,))


# jaxlib before 0.11.2 shares a batch of matrices out to the threads that the CPU's devices run on,
# and waits for them. When all devices do so at once, they deadlock.
_WAITS_IN_LAPACK = tuple(map(int, re.findall(r"\d+", jaxlib.__version__)[:3])) < (0, 11, 2)
_LAPACK = (
    *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg"),
    *("householder_product", "lu", "ormqr", "qr", "schur", "svd", "triangular_solve"),
    *("tridiagonal", "tridiagonal_solve"),
)


def _factorises(plan: Plan) -> bool:
    """Whether the steps, or `f`, factorise matrices."""
    field: Any = plan.field
    called = (eqn.primitive.name for eqn in equations(field.jaxpr))
    return plan.engine.factorises(plan) or any(name in _LAPACK for name in called)


def _brought_home(outcome: Outcome, numbers: PyTree) -> Outcome:
    """The outcome on the device of a committed array among the numbers; if there is none, on the
    default device and uncommitted, so that it can be used with arrays elsewhere."""
    for x in jax.tree.leaves(numbers):
        if isinstance(x, jax.Array) and x.committed and len(x.devices()) == 1:
            return jax.device_put(outcome, next(iter(x.devices())))
    return jax.tree.map(uncommitted, outcome)


def _fastest(solve: Callable) -> Callable:
    """A jitted function with options for XLA, which only the outermost jitted function may have."""
    return _with_wide_vectors(solve) if platform() == "cpu" else solve


@functools.cache
def _with_wide_vectors(solve: Callable) -> Callable:
    static, options = 1 if solve is _solve else 2, compiler_options("cpu")
    return jit_recent(solve.__wrapped__, static=static, compiler_options=options)


_solve = jit_recent(solve_lanes)


@functools.partial(jit_recent, static=2)
def _solve_sharded(plan, mesh, lanes, indices, repeat, key, output_consts):
    result = _sharded(plan, mesh, lanes, indices.shape[0])
    return finish_lanes(plan, result, lanes, indices, repeat, key, output_consts)


def _sharded(plan: Plan, mesh: Mesh, lanes: TrajectoryNumbers, n: int) -> Result:
    """Solve the trajectories, on each device of the mesh those that are dealt to it."""
    deal = _DealtTrajectories(n, plan.width, mesh.size)
    every, shared = eqx.partition(lanes, plan.batched)
    numbers = (jax.tree.map(deal.out, every), shared)
    result = on_each_device(plan, mesh, numbers, deal.out(jnp.arange(deal.rows) < n))
    t = deal.back(result.t) if plan.own_times else shared_times(plan, lanes)
    return jax.tree.map(deal.back, result._replace(t=None))._replace(t=t)


@dataclasses.dataclass(frozen=True)
class _DealtTrajectories:
    """Deals `n` trajectories out to `parts` devices, `width` at a time in turn, since neighbours
    often cost the same. The rest of the places hold copies of the last trajectory."""

    n: int
    width: int
    parts: int

    @property
    def rounds(self) -> int:
        return -(-self.n // (self.width * self.parts))

    @property
    def rows(self) -> int:
        return self.rounds * self.parts * self.width

    def out(self, x: Array) -> Array:
        missing = self.rows - x.shape[0]
        if missing:
            x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])
        return self._swapped(x, self.rounds, self.parts)

    def back(self, x: Array) -> Array:
        return self._swapped(x, self.parts, self.rounds)[: self.n]

    def _swapped(self, x: Array, first: int, second: int) -> Array:
        rest = x.shape[1:]
        x = x.reshape(first, second, self.width, *rest).swapaxes(0, 1)
        return x.reshape(self.rows, *rest)
