"""Why an engine can't solve a stochastic problem."""

from typing import Any

import numpy as np

from ...plan.noise import is_adaptive, JUMPS
from ...solvers import ODESolver, SDESolver
from .lacks_in_julia import ON_GPUS
from .requested_solve import RequestedSolve


def noise_in_compiled(asked: RequestedSolve) -> str | None:
    state = asked.state
    events = asked.every.events
    if events is not None and (events.settles or events.rests):
        return "a state with noise is never at rest: leave TerminateSteadyState out."
    if asked.every.batched.d_discontinuities is not None:
        return "an SDEProblem has no d_discontinuities: give the times where f jumps as tstops."
    if asked.option("maxiters") > (most := 2 ** np.finfo(state.dtype).nmant):
        return f"in {state.dtype} it can count {most:,} steps at most, and maxiters is larger."
    if asked.every.noise is not None and asked.every.noise.kind == JUMPS:
        if asked.option("save_noise"):
            return "a JumpProblem has no path of a noise: leave save_noise out."
        if asked.every.saving.mode == "steps":
            return "a JumpProblem is saved at times: give saveat, and leave save_everystep out."
        if events is not None and events.continuous:
            return "a JumpProblem has no ContinuousCallback: use a DiscreteCallback, with dt."
    if asked.by("GaussAdjoint"):
        return "sensealg=GaussAdjoint() is for ODEs: leave it out."
    if not isinstance(asked.alg, ODESolver):
        return "it runs ensembleode's own solvers."
    if isinstance(asked.alg, SDESolver) and _is_adaptive(asked):
        if not asked.alg.adaptive:
            return f"{type(asked.alg).__name__} has no error estimate: pass dt, and no adaptive."
        return _adaptive_noise(asked)
    return None


def _is_adaptive(asked: RequestedSolve) -> bool:
    """Whether a method of this library or of Julia has steps that adapt."""
    has_dt = asked.every.batched.dt is not None
    is_known = isinstance(asked.alg, ODESolver)
    return is_known and is_adaptive(asked.alg, asked.option("adaptive"), has_dt)


def _adaptive_noise(asked: RequestedSolve) -> str | None:
    """Why adaptive steps, which are halves of halves of the time span, can't be made."""
    remedy = "pass dt, for steps of a fixed size."
    events = asked.every.events
    if "W" in getattr(asked.every.noise, "given", ()):
        return f"adaptive steps draw their own noise, and there is a NoiseGrid: {remedy}"
    if asked.every.batched.tstops is not None:
        return f"adaptive steps of a stochastic problem don't end at known times: {remedy}"
    if events is not None and events.continuous:
        return f"adaptive steps of a stochastic problem can't be cut by an event: {remedy}"
    return None


def noise_in_julia(asked: RequestedSolve) -> str | None:
    noise: Any = asked.every.noise
    if noise.kind == JUMPS:
        return "it solves no JumpProblem: leave engine out."
    if isinstance(asked.ensemblealg, ON_GPUS):
        return (
            f"{type(asked.ensemblealg).__name__} of DiffEqGPU has no noise: use EnsembleThreads()."
        )
    if noise.integrand is not None:
        return "it has no integrands with noise: let f return what integrand does."
    if noise.kept:
        return "it keeps no path of the noise: leave save_noise out."
    if asked.every.events is not None:
        return "it has no callbacks with noise: leave engine out."
    if asked.every.saving.mode == "steps":
        return "it saves the steps of no stochastic solve: give saveat."
    if asked.first_given("stops"):
        return f"it has no {asked.first_given('stops')} with noise: leave engine out."
    if asked.option("sensealg") is not None:
        return "it has no derivatives with noise: leave sensealg or engine out."
    if noise.given and _is_adaptive(asked):
        what = "a NoiseGrid" if "W" in noise.given else "a factor"
        return f"adaptive steps draw their own noise, and there is {what}: pass dt alone."
    return None


def noise_in_diffrax(asked: RequestedSolve) -> str | None:
    if isinstance(asked.alg, ODESolver):
        return f"{type(asked.alg).__name__} runs in the compiled engine: leave engine out."
    noise: Any = asked.every.noise
    if "W" in noise.given:
        return "its methods draw their noise from a tree, and there is a NoiseGrid: drop it."
    if noise.integrand is not None:
        return "it has no integrands with noise: let f return what integrand does."
    if noise.kept:
        return "it keeps no path of the noise: leave save_noise out."
    return None
