"""The two kernels as functions of arrays, which `jax.vmap` makes wider: an axis that is mapped over
becomes more trajectories of the same call."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ...core.events import EVENT_ROWS
from ...core.interrupts import NEVER
from ...core.lane import Lane
from ...core.plan import Happened, Plan
from ...fields import parameters_of
from ...tracing.program import Program
from ..flow import Known, widened
from ..results import Counts, Saved
from . import kernel, launch, machine
from .call import call, Share
from .description import Description
from .equations import size_of, with_gradients
from .numbers import layout_of, operands_of, trajectories_last
from .record import EVENT_CELLS


# Bytes of the turns of a segment: as much as stays in a cache.
_SEGMENT = 2**20
# On the way back: trajectories of a group, for each lane, which share the room of a segment. (With
# fixed steps lanes end together, and a longer group only means more segments, so more runs.)
_GROUP, _GROUP_OF_FIXED_STEPS = 4, 1
# And vectors a number: a step has several times as many numbers as forwards.
_VECTORS_BACKWARDS = 2
_MOST_LANES = 32
# On a GPU: turns of a segment, at least (longer ones need fewer runs), and the bytes that the
# records of all threads take: where they would be more, there are fewer threads.
_TURNS = 512
_WORKSPACE = 2**30


class Setup(NamedTuple):
    """What a call is for, but for the numbers: `flow.Setup` of the two kernels.

    - `controlled`: how many components of the state step-size control looks at (the first ones).
    - `n`: how many trajectories; `groups`: how many groups of as many, each of which has its own
        sum of the gradients by shared parameters.
    """

    plan: Plan
    controlled: int
    n: int
    groups: int = 1

    def widens(self, size: int) -> bool:
        del size
        return True

    def rows(self, lanes: Lane, known: Known) -> Any:
        return solve(self, lanes, known.ok).rows

    def pull_back(self, lanes: Lane, known: Known, cotangent: Any) -> list:
        return pull_back(self, lanes, known, cotangent)

    def description(self, lanes: Lane, *, backwards: bool = False) -> Description:
        plan, solver = self.plan, self.plan.method.value
        assert isinstance(plan.field, Program)
        here = machine.current()
        return Description(
            plan.field,
            self.controlled,
            solver.method,
            solver.controller,
            solver.norm,
            # The number of rows is no part of the code.
            plan.saving._replace(rows=0),
            layout_of(plan, lanes),
            bool(plan.batched.saveat),
            1 if self.on_gpu else self._width(-(-self.n // self.threads), backwards=backwards),
            self.on_gpu or here.has_fma,
            self.on_gpu,
            plan.events,
        )

    @property
    def on_gpu(self) -> bool:
        return self.plan.engine.on_gpu

    @property
    def threads(self) -> int:
        """How many threads of the CPU share the trajectories: one where they fit into its lanes."""
        width = self._width(self.n)
        return 1 if self.n <= width else min(self.plan.threads, -(-self.n // width))

    def _width(self, n: int, *, backwards: bool = False) -> int:
        """How many lanes a thread has that solves so many trajectories."""
        size, adaptive = math.prod(self.plan.state.shape), self.plan.method.value.controller
        here = machine.current()
        width = width_of(size, self.plan.state.dtype, n, here, adaptive=adaptive is not None)
        most = _VECTORS_BACKWARDS * here.lanes(self.plan.state.dtype)
        return min(width, most) if backwards else width


def width_of(size: int, dtype: Any, n: int, here: machine.Machine, *, adaptive: bool = True) -> int:
    """How many lanes: as many vectors a number as hide the latency of each other, and for which the
    state leaves registers, but no more lanes than trajectories.

    (An adaptive step has so many numbers of its own that with 16 registers two vectors do better
    than four; measured by benchmarks/limits.py, with AVX2.)
    """
    most = min(4, here.registers // 8) if adaptive else 4
    fitting = [v for v in (4, 2) if v <= most and 4 * v * size <= 3 * here.registers]
    vectors = fitting[0] if fitting else 1
    widest = min(_MOST_LANES, vectors * here.lanes(dtype))
    return min(widest, 2 ** math.ceil(math.log2(max(1, n))))


#
# Forwards
#


class Found(NamedTuple):
    """What the kernel has written, the trajectories first.

    - `rows [trajectory, row, *state]`: what is saved, the last state alone where only ends are; and
        then those of events (see `saved_rows.Outputs`).
    - `t [trajectory, row]`: where every step is saved, their times; `length`: how many rows.
    - `marks [trajectory, number]`, `count`: of events, where there are callbacks.
    """

    rows: Any
    t: Any
    length: Any
    counts: Counts
    marks: Any
    count: Any


def solve(setup: Setup, lanes: Lane, mask: Any) -> Found:
    """Solve.

    **Arguments:**

    - `lanes`: the numbers, the trajectories first where `setup.plan.batched` says so.
    - `mask`: which are wanted: [n].
    """
    run = jax.custom_batching.custom_vmap(functools.partial(_solve, setup))

    @run.def_vmap
    def _(size, batched, lanes, mask):
        wide, lanes, mask = widened(setup, size, batched, lanes, mask)
        out = solve(wide, lanes, mask)
        return _folded(out, size), jax.tree.map(lambda _: True, out)

    _.stands_for = setup.plan.stands_for
    return run(lanes, mask)


def _solve(setup: Setup, lanes: Lane, mask: Any) -> Found:
    plan, n = setup.plan, setup.n
    d = setup.description(lanes)
    saving, events, room = plan.saving, plan.events, plan.max_events
    rows = _saved_rows(plan)
    outputs = [_array(d, n, (rows + room * EVENT_ROWS) * d.size)]
    if saving.mode == "steps":
        outputs.append(_array(d, n, rows))
    if events is not None:
        marks = max(1, room * (1 + events.longest))
        outputs.append(_array(d, n, marks, np.dtype(np.int32)))
    outputs.append(jax.ShapeDtypeStruct((4 + len(d.counted), n), jnp.int32))
    operands = _operands(d, setup, lanes, mask, rows)
    threads = n if d.on_gpu else setup.threads
    *found, counts = _run(d, kernel.solving(d), "solve", threads, n, operands, outputs)
    u, *more = [_trajectories_first(d, x) for x in found]
    u = u.reshape(n, rows + room * EVENT_ROWS, *plan.state.shape)
    counted = dict(zip(d.counted, counts[4:], strict=True))
    codes = Counts(counts[0].astype(jnp.int8), counts[1], counts[2], counted.get("restarts"))
    marks = None if events is None else more.pop()
    length = None if saving.mode == "ends" else counts[3]
    return Found(u, more[0] if more else None, length, codes, marks, counted.get("events"))


def _saved_rows(plan: Plan) -> int:
    return 1 if plan.saving.mode == "ends" else plan.saving.rows


def parted(plan: Plan, found: Found) -> tuple[Any, Saved, Counts, Happened | None]:
    """The last states where nothing else is saved, what is saved, the counts, and the events where
    there are callbacks whose events are kept."""
    rows = _saved_rows(plan)
    u, happened = found.rows[:, :rows], None
    if plan.events is not None:
        happened = _happened(plan, found.rows[:, rows:], found.marks, found.count)
    if plan.saving.mode == "ends":
        return u[:, 0], Saved(None, None, None), found.counts, happened
    return None, Saved(u, found.t, found.length), found.counts, happened


def _happened(plan: Plan, rows: Any, marks: Any, count: Any) -> Happened | None:
    """The events, of their rows `[trajectory, 3 event, *state]`."""
    assert plan.events is not None
    n, room = rows.shape[0], plan.max_events
    if not room:
        return None
    rows = rows.reshape(n, room, EVENT_ROWS, *plan.state.shape)
    marks = marks.reshape(n, room, -1)
    there = jnp.arange(room, dtype=count.dtype)[None] < count[:, None]

    def known(x: Any, other: Any) -> Any:
        mask = there.reshape(*there.shape, *(1,) * (x.ndim - 2))
        return jnp.where(mask, x, jnp.asarray(other, x.dtype))

    before, after, t = (known(rows[:, :, i], jnp.nan) for i in range(EVENT_ROWS))
    t = t.reshape(n, room, -1)[..., 0]
    return Happened(t, known(marks[..., 0], -1), known(marks[..., 1:], 0), before, after, count)


def _run(
    d: Description, text: str, name: str, threads: int, n: int, operands: list, outputs: list
) -> list[Any]:
    """Call a kernel for `n` trajectories, on so many threads; on a CPU at most."""
    if d.on_gpu:
        which = launch.Kernel(text, name, len(operands), len(outputs))
        return launch.launch(which, threads, operands, outputs)
    return call(text, name, operands, outputs, Share(n, threads, d.width))


def _array(d: Description, n: int, size: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """So many numbers of each trajectory, by default of the dtype of the state."""
    return jax.ShapeDtypeStruct((size, n) if d.on_gpu else (n, size), dtype or d.dtype)


def _trajectories_first(d: Description, x: Any) -> Any:
    """A result of that shape."""
    return x.T if d.on_gpu else x


def _operands(
    d: Description, setup: Setup, lanes: Lane, mask: Any, rows: int, *more: int
) -> list[Any]:
    sizes = np.array([setup.n, rows, setup.plan.maxiters, *more], np.int32)
    stop = [] if d.on_gpu else [NEVER if lanes.stop is None else lanes.stop]
    operands = [sizes, mask, *stop, *operands_of(setup.plan, lanes, on_gpu=d.on_gpu)]
    if d.saving.mode == "times":
        times = jnp.asarray(lanes.saveat, d.dtype)
        operands.append(trajectories_last(times) if d.on_gpu and d.own_times else times)
    if d.events is not None:
        operands.append(np.array([setup.plan.max_events], np.int32))
    return operands


#
# In reverse
#


def pull_back(setup: Setup, lanes: Lane, known: Known, cotangent: Any) -> list:
    """Pull back through the trajectories that are `ok`: see `flow.Setup`.

    **Arguments:** `cotangent`: that of the rows (of the last states, or of the saved ones, and of
    events), `[trajectory, row, *state]`.
    """
    plan, n, groups = setup.plan, setup.n, setup.groups
    d = setup.description(lanes, backwards=True)
    text, checkpoint = kernel.pulling_back(d)
    which = with_gradients(d)
    avals = parameters_of(plan.field)
    own, shared = (size_of(d, part) for part in which)
    record = _record_on_gpu if d.on_gpu else _record_on_cpu
    threads, sizes, memory = record(d, setup, checkpoint, shared)
    rows = cotangent.reshape(n, -1, d.size)
    operands = _operands(d, setup, lanes, known.ok, _saved_rows(plan), *sizes)
    operands += [trajectories_last(rows) if d.on_gpu else rows, known.reached.astype(jnp.int32)]
    if d.events is not None:
        happened = known.happened
        none = jnp.zeros(n, jnp.int32)
        operands.append(none if happened is None else happened.astype(jnp.int32))
    outputs = [_array(d, n, d.size), _array(d, n, max(1, own))]
    outputs.append(_array(d, threads if d.on_gpu else n, max(1, shared)))
    results = _run(d, text, "pull_back", threads, n, operands, [*outputs, *memory])
    to_u0, to_own, to_shared = [_trajectories_first(d, x) for x in results[:3]]
    to_shared = to_shared.reshape(groups, -1, max(1, shared)).sum(1)
    found = {}
    for part, flat in zip(which, (to_own, to_shared), strict=True):
        start = 0
        for i in part:
            end = start + math.prod(avals[i].shape)
            # (Not -1 of them: an array may be empty.)
            each = flat[:, start:end].reshape(flat.shape[0], *avals[i].shape)
            found[i] = each.astype(avals[i].dtype)
            start = end
    return [to_u0.reshape(n, *plan.state.shape), *(found[i] for i in sorted(found))]


def _record_on_cpu(d: Description, setup: Setup, checkpoint: int, shared: int) -> tuple:
    """How many threads, the other sizes (see `kernel.TURNS`), and memory."""
    del shared
    threads = setup.threads
    group = min(setup.n, d.width * (_GROUP if d.controller else _GROUP_OF_FIXED_STEPS))
    turn = d.recorded * d.width
    # All turns of a group, at most: a lane's are those of its trajectories.
    most = (setup.plan.maxiters + 1) * (group // d.width + 2)
    turns = _segment_turns(most, _SEGMENT // (turn * d.dtype.itemsize))
    segments = -(-most // turns) + 1
    events = (group + 1) * EVENT_CELLS * d.width
    lengths = turns * turn, events, segments * checkpoint
    memory = _memory(d, *(threads * length for length in lengths))
    return threads, (turns, group, *lengths), memory


def _record_on_gpu(d: Description, setup: Setup, checkpoint: int, shared: int) -> tuple:
    """The same. Every thread has room for a trajectory at a time; each group the same number of
    them."""
    # (A trajectory that is lost has another turn.)
    most = setup.plan.maxiters + 1
    turns = _segment_turns(most, _TURNS)
    segments = -(-most // turns) + 1
    each = turns * d.recorded, 2 * EVENT_CELLS, segments * checkpoint
    bytes_ = sum(math.prod(x.shape) * x.dtype.itemsize for x in _memory(d, *each))
    bytes_ += shared * d.dtype.itemsize
    group = setup.n // setup.groups
    of_group = min(group, max(1, _WORKSPACE // bytes_ // setup.groups))
    threads = setup.groups * of_group
    memory = _memory(d, *(size * threads for size in each))
    return threads, (turns, group, of_group), memory


def _segment_turns(most: int, least: int) -> int:
    """How many turns a segment has, of so many at most: about as many as there are segments then,
    or more."""
    return min(most, max(least, math.isqrt(most) + 1))


def _memory(d: Description, turns: int, events: int, kept: int) -> list[jax.ShapeDtypeStruct]:
    kinds = zip((turns, events, kept), (d.dtype, np.int32, np.int8), strict=True)
    return [jax.ShapeDtypeStruct((size,), dtype) for size, dtype in kinds]


#
# Wider
#


def _folded(out: Any, size: int) -> Any:
    """Their results, with that axis first again."""
    return jtu.tree_map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
