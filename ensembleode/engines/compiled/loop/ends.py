"""The ends of trajectories: their return codes, by the rules of `solvers/verdicts.py`, and what is
written of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....solvers import verdicts
from ....solvers.verdicts import Verdict
from ..llvm.builder import I32, I64, Value
from ..steps.saved_rows import TriedStep


if TYPE_CHECKING:
    from .loop import Loop


def conclude(loop: Loop, ended: Value, step: TriedStep, verdict: Verdict) -> Value:
    """Decide the return codes of the lanes `ended`. Returns those whose code is decided now,
    without a further turn to find it out."""
    b, p = loop.b, loop.problem
    if loop.outputs is None:
        return ended
    before, bounds = loop.code.get(), loop.bounds(loop.held) if p.adaptive else None
    # (`commit` may have found more trajectories lost than the verdict says.)
    verdict = verdict._replace(lost=~loop.active.get())
    # This is decided from the written state, so that nothing stays in registers for it.
    code = verdicts.code_at_end(b, verdict, loop.t.get().eq(loop.t1), bounds)
    code = verdicts.code_of_end(b, code, loop.is_finite(loop.state()))
    code = b.where(before.eq(verdicts.GOING), code, before)
    if not p.adaptive:
        loop.code.set_where(ended, code)
        return ended
    n = p.controlled
    probed = verdicts.code_of_probe(
        loop.xp, loop.held.tolerances(n), step.y[:n], step.attempt.y2[:n]
    )
    code = b.where(before.eq(verdicts.PROBING), probed, code)
    loop.code.set_where(ended, code)
    probing = ended & code.eq(verdicts.PROBING)
    loop.h.set_where(probing, loop.h.get() * float(verdicts.PROBE))
    return ended & ~probing


def end(loop: Loop, ended: Value) -> None:
    """Write the results of the lanes that have ended, which frees these lanes."""
    b, p = loop.b, loop.problem
    if loop.outputs is None:
        _free(loop, ended)
        return
    naccept, ntried = loop.naccept.get(), loop.ntried.get()
    if loop.is_uniform:
        tries, sound = ntried, loop.sound.get()
        ntried = b.where(sound, tries, naccept + loop.failures.get())
        naccept = b.where(sound, tries, naccept)
    index, n = loop.held.index.get(), loop.outputs.n
    if p.saving.mode == "ends":
        loop.saved.write(b.constant(0, I64), ended, loop.state())
    counts = [loop.code.get(), naccept, ntried]
    if loop.saved.row is not None:
        counts.append(b.cast(loop.saved.row.get(), I32))
    more = [] if loop.happening is None else [loop.happening.count]
    more += [] if loop.switch is None else [loop.switch.stiff, loop.switch.switches]
    more += [] if loop.restarts is None else [loop.restarts]
    # The counts that `counted` names keep their places even where no rows are counted.
    for i, x in enumerate(more):
        loop.outputs.counts.scatter(index + n * (4 + i), ended, x.get())
    for i, x in enumerate(counts):
        loop.outputs.counts.scatter(index + n * i, ended, x)
    _free(loop, ended)


def _free(loop: Loop, ended: Value) -> None:
    loop.occupied.set(loop.occupied.get() & ~ended)
    more = loop.pool.has_more()
    if loop.parking is not None:
        more = more | loop.parking.has_some()
    loop.must_refill.set(more)
    loop.goes_on.set(more | loop.b.any(loop.occupied.get()))
