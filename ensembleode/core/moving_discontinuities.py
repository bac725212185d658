"""Times where the field jumps that move: the plan that has their derivatives.

A step ends at such a time, and the next one begins a unit in the last place later, with the field
from there on. With other numbers the jump would be `delta` later: until then the state goes on
along the field up to there, and it is followed back to the fixed time along the field from there
on. That is a jump of the kind that `moving.py` has, which changes nothing, at a known time: a
callback of the library's own, whose times are one more parameter of the field, which doesn't read
it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..fields import parameters_of, staged
from ..tracing.program import Program, program_of
from .events import Discrete, Events, Jump, over, Part
from .plan import Plan


def with_moving_discontinuities(plan: Plan, table: Any) -> Plan:
    """The plan whose field has the known times as its last parameter, behind what it has in its
    other constants and parameters, which are all in `p` then; and jumps that move with it.

    **Arguments:** `table`: the shape and dtype of the times of a trajectory.
    """
    assert isinstance(plan.field, Program)
    avals = [*parameters_of(plan.field), table]
    numbers = tuple((x.shape, x.dtype) for x in avals)
    field, events = _widened(plan.field, plan.events, numbers)
    form = plan.form and plan.form.over(numbers, tuple(range(len(numbers) - 1)))
    batched = plan.batched
    p = (*batched.parameters, bool(batched.d_discontinuities))
    batched = batched._replace(consts=(), p=p)
    return dataclasses.replace(plan, field=field, form=form, events=events, batched=batched)


@functools.lru_cache(maxsize=256)
def _widened(field: Program, events: Events | None, numbers: tuple) -> tuple[Program, Events]:
    places = tuple(range(len(numbers) - 1))

    def among(part: Part, changes: Any) -> Part:
        del changes
        return over(part, numbers, places)

    field = over(Part(field), numbers, places).program
    before = Events((), ()) if events is None else events.mapped(among)
    return field, dataclasses.replace(before, discrete=(*before.discrete, _at_jumps(field)))


def _at_jumps(field: Program) -> Discrete:
    """What is done at the times that are the last parameter of the field: nothing. (Last of all
    that happens then, which the field up to there governs.)"""

    def part(fn: Any) -> Part:
        def at(consts: Any, u: Any, p: Any, t: Any) -> Any:
            del consts
            return fn(u, p[-1], t)

        return Part(program_of(staged(field, at), jax.tree.structure(0), rules=True))

    def wanted(u: Any, times: Any, t: Any) -> Any:
        return jnp.any(t == times).astype(u.dtype)[None]

    def passed(u: Any, times: Any, t: Any) -> Any:
        since = t - jnp.max(jnp.where(t == times, times, -jnp.inf), initial=-jnp.inf)
        return since.astype(u.dtype)[None]

    def nothing(u: Any, times: Any, t: Any) -> Any:
        del times, t
        return jnp.concatenate([u.reshape(-1), jnp.zeros(1, u.dtype)])

    return Discrete(
        -1,
        part(wanted),
        Jump(part(nothing), ends=False),
        (False, False),
        scheduled=True,
        passed=part(passed),
        is_kept=False,
        is_discontinuity=True,
    )
