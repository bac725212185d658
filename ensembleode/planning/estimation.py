"""How long a run takes on a fleet, how much of it each kind does, and how the assumptions
matter."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from .checks import whole_number
from .fleet import check_fleet, Kind
from .tables import columns, hours, plain


HOUR = 3600
DAY = 24


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a run that one kind does, and what it would take for that kind to do all of it.

    - `name`, `count`, `hours_per_day`, `unit_time`: those of the kind.
    - `compute_hours`: the hours in which a single instance would do everything, without a break.
    - `alone_hours`: the hours until everything is done, if there were only the instances of this
        kind.
    - `fraction`, `items`: its part of the items when each kind does its share.
    - `jobs`: its number of jobs; None where the work is split freely.
    """

    name: str
    count: int
    hours_per_day: float
    unit_time: float
    compute_hours: float
    alone_hours: float
    fraction: float
    items: int
    jobs: int | None


@dataclasses.dataclass(frozen=True)
class Assumption:
    """The run time under another assumption.

    - `what`: the assumption.
    - `run_hours`: the run time under it.
    - `factor`: that run time relative to the estimated one.
    """

    what: str
    run_hours: float
    factor: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The result of [`estimate`][ensembleode.planning.estimate]; prints as tables.

    - `items`, `iterations`: those of the run.
    - `items_per_job`, `jobs`: the size and the number of independent jobs; None for a run that is
        split freely.
    - `run_hours`: the hours until everything is done.
    - `compute_hours`: the hours that all instances together compute until then.
    - `shares`: a [`Share`][ensembleode.planning.Share] for each kind.
    - `assumptions`: an [`Assumption`][ensembleode.planning.Assumption] for everything that might be
        different.
    - `notes`: doubts about the estimate, in words.
    """

    items: int
    iterations: int
    items_per_job: int | None
    jobs: int | None
    run_hours: float
    compute_hours: float
    shares: tuple[Share, ...]
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The estimate as dictionaries, lists and numbers, for JSON."""
        return plain(self)

    def __str__(self) -> str:
        title = f"{self.items:,} items x {self.iterations:,} iterations"
        if self.jobs is not None:
            title += f", in {self.jobs:,} jobs of {self.items_per_job:,} items"
        head = ["kind", "count", "unit time", "hours a day", "compute (h)", "alone (h)", "share"]
        rows = [[*head, "items" if self.jobs is None else "jobs"]]
        for share in self.shares:
            kind = [share.name, f"{share.count:,}", f"{share.unit_time:.4g}"]
            spent = [hours(share.compute_hours), hours(share.alone_hours), f"{share.fraction:.1%}"]
            done = share.items if share.jobs is None else share.jobs
            rows.append([*kind, f"{share.hours_per_day:g}", *spent, f"{done:,}"])
        others = [["if", "run time (h)", ""]]
        others += [[x.what, hours(x.run_hours), f"x {x.factor:.2f}"] for x in self.assumptions]
        days = f" ({self.run_hours / DAY:,.1f} days)" if self.run_hours >= DAY else ""
        lines = [
            title,
            "",
            *columns(rows),
            "",
            f"run time      {hours(self.run_hours)} hours{days}",
            f"compute time  {hours(self.compute_hours)} hours of instances",
            "",
            *columns(others),
            "",
            "unit time: seconds an item and 1000 iterations",
            "compute: if one instance did everything; alone: if all of its kind did",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def estimate(
    items: int | float,
    iterations: int | float,
    fleet: Sequence[Kind],
    *,
    items_per_job: int | float | None = None,
) -> Estimate:
    r"""Estimate how long a number of iterations over a number of items takes on a mixed fleet.

    An instance of a kind computes one item in one iteration in the seconds that were measured, at
    any size. All instances work from the beginning to the end, without gaps and without waiting for
    each other. Let kind $k$ have $c_k$ instances, which are available $h_k$ hours a day and take
    $s_k$ seconds. Then it does a part of the items in proportion to $c_k h_k / s_k$, and all kinds
    are done at the same time, after

    $$ T = \frac{\text{items} \times \text{iterations}}{\sum_k c_k h_k / (24 \, s_k)}. $$

    **Arguments:**

    - `items`: the number of items, in the unit that was measured: trajectories, collocation points.
    - `iterations`: the number of iterations over all items.
    - `fleet`: the kinds of instances, from [`read_fleet`][ensembleode.planning.read_fleet] or as
        [`Kind`][ensembleode.planning.Kind]s.
    - `items_per_job`: for independent jobs of this many items instead of one shared run. One
        instance computes a job from beginning to end. The jobs are dealt so that the last one is
        done as early as possible. (The last job may have fewer items; it counts as a whole one.)

    **Returns:** an [`Estimate`][ensembleode.planning.Estimate].

    **Raises:** [`PlanError`][ensembleode.planning.PlanError] for numbers that are not whole and
    positive, for an empty fleet, and for two kinds of the same name.

    >>> from ensembleode import planning
    >>> fleet = [planning.Kind("gpu", 2, unit_time=0.001), planning.Kind("cpu", 10, unit_time=0.1)]
    >>> round(planning.estimate(1e6, 1e5, fleet).run_hours, 2)
    13.23
    """
    items = whole_number(items, "items")
    iterations = whole_number(iterations, "iterations")
    if items_per_job is not None:
        items_per_job = whole_number(items_per_job, "items_per_job")
    check_fleet(fleet)
    run = _PlannedRun(items, iterations, items_per_job)
    run_hours, parts, jobs = _planned(run, fleet)
    shares = [
        Share(
            name=kind.name,
            count=kind.count,
            hours_per_day=kind.hours_per_day,
            unit_time=1000 * kind.cost,
            compute_hours=items * iterations * kind.cost / HOUR,
            alone_hours=_planned(run, [kind])[0],
            fraction=part / items,
            items=part,
            jobs=dealt,
        )
        for kind, part, dealt in zip(fleet, parts, jobs or [None] * len(fleet), strict=True)
    ]
    return Estimate(
        **run._asdict(),
        jobs=None if jobs is None else sum(jobs),
        run_hours=run_hours,
        compute_hours=math.fsum(share.fraction * share.compute_hours for share in shares),
        shares=tuple(shares),
        assumptions=tuple(_assumptions(run, fleet, run_hours)),
        notes=tuple(_notes(fleet, items_per_job, jobs)),
    )


class _PlannedRun(NamedTuple):
    items: int
    iterations: int
    items_per_job: int | None


def _planned(run: _PlannedRun, fleet: Sequence[Kind]) -> tuple[float, list[int], list[int] | None]:
    """The run time in hours, the items of each kind, and the jobs of each kind."""
    # In exact fractions, since the numbers of items and jobs must not depend on rounding.
    items, iterations, items_per_job = run
    costs = [Fraction(kind.cost) * DAY / Fraction(kind.hours_per_day) for kind in fleet]
    if items_per_job is None:
        speeds = [kind.count / cost for kind, cost in zip(fleet, costs, strict=True)]
        seconds = items * iterations / sum(speeds)
        parts = _rounded([items * speed / sum(speeds) for speed in speeds])
        return float(seconds / HOUR), parts, None
    jobs = -(-items // items_per_job)
    counts = [kind.count for kind in fleet]
    lengths = [items_per_job * iterations * cost for cost in costs]
    seconds, dealt = makespan(jobs, counts, lengths)
    parts = [n * items_per_job for n in dealt]
    # One of the jobs is the shorter one.
    parts[dealt.index(max(dealt))] -= sum(parts) - items
    return float(seconds / HOUR), parts, dealt


def makespan(
    jobs: int, counts: Sequence[int], lengths: Sequence[Fraction]
) -> tuple[Fraction, list[int]]:
    """The least time in which `jobs` equal jobs can be done, and how many of them each kind does.

    There are `counts` instances of each kind, each of which takes `lengths` for a job, and does one
    job after the other. The least time is one at which some instance ends a job, so it is a
    multiple of a length. For each length, the least multiple that suffices is found by bisection.
    """

    def done(time: Fraction) -> list[int]:
        return [c * (time // length) for c, length in zip(counts, lengths, strict=True)]

    times = []
    for count, length in zip(counts, lengths, strict=True):
        # After `high` jobs on each of its instances, this kind alone has done all.
        low, high = 0, -(-jobs // count)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if sum(done(middle * length)) >= jobs else (middle, high)
        times.append(high * length)
    time = min(times)
    dealt = done(time)
    # In that time there may be room for more jobs, but not at any earlier time. So the spare jobs
    # belong to kinds that end a job just then.
    spare = sum(dealt) - jobs
    for i, length in enumerate(lengths):
        if time % length == 0:
            left = min(spare, counts[i])
            dealt[i] -= left
            spare -= left
    return time, dealt


def _rounded(parts: Sequence[Fraction]) -> list[int]:
    """Whole numbers with the same sum: the parts that lose most by rounding down get one more."""
    down = [math.floor(part) for part in parts]
    by_loss = sorted(range(len(parts)), key=lambda i: down[i] - parts[i])
    for i in by_loss[: int(sum(parts)) - sum(down)]:
        down[i] += 1
    return down


def _assumptions(run: _PlannedRun, fleet: Sequence[Kind], run_hours: float) -> list[Assumption]:
    found = []

    def suppose(what: str, fleet: Sequence[Kind] = fleet, **numbers: Any) -> None:
        then = _planned(run._replace(**numbers), fleet)[0]
        found.append(Assumption(what, then, then / run_hours))

    for i, kind in enumerate(fleet):
        rest = [*fleet[:i], *fleet[i + 1 :]]
        if rest:
            suppose(f"without {kind.name}", rest)
        if kind.count > 1:
            fewer = dataclasses.replace(kind, count=kind.count // 2)
            what = f"{kind.name}: {fewer.count:,}, not {kind.count:,}"
        else:
            field = "seconds" if kind.unit_time is None else "unit_time"
            fewer = dataclasses.replace(kind, **{field: 2 * getattr(kind, field)})
            what = f"{kind.name}: half as fast"
        suppose(what, [*fleet[:i], fewer, *fleet[i + 1 :]])
    for day in (16, DAY):
        # Fewer hours a day than were given, or more.
        limit = min if day < DAY else max
        others = [
            dataclasses.replace(kind, hours_per_day=float(limit(kind.hours_per_day, day)))
            for kind in fleet
        ]
        if others != list(fleet):
            suppose(f"{day} hours a day", others)
    suppose("twice the items", items=2 * run.items)
    suppose("twice the iterations", iterations=2 * run.iterations)
    if run.items_per_job is not None:
        suppose("split freely, not into jobs", items_per_job=None)
    return found


def _notes(
    fleet: Sequence[Kind], items_per_job: int | None, jobs: Sequence[int] | None
) -> list[str]:
    if items_per_job is None or jobs is None:
        return []
    found = [
        f"{kind.name} was measured with {kind.items:,} items, and a job has {items_per_job:,}: "
        + ("each may take longer." if items_per_job < kind.items else "they may not fit.")
        for kind in fleet
        if kind.items not in (None, items_per_job)
    ]
    instances = sum(kind.count for kind in fleet)
    if sum(jobs) < instances:
        found.append(
            f"of {instances:,} instances, {instances - sum(jobs):,} or more have no job: make jobs "
            "smaller."
        )
    return found
