"""Which checkpoints of a solve are kept in the memory that there is for them. (How one is written
and read is in `record.py`.)"""

from ..llvm.builder import I64, Value
from .record import Record


class SegmentCheckpoints:
    """The checkpoints at the starts of segments. Those of segments whose number is a multiple of
    the spacing are kept. The spacing, a power of two, is doubled when there is no more room."""

    def __init__(self, record: Record):
        self.b, self._record, self._room = record.b, record, record.work.checkpoints
        self._count, self._spacing = (record.b.variable(I64, x, of_lanes=False) for x in (0, 1))

    def keep(self, segment: Value) -> None:
        """Keep the checkpoint of this segment, if its number is a multiple of the spacing."""
        b, count, spacing = self.b, self._count, self._spacing

        def thin() -> None:
            half = self._room >> 1
            b.for_(half, lambda i: self._record.move(i * 2, i))
            count.set(half)
            spacing.set(spacing.get() * 2)

        def one() -> None:
            b.if_(count.get() >= self._room, thin, likely=False)
            self._record.keep(count.get())
            count.set(count.get() + 1)

        b.if_((segment & (spacing.get() - 1)).eq(0), one)

    def restore(self, segment: Value) -> Value:
        """Go back to the last checkpoint up to this segment; returns the number of its segment."""
        number = self.b.binary("udiv", segment, self._spacing.get())
        self._record.restore(number)
        return number * self._spacing.get()
