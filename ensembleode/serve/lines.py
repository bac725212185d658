"""The items that wait to be run, and which of them make up the next batch.

A line has the items that can be run together. A batch is due when a line has enough items for a
full batch, when its first item has waited long enough, or when no new item has come for a while.
The lines of a problem take turns, and so do problems. Every item of a batch gets up to a fixed
share; the rest goes to items with more trajectories. So a large item is split, and other items
don't have to wait for it.
"""

import asyncio
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, TypeAlias


# If nothing arrives within this part of the longest wait, nothing more is expected.
_LULL = 0.05


@dataclasses.dataclass(eq=False, slots=True)
class WaitingItem:
    """A submitted item: how much of it waits, and what became of the rest."""

    where: tuple[Any, Any]  # the item's problem and line
    payload: Any
    n: int
    waiting: int
    submitted: float
    future: Any
    background: bool
    given: int = 0  # how much of the item has gone into batches
    started: float = math.nan
    seconds: float = 0.0
    results: list = dataclasses.field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    settled: Callable | None = None  # called when the future is done


@dataclasses.dataclass(eq=False, slots=True)
class _Line:
    """The items that can be run together, in the order of their turns; and the times of arrival of
    the first and the last of those that wait."""

    most: int
    items: dict[WaitingItem, None] = dataclasses.field(default_factory=dict)  # an ordered set
    waiting: int = 0
    first: float = math.inf
    last: float = -math.inf


# A part of an item, from a start to a stop.
Part: TypeAlias = tuple[WaitingItem, int, int]


class WaitingLines:
    """The lines of each problem. The problem and the line whose turn it is come first.

    - `most(line)`: the largest size of a batch of that line.
    - `share`, `max_wait`, `coalesce`: see `Batcher`.
    """

    def __init__(self, most: Callable[..., int], share: int, max_wait: float, coalesce: bool):
        self.problems: OrderedDict[Any, OrderedDict[Any, _Line]] = OrderedDict()
        self.waiting = 0  # how many, those of background items left out
        self._most, self._share, self._coalesce = most, share, coalesce
        self._max_wait, self._lull = max_wait, _LULL * max_wait

    def items(self, *problems: Any) -> list[WaitingItem]:
        """The items of these problems that wait, by default of all problems."""
        found = [self.problems.get(x, {}) for x in problems or self.problems]
        return [x for lines in found for line in lines.values() for x in line.items]

    def add(self, item: WaitingItem) -> bool:
        """Add an item. Returns whether it sets the time of a batch, or brings it forward."""
        problem, key = item.where
        lines = self.problems.setdefault(problem, OrderedDict())
        if key not in lines:
            lines[key] = _Line(self._most(key))
        line = lines[key]
        line.items[item] = None
        line.waiting += item.n
        line.first = min(line.first, item.submitted)
        line.last = item.submitted
        if not item.background:
            self.waiting += item.n
        return len(line.items) == 1 or line.waiting >= line.most

    def drop(self, item: WaitingItem) -> None:
        """Remove the waiting parts of an item."""
        problem, key = item.where
        line = self.problems[problem][key]
        del line.items[item]
        line.waiting -= item.waiting
        if not item.background:
            self.waiting -= item.waiting
        item.waiting = 0
        self._clean(problem, key)

    def _clean(self, problem: str, key: Any) -> None:
        """Remove a line without items."""
        lines = self.problems[problem]
        if not lines[key].items:
            del lines[key]
            if not lines:
                del self.problems[problem]

    def next(self, now: float, busy: Collection, *, at_once: bool) -> tuple[Any, float]:
        """The next line of a problem that is not busy, if a batch of it is due; otherwise None, and
        the time when one is due."""
        first_due = math.inf
        for problem, lines in self.problems.items():
            if problem in busy:
                continue
            for key, line in lines.items():
                due = min(line.first + self._max_wait, line.last + self._lull)
                if line.waiting >= line.most or due <= now or at_once:
                    return (problem, key), now
                first_due = min(first_due, due)
        return None, first_due

    def take(self, problem: str, key: Any, now: float) -> list[Part]:
        """The parts of items that make up the next batch of a line."""
        line = self.problems[problem][key]
        room = line.most
        counts: dict[WaitingItem, int] = {}
        background = self._share
        for item in line.items:
            count = min(item.waiting, self._share, room)
            if item.background:
                count = min(count, background)
                background -= count
            if count:
                counts[item] = count
                room -= count
            if not (room and self._coalesce):
                break
        for item in counts:
            if not item.background:
                more = min(item.waiting - counts[item], room)
                counts[item] += more
                room -= more
        parts = []
        for item, count in counts.items():
            if not item.given:
                item.started = now
            parts.append((item, item.given, item.given + count))
            item.given += count
            item.waiting -= count
            line.waiting -= count
            if not item.background:
                self.waiting -= count
            del line.items[item]
            if item.waiting:
                line.items[item] = None
        line.first = min((x.submitted for x in line.items), default=math.inf)
        # The other lines of the problem have their turns first.
        self.problems[problem].move_to_end(key)
        self.problems.move_to_end(problem)
        self._clean(problem, key)
        return parts
