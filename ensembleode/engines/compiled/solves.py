"""The two kernels as functions of arrays. Under `jax.vmap`, a mapped axis becomes more trajectories
of the same call."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ...core.events import EVENT_ROWS
from ...core.interrupts import NEVER
from ...core.lane import Lane
from ...core.plan import Happened, NO_CALLBACK, Plan, Result
from ...core.saving import Saving
from ...dense import inner_nodes
from ...events import End
from ...fields import parameters_of
from ...fields.products import is_large
from ...ground.retcode import ReturnCode
from ...solvers.runge_kutta import RungeKutta
from ...solvers.switching import Tried
from ...tracing.program import equations, Program
from ..flow import Flow, Known, own_and_shared, widened
from ..results import events_in, Left, result_of
from . import kernel, launch, machine
from .call import call
from .description import Description, is_in_memory, size_of, with_gradients
from .numbers import layout_of, operands_of, trajectories_last
from .record import EVENT_CELLS


# The bytes of the turns of a segment, which should stay in a cache.
_SEGMENT = 2**20
# With residuals of the field, or a large state, a turn may have a hundred kilobytes. The segments
# of all threads have at most so many bytes, unless a thread's would have fewer turns than these,
# which those of a group mostly fit in, and less than half of the bytes. (If a program needs more
# than 32 MB in all, glibc hands them back to the system after each call, and their pages are
# cleared for the next: with two threads, gradients of 64 to 256 neurons would take up to 1.14 times
# as long.)
_LARGEST_SEGMENTS, _LEAST_TURNS = 15_000_000, 32
# The largest number of checkpoints of a thread, and of their bytes.
_MOST_CHECKPOINTS, _MOST_KEPT = 2**10, 2**28
# On the way back, the number of trajectories of a group for each lane; they share the memory of a
# segment. With fixed steps the lanes end together, so longer groups would only mean more segments,
# and more turns run again. With residuals, a group should fit in one segment.
_GROUP, _GROUP_WITH_RESIDUALS, _GROUP_OF_FIXED_STEPS = 4, 2, 1
# On the way back, the number of vectors for each number; a step has several times as many numbers
# as forwards. With 32 registers, the products of a network have enough to do with one vector, and
# lanes with steps of their own wait for fewer others: for 16 to 256 neurons, adaptive gradients
# take 0.81, 0.80, 0.90, 0.82 and 0.96 times as long, those of fixed steps 0.95, 0.94, 0.99, 1.05
# and 1.05 (by benchmarks/networks.py). So with fixed steps, weights that leave the nearest cache
# have two. With 16 registers there are too few sums for a weight that is loaded: one vector takes
# 0.96, 0.97, 1.07, 1.11 and 1.18 times as long as two, and fixed steps 1.0, 1.08, 1.07, 1.01, 1.0.
_VECTORS_BACKWARDS, _MOST_NEAR, _FEW = 2, 2**13, 2**10
# The largest number of lanes. With adaptive steps, lanes wait for one another, so there are half as
# many. (By benchmarks/limits.py, in float32 with AVX-512: with 64 lanes, Lorenz takes 0.73 times as
# long as with 32 by fixed steps, and 1.05 times by adaptive ones.)
MOST_LANES = 64
# With as many shared weights, of states in registers and in memory, products have two vectors even
# where these leave no registers for the state. (By benchmarks/engine_limits.py with AVX2, dense
# matrices for 16, 64 and 256 components take 0.73, 0.83 and 0.69 times as long as with one, 0.71,
# 0.79 and 0.69 times with their gradients; networks with 128 neurons for 16 to 1,000 components
# 0.63 to 0.89 times. With fewer weights it may take 1.4 times as long, without products 1.5 times.)
_REUSED, _REUSED_IN_MEMORY = 3 * 2**8, 2**8
# So many numbers of each component and lane, at most, LLVM spills to the stack where a state is
# written out (measured: 10 to 20 in a solve, 25 to 40 in its reverse).
_SPILLED = 40
# The largest number of blocks of trajectories whose gradients by shared parameters are summed up
# one by one in memory; they are fewer, but no fewer than keep some threads busy, if their sums
# would have more bytes than these.
_MOST_BLOCKS, _LEAST_BLOCKS, _SUMS = 256, 32, 8_000_000
# On a GPU: the least number of turns of a segment (longer segments mean fewer turns run again), and
# the bytes of the records of all threads. If these don't suffice, fewer threads run.
_TURNS = 512
_WORKSPACE = 2**30


def described(
    plan: Plan, lanes: Lane, n: int, *, wanted: tuple[int, ...] | None = None
) -> Description:
    """The description of the kernel that solves `n` trajectories or, for the cotangents that are
    `wanted` (see `flow.Flow`), pulls back through them."""
    solver, on_gpu, here = plan.method.value, plan.engine.on_gpu, machine.current()
    assert isinstance(plan.field, Program)
    return Description(
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
    )


def _threads(plan: Plan, n: int) -> int:
    """How many threads of the CPU share the trajectories: one thread if its lanes can hold them
    all."""
    width = _width(plan, n)
    return 1 if n <= width else min(plan.threads, -(-n // width))


def _width(plan: Plan, n: int, *, backwards: bool = False) -> int:
    """The number of lanes of a thread, when `n` trajectories are solved."""
    size, dtype, here = math.prod(plan.state.shape), plan.state.dtype, machine.current()
    has_products = _has_products(plan.field)
    crowded = plan.method.value.controller is not None or has_products
    width = width_of(size, dtype, n, here, crowded=crowded, reused=_reused(plan))
    if not _in_memory(plan):
        # (A power of two, as all widths are.)
        fitting = machine.stack_bytes() // (2 * _SPILLED * size * dtype.itemsize)
        width = min(width, 2 ** max(0, fitting.bit_length() - 1))
    if not backwards:
        return width
    _, shared = own_and_shared(plan.field, plan.batched)
    is_adaptive = plan.method.value.controller is not None
    if here.registers < 32:
        alone = has_products and shared <= _FEW
    else:
        alone = has_products and (is_adaptive or shared <= _MOST_NEAR)
    return min(width, (1 if alone else _VECTORS_BACKWARDS) * here.lanes(dtype))


def _in_memory(plan: Plan) -> bool:
    """See `is_in_memory`."""
    size, on_gpu = math.prod(plan.state.shape), plan.engine.on_gpu
    method = plan.method.value.method
    return is_in_memory(size, plan.controlled, method, plan.events, on_gpu=on_gpu)


def _reused(plan: Plan) -> bool:
    """Whether shared weights are so many that it pays to load each once for several vectors."""
    _, shared = own_and_shared(plan.field, plan.batched)
    is_explicit = isinstance(plan.method.value.method, RungeKutta)
    least = _REUSED_IN_MEMORY if _in_memory(plan) else _REUSED
    return is_explicit and shared >= least and _has_products(plan.field)


@functools.lru_cache(maxsize=256)
def _has_products(field: Program) -> bool:
    """Whether a field has products of matrices that are not written out."""
    return any(x.primitive.name == "dot_general" and is_large(x) for x in equations(field.jaxpr))


def width_of(
    size: int,
    dtype: Any,
    n: int,
    here: machine.Machine,
    *,
    crowded: bool = True,
    reused: bool = False,
) -> int:
    """The number of lanes: those of several vectors, which hide each other's latency. There are
    only as many vectors as leave registers free for the state, and no more than there are
    trajectories.

    **Arguments:** `crowded`: whether there are many numbers besides the state, those of an adaptive
    step or the sums of a product. With 16 registers two vectors do better than four then (measured
    by benchmarks/limits.py, with AVX2; a network with 64 neurons takes 0.77 times as long).
    `reused`: whether there are weights of which each should be loaded for two vectors at least.
    """
    most = min(4, here.registers // 8) if crowded else 4
    fitting = [v for v in (4, 2) if v <= most and 4 * v * size <= 3 * here.registers]
    vectors = max(fitting, default=2 if reused else 1)
    widest = min(MOST_LANES // (2 if crowded else 1), vectors * here.lanes(dtype))
    return min(widest, 2 ** math.ceil(math.log2(max(1, n))))


#
# Forwards
#


def solve(plan: Plan, lanes: Lane, mask: Any) -> Result:
    """The result of these trajectories; it has times only where each trajectory has its own.

    **Arguments:**

    - `lanes`: the numbers of the trajectories, with a leading axis where `plan.batched` says so.
    - `mask`: which trajectories are wanted: [n].
    """
    return _mapped(plan, rows_alone=False)(lanes, mask)


def rows(plan: Plan, lanes: Lane, mask: Any) -> list[Any]:
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
        return _folded(out, size), jax.tree.map(lambda _: True, out)

    _.stands_for = plan.stands_for
    return run


def _solve(plan: Plan, rows_alone: bool, lanes: Lane, mask: Any) -> Any:
    n, saving, events = len(mask), plan.saving, plan.events
    d = described(plan, lanes, n)
    saved = _saved_rows(plan)
    outputs = [_array(d, n, saved * d.size)]
    if saving.mode == "steps":
        outputs.append(_array(d, n, saved))
    if events is not None:
        outputs.append(_by_row(d, n, plan.event_slots * EVENT_ROWS, d.size))
        outputs.append(_by_row(d, n, plan.max_events * (1 + events.longest), 1, np.int32))
    outputs.append(_counts(d, n))
    found = _run(plan, *_to_solve(d, plan, lanes, mask, outputs))
    *found, counts = found[: len(outputs)]
    of_events: list = []
    if events is not None:
        of_events = [_trajectories_before_rows(d, x) for x in found[-2:]]
        found = found[:-2]
    u, *t = [_trajectories_first(d, x) for x in found]
    rows = [u.reshape(n, saved, *plan.state.shape)]
    if plan.event_slots:
        rows.append(of_events[0].reshape(n, -1, *plan.state.shape))
    if rows_alone:
        return rows
    counted = dict(zip(d.counted, counts[4:], strict=True))
    codes = counts[0].astype(jnp.int8)
    happened, ended = None, None
    if plan.event_slots:
        happened, ended = _events_of(plan, rows[1], of_events[1], codes, counted["events"])
    left = Left(
        rows[0],
        t[0] if saving.mode == "steps" else None,
        counts[3],
        codes,
        counts[1],
        Tried(counts[2], counted["stiff"], counted["switches"]) if d.switches else counts[2],
        counted.get("restarts"),
        happened,
        ended,
    )
    return result_of(plan, lanes, left)


def _to_solve(d: Description, plan: Plan, lanes: Lane, mask: Any, outputs: list) -> tuple:
    """The arguments of `_run` for the kernel `solve` with these outputs."""
    n = len(mask)
    threads = n if d.on_gpu else _threads(plan, n)
    text, arrays = kernel.solving(d)
    given = operands(d, plan, lanes, mask, _saved_rows(plan), *_lengths(arrays))
    results = outputs + _arrays(threads * arrays)
    return text, "solve", given, results, n, threads, d.width


def _counts(d: Description, n: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((4 + len(d.counted), n), jnp.int32)


class Steps(NamedTuple):
    """The steps of trajectories. What was not reached is uninitialised.

    - `t [trajectory, row]`, `u [trajectory, row, component]`: where steps begin and end.
    - `inner [trajectory, row, node, component]`: the states at the inner nodes of the step that
        ends in a row (see `dense.inner_nodes`).
    - `rows [trajectory]`: how many rows were reached.
    """

    t: Any
    u: Any
    inner: Any
    rows: Any


def steps(plan: Plan, lanes: Lane, mask: Any) -> Steps:
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
    d: Description, n: int, rows: int, size: int, dtype: Any = None
) -> jax.ShapeDtypeStruct:
    """The shape and dtype of rows of `size` numbers that all trajectories have: see
    `numbers.Order.place_in_row`."""
    rows = max(1, rows)
    return jax.ShapeDtypeStruct(
        (rows, size, n) if d.on_gpu else (rows, n, size), np.dtype(dtype or d.dtype)
    )


def _trajectories_before_rows(d: Description, x: Any) -> Any:
    """A result of the shape of `_by_row` as `[trajectory, row, number]`."""
    return jnp.moveaxis(x, -1, 0) if d.on_gpu else jnp.swapaxes(x, 0, 1)


def _rows_before_trajectories(d: Description, x: Any) -> Any:
    """The inverse of `_trajectories_before_rows`."""
    return jnp.moveaxis(x, 0, -1) if d.on_gpu else jnp.swapaxes(x, 0, 1)


def _events_of(
    plan: Plan, rows: Any, marks: Any, codes: Any, count: Any
) -> tuple[Happened | None, End | None]:
    """The events, from their rows `[trajectory, 3 slot, *state]`."""
    n = len(codes)
    there = jnp.arange(plan.max_events, dtype=count.dtype)[None] < count[:, None]
    is_end = (codes == ReturnCode.Terminated.value)[:, None]
    slots = jnp.concatenate([is_end, there], axis=1) if plan.keeps_end else there
    slots = jnp.repeat(slots, EVENT_ROWS, axis=1)
    mask = slots.reshape(*slots.shape, *(1,) * len(plan.state.shape))
    found, ended = events_in(plan, jnp.where(mask, rows, jnp.nan))
    if not plan.max_events:
        return None, ended
    which, crossed = jnp.split(marks.reshape(n, plan.max_events, -1), [1], axis=2)
    which = jnp.where(there, which[..., 0], NO_CALLBACK)
    crossed = jnp.where(there[..., None], crossed, 0)
    return Happened(**found, which=which, crossed=crossed, count=count), ended


def _run(
    plan: Plan,
    text: str,
    name: str,
    operands: list,
    outputs: list,
    items: int,
    threads: int,
    least: int,
) -> list[Any]:
    """Call a kernel for so many items of work, which are trajectories or blocks of them; on a CPU,
    with at most `threads` threads, each of which gets at least `least` items."""
    if plan.engine.on_gpu:
        which = launch.Kernel(text, name, len(operands), len(outputs))
        return launch.launch(which, threads, operands, outputs)
    return call(text, name, operands, outputs, items=items, threads=threads, least=least)


def _array(d: Description, n: int, size: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `size` numbers for each trajectory; the dtype is by default that of
    the state."""
    return jax.ShapeDtypeStruct((size, n) if d.on_gpu else (n, size), dtype or d.dtype)


def _lengths(arrays: int) -> tuple[int, ...]:
    """The sizes that follow all others where a thread has so many bytes of arrays."""
    return (arrays,) if arrays else ()


def _arrays(size: int) -> list[jax.ShapeDtypeStruct]:
    """The memory for arrays, of so many bytes."""
    return [jax.ShapeDtypeStruct((size,), np.int8)] if size else []


def _trajectories_first(d: Description, x: Any) -> Any:
    """A result of the shape of an `_array`, with the trajectories first."""
    return x.T if d.on_gpu else x


def operands(
    d: Description, plan: Plan, lanes: Lane, mask: Any, rows: int, *more: int
) -> list[Any]:
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


def pull_back(flow: Flow, lanes: Lane, known: Known, cotangents: Sequence) -> list:
    """Pull back through the trajectories that are `ok`: see `engine.Engine`."""
    plan, n, groups = flow.plan, flow.n, flow.groups
    d = described(plan, lanes, n, wanted=flow.wanted)
    if d.sums_in_memory:
        # The bits of sums don't depend on how many threads there are, so neither does the width.
        d = dataclasses.replace(d, width=_width(plan, n // groups, backwards=True))
    back = kernel.pulling_back(d)
    which = with_gradients(d)
    avals = parameters_of(plan.field)
    own, shared = (size_of(d, part) for part in which)
    record = _record_on_gpu if d.on_gpu else _record_on_cpu
    share = record(d, flow, back, shared)
    rows, *of_events = (x.reshape(n, -1, d.size) for x in cotangents)
    sizes = *share.sizes, *_lengths(back.arrays)
    given = operands(d, plan, lanes, known.ok, _saved_rows(plan), *sizes)
    given += [trajectories_last(rows) if d.on_gpu else rows, known.reached.astype(jnp.int32)]
    if d.events is not None:
        happened = known.happened
        none = jnp.zeros(n, jnp.int32)
        given.append(none if happened is None else happened.astype(jnp.int32))
        given += [_rows_before_trajectories(d, x) for x in of_events] or [jnp.zeros(1, d.dtype)]
    outputs = [_array(d, n, d.size), _array(d, n, max(1, own))]
    outputs.append(_array(d, share.sums, max(1, shared)))
    outputs += share.memory + _arrays(share.threads * back.arrays)
    of_work = share.items, share.threads, share.least
    results = _run(plan, back.text, "pull_back", given, outputs, *of_work)
    to_u0, to_own, to_shared = [_trajectories_first(d, x) for x in results[:3]]
    to_shared = to_shared.reshape(groups, -1, max(1, shared)).sum(1)
    found = {}
    for part, flat in zip(which, (to_own, to_shared), strict=True):
        found |= dict(zip(part, taken_apart(flat, [avals[i] for i in part]), strict=True))
    return [to_u0.reshape(n, *plan.state.shape), *(found[i] for i in sorted(found))]


def taken_apart(flat: Any, avals: Sequence[Any]) -> list[Any]:
    """The arrays whose numbers are the columns of `flat`, one after the other: `[row, ...]`."""
    found, start = [], 0
    for aval in avals:
        end = start + math.prod(aval.shape)
        # The number of rows is spelled out instead of -1, as an array may be empty.
        each = flat[:, start:end].reshape(flat.shape[0], *aval.shape)
        found.append(each.astype(aval.dtype))
        start = end
    return found


class _Share(NamedTuple):
    """How the work of `pull_back` is shared out.

    - `threads`: the number of threads.
    - `sizes`: the other sizes (see `kernel.TURNS`).
    - `memory`: the memory of the record and of factors.
    - `items`, `least`: how many items of work there are, and how many at least a thread gets.
    - `sums`: how many sums of shared parameters' cotangents there are.
    """

    threads: int
    sizes: tuple[int, ...]
    memory: list[jax.ShapeDtypeStruct]
    items: int
    least: int
    sums: int


def _record_on_cpu(d: Description, flow: Flow, back: kernel.PullingBack, shared: int) -> _Share:
    in_memory = d.sums_in_memory
    threads = _threads(flow.plan, flow.n)
    together = flow.n // flow.groups if in_memory else flow.n
    of_lane = _GROUP if d.parts is None else _GROUP_WITH_RESIDUALS
    group = min(together, d.width * (of_lane if d.controller else _GROUP_OF_FIXED_STEPS))
    turn = d.recorded * d.width
    of_turn = turn * d.dtype.itemsize
    # The turns of a group are at most those of a lane's trajectories.
    most = (flow.plan.maxiters + 1) * (group // d.width + 2)
    turns = _segment_turns(most, _SEGMENT // of_turn)
    least = min(_LEAST_TURNS * of_turn, _LARGEST_SEGMENTS // 2)
    turns = min(turns, max(2, max(_LARGEST_SEGMENTS // threads, least) // of_turn))
    checkpoints = _checkpoints(most, turns, back)
    events = (group + 1) * EVENT_CELLS * d.width
    # (The last turn passes an evaluation on, to its place in a turn after it.)
    passed_on = (d.of_step + d.evaluation) * d.width if d.passes_on else 0
    lengths = turns * turn + passed_on, events, checkpoints * back.checkpoint
    sizes = turns, group, checkpoints, *lengths
    if not in_memory:
        memory = _memory(d, *(threads * length for length in lengths))
        return _Share(threads, sizes, memory, flow.n, d.width, flow.n)
    fitting = _SUMS // (max(1, shared) * d.dtype.itemsize * flow.groups)
    most_blocks = min(_MOST_BLOCKS, max(_LEAST_BLOCKS, fitting))
    block = group * -(-together // (group * most_blocks))
    blocks = flow.groups * -(-together // block)
    threads = min(threads, blocks)
    memory = _memory(d, *(threads * length for length in lengths))
    memory.append(jax.ShapeDtypeStruct((threads * back.factors,), d.dtype))
    sizes = *sizes, back.factors, together, block
    return _Share(threads, sizes, memory, blocks, 1, blocks)


def _record_on_gpu(d: Description, flow: Flow, back: kernel.PullingBack, shared: int) -> _Share:
    """`_record_on_cpu` for a GPU. Every thread has memory for one trajectory at a time, and each
    group has as many threads."""
    # A trajectory that is lost takes one more turn.
    most = flow.plan.maxiters + 1
    turns = _segment_turns(most, _TURNS)
    checkpoints = _checkpoints(most, turns, back)
    each = turns * d.recorded, 2 * EVENT_CELLS, checkpoints * back.checkpoint
    bytes_ = sum(math.prod(x.shape) * x.dtype.itemsize for x in _memory(d, *each))
    bytes_ += shared * d.dtype.itemsize
    group = flow.n // flow.groups
    of_group = min(group, max(1, _WORKSPACE // bytes_ // flow.groups))
    threads = flow.groups * of_group
    memory = _memory(d, *(size * threads for size in each))
    return _Share(threads, (turns, group, checkpoints, of_group), memory, flow.n, 1, threads)


def _segment_turns(most: int, least: int) -> int:
    """The number of turns of a segment: about the square root of `most`, the number of all turns,
    or `least` if that is more."""
    return min(most, max(least, math.isqrt(most) + 1))


def _checkpoints(most: int, turns: int, back: kernel.PullingBack) -> int:
    """How many checkpoints there is room for: those of all segments, if that is not too many."""
    fitting = min(_MOST_CHECKPOINTS, max(2, _MOST_KEPT // back.checkpoint))
    return min(-(-most // turns) + 1, fitting & -2)


def _memory(d: Description, turns: int, events: int, kept: int) -> list[jax.ShapeDtypeStruct]:
    kinds = zip((turns, events, kept), (d.dtype, np.int32, np.int8), strict=True)
    return [jax.ShapeDtypeStruct((size,), dtype) for size, dtype in kinds]


#
# Wider
#


def _folded(out: Any, size: int) -> Any:
    """The results of `size` times as many trajectories, with the mapped axis first again."""
    return jtu.tree_map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
