"""How far the states within a step are from the state at its end."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .method import Method
from .runge_kutta import polynomial, RungeKutta


# A bound on the rounding error of a weight, in rounding errors of its coefficients.
_OF_WEIGHTS = 64


class Reach(NamedTuple):
    """The largest weights in the distance from the end of a step of size `h`. The distance is at
    most `|y2 - y| + sum_i(of_errors_i |error_i|) + of_stages |h| sum_i(|k_i|)`, component by
    component, where the `error_i` are the estimates and the `k_i` the stages of the step."""

    of_errors: tuple[float, ...]
    of_stages: float


def reach(method: Method, points: Sequence[float], dtype: Any, *, has_errors: bool) -> Reach | None:
    """The reach of a method's dense output at points of a step.

    At a point, the state of a Runge-Kutta method differs from that at the end by
    `h sum_i((w_i - b_i) k_i)`. The weights are taken apart into a share of the change from end to
    end, the multiple of the errors that fits the rest best, and what remains.

    **Arguments:** `points`: from zero to one; `dtype`: that of the state, whose rounding errors are
        added; `has_errors`: whether the step has error estimates.

    **Returns:** None where nothing is known: for other methods, and where dense output takes
    evaluations of its own.
    """
    if not isinstance(method, RungeKutta) or method.tableau.interpolant.extra_c:
        return None
    tableau = method.tableau
    weights = np.array(tableau.interpolant.weights)
    known = np.zeros((1 + len(tableau.errors) * has_errors, len(weights)))
    for row, found in zip(known, (tableau.b, *tableau.errors), strict=False):
        row[: len(found)] = found
    ends, errors = known[0], known[1:]
    thetas = np.array(points)
    at = np.array([[polynomial(tuple(w), x) for w in weights] for x in thetas])
    rest = at - thetas[:, None] * ends
    of_errors = rest @ np.linalg.pinv(errors)
    rest = np.abs(rest - of_errors @ errors)
    most = np.abs(of_errors).max(0)
    sizes = np.abs(weights).sum(1) + np.abs(ends) + most @ np.abs(errors)
    rest += sizes * (_OF_WEIGHTS * np.finfo(dtype).eps)
    return Reach(tuple(most.tolist()), float(rest.max()))
