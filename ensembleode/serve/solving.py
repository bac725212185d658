"""Solvers of registered problems: compiled functions of padded arrays.

The program for a request depends on the kind of request: solve or vjp, own or registered
parameters, few saved times or many. Requests with the same program share a batch, whatever their
time spans and saved times. A program is compiled for a few sizes of batches, the smallest of which
has states of about 16 kB. A trajectory has the same bits in batches of any size, and at any
place in them.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..executors.places import places
from ..ground.devices.placement import platform
from ..ground.retcode import ReturnCodes
from ..problem.ensemble import (
    EnsembleColumns,
    EnsembleDistributed,
    EnsembleSplitThreads,
    EnsembleThreads,
)
from ..problem.problem import EnsembleProblem, remake
from ..running.job import compiler_options
from ..solution.events import Events
from ..solution.solution import EnsembleSolution
from ..solution.stats import COUNTS
from ..solving import solve
from ..tracing.evaluation import equations
from ..tracing.program import is_tracer
from .exchange import Gradients, JsonObject, with_room
from .registry import RegistryEntry


logger = logging.getLogger("ensembleode.serve")

# The most bytes of an array of a batch, of saved states or of gradients with respect to parameters.
_BATCH = 2**26
# The bytes of the states of the smallest batch, and the trajectories that it has.
_SMALLEST, _FEWEST, _MOST = 2**14, 8, 128
# Saved times are padded to a multiple of this, or to the largest possible number.
_ROWS = 8


class RequestArrays(NamedTuple):
    """The numbers of some trajectories.

    - `u0 [n, *state]`; `p [n, size]`, or None for the registered parameters; `t0` and `t1 [n]`.
    - `times [n, rows]`: the times to save, NaN where there are fewer.
    - `cotangent [n, rows, *state]`: for a vjp.
    """

    u0: Any
    p: Any
    t0: Any
    t1: Any
    times: Any
    cotangent: Any = None


class SolveAnswer(NamedTuple):
    """The results of some trajectories: `u [n, rows, *state]`, NaN where not reached; the number of
    times that each reached, its return code, and its counts (the last ones are None where they are
    not counted); and with callbacks the events, `[n, room, ...]`, else None."""

    u: Any
    lengths: Any
    retcode: ReturnCodes
    naccept: Any
    nreject: Any
    nf: Any
    njac: Any = None
    nw: Any = None
    nsolve: Any = None
    events: Events | None = None


@dataclasses.dataclass(frozen=True)
class ServedSolve:
    """The description of a compiled program, without the size of the batch."""

    problem: str  # its name
    pulls: bool  # whether it is for a vjp
    own: bool  # whether each trajectory has its own parameters
    rows: int  # the number of saved times, including padding
    most: int  # the largest number of trajectories of a batch


class BatchSolver:
    """Solves batches of a registered problem."""

    def __init__(self, entry: RegistryEntry, ensemblealg: Any = None, max_batch: int = 4096):
        if isinstance(ensemblealg, EnsembleColumns):
            raise ValueError(
                "ensemblealg can't be EnsembleColumns(), whose trajectories share their steps: an "
                "answer would depend on the requests of others. Use EnsembleThreads()."
            )
        self.entry = entry
        place, *others = places(ensemblealg, alone=False, in_julia=False)
        # (Where there are several places, `solve` finds out which can run the problem.)
        self.ensemblealg = None if others else place.algorithm
        self._computing = contextlib.nullcontext if others else place.computing
        each = max(1, entry.u0.size) * entry.dtype.itemsize
        width = 2 ** int(math.log2(max(1, _SMALLEST // each)))
        self.width = max(_FEWEST, min(_MOST, width))
        self.max_batch = -(-max(max_batch, self.width) // self.width) * self.width
        few = max(2, len(entry.default_times))
        limit = entry.limits.saveat
        self.rows = sorted({min(limit, -(-few // _ROWS) * _ROWS), limit})
        # (If workers solve, there is nothing to be compiled in this process.)
        remote = isinstance(self.ensemblealg, EnsembleDistributed | EnsembleSplitThreads)
        with self._computing():
            engine, calls_host = _described(entry)
            self._leaves = jnp.asarray(entry.p)
            options = compiler_options(platform())
        self._jit = not remote and engine != "julia"
        if self._jit and calls_host and isinstance(self.ensemblealg, EnsembleThreads):
            # A batch that never returns keeps threads of XLA's pool, which all problems share, so
            # it must not get all of them. This costs nothing, as Python runs one call at a time
            # anyway.
            self.ensemblealg = EnsembleThreads(1)
        self._is_compiled = engine == "compiled"
        self._programs: dict[tuple, ServedSolve] = {}
        self.no_gradient: str | None = None  # why there are no gradients, if so
        if self._jit:
            self._compiled = {
                kind: jax.jit(
                    functools.partial(self._with_few_arrays, *kind), compiler_options=options
                )
                for kind in itertools.product((False, True), repeat=2)  # pulls, own
            }

    def program(self, rows: int, *, own: bool, pulls: bool = False) -> ServedSolve:
        """The program for a request with this many saved times."""
        asked = (rows, own, pulls)
        program = self._programs.get(asked)
        if program is None:
            rows = next(r for r in self.rows if r >= rows)
            own = (own or pulls) and self.entry.p.size > 0
            most = self._sizes(rows, pulls)[-1]
            program = self._programs[asked] = ServedSolve(self.entry.name, pulls, own, rows, most)
        return program

    def programs(self) -> list[ServedSolve]:
        """All programs."""
        asked = itertools.product(self.rows, (False, True), (False, True))
        every = {self.program(rows, own=own, pulls=pulls) for rows, own, pulls in asked}
        return sorted(every, key=lambda x: (x.pulls, x.rows, x.own))

    def _sizes(self, rows: int, pulls: bool) -> list[int]:
        """The sizes of batches, in increasing order."""
        entry = self.entry
        each = entry.answer_bytes(rows)
        if pulls:
            each = max(each, entry.p.size * entry.p.itemsize)
        fitting = _BATCH // max(1, each) // self.width * self.width
        most = max(self.width, min(self.max_batch, fitting))
        if pulls:
            return sorted({self.width, min(most, 8 * self.width)})
        if rows > self.rows[0]:
            return sorted({self.width, most})
        return sorted({self.width, min(most, 8 * self.width), most})

    def warming(self) -> Iterator[Callable[[], Any]]:
        """The functions that compile everything, to be called one after the other."""
        for program in self.programs():
            for size in self._sizes(program.rows, program.pulls):
                yield functools.partial(self._warm, program, size)

    def _warm(self, program: ServedSolve, size: int) -> None:
        if program.pulls and self.no_gradient is not None:
            return
        try:
            self.run(program, [self._sample(program, size)])
        except Exception as e:
            if not program.pulls:
                raise
            self.no_gradient = str(e).strip().partition("\n")[0].rstrip(".") or type(e).__name__
            what = "%s is served without gradients: %s"
            logger.warning(what, self.entry.name, self.no_gradient, exc_info=e)

    def describe(self) -> JsonObject:
        """The description of the solver for clients, as JSON."""
        return self.entry.describe() | {"no_gradient": self.no_gradient}

    def _sample(self, program: ServedSolve, n: int) -> RequestArrays:
        entry = self.entry
        ends = np.broadcast_to(np.array(entry.tspan, entry.time_dtype)[:, None], (2, n))
        times = np.full((n, program.rows), ends[1, 0], entry.time_dtype)
        u0 = np.broadcast_to(entry.u0, (n, *entry.shape))
        p = np.broadcast_to(entry.p, (n, entry.p.size)) if program.own else None
        cotangent = np.ones((*times.shape, *entry.shape), entry.dtype) if program.pulls else None
        return RequestArrays(u0, p, *ends, times, cotangent)

    def run(self, program: ServedSolve, parts: Sequence[RequestArrays]) -> list:
        """Solve (or pull back) the trajectories of several requests together. Returns an
        `SolveAnswer` (or `Gradients`) for each request."""
        counts = [len(x.u0) for x in parts]
        n = sum(counts)
        size = next(s for s in self._sizes(program.rows, program.pulls) if s >= n)
        u0, p, t0, t1, times, cotangent = zip(*parts, strict=True)
        numbers = RequestArrays(
            *(_stacked(column, size, n) for column in (u0, p, t0, t1)),
            _in_rows(times, (size, program.rows), np.nan),
            _in_rows(cotangent, (size, program.rows, *self.entry.shape), 0),
        )
        # In place of missing times, and of those of trajectories that fill up the batch, the
        # compiled engine is given infinite ones, which it ignores; others save the end again.
        times, t0, t1 = numbers.times, numbers.t0[:, None], numbers.t1[:, None]
        missing = np.isnan(times)
        missing[n:] = True
        end = np.copysign(np.inf, t1 - t0) if self._is_compiled else t1
        np.copyto(times, end, where=missing)
        if self._is_compiled and size > n:
            # (Trajectories that fill up the batch take no step.)
            numbers.t1[n:] = numbers.t0[n:]
        with self._computing():
            result = self._run(program, numbers)
        result = jax.tree.map(np.asarray, result)
        ends = zip(counts, itertools.accumulate(counts), strict=True)
        of_parts = (operator.itemgetter(slice(end - count, end)) for count, end in ends)
        return [jax.tree.map(part, result) for part in of_parts]

    def _run(self, program: ServedSolve, numbers: RequestArrays) -> Gradients | SolveAnswer | None:
        if not self._jit:
            run = self._vjp if program.pulls else self._solve
            return run(program.own, self._leaves, *numbers)
        u0, p, t0, t1, times, cotangent = numbers
        times = np.concatenate([t0[:, None], t1[:, None], times], axis=1)
        compiled = self._compiled[program.pulls, program.own]
        result = compiled(self._leaves, u0, p, times, cotangent)
        if program.pulls:
            return result
        u, counts, events = jax.tree.map(np.asarray, result)
        return SolveAnswer(
            u, *counts, *[None] * (len(SolveAnswer._fields) - 2 - len(counts)), events
        )

    def _with_few_arrays(self, pulls: bool, own: bool, leaves, u0, p, times, cotangent) -> Any:
        """The same function with few arrays: each array that goes in or out costs a release of the
        interpreter's lock, and the wait to get it back."""
        t0, t1, times = times[:, 0], times[:, 1], times[:, 2:]
        if pulls:
            return self._vjp(own, leaves, u0, p, t0, t1, times, cotangent)
        u, *counts, events = self._solve(own, leaves, u0, p, t0, t1, times)
        # The last counts may be None.
        return u, jnp.stack([x.astype(jnp.int32) for x in counts if x is not None]), events

    def _solve(self, own: bool, leaves, u0, p, t0, t1, times, cotangent=None) -> SolveAnswer:
        del cotangent
        entry = self.entry
        prob = remake(entry.prob, p=entry.with_parameters(jnp.asarray(leaves)))
        u0, t0, t1 = (jnp.asarray(x) for x in (u0, t0, t1))
        p = jnp.asarray(p) if own else None

        def prob_func(prob, ctx):
            i = ctx.index
            changes = {"u0": u0[i], "tspan": (t0[i], t1[i])}
            if p is not None:
                changes["p"] = entry.with_parameters(p[i])
            return remake(prob, **changes)

        n, options = u0.shape[0], {"saveat": jnp.asarray(times), **entry.options}
        many = EnsembleProblem(prob, prob_func)
        sim = solve(many, entry.alg, self.ensemblealg, trajectories=n, batch_size=n, **options)
        assert isinstance(sim, EnsembleSolution)
        counts = [getattr(sim.stats, name) for name in COUNTS]
        return SolveAnswer(sim.u, sim.lengths, sim.retcode, *counts, self._in_room(sim.events))

    def _in_room(self, events: Events | None) -> Events | None:
        """The events with the same room in each batch; outside of `jit`, they have as much room as
        there were events."""
        if events is None or is_tracer(events.t):
            return events
        return with_room(events, self.entry.max_events)

    def _vjp(self, own: bool, leaves, u0, p, t0, t1, times, cotangent) -> Gradients:
        def states(u0, p):
            answer = self._solve(own, leaves, u0, p, t0, t1, times)
            return answer.u, answer.retcode

        p = jnp.asarray(p) if own else None
        _, pull, retcode = jax.vjp(states, jnp.asarray(u0), p, has_aux=True)
        u0, p = pull(jnp.asarray(cotangent))
        if p is None:
            p = jnp.zeros((len(u0), 0), self.entry.p.dtype)
        return Gradients(u0, p, retcode)


def joined(results: Sequence) -> Any:
    """The answers to the parts of a request, joined in order."""
    if len(results) == 1:
        return results[0]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *results)


def _stacked(column: Sequence, size: int, n: int) -> np.ndarray | None:
    """The rows of all entries, with copies of the last one up to `size`."""
    first = column[0]
    if first is None:
        return None
    out = np.empty((size, *first.shape[1:]), first.dtype)
    np.concatenate(column, out=out[:n])
    out[n:] = out[n - 1]
    return out


def _in_rows(column: Sequence, shape: tuple, fill: ArrayLike) -> np.ndarray | None:
    """Arrays `[n, k, ...]`, concatenated along their first axis into an array of this shape."""
    first = column[0]
    if first is None:
        return None
    out = np.full(shape, fill, first.dtype)
    start = 0
    # (Mostly, an array has as many rows as the one before.)
    for rows, group in itertools.groupby(column, lambda x: x.shape[1]):
        some = np.concatenate([*group])
        out[start : start + len(some), :rows] = some
        start += len(some)
    return out


def _described(entry: RegistryEntry) -> tuple[str, bool]:
    """The engine for the problem, and whether that calls Python; raises the errors of `solve`."""
    engines = []

    def states(u0):
        prob = remake(entry.prob, u0=u0)
        sol = solve(prob, entry.alg, saveat=entry.default_times, **entry.options)
        engines.append(sol.engine)
        return sol.u

    jaxpr = jax.make_jaxpr(states)(jax.ShapeDtypeStruct(entry.shape, entry.dtype)).jaxpr
    calls_host = any("callback" in eqn.primitive.name for eqn in equations(jaxpr))
    return engines[0].name, calls_host
