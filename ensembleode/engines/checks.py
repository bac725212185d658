"""What engines check of a solver and its options alike."""

from typing import Any

import numpy as np

from ..core.lane import Lane
from ..options import holds_tolerances
from ..solvers import ODESolver


def refusal_of_ours(
    name: str, alg: Any, options: dict, dtype: Any, *, more: str = ""
) -> str | None:
    """Why the engine of this name, which runs our own solvers, can't run `alg`; None if it can.

    `more`: what it runs besides, as its message has it.
    """
    if dtype not in (np.float32, np.float64):
        return f"its states are float32 or float64, and u0 is {dtype}."
    if not isinstance(alg, ODESolver):
        return f"it runs ensembleode's own solvers{more}."
    if name not in alg.engines:
        return f"it runs on {', '.join(alg.engines)}."
    if holds_tolerances(options["stepsize_controller"]):
        return "stepsize_controller is one of diffrax."
    return None


def check_backsolve(options: dict) -> None:
    """
    **Raises:** `ValueError` for what can't be solved backwards.
    """
    if options["save_everystep"]:
        raise ValueError(
            "sensealg=BacksolveAdjoint() can't be used with save_everystep=True; use saveat."
        )


def check_controller(label: str, can_adapt: bool, controller: Any) -> None:
    """
    **Arguments:** `controller`: that chooses the steps by their errors; or None.

    **Raises:** `ValueError` where the method has no estimate of them.
    """
    if controller is not None and not can_adapt:
        raise ValueError(
            f"{label} has no error estimate for stepsize_controller to choose steps by: drop it "
            "and pass dt, or use an adaptive solver."
        )


def check_steps(label: str, can_adapt: bool, adaptive: bool, has_dt: bool) -> None:
    """
    **Raises:** `ValueError` for a fixed step without `dt`, or an adaptive one without an error
    estimate.
    """
    if adaptive and not can_adapt:
        raise ValueError(
            f"{label} has no error estimate, so adaptive must be False: pass adaptive=False and dt."
        )
    if not adaptive and not has_dt:
        reason = f"{label} has a fixed step" if not can_adapt else "adaptive=False"
        raise ValueError(f"dt is missing: {reason}, so pass its size, such as dt=0.01.")


def check_bounds(adaptive: bool | None, batched: Lane) -> None:
    """
    **Arguments:** `batched`: a Lane whose leaves are None where nothing is given.

    **Raises:** `ValueError` for bounds of a step that is fixed.
    """
    for name in ("dtmin", "dtmax"):
        if adaptive is False and getattr(batched, name) is not None:
            raise ValueError(
                f"{name} is given with a fixed step, which dt says: it bounds the steps that "
                "step-size control takes, so drop one of the two."
            )
