"""The callbacks of a problem as programs, which decide what is compiled.

The state that they see is one array, as engines have it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..callbacks import all_of, ContinuousCallback, DiscreteCallback, Integrator
from ..ground.state_tree import StateTree
from ..tracing.program import is_tracer, Program, program_of, trace, with_constants
from ..tracing.purity import check_once, numbers_in
from ..tracing.written_numbers import with_numbers_apart
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
    - `moves`: of a state with tangents, how its time moves (see `moving_jumps.Moving`): then the
        part makes the rows of that, and whether the trajectory ends.
    """

    part: Part
    ends: bool | None
    changes: tuple[int, ...] = ()
    moves: Any = None


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
class Discrete:
    """A discrete callback.

    - `condition`: positive where it acts: `[1]`.
    - `scheduled`: whether that is at known times only, which steps end at.
    - `at_start`: whether one of them may be the start.
    - `passed`: at such a time, how long ago that was, `[1]`: zero, with derivatives by the known
        times. None of others.
    """

    which: int
    condition: Part
    jump: Jump
    save_positions: tuple[bool, bool]
    scheduled: bool = False
    at_start: bool = False
    passed: Part | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a solution has its events."""
        return any(self.save_positions)


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
        return ways, acts, sides

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
            return dataclasses.replace(x, condition=condition, jump=made, passed=passed)

        first = tuple(map(continuous, self.continuous))
        return Events(first, tuple(map(discrete, self.discrete)))


def _jumps_of(callback: Continuous | Discrete) -> Iterator[Jump]:
    if isinstance(callback, Discrete):
        yield callback.jump
    else:
        yield from (x for x in (callback.up, callback.down) if x is not None)


#
# Tracing
#


class Tracing:
    """Traces the functions of callbacks.

    **Arguments:** `u`: the abstract state, an array; `tree`: what it is made of where it is a
    pytree; `p`: the parameters, of which leaves are traced where `is_number` says so; `t0`: the
    first time; `f`: the vector field, as the user wrote it.
    """

    def __init__(
        self, u: Any, tree: StateTree | None, p: Any, is_number: Callable, t0: Any, f: Callable
    ):
        self.u, self.tree, self.is_number, self.t0, self.f = u, tree, is_number, t0, f
        self.t = jax.ShapeDtypeStruct((), t0.dtype)
        numeric, self.static = eqx.partition(p, is_number)
        leaves, self.structure = jtu.tree_flatten(numeric)
        self.leaves = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in leaves]
        # What the programs so far close over.
        self.consts: list = []

    def events(self, callback: Any, known: Sequence[Any]) -> Events:
        """
        **Arguments:** `known`: the times of each callback, where they are; else None.

        **Raises:** `TypeError` and `ValueError`, which name the callback and its argument, for
        conditions and affects that can't be called or return something else.
        """
        continuous, discrete = [], []
        for number, (x, times) in enumerate(zip(all_of(callback), known, strict=True)):
            name = f"callback {number}, a {type(x).__name__}"
            if times is not None:
                discrete.append(self._scheduled(number, name, x, times))
            elif isinstance(x, DiscreteCallback):
                discrete.append(self._discrete(number, name, x))
            else:
                continuous.append(self._continuous(number, name, x))
        return Events(tuple(continuous), tuple(discrete))

    def _continuous(self, number: int, name: str, x: Any) -> Continuous:
        is_vector = not isinstance(x, ContinuousCallback)
        length, shape = (x.length, (x.length,)) if is_vector else (1, ())
        mask = {"mask": jax.ShapeDtypeStruct(shape, self.u.dtype)} if is_vector else {}
        conditions = self._condition(name, x.condition, shape)
        down = x.affect if is_vector else x.affect_neg
        jump = functools.partial(self._jump, name, extras=mask)
        rises = None if x.affect is None else jump("affect", x.affect)
        falls = rises
        if down is not x.affect:
            falls = None if down is None else jump("affect_neg", down)
        how = x.rootfind, x.interp_points, x.repeat_nudge, x.dtrelax, x.save_positions
        return Continuous(number, conditions, length, is_vector, rises, falls, *how)

    def _discrete(self, number: int, name: str, x: DiscreteCallback) -> Discrete:
        condition = self._condition(name, x.condition, (), is_discrete=True)
        jump = self._jump(name, "affect", x.affect, extras={})
        return Discrete(number, condition, jump, x.save_positions)

    def _scheduled(self, number: int, name: str, x: Any, times: Any) -> Discrete:
        def condition(u, t, integrator):
            del u, integrator
            return jnp.any(t == times)

        def passed(u, t, integrator):
            del u, integrator
            return t - jnp.max(jnp.where(t == times, times, -jnp.inf), initial=-jnp.inf)

        part = self._condition(name, condition, (), is_discrete=True)
        since = self._condition(name, passed, ())
        jump = self._jump(name, "affect", x.affect, extras={})
        known = not (is_tracer(times) or is_tracer(self.t0))
        at_start = not known or bool((times == self.t0).any())
        if at_start and jump.ends is not False:
            raise ValueError(
                f"affect of {name} may terminate a trajectory, and may be at its start: leave that "
                "time out."
            )
        return Discrete(number, part, jump, x.save_positions, True, at_start, since)

    def _condition(
        self, name: str, condition: Callable, shape: tuple, *, is_discrete: bool = False
    ) -> Part:
        def of_arrays(u, p, extras, t):
            state, uprev = self._given(u), extras.get("uprev")
            if uprev is not None:
                uprev = self._given(uprev)
            integrator = self._integrator(state, p, t, uprev, extras.get("tprev"))
            out = condition(state, t, integrator)
            _check_number(out, shape, f"condition of {name}", is_boolean=is_discrete)
            return jnp.asarray(out).astype(u.dtype).reshape(math.prod(shape))

        extras = self._step if is_discrete else {}
        return self._part(name, "condition", condition, of_arrays, extras)

    def _jump(self, name: str, argument: str, affect: Callable, *, extras: dict) -> Jump:
        what, found = f"{argument} of {name}", []

        def of_arrays(u, p, extras, t):
            uprev = self._given(extras["uprev"])
            before = self._integrator(self._given(u), p, t, uprev, extras["tprev"])
            more = [extras["mask"].astype(jnp.int32)] if "mask" in extras else []
            after = affect(before, *more)
            if not isinstance(after, Integrator):
                hint = " (is a `return` missing?)" if after is None else ""
                raise TypeError(
                    f"{what} must return the integrator, got {type(after).__name__}{hint}: write "
                    "`return eo.remake(integrator, u=...)` or `return eo.terminate(integrator)`."
                )
            ends, changed = after._ends, self._changed(p, after.p, what)
            known = bool(ends) if isinstance(ends, bool | np.bool_) else None
            found[:] = [known, tuple(changed)]
            parts = [self._vector(after.u, what), *changed.values(), ends]
            return jnp.concatenate([jnp.asarray(x).astype(u.dtype).reshape(-1) for x in parts])

        part = self._part(name, argument, affect, of_arrays, {**self._step, **extras})
        return Jump(part, *found)

    @property
    def _step(self) -> dict[str, Any]:
        return {"uprev": self.u, "tprev": self.t}

    def _integrator(self, u: Any, p: Sequence, t: Any, uprev: Any, tprev: Any) -> Integrator:
        return Integrator(u, self._parameters(p), t, uprev, tprev, _f=self.f)

    def _given(self, u: Any) -> Any:
        """A state as the user has it."""
        return u if self.tree is None else self.tree.unravel(u)

    def _parameters(self, leaves: Sequence) -> Any:
        return eqx.combine(jtu.tree_unflatten(self.structure, leaves), self.static)

    def _vector(self, u: Any, what: str) -> Any:
        """The vector of a state that an affect made.

        **Raises:** `TypeError` and `ValueError` where it is not made like the state.
        """
        like = jax.eval_shape(self._given, self.u)
        structure = jtu.tree_structure(like)
        if self.tree is None and isinstance(u, list | tuple):
            u = jnp.asarray(u)
        if jtu.tree_structure(u) != structure:
            raise TypeError(
                f"{what} must make a state of the structure of u0, {structure}; it made one of "
                f"{jtu.tree_structure(u)}."
            )
        leaves = []
        for (path, x), aval in zip(
            jtu.tree_leaves_with_path(u), jtu.tree_leaves(like), strict=True
        ):
            at = f"u{jtu.keystr(path)}"
            if not eqx.is_array_like(x) or isinstance(x, str):
                raise TypeError(f"{what} must make a state of arrays; its {at} is {x!r}.")
            if np.shape(x) != aval.shape:
                raise ValueError(
                    f"{what} must make a state of the shape of u0: its {at} has the shape "
                    f"{np.shape(x)}, and that of u0 is {aval.shape}."
                )
            array = jnp.asarray(x)
            if array.dtype != aval.dtype and not array.weak_type:
                raise TypeError(
                    f"{what} must make a state of the dtype of u0, {aval.dtype}; its {at} is "
                    f"{array.dtype}. Cast it, by .astype(u.dtype)."
                )
            leaves.append(array.astype(aval.dtype).reshape(-1))
        return jnp.concatenate(leaves)

    def _changed(self, before: Sequence, p: Any, what: str) -> dict[int, Any]:
        """The leaves of the parameters that an affect has changed, by their places.

        **Raises:** `TypeError` and `ValueError` where they are not made like those before.
        """
        numeric, static = eqx.partition(p, self.is_number)
        leaves, structure = jtu.tree_flatten(numeric)
        same = len(leaves) == len(before) and structure == self.structure
        if not same or jtu.tree_leaves(static) != jtu.tree_leaves(self.static):
            raise TypeError(
                f"{what} must make parameters of the structure of p, {self.structure}; it made "
                f"{structure}."
            )
        changed = {i: x for i, x in enumerate(leaves) if x is not before[i]}
        for i, x in changed.items():
            aval = self.leaves[i]
            if np.shape(x) != aval.shape:
                raise ValueError(
                    f"{what} must make parameters of the shapes of p: its leaf {i} has the shape "
                    f"{np.shape(x)}, and that of p is {aval.shape}."
                )
            if aval.dtype != self.u.dtype or jnp.result_type(x, aval.dtype) != aval.dtype:
                raise TypeError(
                    f"{what} changes leaf {i} of p, {aval.dtype}, to {jnp.result_type(x)}: numbers "
                    f"of p that change have the dtype of the state, {self.u.dtype}."
                )
        return changed

    def _part(
        self, name: str, argument: str, fn: Callable, of_arrays: Callable, extras: dict[str, Any]
    ) -> Part:
        """The program of `of_arrays(u, leaves of p, extras by name, t)`."""
        n = len(self.leaves)

        def flat(u, numbers, t):
            others = dict(zip(extras, numbers[n:], strict=True))
            return of_arrays(u, list(numbers[:n]), others, t)

        args = self.u, (*self.leaves, *extras.values()), self.t
        try:
            program, consts = trace(flat, *args, rules=True)
        except TypeError as e:
            if "positional argument" not in str(e):
                raise
            raise TypeError(f"{argument} of {name} can't be called: {e}") from e
        check_once(
            fn,
            lambda: numbers_in(program, consts) == numbers_in(*trace(flat, *args)),
            f"{argument} of {name} gives another value each time it is called (by random numbers "
            "of NumPy or Python, or the clock). It is traced once: draw them before, and pass them "
            "in p.",
        )
        program, used = _without_unused(program, n, tuple(extras))
        program, written = with_numbers_apart(program)
        start = len(self.consts)
        self.consts += [*consts, *written]
        return Part(program, used, start)


def _without_unused(
    program: Program, n: int, extras: tuple[str, ...]
) -> tuple[Program, tuple[str, ...]]:
    """The program without those of its `extras` that it doesn't read."""
    jaxpr = program.jaxpr
    read = [v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jex.Literal)]
    read = {*read, *(v for v in jaxpr.outvars if not isinstance(v, jex.Literal))}
    u, *inputs, t = jaxpr.invars
    kept = [(x, v) for x, v in zip(extras, inputs[n:], strict=True) if v in read]
    inputs = [u, *inputs[:n], *(v for _, v in kept), t]
    jaxpr = with_constants(jaxpr, jaxpr.constvars, inputs)
    return program_of(jaxpr, program.out_tree, rules=True), tuple(name for name, _ in kept)


def _check_number(out: Any, shape: tuple, what: str, *, is_boolean: bool) -> None:
    kind = "a boolean" if is_boolean else "a real number" if shape == () else "real numbers"
    if not eqx.is_array_like(out) or isinstance(out, str):
        raise TypeError(f"{what} must return {kind}, got {type(out).__name__}.")
    dtype = jnp.result_type(out)
    if np.shape(out) != shape:
        raise ValueError(
            f"{what} must return {kind}, of the shape {shape}; it returned the shape "
            f"{np.shape(out)}."
        )
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if (dtype != np.bool_) if is_boolean else not is_real:
        raise TypeError(f"{what} must return {kind}; it returned {dtype}.")


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
