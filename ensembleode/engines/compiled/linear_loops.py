"""The linear equations of a step for large blocks: dense matrices, factorised without row exchanges
by loops over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .builder import BOOL, Builder, Value
from .reading import Memory


class DenseFactors:
    """The factors `L U` of a dense matrix in memory, with ones on the diagonal of L.

    **Arguments:** `entries`: entries by row and column, both of which are components of a state;
    other entries are zero.
    """

    def __init__(self, b: Builder, entries: Mapping[tuple[int, int], Value]):
        self.b = b
        self.components: Sequence[int] = sorted({i for i, _ in entries})
        self.size = n = len(self.components)
        self.dtype = next(iter(entries.values())).dtype
        self.memory = Memory.on_stack(b, self.dtype, n * n, of_lanes=True)
        self.matrix = Memory.on_stack(b, self.dtype, n * n, of_lanes=True)
        self.inverse = Memory.on_stack(b, self.dtype, n, of_lanes=True)
        zero = b.constant(0, self.dtype, of_lanes=True)
        for row, i in enumerate(self.components):
            for column, j in enumerate(self.components):
                entry = b.spread(entries.get((i, j), zero))
                self.memory.store(row * n + column, entry)
                self.matrix.store(row * n + column, entry)
        b.for_(n, self._eliminate)

    def _eliminate(self, k: Value) -> None:
        b, m, n = self.b, self.memory, self.size
        inverse = 1.0 / m.load(k * n + k)
        self.inverse.store(k, inverse)

        def row(up: Value) -> None:
            start = (k + 1 + up) * n
            left = m.load(start + k) * inverse
            m.store(start + k, left)

            def column(right: Value) -> None:
                j = k + 1 + right
                m.store(start + j, m.load(start + j) - left * m.load(k * n + j))

            b.for_(n - 1 - k, column)

        b.for_(n - 1 - k, row)

    def solve(self, x: list[Value]) -> None:
        """Solve for the components of the block, in place."""
        n = self.size
        y = self._in_memory(x)

        def forwards(k: Value) -> None:
            now = y.load(k)
            self._subtract(y, now, k + 1, n - 1 - k, lambda i: i * n + k)

        def backwards(after: Value) -> None:
            k = n - 1 - after
            now = y.load(k) * self.inverse.load(k)
            y.store(k, now)
            self._subtract(y, now, 0, k, lambda i: i * n + k)

        self.b.for_(n, forwards)
        self.b.for_(n, backwards)
        self._to_values(y, x)

    def fulfilled(self, right: Mapping[int, Value], x: Sequence[Value], tolerance: float) -> Value:
        """The lanes where all equations are fulfilled, up to `tolerance` times the sum of the
        magnitudes of each equation's terms."""
        b, n = self.b, self.size
        zero = b.constant(0, self.dtype, of_lanes=True)
        given = self._in_memory([right.get(i, zero) for i in range(len(x))])
        y, every = self._in_memory(x), b.variable(BOOL, True)

        def row(i: Value) -> None:
            rest = b.variable(self.dtype, given.load(i))
            total = b.variable(self.dtype, abs(given.load(i)))

            def column(j: Value) -> None:
                entry, now = self.matrix.load(i * n + j), y.load(j)
                rest.set(rest.get() - entry * now)
                total.set(b.mul_add(abs(entry), abs(now), total.get()))

            b.for_(n, column)
            every.set(every.get() & (abs(rest.get()) <= total.get() * tolerance))

        b.for_(n, row)
        return every.get()

    def solve_transposed(self, x: list[Value]) -> None:
        """Solve with the transposed matrix for the components of the block, in place."""
        n = self.size
        y = self._in_memory(x)

        def forwards(k: Value) -> None:
            now = y.load(k) * self.inverse.load(k)
            y.store(k, now)
            self._subtract(y, now, k + 1, n - 1 - k, lambda i: k * n + i)

        def backwards(after: Value) -> None:
            k = n - 1 - after
            now = y.load(k)
            self._subtract(y, now, 0, k, lambda i: k * n + i)

        self.b.for_(n, forwards)
        self.b.for_(n, backwards)
        self._to_values(y, x)

    def _subtract(self, y: Memory, now: Value, first, count, place) -> None:
        """Subtract from `count` numbers, the first of which is `first`, `now` times the entries of
        the factors at `place`."""

        def one(up: Value) -> None:
            i = up + first
            y.store(i, y.load(i) - self.memory.load(place(i)) * now)

        self.b.for_(count, one)

    def _in_memory(self, x: Sequence[Value]) -> Memory:
        y = Memory.on_stack(self.b, self.dtype, self.size, of_lanes=True)
        for place, i in enumerate(self.components):
            y.store(place, self.b.spread(x[i]))
        return y

    def _to_values(self, y: Memory, x: list[Value]) -> None:
        for place, i in enumerate(self.components):
            x[i] = y.load(place)
