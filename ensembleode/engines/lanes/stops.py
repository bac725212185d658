"""The position of the lanes of a chunk among their known times, `tstops` and
`d_discontinuities`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ...core.lane import Lane
from ...numbers import of_kind
from ...solvers.time import end_of_stretch, next_time, size_before
from .leaves import LANES, OfLanes


_NAMES = [row.name for row in of_kind("stops")]


class Stops(NamedTuple):
    """The variables for known times; they have no axis where all lanes share their steps.

    - `rows`: for each table, which is sorted, the row of the next time.
    - `tstop`: the end of the current stretch of time, beyond which no step goes.
    - `anchor`: the time at which the stretch begins; `tried`: how many steps the chunk had tried
        until then. Fixed steps are laid out from there.
    - `anew`: whether the stretch begins after a discontinuity, and no step has been taken in it
        yet.
    - `restarts`: the number of such stretches so far.
    """

    rows: tuple[Int[Array, "*lane"], ...]
    tstop: OfLanes
    anchor: OfLanes
    tried: Int[Array, "*lane"]
    anew: Bool[Array, "*lane"]
    restarts: Int[Array, "*lane"]


def tables_of(chunk: Lane) -> dict[str, Any]:
    """The tables of known times of a chunk: `[time]` or `[time, lane]`."""
    tables = {name: getattr(chunk, name) for name in _NAMES}
    return {name: table for name, table in tables.items() if table is not None}


def has_own(chunk: Lane) -> bool:
    """Whether lanes have known times of their own."""
    return any(x.ndim > 1 for x in tables_of(chunk).values())


def has_jumps(chunk: Lane) -> bool:
    """Whether `f` jumps at known times."""
    return "d_discontinuities" in tables_of(chunk)


def begin(chunk: Lane, t: OfLanes, t1: OfLanes) -> tuple[Stops | None, Any]:
    """The variables at the start of all lanes, and a mask of the lanes that start at a
    discontinuity. None without known times."""
    tables = tables_of(chunk)
    if not tables:
        return None, None
    none = jnp.zeros(t.shape, jnp.int32)
    never = jnp.zeros(t.shape, bool)
    stops = Stops((none,) * len(tables), t, t, none, never, none)
    return arrive(chunk, stops, t, t1, jnp.sign(t1 - t), none, ~never)


def arrive(
    chunk: Lane, stops: Stops, t: OfLanes, t1: OfLanes, direction: Any, tries: Any, here: Any
) -> tuple[Stops, Any]:
    """The variables in the next stretch of time, for the lanes `here`, whose stretch ends at `t`;
    and a mask of the lanes where `f` jumps, so that the stretch begins a unit in the last place
    later."""
    tables = tables_of(chunk)
    jumps = jnp.zeros_like(here)
    if (table := tables.get("d_discontinuities")) is not None:
        row = stops.rows[list(tables).index("d_discontinuities")]
        jumps = here & (_at(table, row, direction) == t)
    t = jnp.where(jumps, next_time(LANES, t, direction), t)
    rows = tuple(
        _passed(table, row, t, direction, here)
        for table, row in zip(tables.values(), stops.rows, strict=True)
    )
    ahead = [_at(x, row, direction) for x, row in zip(tables.values(), rows, strict=True)]
    stops = Stops(
        rows,
        jnp.where(here, end_of_stretch(LANES, ahead, t1, direction), stops.tstop),
        jnp.where(here, t, stops.anchor),
        jnp.where(here, tries, stops.tried),
        jnp.where(here, jumps, stops.anew),
        stops.restarts + jumps.astype(stops.restarts.dtype),
    )
    return stops, jumps


def _passed(table: Any, row: Any, t: Any, direction: Any, here: Any) -> Any:
    """The first row after the time `t`, in the lanes `here`."""

    def due(row):
        return here & (direction * (t - _at(table, row, direction)) >= 0)

    return jax.lax.while_loop(
        lambda row: jnp.any(due(row)), lambda row: row + due(row).astype(row.dtype), row
    )


def _at(table: Any, row: Any, direction: Any) -> Any:
    """The time of a row; infinitely far where there are no more rows."""
    if table.ndim == 1:
        time = table.at[row].get(mode="clip")
    else:
        time = jnp.take_along_axis(table, jnp.minimum(row, len(table) - 1)[None], axis=0)[0]
    return jnp.where(row < len(table), time, direction * jnp.inf)


def steps_between(chunk: Lane, t: Any, direction: Any) -> tuple[Any, Any]:
    """The starts and the signed sizes of the steps that end at the times `t [1 + step, lane]`, of
    which the first is the start of all."""
    begins, ends = t[:-1], t[1:]
    table = tables_of(chunk).get("d_discontinuities")
    if table is None:
        return begins, ends - begins
    direction = direction + jnp.zeros_like(begins)
    jumps = jnp.any(begins[None] == table.reshape(len(table), 1, -1), axis=0)
    begins = jnp.where(jumps, next_time(LANES, begins, direction), begins)
    return begins, size_before(LANES, begins, ends, may_jump(chunk, ends), direction)


def may_jump(chunk: Lane, t: Any) -> Any:
    """Whether `f` may jump at each of these times `[*axes, lane]`. (A jump at the end of the solve
    is not in the table.)"""
    table = tables_of(chunk)["d_discontinuities"]
    table = table.reshape(len(table), *(1,) * (t.ndim - 1), -1)
    return jnp.any(t[None] == table, axis=0) | (t == chunk.t1)
