"""The callbacks of a problem as programs, which decide what is compiled.

The state that they see is one array, as engines have it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..tracing.program import Program, program_of, trace, with_constants
from .extended_state import Extension


# The rows of an event among those of a trajectory: the state before it, the state after it, and its
# time, as the first component of a state of zeros.
EVENT_ROWS = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """A function of a callback, as `program(consts, u, (*p, *extras), t)`.

    - `extras`: the names of what it reads besides: `uprev` and `tprev`, the state and the time
        where the step began; `mask`, which of several conditions cross zero and how, as reals.
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
    """What an affect does.

    - `part`: to the state after it, flattened, and at its end whether the trajectory ends there,
        1 or 0: `[size + 1]`. (As it is traced, what it makes of `changes` stands before that end.)
    - `ends`: whether it does, where that is the same always; else None.
    - `changes`: which leaves of the parameters it changes.
    - `fails`: whether what is at the end may be 2, too: the trajectory ends, as this could not be
        done.
    - `moves`: of a state with tangents, how its time moves (see `moving_jumps.Moving`): then the
        part makes the rows of that, and whether the trajectory ends.
    """

    part: Part
    ends: bool | None
    changes: tuple[int, ...] = ()
    moves: Any = None
    fails: bool = False


@dataclasses.dataclass(frozen=True)
class Continuous:
    """A continuous callback, of one condition or several.

    - `which`: its number among all callbacks, as the user counts them.
    - `conditions`: `[length]`, without extras.
    - `up`, `down`: what happens where a condition rises or falls through zero; None: nothing. Of a
        vector callback both are the same.
    """

    which: int
    conditions: Part
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
        """Whether a solution has its events."""
        return any(self.save_positions)


@dataclasses.dataclass(frozen=True)
class Limit:
    """What the step after a discrete callback is held to: the state is not to be negative at its
    end, as far as the step before foretells it.

    - `tolerance`: how far below zero each component may be, of the user's state, flat; None: as
        far as `abstol` of the solve says.
    - `scalefactor`: what the step is multiplied by until that holds.
    """

    tolerance: Part | None
    scalefactor: float


@dataclasses.dataclass(frozen=True)
class Discrete:
    """A discrete callback.

    - `condition`: positive where it acts: `[1]`.
    - `scheduled`: whether that is at known times only, which steps end at.
    - `at_start`: whether one of them may be the start.
    - `passed`: at such a time, how long ago that was, `[1]`: zero, with derivatives by the known
        times. None of others.
    - `is_kept`: whether a solution has its events.
    - `limit`: what the next step is held to.
    - `is_discontinuity`: whether it acts where the field jumps, and is there for derivatives only.
    """

    which: int
    condition: Part
    jump: Jump
    save_positions: tuple[bool, bool]
    scheduled: bool = False
    at_start: bool = False
    passed: Part | None = None
    is_kept: bool = True
    limit: Limit | None = None
    is_discontinuity: bool = False


@dataclasses.dataclass(frozen=True)
class Events:
    """The callbacks of a problem: those of a kind in the order in which they act."""

    continuous: tuple[Continuous, ...]
    discrete: tuple[Discrete, ...]

    @property
    def callbacks(self) -> tuple[Continuous | Discrete, ...]:
        return (*self.continuous, *self.discrete)

    @property
    def jumps(self) -> tuple[Jump, ...]:
        """Each once, in the order of the callbacks; of one that rises before one that falls."""
        return tuple(dict.fromkeys(jump for x in self.callbacks for jump in _jumps_of(x)))

    @property
    def about(self) -> tuple:
        """What is fixed about the callbacks, besides their programs."""
        ways = [
            (x.rootfind.__name__, x.interp_points, x.repeat_nudge, x.dtrelax, x.length)
            for x in self.continuous
        ]
        acts = [(x.which, x.save_positions, [y.ends for y in _jumps_of(x)]) for x in self.callbacks]
        sides = [(x.up is None, x.down is None, x.up == x.down) for x in self.continuous]
        held = [(i, *_about_limit(x)) for i, x in enumerate(self.discrete) if x.limit is not None]
        quiet = [i for i, x in enumerate(self.discrete) if x.is_kept != any(x.save_positions)]
        return ways, acts, sides, *([(held, quiet)] if held or quiet else [])

    @property
    def components(self) -> int:
        """How many conditions of continuous callbacks there are."""
        return sum(x.length for x in self.continuous)

    @property
    def marks(self) -> int:
        """How many numbers say what acted at the end of a step: one a condition of the continuous
        callbacks, in their order, and then one a discrete callback."""
        return self.components + len(self.discrete)

    @property
    def longest(self) -> int:
        """How many conditions a callback has at most."""
        return max((x.length for x in self.continuous), default=1)

    @property
    def is_kept(self) -> bool:
        """Whether there are events that a solution has."""
        return any(x.is_kept for x in self.callbacks)

    @property
    def may_end(self) -> bool:
        """Whether a trajectory may end by an affect."""
        return any(x.ends is not False for x in self.jumps)

    @property
    def limits(self) -> bool:
        """Whether some callback holds the next step to something."""
        return any(x.limit is not None for x in self.discrete)

    @property
    def changes(self) -> tuple[int, ...]:
        """Which leaves of the parameters are changed."""
        return tuple(sorted({i for x in self.jumps for i in x.changes}))

    @property
    def only_ends(self) -> bool:
        """Whether a trajectory ends with its first event."""
        return all(x.ends is True for x in self.jumps)

    @property
    def consts(self) -> list[Any]:
        """The abstract values of what the callbacks close over."""
        parts = sorted(set(self.parts), key=lambda x: x.start)
        return [v.aval for x in parts for v in x.program.jaxpr.constvars]

    @property
    def parts(self) -> list[Part]:
        """All of them, each once, in the order of `mapped`."""
        found: list[Part] = []

        def noted(part: Part, changes: Any) -> Part:
            del changes
            found.append(part)
            return part

        self.mapped(noted)
        return found

    def mapped(self, change: Callable[[Part, tuple[int, ...] | None], Part]) -> "Events":
        """With other parts, in place of each that there is: `change(part, changes)`, where of a
        condition `changes` is None, and of a jump which parameters it changes."""
        change = functools.cache(change)

        def jump(x: Jump | None) -> Jump | None:
            return None if x is None else dataclasses.replace(x, part=change(x.part, x.changes))

        def continuous(x: Continuous) -> Continuous:
            conditions = change(x.conditions, None)
            return dataclasses.replace(x, conditions=conditions, up=jump(x.up), down=jump(x.down))

        def discrete(x: Discrete) -> Discrete:
            condition, made = change(x.condition, None), jump(x.jump)
            assert made is not None
            passed = None if x.passed is None else change(x.passed, None)
            limit = x.limit
            if limit is not None and limit.tolerance is not None:
                limit = dataclasses.replace(limit, tolerance=change(limit.tolerance, None))
            return dataclasses.replace(
                x, condition=condition, jump=made, passed=passed, limit=limit
            )

        first = tuple(map(continuous, self.continuous))
        return Events(first, tuple(map(discrete, self.discrete)))


def _about_limit(callback: Discrete) -> tuple:
    limit = callback.limit
    return () if limit is None else (limit.scalefactor, limit.tolerance is None)


def _jumps_of(callback: Continuous | Discrete) -> Iterator[Jump]:
    if isinstance(callback, Discrete):
        yield callback.jump
    else:
        yield from (x for x in (callback.up, callback.down) if x is not None)


#
# One list of numbers
#


@functools.lru_cache(maxsize=1024)
def over(part: Part, numbers: tuple, places: tuple[int, ...]) -> Part:
    """The same without constants, as a function of all `numbers` (abstract values, each a pair of a
    shape and a dtype): its constants and parameters are those in these `places`."""
    jaxpr = part.program.jaxpr
    u, *inputs, t = jaxpr.invars
    end = len(inputs) - len(part.extras)
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in numbers]
    every: list = list(jax.make_jaxpr(lambda *xs: ())(*structs).jaxpr.invars)
    for place, variable in zip(places, (*jaxpr.constvars, *inputs[:end]), strict=True):
        every[place] = variable
    inner = with_constants(jaxpr, [], [u, *every, *inputs[end:], t])
    return Part(program_of(inner, part.program.out_tree, rules=True), part.extras)


@functools.lru_cache(maxsize=1024)
def of_extended(part: Part, extension: Extension, changes: tuple[int, ...] | None) -> Part:
    """The same of a state with components behind those of the user's, which reads the numbers that
    are held from there.

    **Arguments:** `part`: one without constants; `changes`: those of its parameters, by place, that
    the part of a jump makes anew; None of a condition.
    """
    n = len(part.extras)

    def extended(consts: Any, u: Any, p: Any, t: Any) -> Any:
        del consts
        numbers, extras = list(p[: len(p) - n]), list(p[len(p) - n :])
        held = dict(zip((i for i, _ in extension.held), extension.held_of(u), strict=True))
        for i, x in held.items():
            numbers[i] = x
        for k, name in enumerate(part.extras):
            if name == "uprev":
                extras[k] = extension.user_of(extras[k])
        out = part.program((), extension.user_of(u), (*numbers, *extras), t)
        if changes is None:
            return out
        start = extension.controlled
        for i in changes:
            end = start + math.prod(held[i].shape)
            held[i] = out[start:end]
            start = end
        after = extension.state(
            out[: extension.controlled], extension.integrals(u), [*held.values()]
        )
        return jnp.concatenate([after, out[-1:]])

    jaxpr = part.program.jaxpr
    state = jax.ShapeDtypeStruct((extension.size,), extension.user.dtype)
    avals: list[Any] = [v.aval for v in jaxpr.invars]
    _, *inputs, t = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    end = len(inputs) - n
    for k, name in enumerate(part.extras):
        if name == "uprev":
            inputs[end + k] = state
    program, consts = trace(functools.partial(extended, ()), state, tuple(inputs), t, rules=True)
    assert not consts
    return Part(program, part.extras)
