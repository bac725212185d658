"""The methods of the compiled engine, in the form that plans hold."""

import functools
from typing import Any, NamedTuple

from ....problem import sensitivity
from ....solvers.controllers import AbstractController, PIController
from ....solvers.method import Method
from ....solvers.norms import AbstractNorm, RMSNorm
from ....solvers.switching import Switching, SwitchingController
from ....tracing.program import Static
from ...base.checks import check_controller, check_steps


class PlannedSolver(NamedTuple):
    """A solver, and how it is differentiated: `adjoint` is the one of reverse mode."""

    method: Method
    controller: AbstractController | None
    norm: AbstractNorm
    direction: str
    adjoint: str

    @property
    def adaptive(self) -> bool:
        return self.controller is not None

    @property
    def stages(self) -> int:
        return self.method.stages


def _controller(chosen: AbstractController, method: Method) -> AbstractController:
    if isinstance(method, Switching):
        both = (_controller(chosen, x) for x in (method.nonstiff, method.stiff))
        return SwitchingController(*both)
    found = chosen.for_method(method.order, method.embedded_order)
    return found.for_implicit() if method.is_implicit else found


@functools.cache
def _default_controller(method: Method) -> AbstractController:
    return _controller(PIController(), method)


def method(alg: Any, options: dict, *, has_dt: bool) -> Static:
    """The solver with its options. **Raises:** `ValueError` for a fixed step without `dt`, and for
    an adaptive one without an error estimate."""
    adaptive = alg.adaptive if options["adaptive"] is None else bool(options["adaptive"])
    label = type(alg).__name__
    if isinstance(alg.method, Switching) and not adaptive:
        raise ValueError(
            f"{label} switches by how long its steps are, so they can't be fixed: leave adaptive "
            "out, or choose one of its methods."
        )
    check_controller(label, alg.adaptive, options["stepsize_controller"])
    check_steps(label, alg.adaptive, adaptive, has_dt)
    sensealg = options["sensealg"]
    forward = isinstance(sensealg, sensitivity.ForwardDiffSensitivity)
    by_gauss = isinstance(sensealg, sensitivity.GaussAdjoint)
    adjoint = "GaussAdjoint" if by_gauss else "ReplayAdjoint"
    controller = None
    if adaptive:
        chosen = options["stepsize_controller"] or getattr(alg, "controller", None)
        controller = _controller(chosen, alg.method) if chosen else _default_controller(alg.method)
    norm = options["internalnorm"] or RMSNorm()
    direction = "forward" if forward else "reverse"
    return Static(PlannedSolver(alg.method, controller, norm, direction, adjoint))
