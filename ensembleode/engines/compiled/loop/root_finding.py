"""Notices sign changes of the conditions of continuous callbacks in a step, and finds the roots.

Source of the search: Ganchovski, Smith, Rackauckas, Tomov, Traykov, "Improvements to the modified
Anderson-Bjorck (modAB) root-finding algorithm", Algorithms 19:332 (2026).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple, TYPE_CHECKING

import numpy as np

from ....plan.events import TracedContinuous
from ....problem.callbacks import LeftRootFind, NoRootFind
from ....solvers.time import REACH, REACH_OF_STEP
from ....solvers.within_step_bounds import blur
from ..algebra.components import set_all
from ..llvm.builder import BOOL, I32, integer_like, Value, Variable
from ..steps.saved_rows import TriedStep
from .balls import rounded, ROUNDINGS
from .quiet import differs


if TYPE_CHECKING:
    from .events import LaneEvents


# A condition rests at an event's root as long as it has moved by at most this many roundings.
_SAME_ROOT = 10
# The largest number of turns of a search: several times what bisection takes.
_MOST_TURNS = 1000
# The search bisects again if the bracket is wider than bisection would have made it by this factor.
_THRESHOLD = 16.0


class WatchedConditions(NamedTuple):
    """Which conditions are evaluated at points within a step: all of them if the scalar `every`
    (None stands for true), otherwise those with the numbers `always`."""

    every: Value | None = None
    always: frozenset[int] = frozenset()


def _numbers(places: slice) -> range:
    return range(places.start, places.stop)


def _either(masks: Sequence[Value]) -> Value:
    return functools.reduce(operator.or_, masks)


class Search:
    """The search for events in a step.

    - `bottom`, `low`: for each condition, the time from which its sign counts, and its value then.
    - `top`, `high`: the time at which an event of a callback was noticed, and the conditions there.
    - `fires`: whether each condition has crossed zero by then.
    """

    def __init__(self, happening: LaneEvents, step: TriedStep):
        self.on, self.b, self.loop, self.step = happening, happening.b, happening.loop, step
        self.events, self.dtype = happening.events, happening.loop.problem.dtype
        b, dtype = self.b, self.dtype
        low = happening.at_start(step)
        self.bottom = [b.variable(dtype, step.t) for _ in low]
        self.low = [b.variable(dtype, x) for x in low]
        self.top = [b.variable(dtype, step.t2) for _ in self.events.continuous]
        self.high = [b.variable(dtype, 0) for _ in low]
        self.fires = [b.variable(BOOL, False) for _ in low]
        self._slices = happening.events.slices()

    def state_at(self, t: Value) -> tuple:
        """The state at a time within the step."""
        step = self.step
        theta = (t - step.t) / step.h
        u = step.method.interpolate(self.b, step.y, self.dense(), step.h, theta)
        return tuple(map(self.b.spread, u))

    def dense(self) -> tuple:
        step, loop = self.step, self.loop
        at = step.y, step.attempt.dense, step.t, step.h
        return step.method.dense(self.b, loop.equations(loop.held, step.accepted), *at)

    def notice(self, looks: WatchedConditions) -> None:
        """Find the conditions with another sign at the end of the step, or within it."""
        b, step = self.b, self.step
        zero = _either([x.get().eq(0.0) for x in self.low])
        b.if_(self.on.recent.get() | b.any(step.accepted & zero), self._nudge, likely=False)
        end = self.on.conditions(step.attempt.y2, step.t2, step.accepted)
        low = [x.get() for x in self.low]
        for _, x, places in self._slices:
            for k in _numbers(places):
                self.high[k].set(end[k])
                self.fires[k].set(step.accepted & differs(x, low[k], end[k]))
        self.on.arrive(step, end)
        every = frozenset(range(len(low)))
        if looks.every is None:
            self._within_step(every, low)
        else:
            b.if_(
                looks.every,
                lambda: self._within_step(every, low),
                lambda: self._within_step(looks.always, low),
                likely=False,
            )
        if self.events.scheduled:
            known = self.on.at_known_time(step)
            b.if_(b.any(known), lambda: self._put_at_end(known, end), likely=False)

    def _nudge(self) -> None:
        """Where a condition is zero at the start of the step, or rests at the root of an event, use
        its sign a little later; none where it rests there as well. (OrdinaryDiffEq gives it no
        sign, and misses an event in that step.)"""
        b, step, on = self.b, self.step, self.on
        eps = _SAME_ROOT * np.finfo(self.dtype).eps
        for _, x, places in self._slices:
            numbers, wanted = _numbers(places), []
            for k in numbers:
                low = self.low[k].get()
                here = abs(low - on.residual[k].get()) <= b.maximum(on.radius(k), eps)
                wanted.append(step.accepted & (here | low.eq(0.0)))
            # (OrdinaryDiffEq takes a part of the step before it was cut.)
            t = step.t + (step.t2 - step.t) * x.repeat_nudge

            def do(x=x, numbers=numbers, wanted=wanted, t=t) -> None:
                values = on.part_at(x.conditions, self.state_at(t), t, step.accepted)
                for k, mask, new in zip(numbers, wanted, values, strict=True):
                    rests = abs(new - on.residual[k].get()) <= on.radius(k)
                    self.bottom[k].set_where(mask, t)
                    self.low[k].set_where(mask, b.where(rests, 0.0, new))

            b.if_(b.any(_either(wanted)), do)

    def _put_at_end(self, known: Value, end: list[Value]) -> None:
        """In the lanes `known`, whose step ends at a known time, set to zero the values at the end
        of those conditions that cross zero there to rounding, even if just after the step."""
        step = self.step
        later, radii = self._just_after(step.attempt.y2, step.t2, end, known)
        for i, x, places in self._slices:
            if x.rootfind == NoRootFind:
                continue
            for k in _numbers(places):
                here = known & self.top[i].get().eq(step.t2) & (abs(end[k]) <= radii[k])
                here = here & differs(x, self.low[k].get(), later[k])
                self.high[k].set_where(here, 0)
                self.fires[k].set_where(here, True)

    def _just_after(
        self, y: tuple, t: Value, values: list[Value], mask: Value
    ) -> tuple[list[Value], list[Value]]:
        """The conditions a little after `t`, where they have the `values`; and how far from zero
        each of them counts as zero to rounding: as far as it moves within the time `_reach` and
        with as many roundings of the state, where that has a bound (infinitely far at a jump)."""
        b, on = self.b, self.on
        ahead = self.step.h * REACH_OF_STEP
        u = self.state_at(t + ahead)
        later = on.conditions(u, t + ahead, mask)
        reach = self._reach(t)
        part = b.minimum(reach / abs(ahead), 0.5)
        radii = [abs(new - x) * part for new, x in zip(later, values, strict=True)]
        more = ROUNDINGS / REACH

        def of_state(c: int) -> Value:
            return rounded(y[c]) + abs(u[c] - y[c]) * part * more

        def of_time() -> Value:
            return rounded(t) + reach * more

        for _, x, places in self._slices:
            if not (numbers := on.functions.bounded(x.conditions)):
                continue
            at = on.loop.held, y, t, mask, of_state, of_time
            found = on.functions.balls(x.conditions, *at)
            for component, (_, radius) in zip(numbers, found, strict=True):
                if radius is not None:
                    radii[places.start + component] = radius * (1 / more)
        return later, radii

    def _reach(self, t: Value) -> Value:
        """How far from `t` a root is the same to rounding."""
        of_step = abs(self.step.h) * blur(self.step.method, self.dtype)
        return abs(t) * (REACH * float(np.finfo(self.dtype).eps)) + of_step

    def _within_step(self, wanted: frozenset[int], low: list[Value]) -> None:
        """Look for other signs of the wanted conditions at points within the step."""
        for n in sorted({x.interp_points for x in self.events.continuous}):
            chosen = [
                (i, x, places)
                for i, x, places in self._slices
                if x.interp_points == n and not wanted.isdisjoint(_numbers(places))
            ]
            if n > 2 and chosen:
                self._look_within(n, chosen, wanted, low)

    def _look_within(
        self,
        n: int,
        chosen: list[tuple[int, TracedContinuous, slice]],
        wanted: frozenset[int],
        low: list[Value],
    ) -> None:
        """Look at `n` points of the step for other signs of wanted conditions of callbacks."""
        b, step = self.b, self.step
        span = step.t2 - step.t
        # With several conditions, looking goes on as long as one of them has not changed its sign.
        looks = {
            i: step.accepted & _either([~x.get() for x in self.fires[places]])
            for i, _, places in chosen
        }
        dense = self.dense()
        # Whether a sign changes anywhere; only if so is it worked out where.
        seen = b.variable(BOOL, False)

        def at(theta: Value) -> tuple[tuple, Value]:
            t = step.t + span * theta
            u = step.method.interpolate(b, step.y, dense, step.h, theta)
            return tuple(map(b.spread, u)), t

        def conditions(x: TracedContinuous, places: slice, u: tuple, t: Value) -> list:
            values = self.on.part_at(x.conditions, u, t, step.accepted)
            every = zip(_numbers(places), values, strict=True)
            return [(k, value) for k, value in every if k in wanted]

        def look(theta: Value) -> None:
            u, t = at(theta)
            for i, x, places in chosen:
                for k, value in conditions(x, places, u, t):
                    seen.set(seen.get() | (looks[i] & differs(x, low[k], value)))

        for j in range(1, n - 1):
            look(b.constant(j / (n - 1), self.dtype))

        def first() -> None:
            left = {i: b.variable(BOOL, looks[i] & seen.get()) for i, *_ in chosen}

            def one(j: Value) -> None:
                u, t = at(b.cast(j + 1, self.dtype) / float(n - 1))
                for i, x, places in chosen:
                    pairs = conditions(x, places, u, t)
                    crossed = [differs(x, self.low[k].get(), value) for k, value in pairs]
                    here = left[i].get() & _either(crossed)
                    for (k, value), y in zip(pairs, crossed, strict=True):
                        self.fires[k].set_where(here, y)
                        self.high[k].set_where(here, value)
                    self.top[i].set_where(here, t)
                    left[i].set(left[i].get() & ~here)

            b.for_(n - 2, one)

        b.if_(b.any(seen.get()), first, likely=False)

    def run(self, t2: Variable, end: list[Variable], relaxed: Variable) -> Value:
        """Cut the step at the earliest event, and mark the conditions there. Returns its lanes."""
        b, on, step = self.b, self.on, self.step
        direction = self.loop.direction
        met, best = b.variable(BOOL, False), b.variable(self.dtype, step.t2)
        roots = []
        for i, x, places in self._slices:
            for k in _numbers(places):
                here, root = self.fires[k].get(), b.variable(self.dtype, self.top[i].get())
                wanted = here & self.high[k].get().ne(0.0)
                if x.rootfind != NoRootFind:
                    b.if_(b.any(wanted), functools.partial(self._root, k, i, x, wanted, root))
                roots.append(root.get())
                earlier = here & (~met.get() | (direction * (best.get() - roots[k]) > 0.0))
                best.set_where(earlier, roots[k])
                met.set(met.get() | here)
        at, met = best.get(), met.get()
        cut = met & at.ne(step.t2)
        t2.set_where(met, at)
        set_all(end, self.state_at(at), cut)
        y = tuple(v.get() for v in end)
        values = on.conditions(y, at, met)
        fires = [x.get() for x in self.fires]
        acts = [b.variable(BOOL, x & at.eq(root)) for x, root in zip(fires, roots, strict=True)]
        if on.radii:
            for radius, act in zip(on.radii, acts, strict=True):
                radius.set_where(act.get(), 0)
            # Signs after `top`, up to which the conditions were evaluated, are not known yet.
            ahead = at + step.h * REACH_OF_STEP
            beyond = [direction * (ahead - x.get()) > 0.0 for x in self.top]
            count = sum((b.cast(x, I32) for x in fires), b.constant(0, I32))
            others = met & (_either(beyond) | (count > 1))
            at_one_time = functools.partial(self._together, y, at, values, roots, beyond, acts)
            b.if_(b.any(others), lambda: at_one_time(others), likely=False)
        # The callbacks in their order, so that the first one's size of the next step is taken.
        for _, x, places in reversed(self._slices):
            for k in _numbers(places):
                sign = b.where(self.low[k].get() < 0.0, b.constant(1, I32), b.constant(-1, I32))
                acting = acts[k].get()
                on.marks[k].set_where(acting, sign)
                # The root is recognised later by the value there.
                on.residual[k].set_where(acting, 0.0 if x.rootfind == NoRootFind else values[k])
                relaxed.set_where(acting, x.dtrelax)
        return met

    def _together(
        self,
        y: tuple,
        at: Value,
        values: list[Value],
        roots: list[Value],
        beyond: list[Value],
        acts: list[Variable],
        lanes: Value,
    ) -> None:
        """In these lanes, let all conditions act at the event whose root is there to rounding.
        `beyond`: for each callback, whether its signs after the event are not known yet."""
        b, on, reach = self.b, self.on, self._reach(at)
        later, radii = self._just_after(y, at, values, lanes)
        for i, x, places in self._slices:
            for k in _numbers(places) if x.rootfind != NoRootFind else ():
                fires = self.fires[k].get()
                crosses = (fires | beyond[i]) & differs(x, self.low[k].get(), later[k])
                here = crosses & (abs(values[k]) <= radii[k])
                here = here | (fires & (abs(roots[k] - at) <= reach))
                acts[k].set(acts[k].get() | (lanes & here))
                radius = b.where(radii[k] < np.inf, radii[k], 0.0)
                on.radii[k].set_where(lanes & acts[k].get(), radius)

    def forget(self, t2: Value) -> None:
        """Conditions that have left the root before the end `t2` don't rest there any more."""
        for k, low in enumerate(self.low):
            left = self.loop.direction * (t2 - self.bottom[k].get()) > 0.0
            left = left & self.step.accepted & low.get().ne(0.0) & self.on.marks[k].get().eq(0)
            self.on.residual[k].set_where(left, np.nan)
        rests = _either([x.get().eq(x.get()) for x in self.on.residual])
        self.on.recent.set(self.b.any(rests))

    def _root(self, k: int, i: int, x: TracedContinuous, wanted: Value, root: Variable) -> None:
        """The root of condition `k`, in the lanes that want it, by bisection and regula falsi,
        until no number is within the bracket. The search runs on `direction * time`, which
        increases."""
        b, dtype = self.b, self.dtype
        direction = self.loop.direction
        component = k - self._slices[i][2].start
        x1, x2 = (b.variable(dtype, direction * v.get()) for v in (self.bottom[k], self.top[i]))
        y1, y2 = b.variable(dtype, self.low[k].get()), b.variable(dtype, self.high[k].get())
        bisects, side = b.variable(BOOL, True), b.variable(I32, 0)
        threshold = b.variable(dtype, x2.get() - x1.get())
        going = b.variable(BOOL, wanted & self._are_apart(x1.get(), x2.get()))
        left = b.variable(I32, _MOST_TURNS, of_lanes=False)

        def one() -> None:
            left.set(left.get() - 1)
            here, halves = going.get(), bisects.get()
            a, c, fa, fc = x1.get(), x2.get(), y1.get(), y2.get()
            half = a + (c - a) * 0.5
            with b.unfused():
                secant = (a * fc - c * fa) / (fc - fa)
            least, most = self._next(a, 1), self._next(c, -1)
            secant = b.where(secant.ne(secant), half, b.minimum(b.maximum(secant, least), most))
            m = b.where(halves, b.minimum(b.maximum(half, least), most), secant)
            t = direction * m
            fm = self.on.part_at(x.conditions, self.state_at(t), t, here)[component]
            middle = (fa + fc) * 0.5
            r = 1.0 - abs(middle / (fc - fa))
            flat = halves & (abs(middle - fm) < r * r * (abs(middle) + abs(fm)))
            narrower = b.where(halves, threshold.get(), threshold.get() * 0.5)
            limit = b.where(flat, (c - a) * _THRESHOLD, narrower)
            halves = halves & ~flat
            lower = (fa < 0.0) ^ (fm >= 0.0)
            zero = fm.eq(0.0)
            # The value at the other end is reduced where the same end has moved twice in a row.
            with b.unfused():
                pull1, pull2 = 1.0 - fm / fc, 1.0 - fm / fa
            pull1, pull2 = (b.where(z <= 0.0, 0.5, z) for z in (pull1, pull2))
            s = side.get()
            fc2 = b.where(lower & s.eq(1), fc * pull2, fc)
            fa2 = b.where(~lower & s.eq(-1), fa * pull1, fa)
            sides = b.where(lower, b.constant(1, I32), b.constant(-1, I32))
            s = b.where(halves, s, sides)
            x1.set_where(here & (lower | zero), m)
            x2.set_where(here & (~lower | zero), m)
            y1.set_where(here, b.where(lower, fm, fa2))
            y2.set_where(here, b.where(lower, fc2, fm))
            wide = (x2.get() - x1.get()) > limit
            bisects.set_where(here, halves | wide)
            side.set_where(here, b.where(wide, b.constant(0, I32), s))
            threshold.set_where(here, limit)
            going.set(here & ~zero & self._are_apart(x1.get(), x2.get()))

        b.while_(lambda: b.any(going.get()) & (left.get() > 0), one)
        found = x1 if x.rootfind == LeftRootFind else x2
        root.set_where(wanted, direction * found.get())

    def _are_apart(self, x1: Value, x2: Value) -> Value:
        """Whether there are floating-point numbers between the two."""
        return self._next(x1, 1) < x2

    def _next(self, x: Value, by: int) -> Value:
        """The next floating-point number above (1) or below (-1)."""
        b = self.b
        bits = b.bitcast(x, integer_like(self.dtype))
        least = b.constant(np.finfo(self.dtype).smallest_subnormal * by, self.dtype)
        up = b.where(x > 0.0, bits + by, bits - by)
        return b.where(x.eq(0.0), least, b.bitcast(up, self.dtype))
