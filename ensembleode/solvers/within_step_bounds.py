"""How far the states within a step are from the state at its end, and how much rounding blurs
them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from .explicit_runge_kutta import polynomial, RungeKutta
from .method import Method


# A bound on the rounding error of a weight, in rounding errors of its coefficients.
_OF_WEIGHTS = 64


class Reach(NamedTuple):
    """How far the states within a step of size `h` are from its end, component by component: at
    most `of_error |error| + of_stages |h| max_i(|k_i|)`, where the `error` is the first estimate of
    the step, and the k_i are these `stages`."""

    of_error: float
    of_stages: float
    stages: tuple[int, ...]


def blur(method: Any, dtype: DTypeLike) -> float:
    """How far rounding may move a state within a step along the solution, as a part of the step.
    The polynomials of high-order dense output have large coefficients that nearly cancel.

    **Arguments:** `method`: a `Method`, or a switching one.
    """
    if isinstance(method, RungeKutta):
        coefficients = method.tableau.interpolant.weights
    elif hasattr(method, "nonstiff"):
        return max(blur(method.nonstiff, dtype), blur(method.stiff, dtype))
    else:
        coefficients = getattr(method, "within", 8.0)  # those of Rosenbrock23 add up to 8.6
    return float(np.abs(np.array(coefficients)).sum() * np.finfo(dtype).eps / 2)


def reach(
    method: Method, points: Sequence[float], dtype: DTypeLike, *, has_errors: bool
) -> Reach | None:
    """The reach of a method's dense output at points of a step.

    At a point, the state of a Runge-Kutta method differs from that at the end by
    `h sum_i((w_i - b_i) k_i)`. A multiple of the error estimate is taken out of the weights, such
    that one stage drops out: the one for which the weights of the others are least.

    **Arguments:** `points`: from zero to one; `dtype`: that of the state, whose rounding errors are
    added; `has_errors`: whether the step has error estimates.

    **Returns:** None where nothing is known: for other methods, and where dense output takes
    evaluations of its own.
    """
    if not isinstance(method, RungeKutta) or method.tableau.interpolant.extra_c:
        return None
    tableau = method.tableau
    coefficients = np.array(tableau.interpolant.weights)
    b, error = np.zeros((2, len(coefficients)))
    b[: len(tableau.b)] = tableau.b
    if has_errors:
        error[: len(tableau.errors[0])] = tableau.errors[0]
    weights = np.array([[polynomial(tuple(w), x) for w in coefficients] for x in points]) - b
    sizes = np.abs(coefficients).sum(1) + np.abs(b)

    def without(j: int | None) -> Reach:
        """The reach with this stage dropped."""
        multiples = np.zeros(len(weights)) if j is None else weights[:, j] / error[j]
        most = np.abs(multiples).max()
        rounding = (sizes + most * np.abs(error)) * (_OF_WEIGHTS * np.finfo(dtype).eps)
        rest = np.abs(weights - multiples[:, None] * error) + rounding
        stages = tuple(i for i in range(len(b)) if i != j)
        if j is not None:
            # What rounding leaves of the stage is bounded by the error and the other stages.
            left = rounding[j] / abs(error[j])
            rest, most = rest + left * np.abs(error), most + left
        return Reach(float(most), float(rest[:, list(stages)].sum(1).max()), stages)

    dropped = [*np.flatnonzero(error).tolist()] or [None]
    return min(map(without, dropped), key=lambda x: x.of_stages)
