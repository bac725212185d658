"""The sums of the cotangents of many parameters, in memory.

A call of a transposed field stores the factors of outer products (see
`fields/derivatives/outer_products.py`). The factors are collected over many calls and then
multiplied as blocked products, whose inner length is calls times lanes, so that each sum is seldom
read and written. For a trajectory's own parameters, each lane has sums of its own, and the inner
length is the number of calls. Other lanes' ends decide after which calls these products are added
up. The bits don't depend on that, as each sum grows call by call: a second term for the same
parameter goes to another sum, in another layer.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence

from ....fields.derivatives.outer_products import (
    FactoredProgram,
    MatrixPlaces,
    OuterProductTerm,
    ScatteredTerm,
)
from ..llvm.across_lanes import for_each_lane, sums_of_lanes
from ..llvm.builder import Builder, ElementPointer, I64, Value, Variable
from ..llvm.machine import current
from .panels import Panels, suits
from .products import in_parts, room
from .reading import Memory


# The bytes of factors that are collected before they are multiplied, which should stay in a cache.
_COLLECTED = 2**19
# More calls than this are not worth collecting.
_MOST_CALLS = 64
# How many tiles of rows are gone through for the same columns.
_TILES = 4
# How many terms one function adds up. (LLVM's NewGVN fails at a hundred such loops.)
_TERMS = 32


class ParameterSums:
    """The sums, and the memory in which factors are collected for them.

    **Arguments:**

    - `memory`: memory for the sums of lanes and for the factors; after the code of all calls has
        been written, `length` says how many numbers it has to have.
    - `sums [block, number]`: the sums of blocks of trajectories.
    - `own`, `shared`: how many sums there are for each lane, and for each block. In the numbering
        that terms refer to, those for each lane come first.
    """

    def __init__(
        self, b: Builder, memory: ElementPointer, sums: ElementPointer, own: int, shared: int
    ):
        self.b, self.memory, self._sums = b, memory, sums
        self.n_own, self.n_shared = own, shared
        self.length = 0
        # Where the layers of the sums of lanes begin.
        self._layers: list[int] = []
        # Where the sums of the current block begin.
        self._start = b.variable(I64, 0, of_lanes=False)
        self._collections: list[CallResults] = []
        self._beginning = b.position

    @property
    def sums(self) -> ElementPointer:
        """The sums of the current block."""
        return self._sums.offset(self._start.get())

    def collection(self, name: str, program: FactoredProgram, kept: int) -> "CallResults":
        """Memory for the results of a function's calls, the first `kept` of which are no
        factors."""
        layers = [(self.layer(), own) for own in _in_layers(program, self.n_own)]
        with self.b.inserting(self._beginning):
            calls = self.b.variable(I64, 0, of_lanes=False)
        found = CallResults(self, self.length, calls, name, program, kept, layers)
        self.length += found.length
        self._collections.append(found)
        return found

    def layer(self) -> int:
        """Where a new layer of sums of lanes begins, which are zeros at first."""
        b, start = self.b, self.length
        self._layers.append(start)
        self.length += self.n_own * max(1, b.lanes)
        zero = b.constant(0, self.memory.dtype, of_lanes=True)
        with b.inserting(self._beginning):
            sums = Memory(self.memory.offset(start), of_lanes=True)
            b.for_(self.n_own, lambda i: sums.store(i, zero))
        return start

    def begin(self, block: Value) -> None:
        """Begin the sums of a block of trajectories."""
        self._start.set(block * self.n_shared)
        sums, zero = self.sums, self.b.constant(0, self._sums.dtype)
        self.b.for_(self.n_shared, lambda i: sums.store(i, zero))

    def end(self) -> None:
        """Add what is still collected to the sums."""
        for x in self._collections:
            x.add_up()

    def take(self, mask: Value, write: Callable[[Value, Value, Value], None]) -> None:
        """Take the sums out of the lanes of the mask, whose sums begin anew:
        `write(lane, number, sum)` is called for each. The code of all calls has been written."""
        if not self.n_own:
            return
        b, width = self.b, max(1, self.b.lanes)
        self.end()
        zero = b.constant(0, self.memory.dtype)

        def one_lane(lane: Value) -> None:
            of_lane = [self.memory.offset(lane + start) for start in self._layers]

            def one(i: Value) -> None:
                found = [x.load(i * width) for x in of_lane] or [zero]
                write(lane, i, functools.reduce(operator.add, found))
                for x in of_lane:
                    x.store(i * width, zero)

            b.for_(self.n_own, one)

        for_each_lane(b, mask, one_lane)


class CallResults:
    """The results of calls of one function: `[call, number, lane]`."""

    def __init__(
        self,
        sums: ParameterSums,
        start: int,
        calls: Variable,
        name: str,
        program: FactoredProgram,
        kept: int,
        layers: Sequence[tuple[int, Sequence]],
    ):
        self.b, self._sums, self._start, self._name = sums.b, sums, start, f"{name}_sums"
        self._program, self.kept, self._layers = program, kept, layers
        self.dtype, self.each = sums.memory.dtype, (kept + program.size) * max(1, self.b.lanes)
        fitting = _COLLECTED // (self.each * self.dtype.itemsize)
        self._most = max(1, min(_MOST_CALLS, fitting))
        self.length = self._most * self.each
        self._calls = calls

    def next(self) -> Memory:
        """The memory for the results of the next call."""
        place = self._calls.get() * self.each + self._start
        return Memory(self._sums.memory.offset(place), of_lanes=True)

    def add(self, mask: Value) -> None:
        """Add the factors that the last call has stored there, in the lanes of the mask."""
        b = self.b
        factors = self.next().moved(self.kept)
        size = self.each // max(1, b.lanes) - self.kept

        def clear(i: Value) -> None:
            factors.store(i, b.where(mask, factors.load(i), 0.0))

        b.if_(b.any(~mask), lambda: b.for_(size, clear))
        self._calls.set(self._calls.get() + 1)
        b.if_(self._calls.get() >= self._most, self.add_up, likely=False)

    def add_up(self) -> None:
        """Add the products of the collected factors to the sums."""
        b, memory = self.b, self._sums.memory
        factors, to = memory.offset(self._start), self._sums.sums
        parts = [(memory.offset(at), x, True) for at, own in self._layers for x in _split(own)]
        for terms in (self._program.terms, self._program.scattered):
            parts += [(to, x, False) for x in _split(_shared(terms, self._sums.n_own))]
        for i, (sums, terms, is_own) in enumerate(parts):
            name = f"{self._name}_{i}"
            if not b.module.has(name):
                self._write(name, terms, is_own)
            b.emit(f"call void @{name}(ptr {factors.base}, {self._calls.get()}, ptr {sums.base})")
        self._calls.set(0)

    def _write(self, name: str, terms: Sequence, is_own: bool) -> None:
        """Write the function that adds some of the terms to the sums."""
        b = self.b
        kind = _Entries if isinstance(terms[0], ScatteredTerm) else _Products
        parameters = ["ptr noalias readonly %factors", "i64 %calls", "ptr noalias %sums"]
        with b.module.function(name, parameters, attributes="noinline") as inside:
            # (A register at a time: the tiles of sums are squarer.)
            inside.lanes = min(b.lanes, current().lanes(self.dtype))
            kind(inside, self, is_own=is_own).write(terms)
            inside.return_()


def _split(terms: Sequence) -> Iterator[Sequence]:
    """The terms in parts, each of which one function adds up."""
    return (terms[start : start + _TERMS] for start in range(0, len(terms), _TERMS))


def _shared(terms: Sequence, n_own: int) -> list:
    """The terms of shared parameters, which begin at zero."""
    shared = [x for x in terms if x.to.start >= n_own]
    return [x._replace(to=x.to._replace(start=x.to.start - n_own)) for x in shared]


def _in_layers(program: FactoredProgram, n_own: int) -> list[Sequence]:
    """The terms of the lanes' own sums in layers, in which one function adds up each sum."""
    layers: list[list[OuterProductTerm]] = []
    for term in program.terms:
        if term.to.start < n_own:
            free = [x for x in layers if not any(_overlap(term, y) for y in x)]
            if not free:
                layers.append([])
                free = layers[-1:]
            free[0].append(term)
    scattered = [x for x in program.scattered if x.to.start < n_own]
    return [*layers, *_split(scattered)]


def _overlap(x: OuterProductTerm, y: OuterProductTerm) -> bool:
    """Whether two terms may go to the same sums."""

    def last(z: OuterProductTerm) -> int:
        return z.to.start + (z.rows - 1) * z.to.first + (z.columns - 1) * z.to.second

    return x.to.start <= last(y) and y.to.start <= last(x)


class _Sums:
    """Writes the code that adds terms of the collected results of calls to sums, which each lane
    has for itself if `is_own`. The lanes fall into `parts`, each of the builder's width."""

    def __init__(self, b: Builder, collection: CallResults, *, is_own: bool):
        self.b, self.is_own, dtype = b, is_own, collection.dtype
        self._factors, self.sums = (ElementPointer(b, f"%{x}", dtype) for x in ("factors", "sums"))
        self._calls = b.parameter("%calls", I64)
        self._each, self._kept = collection.each, collection.kept
        self.parts = max(1, collection.b.lanes) // max(1, b.lanes)

    def panels(self, term: OuterProductTerm) -> Panels | None:
        """The `Panels` of a term; None where transposing its columns is not worth it."""
        b, term = self.b, term.side_by_side()
        if not suits(b, term, current().lanes(self.sums.dtype)):
            return None
        unit = self.parts * b.lanes
        factors = self._factors.offset(self._kept * unit)
        return Panels(b, term, factors, self._calls, self._each, unit, self.sums)

    def for_each_call(self, body: Callable[[Memory], None]) -> None:
        """Run `body(factors)` for each call; number `i` of one part is at index `i * parts`."""

        def one(number: Value) -> None:
            at = Memory(self._factors.offset(number * self._each), of_lanes=True)
            body(at.moved(self._kept * self.parts))

        self.b.for_(self._calls, one)


class _Products(_Sums):
    """Products, one term after the other."""

    def write(self, terms: Sequence[OuterProductTerm]) -> None:
        for term in terms:
            self._term(term)

    def _term(self, term: OuterProductTerm) -> None:
        b = self.b
        if not self.is_own and (panels := self.panels(term)):
            panels.write()
            return
        at_once = max(1, room(b) // (max(1, b.lanes) * self.sums.dtype.itemsize))
        if term.right is None:
            in_parts(b, term.rows, at_once, lambda row, n: self._tile(term, row, n, 0, 1))
            return
        tile_rows = max(1, min(term.rows, math.isqrt(at_once)))
        tile_columns = min(term.columns, at_once // tile_rows)

        def rows(first: Value | int, n: int) -> None:
            def columns(column: Value | int, n_columns: int) -> None:
                for start in range(0, n, tile_rows):
                    size = min(tile_rows, n - start)
                    self._tile(term, first + start, size, column, n_columns)

            in_parts(b, term.columns, tile_columns, columns)

        in_parts(b, term.rows, tile_rows * _TILES, rows)

    def _tile(
        self,
        term: OuterProductTerm,
        row: Value | int,
        n_rows: int,
        column: Value | int,
        n_columns: int,
    ) -> None:
        """Add up some rows and columns, over all calls."""
        b, dtype = self.b, self.sums.dtype
        totals = [b.variable(dtype, 0) for _ in range(n_rows * n_columns)]
        places = [
            _place(term.to, row + i, column + j)
            for i, j in itertools.product(range(n_rows), range(n_columns))
        ]

        def product(at: Memory, c: Value | int) -> None:
            def load(number: Value | int) -> Value:
                return at.load(number * self.parts)

            left = [load(_place(term.left, row + i, c)) for i in range(n_rows)]
            if (y := term.right) is None:
                for total, value in zip(totals, left, strict=True):
                    total.set(total.get() + value)
                return
            right = [load(_place(y, c, column + j)) for j in range(n_columns)]
            for total, (u, v) in zip(totals, itertools.product(left, right), strict=True):
                total.set(b.mul_add(u, v, total.get()))

        def call(at: Memory) -> None:
            if term.inner == 1:
                product(at, 0)
            else:
                b.for_(term.inner, lambda c: product(at, c))

        def every_part(at: Memory) -> None:
            for part in range(self.parts):
                call(at.moved(part))

        if not self.is_own:
            self.for_each_call(every_part)
            found = sums_of_lanes(b, [x.get() for x in totals])
            for total, to in zip(found, places, strict=True):
                self.sums.store(to, self.sums.load(to) + total)
            return

        # (The sums themselves are added to: the bits don't depend on how many calls there are.)
        def one_part(part: Value | int) -> None:
            sums = Memory(self.sums, of_lanes=True).moved(part)
            at_part = [to * self.parts for to in places]
            for total, to in zip(totals, at_part, strict=True):
                total.set(sums.load(to))
            self.for_each_call(lambda at: call(at.moved(part)))
            for total, to in zip(totals, at_part, strict=True):
                sums.store(to, total.get())

        if self.parts == 1:
            one_part(0)
        else:
            b.for_(self.parts, one_part)


class _Entries(_Sums):
    """Numbers that are added to computed places of the sums, call by call."""

    def write(self, terms: Sequence[ScatteredTerm]) -> None:
        add = self._add_own if self.is_own else self._add_shared

        def call(at: Memory) -> None:
            for term in terms:
                self.b.for_(term.rows, lambda i, term=term: add(at, term, i))

        self.for_each_call(call)

    def _add_own(self, at: Memory, term: ScatteredTerm, i: Value) -> None:
        b, parts = self.b, self.parts
        sums = Memory(self.sums, of_lanes=True)
        for part in range(parts):
            here = at.moved(part)
            number = b.cast(here.load(_place(term.number, i) * parts), I64)
            value = here.load(_place(term.left, i) * parts)
            place = _place(term.to, number) * parts + part
            sums.store(place, sums.load(place) + value)

    def _add_shared(self, at: Memory, term: ScatteredTerm, i: Value) -> None:
        b, width = self.b, self.parts * max(1, self.b.lanes)

        def one_lane(lane: Value) -> None:
            number = b.cast(at.buffer.load(_place(term.number, i) * width + lane), I64)
            value = at.buffer.load(_place(term.left, i) * width + lane)
            place = _place(term.to, number)
            self.sums.store(place, self.sums.load(place) + value)

        b.for_(width, one_lane)


def _place(places: MatrixPlaces, first: Value | int, second: Value | int = 0) -> Value | int:
    return first * places.first + (second * places.second + places.start)
