"""The programs of jumps whose times move (see `moving.py`), also for states with tangents."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr
from jaxtyping import PyTree

from ..fields import parameters_of, staged
from ..plan.events import CallbackProgram, Jump, TracedCallbacks, TracedContinuous, TracedDiscrete
from ..plan.known_times import ADJACENT
from ..solvers.arithmetic import ArrayArithmetic
from ..solvers.time import next_time
from ..tracing.program import Program, program_of, structs_of, substituted
from .moving import crossing, jumped, shift, switched
from .told_apart import is_told_apart, moved_one_by_one


ROWS = 4  # the rows of a moving jump, each as large as the state


class TangentLevel(NamedTuple):
    """How a state is extended by its tangent, to `[2, *state]`, and the list of numbers by their
    tangents.

    - `constants`: the number of further constants at the beginning of the new list.
    - `n`: how many numbers the old list has; they come next.
    - `moved`: which of them have tangents; these come last.
    """

    constants: int
    n: int
    moved: tuple[int, ...]

    def split(self, numbers: Sequence) -> tuple[list, list]:
        """The old numbers, and the tangents. Further numbers may follow, which nothing reads."""
        end = self.constants + self.n
        tangents = numbers[end : end + len(self.moved)]
        return list(numbers[self.constants : end]), list(tangents)


@dataclasses.dataclass(frozen=True)
class MovingJump:
    """A jump whose time moves, for a state with a tangent for each of the `levels`.

    - `field`: the field of the state without tangents.
    - `affect`: the effect of the jump on the state without tangents.
    - `conditions`: for a continuous callback, `[length]`; None for a discrete one.
    - `is_later`: for a continuous callback, whether others may have acted before it at the same
        time. Its own time is then the root of its condition along the solution before they acted.
    - `passed`: for a discrete callback at known times, the time since the known time, `[1]`.
    - `follows`: for any other discrete callback, whether it may act at the time of a callback that
        moves; then it moves with that one.
    - `is_discontinuity`: whether the field is a different one after the jump, where the next step
        begins a little later.
    """

    field: Program
    affect: CallbackProgram
    conditions: CallbackProgram | None
    length: int = 1
    is_later: bool = False
    passed: CallbackProgram | None = None
    follows: bool = False
    levels: tuple[TangentLevel, ...] = ()
    is_discontinuity: bool = False

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of the jump's further inputs: those of a `CallbackProgram`; `moved`, the time
        of the jump with its tangents, if it follows another jump; and `before`, the state at the
        event before anything acted, if it is `is_later`."""
        several = self.conditions is not None and self.length > 1
        more = [*(["mask"] if several else []), *(["moved"] if self.follows else [])]
        more += ["tprev"] if self.is_discontinuity else []
        more += ["before"] if self.is_later else []
        return tuple(dict.fromkeys((*self.affect.extras, *more)))

    @property
    def moving(self) -> tuple[str, ...]:
        """The extras that have derivatives."""
        return tuple(name for name in self.extras if name in ("uprev", "moved", "before"))

    def rows(
        self, u: PyTree, numbers: Sequence, extras: dict[str, Any], t: Array, order: int
    ) -> tuple:
        """The rows `[4, *state]` of `MovedJump` (the time is the first component of a row of
        zeros), and 1 where the trajectory ends, else 0. Derivatives are right up to `order`."""
        return self._at_level(len(self.levels), u, numbers, extras, t, order)

    def _at_level(
        self, level: int, u: PyTree, numbers: Sequence, extras: dict[str, Any], t: Array, order: int
    ) -> tuple:
        if not level:
            return self._plain(u, numbers, extras, t, order)
        level -= 1
        before, tangents = self.levels[level].split(numbers)
        moved = self.levels[level].moved
        both = {name: extras[name] for name in self.moving}

        def at(u: PyTree, more: dict, chosen: list) -> tuple:
            every = substituted(before, moved, chosen)
            return self._at_level(level, u, every, {**extras, **more}, t, order)

        args = (u[0], {name: x[0] for name, x in both.items()}, [before[i] for i in moved])
        along = (u[1], {name: x[1] for name, x in both.items()}, tangents)
        rows, tangent, ends = jax.jvp(at, args, along, has_aux=True)
        return jnp.stack([rows, tangent], axis=1), ends

    def _plain(
        self, u: PyTree, numbers: Sequence, extras: dict[str, Any], t: Array, order: int
    ) -> tuple:
        n = len(self.field.jaxpr.constvars)
        consts, p = numbers[:n], tuple(numbers[n:])

        def field(u: PyTree, t: Array) -> Array:
            return self.field(consts, u, p, t)

        def affect(u: PyTree, t: Array) -> tuple:
            out = _evaluated(self.affect, u, numbers, extras, t)
            return out[:-1].reshape(u.shape), out[-1] > 0

        delta = shift(extras["moved"][0]) if self.follows else None
        if self.passed is not None:
            delta = -_evaluated(self.passed, u, numbers, extras, t)[0]
        if self.conditions is not None:
            conditions = self.conditions

            def condition(u: PyTree, t: Array) -> Array:
                return self._first(_evaluated(conditions, u, numbers, extras, t), extras)

            before = extras["before"] if self.is_later else u
            delta = crossing(field, condition, before, t, order)
        if self.is_discontinuity:
            return self._of_field(u, (consts, p), extras["tprev"].reshape(()), t, delta, order)
        found = jumped(field, affect, u, t, delta, order=order)
        time = jnp.concatenate([found.time[None], jnp.zeros(u.size - 1, u.dtype)])
        rows = jnp.stack([found.on, found.before, found.after, time.reshape(u.shape)])
        return rows, found.ends.astype(u.dtype)

    def _of_field(
        self, u: PyTree, numbers: tuple, tprev: Array, t: Array, delta: Any, order: int
    ) -> tuple:
        """The rows of `rows` where only the field jumps, at `t`; the last parameter has the times
        of its jumps."""
        consts, p = numbers
        known = p[-1]
        direction = jnp.where(t < tprev, -1, 1).astype(t.dtype)
        earlier, later = (_next(t, x) for x in (-direction, direction))
        # (The next step begins after all jumps at neighbouring floating-point numbers.)
        count = jnp.sum(known == t)
        for _ in range(ADJACENT):
            more = jnp.sum(known == later)
            count, later = count + more, jnp.where(more > 0, _next(later, direction), later)

        def shifted(by: Array) -> Callable:
            return lambda u, time: self.field(consts, u, p, time + by)

        def at_once() -> Array:
            return switched(shifted(earlier - t), shifted(later - t), u, t, delta, order)

        @jax.checkpoint
        def one_by_one() -> Array:
            return moved_one_by_one(self.field, numbers, u, (earlier, t, later), delta, order)

        several = len(known) > 1 and is_told_apart(self.field)
        on = jax.lax.cond(count > 1, one_by_one, at_once) if several else at_once()
        return jnp.stack([on, u, u, jnp.full_like(u, t)]), jnp.zeros((), u.dtype)

    def _first(self, conditions: Array, extras: dict[str, Any]) -> Array:
        """The value of the first of the conditions that cross zero."""
        if self.length == 1:
            return conditions[0]
        found, taken = conditions[0], extras["mask"][0] != 0
        for i in range(1, self.length):
            here = ~taken & (extras["mask"][i] != 0)
            found, taken = jnp.where(here, conditions[i], found), taken | here
        return found


def _next(t: Array, direction: Array) -> Array:
    return next_time(ArrayArithmetic(jnp), jax.lax.stop_gradient(t), direction)


def _evaluated(
    part: CallbackProgram, u: PyTree, numbers: Sequence, extras: dict[str, Any], t: Array
) -> Array:
    n = part.n_consts
    p = (*numbers[n:], *(extras[name] for name in part.extras))
    return part.program(numbers[:n], u, p, t)


def moving_of(
    events: TracedCallbacks, field: Program, callback: TracedContinuous | TracedDiscrete, jump: Jump
) -> MovingJump:
    """The moving jump that belongs to this jump of a callback, one of the `events`, in a solve of
    `field`."""
    if jump.moves is not None:
        return jump.moves
    if isinstance(callback, TracedContinuous):
        is_later = callback != events.continuous[0]
        return MovingJump(field, jump.part, callback.conditions, callback.length, is_later)
    moving = MovingJump(field, jump.part, None)
    if callback.passed is None:
        return dataclasses.replace(moving, follows=follow(events))
    about = {"passed": callback.passed, "is_discontinuity": callback.is_discontinuity}
    return dataclasses.replace(moving, **about)


def follow(events: TracedCallbacks) -> bool:
    """Whether there are discrete callbacks that may act at the time of a callback that moves."""
    known = any(x.passed is not None for x in events.discrete)
    others = any(x.passed is None for x in events.discrete)
    return others and (known or bool(events.continuous))


def _extra_structs(moving: MovingJump, field: Program) -> list[jax.ShapeDtypeStruct]:
    state, t = structs_of([*field.jaxpr.outvars, field.jaxpr.invars[-1]])
    of = {
        "uprev": state,
        "before": state,
        "tprev": t,
        "mask": jax.ShapeDtypeStruct((moving.length,), state.dtype),
        "moved": jax.ShapeDtypeStruct((*(2 for _ in moving.levels), 1), state.dtype),
    }
    return [of[name] for name in moving.extras]


@functools.lru_cache(maxsize=1024)
def program(moving: MovingJump, field: Program, order: int) -> CallbackProgram:
    """The program of a jump, for the state of this field with the tangents of all levels. Returns
    the flattened rows, followed by its `AffectOutcome`."""

    def flat(consts: Sequence, u: PyTree, p: Sequence, t: Array) -> Array:
        numbers, extras = _split(moving, consts, p)
        rows, ends = moving.rows(u, numbers, extras, t, order)
        return jnp.concatenate([rows.reshape(-1), ends[None]])

    jaxpr = staged(field, flat, extra=_extra_structs(moving, field))
    return CallbackProgram(program_of(jaxpr, jax.tree.structure(0), rules=True), moving.extras)


@functools.lru_cache(maxsize=1024)
def transposed(moving: MovingJump, field: Program, which: tuple[int, ...]) -> Jaxpr:
    """The program that pulls a cotangent of the flattened rows back through a jump. Its state is
    that cotangent; the state is appended to `p`. Its results are the cotangents of the state, of
    the extras that are `moving`, and of the constants and parameters of the field that are numbered
    `which`."""
    (state,) = structs_of(field.jaxpr.outvars)
    rows = jax.ShapeDtypeStruct((ROWS, *state.shape), state.dtype)
    order = len(moving.levels) + 1

    def pulled(cotangent_consts: Sequence, cotangent: Array, p: Sequence, t: Array) -> Array:
        *p, u = p
        numbers, extras = _split(moving, cotangent_consts, p)

        def at(u: PyTree, more: list, chosen: list) -> Array:
            every = substituted(numbers, which, chosen)
            changed = dict(zip(moving.moving, more, strict=True))
            return moving.rows(u, every, {**extras, **changed}, t, order)[0]

        more, chosen = [extras[name] for name in moving.moving], [numbers[i] for i in which]
        found = jax.tree.leaves(jax.vjp(at, u, more, chosen)[1](cotangent))
        return jnp.concatenate([x.reshape(-1).astype(state.dtype) for x in found])

    return staged(field, pulled, state=rows, extra=[*_extra_structs(moving, field), state])


def _split(
    of: MovingJump | CallbackProgram, consts: Sequence, p: Sequence
) -> tuple[list, dict[str, Any]]:
    """The list of all numbers, and the extras by name."""
    n = len(p) - len(of.extras)
    return [*consts, *p[:n]], dict(zip(of.extras, p[n:], strict=True))


def with_tangents(
    events: TracedCallbacks, field: Program, wide: Program, moved: Sequence[int]
) -> TracedCallbacks:
    """The events of a state with its tangent: conditions read the state alone, and the times of
    jumps move. `field` is the field of the state, and `wide` that of the state with its tangent.
    The constants and parameters of `wide` are those of `field`, followed by the tangents of those
    numbered `moved`."""
    level = TangentLevel(len(wide.jaxpr.constvars), len(parameters_of(field)), tuple(moved))
    condition = functools.partial(_of_state, wide, level)

    def jump(callback: TracedContinuous | TracedDiscrete, x: Jump) -> Jump:
        moves = moving_of(events, field, callback, x)
        moves = dataclasses.replace(moves, levels=(*moves.levels, level))
        part = program(moves, wide, len(moves.levels))
        return dataclasses.replace(x, part=part, moves=moves)

    return events.changed(condition, jump)


@functools.lru_cache(maxsize=1024)
def _of_state(wide: Program, level: TangentLevel, part: CallbackProgram) -> CallbackProgram:
    """A condition as a function of the state with its tangent, which it doesn't read."""
    state, t = structs_of([*wide.jaxpr.outvars, wide.jaxpr.invars[-1]])
    of = {"uprev": state, "tprev": t}

    def at(consts: Sequence, u: PyTree, p: Sequence, t: Array) -> Array:
        numbers, extras = _split(part, consts, p)
        numbers, _ = level.split(numbers)
        if "uprev" in extras:
            extras["uprev"] = extras["uprev"][0]
        return _evaluated(part, u[0], numbers, extras, t)

    jaxpr = staged(wide, at, extra=[of[name] for name in part.extras])
    return CallbackProgram(program_of(jaxpr, jax.tree.structure(0), rules=True), part.extras)
