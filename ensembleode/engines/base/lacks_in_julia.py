"""Why a solve can't run in Julia, where that depends on more than one of its features."""

from typing import Any

from ...problem.ensemble import EnsembleGPUArray, EnsembleGPUKernel
from ...solvers import JuliaAlg
from ...solvers.auto import AutoSwitch
from ...solvers.controllers import IController, PIController, PIDController
from ...solvers.norms import MaxNorm, RMSNorm
from .requested_solve import RequestedSolve


ON_GPUS = (EnsembleGPUArray, EnsembleGPUKernel)


def controller_in_julia(asked: RequestedSolve) -> str | None:
    controller = asked.option("stepsize_controller")
    if isinstance(asked.ensemblealg, ON_GPUS):
        return "DiffEqGPU has a step-size controller of its own."
    if type(controller) not in (PIController, IController, PIDController):
        return (
            f"stepsize_controller={type(controller).__name__}() is in Python, and Julia has "
            "PIController, IController and PIDController."
        )
    if isinstance(asked.alg, AutoSwitch):
        return "each method of two that are switched has its own controller in Julia."
    betas = (controller.beta1, controller.beta2) if isinstance(controller, PIController) else ()
    if isinstance(asked.alg, JuliaAlg) and None in betas:
        return "the order of a JuliaAlg is known to Julia only: give PIController(beta1, beta2)."
    return None


def norm_in_julia(asked: RequestedSolve) -> str | None:
    if isinstance(asked.ensemblealg, ON_GPUS):
        return "DiffEqGPU has a norm of its own."
    if type(norm := asked.option("internalnorm")) in (RMSNorm, MaxNorm):
        return None
    return f"internalnorm={type(norm).__name__}() is in Python: it takes RMSNorm and MaxNorm."


# Where an event has cut a step of these methods, OrdinaryDiffEq interpolates within it with wrong
# coefficients. Their error estimates are those of `M u`, and are compared with tolerances of `u`.
_ASTRAY_IN_JULIA = {"Rosenbrock23", "Rosenbrock32"}


def events_in_julia(asked: RequestedSolve) -> str | None:
    if asked.option("save_after_events"):
        return "it saves the states before events: leave out save_after_events."
    found = asked.in_julia & _ASTRAY_IN_JULIA
    events: Any = asked.every.events
    if events.settles:
        return "steady_state isn't there: leave engine out, or pass engine='compiled'."
    if not found or not events.continuous or asked.every.saving.mode != "times":
        return None
    return (
        f"{found.pop()} has no right states within a step that an event cuts, where a time "
        "of saveat may be: leave saveat out, or use Rodas5P or engine='compiled'."
    )


def mass_in_julia(asked: RequestedSolve) -> str | None:
    found = asked.in_julia & _ASTRAY_IN_JULIA
    if not found or all(i == j for i, j, _ in asked.mass.entries):
        return None
    return f"{found.pop()} takes diagonal mass matrices only: use Rodas5P, or engine='compiled'."


def shared_on_gpus(asked: RequestedSolve) -> str | None:
    times = ["time"] if isinstance(asked.ensemblealg, EnsembleGPUKernel) else []
    if not (option := asked.first_own(*times)):
        return None
    return (
        f"{type(asked.ensemblealg).__name__} of DiffEqGPU shares {option} among all trajectories, "
        "and prob_func makes it depend on the index. Use EnsembleThreads()."
    )
