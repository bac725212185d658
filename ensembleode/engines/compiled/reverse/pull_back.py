"""Pulls cotangents back through trajectories, group by group, by recording and replaying turns.

The trajectories of a group are solved again, and every turn of the lanes is recorded: the state
where it began, and the size of the step (zero where it was rejected). Then the turns are replayed
backwards. A long record consists of segments: on the way forwards only a checkpoint at the start of
each is kept, from which the segment is solved again before it is replayed. When there is no room
for more checkpoints, every other one is dropped. From then on, some segments are also solved again
to reach later ones (see Stumm and Walther, "New algorithms for optimal online checkpointing", SIAM
J. Sci. Comput. 32, 2010, who also drop checkpoints as steps go on).
"""

from __future__ import annotations

from collections.abc import Callable

from ..llvm.builder import BOOL, Builder, I64, Value
from ..loop.loop import Loop
from .checkpoints import SegmentCheckpoints
from .record import PullBackWork, Record
from .replay import Cotangents, Pullback, Replay


def pull_back(
    b: Builder,
    make_loop: Callable[[Value, Value, Callable], Loop],
    work: PullBackWork,
    pullback: Pullback,
    cotangents: Cotangents,
    *,
    alone: bool,
) -> int:
    """Pull back through trajectories, group by group; returns the bytes of a checkpoint.
    `make_loop(first, end, on_begin)` returns the time loop of a group. `alone`: whether a group is
    a single trajectory, as in a GPU's threads, which each sum up a gradient by shared
    parameters."""
    in_memory = pullback.sums
    first = b.variable(I64, work.first, of_lanes=False)
    n_sums = pullback.n_shared if in_memory is None else 0
    sums = [b.variable(cotangents.shared.dtype, 0) for _ in range(n_sums)]
    segment, target = (b.variable(I64, 0, of_lanes=False) for _ in range(2))
    forwards, size = b.variable(BOOL, True, of_lanes=False), 0

    def one_group(last: Value) -> None:
        nonlocal size
        start = first.get()
        end = b.minimum(start + work.group, last)
        events: list[Callable] = []
        loop = make_loop(start, end, lambda index, fresh: events[0](index, fresh))
        record = Record(loop, work, alone=alone, keeping=pullback.keeping)
        size = record.checkpoint_size()
        events.append(record.add_event)
        replay = Replay(b, loop, record, pullback, cotangents, sums if alone or in_memory else None)
        checkpoints = SegmentCheckpoints(record)
        # The segment that is recorded next, and the one that is to be replayed.
        segment.set(0)
        target.set(0)
        forwards.set(True)

        def one_segment() -> Value:
            b.if_(forwards.get(), lambda: checkpoints.keep(segment.get()))
            record.fill()
            now = segment.get()
            more = b.where(forwards.get(), loop.goes_on.get(), now < target.get())

            def back() -> None:
                def begin() -> None:
                    forwards.set(False)
                    target.set(now)
                    last = record.last.get()
                    replay.load(last, last >= 0)

                b.if_(forwards.get(), begin)
                replay.run()
                left = target.get() - 1
                target.set(left)
                b.if_(left >= 0, lambda: segment.set(checkpoints.restore(left)))

            b.if_(more, lambda: segment.set(now + 1), back)
            return target.get() >= 0

        b.do_while(one_segment)
        first.set(start + work.stride)

    def groups(last: Value) -> None:
        b.while_(lambda: first.get() < last, lambda: one_group(last))

    def one_block(number: Value) -> None:
        assert work.blocks is not None
        assert in_memory is not None
        start, end = work.blocks.range(b, number)
        in_memory.begin(number)
        first.set(start)
        groups(end)
        in_memory.end()

    if in_memory is None:
        groups(work.end)
    else:
        b.for_(work.end, one_block, work.first)
    if alone:
        for i, x in enumerate(sums):
            cotangents.shared.store(i * work.threads + work.thread, x.get())
    return size
