"""Complex parameters as pairs of real numbers, so that engines need no complex ones."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from ..fields import parameters_of
from ..fields.complex_numbers import ComplexParts, is_complex
from ..tracing.program import Program, program_of, with_constants
from .events import CallbackProgram, Jump, TracedContinuous, TracedDiscrete
from .trajectory_numbers import Trajectories, TrajectoryNumbers


def with_real_numbers(traj: Trajectories) -> Trajectories:
    """The same ensemble with the real and the imaginary part in place of each complex constant and
    parameter of its programs. The state stays as it is."""
    events, n = traj.events, len(traj.field.jaxpr.constvars)
    read = parameters_of(traj.field)
    avals = {"consts": read[:n], "p": read[n:], "callback_consts": events.consts if events else []}
    are_complex = {name: [*map(is_complex, each)] for name, each in avals.items()}
    if not any(map(any, are_complex.values())):
        return traj

    def in_two(lane: TrajectoryNumbers, split: Callable[[Any], Sequence]) -> TrajectoryNumbers:
        """The numbers of a trajectory, with two in the place of each complex one."""

        def changed(name: str, those: list[bool]) -> tuple | None:
            numbers = getattr(lane, name)
            if numbers is None:
                return None
            parts = [split(x) if y else [x] for x, y in zip(numbers, those, strict=True)]
            return tuple(itertools.chain(*parts))

        return lane._replace(**{name: changed(name, x) for name, x in are_complex.items()})

    def real(part: CallbackProgram) -> CallbackProgram:
        more = sum(are_complex["callback_consts"][: part.start])
        return CallbackProgram(_of_real_numbers(part.program), part.extras, part.start + more)

    def real_jump(_: TracedContinuous | TracedDiscrete, jump: Jump) -> Jump:
        changes = itertools.chain(*map(numbers_of, jump.changes))
        return dataclasses.replace(jump, part=real(jump.part), changes=tuple(changes))

    def numbers_of(i: int) -> tuple[int, ...]:
        """The places among the numbers of the parameters of the one in place `i`."""
        first = i + sum(are_complex["p"][:i])
        return (first, first + 1) if are_complex["p"][i] else (first,)

    before_key = sum(are_complex["consts"][: traj.noise.first]) if traj.noise else 0
    found = traj.changed(
        lambda lane: in_two(lane, _parts),
        field=_of_real_numbers(traj.field),
        beside=tuple((name, _of_real_numbers(program)) for name, program in traj.beside),
        events=events and events.changed(real, real_jump),
        form=traj.form and traj.form.mapped(_of_real_numbers),
        noise=traj.noise and traj.noise.mapped(_of_real_numbers, before_key),
        batched=in_two(traj.batched, lambda x: (x, x)),
        shared=in_two(traj.shared, _parts),
    )
    if (given := traj.given) is None:
        return found
    places = [ComplexParts(0, 0) if x else 0 for x in are_complex["p"]]
    numbers = jax.tree.structure(jax.tree.unflatten(given.numbers, places))
    given = dataclasses.replace(given, lanes=found.lanes, batched=found.batched, numbers=numbers)
    return dataclasses.replace(found, given=given)


def _parts(x: Any) -> tuple:
    return (None, None) if x is None else (x.real, x.imag)


@functools.lru_cache(maxsize=256)
def _of_real_numbers(program: Program) -> Program:
    """The program `(consts, u, p, t)` with two real numbers in the place of each complex one in
    `consts` and `p`."""
    constants, (u, *inputs) = program.jaxpr.constvars, program.jaxpr.invars
    avals: list = [v.aval for v in (*constants, *inputs)]
    if not any(map(is_complex, avals)):
        return program

    def joined(u: Array, *flat: Any) -> list[Array]:
        given = iter(flat)
        values = [
            jax.lax.complex(next(given), next(given)) if is_complex(x) else next(given)
            for x in avals
        ]
        consts, values = values[: len(constants)], values[len(constants) :]
        return jax.tree.leaves(program(consts, u, *values))

    parts = [
        [jax.ShapeDtypeStruct(x.shape, np.finfo(x.dtype).dtype)] * 2 if is_complex(x) else [x]
        for x in avals
    ]
    state: Any = u.aval
    inner: Any = jax.make_jaxpr(joined)(state, *itertools.chain(*parts)).jaxpr
    n = sum(map(len, parts[: len(constants)]))
    first, *rest = inner.invars
    return program_of(
        with_constants(inner, rest[:n], [first, *rest[n:]]), program.out_tree, rules=True
    )
