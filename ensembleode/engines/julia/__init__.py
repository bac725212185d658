"""The Julia engine: OrdinaryDiffEq and DiffEqGPU behind the same `solve`.

The vector field is translated to Julia, so no Python is called while Julia solves. SciML's own
ensemble algorithms run the ensembles, in this process or in a separate one.

- `fields.py`: the vector field and its derivatives in Julia; `source.py` prints them.
- `noise.py`: the diffusion in Julia, and the numbers that noise is drawn with.
- `callbacks.py`: conditions and affects in Julia, and the events that Julia returns.
- `methods.py`: the names of solvers and ensemble algorithms in Julia.
- `numbers.py`: the arrays of a request, and results from the arrays that come back.
- `requests.py`, `session.py`: requests to Julia, and the Julia that answers them.
- `solving.py`: solving by requests.
- `ensembles.py`: the executor.
- `gradients.py`: forward sensitivities and continuous adjoints.
- `environment.py`, `installing.py`: where Julia is, and how it is installed.
"""

from typing import Any, NamedTuple

from ...plan.plan import Plan, Result
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem.ensemble import EnsembleColumns
from ...solvers import JuliaAlg
from ...solvers.controllers import AbstractController, PIController
from ...solvers.julia_alg import is_stochastic, JuliaMethod
from ...solvers.method import Method as OwnMethod
from ...solvers.norms import AbstractNorm
from ...tracing.program import Static
from ..base.checks import check_controller, check_steps
from ..base.engine import Engine
from . import environment, gradients as gradients, methods as methods, session


# How the names of packages begin of which a solve loads one.
_OF_METHODS = ("OrdinaryDiffEq", "PythonCall", "StochasticDiffEq")


class PlacedJuliaMethod(NamedTuple):
    """A method of Julia, the place where its trajectories run, and how it is differentiated."""

    description: JuliaMethod
    adaptive: bool | None
    implicit: bool
    stages: int | None
    sensealg: str | None
    controller: AbstractController | None
    norm: AbstractNorm | None
    place: methods.Place = methods.SERIAL
    method: OwnMethod | None = None


class JuliaEngine(Engine):
    """OrdinaryDiffEq and DiffEqGPU, through juliacall."""

    name = "julia"
    default_sensealg = "forward sensitivities or InterpolatingAdjoint"

    def method(self, alg: Any, options: dict, *, has_dt: bool) -> Static:
        """The solver with its options.

        **Raises:** `ValueError` for a fixed step without `dt`, or an adaptive one without an error
        estimate.
        """
        known_by_name = isinstance(alg, JuliaAlg)
        label = alg.description.name if known_by_name else type(alg).__name__
        can_adapt = not alg.fixed_step if known_by_name else alg.adaptive
        check_controller(label, can_adapt, options["stepsize_controller"])
        adaptive = options["adaptive"]
        if adaptive is None and not (known_by_name and can_adapt):
            adaptive = can_adapt
        if adaptive is not None:
            check_steps(label, can_adapt, bool(adaptive), has_dt)
            adaptive = bool(adaptive)
        sensealg = options["sensealg"]
        chosen = None if sensealg is None else type(sensealg).__name__
        controller = options["stepsize_controller"]
        if isinstance(controller, PIController) and not known_by_name:
            controller = controller.for_method(alg.order, None)
        description = methods.description(alg)
        # (The step of a stochastic method is none of a field's.)
        with_noise = is_stochastic(description)
        ours = None if with_noise else getattr(alg, "method", None)
        if isinstance(controller, AbstractController) and ours is not None and ours.is_implicit:
            controller = controller.for_implicit()
        # A method of which only the name is known may need the derivatives.
        implicit = not with_noise and (alg.implicit or known_by_name)
        stages = alg.stages or 8
        how = (description, adaptive, implicit, stages, chosen, controller)
        return Static(PlacedJuliaMethod(*how, options["internalnorm"], method=ours))

    def reads_form(self, method: Static) -> bool:
        """Whether the method may need derivatives of `f`, as it may if only its name is known."""
        return method.value.implicit

    def versions(self, method: Static) -> dict[str, str]:
        """The versions of Julia and its packages, except packages of other methods.

        **Raises:** [`JuliaError`][] where there is no Julia.
        """
        there = environment.inspected(environment.find())
        known = {*environment.METHODS, *environment.requirements(), "PythonCall"}
        others = {name for name in known if name.startswith(_OF_METHODS)}
        others -= methods.packages(method.value.description)
        others |= set() if is_stochastic(method.value.description) else environment.NOISE.keys()
        packages = {name: v for name, v in there.packages.items() if name not in others}
        return {"Julia": there.julia, **packages, **there.gpu}

    def solve_trajectories(
        self, plan: Plan, lanes: TrajectoryNumbers, n: int, mask: Any = None
    ) -> Result:
        """Solve `n` trajectories, inside a compiled program."""
        return gradients.differentiable(plan, lanes, n)

    def executor(self, ensemblealg: Any) -> Any:
        """The executor that runs an ensemble in Julia; None for an ensemble algorithm that is not
        Julia's own.

        **Raises:** `ValueError` for an ensemble algorithm that Julia doesn't have.
        """
        from .ensembles import JuliaExecutor

        if isinstance(ensemblealg, EnsembleColumns) or getattr(ensemblealg, "cluster", None):
            return None
        return JuliaExecutor(methods.place(ensemblealg, lambda: session.start().threads))


ENGINE = JuliaEngine()
