"""The choice of the engine: the one that is asked for, or the first one that can run the solve."""

from typing import Any

from ..core.lane import Trajectories
from ..ensemble import EnsembleColumns
from ..numbers import of_kind
from ..solution import EngineChoice
from ..solvers import JuliaAlg
from ..solvers.auto import AutoSwitch
from ..solvers.base import Rosenbrock
from . import compiled, diffrax, julia, lanes
from .engine import Engine


# In the order of preference.
ENGINES: tuple[Engine, ...] = (compiled.ENGINE, lanes.ENGINE, diffrax.ENGINE, julia.ENGINE)
# Of this library's engines only the compiled one runs these methods.
_COMPILED = (Rosenbrock, AutoSwitch)


class NoEngine(ValueError):
    """No engine, or not the one that is asked for, can run a solve."""


def choose(
    engine: str, alg: Any, every: Trajectories, ensemblealg: Any = None
) -> tuple[Engine, EngineChoice]:
    """The engine that runs `alg` on these trajectories, with their options.

    **Arguments:** `ensemblealg`: the ensemble algorithm; None for a single problem.

    **Raises:** `ValueError` for an unknown engine; `NoEngine` for one that can't run `alg` or the
    field, or where none can.
    """
    has_mass = every.form is not None and every.form.mass is not None
    if has_mass and not isinstance(alg, Rosenbrock | JuliaAlg):
        raise ValueError(
            f"mass_matrix is given, and {_name(alg)} solves du/dt = f(u, p, t) without one: pass a "
            "Rosenbrock method, such as eo.Rodas5P()."
        )
    options, field, batched = every.options, every.field, every.batched
    remedy = _remedy(alg, options["sensealg"])
    (state,) = field.out_avals
    named = {e.name: e for e in ENGINES}
    has_known_times = any(getattr(batched, row.name) is not None for row in of_kind("stops"))

    def chosen(candidate, why):
        sensealg = options["sensealg"]
        adjoint = candidate.default_sensealg if sensealg is None else _name(sensealg)
        return candidate, EngineChoice(candidate.name, why, _methods(alg), adjoint)

    def unfit(candidate):
        reason = candidate.refusal(alg, options, state.dtype, ensemblealg)
        columns = isinstance(ensemblealg, EnsembleColumns)
        if reason is None and columns:
            reason = candidate.columns_refusal(alg, options, state, batched)
        if reason is None and has_known_times:
            reason = candidate.known_times_refusal(options)
        if reason is None and every.extension is not None:
            reason = candidate.extended_refusal(options)
        if reason is None and every.events is not None:
            reason = candidate.events_refusal(every.events, options)
        if reason is None and has_mass:
            reason = candidate.mass_refusal(options)
        return reason

    if engine != "auto":
        if engine not in named:
            raise ValueError(f"engine must be 'auto' or one of {sorted(named)}, got {engine!r}.")
        if reason := unfit(named[engine]):
            raise NoEngine(
                f"engine={engine!r} can't run {_name(alg)}: {reason.removesuffix('.')}{remedy}."
            )
        if reason := named[engine].field_refusal(field, state, batched):
            raise NoEngine(
                f"engine={engine!r} can't run this f: {reason.removesuffix('.')}{remedy}."
            )
        return chosen(named[engine], "asked for")
    reasons = []
    for candidate in ENGINES:
        reason = unfit(candidate)
        ours = isinstance(alg, _COMPILED) or every.events is not None
        if ours and candidate is julia.ENGINE and not isinstance(alg, JuliaAlg):
            reason = reason or "it is asked for by name."
        reason = reason or candidate.field_refusal(field, state, batched)
        if every.events is None and _has_arrays(alg):
            is_extended = every.extension is not None
            reason = reason or candidate.slower(field, state, batched, is_extended=is_extended)
        if reason is None:
            why = "; ".join(["auto: the first that runs " + _name(alg), *reasons])
            return chosen(candidate, why)
        reasons.append(f"not {candidate.name}: {reason.removesuffix('.')}")
    raise NoEngine(f"no engine can run {_name(alg)} ({'; '.join(reasons)}){remedy}")


def _has_arrays(alg: Any) -> bool:
    """Whether a method can be run by engines that hold trajectories as arrays of JAX."""
    return not isinstance(alg, _COMPILED)


def _remedy(alg: Any, sensealg: Any) -> str:
    if not isinstance(alg, _COMPILED):
        return ""
    if sensealg is not None and not isinstance(sensealg, compiled.SENSEALGS):
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
