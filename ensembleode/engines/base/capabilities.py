"""What engines and ensemble algorithms can't do, as one table.

`FEATURES` lists what a solve may ask for, and `LACKS` lists the features that are missing: in which
engine, with which ensemble algorithm, in which mode. What isn't listed is supported. Refusals, the
choice of an engine (`choice.py`) and the documentation's table (`docs/hooks.py`) are made from it.
The engines themselves decide which fields and callbacks they can run (`Engine.unreadable`).
"""

from collections.abc import Callable
from typing import Any, get_origin, NamedTuple

import numpy as np

from ...ground.devices.placement import platform
from ...problem.ensemble import (
    EnsembleColumns,
    EnsembleGPUArray,
    EnsembleGPUKernel,
)
from ...problem.options import holds_tolerances
from ...problem.sensitivity import SensitivityAlgorithm
from ...solvers import Direct, ODESolver, SDESolver
from ...solvers.auto import AutoSwitch
from ...solvers.explicit_runge_kutta import RungeKutta
from ...solvers.norms import MaxNorm, RMSNorm
from ...solvers.rosenbrock import Rosenbrock
from .lacks_in_julia import (
    controller_in_julia,
    events_in_julia,
    mass_in_julia,
    norm_in_julia,
    ON_GPUS,
    shared_on_gpus,
)
from .lacks_with_noise import noise_in_compiled, noise_in_diffrax, noise_in_julia
from .requested_solve import RequestedSolve
from .tuning import MOST_COLUMN_STEPS


ENGINES = ("compiled", "diffrax", "julia")
# Of this library's engines only the compiled one runs these methods.
COMPILED_ONLY = (Rosenbrock, AutoSwitch, SDESolver, Direct)


class Lack(NamedTuple):
    """A feature that is missing.

    - `feature`: the name of the feature.
    - `why`: the reason, with what to do instead: a sentence, or a function of the requested solve
        that returns one, or None where the solve doesn't ask for the feature.
    - `engines`: the engines that lack it; all of them where the ensemble algorithm is the reason.
    - `algorithms`: the ensemble algorithms with which it is missing; None for all.
    - `by`: the adjoint with which it is missing; None for all.
    - `derivatives`: whether only the derivatives are missing.
    - `words`: what the documentation's table says in place of "no".
    """

    feature: str
    why: str | Callable[[RequestedSolve], str | None]
    engines: tuple[str, ...] = ENGINES
    algorithms: tuple[type, ...] | None = None
    by: str | None = None
    derivatives: bool = False
    words: str = ""

    def reason(self, asked: RequestedSolve) -> str | None:
        """Why the feature can't be had; None where it can, or isn't asked for."""
        if self.algorithms is not None and not isinstance(asked.ensemblealg, self.algorithms):
            return None
        if (self.by and not asked.by(self.by)) or not FEATURES[self.feature](asked):
            return None
        return self.why if isinstance(self.why, str) else self.why(asked)


def lacking(engine: str, asked: RequestedSolve, *, placed: bool = False) -> str | None:
    """Why this engine can't run a solve, whatever the solve's functions compute; None when it can.
    `placed`: look only for reasons that lie in the ensemble algorithm."""
    mine = (x for x in LACKS if not x.derivatives and engine in x.engines)
    reasons = (x.reason(asked) for x in mine if (x.algorithms is not None) == placed)
    return next(filter(None, reasons), None)


def lacks_adjoint(engine: str, name: str) -> bool:
    """Whether an engine has an adjoint for some methods at most."""
    return any(x.feature == f"`{name}`" and engine in x.engines for x in LACKS)


def no_derivative(engine: str, feature: str) -> str | None:
    """Why a solve by this engine with this feature has no derivative; None where it has one."""
    mine = (x for x in LACKS if x.derivatives and engine in x.engines and x.feature == feature)
    return next((x.why for x in mine if isinstance(x.why, str)), None)


#
# What may be asked for
#


_ADJOINTS = (
    "ReplayAdjoint",
    "ForwardDiffSensitivity",
    "GaussAdjoint",
    "BacksolveAdjoint",
    "RecursiveCheckpointAdjoint",
    "DirectAdjoint",
    "InterpolatingAdjoint",
)


# The ensemble algorithms that compute with arrays of trajectories.
_OF_ARRAYS = EnsembleGPUArray | EnsembleColumns | None


# The features by their names in the documentation, in its order.
CALLBACKS, MASS, STOPS = "callbacks", "mass matrices", "`tstops`, `d_discontinuities`"
NOISE = "noise"
FEATURES: dict[str, Callable[[RequestedSolve], Any]] = {
    "half precision": lambda a: a.state.dtype not in (np.float32, np.float64),
    "every solver": lambda a: True,
    "arrays on an accelerator": lambda a: (
        platform() != "cpu" and isinstance(a.ensemblealg, _OF_ARRAYS)
    ),
    "step-size controllers of diffrax": lambda a: holds_tolerances(a.option("stepsize_controller")),
    "your own step-size controller": lambda a: a.option("stepsize_controller") is not None,
    "your own norm": lambda a: a.option("internalnorm") is not None,
    "fixed steps": lambda a: a.option("adaptive") is False,
    "steps shared by all": lambda a: isinstance(a.ensemblealg, EnsembleColumns),
    "`save_everystep`": lambda a: a.every.saving.mode == "steps",
    STOPS: lambda a: a.first_given("stops"),
    "`dtmin`, `dtmax`": lambda a: a.first_given("bound"),
    "`max_norm`": lambda a: a.first_given("limit"),
    "`tspan`, `saveat`, tolerances by trajectory": lambda a: a.first_own(),
    "integrands": lambda a: a.every.extension is not None,
    CALLBACKS: lambda a: a.every.events is not None,
    MASS: lambda a: a.mass is not None,
    NOISE: lambda a: a.every.noise is not None,
    **{f"`{name}`": lambda a, name=name: a.by(name) for name in _ADJOINTS},
    "adjoints of diffrax": lambda a: (
        not isinstance(a.option("sensealg"), SensitivityAlgorithm | None)
    ),
}


#
# What isn't there
#


def _of_other_engines(name: str, more: str = "") -> Callable[[RequestedSolve], str | None]:
    def why(asked: RequestedSolve) -> str | None:
        if not isinstance(asked.alg, ODESolver):
            return f"it runs ensembleode's own solvers{more}."
        engines = asked.alg.engines
        return None if name in engines else f"it runs on {', '.join(engines)}."

    return why


def is_imex(alg: Any) -> bool:
    """Whether this is a method of diffrax for equations with a stiff and a nonstiff part."""
    import diffrax

    of_two_parts = diffrax.KenCarp3, diffrax.KenCarp4, diffrax.KenCarp5, diffrax.Sil3
    return isinstance(alg, of_two_parts)


def _of_diffrax(asked: RequestedSolve) -> str | None:
    import diffrax

    alg = asked.alg
    if isinstance(alg, ODESolver):
        return None if "diffrax" in alg.engines else f"it runs on {', '.join(alg.engines)}."
    if not isinstance(alg, diffrax.AbstractSolver):
        return "it is neither an ensembleode solver nor a diffrax one."
    if asked.every.noise is not None:
        return None  # (These are methods for stochastic problems, see `plan/noise.py`.)
    structure = get_origin(alg.term_structure) or alg.term_structure
    if is_imex(alg) or structure is diffrax.AbstractTerm:
        return None
    return (
        f"it solves equations of the form {alg.term_structure}, not du/dt = f(u, p, t). Use an ODE "
        "solver, such as Tsit5()."
    )


def _as_dtype(asked: RequestedSolve) -> str:
    return f"its states are float32 or float64, and u0 is {asked.state.dtype}."


def _other_sensealg(asked: RequestedSolve) -> str:
    return f"sensealg={type(asked.option('sensealg')).__name__}() is of other engines."


def _no_adjoints(engine: str, *names: str) -> list[Lack]:
    return [Lack(f"`{name}`", _other_sensealg, (engine,)) for name in names]


def _stepping_to(asked: RequestedSolve) -> str | None:
    if type(asked.option("stepsize_controller")).__name__ != "StepTo":
        return None
    return "stepsize_controller=StepTo(...) takes the steps that it is given: put the times there."


def _columns(asked: RequestedSolve) -> str | None:
    options = asked.every.options
    if asked.every.noise is not None:
        return "EnsembleColumns has no noise: use EnsembleThreads()."
    if not isinstance(asked.alg.method, RungeKutta):
        return "its EnsembleColumns have explicit Runge-Kutta methods only."
    if not isinstance(options["internalnorm"], RMSNorm | MaxNorm | None):
        return "its EnsembleColumns have RMSNorm() and MaxNorm() only."
    if options["maxiters"] > MOST_COLUMN_STEPS:
        return (
            f"its EnsembleColumns remember the times of all steps, {MOST_COLUMN_STEPS:,} at most."
        )
    return None


def _shared_steps(asked: RequestedSolve) -> str:
    return (
        "EnsembleColumns solves all trajectories with the same steps, so "
        f"{asked.first_own()} must be the same for all; prob_func makes it depend on the index. "
        "Use EnsembleGPUArray() or EnsembleSerial()."
    )


def _on_gpus(feature: str, what: str) -> Lack:
    def why(asked: RequestedSolve) -> str:
        told = what.format(asked.first_given("bound", "stops"))
        return f"{type(asked.ensemblealg).__name__} of DiffEqGPU {told}"

    return Lack(feature, why, ("julia",), ON_GPUS, words="not on GPUs")


_FURTHER = (
    "its step-size control looks at all components of a state, so it has no integrands: let f "
    "return what integrand does as further components of the state."
)
_ELSEWHERE = "or engine='compiled'."

# In the order in which they are looked for.
LACKS: tuple[Lack, ...] = (
    # Solvers and their options.
    Lack(NOISE, noise_in_compiled, ("compiled",), words="yes"),
    Lack(NOISE, noise_in_diffrax, ("diffrax",), words="its own methods"),
    Lack(NOISE, noise_in_julia, ("julia",), words="yes"),
    Lack("half precision", _as_dtype, ("compiled", "julia")),
    Lack("every solver", _of_other_engines("compiled"), ("compiled",)),
    Lack("every solver", _of_diffrax, ("diffrax",)),
    Lack("every solver", _of_other_engines("julia", ", and JuliaAlg(...)"), ("julia",)),
    Lack(
        "step-size controllers of diffrax",
        "stepsize_controller is one of diffrax.",
        ("compiled", "julia"),
    ),
    Lack("your own step-size controller", controller_in_julia, ("julia",), words="PI, I and PID"),
    Lack("your own norm", norm_in_julia, ("julia",), words="RMS and maximum"),
    *_no_adjoints("compiled", *_ADJOINTS[3:]),
    *_no_adjoints("diffrax", "ReplayAdjoint", "GaussAdjoint", "InterpolatingAdjoint"),
    *_no_adjoints(
        "julia", "ReplayAdjoint", "GaussAdjoint", "RecursiveCheckpointAdjoint", "DirectAdjoint"
    ),
    Lack("adjoints of diffrax", _other_sensealg, ("compiled", "julia")),
    *(
        Lack(
            feature,
            f"sensealg=GaussAdjoint() has no {feature} in this engine.",
            ("compiled",),
            by="GaussAdjoint",
        )
        for feature in ("fixed steps", "integrands", CALLBACKS, MASS)
    ),
    Lack(
        "arrays on an accelerator",
        lambda a: f"it runs on CPUs, and JAX computes on {platform()}.",
        ("compiled",),
    ),
    # Ensemble algorithms.
    Lack("steps shared by all", _columns, ("compiled",), words="explicit methods, small states"),
    *(
        Lack(feature, why, algorithms=(EnsembleColumns,))
        for feature, why in {
            CALLBACKS: "EnsembleColumns solves all trajectories with the same steps, and a "
            "callback acts on each by itself: use EnsembleThreads().",
            "integrands": "EnsembleColumns has no integrands: let f return what integrand does as "
            "further components of the state, or use EnsembleThreads().",
            MASS: "EnsembleColumns has no mass_matrix: use EnsembleThreads().",
            "`max_norm`": "EnsembleColumns solves all trajectories with the same steps, and "
            "max_norm ends each by itself: use EnsembleThreads().",
            "`tspan`, `saveat`, tolerances by trajectory": _shared_steps,
        }.items()
    ),
    Lack(
        "every solver",
        "EnsembleGPUKernel() runs the methods of the compiled engine: use EnsembleGPUArray() for "
        "this one.",
        ("diffrax",),
        (EnsembleGPUKernel,),
    ),
    *(
        Lack(
            f"`{name}`",
            "EnsembleGPUKernel() differentiates by ReplayAdjoint() or ForwardDiffSensitivity(), "
            f"not by {name}(): use EnsembleGPUArray() for it.",
            ("compiled",),
            (EnsembleGPUKernel,),
        )
        for name in ("GaussAdjoint", "BacksolveAdjoint")
    ),
    _on_gpus(MASS, f"runs without a mass_matrix: use EnsembleThreads(), {_ELSEWHERE}"),
    _on_gpus(CALLBACKS, f"has no callbacks: use EnsembleThreads(), {_ELSEWHERE}"),
    _on_gpus("`save_everystep`", "can't save every step; use saveat."),
    _on_gpus(
        "`InterpolatingAdjoint`",
        "can't keep the forward solution that InterpolatingAdjoint() follows back: leave sensealg "
        "out, or use BacksolveAdjoint().",
    ),
    _on_gpus("`dtmin`, `dtmax`", "has no {}: use EnsembleThreads()."),
    _on_gpus(STOPS, "has no {}: use EnsembleThreads()."),
    Lack(
        "`tspan`, `saveat`, tolerances by trajectory",
        shared_on_gpus,
        ("julia",),
        ON_GPUS,
        words="not on GPUs",
    ),
    # What is solved, and when.
    Lack(STOPS, _stepping_to, ("diffrax",), words="yes"),
    Lack(
        STOPS,
        "sensealg=BacksolveAdjoint() solves the ODE once more, backwards, and would miss the known "
        "times on the way; leave it out.",
        ("diffrax", "julia"),
        by="BacksolveAdjoint",
    ),
    Lack("integrands", _FURTHER, ("julia",)),
    Lack(
        "integrands",
        "sensealg=BacksolveAdjoint() has no integrands: leave it out.",
        ("diffrax",),
        by="BacksolveAdjoint",
    ),
    Lack(
        "`max_norm`",
        "sensealg=BacksolveAdjoint() solves the adjoint with the steps' control, too, of which "
        "max_norm says nothing: leave it out.",
        ("diffrax",),
        by="BacksolveAdjoint",
    ),
    Lack(
        "`max_norm`",
        "it has no max_norm: leave engine out, or end trajectories by a DiscreteCallback with "
        "eo.terminate.",
        ("julia",),
    ),
    Lack(
        CALLBACKS,
        'it has no callbacks: use engine="compiled", on threads or GPU kernels.',
        ("diffrax",),
    ),
    Lack(CALLBACKS, events_in_julia, ("julia",), words="yes"),
    Lack(MASS, 'it has no mass_matrix: use engine="compiled".', ("diffrax",)),
    Lack(MASS, mass_in_julia, ("julia",), words="yes"),
    # Derivatives.
    *(
        Lack(
            feature,
            f"this solve has {what}. Leave engine out, or pass engine='compiled'.",
            ("julia",),
            derivatives=True,
        )
        for feature, what in {
            CALLBACKS: "callbacks, and engine='julia' has no derivatives of what they do",
            MASS: "a mass_matrix, and engine='julia' has no derivatives with one",
            NOISE: "noise, and engine='julia' has no derivatives with it",
        }.items()
    ),
    Lack(
        STOPS,
        "d_discontinuities depend on what this solve is differentiated by, and engine='julia' has "
        "no derivative by the times where f jumps: use engine='compiled', or take them for "
        "constants, jax.lax.stop_gradient(times).",
        ("julia",),
        derivatives=True,
        words="the times have no derivatives",
    ),
)


def cell(feature: str, engine: str) -> str:
    """What the documentation's table says about a feature and an engine."""
    mine = [x for x in LACKS if x.feature == feature and engine in x.engines != ENGINES]
    words = dict.fromkeys(x.words or _words(x) for x in mine if x.algorithms is None or x.words)
    words.pop("yes", None)
    return "; ".join(words) or "yes"


def _words(lack: Lack) -> str:
    if lack.derivatives:
        return "without derivatives"
    return f"not with `{lack.by}`" if lack.by else "no"
