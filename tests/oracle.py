"""Solves of one trajectory by a plain loop over Python numbers, for comparison with engines.

The formulas are those of `ensembleode.solvers`, for methods, controllers, times and verdicts. How
they make up a solve is written here a second time, with the control flow of Python and the field
as the user wrote it.
"""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo
from ensembleode.plan.saving import grid, Spacing
from ensembleode.problem.options import DEFAULTS
from ensembleode.problem.problem import EnsembleContext
from ensembleode.solvers import step_size, time, verdicts
from ensembleode.solvers.arithmetic import NUMBERS
from ensembleode.solvers.method import Equations


class Solved(NamedTuple):
    """What a solve gives: the saved times `[row]` and states `[row, *state]`, the return code, and
    the numbers of steps."""

    t: np.ndarray
    u: np.ndarray
    retcode: int
    naccept: int
    nreject: int


def solve(prob: eo.ODEProblem, alg: Any = None, **options: Any) -> Solved:
    """The solution of a problem whose state is an array, with the options of `eo.solve` that set
    the steps and what is saved."""
    with np.errstate(all="ignore"):
        return _Trajectory(prob, alg or eo.Tsit5(), {**prob.options, **options}).solved()


def solve_each(ens: eo.EnsembleProblem, alg: Any = None, *, n: int, **options: Any) -> list[Solved]:
    """The solutions of the trajectories of an ensemble."""
    return [solve(ens.make(ctx), alg, **options) for ctx in contexts(n)]


def contexts(n: int) -> list[EnsembleContext]:
    """What the functions of an ensemble are given for each trajectory."""
    key = jax.random.key(0)
    return [EnsembleContext(jnp.asarray(i), jnp.asarray(1), key) for i in range(n)]


def assert_same_steps(sim: Any, expected: list[Solved], *, atol: float = 0.0, **close: Any) -> None:
    """The trajectories of a solution have the return codes, the numbers of steps and the rows of
    these; the rows are close."""
    np.testing.assert_array_equal(sim.retcode, [x.retcode for x in expected])
    np.testing.assert_array_equal(sim.stats.naccept, [x.naccept for x in expected])
    np.testing.assert_array_equal(sim.stats.nreject, [x.nreject for x in expected])
    for i, one in enumerate(expected):
        np.testing.assert_allclose(sim[i].t, one.t, atol=atol, **close)
        np.testing.assert_allclose(sim[i].u, one.u, atol=atol, **close)


class _Trajectory:
    """The variables of a solve. States are tuples of NumPy's numbers.

    - `t`, `y`, `carry`: the time, the state, and what the method carries.
    - `h`: the size of the next step; `memory`: the controller's; `failures`: see `count_failures`.
    - `stop`: the time that the next steps may not pass; `anchor`: the time after the last such
        stop; `before`: the steps that had been tried then.
    """

    def __init__(self, prob: eo.ODEProblem, alg: Any, options: dict):
        u0 = np.asarray(prob.u0)
        self.shape, self.dtype = u0.shape, u0.dtype
        self.options = {**DEFAULTS, **options}
        self.t0, self.t1 = (self.number(x) for x in prob.tspan)
        self.span, self.direction = self.t1 - self.t0, np.sign(self.t1 - self.t0)
        self.method, self.norm = alg.method, self.options["internalnorm"] or eo.RMSNorm()
        self.controller = self.controller_of(alg)
        self.tol = step_size.Tolerances(*map(self.tolerance, ("abstol", "reltol")))
        self.bounds = time.StepBounds(*map(self.number_or_none, ("dtmin", "dtmax")))
        self.equations = _equations(prob.f, prob.p, self.shape, self.dtype)
        self.jumps = self.times("d_discontinuities")
        self.jumps = self.jumps[self.beyond(self.next(self.jumps), self.t1) < 0]
        self.stops = np.concatenate([self.jumps, self.times("tstops")])
        self.t, self.y = self.t0, tuple(u0.ravel())
        self.naccept = self.ntried = self.before = 0
        self.failures, self.stop, self.anchor = np.int32(0), self.t1, self.t0
        self.rows: list[tuple] = []
        self.left = self.saveat()

    def controller_of(self, alg: Any) -> Any:
        """The controller of adaptive steps, with its constants; None for fixed steps."""
        adaptive = self.options["adaptive"]
        if not (alg.adaptive if adaptive is None else adaptive):
            return None
        chosen = self.options["stepsize_controller"] or eo.PIController()
        found = chosen.for_method(self.method.order, self.method.embedded_order)
        return found.for_implicit() if self.method.is_implicit else found

    def number(self, x: Any) -> Any:
        return np.asarray(x, self.dtype)[()]

    def number_or_none(self, name: str) -> Any:
        return None if self.options[name] is None else self.number(self.options[name])

    def tolerance(self, name: str) -> Any:
        found = np.asarray(self.options[name], self.dtype)
        return tuple(found.ravel()) if found.ndim else found[()]

    def times(self, name: str) -> np.ndarray:
        """The known times of this name within the span; jumps also at its start."""
        given = self.options[name]
        found = np.zeros(0, self.dtype) if given is None else np.asarray(given, self.dtype).ravel()
        since, left = self.beyond(found, self.t0), self.beyond(self.t1, found)
        return found[((since > 0) | ((name != "tstops") & (since == 0))) & (left > 0)]

    def beyond(self, t: Any, other: Any) -> Any:
        """How far `t` is beyond the other time."""
        return self.direction * (t - other)

    def next(self, t: Any) -> Any:
        return time.next_time(NUMBERS, t, self.direction)

    def saveat(self) -> list:
        """The times to save within the span; those at the start are saved."""
        saveat, every = self.options["saveat"], self.options["save_everystep"]
        start = self.options["save_start"] is not False
        if saveat is None or every:
            self.rows += [(self.t0, self.y)] * start
            return []
        if np.ndim(saveat) == 0:
            spacing = Spacing(float(saveat), start, self.options["save_end"] is not False)
            saveat, _ = grid(spacing, self.t0, self.t1, self.dtype)
        times = [self.number(x) for x in np.ravel(saveat)]
        self.rows += [(t, self.y) for t in times if t == self.t0]
        return [t for t in times if t != self.t0]

    #
    # The loop
    #

    def solved(self) -> Solved:
        code = self.begin()
        while code == verdicts.GOING:
            code = self.advance()
        if code == verdicts.PROBING:
            self.h = verdicts.PROBE * self.h
            _, _, attempt = self.attempt()
            code = verdicts.code_of_probe(NUMBERS, self.tol, self.y, attempt.y2)
        if self.options["saveat"] is None and not self.options["save_everystep"]:
            self.rows.append((self.t1, self.y) if self.ended else (self.t1, self.nothing))
        self.rows += [(t, self.nothing) for t in self.left]
        t, y = zip(*self.rows, strict=True) if self.rows else ((), ())
        u = np.array(y, self.dtype).reshape(-1, *self.shape)
        nreject = self.ntried - self.naccept
        return Solved(np.array(t, self.dtype), u, int(code), self.naccept, nreject)

    def begin(self) -> Any:
        """Choose the first step; the return code so far."""
        self.carry = self.method.init(NUMBERS, self.equations, self.y, self.t)
        self.h = self.number_or_none("dt")
        finite = usable = np.isfinite(self.y).all()
        if self.h is None:
            rates = self.equations.f(self.y, self.t)
            at = self.equations.f, self.t, self.y, rates, self.span, self.tol
            order, dtmax = self.method.order, self.bounds.dtmax
            self.h = step_size.initial_step(NUMBERS, self.norm, _power, *at, order, dtmax)
        self.h = abs(self.h)
        if self.controller is not None:
            self.h = self.bounds.first(NUMBERS, self.h, self.t, self.span)
            self.memory = tuple(map(np.float32, self.controller.initial_memory()))
            usable = finite & np.isfinite(self.h)
        self.arrive()
        wanted = np.True_
        return verdicts.first_code(NUMBERS, wanted, finite, usable, self.span == 0)

    def arrive(self) -> None:
        """Begin a stretch of time: where `f` jumps, from just behind the jump."""
        if self.t in self.jumps:
            self.t = self.next(self.t)
            self.carry = self.method.init(NUMBERS, self.equations, self.y, self.t)
        ahead = self.stops[self.beyond(self.stops, self.t) > 0]
        self.stop = time.end_of_stretch(NUMBERS, list(ahead), self.t1, self.direction)
        self.anchor, self.before = self.t, self.ntried

    def attempt(self) -> tuple:
        """The end of the next step, its signed size, and the step."""
        t, self.unresolved = self.t, np.False_
        if self.controller is not None:
            t2 = time.adaptive_step(NUMBERS, t, self.stop, self.direction, self.h)
        else:
            number = np.int64(self.ntried - self.before)
            at = self.anchor, self.stop, t, self.h, number
            t2, self.unresolved = time.fixed_step(NUMBERS, *at)
        h = t2 - t
        if len(self.jumps):
            jumps = np.isin(t2, [*self.jumps, self.t1])
            h = time.size_before(NUMBERS, t, t2, jumps, self.direction)
        if self.unresolved:
            t2, h = t, self.number(np.nan)
        return t2, h, self.method.step(NUMBERS, self.equations, self.y, self.carry, t, h)

    def advance(self) -> Any:
        """Try a step, and take it if it is good; the return code so far."""
        t2, h, attempt = self.attempt()
        self.ntried += 1
        verdict = self.judge(t2, attempt)
        self.h = verdict.next_h
        if verdict.accepted:
            self.naccept += 1
            self.save(t2, h, attempt)
            self.t, self.y, self.carry = t2, attempt.y2, attempt.carry
            if self.norm(NUMBERS, self.y) > (self.options["max_norm"] or np.inf):
                return verdicts.DIVERGED
        arrived = verdict.accepted & (t2 == self.t1)
        if arrived or verdict.lost or self.ntried >= self.options["maxiters"]:
            bounds = None if self.controller is None else self.bounds
            code = verdicts.code_at_end(NUMBERS, verdict, arrived, bounds)
            return verdicts.code_of_end(NUMBERS, code, np.isfinite(self.y).all())
        if self.t == self.stop:
            self.arrive()
        return verdicts.GOING

    def judge(self, t2: Any, attempt: Any) -> verdicts.Verdict:
        if self.controller is None:
            sound = np.isfinite(attempt.y2).all() & (not attempt.failed)
            return verdicts.judge_fixed(NUMBERS, sound, self.unresolved, np.True_, self.h)
        size = np.minimum(self.h, abs(self.stop - self.t))
        squared = step_size.squared_error(NUMBERS, self.norm, self.tol, attempt, self.y)
        times = verdicts.Times(self.t, t2, self.stop, self.span)
        how = self.controller, self.bounds, times, size, squared, self.memory
        verdict = verdicts.judge(NUMBERS, *how, np.True_, self.naccept == 0)
        self.memory = verdict.memory
        verdict, self.failures = verdicts.counted(NUMBERS, verdict, self.failures, size, self.span)
        return verdict

    #
    # Rows
    #

    @property
    def ended(self) -> bool:
        return self.t == self.t1

    @property
    def nothing(self) -> tuple:
        return (np.nan,) * len(self.y)

    def save(self, t2: Any, h: Any, attempt: Any) -> None:
        """Save the states within a step, or that at its end."""
        if self.options["save_everystep"]:
            self.rows.append((t2, attempt.y2))
        if not self.left or self.beyond(t2, self.left[0]) < 0:
            return
        at = self.y, attempt.dense, self.t, h
        dense = self.method.dense(NUMBERS, self.equations, *at)
        while self.left and self.beyond(t2, self.left[0]) >= 0:
            theta = (self.left[0] - self.t) / h
            u = self.method.interpolate(NUMBERS, self.y, dense, h, theta)
            self.rows.append((self.left.pop(0), u))


def _power(x: Any, order: int) -> Any:
    return 10.0 ** (-(2.0 + np.log10(x)) / order)


@functools.lru_cache(32)
def _compiled(f: Any) -> tuple:
    """The field, its derivatives by the state and by the time, and its derivative along both."""

    def along(u: Any, p: Any, t: Any, du: Any, dt: Any) -> Any:
        return jax.jvp(lambda u, t: f(u, p, t), (u, t), (du, dt))[1]

    return tuple(map(eqx.filter_jit, (f, jax.jacfwd(f, argnums=(0, 2)), along)))


def _equations(f: Any, p: Any, shape: tuple, dtype: Any) -> Equations:
    """The equations of a field, for tuples of numbers."""
    field, derivatives, along = _compiled(f)
    size = math.prod(shape)

    def numbers(x: Any) -> tuple:
        return tuple(np.asarray(x, dtype).ravel())

    def at(y: tuple, t: Any) -> tuple:
        return jnp.asarray(np.array(y, dtype).reshape(shape)), p, jnp.asarray(t, dtype)

    def jvp(y: tuple, t: Any, dy: tuple, dt: Any) -> tuple:
        du, _, dt = at(dy, dt)
        return numbers(along(*at(y, t), du, dt))

    def linearise(y: tuple, t: Any) -> tuple:
        return tuple(map(numbers, derivatives(*at(y, t))))

    def factorise(jacobian: tuple, gamma_h: Any) -> np.ndarray:
        return np.eye(size, dtype=dtype) - gamma_h * np.array(jacobian).reshape(size, size)

    def solve(matrix: np.ndarray, b: tuple) -> tuple:
        finite = np.isfinite(matrix).all()
        return numbers(np.linalg.solve(matrix, b) if finite else np.full(size, np.nan))

    def row_sums(jacobian: tuple) -> tuple:
        return numbers(abs(np.array(jacobian)).reshape(size, size).sum(1))

    linear_algebra = linearise, factorise, solve, row_sums
    return Equations(lambda y, t: numbers(field(*at(y, t))), jvp, *linear_algebra)
