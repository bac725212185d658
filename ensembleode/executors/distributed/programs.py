"""The programs that workers run: flat arrays in, flat arrays out, of a number of chunks at a time.

A program is traced once, on the client, and serialised (`jax.export`). What can't be serialised,
because it calls the host, is pickled as the problem that it came from, and traced on the worker.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ...core.job import codes_and_counts, solve_lanes, with_output
from ...core.plan import Outcome, Plan
from ...core.reductions import total
from ...engines.compiled.call import kernels_in, safety_checks
from ...ground.keys import as_before, is_key, raw
from ...tracing.program import is_tracer
from .worker import Exported, Pickled


class Numbers(NamedTuple):
    """What a program is given besides its plan.

    `every` has the trajectory axis first on all leaves: the numbers that differ, and the indices;
    `shared` are those for all.
    """

    every: Any
    shared: Any


@dataclasses.dataclass(frozen=True)
class ChunkProgram:
    """A program over chunks of a plan; hashable, and compared by content.

    - `kind`: `"solve"` gives the outcome of each trajectory; `"total"` the sum of the outputs
        over each chunk, and the return codes and counts; `"pull back"` the cotangents of the
        numbers from those of the outcome; `"total and gradient"` the last two at once.
    - `width`: trajectories of a chunk; `capacity`: chunks of a call; `unit`: how many chunks are
        added up to one part of what is summed.
    - `structure`, `structs`: of the numbers, flat; `keys`: which of them are PRNG keys, and of
        what kind.
    - `wanted`: which numbers are differentiated.
    """

    kind: str
    plan: Plan
    width: int
    capacity: int
    unit: int
    structure: Any
    structs: tuple
    keys: tuple
    wanted: tuple = ()

    @property
    def rows(self) -> int:
        return self.width * self.capacity

    def function(self) -> Callable:
        """`function(*every, mask, *shared) -> [*each, *parts]`, flat; the cotangents of an outcome
        are the last of `every`."""
        return functools.partial(_flat, self)

    @property
    def numbers(self) -> Numbers:
        """The structs of the numbers, without the axis of the trajectories."""
        return jtu.tree_unflatten(self.structure, self.structs)

    @property
    def outputs(self) -> tuple[Any, Any]:
        """The structures of what a call gives: for each trajectory, and for each part."""
        return _outputs(self)

    def units(self, n: int) -> int:
        """How many parts `n` trajectories have."""
        return -(-n // (self.unit * self.width))

    def results(self, n: int) -> tuple[list, list]:
        """The structs, flat, of what `n` trajectories and their parts give."""
        sizes = (n, self.units(n))
        each, parts = (
            [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in map(raw_struct, leaves)]
            for size, leaves in zip(sizes, map(jtu.tree_leaves, self.outputs), strict=True)
        )
        return each, parts


@functools.lru_cache(maxsize=256)
def _outputs(program: ChunkProgram) -> tuple[Any, Any]:
    def outputs(*flat):
        return _call(program, *_unflattened(program, flat))

    return jax.eval_shape(outputs, *flat_structs(program))


def numbers_of(lanes: Any, batched: Any, indices: Any, repeat: Any, key: Any, consts: Any):
    """The numbers of a batch, apart by whether they differ between trajectories."""
    every, shared = eqx.partition(lanes, batched)
    return Numbers((every, indices), (shared, repeat, key, consts))


def program_of(kind: str, plan: Plan, numbers: Numbers, n: int, wanted: Any = None) -> ChunkProgram:
    """The program for `n` trajectories with such numbers."""
    leaves, structure = jtu.tree_flatten(numbers)
    every = len(jtu.tree_leaves(numbers.every))
    keys = tuple(jax.random.key_impl(x) if is_key(x) else None for x in leaves)
    structs = tuple(
        jax.ShapeDtypeStruct(x.shape[1:] if i < every else x.shape, x.dtype)
        for i, x in enumerate(map(raw_struct, leaves))
    )
    marks = () if wanted is None else tuple(jtu.tree_leaves(wanted))
    width, capacity = _layout(plan, n)
    unit = 1
    if kind in ("pull back", "total and gradient"):
        added = [s for i, s in enumerate(structs) if i >= every and marks[i]]
        unit, capacity = _parts(sum(map(_bytes, added)), -(-n // width), capacity)
    return ChunkProgram(kind, plan, width, capacity, unit, structure, structs, keys, marks)


# Bytes of what a call of a program gives back; and of what is added up over all trajectories.
_CALL = 2**26
_PARTS = 2**26
_MOST_CHUNKS = 16


def _layout(plan: Plan, n: int) -> tuple[int, int]:
    """Trajectories of a chunk, and chunks of a call.

    One program for all batches: where a chunk that is masked costs nothing, it takes many.
    """
    if not plan.engine.chunked:
        return min(128, 2 ** (n - 1).bit_length()), 1
    rows = plan.saving.rows or 1
    each = plan.width * _bytes(plan.state) * (rows + 2)
    return plan.width, max(1, min(_MOST_CHUNKS, _CALL // each))


def _parts(added: int, chunks: int, capacity: int) -> tuple[int, int]:
    """How many chunks are added up to a part, and chunks of a call.

    It decides the bits of a sum, so it depends on neither the workers nor the time they take.
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
    each, parts = _call(program, *_unflattened(program, flat))
    return [raw(x) for x in jtu.tree_leaves((each, parts))]


def _unflattened(program: ChunkProgram, flat: Any) -> tuple[Numbers, Any, Any]:
    """The numbers, the mask and the cotangents."""
    n_every, n_shared = (len(jtu.tree_leaves(x)) for x in program.numbers)
    every, mask = flat[:n_every], flat[len(flat) - n_shared - 1]
    cotangents = flat[n_every : len(flat) - n_shared - 1]
    leaves = [
        x if impl is None else jax.random.wrap_key_data(x, impl=impl)
        for x, impl in zip([*every, *flat[len(flat) - n_shared :]], program.keys, strict=True)
    ]
    return jtu.tree_unflatten(program.structure, leaves), mask, tuple(cotangents)


def flat_structs(program: ChunkProgram) -> list:
    """The inputs of `function()`."""
    numbers, rows = program.numbers, program.rows
    every = [
        jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for s in jtu.tree_leaves(numbers.every)
    ]
    if program.kind == "pull back":
        every += [
            jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype)
            for s in inexact_leaves(outcome_structs(program))
        ]
    mask = jax.ShapeDtypeStruct((rows,), np.dtype(bool))
    return [*every, mask, *jtu.tree_leaves(numbers.shared)]


def outcome_structs(program: ChunkProgram) -> Outcome:
    """The structs of the outcome of a call's trajectories."""
    solve = dataclasses.replace(program, kind="solve", unit=1, wanted=())
    return solve.outputs[0]


def inexact_leaves(tree: Any) -> list:
    return [x for x in jtu.tree_leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _call(program: ChunkProgram, numbers: Numbers, mask: Any, cotangents: tuple) -> tuple:
    """What each trajectory and each part of a call gives."""
    if program.kind == "solve":
        return _outcome(program.plan, numbers, mask), ()
    if program.kind == "total":
        outcome = _outcome(program.plan, numbers, mask)
        chunks = (program.capacity, program.width)
        part = jax.tree.map(lambda x: x.reshape(*chunks, *x.shape[1:]), (outcome.u, mask))
        return codes_and_counts(outcome), jax.vmap(_total)(*part)
    units = program.capacity // program.unit

    def split(x):
        return x.reshape(units, -1, *x.shape[1:])

    def unit(of_unit):
        every, mask, cotangents = of_unit
        return _reversed(program, numbers._replace(every=every), mask, cotangents)

    each, parts = jax.lax.map(unit, jax.tree.map(split, (numbers.every, mask, cotangents)))
    return jax.tree.map(lambda x: x.reshape(program.rows, *x.shape[2:]), each), parts


def _reversed(program: ChunkProgram, numbers: Numbers, mask: Any, cotangents: tuple) -> tuple:
    """The gradients by the wanted numbers: of each trajectory, and their sum over this unit."""
    wanted = jtu.tree_unflatten(program.structure, program.wanted)
    moving, fixed = eqx.partition(numbers, wanted)

    def primal(moving):
        outcome = _outcome(program.plan, eqx.combine(moving, fixed), mask)
        if program.kind == "pull back":
            return inexact_leaves(outcome), ()
        return _total(outcome.u, mask), codes_and_counts(outcome)

    added, pull_back, counts = jax.vjp(primal, moving, has_aux=True)
    if program.kind == "pull back":
        rows = [mask.reshape(-1, *(1,) * (ct.ndim - 1)) for ct in cotangents]
        cotangent = [
            jnp.where(m, ct, jnp.zeros_like(ct)) for m, ct in zip(rows, cotangents, strict=True)
        ]
        (gradient,) = pull_back(cotangent)
        return gradient.every, gradient.shared
    (gradient,) = pull_back(jax.tree.map(jnp.ones_like, added))
    return (counts, gradient.every), (added, gradient.shared)


def _outcome(plan: Plan, numbers: Numbers, mask: Any) -> Outcome:
    every, indices = numbers.every
    shared, repeat, key, consts = numbers.shared
    lanes = eqx.combine(every, shared)
    return solve_lanes(plan, lanes, indices, repeat, key, consts, mask)


def _total(out: Any, mask: Any) -> Any:
    def masked(x):
        rows = mask.reshape(-1, *(1,) * (x.ndim - 1))
        return total(jnp.where(rows, x, jnp.zeros_like(x)))

    return jax.tree.map(masked, out)


def raw_struct(x: Any) -> Any:
    return jax.eval_shape(raw, x)


#
# Serialised
#


@dataclasses.dataclass(frozen=True)
class Shipped:
    """A program as workers are sent it, and the hash it is kept by."""

    hash: str
    content: Exported | Pickled = dataclasses.field(compare=False, repr=False)


@functools.lru_cache(maxsize=256)
def exported(program: ChunkProgram, platform: str) -> Shipped | None:
    """The serialised program; None where it can't be, as it calls the host."""
    fn = jax.jit(program.function())
    structs = flat_structs(program)
    count = len(jtu.tree_leaves(program.outputs[0]))
    try:
        kernels = kernels_in(fn.trace(*structs).jaxpr)
        export = jax.export.export(fn, platforms=[platform], disabled_checks=safety_checks(kernels))
        content = export(*structs).serialize()
    except (ValueError, NotImplementedError) as e:
        if "callback" not in str(e).lower() and "serializ" not in str(e).lower():
            raise
        return None
    name = hashlib.sha256(content).hexdigest()
    return Shipped(name, Exported({platform: bytes(content)}, count, kernels))


def pickled(program: ChunkProgram, remake: tuple[Callable, tuple]) -> Shipped:
    """The problem that a program came from, to be traced again on the worker.

    **Arguments:** `remake`: a function that makes the job, and its arguments.

    **Raises:** `ValueError` for functions that close over traced values.
    """
    import cloudpickle

    fn, args = remake
    layout = {
        name: getattr(program, name) for name in ("kind", "width", "capacity", "unit", "wanted")
    }
    plan = {name: getattr(program.plan, name) for name in ("saving", "maxiters", "inner")}
    try:
        make = functools.partial(_remade, fn, _without_numbers(args), plan, layout)
        content = cloudpickle.dumps(make)
    except Exception as e:
        raise ValueError(
            "f, prob_func or output_func calls the host, so they are sent to the workers pickled, "
            f"and can't be: {e} Inside jit or grad they may close over no traced value: put "
            "what is differentiated into p or u0."
        ) from e
    count = len(jtu.tree_leaves(program.outputs[0]))
    return Shipped(hashlib.sha256(content).hexdigest(), Pickled(content, count))


def _without_numbers(args: tuple) -> tuple:
    """The arguments of the function that remakes a job, with blanks for numbers: what differs from
    solve to solve is sent as numbers, and makes no other program."""
    ens, options, key, *rest = args
    numbers = jax.tree.map(lambda x: _blank(x) if eqx.is_array(x) else x, (ens.prob.u0, ens.prob.p))
    ens = eqx.tree_at(lambda e: (e.prob.u0, e.prob.p), ens, numbers, is_leaf=lambda x: x is None)
    args = (ens, options, _blank(key), *rest)
    return jax.tree.map(lambda x: _blank(x) if is_tracer(x) else x, args)


def _blank(x: Any) -> Any:
    struct = raw_struct(x)
    with jax.ensure_compile_time_eval():
        return as_before(x, np.zeros(struct.shape, struct.dtype))


def _remade(fn: Callable, args: tuple, plan: dict[str, Any], layout: dict[str, Any]) -> Callable:
    """On the worker: the function of a program."""
    job, _ = fn(*args)
    if plan["saving"] != job.plan.saving:  # of every step, the count is known later
        job = job.replan(**plan)
        job = job if plan["saving"].mode == "ends" else with_output(job)
    indices = np.arange(1)
    lanes = job.trajectories.lanes(indices, 1)
    numbers = numbers_of(lanes, job.plan.batched, indices, 1, job.key, job.output_consts)
    program = program_of("solve", job.plan, jax.tree.map(jnp.asarray, numbers), 1)
    return dataclasses.replace(program, **layout).function()
