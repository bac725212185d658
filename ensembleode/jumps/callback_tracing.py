"""Tracing the functions of callbacks: the programs of `TracedCallbacks`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.devices.alone import without_mesh
from ..ground.state_tree import check_tolerance_shape, real_vector, StateTree
from ..plan.checked_reads import check_reads
from ..plan.events import (
    CallbackProgram,
    Jump,
    TracedCallbacks,
    TracedContinuous,
    TracedDiscrete,
    TracedStepLimit,
)
from ..problem.callbacks import all_of, ContinuousCallback, DiscreteCallback, Integrator, StepLimit
from ..problem.saving_callback import SavingCallback
from ..solvers.arithmetic import ArrayArithmetic
from ..solvers.mass_matrix import MassMatrix
from ..solvers.time import next_time
from ..tracing.program import is_tracer, Program, program_of, trace, with_constants
from ..tracing.purity import check_once, numbers_in
from ..tracing.written_numbers import with_numbers_apart
from .consistent_start import AfterJumps, consistent_again


class Tracing:
    """Traces the functions of callbacks.

    - `u`: the abstract state, an array; `tree`: the structure of a state that is a pytree.
    - `p`: the parameters; the leaves for which `is_number` is true are traced.
    - `f`: the vector field, as the user wrote it.
    - `mass`: the mass matrix whose algebraic equations are solved again after an affect, or None.
    """

    def __init__(
        self,
        u: PyTree,
        tree: StateTree | None,
        p: PyTree,
        is_number: Callable,
        t0: Array | np.ndarray,
        f: Callable,
        mass: MassMatrix | None,
    ):
        self.mass = mass
        self.u, self.tree, self.is_number, self.t0 = u, tree, is_number, t0
        # (A function, since the arrays of a module can't be static in an integrator.)
        self.f = lambda u, p, t: f(u, p, t)
        self.t = jax.ShapeDtypeStruct((), t0.dtype)
        numeric, self.static = eqx.partition(p, is_number)
        leaves, self.structure = jtu.tree_flatten(numeric)
        self.leaves = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in leaves]
        # The arrays that the programs traced so far close over.
        self.consts: list = []

    def events(self, callback: Any, known: Sequence) -> TracedCallbacks:
        """The programs of a callback, or of several; `known` has the times at which each acts if
        they are known, otherwise None.

        **Raises:** `TypeError` and `ValueError` for conditions and affects that can't be called or
        return something else than they should.
        """
        continuous, discrete = [], []
        for number, (x, times) in enumerate(zip(all_of(callback), known, strict=True)):
            if isinstance(x, SavingCallback):
                continue  # it makes no events, but has a number
            name = f"callback {number}, a {type(x).__name__}"
            if times is not None:
                discrete.append(self._scheduled(number, name, x, times))
            elif isinstance(x, DiscreteCallback):
                discrete.append(self._discrete(number, name, x))
            else:
                continuous.append(self._continuous(number, name, x))
        return TracedCallbacks(tuple(continuous), tuple(discrete))

    def _continuous(self, number: int, name: str, x: Any) -> TracedContinuous:
        is_vector = not isinstance(x, ContinuousCallback)
        length, shape = (x.length, (x.length,)) if is_vector else (1, ())
        mask = {"mask": jax.ShapeDtypeStruct((length,), self.u.dtype)}
        conditions = self._condition(name, x.condition, shape)
        down = x.affect if is_vector else x.affect_neg
        jump = functools.partial(self._jump, name, extras=mask, is_vector=is_vector)
        rises = None if x.affect is None else jump("affect", x.affect)
        falls = rises
        if down is not x.affect:
            falls = None if down is None else jump("affect_neg", down)
        how = x.rootfind, x.interp_points, x.repeat_nudge, x.dtrelax, x.save_positions
        return TracedContinuous(number, conditions, length, is_vector, rises, falls, *how)

    def _discrete(self, number: int, name: str, x: DiscreteCallback) -> TracedDiscrete:
        condition = self._condition(name, x.condition, (), is_discrete=True)
        jump = self._jump(name, "affect", x.affect, extras={})
        limit = None if x.limit is None else self._limit(name, x.limit)
        how: dict[str, Any] = {"is_kept": x.is_kept, "limit": limit, "rest": x.rest}
        return TracedDiscrete(number, condition, jump, x.save_positions, **how)

    def _limit(self, name: str, x: StepLimit) -> TracedStepLimit:
        """**Raises:** `TypeError` and `ValueError` for tolerances that don't fit the state."""
        if self.tree is not None and self.tree.is_complex:
            raise TypeError(f"{name} is for real states, and u0 is {self.tree.dtype}.")
        value = x.abstol
        if value is None:
            return TracedStepLimit(None, x.scalefactor)
        if self.tree is not None:
            value = self.tree.tolerance(f"abstol of {name}", value)
        else:
            check_tolerance_shape(f"abstol of {name}", value, self.u.shape)

        def tolerance(u: PyTree, p: list[Array], extras: Any, t: Array) -> Array:
            return jnp.broadcast_to(jnp.asarray(value, u.dtype), u.shape).reshape(-1)

        return TracedStepLimit(self._part(name, "abstol", tolerance, tolerance, {}), x.scalefactor)

    def _scheduled(
        self, number: int, name: str, x: Any, times: Array | np.ndarray
    ) -> TracedDiscrete:
        def condition(u, t, integrator):
            return jnp.any(t == times)

        def passed(u, t, integrator):
            return t - jnp.max(jnp.where(t == times, times, -jnp.inf), initial=-jnp.inf)

        part = self._condition(name, condition, (), is_discrete=True)
        since = self._condition(name, passed, ())
        solves = isinstance(x, AfterJumps)
        jump = self._jump(name, "affect", x.affect, extras={}, after_jump=solves)
        known = not (is_tracer(times) or is_tracer(self.t0))
        at_start = not known or bool((times == self.t0).any())
        if at_start and jump.ends is not False:
            raise ValueError(
                f"affect of {name} may terminate a trajectory, and may be at its start: leave that "
                "time out."
            )
        kept = any(x.save_positions)
        how: dict[str, Any] = {"is_kept": kept, "after_jump": solves, "most": np.size(times)}
        return TracedDiscrete(number, part, jump, x.save_positions, True, at_start, since, **how)

    def _condition(
        self, name: str, condition: Callable, shape: tuple, *, is_discrete: bool = False
    ) -> CallbackProgram:
        def of_arrays(u, p, extras, t):
            state, uprev = self._as_user_gave(u), extras.get("uprev")
            if uprev is not None:
                uprev = self._as_user_gave(uprev)
            integrator = self._integrator(state, p, t, uprev, extras.get("tprev"))
            out = condition(state, t, integrator)
            _check_number(out, shape, f"condition of {name}", is_boolean=is_discrete)
            return jnp.asarray(out).astype(u.dtype).reshape(math.prod(shape))

        extras = self._step if is_discrete else {}
        return self._part(name, "condition", condition, of_arrays, extras)

    def _jump(
        self,
        name: str,
        argument: str,
        affect: Callable,
        *,
        extras: dict,
        is_vector: bool = False,
        after_jump: bool = False,
    ) -> Jump:
        what, found = f"{argument} of {name}", []

        def of_arrays(u, p, extras, t):
            uprev = self._as_user_gave(extras["uprev"])
            sign = np.int32(1)
            if "mask" in extras:
                sign = extras["mask"].astype(jnp.int32).reshape(-1 if is_vector else ())
            before = self._integrator(self._as_user_gave(u), p, t, uprev, extras["tprev"], sign)
            after = affect(before, *([sign] if is_vector else []))
            if not isinstance(after, Integrator):
                hint = " (is a `return` missing?)" if after is None else ""
                raise TypeError(
                    f"{what} must return the integrator, got {type(after).__name__}{hint}: write "
                    "`return eo.remake(integrator, u=...)` or `return eo.terminate(integrator)`."
                )
            ends, changed = after._ends, self._changed(p, after.p, what)
            known = bool(ends) if isinstance(ends, bool | np.bool_) else None
            fails = not known and not jnp.issubdtype(jnp.result_type(ends), jnp.bool_)
            found[:] = [known, tuple(changed), None, fails]
            time = t
            if after_jump:
                direction = jnp.where(t < extras["tprev"], -1, 1).astype(t.dtype)
                later = next_time(ArrayArithmetic(jnp), t, direction)
                time = t + jax.lax.stop_gradient(later - t)
            vector = self._consistent(after, time, self._vector(after.u, what))
            numbers = [jnp.asarray(x, self.leaves[i].dtype) for i, x in changed.items()]
            parts = [vector, *numbers, jnp.asarray(ends)]
            return jnp.concatenate([real_vector(x).astype(u.dtype) for x in parts])

        part = self._part(name, argument, affect, of_arrays, {**self._step, **extras})
        return Jump(part, *found)

    @property
    def _step(self) -> dict[str, Any]:
        return {"uprev": self.u, "tprev": self.t}

    def _integrator(
        self,
        u: PyTree,
        leaves: Sequence,
        t: Array,
        uprev: PyTree,
        tprev: Array | None,
        sign: ArrayLike | None = None,
    ) -> Integrator:
        p = eqx.combine(jtu.tree_unflatten(self.structure, leaves), self.static)
        return Integrator(u, p, t, uprev, tprev, sign, _f=self.f)

    def _as_user_gave(self, u: PyTree) -> PyTree:
        """A state in the structure that the user gave."""
        return u if self.tree is None else self.tree.unravel(u)

    def _vector(self, u: PyTree, what: str) -> Array | None:
        """The state that an affect returned as a vector.

        **Raises:** `TypeError` and `ValueError` where its structure isn't that of the state.
        """
        avals, structure = jtu.tree_flatten(jax.eval_shape(self._as_user_gave, self.u))
        if self.tree is None and isinstance(u, list | tuple):
            u = jnp.asarray(u)
        if jtu.tree_structure(u) != structure:
            raise TypeError(
                f"{what} must make a state of the structure of u0, {structure}; it made one of "
                f"{jtu.tree_structure(u)}."
            )
        leaves = []
        for (path, x), aval in zip(jtu.tree_leaves_with_path(u), avals, strict=True):
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
            leaves.append(array.astype(aval.dtype))
        return leaves[0].reshape(-1) if self.tree is None else self.tree.ravel(leaves)

    def _consistent(self, after: Integrator, t: Array, u: PyTree) -> Array:
        """The state `u` after an affect, with its algebraic equations at `t` solved again."""
        if self.mass is None:
            return u

        def f(u: PyTree) -> Array:
            found = self.f(self._as_user_gave(u.reshape(self.u.shape)), after.p, t)
            return jnp.reshape(found, -1) if self.tree is None else self.tree.ravel(found)

        return consistent_again(f, self.mass, u)

    def _changed(self, before: Sequence, p: PyTree, what: str) -> dict[int, Any]:
        """The leaves of the parameters that an affect has changed, by their index.

        **Raises:** `TypeError` and `ValueError` where the structure of the parameters has changed.
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
            fits = np.issubdtype(aval.dtype, np.inexact) and np.finfo(aval.dtype).dtype == (
                self.u.dtype
            )
            if not fits or jnp.result_type(x, aval.dtype) != aval.dtype:
                raise TypeError(
                    f"{what} changes leaf {i} of p, {aval.dtype}, to {jnp.result_type(x)}: numbers "
                    f"of p that change have the precision of the state, {self.u.dtype}."
                )
        return changed

    def _part(
        self, name: str, argument: str, fn: Callable, of_arrays: Callable, extras: dict[str, Any]
    ) -> CallbackProgram:
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
        except dataclasses.FrozenInstanceError as e:
            raise TypeError(
                f"{argument} of {name} {e}: an integrator doesn't change; write "
                "`return eo.remake(integrator, u=...)`."
            ) from e
        check_reads(f"{argument} of {name}", program, consts)
        check_once(
            fn,
            lambda: numbers_in(program, consts) == numbers_in(*trace(flat, *args)),
            f"{argument} of {name} gives another value each time it is called (by random numbers "
            "of NumPy or Python, or the clock). It is traced once: draw them before, and pass them "
            "in p.",
        )
        program, used = _without_unused(without_mesh(program), n, tuple(extras))
        program, written = with_numbers_apart(program)
        start = len(self.consts)
        self.consts += [*consts, *written]
        return CallbackProgram(program, used, start)


def _without_unused(
    program: Program, n: int, extras: tuple[str, ...]
) -> tuple[Program, tuple[str, ...]]:
    """The program without those of its `extras` that it doesn't read, and the names of those
    left."""
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
