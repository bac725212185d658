"""The code that runs on a worker: compiled programs, kept by the hash of their content, applied to
NumPy arrays.

Only this package has to be installed on a worker. A task names its program and its large arrays by
hash. A worker that lacks one of them, for example since it joined late, asks for it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pickle
import platform
import sys
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from ...engines.compiled.llvm.compiler import CompileError
from ...engines.compiled.xla.call import NativeKernel, register
from ...ground.devices.placement import NoCpuError, on_cpu
from ...running.interrupts import StopFlag
from ...running.job import compiler_options


class ObjectReference(NamedTuple):
    """Stands for a large object that the worker keeps."""

    hash: str


class Task(NamedTuple):
    """Some trajectories, to be solved by a program.

    - `program`: the hash of the program.
    - `environment`: what the worker's environment must equal (see [`environment`][]).
    - `each`: flat arrays `[trajectory, ...]`; `shared`: flat arrays (or `ObjectReference`s) for all
        of them.
    - `width`, `capacity`: the number of trajectories of a chunk, and of chunks of a call.
    - `threads`: how many calls run at once.
    - `kept`: objects that the worker may lack, by hash.
    - `stop`: the index of the shared array with the address of the flag that programs look at, and
        the name of the work that this task belongs to.
    """

    program: str
    environment: dict[str, Any]
    each: tuple[np.ndarray, ...]
    shared: tuple
    width: int
    capacity: int
    threads: int
    kept: dict[str, Any]
    stop: tuple[int, str] | None = None


class TaskResult(NamedTuple):
    """The flat results of a task, `each [trajectory, ...]` and `parts [part, ...]`; the seconds
    spent solving, and how many programs were compiled for it."""

    each: list[np.ndarray]
    parts: list[np.ndarray]
    seconds: float
    compiled: int


class MissingObjects(NamedTuple):
    """The worker, which Dask reaches at this `address`, needs these objects before it can begin."""

    hashes: tuple[str, ...]
    address: str | None


class TaskRefusal(NamedTuple):
    """This worker can't do the task, and neither could others like it."""

    why: str


class ExportedProgram(NamedTuple):
    """A program that `jax.export` serialised, for CPUs; and the kernels that it calls, which are
    compiled for the CPU of the worker."""

    serialised: bytes
    outputs: int
    kernels: tuple[NativeKernel, ...] = ()


class PickledProgram(NamedTuple):
    """A program that has to be traced on the worker, as a pickled function that makes it."""

    make: bytes
    outputs: int


@dataclasses.dataclass(frozen=True)
class ShippedProgram:
    """A program as workers are sent it, and the hash by which they keep it."""

    hash: str
    content: ExportedProgram | PickledProgram = dataclasses.field(compare=False, repr=False)


def environment() -> dict[str, Any]:
    """The settings that must be the same on all workers for their results to be the same."""
    from ...ground.version import __version__

    return {
        "ensembleode": __version__,
        "jax": jax.__version__,
        "x64": bool(jax.config.jax_enable_x64),  # pyright: ignore
    }


def keep(payload: bytes) -> None:
    """Keep large objects, which arrive pickled, for the next tasks."""
    _kept.add(pickle.loads(payload), [])


def run(task: Task) -> TaskResult | MissingObjects | TaskRefusal:
    """Do a task, on the CPU, even where JAX computes on a GPU."""
    if refusal := _refusal(task.environment):
        return TaskRefusal(refusal)
    try:
        with on_cpu():
            return _done(task)
    except NoCpuError as e:
        return TaskRefusal(f"{_here()} can't begin: {str(e).removesuffix('.')}")


def _done(task: Task) -> TaskResult | MissingObjects | TaskRefusal:
    wanted = [task.program, *(x.hash for x in task.shared if isinstance(x, ObjectReference))]
    # This thread now holds all that it needs, even if another thread makes room in `_kept`.
    held = _kept.add(task.kept, wanted)
    missing = [h for h in wanted if h not in held]
    if missing:
        return MissingObjects(tuple(missing), _address())
    shared = [held[x.hash] if isinstance(x, ObjectReference) else x for x in task.shared]
    if task.stop is not None:
        which, work = task.stop
        flag = _stop_of(work)  # it exists as long as this runs
        shared[which] = flag.address
    try:
        return _solved(task, ShippedProgram(task.program, held[task.program]), shared)
    except (MemoryError, jax.errors.JaxRuntimeError) as e:
        if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return TaskRefusal(
            f"{_here()} ran out of memory, solving {task.width} trajectories at a time ({e}): "
            "save fewer times, or give the workers more"
        )
    except CompileError as e:
        return TaskRefusal(
            f"{_here()} can't compile the kernels of the program: {str(e).rstrip('.')}"
        )


def stop(work: str) -> None:
    """End the tasks of this work, both those under way and those that are still to come."""
    _stop_of(work).set()


def _stop_of(work: str) -> StopFlag:
    with _naming:
        return _stops(work)


_naming = threading.Lock()
_stops = functools.lru_cache(maxsize=64)(lambda work: StopFlag())


def _solved(task: Task, program: ShippedProgram, shared: list) -> TaskResult:
    n, rows, outputs = len(task.each[0]), task.width * task.capacity, program.content.outputs
    starts = range(0, n, rows)

    def arguments(start):
        # (The remaining places hold copies, and are masked.)
        each = [_filled_up(x[start : start + rows], rows) for x in task.each]
        return [*each, np.arange(rows) < n - start, *shared]

    def call(start):
        results = [*map(np.asarray, jax.device_get(function(*arguments(start))))]
        here = min(n - start, rows)
        # Only the parts that contain actual trajectories; each part is the sum over some chunks.
        chunks = -(-here // task.width)
        parts = [x[: -(-chunks * len(x) // task.capacity)] for x in results[outputs:]]
        return [*(x[:here] for x in results[:outputs]), *parts]

    function, compiled = _compiled(program, arguments(0))
    started = time.perf_counter()
    if task.threads > 1 and len(starts) > 1:
        with concurrent.futures.ThreadPoolExecutor(task.threads) as threads:
            results = list(threads.map(call, starts))
    else:
        results = list(map(call, starts))
    seconds = time.perf_counter() - started
    flat = [np.concatenate(x) if len(starts) > 1 else x[0] for x in zip(*results, strict=True)]
    return TaskResult(flat[:outputs], flat[outputs:], seconds, compiled)


def _filled_up(x: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate([x, np.repeat(x[-1:], rows - len(x), axis=0)]) if len(x) < rows else x


def _refusal(wanted: dict[str, Any]) -> str | None:
    here = environment()
    if here == wanted:
        return None
    differs = [
        f"{name} {here.get(name)} instead of {value}"
        for name, value in wanted.items()
        if here.get(name) != value
    ]
    return (
        f"{_here()} has {', '.join(differs)}. All must be the same: "
        "install the same versions there, and start workers in the environment "
        "of ensembleode.worker_environment()"
    )


def _address() -> str | None:
    if "distributed" in sys.modules:
        with contextlib.suppress(ValueError):  # a worker of another kind
            return sys.modules["distributed"].get_worker().address
    return None


def _here() -> str:
    return f"the worker on {platform.node()} (process {os.getpid()})"


class _KeptObjects:
    """The objects that were sent to this worker and most recently used, up to a number of bytes."""

    def __init__(self, most: int):
        self.most = most
        self._things: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def add(self, things: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
        """Keep these objects; returns those that are `wanted` by this task, whatever their size."""
        with self._lock:
            self._things.update(things)
            for name in wanted:
                if name in self._things:
                    self._things.move_to_end(name)
            while (
                sum(map(_size, self._things.values())) > self.most
                and next(iter(self._things)) not in wanted
            ):
                self._things.popitem(last=False)
            return {name: self._things[name] for name in wanted if name in self._things}


def _size(thing: Any) -> int:
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, ExportedProgram):
        return sum(map(len, [thing.serialised, *(kernel.text for kernel in thing.kernels)]))
    return len(thing.make)


_kept = _KeptObjects(2**29)
_compiling = threading.Lock()


def _compiled(program: ShippedProgram, arguments: list) -> tuple[Any, int]:
    """The program, compiled on its first use here; and how many programs were compiled for that."""
    with _compiling:
        before = _executable.cache_info().misses
        found = _executable(program, tuple(jax.typeof(x) for x in arguments))
        return found, _executable.cache_info().misses - before


@functools.lru_cache(maxsize=128)
def _executable(program: ShippedProgram, avals: tuple) -> Any:
    source = program.content
    held = []  # keeps the kernels until the program is loaded
    if isinstance(source, ExportedProgram):
        held += register(source.kernels)
        # Deserialising runs no code: the bytes are the input of a compiler.
        fn = jax.export.deserialize(bytearray(source.serialised)).call
    else:
        fn = pickle.loads(source.make)()
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return jax.jit(fn).lower(*structs).compile(compiler_options=compiler_options("cpu"))
