"""The programs that workers run: flat arrays in, flat arrays out, of a number of chunks at a time.

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
import jax.export
import jax.numpy as jnp
import numpy as np

from ...core.interrupts import looking_at
from ...core.job import with_output
from ...engines.compiled.call import kernels_in, safety_checks
from ...ground.keys import as_before
from ...ground.placement import on_cpu
from ...tracing.program import is_tracer
from .forms import Form, Given, given, Numbers, raw_struct
from .worker import Exported, Pickled


@dataclasses.dataclass(frozen=True)
class ChunkProgram:
    """A form as a program over chunks; hashable, and compared by content.

    - `width`: the number of trajectories of a chunk; `capacity`: the number of chunks of a call.
    - `unit`: how many chunks are added up to one part of a sum.
    """

    form: Form
    width: int
    capacity: int
    unit: int

    @property
    def rows(self) -> int:
        return self.width * self.capacity

    def function(self) -> Callable:
        """The function `(*every, mask, *shared) -> [*each, *parts]`, of flat arrays."""
        return functools.partial(_flat, self)

    def units(self, n: int) -> int:
        """The number of parts of `n` trajectories."""
        return -(-n // (self.unit * self.width))

    def results(self, n: int) -> tuple[list, list]:
        """The flat structs of the results of `n` trajectories, and of their parts."""
        each, parts = (
            [jax.ShapeDtypeStruct((size, *s.shape), s.dtype) for s in structs]
            for size, structs in ((n, self.form.each), (self.units(n), self.form.parts))
        )
        return each, parts


def numbers_of(lanes: Any, batched: Any, indices: Any, repeat: Any, key: Any, consts: Any):
    """The numbers of a batch, separated into those that differ between trajectories and those that
    don't."""
    every, shared = eqx.partition(lanes, batched)
    return Numbers((every, indices), (shared, repeat, key, consts))


def program_of(form: Form, n: int) -> ChunkProgram:
    """The program for `n` trajectories."""
    width, capacity = _layout(form, n)
    unit = 1
    if not isinstance(form, Given) or form.kind == "total and gradient":
        unit, capacity = _parts(sum(map(_bytes, form.parts)), -(-n // width), capacity)
    return ChunkProgram(form, width, capacity, unit)


# The bytes that a call of a program returns; and those of sums over all trajectories.
_CALL = 2**26
_PARTS = 2**26
_MOST_CHUNKS = 16


def _layout(form: Form, n: int) -> tuple[int, int]:
    """The number of trajectories of a chunk, and the number of chunks of a call.

    All batches use the same program; where a masked chunk costs nothing, a call takes many chunks.
    """
    plan = form.base.plan
    if not plan.engine.shares_work:
        return min(128, 2 ** (n - 1).bit_length()), 1
    rows = plan.saving.rows or 1
    each = plan.width * _bytes(plan.state) * (rows + 2) * form.copies
    return plan.width, max(1, min(_MOST_CHUNKS, _CALL // each))


def _parts(added: int, chunks: int, capacity: int) -> tuple[int, int]:
    """How many chunks are added up to a part, and the number of chunks of a call.

    This decides the bits of a sum, so it depends neither on the workers nor on times.
    """
    parts = max(8, _PARTS // max(1, added))
    unit = max(1, -(-chunks // parts))
    return unit, unit * max(1, capacity // unit)


def _bytes(struct: Any) -> int:
    return int(np.prod(struct.shape)) * np.dtype(struct.dtype).itemsize


#
# The computation
#


def _flat(program: ChunkProgram, *flat: Any) -> list:
    every = len(program.form.every)
    units = program.capacity // program.unit
    each, parts = program.form.of_units(flat[:every], flat[every], flat[every + 1 :], units)
    return [*each, *parts]


def flat_structs(program: ChunkProgram) -> list:
    """The structs of the inputs of `function()`."""
    rows = program.rows
    every = [jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for s in program.form.every]
    return [*every, jax.ShapeDtypeStruct((rows,), np.dtype(bool)), *program.form.shared]


#
# Serialised programs
#


@dataclasses.dataclass(frozen=True)
class Shipped:
    """A program in the form in which workers are sent it, and the hash by which they keep it."""

    hash: str
    content: Exported | Pickled = dataclasses.field(compare=False, repr=False)


@functools.lru_cache(maxsize=256)
def exported(program: ChunkProgram) -> Shipped | None:
    """The serialised program for CPUs; None where that isn't possible since it calls the host."""
    with on_cpu():
        return _exported(program)


def _exported(program: ChunkProgram) -> Shipped | None:
    fn = jax.jit(program.function())
    structs = flat_structs(program)
    count = len(program.form.each)
    try:
        kernels = kernels_in(fn.trace(*structs).jaxpr)
        export = jax.export.export(fn, platforms=["cpu"], disabled_checks=safety_checks(kernels))
        content = export(*structs).serialize()
    except (ValueError, NotImplementedError) as e:
        if "callback" not in str(e).lower() and "serializ" not in str(e).lower():
            raise
        return None
    name = hashlib.sha256(content).hexdigest()
    return Shipped(name, Exported(bytes(content), count, kernels))


def pickled(program: ChunkProgram, remake: tuple[Callable, tuple]) -> Shipped:
    """The problem that a program comes from, to be traced again on the worker.

    **Arguments:** `remake`: a function that makes the job, and its arguments.

    **Raises:** `ValueError` for functions that close over traced values.
    """
    import cloudpickle

    fn, args = remake
    bare = dataclasses.replace(program, form=program.form.on(None))
    of = program.form.base.plan
    names = "saving", "maxiters", "inner", "max_events", "last_event"
    plan = {name: getattr(of, name) for name in names}
    looks = of.batched.stop is not None
    try:
        make = functools.partial(_remade, fn, _without_numbers(args), plan, looks, bare)
        content = cloudpickle.dumps(make)
    except Exception as e:
        raise ValueError(
            "f, prob_func or output_func calls the host, so they are sent to the workers pickled, "
            f"and can't be: {e} Inside jit or grad they may close over no traced value: put "
            "what is differentiated into p or u0."
        ) from e
    count = len(program.form.each)
    return Shipped(hashlib.sha256(content).hexdigest(), Pickled(content, count))


def _without_numbers(args: tuple) -> tuple:
    """The arguments of the function that remakes a job, with blanks in place of numbers. Numbers
    that change from solve to solve are sent separately, so that they don't make another program."""
    ens, options, key, *rest = args
    numbers = jax.tree.map(lambda x: _blank(x) if eqx.is_array(x) else x, (ens.prob.u0, ens.prob.p))
    ens = eqx.tree_at(lambda e: (e.prob.u0, e.prob.p), ens, numbers, is_leaf=lambda x: x is None)
    args = (ens, options, _blank(key), *rest)
    return jax.tree.map(lambda x: _blank(x) if is_tracer(x) else x, args)


def _blank(x: Any) -> Any:
    struct = raw_struct(x)
    with jax.ensure_compile_time_eval():
        return as_before(x, np.zeros(struct.shape, struct.dtype))


def _remade(
    fn: Callable, args: tuple, plan: dict[str, Any], looks: bool, bare: ChunkProgram
) -> Callable:
    """On the worker: the function of a program. `looks` says whether it looks at a flag that stops
    it."""
    job, _ = fn(*args)
    if looks:
        job = looking_at(job, None)
    # The counts of saved steps and of events are known only when the plan was made.
    if any(getattr(job.plan, name) != value for name, value in plan.items()):
        counting = plan["saving"].mode == "ends" != job.plan.saving.mode
        job = job.replan(**plan)
        job = job if counting else with_output(job)
    indices = np.arange(1)
    lanes = job.trajectories.lanes(indices, 1)
    numbers = numbers_of(lanes, job.plan.batched, indices, 1, job.key, job.output_consts)
    base = given("solve", job.plan, jax.tree.map(jnp.asarray, numbers))
    return dataclasses.replace(bare, form=bare.form.on(base)).function()
