"""The kernels: from all that decides one to its LLVM IR."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ...core import moving_jumps
from ...core.events import Part
from ...core.moving_jumps import Moving
from ...fields import Inputs, parameters_of, staged, UntranslatableError
from ...fields.ir import Function
from ...fields.walking import length
from ...solvers.method import Equations
from ...tracing.program import Program
from .builder import BOOL, Buffer, Builder, I32, I64, Value
from .description import Description
from .events_back import Jumps
from .field import evaluate, evaluate_apart, lowered
from .loop import Loop
from .module import Module
from .numbers import Held, Order
from .operations import check
from .queue import Queue
from .reading import Memory, Numbers
from .record import Work
from .replay import Cotangents, pull_back, Pullback
from .saved_rows import Outputs
from .steps import Calls


# A field of more statements, loops unrolled, is a function of its own, called at every stage.
_LONGEST_INLINED = 150
# A result of as many components is returned; of more, stored.
_LARGEST_RETURNED = 10**6


class _Numbers(Numbers):
    """What a field reads: the state, and the parameters that the lanes hold."""

    def __init__(self, held: Held, **groups: Sequence[Value]):
        self._held, self._groups = held, groups

    def load(self, group: str, dtype: Any, index: int) -> Value:
        if group in self._groups:
            return self._groups[group][index]
        return self._held.load(group, dtype, index)

    def memory(self, group: str, dtype: Any, start: int, end: int) -> Memory | None:
        if group in self._groups:
            return None
        return self._held.memory(group, dtype, start, end)


def _equations_in(b: Builder, d: Description) -> Callable[[Held, Value], Equations]:
    """The equations of the trajectories that are held, as a `Loop` has them."""
    inputs, what = d.layout.inputs, "f, or a derivative of f,"
    fn = _translated(d.field.jaxpr, inputs, what)

    @functools.cache
    def along() -> Function:
        return _translated(tangent(d.field), _with(inputs, "tangent", "dt"), what)

    def of(held: Held, mask: Value) -> Equations:
        def f(y: tuple, t: Value) -> tuple:
            return _evaluated(b, fn, _Numbers(held, u=y), t, mask, "field")

        def jvp(y: tuple, t: Value, dy: tuple, dt: Any) -> tuple:
            dt = b.spread(b.as_value(dt, d.dtype))
            numbers = _Numbers(held, u=y, tangent=dy, dt=[dt])
            return _evaluated(b, along(), numbers, t, mask, "tangent")

        return Equations(f, jvp)

    return of


def _callbacks_in(b: Builder, d: Description) -> Callable[..., tuple] | None:
    """The functions of callbacks, as a `Loop` has them."""
    if d.events is None:
        return None
    names = {part: f"callback{i}" for i, part in enumerate(d.events.parts)}

    @functools.cache
    def translated(part: Part) -> Function:
        inputs = _with(d.layout.inputs, *part.extras)
        return _translated(part.program.jaxpr, inputs, "a condition or an affect of a callback")

    def of(part: Part, held: Held, y: tuple, t: Value, mask: Value, extras: dict) -> tuple:
        numbers = _Numbers(held, u=y, **extras)
        return _evaluated(b, translated(part), numbers, t, mask, names[part])

    return of


def _with(inputs: Inputs, *groups: str) -> Inputs:
    """The numbers with more of them at the end of `p`, each a group of its own."""
    return inputs._replace(places=(*inputs.places, *((group, 0) for group in groups)))


def _translated(jaxpr: jex.Jaxpr, inputs: Inputs, what: str) -> Function:
    try:
        fn = lowered(jaxpr, inputs, _LARGEST_RETURNED)
        check(fn)
    except UntranslatableError as e:
        raise ValueError(
            f"{what} can't be translated: it uses {e.what}, at {e.where}. Write that part "
            'otherwise, or use engine="lanes", and on GPUs EnsembleGPUArray().'
        ) from e
    return fn


def _evaluated(
    b: Builder, fn: Function, numbers: Numbers, t: Value, mask: Value, name: str
) -> tuple:
    """The components of a function, one a lane each."""
    if length(fn.body) > _LONGEST_INLINED:
        out = evaluate_apart(b, fn, name, numbers, b.spread(t), b.spread(mask))
    else:
        out = evaluate(b, fn, numbers, t, mask)
    return tuple(map(b.spread, out))


# What `sizes` says, the first operand of every kernel.
N, ROWS, MAXITERS = range(3)


# Operands of `pull_back` only, its results, and its memory.
_GRADIENTS = ("u0", "own", "shared")
_MEMORY = ("turns", "events", "kept")


def _cotangents(d: Description) -> list[str]:
    return ["rows", "reached", *(["happened"] if d.events is not None else [])]


def _inputs(d: Description) -> list[str]:
    """The operands that both kernels have."""
    numbers = [f"number{i}" for i in range(len(d.layout.numbers))]
    stop = [] if d.on_gpu else ["stop"]
    times = ["times"] if d.saving.mode == "times" else []
    room = ["room"] if d.events is not None else []
    return ["sizes", "wanted", *stop, *numbers, *times, *room]


def _outputs(d: Description) -> list[str]:
    """The results of `solve`."""
    times = ["out_t"] if d.saving.mode == "steps" else []
    marks = ["out_marks"] if d.events is not None else []
    return ["out_u", *times, *marks, "out_counts"]


def pointers(d: Description, name: str) -> tuple[int, int]:
    """How many operands and results a kernel has."""
    inputs = len(_inputs(d))
    if name == "solve":
        return inputs, len(_outputs(d))
    return inputs + len(_cotangents(d)), len(_GRADIENTS) + len(_MEMORY)


def _share(d: Description) -> tuple[str, ...]:
    """What says which trajectories a thread does: on a CPU those of a range, on a GPU every
    so-manieth."""
    return ("thread", "threads") if d.on_gpu else ("first", "end", "thread")


class Frame:
    """The parameters of a kernel, as the values and buffers that they are."""

    def __init__(self, b: Builder, d: Description, more: Sequence[tuple[str, np.dtype]] = ()):
        self.sizes = Buffer(b, "%sizes", I32)
        self.wanted = Buffer(b, "%wanted", BOOL)
        # The address of a flag, in two halves; zero where there is none. (That zero is a flag.)
        self.stop = None
        if not d.on_gpu:
            address = b.value("load i64, ptr %stop, align 4", np.dtype(I64), 0)
            there = b.value(f"inttoptr {address} to ptr", np.dtype(I64), 0)
            none = address.eq(0)
            flag = b.value(f"select {none}, ptr %stop, ptr {there.name}", np.dtype(I64), 0)
            self.stop = Buffer(b, flag.name, np.dtype(np.int8))
        self.numbers = [Buffer(b, f"%number{i}", x.dtype) for i, x in enumerate(d.layout.numbers)]
        self.times = Buffer(b, "%times", d.dtype) if d.saving.mode == "times" else None
        # For how many events of a trajectory there is room.
        self.room = None
        if d.events is not None:
            self.room = b.cast(Buffer(b, "%room", I32).load(0), I64)
        self.others = {name: Buffer(b, f"%{name}", dtype) for name, dtype in more}
        self.n, self.rows = (b.cast(self.sizes.load(i), I64) for i in (N, ROWS))
        self.maxiters = self.sizes.load(MAXITERS)
        self.order = Order(self.n if d.on_gpu else None)
        self.share = [b.parameter(f"%{name}", I64) for name in _share(d)]

    def held(self, b: Builder, d: Description) -> Held:
        return Held(b, d.layout, self.numbers, self.order)

    @staticmethod
    def parameters(d: Description, more: Sequence[str]) -> list[str]:
        inputs = [f"ptr noalias readonly %{name}" for name in _inputs(d)]
        pointers = [*inputs, *(f"ptr noalias %{name}" for name in more)]
        return [*(f"i64 %{name}" for name in _share(d)), *pointers]


def _module(d: Description) -> Module:
    return Module(d.width, is_gpu=d.on_gpu, has_fma=d.has_fma)


def _place_of(d: Description) -> dict[str, str]:
    """Of the function of a kernel in its module: in that of a GPU, what calls it is added later."""
    if not d.on_gpu:
        return {"linkage": "external"}
    return {"linkage": "internal", "attributes": "alwaysinline"}


@functools.lru_cache(maxsize=256)
def solving(d: Description) -> str:
    """The kernel `solve`, which solves all trajectories.

    Its operands: `sizes` (see above), which trajectories are wanted, the address of a byte that
    stops it (not on a GPU), the numbers, the times to save (where times are); its results:
    `Outputs`.
    """
    module = _module(d)
    names = _outputs(d)
    whole = "out_counts", "out_marks"
    more = [(name, I32 if name in whole else d.dtype) for name in names]
    parameters = Frame.parameters(d, names)
    with module.function("solve", parameters, **_place_of(d)) as b:
        frame = Frame(b, d, more)
        held = frame.held(b, d)
        first, end, stride = frame.share[0], frame.n, frame.share[1]
        if not d.on_gpu:
            end, stride = frame.share[1], b.constant(1, I64)
        queue = Queue(first, stride, end, frame.wanted)
        others = frame.others
        results = others["out_u"], others.get("out_t"), others["out_counts"], frame.n
        outputs = Outputs(*results, frame.room, others.get("out_marks"))
        given = frame.times, outputs, frame.rows, frame.maxiters
        evaluate = _callbacks_in(b, d)
        equations = _equations_in(b, d)
        Loop(b, d, equations, held, queue, *given, stop=frame.stop, evaluate=evaluate).run()
        b.return_()
    return module.text


#
# In reverse
#


def with_gradients(d: Description) -> tuple[list[int], list[int]]:
    """Which of the constants and parameters of the field have gradients: those of each trajectory,
    and those that all share."""
    found: dict[str, list[int]] = {"own": [], "shared": []}
    for i, aval in enumerate(parameters_of(d.field)):
        if jnp.issubdtype(aval.dtype, jnp.floating):
            found[d.layout.inputs.places[i][0]].append(i)
    return found["own"], found["shared"]


def size_of(d: Description, which: Sequence[int]) -> int:
    """How many numbers these constants and parameters of the field are."""
    avals = parameters_of(d.field)
    return sum(math.prod(avals[i].shape) for i in which)


# More places in the `sizes` of `pull_back`: of the turns of a segment, and of the trajectories of a
# group. On a GPU that is how many of them share one sum, which so many threads take turns with; on
# a CPU, how long the memory of a thread is, in the order of `_MEMORY`.
TURNS, GROUP, THREADS = 3, 4, 5
LENGTHS = range(5, 8)


@functools.lru_cache(maxsize=256)
def pulling_back(d: Description) -> tuple[str, int]:
    """The kernel `pull_back`, and the bytes of a checkpoint.

    Its operands: those of `solving`, then the cotangents of what is saved, how many times were
    reached, and with callbacks how many events happened; its results: the gradients (see
    `replay.Cotangents`), and memory for a record: turns, events, checkpoints.
    """
    module = _module(d)
    real, bytes_ = d.dtype, np.dtype(np.int8)
    given = _cotangents(d)
    names = (*given, *_GRADIENTS, *_MEMORY)
    dtypes = (real, *(I32 for _ in given[1:]), real, real, real, real, I32, bytes_)
    more = list(zip(names, dtypes, strict=True))
    n_own, n_shared = (size_of(d, x) for x in with_gradients(d))
    parameters = Frame.parameters(d, names)
    with module.function("pull_back", parameters, **_place_of(d)) as b:
        frame = Frame(b, d, more)
        others = frame.others
        held = frame.held(b, d)
        equations = _equations_in(b, d)

        def make_loop(first: Value, end: Value, on_begin: Callable) -> Loop:
            queue = Queue(first, b.constant(1, I64), end, frame.wanted)
            given = frame.times, None, frame.rows, frame.maxiters
            told = {"on_begin": on_begin, "evaluate": _callbacks_in(b, d)}
            return Loop(b, d, equations, held.another(), queue, *given, **told)

        pullback = Pullback(_calls_in(b, d, equations), n_own, n_shared, _jumps_in(b, d))
        of_rows, reached, *happened = (others[x] for x in given)
        gradients = [others[x] for x in _GRADIENTS]
        cotangents = Cotangents(of_rows, reached, *gradients, *happened, room=frame.room)
        work = _work(b, d, frame)
        kept_size = 0

        def run() -> None:
            nonlocal kept_size
            kept_size = pull_back(b, make_loop, work, pullback, cotangents, alone=d.on_gpu)

        b.if_(work.thread < work.threads, run)
        b.return_()
    return module.text, kept_size


def _work(b: Builder, d: Description, frame: Frame) -> Work:
    room, group = (b.cast(frame.sizes.load(i), I64) for i in (TURNS, GROUP))
    memory = [frame.others[name] for name in _MEMORY]
    zero, one = b.constant(0, I64), b.constant(1, I64)
    if not d.on_gpu:
        first, end, thread = frame.share
        lengths = [b.cast(frame.sizes.load(i), I64) for i in LENGTHS]
        memory = [x.offset(thread * n) for x, n in zip(memory, lengths, strict=True)]
        return Work(first, end, group, group, *memory, room, zero, one)
    thread, _ = frame.share
    # As many of the threads as share the memory out: so many to each group, for every so-manieth.
    each = b.cast(frame.sizes.load(THREADS), I64)
    which = b.binary("udiv", thread, each)
    start, member = which * group, thread - which * each
    used = b.binary("udiv", frame.n, group) * each
    return Work(start + member, start + group, one, each, *memory, room, thread, used)


def tangent(field: Program) -> jex.Jaxpr:
    """The program of the field's derivative along the tangents at the end of `p`, of the state and
    of the time."""
    struct, t = _state_and_time(field)
    return staged(field, functools.partial(_tangent, field), extra=[struct, t])


def _tangent(field: Program, consts: Any, u: Any, p: Any, t: Any) -> Any:
    *p, du, dt = p
    return jax.jvp(lambda u, t: field(consts, u, tuple(p), t), (u, t), (du, dt))[1]


def _state_and_time(field: Program) -> list[jax.ShapeDtypeStruct]:
    avals: Any = [v.aval for v in (field.jaxpr.invars[0], field.jaxpr.invars[-1])]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def transposed(field: Program, which: Sequence[int], *, of_tangent: bool = False) -> jex.Jaxpr:
    """The program of a cotangent in the place of the state, and the state at the end of `p`, that
    pulls the cotangent back: to the state, and to these constants and parameters of the field.

    **Arguments:** `of_tangent`: through the `tangent` instead; its tangents follow on the state,
    and that of the state has a cotangent which follows on the state's.
    """
    n = len(field.jaxpr.constvars)
    struct, time = _state_and_time(field)
    extra = [struct, struct, time] if of_tangent else [struct]

    def pulled(consts, cotangent, p, t):
        p, (u, *along) = p[: -len(extra)], p[-len(extra) :]
        numbers = [*consts, *p]

        def at(chosen, u, *du):
            every = list(numbers)
            for i, x in zip(which, chosen, strict=True):
                every[i] = x
            consts, p = every[:n], tuple(every[n:])
            if not of_tangent:
                return field(consts, u, p, t)
            return _tangent(field, consts, u, (*p, *du, along[-1]), t)

        chosen = [numbers[i] for i in which]
        to_chosen, *to_states = jax.vjp(at, chosen, u, *along[:-1])[1](cotangent)
        found = (*to_states, *to_chosen)
        return jnp.concatenate([x.reshape(-1).astype(struct.dtype) for x in found])

    return staged(field, pulled, state=struct, extra=extra)


def _calls_in(b: Builder, d: Description, equations: Callable) -> Callable[[Held, Value], Calls]:
    """The equations and their transposes, as `replay.Pullback` has them."""
    own, shared = with_gradients(d)

    @functools.cache
    def translated(*groups: str) -> Function:
        jaxpr = transposed(d.field, [*own, *shared], of_tangent=len(groups) > 1)
        return _translated(jaxpr, _with(d.layout.inputs, *groups), "the derivative of f")

    def of(held: Held, mask: Value) -> Calls:
        def f(y: tuple, t: Value, cotangent: tuple) -> tuple:
            numbers = _Numbers(held, u=cotangent, forward=y)
            return _evaluated(b, translated("forward"), numbers, t, mask, "transposed")

        def jvp(y: tuple, t: Value, dy: tuple, dt: Value, cotangent: tuple) -> tuple:
            fn = translated("forward", "tangent", "dt")
            numbers = _Numbers(held, u=cotangent, forward=y, tangent=dy, dt=[b.spread(dt)])
            return _evaluated(b, fn, numbers, t, mask, "transposed_tangent")

        return Calls(equations(held, mask), f, jvp)

    return of


def _jumps_in(b: Builder, d: Description) -> Jumps | None:
    """The callbacks, as `replay.Pullback` has them."""
    evaluate = _callbacks_in(b, d)
    if evaluate is None:
        return None
    own, shared = with_gradients(d)
    names: dict[Moving, str] = {}

    @functools.cache
    def translated(moving: Moving) -> Function:
        jaxpr = moving_jumps.transposed(moving, d.field, (*own, *shared))
        inputs = _with(d.layout.inputs, *moving.extras, "forward")
        return _translated(jaxpr, inputs, "the derivative of a condition or an affect")

    def pull(
        moving: Moving, held: Held, y: tuple, t: Value, mask: Value, extras: dict, cotangents: list
    ) -> tuple:
        name = names.setdefault(moving, f"transposed_jump{len(names)}")
        numbers = _Numbers(held, u=cotangents, forward=y, **extras)
        return _evaluated(b, translated(moving), numbers, t, mask, name)

    return Jumps(evaluate, pull)
