"""The table of a trajectory's numbers: what there is, and what each module has to know of it.

Options, their checks and other names, `Lane`, fingerprints, the layouts of engines, what ensembles
share that share steps, and the arrays of Julia's requests are made of these rows: a new number
needs no more than its row, and what uses it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """What a trajectory has of one kind.

    - `name`: the field of a `Lane`.
    - `option`: what the user gives it by, a part of the problem or an option; empty where the
        library makes it.
    - `kind`: `state`, the first one; `parameters`, arrays; `constants`, arrays that the program
        named by `option` closes over, a function `(u, p, t)`; `time`; `times` to save, and the
        `count` of them; `tolerance`, a number or one a component; `step`, the size of one; `bound`
        of steps; `table`, several numbers, as many for each trajectory; `stops`, as many known
        times to be stepped onto, in the order in which they come, and infinitely far where there
        are no more; `flag`, which all share.
    - `default`: of the option.
    - `check`: refuses values (known ones) of the option, given its name and the value.
    - `aliases`: what other libraries call the option.
    - `dtype`: where that is not the precision of the state.
    - `digest`: its name in a fingerprint, where that is not the option's.
    """

    name: str
    option: str
    kind: str
    default: Any = None
    check: Callable[[str, Any], None] | None = None
    aliases: str = ""
    dtype: Any = None
    digest: str | None = None


def check_real(value: Any, what: str) -> Any:
    """As a NumPy array.

    **Raises:** `TypeError`, which says `what`, for what is no array of real numbers.
    """
    import numpy as np  # (`--help` reads the table, and needs none of it)

    array = np.asarray(value)
    if not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)):
        raise TypeError(what)
    return array


def check_tolerance(name: str, value: Any) -> None:
    """
    **Raises:** `TypeError` and `ValueError` for what is no tolerance.
    """
    what = f"{name} must be zero or positive, got {value!r}."
    if not (check_real(value, what) >= 0).all():
        raise ValueError(what)


def _check_step(name: str, value: Any, *, signed: bool = True) -> None:
    kind = "finite step size other than zero" if signed else "positive, finite step size"
    what = f"{name} must be a {kind}, got {value!r}."
    size = check_real(value, what)
    if size.ndim or not math.isfinite(size) or size == 0 or (size < 0 and not signed):
        raise ValueError(what)


def _check_bound(name: str, value: Any) -> None:
    _check_step(name, value, signed=False)


def check_stops(name: str, value: Any) -> None:
    """
    **Raises:** `TypeError` and `ValueError` for what are no known times of the option `name`.
    """
    import numpy as np

    what = (
        f"{name} must be a time, an array of times, or an array [trajectory, time], got {value!r}."
    )
    try:
        times = check_real(value, what)
    except ValueError:  # ragged
        raise TypeError(what) from None
    if times.ndim > 2:
        raise ValueError(what)
    if np.isnan(times).any():
        raise ValueError(f"{name} has a time that is NaN; fill rows that are shorter with inf.")


# (Fingerprints of stores tell the order of the rows.)
NUMBERS = [
    Row("u0", "u0", "state"),
    Row("p", "p", "parameters"),
    Row("consts", "f", "constants", digest="what f closes over"),
    Row("t0", "tspan", "time"),
    Row("t1", "tspan", "time"),
    Row("saveat", "saveat", "times", aliases="save_at"),
    Row("count", "saveat", "count", dtype="int32"),
    Row("abstol", "abstol", "tolerance", 1e-6, check_tolerance, "atol"),
    Row("reltol", "reltol", "tolerance", 1e-3, check_tolerance, "rtol"),
    Row("dt", "dt", "step", None, _check_step, "first_step dt0 h0"),
    Row("dtmin", "dtmin", "bound", None, _check_bound, "min_step", digest="dtmin and dtmax"),
    Row("dtmax", "dtmax", "bound", None, _check_bound, "max_step", digest="dtmin and dtmax"),
    Row("tstops", "tstops", "stops", None, check_stops, "step_ts"),
    Row("d_discontinuities", "d_discontinuities", "stops", None, check_stops, "jump_ts"),
    Row("stop", "", "flag"),
    Row("callback_consts", "callback", "constants", digest="what callbacks close over"),
]


def of_kind(*kinds: str) -> list[Row]:
    """The rows of these kinds."""
    return [x for x in NUMBERS if x.kind in kinds]


def but(*kinds: str) -> list[Row]:
    """The rows of other kinds."""
    return [x for x in NUMBERS if x.kind not in kinds]
