"""Events within the time loop of a kernel: where a step meets one, and what that does.

After a step has been accepted, the conditions of the continuous callbacks are looked at as
OrdinaryDiffEq does: their signs at its end against those at its start, and where they are the same
at points within. Where one changes its sign a root is searched, down to neighbouring floating-point
numbers, and the step is cut there (`locate`); the earliest acts. Then discrete callbacks are asked
(`act`). All that only lanes with an event need is behind a branch.

Sources: OrdinaryDiffEq's DiffEqBase (`callbacks.jl`); for the search, Ganchovski, Smith,
Rackauckas, Tomov, Traykov, "Improvements to the modified Anderson-Bjorck (modAB) root-finding
algorithm", Algorithms 19:332 (2026).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TYPE_CHECKING

import numpy as np

from ...callbacks import LeftRootFind, NoRootFind
from ...core.events import Continuous, Discrete, EVENT_ROWS, Events, Jump, Part
from ...core.moving_jumps import follow
from ...solvers import verdicts
from ...solvers.verdicts import Verdict
from .builder import BOOL, I32, I64, integer_like, Value, Variable
from .saved_rows import Step


if TYPE_CHECKING:
    from .loop import Loop


# Of the condition, in roundings of one, by which it may have moved since an event for its root to
# be the same still.
_SAME_ROOT = 10
# Of a search, at most: what bisection takes, several times.
_MOST_TURNS = 1000
# A step that is expected to close the bracket by so much has not, and the search bisects again.
_THRESHOLD = 16.0


def moved_numbers(events: Events) -> int:
    """How many numbers the time of an event is with its tangents, where discrete callbacks may move
    with it: of a state without tangents none."""
    levels = max((len(x.moves.levels) for x in events.jumps if x.moves is not None), default=0)
    return 2**levels if levels and follow(events) else 0


def times_of(moved: Sequence, row: Sequence[Value]) -> Sequence[Value]:
    """As many numbers of a row with a time: the first of each part."""
    return row[:: len(row) // len(moved)] if moved else ()


class Happening:
    """The variables of the lanes for events, and what is done with them.

    **Arguments:** `evaluate(part, held, y, t, mask, extras)`: the components of a part of the
    callbacks, one a lane each, of the lanes of the mask.
    """

    def __init__(self, loop: Loop, events: Events, evaluate: Callable[..., tuple]):
        self.loop, self.b, self.events, self._evaluate = loop, loop.b, events, evaluate
        b, dtype = loop.b, loop.problem.dtype
        # The conditions where the step begins.
        self.values = [b.variable(dtype, 0) for _ in range(events.components)]
        # Which continuous callback acted at the end of the step before, counted from 1 (0: none);
        # how far its condition was from zero then; and which of several it was.
        self.last = b.variable(I32, 0)
        self.residual = b.variable(dtype, 0)
        self.crossed: list[list[Variable]] = [
            [b.variable(I32, 0) for _ in range(x.length)] if x.is_vector else []
            for x in events.continuous
        ]
        # How many events the trajectory has had; and what acted at the end of this step.
        self.count = b.variable(I32, 0)
        self.marks = [b.variable(I32, 0) for _ in range(events.marks)]
        # Of a state with tangents, the time of what acted at the end of this step, with its own.
        self.moved = [b.variable(dtype, 0) for _ in range(moved_numbers(events))]

    def variables(self) -> list[Variable]:
        """All that goes on from turn to turn."""
        crossed = [x for xs in self.crossed for x in xs]
        return [*self.values, self.last, self.residual, *crossed, self.count]

    #
    # Conditions
    #

    def _of(self, part: Part, y: tuple, t: Value, lanes: Value, **extras: Any) -> tuple:
        """The components of a part in these lanes."""
        given = {name: extras[name] for name in part.extras}
        return self._evaluate(part, self.loop.held, y, t, lanes, given)

    def _conditions(self, y: tuple, t: Value, mask: Value) -> list[Value]:
        every = (self._of(x.conditions, y, t, mask) for x in self.events.continuous)
        return [x for xs in every for x in xs]

    def _slices(self) -> list[tuple[int, Continuous, slice]]:
        """Of each continuous callback its place and those of its conditions."""
        found, start = [], 0
        for i, x in enumerate(self.events.continuous):
            found.append((i, x, slice(start, start + x.length)))
            start += x.length
        return found

    def begin(self, fresh: Value) -> None:
        """Trajectories begin, in the lanes that are fresh."""
        self._look(fresh)
        for x in (self.last, self.count):
            x.set_where(fresh, 0)

    def _look(self, mask: Value) -> None:
        """Look at the conditions where the lanes of the mask are."""
        loop = self.loop
        found = self._conditions(loop.state(), loop.t.get(), mask)
        for variable, x in zip(self.values, found, strict=True):
            variable.set_where(mask, x)

    #
    # Where a step meets an event
    #

    def locate(self, step: Step, verdict: Verdict) -> tuple[Step, Verdict]:
        """The step, cut where an event is in it, and the verdict with the size of the step after
        that."""
        b, loop = self.b, self.loop
        for x in self.marks:
            x.set(0)
        if not self.events.continuous:
            return step, verdict
        search = _Search(self, step)
        search.notice()
        dtype, y2 = loop.problem.dtype, step.attempt.y2
        t2 = b.variable(dtype, step.t2)
        end = [b.variable(dtype, x) for x in y2]
        which = b.variable(I32, 0)
        relaxed = b.variable(dtype, 1)
        b.if_(b.any(search.any_fires()), lambda: search.run(t2, end, which, relaxed), likely=False)
        # (What acted last is asked until here.)
        self.last.set_where(step.accepted, which.get())
        met = which.get().ne(0)
        attempt = step.attempt._replace(y2=tuple(x.get() for x in end))
        step = step._replace(t2=t2.get(), attempt=attempt)
        if not loop.problem.adaptive:
            return step, verdict
        next_h = loop.bounds(loop.held).bounded(b, loop.h.get() * relaxed.get())
        next_h = b.where(met, next_h, verdict.next_h)
        return step, verdict._replace(next_h=next_h, lost=verdict.lost & ~met)

    #
    # What it does
    #

    def act(self, step: Step) -> None:
        """Do what callbacks do at the end of the step, where it was accepted."""
        b, loop = self.b, self.loop
        arrived = step.accepted
        for i, x in enumerate(self.moved):
            x.set(0 if i else step.t2)
        jumped = b.variable(BOOL, False)
        met = arrived & self.last.get().ne(0)
        if self.events.continuous:
            b.if_(b.any(met), lambda: self._act_continuous(step, met, jumped), likely=False)
        place = self.events.components
        for i, x in enumerate(self.events.discrete):
            self._act_discrete(step, x, self.marks[place + i], jumped)

        def go_on_anew() -> None:
            here = jumped.get()
            self._save_after(here)
            self._restart(here & loop.active.get())

        b.if_(b.any(jumped.get()), go_on_anew, likely=False)

    def _act_continuous(self, step: Step, met: Value, jumped: Variable) -> None:
        b = self.b
        for i, x, places in self._slices():
            marks = self.marks[places]
            here = met & self.last.get().eq(i + 1)
            if x.is_vector:
                assert x.up is not None
                mask = [b.cast(m.get(), self.loop.problem.dtype) for m in marks]
                self._jump(step, x, x.up, here, jumped, marks, mask=mask)
                continue
            (mark,) = marks
            for jump, sign in directions(x):
                crossing = here if sign == 0 else here & mark.get().eq(sign)
                self._jump(step, x, jump, crossing, jumped, marks)

    def _act_discrete(self, step: Step, x: Discrete, mark: Variable, jumped: Variable) -> None:
        b, loop = self.b, self.loop
        code = loop.code.get()
        going = step.accepted & code.ne(verdicts.MAX_EVENTS)
        if x.scheduled:
            going = going & step.t2.eq(loop.tstop)

        def ask() -> None:
            at = loop.state(), loop.t.get(), going
            (wanted,) = self._of(x.condition, *at, uprev=step.y, tprev=[step.t])
            here = going & (wanted > 0.0)

            def do() -> None:
                mark.set_where(here, 1)
                self._jump(step, x, x.jump, here, jumped, [mark])

            b.if_(b.any(here), do, likely=False)

        if x.scheduled:
            b.if_(b.any(going), ask, likely=False)
        else:
            ask()

    def _jump(
        self,
        step: Step,
        callback: Continuous | Discrete,
        jump: Jump,
        here: Value,
        jumped: Variable,
        marks: Sequence[Variable],
        **extras: Any,
    ) -> None:
        """Change the state of these lanes, and note that."""
        b, loop = self.b, self.loop

        def do() -> None:
            mask = self._with_room(here, marks) if callback.is_kept else here
            y, t = loop.state(), loop.t.get()
            moved = [x.get() for x in self.moved]
            about = {"uprev": step.y, "tprev": [step.t], "moved": moved, **extras}
            *found, ends = self._of(jump.part, y, t, mask, **about)
            if jump.moves is None:
                time = (t, *(b.constant(0, loop.problem.dtype) for _ in y[1:]))
                found = [*found, *y, *found, *time]
            n = len(y)
            on, *rows = (found[i * n : (i + 1) * n] for i in range(1 + EVENT_ROWS))
            if callback.is_kept:
                self._note(callback, mask, marks, rows)
            for variable, x in zip(loop.y, on, strict=True):
                variable.set_where(mask, x)
            for variable, x in zip(self.moved, times_of(self.moved, rows[-1]), strict=True):
                variable.set_where(mask, x)
            if jump.ends is not False:
                over = mask & (ends > 0.0)
                loop.code.set_where(over & ~self._is_out(), verdicts.TERMINATED)
                loop.active.set(loop.active.get() & ~over)
            jumped.set(jumped.get() | mask)

        b.if_(b.any(here), do)

    def _is_out(self) -> Value:
        """Whether a lane had more events than there is room for."""
        return self.loop.code.get().eq(verdicts.MAX_EVENTS)

    def _with_room(self, here: Value, marks: Sequence[Variable]) -> Value:
        """Those of the lanes that have room for another event; the others end."""
        b, loop = self.b, self.loop
        if loop.outputs is None:
            return here
        full = here & (b.cast(self.count.get(), I64) >= loop.outputs.room)
        loop.code.set_where(full, verdicts.MAX_EVENTS)
        loop.active.set(loop.active.get() & ~full)
        for x in marks:
            x.set_where(full, 0)
        return here & ~full

    def _note(
        self,
        callback: Continuous | Discrete,
        mask: Value,
        marks: Sequence[Variable],
        rows: Sequence[Sequence[Value]],
    ) -> None:
        """Write an event of these lanes: see `core.events.EVENT_ROWS`."""
        b, loop, outputs = self.b, self.loop, self.loop.outputs
        event = b.cast(self.count.get(), I64)
        self.count.set_where(mask, self.count.get() + 1)
        if outputs is None:
            return
        first = loop.saved.n + event * EVENT_ROWS
        for i, row in enumerate(rows):
            loop.saved.write(first + i, mask, tuple(row))
        index, width = loop.held.index.get(), 1 + self.events.longest
        found = [b.constant(callback.which, I32), *(x.get() for x in marks)]
        found += [b.constant(0, I32)] * (width - len(found))
        for i, x in enumerate(found):
            place = loop.order.place(index, event * width + i, outputs.room * width)
            outputs.marks.scatter(place, mask, x)

    def _save_after(self, here: Value) -> None:
        """Where every step is saved, the state after what happened at the end of this one."""
        loop, b = self.loop, self.b
        if loop.outputs is None or loop.problem.saving.mode != "steps":
            return
        saves = here
        if not all(x.save_positions[1] for x in self.events.callbacks):
            saves = b.constant(False, BOOL, of_lanes=True)
            for x, marks in self._marks_of():
                if x.save_positions[1]:
                    for mark in marks:
                        saves = saves | mark.get().ne(0)
            saves = saves & here
        loop.saved.write_step(saves, loop.t.get(), loop.state())

    def _marks_of(self) -> list[tuple[Continuous | Discrete, list[Variable]]]:
        found: list = [(x, self.marks[places]) for _, x, places in self._slices()]
        place = self.events.components
        return [*found, *((x, [self.marks[place + i]]) for i, x in enumerate(self.events.discrete))]

    def _restart(self, here: Value) -> None:
        """Go on from where the state has changed."""
        loop = self.loop
        loop.begin_anew(here)
        if not loop.problem.adaptive:
            loop.set_anchor(here)
        self._look(here)


def directions(x: Continuous) -> list[tuple[Jump, int]]:
    """What happens where a condition rises (1) or falls (-1); 0 where it is the same for both."""
    if x.up is not None and x.up == x.down:
        return [(x.up, 0)]
    return [(jump, sign) for jump, sign in ((x.up, 1), (x.down, -1)) if jump is not None]


class _Search:
    """Where in a step events are.

    - `bottom`, `low`: of each condition since when its sign counts, and its value then.
    - `top`: of each callback when an event was noticed; `high`: the conditions then; `fires`: which
        have another sign.
    """

    def __init__(self, happening: Happening, step: Step):
        self.on, self.b, self.loop, self.step = happening, happening.b, happening.loop, step
        self.events, self.dtype = happening.events, happening.loop.problem.dtype
        b, dtype = self.b, self.dtype
        self.bottom = [b.variable(dtype, step.t) for _ in happening.values]
        self.low = [b.variable(dtype, x.get()) for x in happening.values]
        self.top = [b.variable(dtype, step.t2) for _ in self.events.continuous]
        self.high = [b.variable(dtype, 0) for _ in happening.values]
        self.fires = [b.variable(BOOL, False) for _ in happening.values]
        self._slices = happening._slices()

    def state_at(self, t: Value) -> tuple:
        """The state within the step."""
        step, method = self.step, self.loop.problem.method
        theta = (t - step.t) / step.h
        return tuple(
            map(self.b.spread, method.interpolate(self.b, step.y, self.dense(), step.h, theta))
        )

    def dense(self) -> tuple:
        step, loop = self.step, self.loop
        at = step.y, step.attempt.dense, step.t, step.h
        return loop.problem.method.dense(self.b, loop.equations(loop.held, step.accepted), *at)

    def any_fires(self) -> Value:
        return self._either([x.get() for x in self.fires])

    def notice(self) -> None:
        """Find which conditions have another sign at the end of the step, or within."""
        b, step = self.b, self.step
        zero = self._either([x.get().eq(0.0) for x in self.low])
        again = step.accepted & (zero | self.on.last.get().ne(0))
        b.if_(b.any(again), self._nudge, likely=False)
        end = self.on._conditions(step.attempt.y2, step.t2, step.accepted)
        low = [x.get() for x in self.low]
        for _, x, places in self._slices:
            for k in self._numbers(places):
                self.high[k].set(end[k])
                self.fires[k].set(step.accepted & _differs(x, low[k], end[k]))
        # (Where the next step begins; events look again.)
        for variable, x in zip(self.on.values, end, strict=True):
            variable.set_where(step.accepted, x)
        for n in sorted({x.interp_points for x in self.events.continuous}):
            if n > 2:
                self._within(n, low)

    def _nudge(self) -> None:
        """Where a condition is zero as the step begins, or at the root still of the event before,
        its sign is the one a little later.

        (In OrdinaryDiffEq the first has no sign at all, and an event in that step is not seen.)
        """
        b, step = self.b, self.step
        eps = _SAME_ROOT * np.finfo(self.dtype).eps
        for i, x, places in self._slices:
            here = step.accepted & self.on.last.get().eq(i + 1)
            low = [v.get() for v in self.low[places]]
            if x.is_vector:
                crossed = [v.get().ne(0) for v in self.on.crossed[i]]
                value = nearest = b.constant(np.inf, self.dtype, of_lanes=True)
                for mark, v in zip(crossed, low, strict=True):
                    nearer = mark & (abs(v) < nearest)
                    nearest, value = b.where(nearer, abs(v), nearest), b.where(nearer, v, value)
            else:
                crossed, value = [here], low[0]
            close = here & (abs(value - self.on.residual.get()) <= eps)
            wanted = [
                (close & mark) | (step.accepted & v.eq(0.0))
                for mark, v in zip(crossed, low, strict=True)
            ]
            # (OrdinaryDiffEq takes a part of the step as it was before it was cut to a known time,
            # which may be far beyond that.)
            t = step.t + (step.t2 - step.t) * x.repeat_nudge

            def do(x=x, places=places, wanted=wanted, t=t) -> None:
                values = self.on._of(x.conditions, self.state_at(t), t, step.accepted)
                for k, mask, new in zip(self._numbers(places), wanted, values, strict=True):
                    self.bottom[k].set_where(mask, t)
                    self.low[k].set_where(mask, new)

            b.if_(b.any(self._either(wanted)), do)

    @staticmethod
    def _numbers(places: slice) -> range:
        return range(places.start, places.stop)

    @staticmethod
    def _either(masks: Sequence[Value]) -> Value:
        return functools.reduce(operator.or_, masks)

    def _within(self, n: int, low: list[Value]) -> None:
        """Look at `n` points of the step, both ends among them, until there is another sign."""
        b, step = self.b, self.step
        chosen = [x for x in self._slices if x[1].interp_points == n]
        span = step.t2 - step.t
        looks = {}
        for i, _, places in chosen:
            # (Of several conditions, as long as one of them has the same sign still.)
            looks[i] = step.accepted & self._either([~x.get() for x in self.fires[places]])
        dense = self.dense()
        # Whether there is another sign anywhere; where it is, is asked where there is.
        seen = b.variable(BOOL, False)

        def at(theta: Any) -> tuple[tuple, Value]:
            method, t = self.loop.problem.method, step.t + span * theta
            u = method.interpolate(b, step.y, dense, step.h, theta)
            return tuple(map(b.spread, u)), t

        def look(theta: Any) -> None:
            u, t = at(theta)
            for i, x, places in chosen:
                values = self.on._of(x.conditions, u, t, step.accepted)
                for k, value in zip(self._numbers(places), values, strict=True):
                    seen.set(seen.get() | (looks[i] & _differs(x, low[k], value)))

        thetas = [self.dtype.type(j / (n - 1)) for j in range(1, n - 1)]
        for theta in thetas:
            look(b.constant(theta, self.dtype))

        def first() -> None:
            left = {i: b.variable(BOOL, looks[i] & seen.get()) for i, *_ in chosen}

            def one(j: Value) -> None:
                u, t = at(b.cast(j + 1, self.dtype) / float(n - 1))
                for i, x, places in chosen:
                    values = self.on._of(x.conditions, u, t, step.accepted)
                    numbers = self._numbers(places)
                    pairs = list(zip(numbers, values, strict=True))
                    differs = [_differs(x, self.low[k].get(), value) for k, value in pairs]
                    here = left[i].get() & self._either(differs)
                    for (k, value), y in zip(pairs, differs, strict=True):
                        self.fires[k].set_where(here, y)
                        self.high[k].set_where(here, value)
                    self.top[i].set_where(here, t)
                    left[i].set(left[i].get() & ~here)

            b.for_(n - 2, one)

        b.if_(b.any(seen.get()), first, likely=False)

    def run(self, t2: Variable, end: list[Variable], which: Variable, relaxed: Variable) -> None:
        """Find the earliest event, cut the step there, and say which it is."""
        b, loop, step = self.b, self.loop, self.step
        direction = loop.direction
        is_root = b.variable(BOOL, False)
        best = b.variable(self.dtype, step.t2)
        on = self.on
        for i, x, places in self._slices:
            numbers = self._numbers(places)
            time = b.variable(self.dtype, self.top[i].get())
            marks = [b.variable(I32, 0) for _ in numbers]
            found = b.variable(BOOL, False)
            searched = b.variable(BOOL, False)
            for k, mark in zip(numbers, marks, strict=True):
                here, low, high = self.fires[k].get(), self.low[k].get(), self.high[k].get()
                root = b.variable(self.dtype, self.top[i].get())
                wanted = here & high.ne(0.0)
                if x.rootfind != NoRootFind:

                    def find(k=k, wanted=wanted, root=root, i=i, x=x) -> None:
                        self._root(k, i, x, wanted, root)

                    b.if_(b.any(wanted), find)
                else:
                    wanted = b.constant(False, BOOL, of_lanes=True)
                at, before = root.get(), time.get()
                earlier = here & (~found.get() | (direction * (before - at) > 0.0))
                same = here & found.get() & at.eq(before)
                for other in marks:
                    other.set_where(earlier, 0)
                sign = b.where(low < 0.0, b.constant(1, I32), b.constant(-1, I32))
                mark.set_where(earlier | same, sign)
                time.set_where(earlier, at)
                searched.set_where(earlier | same, wanted)
                found.set(found.get() | here)
            wins = found.get() & (which.get().eq(0) | (direction * (best.get() - time.get()) > 0.0))
            best.set_where(wins, time.get())
            is_root.set_where(wins, searched.get())
            for mark in on.marks[: on.events.components]:
                mark.set_where(wins, 0)
            for mark, m in zip(on.marks[places], marks, strict=True):
                mark.set_where(wins, m.get())
            for v, m in zip(on.crossed[i], marks, strict=False):
                v.set_where(wins, m.get())
            which.set_where(wins, i + 1)
            relaxed.set_where(wins, x.dtrelax)
        met = which.get().ne(0)
        cut = met & best.get().ne(step.t2)
        t2.set_where(met, best.get())
        for variable, u in zip(end, self.state_at(best.get()), strict=True):
            variable.set_where(cut, u)
        # How far from zero the condition is there.
        values = on._conditions(tuple(v.get() for v in end), t2.get(), met)
        residual = b.constant(0, self.dtype, of_lanes=True)
        for _, _, places in self._slices:
            for k in self._numbers(places):
                residual = b.where(on.marks[k].get().ne(0), values[k], residual)
        residual = b.where(is_root.get(), residual, 0.0)
        on.residual.set_where(met, residual)

    def _root(self, k: int, i: int, x: Continuous, wanted: Value, root: Variable) -> None:
        """The root of condition `k`, in the lanes that want it: by bisection and regula falsi in
        turn, until its bracket is two neighbouring numbers.

        (Time runs forwards here: `direction` times the time.)
        """
        b, dtype = self.b, self.dtype
        direction = self.loop.direction
        component = k - self._slices[i][2].start
        x1, x2 = (b.variable(dtype, direction * v.get()) for v in (self.bottom[k], self.top[i]))
        y1, y2 = b.variable(dtype, self.low[k].get()), b.variable(dtype, self.high[k].get())
        bisects, side = b.variable(BOOL, True), b.variable(I32, 0)
        threshold = b.variable(dtype, x2.get() - x1.get())
        going = b.variable(BOOL, wanted & self._apart(x1.get(), x2.get()))
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
            fm = self.on._of(x.conditions, self.state_at(t), t, here)[component]
            middle = (fa + fc) * 0.5
            r = 1.0 - abs(middle / (fc - fa))
            flat = halves & (abs(middle - fm) < r * r * (abs(middle) + abs(fm)))
            narrower = b.where(halves, threshold.get(), threshold.get() * 0.5)
            limit = b.where(flat, (c - a) * _THRESHOLD, narrower)
            halves = halves & ~flat
            lower = (fa < 0.0) ^ (fm >= 0.0)
            zero = fm.eq(0.0)
            # The other end, pulled towards zero where the same end has moved twice.
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
            going.set(here & ~zero & self._apart(x1.get(), x2.get()))

        b.while_(lambda: b.any(going.get()) & (left.get() > 0), one)
        found = x1 if x.rootfind == LeftRootFind else x2
        root.set_where(wanted, direction * found.get())

    def _apart(self, x1: Value, x2: Value) -> Value:
        """Whether there are numbers between two."""
        return self._next(x1, 1) < x2

    def _next(self, x: Value, by: int) -> Value:
        """The next number above (1), or below (-1)."""
        b = self.b
        integer = integer_like(self.dtype)
        bits = b.bitcast(x, integer)
        least = b.constant(np.finfo(self.dtype).smallest_subnormal * by, self.dtype)
        up = b.where(x > 0.0, bits + by, bits - by)
        return b.where(x.eq(0.0), least, b.bitcast(up, self.dtype))


def _differs(x: Continuous, low: Value, high: Value) -> Value:
    """Whether a condition crosses zero from one value to another, where that makes an event."""
    rises, falls = (low < 0.0) & (high >= 0.0), (low > 0.0) & (high <= 0.0)
    if x.down is None:
        return rises
    return falls if x.up is None else rises | falls
