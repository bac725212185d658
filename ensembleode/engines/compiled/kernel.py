"""Writes the LLVM IR of kernels from a `KernelDescription`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...jumps import moving_jumps
from ...jumps.moving_jumps import MovingJump
from .algebra.parameter_sums import ParameterSums
from .llvm.builder import BOOL, Builder, ElementPointer, I32, I64, Value
from .llvm.heap import ThreadHeap
from .llvm.module import Module
from .loop.callback_functions import CallbackFunctions
from .loop.loop import Loop
from .loop.queue import Queue
from .reverse.events_back import JumpFunctions
from .reverse.pull_back import pull_back
from .reverse.record import Blocks, PullBackWork
from .reverse.replay import Cotangents, Pullback
from .steps.description import KernelDescription, size_of, with_gradients
from .steps.equations import (
    calls_in,
    equations_in,
    FieldNumbers,
    keeping_in,
    pulled_by,
    with_groups,
)
from .steps.layout import LaneNumbers, NumbersOrder
from .steps.saved_rows import EventRows, KernelOutputs


# The entries of `sizes`, the first operand of every kernel.
N, ROWS, MAXITERS = range(3)
# A further entry of the `sizes` of `solve`, where there are arrays: the bytes of a thread's arrays.
ARRAYS = 3
# The results of `pull_back`.
_GRADIENTS = ("u0", "own", "shared")
# The dtypes of those operands and results that don't have the state's dtype.
_INTEGERS = ("out_counts", "out_marks", "events", "reached", "happened", "places")
_DTYPES = {"kept": np.dtype(np.int8), **dict.fromkeys(_INTEGERS, I32)}


def _memory(d: KernelDescription) -> list[str]:
    """The names of the memory of `pull_back`."""
    return ["turns", "events", "kept", *(["factors"] if d.sums_in_memory else [])]


def _cotangents(d: KernelDescription) -> list[str]:
    """The operands of `pull_back` alone."""
    return ["rows", "reached", *(["happened", "of_events"] if d.events is not None else [])]


def _inputs(d: KernelDescription) -> list[str]:
    """The operands that both kernels have."""
    numbers = [f"number{i}" for i in range(len(d.layout.numbers))]
    stop = [] if d.on_gpu else ["stop"]
    times = ["times"] if d.saving.mode == "times" else []
    room = ["room"] if d.events is not None else []
    return ["sizes", "wanted", *stop, *numbers, *times, *room]


def _outputs(d: KernelDescription) -> list[str]:
    """The results of `solve`."""
    times = ["out_t"] if d.saving.mode == "steps" else []
    events = ["out_events", "out_marks"] if d.events is not None else []
    inner = ["out_inner"] if d.inner else []
    return ["out_u", *times, *events, "out_counts", *inner]


def pointers(d: KernelDescription, name: str) -> tuple[int, int]:
    """The numbers of a kernel's operands and results, without memory for arrays."""
    inputs = len(_inputs(d))
    if name == "solve":
        return inputs, len(_outputs(d))
    return inputs + len(_cotangents(d)), len(_GRADIENTS) + len(_memory(d))


def _share(d: KernelDescription) -> tuple[str, ...]:
    """The parameters that say which trajectories a thread does: on a CPU those of a range, on a GPU
    those at a constant distance from each other."""
    return ("thread", "threads") if d.on_gpu else ("first", "end", "thread")


class KernelFrame:
    """The parameters of a kernel, as values and buffers."""

    def __init__(self, b: Builder, d: KernelDescription, names: Sequence[str]):
        self.sizes = ElementPointer(b, "%sizes", I32)
        self.wanted = ElementPointer(b, "%wanted", BOOL)
        # The address of the flag that stops the solve, in two halves. Without a flag it is zero,
        # and that zero itself is read.
        self.stop = None
        if not d.on_gpu:
            address = b.value("load i64, ptr %stop, align 4", np.dtype(I64), 0)
            there = b.value(f"inttoptr {address} to ptr", np.dtype(I64), 0)
            none = address.eq(0)
            flag = b.value(f"select {none}, ptr %stop, ptr {there.name}", np.dtype(I64), 0)
            self.stop = ElementPointer(b, flag.name, np.dtype(np.int8))
        self.numbers = [
            ElementPointer(b, f"%number{i}", x.dtype) for i, x in enumerate(d.layout.numbers)
        ]
        self.times = ElementPointer(b, "%times", d.dtype) if d.saving.mode == "times" else None
        self.others = {
            name: ElementPointer(b, f"%{name}", _DTYPES.get(name, d.dtype)) for name in names
        }
        self.n, self.rows = (b.cast(self.sizes.load(i), I64) for i in (N, ROWS))
        # The rows of events, which are in the buffer of this name.
        self.events = None
        for name in self.others.keys() & {"out_events", "of_events"}:
            known = ElementPointer(b, "%room", I32)
            sizes = (b.cast(known.load(i), I64) for i in range(3))
            self.events = EventRows(self.others[name], self.n, *sizes)
        self.maxiters = self.sizes.load(MAXITERS)
        self.order = NumbersOrder(self.n if d.on_gpu else None)
        self.share = [b.parameter(f"%{name}", I64) for name in _share(d)]

    def heap(self, b: Builder, d: KernelDescription, length: int) -> ThreadHeap | None:
        """A thread's memory for arrays; its length is this entry of the sizes. None on a GPU."""
        if d.on_gpu:
            return None

        def part() -> tuple[ElementPointer, ElementPointer]:
            memory, size = ElementPointer(b, "%arrays", np.dtype(np.int8)), self.sizes.load(length)
            start = self.share[-1] * b.cast(size, I64)
            return memory.offset(start), memory.offset(start + b.cast(size, I64))

        return ThreadHeap(b, part, by_blocks=d.in_memory)

    @staticmethod
    def parameters(d: KernelDescription, more: Sequence[str]) -> list[str]:
        inputs = [f"ptr noalias readonly %{name}" for name in _inputs(d)]
        pointers = [*inputs, *(f"ptr noalias %{name}" for name in more)]
        return [*(f"i64 %{name}" for name in _share(d)), *pointers]


def _module(d: KernelDescription) -> Module:
    return Module(d.width, is_gpu=d.on_gpu, has_fma=d.has_fma, has_range=d.has_range)


def _place_of(d: KernelDescription) -> dict[str, str]:
    """The attributes of a kernel's function. On a GPU an entry is appended, which calls it."""
    if not d.on_gpu:
        return {"linkage": "external"}
    return {"linkage": "internal", "attributes": "alwaysinline"}


@functools.lru_cache(maxsize=256)
def solving(d: KernelDescription) -> tuple[str, int]:
    """The IR of the kernel `solve`, and the bytes of a thread's memory for arrays, which is the
    last result where there are any bytes. Its operands are named by `_inputs`, its results are
    `KernelOutputs`."""
    module, names = _module(d), _outputs(d)
    parameters = KernelFrame.parameters(d, names)
    with module.function("solve", parameters, **_place_of(d)) as b:
        frame = KernelFrame(b, d, names)
        heap = b.heap = frame.heap(b, d, ARRAYS)
        held = LaneNumbers(b, d, frame.numbers, frame.order)
        first, end, stride = frame.share[0], frame.n, frame.share[1]
        if not d.on_gpu:
            end, stride = frame.share[1], b.constant(1, I64)
        queue = Queue(first, stride, end, frame.wanted)
        others = frame.others
        results = others["out_u"], others.get("out_t"), others["out_counts"], frame.n
        more = frame.events, others.get("out_marks"), others.get("out_inner")
        outputs = KernelOutputs(*results, *more)
        given = frame.times, outputs, frame.rows, frame.maxiters
        functions = None if d.events is None else CallbackFunctions(b, d)
        equations = equations_in(b, d)
        Loop(b, d, equations, held, queue, *given, stop=frame.stop, functions=functions).run()
        b.return_()
        arrays = with_arrays(parameters, heap)
    return module.text, arrays


def with_arrays(parameters: list[str], heap: ThreadHeap | None) -> int:
    """Append the memory for arrays to a kernel's parameters; returns the bytes of a thread's."""
    if heap is None or not heap.size:
        return 0
    parameters.append("ptr noalias %arrays")
    return heap.size


#
# In reverse
#


# Further entries of the `sizes` of `pull_back`: the turns of a segment, the trajectories of a
# group, and how many checkpoints there is room for. On a GPU, the entry THREADS is how many threads
# share one sum, which these threads add to in turn; on a CPU, the entries from THREADS on are the
# lengths of a thread's memory, in the order of `_memory`. Where the sums of shared parameters are
# in memory, two more follow: the number of trajectories of a set, and of a block (see
# `record.Blocks`). The last are the bytes of a thread's arrays, where there are any.
TURNS, GROUP, CHECKPOINTS, THREADS = 3, 4, 5, 6


class PullBackKernel(NamedTuple):
    """The kernel `pull_back`: its IR, the bytes of a checkpoint, how many numbers the memory
    `factors` of a thread's `ParameterSums` has, and the bytes of a thread's memory for arrays,
    which is the kernel's last result."""

    text: str
    checkpoint: int
    factors: int
    arrays: int


@functools.lru_cache(maxsize=256)
def pulling_back(d: KernelDescription) -> PullBackKernel:
    """The kernel `pull_back`. Its operands are those of `solving` and `_cotangents`; its results,
    the gradients (see `replay.Cotangents`), memory for a record, and for factors."""
    module = _module(d)
    names = (*_cotangents(d), *_GRADIENTS, *_memory(d))
    n_own, n_shared = (size_of(d, x) for x in with_gradients(d))
    parameters = KernelFrame.parameters(d, names)
    with module.function("pull_back", parameters, **_place_of(d)) as b:
        frame = KernelFrame(b, d, names)
        last = THREADS + len(_memory(d)) + (2 if d.sums_in_memory else 0)
        heap = b.heap = frame.heap(b, d, last)
        others = frame.others
        held = LaneNumbers(b, d, frame.numbers, frame.order)
        equations = equations_in(b, d)
        functions = None if d.events is None else CallbackFunctions(b, d)

        def make_loop(first: Value, end: Value, on_begin: Callable) -> Loop:
            queue = Queue(first, b.constant(1, I64), end, frame.wanted)
            given = frame.times, None, frame.rows, frame.maxiters
            told = {"on_begin": on_begin, "functions": functions}
            return Loop(b, d, equations, held.another(), queue, *given, **told)

        work = _work(b, d, frame)
        sums = None
        if work.factors is not None:
            in_memory = n_own if d.own_in_memory else 0
            sums = ParameterSums(b, work.factors, others["shared"], in_memory, n_shared)
        calls, keeping = calls_in(b, d, equations, sums), keeping_in(b, d, equations)
        jumps = None if functions is None else _jumps_in(b, d, sums, functions)
        pullback = Pullback(calls, n_own, n_shared, jumps, sums, keeping)
        gradients = [others[x] for x in _GRADIENTS]
        more = others.get("happened"), frame.events
        cotangents = Cotangents(others["rows"], others["reached"], *gradients, *more)
        kept_size = 0

        def run() -> None:
            nonlocal kept_size
            kept_size = pull_back(b, make_loop, work, pullback, cotangents, alone=d.on_gpu)

        b.if_(work.thread < work.threads, run)
        b.return_()
        arrays = with_arrays(parameters, heap)
    return PullBackKernel(module.text, kept_size, 0 if sums is None else sums.length, arrays)


def _work(b: Builder, d: KernelDescription, frame: KernelFrame) -> PullBackWork:
    room, group, checkpoints = (
        b.cast(frame.sizes.load(i), I64) for i in (TURNS, GROUP, CHECKPOINTS)
    )
    memory = [frame.others[name] for name in _memory(d)]
    zero, one = b.constant(0, I64), b.constant(1, I64)
    if not d.on_gpu:
        first, end, thread = frame.share
        ends = THREADS + len(memory)
        lengths = [b.cast(frame.sizes.load(i), I64) for i in range(THREADS, ends)]
        own = [x.offset(thread * n) for x, n in zip(memory, lengths, strict=True)]
        *own, factors = own if d.sums_in_memory else (*own, None)
        work = PullBackWork(first, end, group, group, *own, room, checkpoints, zero, one)
        if factors is None:
            return work
        blocks = Blocks(*(b.cast(frame.sizes.load(i), I64) for i in (ends, ends + 1)))
        return work._replace(factors=factors, blocks=blocks)
    thread, _ = frame.share
    # A group of trajectories is done by THREADS threads, which share a sum and take turns.
    each = b.cast(frame.sizes.load(THREADS), I64)
    which = b.binary("udiv", thread, each)
    start, member = which * group, thread - which * each
    used = b.binary("udiv", frame.n, group) * each
    where = start + member, start + group
    return PullBackWork(*where, one, each, *memory, room, checkpoints, thread, used)


def _jumps_in(
    b: Builder, d: KernelDescription, sums: ParameterSums | None, functions: CallbackFunctions
) -> JumpFunctions:
    """The callbacks, in the form that `replay.Pullback` wants; `sums`: see `equations.calls_in`."""
    own, shared = with_gradients(d)
    names: dict[MovingJump, str] = {}

    @functools.cache
    def pulled(moving: MovingJump) -> Callable:
        name = names.setdefault(moving, f"transposed_jump{len(names)}")
        jaxpr = moving_jumps.transposed(moving, d.field, (*own, *shared))
        inputs = with_groups(d.layout.inputs, *moving.extras, "forward")
        out: Any = jaxpr.outvars[0].aval
        kept = out.size - size_of(d, [*own, *shared]) + d.returned
        what = "the derivative of a condition or an affect"
        return pulled_by(b, d, sums, jaxpr, inputs, name, what, kept)

    def pull(
        moving: MovingJump,
        held: LaneNumbers,
        y: tuple,
        t: Value,
        mask: Value,
        extras: dict,
        cotangents: list,
    ) -> tuple:
        numbers = FieldNumbers(held, u=cotangents, forward=y, **extras)
        return pulled(moving)(numbers, t, mask)

    return JumpFunctions(functions, pull)
