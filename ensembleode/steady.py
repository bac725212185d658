"""States at rest."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from .ground.retcode import is_successful, ReturnCode, ReturnCodes, was_ended
from .problem.callbacks import settling
from .problem.ensemble import EnsembleAlgorithm
from .problem.jump_problem import JumpProblem
from .problem.options import SAVING
from .problem.problem import EnsembleContext, EnsembleProblem, ODEProblem, remake
from .problem.stochastic import SDEProblem
from .solution.solution import EngineChoice, EnsembleSolution
from .solution.stats import Stats
from .solvers import Rodas5P
from .solving import solve
from .tracing.program import is_tracer


class SteadyState(eqx.Module):
    """A state at rest, or those of an ensemble; then each array has a first axis of trajectories.

    - `u`: the state, in the structure of the problem's; NaN where none was found.
    - `t`: the time at which the solve before Newton's method ended.
    - `retcode`: `Success`; `ConvergenceFailure` where Newton's method found no state at rest;
        `Failure` where the solve ended in another way than at rest; or that of a solve that failed.
        A [`ReturnCode`][ensembleode.ReturnCode], or for an ensemble an array of integers.
    - `stats`: the [`Stats`][ensembleode.Stats] of the solve.
    - `engine`: which engine ran, and why.
    """

    u: PyTree
    t: Array
    retcode: ReturnCodes
    stats: Stats
    engine: EngineChoice | None = eqx.field(static=True)

    @property
    def successful(self) -> Any:
        """Whether the state is at rest, `[]` or `[trajectory]`."""
        return is_successful(self.retcode)


def steady_state(
    prob: ODEProblem | EnsembleProblem,
    alg: Any = None,
    ensemblealg: EnsembleAlgorithm | None = None,
    *,
    callback: Any = None,
    **options: Any,
) -> SteadyState:
    """The state at rest to which a problem comes from its `u0`, or those of an ensemble: of a
    biochemical model before a drug is given, for example, or of a reactor.

    A solve goes on from `u0` until [`TerminateSteadyState`][ensembleode.TerminateSteadyState] ends
    it, whatever the end of the problem's `tspan`, and Newton's method then finds the root of `f` to
    the last digits. Linear combinations of components that `f` conserves, such as the total amount
    of a substance, keep the values that they have at `u0`. With a mass matrix `M` these are
    combinations of `M u`.

    Derivatives, of any order and in both modes, are those of the root by the implicit function
    theorem: they don't depend on the tolerances. Those by `u0` are zero but for what is conserved.
    An ensemble takes what `solve` takes; `jit` and `vmap` work, too.

    What isn't found has a return code and NaN as its state: where the solve doesn't come to rest
    within `maxiters` steps; where `f` has no root there, for example because one component grows
    for ever and so slowly that it seems to rest; and where `f` still changes with time. Whether the
    state is stable isn't checked. (A solve that starts at an unstable state stays there.)

    **Arguments:**

    - `prob`: an [`ODEProblem`][ensembleode.ODEProblem], or an
        [`EnsembleProblem`][ensembleode.EnsembleProblem] without `output_func` and `reduction`. If
        `prob_func` sets `tspan`, trajectories have to come to rest before its end.
    - `alg`: the solver, by default `Rodas5P()`, as what comes to rest is mostly stiff.
    - `ensemblealg`, `trajectories` and all other options: those of [`solve`][ensembleode.solve],
        except for those that say what is saved, and where.
    - `callback`: the problem's own callbacks by default, such as one that sets it in motion. A
        `TerminateSteadyState` among them says what counts as rest.

    **Returns:** a [`SteadyState`][ensembleode.SteadyState].

    **Raises:** the errors of `solve`; `ValueError` for an `output_func`, a `reduction`, an option
    that it doesn't take, and a `prob_func` that sets a `callback` of its own.

    **Source:** A. Griewank and A. Walther, Evaluating Derivatives, 2nd ed., 2008, section 15.1.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> def binding(u, p, t):  # A <-> B
    ...     flux = p[0] * u[0] - p[1] * u[1]
    ...     return jnp.stack([-flux, flux])
    >>> prob = eo.ODEProblem(binding, [3.0, 0.0], (0.0, 1.0), [2.0, 1.0])
    >>> eo.steady_state(prob).u.round(4).tolist()
    [1.0, 2.0]
    """
    alone = not isinstance(prob, EnsembleProblem)
    if not isinstance(prob, ODEProblem | EnsembleProblem):
        raise TypeError(
            f"steady_state takes an ODEProblem or an EnsembleProblem, got {type(prob).__name__}."
        )
    if isinstance(prob if alone else prob.prob, SDEProblem | JumpProblem):
        raise ValueError(
            "steady_state is for ODEs, and a state with noise is never at rest: give its drift, "
            "eo.ODEProblem(prob.f, prob.u0, prob.tspan, prob.p)."
        )
    if wrong := sorted(_NOT_TAKEN & set(options)):
        raise ValueError(
            f"{wrong[0]} is given, and steady_state returns one state of each trajectory, in "
            "memory: leave it out, or use eo.solve with callback=eo.TerminateSteadyState()."
        )
    if not alone and (prob.output_func or prob.reduction):
        raise ValueError(
            "prob has an output_func or a reduction, and steady_state returns the states at rest: "
            "leave them out, and compute with what it returns."
        )
    one = prob if alone else prob.prob
    callback = one.options.get("callback") if callback is None else callback
    far = one.tspan[0], _FAR
    resting: Any = remake(one, tspan=far, callback=settling(callback), save_idxs=None)
    if isinstance(prob, EnsembleProblem):
        resting = remake(prob, prob=resting)
        made = resting.make(EnsembleContext(0, 1, jax.random.key(0)))
        if made.options["callback"] is not resting.prob.options["callback"]:
            raise ValueError(
                "prob_func sets a callback, in place of the one that ends a trajectory at rest: "
                "give callback to steady_state, for all trajectories."
            )
    if isinstance(alg, EnsembleAlgorithm) and ensemblealg is None:
        alg, ensemblealg = None, alg
    alg = Rodas5P() if alg is None else alg
    sim: Any = solve(resting, alg, ensemblealg, save_start=False, **options)
    if isinstance(sim, EnsembleSolution):
        t, u = sim.end.t, sim.end.u
    else:
        t, u = sim.t[-1], jax.tree.map(lambda x: x[-1], sim.u)
    ended = was_ended(jnp.asarray(sim.retcode))
    code = jnp.where(ended, ReturnCode.Success.value, sim.retcode).astype(np.int8)
    if not is_tracer(code):
        code = ReturnCode(int(code)) if alone else np.asarray(code)

    def found(x: Any) -> Any:
        return jnp.where(ended.reshape(*ended.shape, *(1,) * (x.ndim - ended.ndim)), x, jnp.nan)

    u, t = jax.tree.map(found, (u, t))
    return SteadyState(u, t, code, sim.stats, sim.engine)


_FAR = 1e15  # a time that no trajectory reaches, in single precision, too
_NOT_TAKEN = {*SAVING, "save_after_events", "store", "store_key", "max_repeats"}
