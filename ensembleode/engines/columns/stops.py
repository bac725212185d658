"""The position of a time loop among its known times, `tstops` and `d_discontinuities`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem.number_table import of_kind
from ...solvers.arithmetic import ARRAYS
from ...solvers.time import end_of_stretch, next_time


_NAMES = [row.name for row in of_kind("stops")]


class ColumnStops(NamedTuple):
    """The variables for known times.

    - `rows`: for each table, which is sorted, the row of the next time.
    - `tstop`: the end of the current stretch of time, beyond which no step goes.
    - `anchor`, `tried`: where the stretch begins, and how many steps had been tried until then.
    - `restarts`: the number of stretches so far that begin after a discontinuity.
    """

    rows: tuple[Int[Array, ""], ...]
    tstop: Float[Array, ""]
    anchor: Float[Array, ""]
    tried: Int[Array, ""]
    restarts: Int[Array, ""]


def _tables(numbers: TrajectoryNumbers) -> dict[str, Any]:
    """The tables of known times, `[time]`."""
    tables = {name: getattr(numbers, name) for name in _NAMES}
    return {name: table for name, table in tables.items() if table is not None}


def begin(numbers: TrajectoryNumbers) -> tuple[ColumnStops | None, Any]:
    """The variables at the start, and whether `f` jumps there; None without known times."""
    tables = _tables(numbers)
    if not tables:
        return None, None
    none = jnp.zeros((), jnp.int32)
    t0 = jnp.asarray(numbers.t0)
    stops = ColumnStops((none,) * len(tables), t0, t0, none, none)
    return arrive(numbers, stops, t0, none, jnp.array(True))


def arrive(
    numbers: TrajectoryNumbers, stops: ColumnStops, t: Array, tried: Array, here: Array
) -> tuple[ColumnStops, Any]:
    """The variables in the next stretch of time if that begins `here`, at `t`; and whether `f`
    jumps there, so that the stretch begins a unit in the last place later."""
    tables, direction = _tables(numbers), jnp.sign(numbers.t1 - numbers.t0)
    jumps = jnp.zeros_like(here)
    if (table := tables.get("d_discontinuities")) is not None:
        row = stops.rows[list(tables).index("d_discontinuities")]
        jumps = here & (_time_of_row(table, row, direction) == t)
    t = jnp.where(jumps, next_time(ARRAYS, t, direction), t)

    def passed(table: Array, row: Array) -> Array:
        """The first row after the time `t`."""

        def due(row: Array) -> Array:
            return here & (direction * (t - _time_of_row(table, row, direction)) >= 0)

        return jax.lax.while_loop(due, lambda row: row + 1, row)

    rows = tuple(passed(x, row) for x, row in zip(tables.values(), stops.rows, strict=True))
    ahead = [_time_of_row(x, row, direction) for x, row in zip(tables.values(), rows, strict=True)]
    end = end_of_stretch(ARRAYS, ahead, numbers.t1, direction)
    stops = ColumnStops(
        rows,
        jnp.where(here, end, stops.tstop),
        jnp.where(here, t, stops.anchor),
        jnp.where(here, tried, stops.tried),
        stops.restarts + jumps.astype(stops.restarts.dtype),
    )
    return stops, jumps


def _time_of_row(table: Array, row: Array, direction: Array) -> Array:
    """The time of a row; infinitely far where there are no more rows."""
    return jnp.where(row < len(table), table.at[row].get(mode="clip"), direction * jnp.inf)


def may_jump(numbers: TrajectoryNumbers, t: Any) -> Any:
    """Whether `f` may jump at `t`. (A jump at the end of the solve is not in the table.)"""
    return jnp.any(t == numbers.d_discontinuities) | (t == numbers.t1)
