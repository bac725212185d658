"""The names that other libraries use, and their equivalents here, for helpful error messages."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from .number_table import NUMBERS


_STIFF = "eo.Rodas5P()"
_SWITCHES = "eo.AutoTsit5(eo.Rosenbrock23())"
_NOT_STIFF = "eo.Tsit5(), or eo.Vern7() and eo.Vern9() for tight tolerances"

_CONTROLLER = (
    "it is a constant of the controller, such as stepsize_controller=eo.PIController(gamma=0.8)"
)
_PROBLEM = "the problem, ODEProblem(f, u0, tspan, p)"
_DENSE = "pass save_everystep=True, and call the solution with times, sol(t)"


def _by_name(names_of: dict[str, str]) -> dict[str, str]:
    """The hint for each name, from the names that each hint is for."""
    return {name: hint for hint, names in names_of.items() for name in names.split()}


# Options of SciPy, SciML, diffrax and torchdiffeq, with what to write here.
_OPTIONS = _by_name(
    {
        **{f"it is called {x.option}": x.aliases for x in NUMBERS},
        "there are two, reltol and abstol": "tol",
        "the solver is the second argument, alg, such as eo.Tsit5(), or eo.Rodas5P() if stiff": (
            "method solver algorithm alg_hints"
        ),
        "it is called saveat: an array of times is saved exactly as it is": "t_eval ts",
        _DENSE: "dense dense_output",
        "leave it out: without saveat the two ends are saved": "save_on",
        "it is called stepsize_controller": "controller",
        "it is called internalnorm, such as eo.MaxNorm()": "norm",
        _CONTROLLER: "gamma qmin qmax beta1 beta2",
        "it is called maxiters": "max_steps max_num_steps mxstep",
        "it is called callback, such as eo.ContinuousCallback(condition, affect)": (
            "events event callbacks"
        ),
        "leave it out, as JAX makes the Jacobian of f; or pass eo.ODEFunction(f, jac=jac) as f": (
            "jac"
        ),
        "leave it out, as it is found; or pass eo.ODEFunction(f, jac_prototype=pattern) as f": (
            "jac_sparsity jac_prototype"
        ),
        "it belongs to the function: pass eo.ODEFunction(f, mass_matrix=M) as f": "mass_matrix",
        "leave it out: f(u, p, t) is written for one trajectory": "vectorized",
        "it is called sensealg, such as eo.DirectAdjoint()": "adjoint",
        f"the parameters are called p, and belong to {_PROBLEM}": "args",
        f"the state is called u0, and belongs to {_PROBLEM}": "y0",
        f"it is called tspan, and belongs to {_PROBLEM}": "t_span",
        f"the times are tspan=(t0, t1), and belong to {_PROBLEM}": "t0 t1",
        f"it is called f, and belongs to {_PROBLEM}": "fun",
        f"it belongs to {_PROBLEM}": "f u0 tspan p",
        "it is an argument of EnsembleProblem": "prob_func output_func reduction u_init",
        "leave it out: trajectories share nothing that one of them could change": "safetycopy",
        "it is called trajectories": "num_trajectories",
        "where it runs is said by ensemblealg, such as eo.EnsembleThreads(4)": (
            "n_jobs workers devices"
        ),
        "random numbers of JAX come from seed or key": "rng random_state",
    }
)

# Methods that have another name here.
_RENAMED = _by_name(
    {
        "eo.Dopri5(), or better eo.Tsit5()": "RK45 ode45",
        "eo.Dopri5()": "DP5",
        "eo.Bosh3()": "RK23 ode23 BS3",
        "eo.Dopri8()": "DOP853 DP8",
        "eo.ImplicitEuler()": "BackwardEuler",
        "eo.Rosenbrock23()": "ode23s",
        "eo.Rodas4()": "Rodas",
        "eo.Vern9()": "Feagin10 Feagin12 Feagin14",
    }
)
_STIFF_ELSEWHERE = "BDF Radau Radau5 CVODE_BDF CVODE ode15s ode23t ode23tb"
_SWITCHING = "LSODA lsoda odeint AutoDP5"
_STOCHASTIC_ELSEWHERE = "ISSEM ImplicitEM SKenCarp DRI1"
_REACTIONS = "SSAStepper DiscreteProblem ConstantRateJump MassActionJump NRM RSSA DirectCR"
_SYMPLECTIC = "VelocityVerlet VerletLeapfrog McAte5 KahanLi8 Yoshida6 SecondOrderODEProblem"
_STIFF_PACKAGES = ("Rosenbrock", "SDIRK", "BDF", "FIRK", "StabilizedRK")

# Attributes of the solutions of SciPy, diffrax and xarray.
_OF_A_SOLUTION = _by_name(
    {
        "to_xarray().to_netcdf(path) writes it, and solve(..., store=path) keeps an ensemble": (
            "save"
        ),
        "it is to_xarray().to_netcdf(path)": "to_netcdf",
        "it is to_pandas().to_csv(path)": "to_csv",
        "it is called to_pandas()": "to_dataframe to_df",
        "the states are called u: [trajectory, time, *state] of an ensemble": "y ys",
        "the times are called t": "ts",
        "it is called successful, of an ensemble a mask; retcode says more": "success",
        "see retcode": "status message result",
        "it is called stats.nf": "nfev",
        _DENSE: "sol evaluate interp",
    }
)

# Names of functions and classes that are not methods.
_THINGS = _by_name(
    {
        "saved times are an option, solve(..., saveat=...)": "SaveAt",
        "it is called solve": "diffeqsolve",
        "it is called solve, of an ODEProblem(f, u0, tspan, p) with f(u, p, t)": "solve_ivp",
        "pass f(u, p, t) to ODEProblem": "ODETerm",
        "it is diffrax's: solve(..., stepsize_controller=diffrax.ClipStepSizeController(...))": (
            "ClipStepSizeController"
        ),
        "an event is eo.ContinuousCallback(condition, affect), such as with eo.terminate": "Event",
        "write it as M du/dt = f(u, p, t), eo.ODEProblem(eo.ODEFunction(f, mass_matrix=M), u0, "
        "tspan, p), and solve by eo.Rodas5P()": "DAEProblem DAEFunction",
        "there are ordinary differential equations only": "DDEProblem",
    }
)


def unknown_option(where: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for an option `name` that `where` does not have, with what to write instead. It has
    the `known` options."""
    known = list(known)
    hint = _OPTIONS.get(name) or _OPTIONS.get(name.lower())
    if hint is None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"it has {close[0]}" if close else f"it has {', '.join(known)}"
    return TypeError(f"{where} has no option {name!r}: {hint}.")


def refuse_unknown(where: str, unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """**Raises:** `TypeError` for the first of the `unknown` options."""
    for name in unknown:
        raise unknown_option(where, name, known)


def instead_of(name: str) -> str | None:
    """What to write instead of a solver or another object of this name; None if no library has
    it."""
    if name in _THINGS:
        return _THINGS[name]
    if name in _REACTIONS.split():
        return "reactions are an eo.JumpProblem, solved by eo.Direct()"
    if name == "SDEFunction":
        return "an eo.SDEProblem takes the drift and the diffusion, f and g"
    if name in _SYMPLECTIC.split():
        return "there are no symplectic methods: eo.Vern9() with tight tolerances drifts little"
    package = None
    if name[:1].isupper():  # other names don't need this import
        from ..solvers.julia_alg import PACKAGES

        package = next((p for p, names in PACKAGES.items() if name in names.split()), None)
    is_stiff = any(kind in (package or "") for kind in _STIFF_PACKAGES)
    is_stochastic = (package or "").startswith("StochasticDiffEq")
    if is_stochastic or name in _STOCHASTIC_ELSEWHERE.split():
        text = "for an eo.SDEProblem there are eo.SOSRI(), eo.SOSRA(), eo.EM() and four others"
    elif name in _RENAMED:
        text = f"here it is {_RENAMED[name]}"
    elif name in _SWITCHING.split():
        text = f"here {_SWITCHES} switches by itself"
    elif is_stiff or name in _STIFF_ELSEWHERE.split():
        text = f"for stiff problems there are {_STIFF}, eo.Rosenbrock23() and eo.Kvaerno5()"
    elif package is not None:
        text = f"there is {_NOT_STIFF}"
    else:
        return None
    if package is not None:
        argument = "Rosenbrock23()" if name.startswith("Auto") else ""
        text += f"; with Julia installed also eo.JuliaAlg({f'{name}({argument})'!r})"
    return text


def missing_of_solution(solution: Any, name: str) -> AttributeError:
    """The error for an attribute that a solution does not have, with its equivalent."""
    text = f"{type(solution).__name__!r} object has no attribute {name!r}"
    if instead := _OF_A_SOLUTION.get(name):
        text += f": {instead}."
    return AttributeError(text, name=name, obj=solution)


def missing_attribute(module: Any, name: str) -> AttributeError:
    """The error for `module.name`, with its equivalent."""
    text = f"module {module.__name__!r} has no attribute {name!r}"
    if not name.startswith("_") and (instead := instead_of(name)):
        text += f": {instead}."
    return AttributeError(text, name=name, obj=module)


def solver_by_name(text: str) -> str:
    """What to pass as a solver, where a string was passed."""
    from .. import solvers

    name = text.strip().removesuffix("()")
    by_case = {x.lower(): x for x in vars(solvers) if isinstance(vars(solvers)[x], type)}
    if own := by_case.get(name.lower()):
        return f"give eo.{own}({'eo.Rosenbrock23()' if own.startswith('Auto') else ''})"
    return instead_of(name) or f"give one such as eo.Tsit5(), or {_STIFF} if the problem is stiff"
