"""The two kernels as functions of arrays. Under `jax.vmap`, a mapped axis becomes more trajectories
of the same call."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ...fields import parameters_of
from ...fields.products import is_large
from ...ground.retcode import was_ended
from ...plan.events import EVENT_ROWS
from ...plan.plan import NO_CALLBACK, Plan, RecordedEvents, Result
from ...plan.saving import Saving
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...running.interrupts import NEVER
from ...solution.dense import inner_nodes
from ...solution.events import End
from ...solvers.explicit_runge_kutta import RungeKutta
from ...solvers.switching import StepCounts
from ...tracing.evaluation import equations
from ...tracing.program import Program
from ..base.results import events_in, LoopResult, result_of
from ..derivatives.flow import Flow, own_and_shared, RecordedSolve, widened
from . import kernel, tuning
from .llvm import machine
from .reverse.record import EVENT_CELLS
from .steps import description
from .steps.description import KernelDescription, size_of, with_gradients
from .steps.layout import layout_of, operands_of, trajectories_last
from .xla import launch
from .xla.call import call


def described(
    plan: Plan, lanes: TrajectoryNumbers, n: int, *, wanted: tuple[int, ...] | None = None
) -> KernelDescription:
    """The description of the kernel that solves `n` trajectories, or pulls back for those
    cotangents that are `wanted` (see `flow.Flow`)."""
    solver, on_gpu, here = plan.method.value, plan.engine.on_gpu, machine.current()
    assert isinstance(plan.field, Program)
    return KernelDescription(
        plan.field,
        plan.controlled,
        solver.method,
        solver.controller,
        solver.norm,
        # The number of rows is no part of the code.
        plan.saving._replace(rows=0),
        layout_of(plan, lanes),
        bool(plan.batched.saveat),
        1 if on_gpu else _width(plan, -(-n // _threads(plan, n)), backwards=wanted is not None),
        wanted or (),
        on_gpu or here.has_fma,
        here.has_range,
        on_gpu,
        plan.events,
        plan.form,
        _in_memory(plan),
        saved=plan.chosen,
        in_parts=plan.in_parts,
    )


def _threads(plan: Plan, n: int) -> int:
    """How many threads share the trajectories: one if its lanes can hold them all."""
    width = _width(plan, n)
    return 1 if n <= width else min(plan.threads, -(-n // width))


def _width(plan: Plan, n: int, *, backwards: bool = False) -> int:
    """The number of lanes of a thread, when `n` trajectories are solved."""
    size, dtype, here = math.prod(plan.state.shape), plan.state.dtype, machine.current()
    has_products, is_adaptive = _has_products(plan.field), plan.method.value.adaptive
    crowded = is_adaptive or has_products
    width = width_of(size, dtype, n, here, crowded=crowded, reused=_reused(plan))
    if not _in_memory(plan):
        # (A power of two, as all widths are.)
        fitting = machine.stack_bytes() // (2 * tuning.SPILLED * size * dtype.itemsize)
        width = min(width, 2 ** max(0, fitting.bit_length() - 1))
    if plan.extension is not None and plan.extension.has_clock:
        width = min(width, tuning.VECTORS_WITH_NOISE * here.lanes(dtype))
    if not backwards:
        return width
    _, shared = own_and_shared(plan.field, plan.batched)
    enough = here.registers >= 32
    few = shared <= (tuning.MOST_NEAR if enough else tuning.MOST_NEAR_OTHERWISE) or (
        enough and is_adaptive
    )
    vectors = 1 if has_products and few else tuning.VECTORS_BACKWARDS
    return min(width, vectors * here.lanes(dtype))


def _in_memory(plan: Plan) -> bool:
    """Whether a state is an array in memory: it is large, and nothing needs single components, as
    callbacks, implicit methods, step-size control of a part of the state, and GPUs do."""
    size, is_explicit = math.prod(plan.state.shape), _is_explicit(plan)
    whole = is_explicit and plan.events is None and plan.controlled == size
    return whole and not plan.engine.on_gpu and size >= description.least_in_memory()


def _is_explicit(plan: Plan) -> bool:
    return isinstance(plan.method.value.method, RungeKutta)


def _reused(plan: Plan) -> bool:
    """Whether shared weights are so many that it pays to load each once for several vectors."""
    _, shared = own_and_shared(plan.field, plan.batched)
    least = tuning.REUSED_IN_MEMORY if _in_memory(plan) else tuning.REUSED
    return _is_explicit(plan) and shared >= least and _has_products(plan.field)


@functools.lru_cache(maxsize=256)
def _has_products(field: Program) -> bool:
    """Whether a field has products of matrices that are not written out."""
    return any(x.primitive.name == "dot_general" and is_large(x) for x in equations(field.jaxpr))


def width_of(
    size: int, dtype: np.dtype, n: int, here: machine.Machine, *, crowded: bool, reused: bool
) -> int:
    """The number of lanes: those of several vectors, where registers are left for the state then.
    `crowded`: whether there are many numbers besides the state, as with adaptive steps or products;
    `reused`: whether each load of a weight should serve at least two vectors."""
    most = min(4, here.registers // 8) if crowded else 4
    fitting = [v for v in (4, 2) if v <= most and 4 * v * size <= 3 * here.registers]
    vectors = max(fitting, default=2 if reused else 1)
    widest = min(tuning.MOST_LANES // (2 if crowded else 1), vectors * here.lanes(dtype))
    return min(widest, 2 ** math.ceil(math.log2(max(1, n))))


#
# Forwards
#


def solve(plan: Plan, lanes: TrajectoryNumbers, mask: Array) -> Result:
    """The result of the trajectories in the mask `[n]`; it has times where each has its own."""
    return _mapped(plan, rows_alone=False)(lanes, mask)


def rows(plan: Plan, lanes: TrajectoryNumbers, mask: Array) -> list:
    """See `engine.Engine`."""
    return _mapped(plan, rows_alone=True)(lanes, mask)


def _mapped(plan: Plan, *, rows_alone: bool) -> Callable:
    """`_solve` as a function of the numbers and the mask. An axis that is mapped over makes more
    trajectories of the same call."""
    run = jax.custom_batching.custom_vmap(functools.partial(_solve, plan, rows_alone))

    @run.def_vmap
    def _(size, batched, lanes, mask):
        flow, lanes, mask = widened(Flow(plan, mask.shape[-1]), size, batched, lanes, mask)
        out = _mapped(flow.plan, rows_alone=rows_alone)(lanes, mask)
        if not rows_alone and not plan.own_times:
            # (Along the mapped axis the times may differ; they come from `lanes`.)
            out = out._replace(t=None)
        folded = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return folded, jax.tree.map(lambda _: True, out)

    _.stands_for = plan.stands_for
    return run


def _solve(
    plan: Plan, rows_alone: bool, lanes: TrajectoryNumbers, mask: Array
) -> Result | list[Array] | None:
    n, saving, events, saved = len(mask), plan.saving, plan.events, _saved_rows(plan)
    d = described(plan, lanes, n)
    outputs = [_array(d, n, saved * d.row)]
    if saving.mode == "steps":
        outputs.append(_array(d, n, saved))
    if events is not None:
        outputs.append(_by_row(d, n, plan.event_slots * EVENT_ROWS, d.size, d.dtype))
        outputs.append(_by_row(d, n, plan.max_events * (1 + events.longest), 1, np.int32))
    outputs.append(_counts(d, n))
    found = _run(plan, *_to_solve(d, plan, lanes, mask, outputs))
    *found, counts = found[: len(outputs)]
    of_events: list = []
    if events is not None:
        *found, event_rows, marks = found
        # (As `[trajectory, row, number]`.)
        axis = -1 if d.on_gpu else 1
        of_events = [jnp.moveaxis(x, axis, 0) for x in (event_rows, marks)]
    u, *t = [_trajectories_first(d, x) for x in found]
    rows = [u.reshape(n, saved, *plan.row_shape)]
    if plan.event_slots:
        rows.append(of_events[0].reshape(n, -1, *plan.state.shape))
    if rows_alone:
        return rows
    counted = dict(zip(d.counted, counts[4:], strict=True))
    codes = counts[0].astype(jnp.int8)
    happened, ended = None, None
    if plan.event_slots:
        happened, ended = _events_of(plan, rows[1], of_events[1], codes, counted["events"])
    left = LoopResult(
        rows[0],
        t[0] if saving.mode == "steps" else None,
        counts[3],
        codes,
        counts[1],
        StepCounts(counts[2], counted["stiff"], counted["switches"]) if d.switches else counts[2],
        counted.get("restarts"),
        happened,
        ended,
    )
    return result_of(plan, lanes, left)


def _to_solve(
    d: KernelDescription, plan: Plan, lanes: TrajectoryNumbers, mask: Array, outputs: list
) -> tuple:
    """The arguments of `_run` for the kernel `solve` with these outputs."""
    n, (text, arrays) = len(mask), kernel.solving(d)
    threads = n if d.on_gpu else _threads(plan, n)
    sizes = [arrays] if arrays else []
    given = operands(d, plan, lanes, mask, _saved_rows(plan), *sizes)
    results = outputs + memory_of(threads * arrays)
    return text, "solve", given, results, n, threads, d.width


def _counts(d: KernelDescription, n: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((4 + len(d.counted), n), jnp.int32)


class Steps(NamedTuple):
    """The steps of trajectories. Rows that were not reached are uninitialised.

    - `t [trajectory, row]`, `u [trajectory, row, component]`: where steps begin and end.
    - `inner [trajectory, row, node, component]`: the inner nodes of the step that ends in a row.
    - `rows [trajectory]`: how many rows were reached.
    """

    t: Any
    u: Any
    inner: Any
    rows: Any


def steps(plan: Plan, lanes: TrajectoryNumbers, mask: Array) -> Steps:
    """Every step of the wanted trajectories, without callbacks, on a CPU."""
    n, rows = len(mask), plan.maxiters + 1
    plan = dataclasses.replace(plan, saving=Saving("steps", True, rows))
    d = dataclasses.replace(described(plan, lanes, n), inner=True)
    nodes = len(inner_nodes(d.method.degree))
    outputs = [_array(d, n, rows * d.size), _array(d, n, rows), _counts(d, n)]
    outputs.append(_array(d, n, rows * nodes * d.size))
    u, t, counts, inner, *_ = _run(plan, *_to_solve(d, plan, lanes, mask, outputs))
    u, inner = u.reshape(n, rows, d.size), inner.reshape(n, rows, nodes, d.size)
    return Steps(t, u, inner, counts[3])


def _saved_rows(plan: Plan) -> int:
    return 1 if plan.saving.mode == "ends" else plan.saving.rows


def _by_row(
    d: KernelDescription, n: int, rows: int, size: int, dtype: DTypeLike
) -> jax.ShapeDtypeStruct:
    """The shape and dtype of rows of `size` numbers: see `layout.NumbersOrder.place_in_row`."""
    each = (size, n) if d.on_gpu else (n, size)
    return jax.ShapeDtypeStruct((max(1, rows), *each), dtype)


def _events_of(
    plan: Plan, rows: Any, marks: Any, codes: Any, count: Any
) -> tuple[RecordedEvents | None, End | None]:
    """The events, from their rows `[trajectory, 3 slot, *state]`."""
    n = len(codes)
    there = jnp.arange(plan.max_events, dtype=count.dtype)[None] < count[:, None]
    is_end = was_ended(codes)[:, None]
    slots = jnp.concatenate([is_end, there], axis=1) if plan.keeps_end else there
    slots = jnp.repeat(slots, EVENT_ROWS, axis=1)
    mask = slots.reshape(*slots.shape, *(1,) * len(plan.state.shape))
    found, ended = events_in(plan, jnp.where(mask, rows, jnp.nan))
    if not plan.max_events:
        return None, ended
    which, crossed = jnp.split(marks.reshape(n, plan.max_events, -1), [1], axis=2)
    which = jnp.where(there, which[..., 0], NO_CALLBACK)
    crossed = jnp.where(there[..., None], crossed, 0)
    return RecordedEvents(**found, which=which, crossed=crossed, count=count), ended


def _run(
    plan: Plan,
    text: str,
    name: str,
    operands: list,
    outputs: list,
    items: int,
    threads: int,
    least: int,
) -> list:
    """Call a kernel for `items` of work, by at most `threads` threads with `least` items each."""
    if plan.engine.on_gpu:
        which = launch.PtxKernel(text, name, len(operands), len(outputs))
        return launch.launch(which, threads, operands, outputs)
    return call(text, name, operands, outputs, items=items, threads=threads, least=least)


def _array(d: KernelDescription, n: int, size: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `size` numbers for each trajectory."""
    return jax.ShapeDtypeStruct((size, n) if d.on_gpu else (n, size), d.dtype)


def memory_of(size: int) -> list[jax.ShapeDtypeStruct]:
    """The memory for arrays, of so many bytes."""
    return [jax.ShapeDtypeStruct((size,), np.int8)] if size else []


def _trajectories_first(d: KernelDescription, x: Array) -> Array:
    """A result of the shape of an `_array`, with the trajectories first."""
    return x.T if d.on_gpu else x


def operands(
    d: KernelDescription, plan: Plan, lanes: TrajectoryNumbers, mask: Array, rows: int, *more: int
) -> list:
    """The operands that all kernels of trajectories have; `more` are further sizes."""
    sizes = np.array([len(mask), rows, plan.maxiters, *more], np.int32)
    stop = [] if d.on_gpu else [NEVER if lanes.stop is None else lanes.stop]
    found = [sizes, mask, *stop, *operands_of(plan, lanes, on_gpu=d.on_gpu)]
    if d.saving.mode == "times":
        times = jnp.asarray(lanes.saveat, d.dtype)
        found.append(trajectories_last(times) if d.on_gpu and d.own_times else times)
    if d.events is not None:
        known = plan.max_events, plan.last_event, int(plan.keeps_end)
        found.append(np.array(known, np.int32))
    return found


#
# In reverse
#


def pull_back(
    flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, cotangents: Sequence
) -> list:
    """Pull back through the trajectories that are `ok`: see `engine.Engine`."""
    plan, n, groups = flow.plan, flow.n, flow.groups
    d = described(plan, lanes, n, wanted=flow.wanted)
    if d.sums_in_memory:
        # The bits of sums don't depend on how many threads there are, so neither does the width.
        d = dataclasses.replace(d, width=_width(plan, n // groups, backwards=True))
    back = kernel.pulling_back(d)
    which, avals = with_gradients(d), parameters_of(plan.field)
    own, shared = (size_of(d, part) for part in which)
    share = (_record_on_gpu if d.on_gpu else _record_on_cpu)(d, flow, back, shared)
    rows, *of_events = (x.reshape(n, -1, d.size) for x in cotangents)
    sizes = *share.sizes, *([back.arrays] if back.arrays else [])
    given = operands(d, plan, lanes, known.ok, _saved_rows(plan), *sizes)
    given += [trajectories_last(rows) if d.on_gpu else rows, known.reached.astype(jnp.int32)]
    if d.events is not None:
        happened, axis = known.happened, -1 if d.on_gpu else 1
        none = jnp.zeros(n, jnp.int32)
        given.append(none if happened is None else happened.astype(jnp.int32))
        given += [jnp.moveaxis(x, 0, axis) for x in of_events] or [jnp.zeros(1, d.dtype)]
    outputs = [_array(d, n, d.size), _array(d, n, max(1, own))]
    outputs.append(_array(d, share.sums, max(1, shared)))
    outputs += share.memory + memory_of(share.threads * back.arrays)
    work = share.items, share.threads, share.least
    results = _run(plan, back.text, "pull_back", given, outputs, *work)
    to_u0, to_own, to_shared = [_trajectories_first(d, x) for x in results[:3]]
    to_shared = to_shared.reshape(groups, -1, max(1, shared)).sum(1)
    found = {}
    for part, flat in zip(which, (to_own, to_shared), strict=True):
        found |= dict(zip(part, taken_apart(flat, [avals[i] for i in part]), strict=True))
    return [to_u0.reshape(n, *plan.state.shape), *(found[i] for i in sorted(found))]


def taken_apart(flat: Array, avals: Sequence) -> list:
    """The arrays whose numbers are the columns of `flat`, one after the other: `[row, ...]`."""
    ends = itertools.accumulate((math.prod(x.shape) for x in avals), initial=0)
    # The number of rows is spelled out instead of -1, as an array may be empty.
    return [
        flat[:, start:end].reshape(len(flat), *aval.shape).astype(aval.dtype)
        for (start, end), aval in zip(itertools.pairwise(ends), avals, strict=True)
    ]


class _WorkShare(NamedTuple):
    """How the work of `pull_back` is shared out: the number of `threads`; further `sizes` (see
    `kernel.TURNS`); the memory of the record and of factors; the number of `items`, of which
    a thread gets at `least` so many; and the number of sums of shared parameters' cotangents."""

    threads: int
    sizes: tuple[int, ...]
    memory: list[jax.ShapeDtypeStruct]
    items: int
    least: int
    sums: int


def _record_on_cpu(
    d: KernelDescription, flow: Flow, back: kernel.PullBackKernel, shared: int
) -> _WorkShare:
    in_memory = d.sums_in_memory
    threads = _threads(flow.plan, flow.n)
    together = flow.n // flow.groups if in_memory else flow.n
    of_lane = tuning.GROUP if d.parts is None else tuning.GROUP_WITH_RESIDUALS
    group = min(together, d.width * (of_lane if d.controller else tuning.GROUP_OF_FIXED_STEPS))
    turn = d.recorded * d.width
    of_turn = turn * d.dtype.itemsize
    # A group has at most as many turns as the trajectories of one lane have together.
    most = (flow.plan.maxiters + 1) * (group // d.width + 2)
    turns = _segment_turns(most, tuning.SEGMENT_BYTES // of_turn)
    least = min(tuning.LEAST_TURNS * of_turn, tuning.LARGEST_SEGMENTS // 2)
    turns = min(turns, max(2, max(tuning.LARGEST_SEGMENTS // threads, least) // of_turn))
    checkpoints = _checkpoints(most, turns, back)
    events = (group + 1) * EVENT_CELLS * d.width
    # (The last turn also passes an evaluation on, for which the turn after it has the place.)
    passed_on = (d.of_step + d.evaluation) * d.width if d.passes_on else 0
    lengths = turns * turn + passed_on, events, checkpoints * back.checkpoint
    sizes = turns, group, checkpoints, *lengths
    if not in_memory:
        return _WorkShare(threads, sizes, _memory(d, threads, *lengths), flow.n, d.width, flow.n)
    fitting = tuning.SUMS_OF_BLOCKS // (max(1, shared) * d.dtype.itemsize * flow.groups)
    most_blocks = min(tuning.MOST_BLOCKS, max(tuning.LEAST_BLOCKS, fitting))
    block = group * -(-together // (group * most_blocks))
    blocks = flow.groups * -(-together // block)
    threads = min(threads, blocks)
    memory = _memory(d, threads, *lengths, back.factors)
    return _WorkShare(threads, (*sizes, back.factors, together, block), memory, blocks, 1, blocks)


def _record_on_gpu(
    d: KernelDescription, flow: Flow, back: kernel.PullBackKernel, shared: int
) -> _WorkShare:
    """`_record_on_cpu` for a GPU, where each thread has one trajectory at a time."""
    # A trajectory that is lost takes one more turn.
    most = flow.plan.maxiters + 1
    turns = _segment_turns(most, tuning.TURNS_ON_GPU)
    checkpoints = _checkpoints(most, turns, back)
    each = turns * d.recorded, 2 * EVENT_CELLS, checkpoints * back.checkpoint
    bytes_ = sum(x.size * x.dtype.itemsize for x in _memory(d, 1, *each))
    bytes_ += shared * d.dtype.itemsize
    group = flow.n // flow.groups
    of_group = min(group, max(1, tuning.WORKSPACE_ON_GPU // bytes_ // flow.groups))
    threads = flow.groups * of_group
    sizes = turns, group, checkpoints, of_group
    return _WorkShare(threads, sizes, _memory(d, threads, *each), flow.n, 1, threads)


def _segment_turns(most: int, least: int) -> int:
    """The number of turns of a segment, of `most` in all: about its square root, or `least`."""
    return min(most, max(least, math.isqrt(most) + 1))


def _checkpoints(most: int, turns: int, back: kernel.PullBackKernel) -> int:
    """How many checkpoints to make room for: one for each segment, if these are not too many."""
    fitting = min(tuning.MOST_CHECKPOINTS, max(2, tuning.MOST_KEPT // back.checkpoint))
    return min(-(-most // turns) + 1, fitting & -2)


def _memory(d: KernelDescription, threads: int, *sizes: int) -> list[jax.ShapeDtypeStruct]:
    """The memory of all threads for turns, events, checkpoints and factors of these sizes."""
    kinds = zip(sizes, (d.dtype, np.int32, np.int8, d.dtype), strict=False)
    return [jax.ShapeDtypeStruct((threads * size,), dtype) for size, dtype in kinds]
