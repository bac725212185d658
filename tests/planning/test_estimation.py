"""Estimates, compared with closed forms and with each other."""

import dataclasses
import itertools
import json
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest

from ensembleode import planning
from ensembleode.planning.estimation import makespan


settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
# Of a physics-informed network, as measured on a cluster: 2000 iterations of Adam, on a GPU and on
# eight cores.
GPU = planning.Kind("gpu", 32, seconds=185.3456, items=65536, iterations=2000)
CPU = planning.Kind("cpu", 40, seconds=4141.0066, items=16384, iterations=2000)
SMALL = dataclasses.replace(GPU, seconds=32.8476, items=4096)


def run_hours(*fleet, items=1e8, iterations=1e5, **options):
    return planning.estimate(items, iterations, fleet, **options).run_hours


def at(hours_per_day, *fleet):
    return [dataclasses.replace(kind, hours_per_day=hours_per_day) for kind in fleet]


def otherwise(estimate):
    return {other.what: other for other in estimate.assumptions}


def test_a_network_on_a_cluster():
    found = planning.estimate(1e8, 1e5, [GPU, CPU])
    gpu, cpu = found.shares
    assert gpu.unit_time == pytest.approx(0.0014, abs=5e-5)
    assert cpu.unit_time == pytest.approx(0.1264, abs=5e-5)
    assert gpu.compute_hours == pytest.approx(3927.985297309, rel=1e-12)
    assert cpu.compute_hours == pytest.approx(351037.4789768, rel=1e-12)
    assert found.run_hours == pytest.approx(121.0563187741, rel=1e-12)
    assert found.run_hours == pytest.approx(
        1 / (32 / gpu.compute_hours + 40 / cpu.compute_hours), rel=1e-12
    )
    assert gpu.alone_hours == pytest.approx(gpu.compute_hours / 32, rel=1e-12)
    assert run_hours(*at(16, GPU, CPU)) == pytest.approx(181.5844781612, rel=1e-12)
    assert run_hours(SMALL, CPU) == pytest.approx(334.7875604570, rel=1e-12)
    assert run_hours(SMALL, CPU) / found.run_hours == pytest.approx(2.8, abs=0.05)


def test_assumptions():
    found = otherwise(planning.estimate(1e8, 1e5, [GPU, CPU]))
    assert list(found) == [
        "without gpu",
        "gpu: 16, not 32",
        "without cpu",
        "cpu: 20, not 40",
        "16 hours a day",
        "twice the items",
        "twice the iterations",
    ]
    assert found["without gpu"].run_hours == run_hours(CPU)
    assert found["gpu: 16, not 32"].run_hours == run_hours(dataclasses.replace(GPU, count=16), CPU)
    assert found["16 hours a day"].factor == pytest.approx(1.5)
    assert found["twice the items"].factor == pytest.approx(2.0)
    assert found["twice the iterations"].factor == pytest.approx(2.0)


def test_assumptions_of_one_instance():
    found = otherwise(planning.estimate(10, 10, [planning.Kind("box", 1, unit_time=3.0)]))
    assert list(found) == [
        "box: half as fast",
        "16 hours a day",
        "twice the items",
        "twice the iterations",
    ]
    assert found["box: half as fast"].factor == pytest.approx(2.0)


def test_assumptions_about_hours():
    found = otherwise(planning.estimate(1e8, 1e5, [*at(12, GPU), CPU]))
    assert found["16 hours a day"].run_hours == pytest.approx(run_hours(*at(12, GPU), *at(16, CPU)))
    assert found["24 hours a day"].run_hours == pytest.approx(run_hours(GPU, CPU))
    assert "16 hours a day" not in otherwise(planning.estimate(1e8, 1e5, at(8, GPU, CPU)))


def test_jobs():
    # The first takes an hour a job, the second two and a half.
    fleet = [
        planning.Kind("fast", 2, seconds=3600, items=10, iterations=7),
        planning.Kind("slow", 1, seconds=9000, items=10, iterations=7),
    ]
    found = planning.estimate(67, 7, fleet, items_per_job=10)
    assert (found.jobs, found.run_hours) == (7, 3.0)
    assert [share.jobs for share in found.shares] == [6, 1]
    assert [share.items for share in found.shares] == [57, 10]
    assert [share.alone_hours for share in found.shares] == [4.0, 17.5]
    assert otherwise(found)["split freely, not into jobs"].run_hours == pytest.approx(
        run_hours(*fleet, items=67, iterations=7)
    )
    assert found.notes == ()


def test_jobs_that_a_kind_is_too_slow_for():
    found = planning.estimate(1e8, 1e5, [GPU, CPU], items_per_job=65536)
    assert [share.jobs for share in found.shares] == [1526, 0]
    # 1526 jobs on 32 instances: 48 for those with most.
    assert found.run_hours == pytest.approx(48 * 185.3456 * 50 / 3600)


def test_notes():
    (note,) = planning.estimate(1e8, 1e5, [GPU, CPU], items_per_job=16384).notes
    assert note == (
        "gpu was measured with 65,536 items, and a job has 16,384: each may take longer."
    )
    found = planning.estimate(100, 1, [CPU], items_per_job=1e5)
    assert found.jobs == 1
    assert found.notes == (
        "cpu was measured with 16,384 items, and a job has 100,000: they may not fit.",
        "of 40 instances, 39 or more have no job: make jobs smaller.",
    )
    assert planning.estimate(100, 1, [CPU]).notes == ()


def makespans(jobs, counts, lengths):
    """Of every way to deal jobs to kinds."""
    for dealt in itertools.product(range(jobs + 1), repeat=len(counts)):
        if sum(dealt) == jobs:
            each = zip(dealt, counts, lengths, strict=True)
            yield max(-(-n // count) * length for n, count, length in each)


counts = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@settings
@hypothesis.given(jobs=st.integers(1, 9), counts=counts, data=st.data())
def test_makespan_is_the_least(jobs, counts, data):
    length = st.fractions(Fraction(1, 5), 5, max_denominator=6)
    lengths = [data.draw(length) for _ in counts]
    time, dealt = makespan(jobs, counts, lengths)
    assert time == min(makespans(jobs, counts, lengths))
    assert sum(dealt) == jobs
    each = zip(dealt, counts, lengths, strict=True)
    assert max(-(-n // count) * length for n, count, length in each) == time


kinds = st.builds(
    dict,
    count=st.integers(1, 1000),
    unit_time=st.floats(1e-6, 1e3),
    hours_per_day=st.floats(1, 24),
)
fleets = st.lists(kinds, min_size=1, max_size=4).map(
    lambda found: [planning.Kind(f"kind {i}", **fields) for i, fields in enumerate(found)]
)
sizes = st.integers(1, 10**10)


@settings
@hypothesis.given(fleet=fleets, items=sizes, iterations=st.integers(1, 10**6))
def test_any_fleet(fleet, items, iterations):
    found = planning.estimate(items, iterations, fleet)
    assert sum(share.items for share in found.shares) == items
    # Nothing is done faster than by all, nor slower than by the fastest kind.
    assert found.run_hours <= min(share.alone_hours for share in found.shares) * (1 + 1e-12)
    for share in found.shares:
        part = share.alone_hours * share.items / items
        rounding = share.alone_hours / items
        assert abs(part - found.run_hours) <= rounding + 1e-9 * found.run_hours
    for other in found.assumptions:
        least = 0.0 if other.what == "24 hours a day" else 1 - 1e-12
        assert other.factor >= least


@settings
@hypothesis.given(fleet=fleets, items=sizes, factor=st.integers(2, 9))
def test_counts_and_time_are_inverse(fleet, items, factor):
    more = [dataclasses.replace(kind, count=factor * kind.count) for kind in fleet]
    before, after = run_hours(*fleet, items=items), run_hours(*more, items=items)
    assert after == pytest.approx(before / factor)


@settings
@hypothesis.given(fleet=fleets, items=sizes, per_job=st.integers(1, 10**9))
def test_jobs_lose_a_job_at_most(fleet, items, per_job):
    found = planning.estimate(items, 1, fleet, items_per_job=per_job)
    assert found.jobs == -(-items // per_job) == sum(share.jobs for share in found.shares)
    assert sum(share.items for share in found.shares) == items
    assert all(share.items >= 0 for share in found.shares)
    freely = run_hours(*fleet, items=found.jobs * per_job, iterations=1)
    longest = max(per_job * kind.cost * 24 / kind.hours_per_day / 3600 for kind in fleet)
    assert freely * (1 - 1e-12) <= found.run_hours <= (freely + longest) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("items", "iterations", "options", "message"),
    [
        (0, 1, {}, "items must be a whole number, 1 or more, got 0"),
        (1.5, 1, {}, "items must be a whole number, 1 or more, got 1.5"),
        (float("inf"), 1, {}, "items must be a whole number"),
        (1e51, 1, {}, "items must be 1e.50 at most, got 1e.51"),
        (1, -2, {}, "iterations must be a whole number, 1 or more, got -2"),
        (1, 1, {"items_per_job": 0.5}, "items_per_job must be a whole number"),
    ],
)
def test_bad_numbers(items, iterations, options, message):
    with pytest.raises(planning.PlanError, match=message):
        planning.estimate(items, iterations, [GPU], **options)


def test_bad_fleets():
    with pytest.raises(planning.PlanError, match="empty"):
        planning.estimate(1, 1, [])
    with pytest.raises(planning.PlanError, match="two kinds are called 'gpu'"):
        planning.estimate(1, 1, [GPU, SMALL])


def test_table_of_jobs():
    lines = str(planning.estimate(100, 1, [CPU], items_per_job=30)).splitlines()
    assert lines[0] == "100 items x 1 iterations, in 4 jobs of 30 items"
    assert lines[2].split()[-1] == "jobs"
    assert lines[5] == "run time      1.05e-06 hours"
    assert lines[-1].startswith("note: ")


def test_as_dict():
    found = planning.estimate(1e8, 1e5, [GPU, CPU], items_per_job=16384)
    fields = json.loads(json.dumps(found.as_dict()))
    assert fields == found.as_dict()
    assert fields["run_hours"] == found.run_hours
    assert fields["shares"][1]["name"] == "cpu"
    assert fields["assumptions"][0]["what"] == "without gpu"
