"""The implicit methods of the diffrax engine: diagonally implicit, with an explicit first stage.

The steps are those of diffrax (`AbstractESDIRK`), which doesn't report how often it iterates. This
module counts the iterations, and has criteria of its own for ending the iteration for a stage or
giving it up: those of section IV.8 of Hairer and Wanner, "Solving Ordinary Differential Equations
II" (2nd ed., 1996), where the change of an iterate is measured as a change of the state, in units
of the tolerances. The convergence rate (theta there) is not kept from step to step, so there are at
least two iterations, unless the first one changes next to nothing.

diffrax 0.7.2 with optimistix 0.1.0 measures changes of `f`, or of `h f`, as if they were changes of
the state, and gives up after two iterations, even where only rounding is left to change. Its
KenCarp methods also have an explicit half, so that their first stage is no longer the last stage of
the step before. Its implicit Euler method ends the trajectory where the iteration fails.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optimistix
from jax import Array
from jaxtyping import PyTree


def solver(name: str, adaptive: bool) -> diffrax.AbstractSolver:
    """The method of that name. With `adaptive`, a step whose iteration fails is tried shorter."""
    finder = SimplifiedNewton if adaptive else FullNewton
    return _METHODS[name](
        root_finder=diffrax.with_stepsize_controller_tols(finder)(),
        root_find_max_steps=finder.iterations,
    )


def with_retries(solver: diffrax.AbstractSolver) -> diffrax.AbstractSolver:
    """A diffrax solver for which every step can be tried shorter where an iteration fails.

    The steps of diffrax's Runge-Kutta methods can already: their error is infinite then. (A wrapped
    solver, which has an error of its own, is an instance of all that it wraps.)
    """
    is_wrapped = isinstance(solver, diffrax.AbstractWrappedSolver)
    is_retried = isinstance(solver, diffrax.AbstractRungeKutta) and not is_wrapped
    is_implicit = isinstance(solver, diffrax.AbstractImplicitSolver)
    return _RetriedSolver(solver) if is_implicit and not is_retried else solver


def before_jumps(solver: diffrax.AbstractSolver, jumps: Array) -> diffrax.AbstractSolver:
    """A diffrax solver of which no stage is after a jump of `f` that its step doesn't pass; the
    solver itself, if its stages are within its steps. `jumps`: times in the direction of time."""
    stages = getattr(getattr(solver, "tableau", None), "c", None)
    is_within = stages is None or np.max(stages, initial=0.0) <= 1
    return solver if is_within else _SolverBeforeJumps(solver, jax.lax.stop_gradient(jumps))


#
# When the iteration for a stage ends
#


class _StateUnits(optimistix.AbstractRootFinder):
    """Measures changes of `f`, the derivative at a stage, as changes of the state, `h f`.

    `y0` and `h`, the step times the tableau's diagonal entry, are set for each step.
    """

    kappa: eqx.AbstractVar[float]
    y0: Any = None
    h: Any = None

    def step(self, fn, y, args, options, state, tags):
        y, new, aux = super().step(fn, y, args, options, state, tags)
        with jax.numpy_dtype_promotion("standard"):
            change = jtu.tree_map(lambda f: self.h * f, new.diff)
            size = self._size(change, self._reached(y))
        # With an infinite Jacobian an iteration changes nothing, which is not convergence.
        size = jnp.where(finite(state.linear_state), size, jnp.nan)
        return y, dataclasses.replace(new, diffsize=size.astype(state.diffsize.dtype)), aux

    def postprocess(self, fn, y, aux, args, options, state, tags, result):
        """Sets the result of a failed iteration to zero, as the following stages begin there."""
        solved = result == optimistix.RESULTS.successful
        return jtu.tree_map(lambda y: jnp.where(solved, y, 0), y), aux, {}

    def _reached(self, f: Array) -> Array:
        """For each component, the larger of its magnitudes at the start of the step and at the
        stage."""
        return jtu.tree_map(
            lambda y0, f: jnp.maximum(jnp.abs(y0), jnp.abs(y0 + self.h * f)), self.y0, f
        )

    def _size(self, change: Array, reached: Array) -> Array:
        def scaled(change, reached):
            return jnp.where(change == 0, 0.0, jnp.abs(change) / (self.atol + self.rtol * reached))

        return self.norm(jtu.tree_map(scaled, change, reached))

    def _convergence(self, f: Array, state: PyTree) -> tuple[Array, Array, Array]:
        """Whether the iteration has converged, its rate, and an estimate of the remaining
        change."""
        size = state.diffsize
        rate = size / state.diffsize_prev
        rest = jnp.where(rate < 1, rate / (1 - rate) * size, jnp.inf)
        with jax.numpy_dtype_promotion("standard"):
            reached = self._reached(f)
            ulps = jtu.tree_map(lambda y: 8 * jnp.finfo(y.dtype).eps * y, reached)
            least = jnp.maximum(1e-3 * self.kappa, self._size(ulps, reached))
            converged = (state.step >= 2) & (rest < self.kappa)
            return converged | ((state.step >= 1) & (size <= least)), rate, rest


class SimplifiedNewton(_StateUnits, diffrax.VeryChord):
    """The iteration with one Jacobian for each step, for steps that can be tried shorter."""

    kappa: float = 0.1
    iterations: ClassVar[int] = 10

    def terminate(self, fn, y, args, options, state, tags):
        converged, rate, rest = self._convergence(y, state)
        left = (self.iterations - state.step).astype(rate.dtype)
        slow = ~((rate < 1) & (rest * rate**left < self.kappa))
        return _ended(converged, (state.step >= 2) & ~converged & slow, state)


class FullNewton(_StateUnits, diffrax.VeryChord):
    """The iteration with a new Jacobian each time, for steps that can't be tried shorter.

    It goes on after iterations that came no closer to the solution.
    """

    kappa: float = 1e-2
    iterations: ClassVar[int] = 20

    def step(self, fn, y, args, options, state, tags):
        anew: Any = self.init(fn, y, args, {}, None, None, tags)  # pyright: ignore
        first = state.linear_state
        state = dataclasses.replace(state, linear_state=anew.linear_state)
        y, state, aux = super().step(fn, y, args, options, state, tags)
        return y, dataclasses.replace(state, linear_state=first), aux

    def terminate(self, fn, y, args, options, state, tags):
        converged, _, _ = self._convergence(y, state)
        return _ended(converged, jnp.zeros_like(converged), state)


def _ended(converged: Any, failed: Any, state: Any) -> tuple[Any, Any]:
    results: Any = optimistix.RESULTS
    result = results.where(failed, results.nonlinear_divergence, state.result)
    infinite = (state.step >= 1) & ~jnp.isfinite(state.diffsize)
    result = results.where(infinite, results.nonfinite, result)
    return converged | (result != results.successful), result


def finite(tree: PyTree) -> Array:
    """Whether all inexact numbers of a tree are finite."""
    leaves = jtu.tree_leaves(eqx.filter(tree, eqx.is_inexact_array))
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in leaves])


#
# The methods
#


class StepWork(NamedTuple):
    """The numbers of evaluations of `f`, Jacobians, factorisations, and solves with the factors."""

    nf: Any
    njac: Any
    nw: Any
    nsolve: Any


class CountedError(NamedTuple):
    """What controllers are told about each step: its error, and the work that it took."""

    error: Any
    work: StepWork  # floats, since diffrax looks for NaN here


class _Stages(NamedTuple):
    """A step up to stage `i`."""

    i: Any
    f: Any  # the derivative at the last stage
    factors: Any  # of the Jacobian
    fs: Any  # the derivatives at all stages
    result: Any  # of the root finder
    nf: Any  # how often the field was evaluated
    nsolve: Any  # how often linear equations were solved, in implicit stages


class CountingESDIRK(diffrax.AbstractESDIRK):
    """diffrax's step, operation by operation. In addition, it counts evaluations of `f`, and tells
    the root finder which step it is for.

    Within a step, the solution is the cubic polynomial of the states and slopes at both ends, as in
    OrdinaryDiffEq. The slopes are those that the iterations found, because `f` of a state that is
    off by one tolerance would be off by as many tolerances as the problem is stiff. (Interpolants
    of all stages, such as diffrax's for the KenCarp methods, lose orders on stiff problems.)
    """

    root_finder: Any = diffrax.with_stepsize_controller_tols(SimplifiedNewton)()
    root_find_max_steps: int = SimplifiedNewton.iterations
    interpolation_cls: ClassVar = diffrax.ThirdOrderHermitePolynomialInterpolation

    def step(self, terms, t0, t1, y0, args, solver_state: PyTree, made_jump):
        tableau: Any = self.tableau
        results: Any = diffrax.RESULTS
        stages, dtype = tableau.num_stages, jnp.result_type(*jtu.tree_leaves(y0))
        control, (first, f0) = terms.contr(t0, t1), solver_state
        first = first | made_jump
        anew = eqxi.unvmap_any(first)  # for all trajectories if it is so for one
        f0 = jtu.tree_map(lambda f: jnp.where(anew, 0, f), f0)
        fs = jtu.tree_map(lambda f: jnp.zeros((stages, *f.shape), f.dtype).at[0].set(f), f0)
        lower, predictor = (
            jnp.asarray([np.pad(x, (0, stages - len(x))) for x in ([], *rows)], dtype)
            for rows in (tableau.a_lower, tableau.a_predictor)
        )
        diagonal = jnp.asarray(tableau.a_diagonal, dtype)
        c = jnp.asarray(np.append(0.0, tableau.c), jnp.result_type(t0, t1))
        zero = jnp.zeros((), dtype)
        start, h = jax.lax.stop_gradient((y0, float(tableau.a_diagonal[-1]) * control))
        finder = dataclasses.replace(self.root_finder, y0=start, h=h)
        limits: Any = {"max_steps": self.root_find_max_steps, "throw": False}
        find = functools.partial(optimistix.root_find, _residual, finder, has_aux=True, **limits)

        def linearised(*at):
            at = jax.lax.stop_gradient(at)
            state = finder.init(_residual, *at, {}, None, None, frozenset())
            return eqx.partition(state, eqx.is_array)

        def stage(now):
            i, fs, result = now.i, now.fs, now.result
            known = jtu.tree_map(lambda _, xs: xs[...], f0, fs)
            y = jtu.tree_map(jnp.add, y0, terms.prod(_combined(lower[i], known), control))
            t = jnp.where(c[i] == 1, t1, t0 + c[i] * (t1 - t0))
            at = (_combined(predictor[i], known), (diagonal[i], terms, t, y, args, control))
            i, old = eqxi.nonbatchable(i), jax.lax.stop_gradient(now.factors)
            factors = jax.lax.cond(i == 1, lambda: linearised(*at)[0], lambda: old)
            fixed = jax.lax.stop_gradient(at)
            found = find(*fixed, {"init_state": eqx.combine(factors, rest)})
            this = results.promote(found.result)
            result = results.where(result == results.successful, this, result)
            # A gradient adds zero times the derivatives of a stage that isn't solved, and these may
            # be infinite or NaN. So it has those of an explicit stage at the start of the step.
            solved = result == results.successful
            a, t, y = jtu.tree_map(
                functools.partial(jnp.where, solved), (diagonal[i], t, y), (zero, t0, y0)
            )
            f = _root(found.value, (a, terms, t, y, args, control))
            fs = jtu.tree_map(lambda x, xs: xs.at[i].set(x), f, fs)
            # An explicit stage solves with the identity matrix.
            iterations = found.stats["num_steps"]
            nf = now.nf + jnp.where(first | (i > 0), iterations, 0)
            nsolve = now.nsolve + jnp.where(i > 0, iterations, 0)
            return _Stages(i + 1, f, factors, fs, result, nf, nsolve)

        rest: Any = None

        def of_explicit_stage():
            nonlocal rest
            # (Its matrix is the identity.)
            at = jnp.zeros((), dtype), terms, t0, y0, args, control
            factors, rest = linearised(jtu.tree_map(jnp.zeros_like, f0), at)
            return factors

        # These are computed only where there is an explicit stage: a Jacobian and a factorisation
        # take most of a step's time.
        shapes = jax.eval_shape(of_explicit_stage)
        none = jtu.tree_map(jnp.zeros_like, shapes)
        factors = jax.lax.cond(anew, of_explicit_stage, lambda: none)
        nothing, start = jnp.array(0), jnp.where(anew, 0, 1)
        begin = _Stages(start, f0, factors, fs, results.successful, nothing, nothing)
        _, f1, _, fs, result, nf, nsolve = eqxi.while_loop(
            lambda now: now.i < stages,
            stage,
            begin,
            buffers=lambda now: now.fs,
            kind=self.scan_kind or "checkpointed",
            **{"max_steps": stages, "checkpoints": stages, "base": stages},
        )
        ks = jax.vmap(terms.prod, in_axes=(0, None))(fs, control)
        b, b_error = (jnp.asarray(x, dtype) for x in (tableau.b_sol, tableau.b_error))
        y1 = jtu.tree_map(jnp.add, y0, _combined(b, ks))
        k0, k1 = (jtu.tree_map(lambda k, i=i: k[i], ks) for i in (0, -1))
        dense = {"y0": y0, "y1": y1, "k0": k0, "k1": k1}
        # Infinite and NaN results stay so, which the return code needs.
        lost, solved = result == results.nonfinite, result == results.successful
        y1 = jtu.tree_map(lambda y: jnp.where(lost, jnp.nan, y), y1)
        error = jtu.tree_map(lambda e: jnp.where(solved, e, jnp.inf), _combined(b_error, ks))
        # The first implicit stage always computes a Jacobian.
        njac = 1 + nsolve if isinstance(self.root_finder, FullNewton) else jnp.array(1)
        work = StepWork(*(x.astype(c.dtype) for x in (nf, njac, njac, nsolve)))
        return y1, CountedError(error, work), dense, (False, f1), result


def _residual(f: Array, inputs: PyTree) -> tuple[Any, None]:
    """The residual of a stage, which is zero if `f` is the derivative at the stage."""
    a, terms, t, y, args, control = inputs
    at = jtu.tree_map(lambda y, k: y + a * k, y, terms.prod(f, control))
    return jtu.tree_map(jnp.subtract, f, terms.vf(t, at, args)), None


def _root(f: Array, inputs: PyTree) -> Array:
    """`f`, a root of the residual, with its implicit derivatives with respect to the inputs."""
    return optimistix.ImplicitAdjoint().apply(
        _derivative_given, _at_root, (f, inputs), frozenset()
    )[0]


def _derivative_given(inputs: PyTree) -> tuple[Any, None]:
    return inputs[0], None


def _at_root(f: Any, _: Any, inputs: Any) -> Any:
    # (lineax makes arrays of the numbers of Python's in the terms.)
    with jax.numpy_dtype_promotion("standard"):
        return _residual(f, inputs[1])[0]


def _combined(weights: Array, fs: Array) -> Array:
    dot = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
    return jtu.tree_map(lambda fs: dot(weights, fs), fs)


class Kvaerno3(CountingESDIRK, diffrax.Kvaerno3):
    pass


class Kvaerno4(CountingESDIRK, diffrax.Kvaerno4):
    pass


class Kvaerno5(CountingESDIRK, diffrax.Kvaerno5):
    pass


# The KenCarp methods' implicit half is used for all of `f`.


class KenCarp3(CountingESDIRK):
    order: ClassVar = diffrax.KenCarp3.order
    tableau: ClassVar = diffrax.KenCarp3.tableau.tableaus[1]


class KenCarp4(CountingESDIRK):
    order: ClassVar = diffrax.KenCarp4.order
    tableau: ClassVar = diffrax.KenCarp4.tableau.tableaus[1]


class KenCarp5(CountingESDIRK):
    order: ClassVar = diffrax.KenCarp5.order
    tableau: ClassVar = diffrax.KenCarp5.tableau.tableaus[1]


class ImplicitEuler(CountingESDIRK):
    """The implicit Euler method; its error estimate is the difference to the trapezoidal rule, as
    in diffrax."""

    tableau: ClassVar = diffrax.ButcherTableau(
        a_lower=(np.array([0.0]),),
        a_diagonal=np.array([0.0, 1.0]),
        a_predictor=(np.array([1.0]),),
        b_sol=np.array([0.0, 1.0]),
        b_error=np.array([-0.5, 0.5]),
        c=np.array([1.0]),
    )

    @staticmethod
    def interpolation_cls(*, t0, t1, y0, y1, k0, k1):
        return diffrax.LocalLinearInterpolation(t0=t0, t1=t1, y0=y0, y1=y1)

    order: ClassVar = diffrax.ImplicitEuler.order
    error_order: ClassVar = diffrax.ImplicitEuler.error_order


_METHODS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (Kvaerno3, Kvaerno4, Kvaerno5, KenCarp3, KenCarp4, KenCarp5, ImplicitEuler)
}


#
# Solvers of the user's
#


def _passed_on(name: str, *, to_implicit: bool = False) -> Any:
    """A property with this name of the wrapped solver, or of the implicit solver that it wraps."""

    def found(self):
        solver = self.solver
        while to_implicit and isinstance(solver, diffrax.AbstractWrappedSolver):
            solver = solver.solver
        return getattr(solver, name)

    return property(found)


class _WrappedSolver(diffrax.AbstractImplicitSolver, diffrax.AbstractWrappedSolver):
    solver: diffrax.AbstractSolver

    root_finder = _passed_on("root_finder", to_implicit=True)
    root_find_max_steps = _passed_on("root_find_max_steps", to_implicit=True)
    term_structure, interpolation_cls, term_compatible_contr_kwargs = map(
        _passed_on, ("term_structure", "interpolation_cls", "term_compatible_contr_kwargs")
    )
    order, strong_order, error_order = map(_passed_on, ("order", "strong_order", "error_order"))
    init, func = map(_passed_on, ("init", "func"))


class _RetriedSolver(_WrappedSolver):
    """A solver whose error is infinite where a step fails."""

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        y1, error, dense, state, result = self.solver.step(
            terms, t0, t1, y0, args, solver_state, made_jump
        )
        solved = result == diffrax.RESULTS.successful
        error = jtu.tree_map(lambda e: jnp.where(solved, e, jnp.inf), error)
        return y1, error, dense, state, result


class _SolverBeforeJumps(_WrappedSolver):
    """A solver of which no stage is after a jump of `f` that its step doesn't pass.

    Such a stage is at the last time before the jump instead. This lowers the order of the step, and
    the error estimate shows it.
    """

    jumps: Any

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        ends = jnp.where(self.jumps > t0, self.jumps, jnp.inf).min()
        terms = _ClampedTerm(terms, jnp.maximum(t1, eqxi.prevbefore(ends)))
        return self.solver.step(terms, t0, t1, y0, args, solver_state, made_jump)


class _ClampedTerm(diffrax.AbstractTerm):
    """A term that is evaluated at its time, or at a given time if that is earlier."""

    term: Any
    last: Any

    def vf(self, t, y, args):
        return self.term.vf(jnp.minimum(t, self.last), y, args)

    def contr(self, t0, t1, **kwargs):
        return self.term.contr(t0, t1, **kwargs)

    def prod(self, vf, control):
        return self.term.prod(vf, control)
