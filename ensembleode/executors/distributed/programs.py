"""The programs that workers run: functions from flat arrays to flat arrays, for several chunks of
trajectories at a time.

A program is traced once, on the client, and serialised (`jax.export`). A program that calls the
host can't be serialised. Its problem is pickled instead, and traced on the worker.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...engines.compiled.xla.exporting import exported_with_kernels, UnexportableError
from ...ground.devices.placement import on_cpu
from ...ground.keys import as_before
from ...running.interrupts import looking_at
from ...running.job import JobArguments, with_output
from ...tracing.program import is_tracer
from .forms import Form, form_of, raw_struct, RootForm, SentArrays
from .worker import ExportedProgram, PickledProgram, ShippedProgram


@dataclasses.dataclass(frozen=True)
class ChunkProgram:
    """A form as a program over chunks of `width` trajectories. A call takes `capacity` chunks; sums
    have a part for each `unit` of chunks. Hashable, and compared by content."""

    form: Form
    width: int
    capacity: int
    unit: int

    def function(self) -> Callable:
        """The function `(*every, mask, *shared) -> [*each, *parts]`, of flat arrays."""
        return functools.partial(_flat, self)

    def structs(self) -> list:
        """The structs of the inputs of `function()`."""
        every, shared = self.form.operands
        rows = self.width * self.capacity
        every = [jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for s in every]
        return [*every, jax.ShapeDtypeStruct((rows,), np.dtype(bool)), *shared]

    def units(self, n: int) -> int:
        """The number of parts of `n` trajectories."""
        return -(-n // (self.unit * self.width))

    def results(self, n: int) -> list[list]:
        """The flat structs of the results of `n` trajectories, and of their parts."""
        return [
            [jax.ShapeDtypeStruct((size, *s.shape), s.dtype) for s in structs]
            for size, structs in zip((n, self.units(n)), self.form.results, strict=True)
        ]


def numbers_of(
    lanes: Any, batched: Any, indices: Array | np.ndarray, repeat: Any, key: Array, consts: Any
):
    """The numbers of a batch: those that differ between trajectories, and the others."""
    every, shared = eqx.partition(lanes, batched)
    return SentArrays((every, indices), (shared, repeat, key, consts))


# The most bytes that a call of a program returns, and that the parts of all sums take.
_CALL = 2**26
_PARTS = 2**26
_MOST_CHUNKS = 16


def program_of(form: Form, n: int) -> ChunkProgram:
    """The program for `n` trajectories, which all batches use."""
    plan = form.base.plan
    if plan.engine.shares_work:
        # A masked chunk costs nothing, so a call takes many chunks.
        width, rows = plan.width, plan.saving.rows or 1
        each = width * _bytes(plan.state) * (rows + 2) * form.copies
        capacity = max(1, min(_MOST_CHUNKS, _CALL // each))
    else:
        width, capacity = min(128, 2 ** (n - 1).bit_length()), 1
    unit = 1
    if not isinstance(form, RootForm) or form.kind == "total and gradient":
        # The unit decides the bits of a sum, so it depends neither on the workers nor on measured
        # times.
        parts = max(8, _PARTS // max(1, sum(map(_bytes, form.results[1]))))
        chunks = -(-n // width)
        unit = max(1, -(-chunks // parts))
        capacity = unit * max(1, capacity // unit)
    return ChunkProgram(form, width, capacity, unit)


def _bytes(struct: Any) -> int:
    return int(np.prod(struct.shape)) * np.dtype(struct.dtype).itemsize


def _flat(program: ChunkProgram, *flat: Any) -> list:
    every = len(program.form.operands[0])
    units = program.capacity // program.unit
    operands = flat[:every], flat[every + 1 :]
    each, parts = program.form.of_units(operands, flat[every], units)
    return [*each, *parts]


@functools.lru_cache(maxsize=256)
def exported(program: ChunkProgram) -> ShippedProgram | None:
    """The serialised program for CPUs; None where that isn't possible since it calls the host."""
    try:
        with on_cpu():
            content, kernels = exported_with_kernels(
                program.function(), program.structs(), platforms=["cpu"]
            )
    except UnexportableError:
        return None
    name = hashlib.sha256(content).hexdigest()
    return ShippedProgram(name, ExportedProgram(content, len(program.form.results[0]), kernels))


def pickled(program: ChunkProgram, make: Callable, arguments: JobArguments) -> ShippedProgram:
    """The problem that a program comes from, to be traced again on the worker; `make(*arguments)`
    makes its job. Raises `ValueError` for functions that close over traced values."""
    import cloudpickle

    bare = dataclasses.replace(program, form=program.form.on(None))
    of = program.form.base.plan
    names = "saving", "maxiters", "inner", "max_events", "last_event"
    plan = {name: getattr(of, name) for name in names}
    looks = of.batched.stop is not None
    try:
        fn = functools.partial(_remade, make, _without_numbers(arguments), plan, looks, bare)
        content = cloudpickle.dumps(fn)
    except Exception as e:
        raise ValueError(
            "f, prob_func or output_func calls the host, so they are sent to the workers pickled, "
            f"and can't be: {e} Inside jit or grad they may close over no traced value: put "
            "what is differentiated into p or u0."
        ) from e
    count = len(program.form.results[0])
    return ShippedProgram(hashlib.sha256(content).hexdigest(), PickledProgram(content, count))


def _without_numbers(arguments: JobArguments) -> JobArguments:
    """The arguments with blanks in place of numbers. Numbers that change from solve to solve are
    sent separately, so that they don't make another program."""
    ens = arguments.ens
    numbers = jax.tree.map(lambda x: _blank(x) if eqx.is_array(x) else x, (ens.prob.u0, ens.prob.p))
    ens = eqx.tree_at(lambda e: (e.prob.u0, e.prob.p), ens, numbers, is_leaf=lambda x: x is None)
    arguments = arguments._replace(ens=ens, key=_blank(arguments.key))
    return jax.tree.map(lambda x: _blank(x) if is_tracer(x) else x, arguments)


def _blank(x: Any) -> Any:
    struct = raw_struct(x)
    with jax.ensure_compile_time_eval():
        return as_before(x, np.zeros(struct.shape, struct.dtype))


def _remade(
    make: Callable, arguments: tuple, plan: dict[str, Any], looks: bool, bare: ChunkProgram
) -> Callable:
    """On the worker: the function of a program; `looks` says whether it reads a flag that stops
    it."""
    job, _ = make(*arguments)
    if looks:
        job = looking_at(job, None)
    # (How many steps and events there is room for was known only to the maker of the plan.)
    if any(getattr(job.plan, name) != value for name, value in plan.items()):
        counting = plan["saving"].mode == "ends" != job.plan.saving.mode
        job = job.replan(**plan)
        job = job if counting else with_output(job)
    indices = np.arange(1)
    lanes = job.trajectories.lanes(indices, 1)
    numbers = numbers_of(lanes, job.plan.batched, indices, 1, job.key, job.output_consts)
    base = form_of("solve", job.plan, jax.tree.map(jnp.asarray, numbers))
    return dataclasses.replace(bare, form=bare.form.on(base)).function()
