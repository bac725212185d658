"""The choice of the engine: the one that is named, or the first one that can run the solve."""

from typing import Any

from ..ground.logs import log_once
from ..plan.trajectory_numbers import Trajectories
from ..problem.ensemble import EnsembleAlgorithm, EnsembleGPUKernel
from ..problem.sensitivity import SensitivityAlgorithm
from ..solution.solution import EngineChoice
from ..solvers import Direct, JuliaAlg, Kvaerno3, Kvaerno4, Kvaerno5, SDESolver
from ..solvers.auto import AutoSwitch
from ..solvers.rosenbrock import Rosenbrock
from . import compiled, diffrax, julia
from .base.capabilities import COMPILED_ONLY, lacking, lacks_adjoint
from .base.engine import Engine
from .base.requested_solve import RequestedSolve


# In the order of preference.
ENGINES: tuple[Engine, ...] = (compiled.ENGINE, diffrax.ENGINE, julia.ENGINE)
# The methods of diffrax that replace implicit ones that can't be compiled, by their order.
_INSTEAD = {2: Kvaerno3(), 4: Kvaerno4()}


class NoEngine(ValueError):
    """No engine, or not the one that is asked for, can run a solve."""


def choose(
    engine: str,
    alg: Any,
    every: Trajectories,
    ensemblealg: EnsembleAlgorithm | None = None,
    *,
    is_given: bool = False,
) -> tuple[Engine, EngineChoice, Any]:
    """The engine that runs `alg` on these trajectories, with their options; and `alg`, or the
    method that takes its place.

    **Arguments:** `ensemblealg`: the ensemble algorithm; None for a single problem. `is_given`:
    whether the user asked for it.

    **Raises:** `ValueError` for an unknown engine; `NoEngine` for one that can't run `alg` or the
    field, or where none can.
    """
    asked = RequestedSolve(alg, every, ensemblealg)
    if asked.mass is not None and not isinstance(alg, Rosenbrock | JuliaAlg):
        raise ValueError(
            f"mass_matrix is given, and {_name(alg)} solves du/dt = f(u, p, t) without one: pass a "
            "Rosenbrock method, such as eo.Rodas5P()."
        )
    options, field, batched = every.options, every.field, every.batched
    remedy = _remedy(alg, options["sensealg"])
    (state,) = field.out_avals
    named = {e.name: e for e in ENGINES}
    refused: dict[str, str] = {}

    def chosen(candidate, why, alg=alg):
        if reason := lacking(candidate.name, asked._replace(alg=alg), placed=True):
            told = _refusals_told(refused) if isinstance(ensemblealg, EnsembleGPUKernel) else []
            raise NoEngine(reason.removesuffix(".") + "".join(f" ({x})" for x in told[:1]) + ".")
        sensealg = options["sensealg"]
        adjoint = candidate.default_sensealg if sensealg is None else _name(sensealg)
        about = (candidate.name, why, _methods(alg), adjoint, tuple(refused.items()))
        return candidate, EngineChoice(*about), alg

    def unfit(candidate, alg=alg):
        reason = candidate.missing() or lacking(candidate.name, asked._replace(alg=alg))
        if reason is None and every.events is not None:
            reason = candidate.unreadable_callbacks(every.events)
        if reason is None and every.noise is not None:
            reason = candidate.unreadable_noise(every.noise)
        return reason

    if engine != "auto":
        if engine == "lanes":
            raise ValueError(
                "engine='lanes' is gone since version 0.1: leave engine out. What the compiled "
                "engine can't run is solved by diffrax, with engine='diffrax' or without."
            )
        if engine not in named:
            raise ValueError(f"engine must be 'auto' or one of {sorted(named)}, got {engine!r}.")
        what, reason = _name(alg), unfit(named[engine])
        if reason is None:
            what, reason = "this f", named[engine].unreadable(field, state, batched)
        if reason:
            told = f"{reason.removesuffix('.')}{remedy}"
            raise NoEngine(f"engine={engine!r} can't run {what}: {told}.")
        return chosen(named[engine], "asked for")
    reason = None
    if isinstance(alg, COMPILED_ONLY) and unfit(compiled.ENGINE) is None:
        reason = compiled.ENGINE.unreadable(field, state, batched)
        reason = reason or compiled.ENGINE.too_long(alg.method, field)
    if reason is not None:
        instead = _INSTEAD.get(int(alg.order), Kvaerno5())
        placed = lacking(diffrax.ENGINE.name, asked._replace(alg=instead), placed=True)
        refusal = placed or unfit(diffrax.ENGINE, instead)
        if (refusal or diffrax.ENGINE.unreadable(field, state, batched)) is None:
            log_once(
                f"{_name(instead)} of diffrax takes the place of {_methods(alg)}, which can't be "
                f"compiled, or not within a minute: {reason}"
            )
            refused[compiled.ENGINE.name] = reason.removesuffix(".")
            return chosen(diffrax.ENGINE, f"auto: not {_name(alg)}: {reason}", instead)
    for candidate in ENGINES:
        reason = unfit(candidate)
        ours = isinstance(alg, COMPILED_ONLY) or every.events is not None
        if ours and candidate is julia.ENGINE and not isinstance(alg, JuliaAlg):
            reason = reason or "it is asked for by name."
        reason = reason or candidate.unreadable(field, state, batched)
        # (A kernel that is asked for is compiled, however long that takes.)
        waits = is_given and isinstance(ensemblealg, EnsembleGPUKernel)
        if every.events is None and not waits and not isinstance(alg, COMPILED_ONLY):
            is_extended = every.extension is not None
            reason = reason or candidate.slower(field, state, batched, is_extended=is_extended)
        if reason is None:
            why = "; ".join(["auto: the first that runs " + _name(alg), *_refusals_told(refused)])
            return chosen(candidate, why)
        refused[candidate.name] = reason.removesuffix(".")
    raise NoEngine(f"no engine can run {_name(alg)} ({'; '.join(_refusals_told(refused))}){remedy}")


def _refusals_told(refused: dict[str, str]) -> list[str]:
    return [f"not {engine}: {reason}" for engine, reason in refused.items()]


def _remedy(alg: Any, sensealg: SensitivityAlgorithm | None) -> str:
    if not isinstance(alg, COMPILED_ONLY) or isinstance(alg, SDESolver | Direct):
        return ""
    if sensealg is not None and lacks_adjoint("compiled", _name(sensealg)):
        return (
            "; leave sensealg out, or pass eo.ReplayAdjoint(), the default: it goes back through "
            "the steps of this method, has derivatives of any order, and is stable where the "
            "method is"
        )
    return "; for stiff problems there is eo.Kvaerno5(), too, which the diffrax engine runs"


def _methods(alg: Any) -> str:
    """The name of the solver; of one that switches, with that of its implicit method."""
    if isinstance(alg, AutoSwitch):
        return f"{_name(alg)}({_name(alg.stiff)})"
    return _name(alg)


def _name(alg: Any) -> str:
    return type(alg).__name__
