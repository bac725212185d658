"""Derivatives with respect to times at which the field jumps.

A step ends at such a time, and the next step begins a unit in the last place later, with the field
after the jump. With slightly different numbers the jump would be `delta` later: the state would
follow the field before the jump until then, and is followed back to the fixed time along the field
after the jump. That is a jump at a known time as in `moving.py` which leaves the state as it is. A
callback of the library's own makes it. The known times are an additional parameter of the field,
which the field doesn't read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from ..fields import parameters_of, staged
from ..plan.events import CallbackProgram, Jump, over_numbers, TracedCallbacks, TracedDiscrete
from ..plan.plan import Plan
from ..tracing.program import Program, program_of


def with_moving_discontinuities(plan: Plan, table: Any) -> Plan:
    """The plan with the known times (of the shape and dtype of `table`) as the last parameter of
    its field, all of whose numbers are in `p`, and with a callback whose time moves with them."""
    assert isinstance(plan.field, Program)
    avals = [*parameters_of(plan.field), table]
    numbers = tuple((x.shape, x.dtype) for x in avals)
    field, events = _widened(plan.field, plan.events, numbers)
    form = plan.form and plan.form.over_numbers(numbers, tuple(range(len(numbers) - 1)))
    batched = plan.batched
    p = (*batched.parameters, bool(batched.d_discontinuities))
    batched = batched._replace(consts=(), p=p)
    return dataclasses.replace(plan, field=field, form=form, events=events, batched=batched)


@functools.lru_cache(maxsize=256)
def _widened(
    field: Program, events: TracedCallbacks | None, numbers: tuple
) -> tuple[Program, TracedCallbacks]:
    places = tuple(range(len(numbers) - 1))

    def among(part: CallbackProgram, changes: Any) -> CallbackProgram:
        return over_numbers(part, numbers, places)

    field = over_numbers(CallbackProgram(field), numbers, places).program
    before = TracedCallbacks((), ()) if events is None else events.mapped(among)
    return field, dataclasses.replace(before, discrete=(*before.discrete, _at_jumps(field)))


def _at_jumps(field: Program) -> TracedDiscrete:
    """The callback that acts at the times in the last parameter of the field, and changes nothing.
    It acts last, because what else happens at that time belongs to the field before the jump."""

    def part(fn: Callable) -> CallbackProgram:
        def at(consts: Any, u: PyTree, p: tuple[Array, ...], t: Array) -> Array:
            return fn(u, p[-1], t)

        return CallbackProgram(program_of(staged(field, at), jax.tree.structure(0), rules=True))

    def wanted(u: PyTree, times: Array, t: Array) -> Array:
        return jnp.any(t == times).astype(u.dtype)[None]

    def passed(u: PyTree, times: Array, t: Array) -> Array:
        since = t - jnp.max(jnp.where(t == times, times, -jnp.inf), initial=-jnp.inf)
        return since.astype(u.dtype)[None]

    def nothing(u: PyTree, times: Array, t: Array) -> Array:
        return jnp.concatenate([u.reshape(-1), jnp.zeros(1, u.dtype)])

    return TracedDiscrete(
        -1,
        part(wanted),
        Jump(part(nothing), ends=False),
        (False, False),
        scheduled=True,
        passed=part(passed),
        is_kept=False,
        is_discontinuity=True,
    )
