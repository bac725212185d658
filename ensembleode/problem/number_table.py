"""The table of a trajectory's numbers: which there are, and what modules need to know about each.

The options with their checks and aliases, `TrajectoryNumbers`, fingerprints, the layouts of
engines, the checks of ensembles whose trajectories share steps, and the arrays of Julia's requests
are all made from these rows. So a new number needs only a row here, and the code that uses it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class NumberRow(NamedTuple):
    """A kind of number that a trajectory has.

    - `name`: its field in `TrajectoryNumbers`.
    - `option`: the part of the problem, or the option, by which the user gives it; empty where the
        library makes it.
    - `kind`: one of `state`, the initial state; `parameters`, arrays; `constants`, arrays that a
        function `(u, p, t)`, the one named by `option`, closes over; `time`; `times` to save, and
        their `count`; `tolerance`, a number, or one for each component; `step`, the size of a step;
        `bound`, of step sizes; `limit`, of the state; `table`, equally many numbers for each
        trajectory; `stops`, equally many known times for each trajectory, at which steps end,
        sorted and filled up with infinity; `flag`, which all trajectories share.
    - `default`: the default of the option.
    - `check`: a function of the option's name and its value, which refuses wrong known values.
    - `aliases`: the names of the option in other libraries.
    - `dtype`: its dtype, where that is not the precision of the state.
    - `digest`: its name in a fingerprint, where that is not the option's name.
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
    """The value as a NumPy array.

    **Raises:** `TypeError` that names `what`, for a value that is no array of real numbers.
    """
    import numpy as np  # imported here, since `--help` reads the table and needs no NumPy

    array = np.asarray(value)
    if array.dtype.kind not in "fiu":  # (To NumPy, a span of time is a signed integer.)
        raise TypeError(what)
    return array


def check_tolerance(name: str, value: Any) -> None:
    """**Raises:** `TypeError` and `ValueError` for a value that is no tolerance."""
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


def _check_limit(name: str, value: Any) -> None:
    what = f"{name} must be a positive number, got {value!r}."
    limit = check_real(value, what)
    if limit.ndim or not limit > 0:
        raise ValueError(what)


def check_stops(name: str, value: Any) -> None:
    """**Raises:** `TypeError` and `ValueError` for a value that can't be the known times of the
    option `name`."""
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


# The fingerprints of stores depend on the order of the rows: a new one comes last, and is named in
# `running/fingerprint.py`.
NUMBERS = [
    NumberRow("u0", "u0", "state"),
    NumberRow("p", "p", "parameters"),
    NumberRow("consts", "f", "constants", digest="what f closes over"),
    NumberRow("t0", "tspan", "time"),
    NumberRow("t1", "tspan", "time"),
    NumberRow("saveat", "saveat", "times", aliases="save_at"),
    NumberRow("count", "saveat", "count", dtype="int32"),
    NumberRow("abstol", "abstol", "tolerance", 1e-6, check_tolerance, "atol"),
    NumberRow("reltol", "reltol", "tolerance", 1e-3, check_tolerance, "rtol"),
    NumberRow("dt", "dt", "step", None, _check_step, "first_step dt0 h0"),
    NumberRow("dtmin", "dtmin", "bound", None, _check_bound, "min_step", digest="dtmin and dtmax"),
    NumberRow("dtmax", "dtmax", "bound", None, _check_bound, "max_step", digest="dtmin and dtmax"),
    NumberRow("tstops", "tstops", "stops", None, check_stops, "step_ts"),
    NumberRow("d_discontinuities", "d_discontinuities", "stops", None, check_stops, "jump_ts"),
    NumberRow("stop", "", "flag"),
    NumberRow("callback_consts", "callback", "constants", digest="what callbacks close over"),
    NumberRow("max_norm", "max_norm", "limit", None, _check_limit, "unstable_check"),
]


def of_kind(*kinds: str) -> list[NumberRow]:
    """The rows of these kinds."""
    return [x for x in NUMBERS if x.kind in kinds]


def but(*kinds: str) -> list[NumberRow]:
    """The rows of all other kinds."""
    return [x for x in NUMBERS if x.kind not in kinds]
