"""The devices that share a batch, and the part of the batch that each has."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..executors.on_devices import AXIS, evaluated_on_each
from ..ground.devices import cpu_devices
from ..ground.devices.placement import default_device, on_cpu, platform, platform_of
from ..ground.keys import as_before, raw
from ..problem.ensemble import (
    EnsembleAlgorithm,
    EnsembleGPUArray,
    EnsembleGPUKernel,
    EnsembleSerial,
    EnsembleThreads,
)
from ..problem.options import check_count


P = ParamSpec("P")
T = TypeVar("T")
_SPLIT, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices that compute with a batch: those of a mesh, or (None) the one where JAX computes.
    Rows are dealt out to them in consecutive blocks."""

    mesh: Mesh | None = None

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def first(self) -> jax.Device:
        """The first device of this process."""
        return default_device() if self.mesh is None else self.mesh.local_devices[0]

    def rows(self, n: int) -> int:
        """The number of rows for a batch of `n` items, so that all devices have equally many."""
        return -(-n // self.size) * self.size

    def here(self, n: int) -> slice:
        """The slice of `n` rows that belongs to this process."""
        if self.mesh is None:
            return slice(0, n)
        each = n // jax.process_count()
        return slice(each * jax.process_index(), each * (jax.process_index() + 1))

    def split(self, tree: PyTree, n: int) -> PyTree:
        """Arrays `[row]` with this process's part of `n` rows, split over its devices."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        put = functools.partial(
            jax.make_array_from_process_local_data, NamedSharding(self.mesh, _SPLIT)
        )
        return jax.tree.map(lambda x: put(np.asarray(x), (n, *np.shape(x)[1:])), tree)

    def everywhere(self, tree: PyTree) -> PyTree:
        """Arrays that every device has, with a dtype that is not weak."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, _WHOLE)

        def put(x):
            values = np.asarray(raw(x))
            if sharding is None:
                values = jnp.asarray(values)
            else:
                values = jax.make_array_from_process_local_data(sharding, values, values.shape)
            return as_before(x, values) if hasattr(x, "dtype") else values

        return jax.tree.map(put, tree)

    def onto(self, mesh: Mesh | None, tree: PyTree) -> PyTree:
        """Arrays placed as a step on that mesh returns them, so that the step compiles once. (A
        loss may solve on several devices although the batch is on one.)"""
        if self.mesh is not None or mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(mesh, _WHOLE))

    def home(self, tree: PyTree) -> PyTree:
        """Arrays that every device had, placed so that they can be used with arrays on other
        devices."""
        return (
            tree if self.mesh is None else jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)
        )

    def summed(self, fn: Callable) -> Callable:
        """`fn(shared, split)`, which returns what is summed over the devices, and what all have."""
        return self._on_each(fn, _WHOLE, lambda out: (_all_reduced(out[0]), out[1]))

    def mapped(self, fn: Callable) -> Callable:
        """`fn(shared, split)`, whose results on each device, for its rows, are concatenated."""
        return self._on_each(fn, _SPLIT)

    def _on_each(self, fn: Callable, out: Any, post: Callable | None = None) -> Callable:
        if (mesh := self.mesh) is None:
            return fn
        return lambda *args: evaluated_on_each(mesh, fn, (_WHOLE, _SPLIT), out, args, post)


def _all_reduced(tree: PyTree) -> PyTree:
    """The sums over the devices, in one message for each dtype."""
    leaves, structure = jax.tree.flatten(tree)
    dtypes = dict.fromkeys(x.dtype for x in leaves)
    flat = {d: jnp.concatenate([x.ravel() for x in leaves if x.dtype == d]) for d in dtypes}
    sums = jax.lax.psum(flat, AXIS)
    out = []
    for x in leaves:
        out.append(sums[x.dtype][: x.size].reshape(x.shape))
        sums[x.dtype] = sums[x.dtype][x.size :]
    return jax.tree.unflatten(structure, out)


def on_their_devices(fn: Callable[P, T]) -> Callable[P, T]:
    """A decorator of `fn`, which has the keywords `devices` and `ensemblealg`. If these name CPU
    devices although JAX computes on an accelerator, JAX computes on the CPU during the call."""

    @functools.wraps(fn)
    def computing(*args: P.args, **options: P.kwargs) -> T:
        devices, ensemblealg = options.get("devices"), options.get("ensemblealg")
        cpus = isinstance(devices, list | tuple) and all(platform_of(d) == "cpu" for d in devices)
        cpus = cpus or isinstance(ensemblealg, EnsembleSerial | EnsembleThreads)
        with on_cpu() if cpus and platform() != "cpu" else contextlib.nullcontext():
            return fn(*args, **options)

    return computing


def placement(devices: Any, ensemblealg: EnsembleAlgorithm | None, dist: bool) -> Placement:
    """The placement for these arguments of `fit`. **Raises:** `ValueError` for more devices than
    there are, and for contradictory arguments."""
    given = {"devices": devices, "ensemblealg": ensemblealg, "dist": dist or None}
    said = [name for name, value in given.items() if value is not None]
    if len(said) > 1:
        raise ValueError(f"{said[0]} and {said[1]} are both given; drop one of the two.")
    if ensemblealg is not None:
        devices = _devices_of(ensemblealg)
    elif dist:
        devices = len(_there())
    chosen = _chosen(devices)
    named = isinstance(devices, list | tuple)
    if jax.process_count() == 1 and len(chosen) == 1 and not named:
        return Placement()
    # The same number of devices of each process, at the same places.
    client = chosen[0].client
    there = client.local_devices()
    places = [there.index(d) for d in chosen]
    everyone: list[list[jax.Device]] = [[] for _ in range(jax.process_count())]
    for device in client.devices():
        everyone[device.process_index].append(device)
    if any(len(x) <= max(places) for x in everyone):
        raise ValueError(
            f"each process must have {max(places) + 1} devices, and they have "
            f"{[len(x) for x in everyone]}: start them with as many each."
        )
    mesh = np.array([x[i] for x in everyone for i in places])
    return Placement(Mesh(mesh, (AXIS,), axis_types=(AxisType.Auto,)))


def _devices_of(ensemblealg: EnsembleAlgorithm | None) -> Any:
    """The number of devices (None: one), or a list of them."""
    match ensemblealg:
        case EnsembleSerial():
            return None
        case EnsembleThreads(n=n):
            return list(cpu_devices.devices(n))
        case EnsembleGPUArray(devices=devices) | EnsembleGPUKernel(devices=devices):
            return devices
    raise ValueError(
        "ensemblealg must be EnsembleSerial(), EnsembleThreads(), EnsembleGPUArray(devices=...) or "
        "EnsembleGPUKernel(devices=...): "
        f"the devices of this process that share a batch; got {type(ensemblealg).__name__}. Give "
        "others to the solve in the loss, and none to fit; for several processes see initialize."
    )


def _there() -> list:
    """The devices of this process of the kind on which JAX computes."""
    return default_device().client.local_devices()


def _chosen(devices: Any) -> list:
    there = _there()
    if devices is None:
        return there[:1]
    if isinstance(devices, list | tuple):
        here = jax.process_index()
        ours = [isinstance(d, jax.Device) and d.process_index == here for d in devices]
        if not devices or not all(ours):
            raise ValueError(
                f"devices must be a count, or a list of devices of this process, got {devices!r}."
            )
        return list(devices)
    count = check_count("devices", devices)
    if count > len(there):
        hint = f" Call eo.use_cpu_devices({count}) right after the imports."
        hint = hint if platform_of(there[0]) == "cpu" else ""
        raise ValueError(f"devices={count} are more than there are ({len(there)}).{hint}")
    return there[:count]
