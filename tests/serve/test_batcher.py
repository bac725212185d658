"""From items to batches: no item is lost, answered twice, or left waiting behind another."""

import asyncio
import collections
import functools
import threading
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from ensembleode.serve.batcher import (
    Batcher,
    BatchFailed,
    BatchHungError,
    DeadlineExceeded,
    DrainingError,
    ItemResult,
    QueueFull,
)
from ensembleode.serve.lines import WaitingLines


class Runs:
    """Answers a slice with itself, and keeps the batches."""

    def __init__(self, seconds=0.0, hold=None):
        self.batches = []
        self.seconds = seconds
        self.hold = hold

    def __call__(self, line, slices):
        self.batches.append((line, [(x.payload, x.start, x.stop) for x in slices]))
        if self.hold is not None:
            assert self.hold.wait(10)
        time.sleep(self.seconds)
        if any(x.payload == "bad" for x in slices):
            raise ArithmeticError("crash")
        return [(x.payload, x.start, x.stop) for x in slices]


def in_loop(test):
    """As a test of pytest."""

    @functools.wraps(test)
    def run(*args, **options):
        asyncio.run(asyncio.wait_for(test(*args, **options), 60))

    return run


def started(runs, **options):
    batcher = Batcher(runs, **{"max_batch": 16, "max_wait": 0.02} | options)
    batcher.start()
    return batcher


@in_loop
async def test_those_that_come_together_share_a_batch():
    runs = Runs()
    batcher = started(runs)
    done = await asyncio.gather(*(batcher.submit("a", "a", i, 1) for i in range(10)))
    assert [x.results for x in done] == [[(i, 0, 1)] for i in range(10)]
    assert all(0 <= x.wait < 5 for x in done)
    assert await batcher.drain(5)
    assert [len(parts) for _, parts in runs.batches] == [10]


@in_loop
async def test_a_full_batch_does_not_wait():
    runs = Runs()
    batcher = started(runs, max_wait=30.0)
    await asyncio.gather(*(batcher.submit("a", "a", i, 1) for i in range(16)))
    assert [len(parts) for _, parts in runs.batches] == [16]


@in_loop
async def test_without_batching_all_are_alone():
    runs = Runs()
    batcher = started(runs, coalesce=False)
    await asyncio.gather(*(batcher.submit("a", "a", i, 2) for i in range(5)))
    assert [parts for _, parts in runs.batches] == [[(i, 0, 2)] for i in range(5)]


@in_loop
async def test_a_large_item_is_split_and_others_go_with_it():
    """Five batches' worth, and one that comes later: it is in the next batch."""
    hold = threading.Event()
    runs = Runs(hold=hold)
    batcher = started(runs, max_wait=0.0, share=4)
    large = batcher.submit("a", "a", "large", 80)
    while not runs.batches:
        await asyncio.sleep(0.001)
    small = batcher.submit("a", "a", "small", 1)
    hold.set()
    await small
    assert not large.done()
    parts = (await large).results
    assert [x[1] for x in parts] == [0, *(x[2] for x in parts[:-1])]
    assert parts[-1][2] == 80
    assert "small" in [p for p, _, _ in runs.batches[1][1]]
    assert sum(stop - start for _, parts in runs.batches for _, start, stop in parts) == 81
    assert max(sum(stop - start for _, start, stop in parts) for _, parts in runs.batches) == 16


@in_loop
async def test_large_items_take_turns():
    runs = Runs()
    batcher = started(runs, share=4)
    await asyncio.gather(*(batcher.submit("a", "a", i, 20) for i in range(6)))
    first_two = [p for _, parts in runs.batches[:2] for p, _, _ in parts]
    assert set(first_two) == set(range(6))


@in_loop
async def test_problems_take_turns():
    """Of one there is much to do; the other is answered while that is at its first batch, whatever
    lines the first has."""
    hold, began = threading.Event(), threading.Event()

    def runs(line, slices):
        if line != "b":
            began.set()
            assert hold.wait(60)
        return [x.payload for x in slices]

    batcher = started(runs, max_wait=0.0)
    many = [batcher.submit("a", f"a{i % 3}", i, 16) for i in range(12)]
    while not began.is_set():
        await asyncio.sleep(0.001)
    assert (await batcher.submit("b", "b", "other", 1)).results == ["other"]
    assert not any(x.done() for x in many)
    hold.set()
    await asyncio.gather(*many)


@pytest.mark.slow
@in_loop
async def test_many_runs_of_parts_may_take_longer_than_one():
    batcher = started(Runs(seconds=0.05), max_batch=64, limit=0.2)
    items = [batcher.submit("a", "a", "bad", 1) for _ in range(16)]
    found = await asyncio.gather(*items, return_exceptions=True)
    assert {type(x) for x in found} == {BatchFailed}


@in_loop
async def test_draining_does_not_wait_for_what_hangs():
    hold = threading.Event()
    batcher = started(Runs(hold=hold), max_wait=0.0, limit=0.05)
    with pytest.raises(BatchHungError):
        await batcher.submit("a", "a", 1, 1)
    assert await batcher.drain(60)
    hold.set()


@in_loop
async def test_background_items_leave_room():
    runs = Runs()
    batcher = started(runs, share=4, queue=20)
    job = batcher.submit("a", "a", "job", 200, background=True)
    assert batcher.waiting == 0
    done = await asyncio.gather(*(batcher.submit("a", "a", i, 3) for i in range(6)))
    assert [x.results for x in done] != []
    assert not job.done()
    await job
    assert all(
        sum(stop - start for p, start, stop in parts if p == "job") <= 4
        for _, parts in runs.batches
    )


@in_loop
async def test_an_item_larger_than_the_queue_has_its_turn():
    batcher = started(Runs(), queue=10)
    assert len((await batcher.submit("a", "a", "large", 100)).results) > 1


@in_loop
async def test_deadlines():
    hold = threading.Event()
    runs = Runs(hold=hold)
    batcher = started(runs, max_wait=0.0)
    first = batcher.submit("a", "a", "first", 16)
    while not runs.batches:
        await asyncio.sleep(0.001)
    late = batcher.submit("a", "a", "late", 5, deadline=time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded):
        await late
    await asyncio.sleep(0)
    assert batcher.waiting == 0
    with pytest.raises(DeadlineExceeded):
        batcher.submit("a", "a", "past", 1, deadline=time.monotonic() - 1)
    hold.set()
    await first
    assert await batcher.drain(5)
    assert [p for _, parts in runs.batches for p, _, _ in parts] == ["first"]


@in_loop
async def test_only_what_crashes_is_not_answered():
    """Those that share its batch are; if all crash, they are not tried again and again."""
    runs = Runs()

    async def outcomes(payloads):
        batcher = started(runs, max_batch=64)
        items = [batcher.submit("a", "a", x, 1) for x in payloads]
        found = await asyncio.gather(*items, return_exceptions=True)
        return [type(x) for x in found]

    payloads = [*range(20), "bad", *range(21, 60)]
    assert await outcomes(payloads) == [BatchFailed if x == "bad" else ItemResult for x in payloads]
    assert len(runs.batches[0][1]) == 60
    assert len(runs.batches) < 16
    runs.batches.clear()
    assert set(await outcomes(["bad"] * 60)) == {BatchFailed}
    assert len(runs.batches) <= 33


@pytest.mark.parametrize("name", ["_in_halves", "_observe"])
@in_loop
async def test_it_survives_what_goes_wrong_around_a_batch(name, monkeypatch, caplog):
    batcher = started(Runs(), observe=lambda *_: None)

    def broken(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(batcher, name, broken)
        first = asyncio.gather(batcher.submit("a", "a", 1, 1), return_exceptions=True)
        (found,) = await first
    assert isinstance(found, BatchFailed if name == "_in_halves" else ItemResult)
    assert "can't start new thread" in caplog.text
    assert (await batcher.submit("a", "a", 2, 1)).results
    assert not batcher.is_dead
    assert await batcher.drain(5)
    assert not batcher.is_dead


@in_loop
async def test_it_does_not_end_unseen(monkeypatch, caplog):
    """A defect of its own: nobody waits for ever, nothing more is taken, and it says so."""
    batcher = started(Runs())
    monkeypatch.delattr(WaitingLines, "take")
    with pytest.raises(BatchFailed) as raised:
        await batcher.submit("a", "a", 1, 1)
    assert raised.value.id in caplog.text
    assert batcher.is_dead
    with pytest.raises(DrainingError):
        batcher.submit("a", "a", 1, 1)
    assert await batcher.drain(30)


@in_loop
async def test_too_few_results_are_a_crash():
    batcher = Batcher(lambda line, slices: [], max_wait=0.0)
    batcher.start()
    with pytest.raises(BatchFailed):
        await batcher.submit("a", "a", 1, 1)


@in_loop
async def test_draining():
    runs = Runs(seconds=0.01)
    batcher = started(runs, max_wait=30.0)
    items = [batcher.submit("a", i % 3, i, 1) for i in range(10)]
    assert await batcher.drain(10)
    assert all(item.done() and item.result().results for item in items)
    with pytest.raises(DrainingError):
        batcher.submit("a", "a", 1, 1)


@in_loop
async def test_draining_ends():
    hold = threading.Event()
    batcher = started(Runs(hold=hold), max_wait=0.0)
    items = [batcher.submit("a", "a", i, 16) for i in range(3)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    assert not await batcher.drain(0.1)
    assert time.monotonic() - began < 5
    for item in items:
        with pytest.raises(DrainingError):
            await item
    hold.set()


@st.composite
def arrivals(draw):
    """Items: pauses before them, problems, sizes, and what becomes of them."""
    item = st.tuples(
        st.sampled_from([0, 0, 0, 0.5, 2]),  # ms
        st.sampled_from("ab"),
        st.integers(0, 1),
        st.integers(1, 40),
        st.sampled_from(["wait", "wait", "wait", "cancel", "deadline", "background", "bad"]),
        st.sampled_from([0, 0.3, 1, 3]),
    )
    return draw(st.lists(item, min_size=1, max_size=25))


@hypothesis.settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(
    arrivals(), st.booleans(), st.sampled_from([1, 3, 16]), st.sampled_from([0, 0.001])
)
@in_loop
async def test_nothing_is_lost_or_answered_twice(items, coalesce, share, max_wait):
    """Whatever comes, in whatever order, is answered once, whole and in order; or was cancelled,
    late, refused, or crashed. What ran, ran once (but for batches that crashed)."""
    ran = collections.Counter()

    def runs(line, slices):
        for x in slices:
            ran.update((x.payload[0], i) for i in range(x.start, x.stop))
            assert x.payload[1] == line
        assert sum(x.stop - x.start for x in slices) <= 16
        if any(x.payload[2] == "bad" for x in slices):
            ran.subtract((x.payload[0], i) for x in slices for i in range(x.start, x.stop))
            raise ArithmeticError("crash")
        return [(x.payload, x.start, x.stop) for x in slices]

    batcher = Batcher(
        runs, max_batch=16, max_wait=max_wait, share=share, coalesce=coalesce, queue=100
    )
    batcher.start()
    loop = asyncio.get_running_loop()
    given = []
    for number, (pause, problem, line, n, fate, ms) in enumerate(items):
        if pause:
            await asyncio.sleep(pause / 1000)
        deadline = time.monotonic() + ms / 1000 if fate == "deadline" else None
        payload = (number, (problem, line), fate)
        try:
            future = batcher.submit(
                problem, (problem, line), payload, n,
                deadline=deadline, background=fate == "background",
            )  # fmt: skip
        except (QueueFull, DeadlineExceeded):
            continue
        if fate == "cancel":
            loop.call_later(ms / 1000, future.cancel)
        given.append((payload, n, future))
    outcomes = await asyncio.gather(*(f for _, _, f in given), return_exceptions=True)
    for (payload, n, _), outcome in zip(given, outcomes, strict=True):
        number, _, fate = payload
        if isinstance(outcome, asyncio.CancelledError):
            assert fate == "cancel"
        elif isinstance(outcome, DeadlineExceeded):
            assert fate == "deadline"
        elif isinstance(outcome, BatchFailed):
            assert fate == "bad"
        else:
            parts = outcome.results
            assert fate != "bad"
            assert all(p == payload for p, _, _ in parts)
            assert [i for _, a, b in parts for i in range(a, b)] == list(range(n))
            assert all(ran[number, i] == 1 for i in range(n))
    await asyncio.sleep(0)
    assert batcher.waiting == 0
    assert await batcher.drain(10)
    assert not batcher._lines.problems
    assert set(ran.values()) <= {0, 1}
