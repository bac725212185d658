"""What other libraries call things, and what stands for it here: for errors in time."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


_STIFF = "eo.Kvaerno5()"
_NOT_STIFF = "eo.Tsit5(), or eo.Vern7() and eo.Vern9() for tight tolerances"

_PIECES = (
    "there are no events and callbacks yet. For doses and jumps at known times solve interval by "
    "interval, or tell diffrax of the times, stepsize_controller=diffrax.ClipStepSizeController("
    'diffrax.PIDController(rtol=1e-6, atol=1e-8), jump_ts=...): see "Doses and discontinuities" in '
    'the documentation, and "Crossings" for when a state reaches something'
)
_CONTROLLER = (
    "it is a constant of the controller, such as stepsize_controller=eo.PIController(gamma=0.8)"
)
_DENSE = "pass save_everystep=True, and call the solution with times, sol(t)"
_DEVICES = "where it runs is said by ensemblealg, such as eo.EnsembleThreads(devices=4)"
_ENSEMBLE = "it is an argument of EnsembleProblem"
_PROBLEM = "it belongs to the problem, ODEProblem(f, u0, tspan, p)"
_METHOD = "the solver is the second argument, alg, such as eo.Tsit5(), or eo.Kvaerno5() if stiff"

# Options of SciPy, SciML, diffrax and torchdiffeq, and what to do here.
_OPTIONS = {
    "rtol": "it is called reltol",
    "atol": "it is called abstol",
    "tol": "there are two, reltol and abstol",
    "method": _METHOD,
    "solver": _METHOD,
    "algorithm": _METHOD,
    "alg_hints": _METHOD,
    "t_eval": "it is called saveat: an array of times is saved exactly as it is",
    "ts": "it is called saveat: an array of times is saved exactly as it is",
    "save_at": "it is called saveat",
    "dense": _DENSE,
    "dense_output": _DENSE,
    "save_on": "leave it out: without saveat the two ends are saved",
    "save_idxs": "pass EnsembleProblem(prob, output_func=lambda sol, ctx: (sol.u[:, idxs], False))",
    "max_step": "it is called dtmax",
    "min_step": "it is called dtmin",
    "controller": "it is called stepsize_controller",
    "norm": "it is called internalnorm, such as eo.MaxNorm()",
    "gamma": _CONTROLLER,
    "qmin": _CONTROLLER,
    "qmax": _CONTROLLER,
    "beta1": _CONTROLLER,
    "beta2": _CONTROLLER,
    "first_step": "it is called dt",
    "dt0": "it is called dt",
    "h0": "it is called dt",
    "max_steps": "it is called maxiters",
    "max_num_steps": "it is called maxiters",
    "mxstep": "it is called maxiters",
    "events": _PIECES,
    "event": _PIECES,
    "callback": _PIECES,
    "callbacks": _PIECES,
    "tstops": _PIECES,
    "d_discontinuities": _PIECES,
    "jump_ts": _PIECES,
    "step_ts": _PIECES,
    "jac": "leave it out: Jacobians come from f by JAX",
    "jac_sparsity": "leave it out: Jacobians come from f by JAX",
    "vectorized": "leave it out: f(u, p, t) is written for one trajectory",
    "adjoint": "it is called sensealg, such as eo.DirectAdjoint()",
    "args": "the parameters are called p, and belong to the problem, ODEProblem(f, u0, tspan, p)",
    "y0": "the state is called u0, and belongs to the problem, ODEProblem(f, u0, tspan, p)",
    "t_span": "it is called tspan, and belongs to the problem, ODEProblem(f, u0, tspan, p)",
    "t0": "the times are tspan=(t0, t1), and belong to the problem, ODEProblem(f, u0, tspan, p)",
    "t1": "the times are tspan=(t0, t1), and belong to the problem, ODEProblem(f, u0, tspan, p)",
    "fun": "it is called f, and belongs to the problem, ODEProblem(f, u0, tspan, p)",
    "f": _PROBLEM,
    "u0": _PROBLEM,
    "tspan": _PROBLEM,
    "p": _PROBLEM,
    "prob_func": _ENSEMBLE,
    "output_func": _ENSEMBLE,
    "reduction": _ENSEMBLE,
    "u_init": _ENSEMBLE,
    "safetycopy": "leave it out: trajectories share nothing that one of them could change",
    "num_trajectories": "it is called trajectories",
    "n_jobs": _DEVICES,
    "workers": _DEVICES,
    "devices": _DEVICES,
    "rng": "random numbers of JAX come from seed or key",
    "random_state": "random numbers of JAX come from seed or key",
}

# Methods that are here under another name.
_RENAMED = {
    "RK45": "eo.Dopri5(), or better eo.Tsit5()",
    "ode45": "eo.Dopri5(), or better eo.Tsit5()",
    "DP5": "eo.Dopri5()",
    "RK23": "eo.Bosh3()",
    "ode23": "eo.Bosh3()",
    "BS3": "eo.Bosh3()",
    "DOP853": "eo.Dopri8()",
    "DP8": "eo.Dopri8()",
    "BackwardEuler": "eo.ImplicitEuler()",
    "Feagin10": "eo.Vern9()",
    "Feagin12": "eo.Vern9()",
    "Feagin14": "eo.Vern9()",
}
_STIFF_ELSEWHERE = "BDF Radau Radau5 CVODE_BDF CVODE ode15s ode23s ode23t ode23tb Rodas"
_SWITCHING = "LSODA lsoda odeint AutoTsit5 AutoVern6 AutoVern7 AutoVern8 AutoVern9 AutoDP5"
_STOCHASTIC = "EM EulerHeun LambaEM SRIW1 SRIW2 SOSRI SOSRA SRA1 RKMil SDEProblem SDEFunction"
_SYMPLECTIC = "VelocityVerlet VerletLeapfrog McAte5 KahanLi8 Yoshida6 SecondOrderODEProblem"
_STIFF_PACKAGES = ("Rosenbrock", "SDIRK", "BDF", "FIRK", "StabilizedRK")

# Attributes of the solutions of SciPy, diffrax and xarray.
_OF_A_SOLUTION = {
    "save": "to_xarray().to_netcdf(path) writes it, and solve(..., store=path) keeps an ensemble",
    "to_netcdf": "it is to_xarray().to_netcdf(path)",
    "to_csv": "it is to_pandas().to_csv(path)",
    "to_dataframe": "it is called to_pandas()",
    "to_df": "it is called to_pandas()",
    "y": "the states are called u: [trajectory, time, *state] of an ensemble",
    "ys": "the states are called u: [trajectory, time, *state] of an ensemble",
    "ts": "the times are called t",
    "success": "see retcode; of an ensemble, successful is a mask",
    "status": "see retcode",
    "message": "see retcode",
    "result": "see retcode",
    "nfev": "it is called stats.nf",
    "sol": _DENSE,
    "evaluate": _DENSE,
    "interp": _DENSE,
}

# What is no method.
_THINGS = {
    "SaveAt": "saved times are an option, solve(..., saveat=...)",
    "diffeqsolve": "it is called solve",
    "solve_ivp": "it is called solve, of an ODEProblem(f, u0, tspan, p) with f(u, p, t)",
    "ODETerm": "pass f(u, p, t) to ODEProblem",
    "ODEFunction": "pass f(u, p, t) to ODEProblem",
    "ClipStepSizeController": (
        "it is diffrax's: solve(..., stepsize_controller=diffrax.ClipStepSizeController(...))"
    ),
    "ContinuousCallback": _PIECES,
    "DiscreteCallback": _PIECES,
    "PresetTimeCallback": _PIECES,
    "CallbackSet": _PIECES,
    "Event": _PIECES,
    "DAEProblem": "there are ordinary differential equations only: reduce the index, or use Julia",
    "DDEProblem": "there are ordinary differential equations only",
}


#
# Options
#


def unknown_option(where: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for an option `name` that `where` does not have, with what to write instead.

    **Arguments:** `known`: those that it has.
    """
    known = list(known)
    hint = _OPTIONS.get(name) or _OPTIONS.get(name.lower())
    if hint is None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"it has {close[0]}" if close else f"it has {', '.join(known)}"
    return TypeError(f"{where} has no option {name!r}: {hint}.")


def refuse_unknown(where: str, unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """
    **Raises:** `TypeError` for the first of the `unknown` options.
    """
    for name in unknown:
        raise unknown_option(where, name, known)


#
# Methods and other names
#


def instead_of(name: str) -> str | None:
    """What stands for a solver, or another thing, of this name; None if nobody has it."""
    if name in _THINGS:
        return _THINGS[name]
    if name in _STOCHASTIC.split():
        return "there are ordinary differential equations only, no stochastic ones"
    if name in _SYMPLECTIC.split():
        return "there are no symplectic methods: eo.Vern9() with tight tolerances drifts little"
    package = None
    if name[:1].isupper():  # (Other names need not import so much.)
        from ..solvers.julia_alg import PACKAGES

        package = next((p for p, names in PACKAGES.items() if name in names.split()), None)
    is_stiff = any(kind in (package or "") for kind in _STIFF_PACKAGES)
    if name in _RENAMED:
        text = f"here it is {_RENAMED[name]}"
    elif name in _SWITCHING.split():
        text = f"nothing here switches by itself: take {_NOT_STIFF}, and {_STIFF} if stiff"
    elif is_stiff or name in _STIFF_ELSEWHERE.split():
        text = f"for stiff problems there is {_STIFF}"
    elif package is not None:
        text = f"there is {_NOT_STIFF}"
    else:
        return None
    if package is not None:
        argument = "Rosenbrock23()" if name.startswith("Auto") else ""
        text += f"; with Julia installed also eo.JuliaAlg({f'{name}({argument})'!r})"
    return text


def missing_of_solution(solution: Any, name: str) -> AttributeError:
    """The error for an attribute that a solution does not have, with what stands for it."""
    text = f"{type(solution).__name__!r} object has no attribute {name!r}"
    if instead := _OF_A_SOLUTION.get(name):
        text += f": {instead}."
    return AttributeError(text, name=name, obj=solution)


def missing_attribute(module: Any, name: str) -> AttributeError:
    """The error for `module.name`, with what stands for it."""
    text = f"module {module.__name__!r} has no attribute {name!r}"
    if not name.startswith("_") and (instead := instead_of(name)):
        text += f": {instead}."
    return AttributeError(text, name=name, obj=module)


def solver_by_name(text: str) -> str:
    """What to give for a solver where a string was given."""
    from .. import solvers

    name = text.strip().removesuffix("()")
    by_case = {x.lower(): x for x in vars(solvers) if isinstance(vars(solvers)[x], type)}
    if own := by_case.get(name.lower()):
        return f"give eo.{own}()"
    return instead_of(name) or f"give one such as eo.Tsit5(), or {_STIFF} if the problem is stiff"
