"""Tracing of a `prob_func` over the index, and a check that it makes the same problem each time."""

import contextlib
import weakref
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jax import Array

from ..ground.devices.placement import copied_to_jax
from ..tracing.program import is_tracer, Program, trace
from ..tracing.purity import contents, numbers_in, owned, random_state
from .trajectory_maker import TrajectoryMaker


class ProbFuncTrace(NamedTuple):
    """A `prob_func` traced over the index: the numbers of a trajectory, some of which depend on
    it."""

    program: Program
    consts: list
    leaves: list
    structure: Any


def _trace(maker: TrajectoryMaker, key: Array) -> ProbFuncTrace:
    found: dict[str, Any] = {}

    def outputs(index, repeat, key):
        found["leaves"], found["structure"] = jtu.tree_flatten(maker(index, repeat, key))
        return [x for x in found["leaves"] if is_tracer(x)]

    # Python numbers are traced as weakly typed, so `ctx.index` mixes with any dtype, as an int
    # does.
    program, consts = trace(outputs, 0, 1, key, rules=True)
    return ProbFuncTrace(program, consts, **found)


def _numbers(maker: TrajectoryMaker, made: ProbFuncTrace) -> tuple:
    """All numbers that a call of `prob_func` produced."""
    known = jtu.tree_leaves(maker.ens.prob)
    # The arrays that these programs close over are among the leaves.
    beside = [] if maker.events is None else [x.program for x in maker.events.parts]
    programs = [numbers_in(x, ()) for x in (*maker.programs.values(), *beside)]
    program = numbers_in(made.program, made.consts, known)
    return program, contents(made.leaves, known), programs, maker.static_numbers()


_CALLS_WITH_DRAWS = 12
_known_as_pure: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class ImpureError(Exception):
    """A `prob_func` makes a different problem each time that it is called."""

    def __init__(self):
        super().__init__(
            "prob_func makes another problem each time it is called (by random numbers of NumPy or "
            "Python, or the clock). Inside jit it is called once, for all trajectories and every "
            "later run: draw random numbers by jax.random with ctx.key, or pass them in from "
            "outside."
        )


def trace_checked(maker: TrajectoryMaker, key: Array) -> ProbFuncTrace:
    """The trace of `maker`. The first time that its `prob_func` is seen, it is traced twice.

    **Raises:** `ImpureError` where the second trace differs.
    """
    prob_func = maker.ens.prob_func
    if prob_func is None:
        return _trace(maker, key)
    state = random_state()
    made = _trace(maker, key)
    drew = random_state() != state
    if not drew and _known_as_pure.get(id(prob_func)) is prob_func:
        return made
    numbers = _numbers(maker, made)  # now, as the second call may write into these arrays
    # Copies, since JAX keeps what it made of a NumPy array for as long as that array lives.
    made = made._replace(consts=list(map(owned, made.consts)), leaves=list(map(owned, made.leaves)))
    # Where random numbers decide a branch, both traces may take the same one by chance.
    for _ in range(_CALLS_WITH_DRAWS):
        state, again = random_state(), maker.again()
        if _numbers(again, _trace(again, key)) != numbers:
            raise ImpureError
        drew, drew_before = random_state() != state, drew
        if not (drew or drew_before):
            break
    with contextlib.suppress(TypeError):  # few callables have no weak references
        _known_as_pure[id(prob_func)] = prob_func
    return made


def as_input(x: Any) -> Any:
    # A number stays a number: inside of the user's jit it is then a constant, which XLA can fold.
    return x if isinstance(x, jax.Array) or np.ndim(x) == 0 else copied_to_jax(x)
