"""The callbacks of a problem as programs, which are a part of the plan.

In these programs the state is one array, as in the engines.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..tracing.program import Program, program_of, structs_of, substituted, trace, with_constants
from .extended_state import Extension


# The rows of an event in the record: the state before it, the state after it, and a row of zeros
# with its time as the first component.
EVENT_ROWS = 3


@dataclasses.dataclass(frozen=True)
class CallbackProgram:
    """A function of a callback, as `program(consts, u, (*p, *extras), t)`.

    - `extras`: the names of further inputs: `uprev` and `tprev`, the state and the time at the
        start of the step; `mask`, which says as a real number for each of several conditions how it
        crosses zero.
    - `start`: where its constants begin among those of all callbacks.
    """

    program: Program
    extras: tuple[str, ...] = ()
    start: int = 0

    @property
    def n_consts(self) -> int:
        return len(self.program.jaxpr.constvars)


@dataclasses.dataclass(frozen=True)
class Jump:
    """What an affect does to the state, the parameters and the solve.

    - `part`: returns a vector of `[size + 1]`: the flattened state after the affect, followed by an
        `AffectOutcome`, which says whether the trajectory ends there. As long as the parameters in
        `changes` are not a part of the state, their new values stand before the outcome.
    - `ends`: whether the trajectory ends there, if that is always the same; else None.
    - `changes`: the indices of the leaves of the parameters that the affect changes.
    - `fails`: whether the outcome may be `NotConverged`.
    - `moves`: for a state with tangents, how the time of the jump depends on the numbers (see
        `moving_jumps.MovingJump`). The part then returns the rows of `MovingJump.rows`, and the
        outcome.
    """

    part: CallbackProgram
    ends: bool | None
    changes: tuple[int, ...] = ()
    moves: Any = None
    fails: bool = False


@dataclasses.dataclass(frozen=True)
class TracedContinuous:
    """A continuous callback, with one condition or several.

    - `which`: its number among all callbacks, in the order that the user gave.
    - `conditions`: returns the conditions, `[length]`; it has no extras.
    - `up`, `down`: the jumps where a condition rises or falls through zero; None where nothing is
        done. A vector callback has the same jump for both.
    """

    which: int
    conditions: CallbackProgram
    length: int
    is_vector: bool
    up: Jump | None
    down: Jump | None
    rootfind: type
    interp_points: int
    repeat_nudge: float
    dtrelax: float
    save_positions: tuple[bool, bool]

    @property
    def is_kept(self) -> bool:
        """Whether solutions record its events."""
        return any(self.save_positions)

    @property
    def may_end(self) -> bool:
        """Whether it may end a trajectory."""
        return any(x.ends is not False for x in jumps_of(self))


@dataclasses.dataclass(frozen=True)
class TracedStepLimit:
    """A limit on the length of the step after a discrete callback: the state at its end,
    extrapolated from the step before, must not be negative.

    - `tolerance`: how far below zero each component of the user's state may be, flat; None for the
        `abstol` of the solve.
    - `scalefactor`: the factor by which the step is multiplied until the prediction is within the
        limit.
    """

    tolerance: CallbackProgram | None
    scalefactor: float


@dataclasses.dataclass(frozen=True)
class TracedDiscrete:
    """A discrete callback.

    - `condition`: positive where the callback acts: `[1]`.
    - `scheduled`: whether it acts only at known times, on which steps end.
    - `at_start`: whether the start may be one of these times.
    - `passed`: a program that at such a time returns the time since then, `[1]`: zero, with
        derivatives with respect to the known times. None for callbacks without known times.
    - `is_kept`: whether solutions record its events.
    - `limit`: the limit on the next step.
    - `is_discontinuity`: whether it acts at a jump of the field, only for the sake of derivatives.
    - `after_jump`: whether it solves the algebraic equations again after a jump of the field.
    - `most`: for a callback at known times, how often it acts at most; else None.
    - `rest`: whether it ends trajectories at rest; `"settled"` if it replaces the state there by
        the root of the field (see `engines/derivatives/rest.py`).
    """

    which: int
    condition: CallbackProgram
    jump: Jump
    save_positions: tuple[bool, bool]
    scheduled: bool = False
    at_start: bool = False
    passed: CallbackProgram | None = None
    is_kept: bool = True
    limit: TracedStepLimit | None = None
    is_discontinuity: bool = False
    after_jump: bool = False
    most: int | None = None
    rest: bool | str = False

    @property
    def may_end(self) -> bool:
        """Whether it may end a trajectory."""
        return self.jump.ends is not False


@dataclasses.dataclass(frozen=True)
class TracedCallbacks:
    """The callbacks of a problem; those of one kind are in the order in which they act."""

    continuous: tuple[TracedContinuous, ...]
    discrete: tuple[TracedDiscrete, ...]

    @property
    def callbacks(self) -> tuple[TracedContinuous | TracedDiscrete, ...]:
        return (*self.continuous, *self.discrete)

    @property
    def jumps(self) -> tuple[Jump, ...]:
        """All jumps, each once, in the order of the callbacks; the jump of a rising condition is
        before that of a falling one."""
        return tuple(dict.fromkeys(jump for x in self.callbacks for jump in jumps_of(x)))

    @property
    def about(self) -> tuple:
        """The static properties of the callbacks, without their programs."""
        ways = [
            (x.rootfind.__name__, x.interp_points, x.repeat_nudge, x.dtrelax, x.length)
            for x in self.continuous
        ]
        acts = [(x.which, x.save_positions, [y.ends for y in jumps_of(x)]) for x in self.callbacks]
        sides = [(x.up is None, x.down is None, x.up == x.down) for x in self.continuous]
        limits = [(i, x.limit) for i, x in enumerate(self.discrete) if x.limit is not None]
        held = [(i, x.scalefactor, x.tolerance is None) for i, x in limits]
        quiet = [i for i, x in enumerate(self.discrete) if x.is_kept != any(x.save_positions)]
        later = [i for i, x in enumerate(self.discrete) if x.after_jump]
        more = [(held, quiet)] if held or quiet else []
        return ways, acts, sides, *more, *([later] if later else []), *["settles"] * self.settles

    def slices(self) -> list[tuple[int, TracedContinuous, slice]]:
        """For each continuous callback its number, itself, and the slice of its conditions among
        those of all continuous callbacks."""
        found, start = [], 0
        for i, x in enumerate(self.continuous):
            found.append((i, x, slice(start, start + x.length)))
            start += x.length
        return found

    @property
    def components(self) -> int:
        """The number of conditions of all continuous callbacks together."""
        return sum(x.length for x in self.continuous)

    @property
    def scheduled(self) -> bool:
        """Whether some callback acts at known times only."""
        return any(x.scheduled and not x.is_discontinuity for x in self.discrete)

    @property
    def may_coincide(self) -> bool:
        """Whether a condition may cross zero where another does, or at a known time."""
        return self.components > 1 or self.scheduled

    @property
    def marks(self) -> int:
        """The number of marks that record what acted at the end of a step: one for each condition
        of the continuous callbacks, in their order, and then one for each discrete callback."""
        return self.components + len(self.discrete)

    @property
    def longest(self) -> int:
        """The largest number of conditions of a callback."""
        return max((x.length for x in self.continuous), default=1)

    @property
    def is_kept(self) -> bool:
        """Whether solutions record events of some callback."""
        return any(x.is_kept for x in self.callbacks)

    @property
    def may_end(self) -> bool:
        """Whether an affect may end a trajectory."""
        return any(x.may_end for x in self.callbacks)

    @property
    def limits(self) -> bool:
        """Whether some callback limits the next step."""
        return any(x.limit is not None for x in self.discrete)

    @property
    def rests(self) -> tuple[int, ...]:
        """The numbers of the callbacks that end trajectories at rest."""
        return tuple(x.which for x in self.discrete if x.rest)

    @property
    def settles(self) -> bool:
        """Whether a callback replaces the state at rest by the root of the field."""
        return any(x.rest == "settled" for x in self.discrete)

    @property
    def changes(self) -> tuple[int, ...]:
        """The indices of the leaves of the parameters that affects change."""
        return tuple(sorted({i for x in self.jumps for i in x.changes}))

    @property
    def only_ends(self) -> bool:
        """Whether every event ends its trajectory."""
        return all(x.ends is True for x in self.jumps)

    @property
    def most_known(self) -> int:
        """The largest number of recorded events at known times."""
        return sum(x.most or 0 for x in self.discrete if x.is_kept)

    @property
    def unforeseen(self) -> bool:
        """Whether there may be recorded events whose number isn't known beforehand."""
        every = (x for x in self.callbacks if x.is_kept)
        return any(isinstance(x, TracedContinuous) or x.most is None for x in every)

    @property
    def consts(self) -> list:
        """The abstract values of the arrays that the callbacks close over."""
        parts = sorted(set(self.parts), key=lambda x: x.start)
        return [v.aval for x in parts for v in x.program.jaxpr.constvars]

    @property
    def parts(self) -> list[CallbackProgram]:
        """All parts of the callbacks, each once, in the order of `mapped`."""
        found: list[CallbackProgram] = []

        def noted(part: CallbackProgram, changes: Any) -> CallbackProgram:
            found.append(part)
            return part

        self.mapped(noted)
        return found

    def mapped(
        self, change: Callable[[CallbackProgram, tuple[int, ...] | None], CallbackProgram]
    ) -> "TracedCallbacks":
        """The callbacks with each part replaced by `change(part, changes)`. For a condition
        `changes` is None; for a jump it is the indices of the parameters that the jump changes."""
        change = functools.cache(change)
        return self.changed(
            lambda part: change(part, None),
            lambda _, jump: dataclasses.replace(jump, part=change(jump.part, jump.changes)),
        )

    def changed(
        self,
        condition: Callable[[CallbackProgram], CallbackProgram],
        jump: Callable[[TracedContinuous | TracedDiscrete, Jump], Jump],
    ) -> "TracedCallbacks":
        """The callbacks with each jump replaced by `jump(callback, jump)`, and each part that
        belongs to no jump replaced by `condition(part)`."""

        def continuous(x: TracedContinuous) -> TracedContinuous:
            conditions = condition(x.conditions)
            up, down = (None if a is None else jump(x, a) for a in (x.up, x.down))
            return dataclasses.replace(x, conditions=conditions, up=up, down=down)

        def discrete(x: TracedDiscrete) -> TracedDiscrete:
            asked, made = condition(x.condition), jump(x, x.jump)
            passed = None if x.passed is None else condition(x.passed)
            limit = x.limit
            if limit is not None and limit.tolerance is not None:
                limit = dataclasses.replace(limit, tolerance=condition(limit.tolerance))
            return dataclasses.replace(x, condition=asked, jump=made, passed=passed, limit=limit)

        first = tuple(map(continuous, self.continuous))
        return TracedCallbacks(first, tuple(map(discrete, self.discrete)))


def jumps_of(callback: TracedContinuous | TracedDiscrete) -> Iterator[Jump]:
    if isinstance(callback, TracedDiscrete):
        yield callback.jump
    else:
        yield from (x for x in (callback.up, callback.down) if x is not None)


@functools.lru_cache(maxsize=1024)
def over_numbers(part: CallbackProgram, numbers: tuple, places: tuple[int, ...]) -> CallbackProgram:
    """The part without constants, as a function of the list of all `numbers` (abstract values, as
    pairs of a shape and a dtype). Its constants and parameters are at the `places` in that list."""
    jaxpr = part.program.jaxpr
    u, *inputs, t = jaxpr.invars
    end = len(inputs) - len(part.extras)
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in numbers]
    new: Any = jax.make_jaxpr(lambda *xs: ())(*structs).jaxpr
    every = substituted(new.invars, places, (*jaxpr.constvars, *inputs[:end]))
    inner = with_constants(jaxpr, [], [u, *every, *inputs[end:], t])
    return CallbackProgram(program_of(inner, part.program.out_tree, rules=True), part.extras)


@functools.lru_cache(maxsize=1024)
def of_extended(
    part: CallbackProgram, extension: Extension, changes: tuple[int, ...] | None
) -> CallbackProgram:
    """The part (without constants) for a state that has further components behind the user's, from
    which it reads the held numbers. `changes` are the places of the parameters that a jump computes
    anew; None for a condition."""
    n = len(part.extras)

    def extended(u: Array, p: tuple[Array, ...], t: Array) -> Array:
        held = dict(zip((i for i, _ in extension.held), extension.held_of(u), strict=True))
        numbers = substituted(p[: len(p) - n], held, held.values())
        named = zip(part.extras, p[len(p) - n :], strict=True)
        extras = [extension.user_of(x) if name == "uprev" else x for name, x in named]
        out = part.program((), extension.user_of(u), (*numbers, *extras), t)
        if changes is None:
            return out
        start = extension.controlled
        for i in changes:
            end = start + math.prod(held[i].shape)
            held[i] = out[start:end]
            start = end
        user = out[: extension.controlled]
        about = extension.integrals(u), [*held.values()], extension.beside(u)
        after = extension.state(user, *about)
        return jnp.concatenate([after, out[-1:]])

    state = jax.ShapeDtypeStruct((extension.size,), extension.user.dtype)
    _, *inputs, t = structs_of(part.program.jaxpr.invars)
    own = zip(part.extras, inputs[len(inputs) - n :], strict=True)
    inputs[len(inputs) - n :] = [state if name == "uprev" else x for name, x in own]
    program, consts = trace(extended, state, tuple(inputs), t, rules=True)
    assert not consts
    return CallbackProgram(program, part.extras)
