"""Products of matrices by AMX: float32 in three passes of bfloat16.

Each number is the sum of two bfloat16 numbers, high and low, and what is left, at most 2^-17 of it
(half of the last bit of low). Of the products of the parts, low times low is left out, and the
others are added up in float32 (Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial
intelligence datatype for higher-precision computations", ARITH 2019). So a product's error is at
most 2^-15 of the sum of its terms' magnitudes, where float32 has 2^-24 for each term.

A tile has 16 rows of 64 bytes: of weights 16 rows and 32 terms, of values 16 pairs of terms and 16
lanes, of sums 16 rows and 16 lanes.

Numbers with magnitudes from 3.39e38 on count as infinite, and what float32 makes infinite may be
NaN here. AMX takes subnormal numbers for zeros, so low is lost of numbers below 1e-35.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .builder import Buffer, Builder, F32, I32, I64, Value
from .module import Module
from .reading import Packing


# The name of the algorithm, as `jax.lax.DotAlgorithmPreset` has it.
ALGORITHM = "BF16_BF16_F32_X3"
# The rows of a tile, the lanes of its rows, and how many terms it has.
ROWS = LANES = 16
_TERMS = 32
# The number of 32-bit numbers of a tile.
_SIZE = 256
# The least rows and terms of a product; and its weights, more than the first number and at most the
# second. AMX takes 0.3 us to wake up after as long a rest: with 64 x 64 weights that takes what is
# gained, and a gradient takes 1.03 times as long as by float32; with 128 x 128, 0.7 times.
_LEAST, _FEW, _MOST = 16, 2**12, 2**18
# The tiles of sums, of weights and of values. Four sums hide each other's latency.
_SUMS, _WEIGHTS, _VALUES = (0, 1, 2, 3), (4, 5), (6, 7)


def pays(rows: int, terms: int) -> bool:
    """Whether a product with these weights, or a sum of outer products, is faster by tiles, and its
    weights aren't too many for a stack."""
    return min(rows, terms) >= _LEAST and _FEW < rows * terms <= _MOST


def packed_size(rows: int, terms: int) -> int:
    """How many 32-bit numbers a packed matrix takes."""
    return 2 * _SIZE * -(-rows // ROWS) * -(-terms // _TERMS)


def values_size(terms: int, lanes: int) -> int:
    """How many 32-bit numbers of memory `multiply` needs."""
    return _TERMS * -(-terms // _TERMS) * lanes


class Tiles(Packing):
    """The parts of a matrix of weights as tiles: `[tile of rows, tile of terms, high or low, row,
    term]`, with zeros around the matrix."""

    @property
    def size(self) -> int:
        return packed_size(self.weights.rows, self.weights.columns)

    @property
    def dtype(self) -> np.dtype:
        return I32

    def write(self, weights: Buffer, to: Buffer) -> None:
        b, m, name = weights.builder, self.weights, "pack_weights"
        if not b.module.has(name):
            _write_pack(b.module, name)
        sizes = ", ".join(f"i64 {x}" for x in (*m.strides, m.rows, m.columns))
        b.emit(f"call void @{name}(ptr {weights.base}, {sizes}, ptr {to.base})")


def multiply(
    b: Builder,
    packed: Buffer,
    values: tuple[Buffer, int],
    result: tuple[Buffer, int],
    rows: int,
    terms: int,
    memory: Buffer,
) -> None:
    """Write the product of packed weights, which all lanes share, and one number of each lane for
    each term; the result has one number of each lane for each row.

    **Arguments:** `values`, `result`: where they are, and the distance in memory from term to term,
    or from row to row. `memory`: see `values_size`.
    """
    name = "multiply_by_tiles"
    if not b.module.has(name):
        _write_multiply(b.module, name)
    b.module.uses_tiles = True
    places = ", ".join(f"ptr {at.base}, i64 {stride}" for at, stride in (values, result))
    sizes = f"i64 {rows}, i64 {terms}"
    b.emit(f"call void @{name}(ptr {packed.base}, {places}, {sizes}, ptr {memory.base})")


#
# Packing
#


def _write_pack(module: Module, name: str) -> None:
    sizes = "row_stride", "term_stride", "rows", "terms"
    parameters = ["ptr noalias readonly %weights", *(f"i64 %{x}" for x in sizes)]
    parameters.append("ptr noalias %to")
    with module.function(name, parameters, attributes="noinline") as b:
        b.lanes = LANES
        weights, to = Buffer(b, "%weights", F32), Buffer(b, "%to", I32)
        row_stride, term_stride, rows, terms = (b.parameter(f"%{x}", I64) for x in sizes)
        steps = _tiles(terms, _TERMS)

        def one_row(tile: Value, step: Value, i: Value) -> None:
            row = tile * ROWS + i
            found = []
            for k in range(0, _TERMS, LANES):
                term = b.lane_numbers() + (step * _TERMS + k)
                place = term * term_stride + row * row_stride
                found.append(weights.gather(place, (term < terms) & (row < rows), 0.0))
            at = (tile * steps + step) * (2 * _SIZE) + i * LANES
            for i_part, word in enumerate(_both(b, (found[0], found[1]))):
                to.store_lanes(at + i_part * _SIZE, word)

        def one_step(tile: Value, step: Value) -> None:
            b.for_(ROWS, lambda i: one_row(tile, step, i))

        b.for_(_tiles(rows, ROWS), lambda tile: b.for_(steps, lambda step: one_step(tile, step)))
        b.return_()


def _tiles(n: Value, size: int) -> Value:
    """How many tiles `n` rows or terms take."""
    return (n + (size - 1)) >> (size.bit_length() - 1)


def _rounded(b: Builder, x: Value, y: Value) -> str:
    """The two vectors as one of 32 bfloat16 numbers, rounded to even; its name."""
    intrinsic, type_ = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", "<32 x bfloat>"
    b.module.declare(intrinsic, f"{type_} @{intrinsic}({y.type}, {x.type})")
    found = b.pure(f"call {type_} @{intrinsic}({y}, {x})", I32, 0).name
    return b.pure(f"bitcast {type_} {found} to <32 x i16>", I32, 0).name


def _shuffled(b: Builder, rounded: str, places: list[int]) -> str:
    mask = ", ".join(f"i32 {i}" for i in places)
    type_ = f"<{len(places)} x i32>"
    return b.pure(
        f"shufflevector <32 x i16> {rounded}, <32 x i16> poison, {type_} <{mask}>", I32, 0
    ).name


def _halves(b: Builder, rounded: str) -> list[Value]:
    """The first and the last 16 of 32 bfloat16 numbers, as float32."""
    found = []
    for start in (0, LANES):
        half = _shuffled(b, rounded, list(range(start, start + LANES)))
        word = b.pure(f"zext <16 x i16> {half} to <16 x i32>", I32, LANES)
        found.append(b.bitcast(word << 16, F32))
    return found


def _as_words(b: Builder, rounded: str) -> Value:
    """Neighbouring numbers as one of 32 bits, the first in its lower half."""
    return b.pure(f"bitcast <32 x i16> {rounded} to <16 x i32>", I32, LANES)


#
# Multiplying
#


def _write_multiply(module: Module, name: str) -> None:
    """Write the function that splits the values, and then multiplies."""
    sizes = "value_stride", "result_stride", "rows", "terms"
    parameters = ["ptr noalias readonly %weights", "ptr noalias readonly %values"]
    parameters += ["i64 %value_stride", "ptr noalias %result", "i64 %result_stride"]
    parameters += ["i64 %rows", "i64 %terms", "ptr noalias %halves"]
    with module.function(name, parameters, attributes="noinline") as b:
        width, b.lanes = b.lanes, LANES
        value_stride, result_stride, rows, terms = (b.parameter(f"%{x}", I64) for x in sizes)
        values, halves = Buffer(b, "%values", F32), Buffer(b, "%halves", I32)
        steps = _tiles(terms, _TERMS)
        low = halves.offset(steps * (_TERMS // 2 * width))
        _split(b, values, value_stride, terms, steps, (halves, low), width)
        weights, result = Buffer(b, "%weights", I32), Buffer(b, "%result", F32)
        loops = _Tiles(b, weights, (halves, low), steps, rows, width)

        def store(register: int, row: Value, lane: int) -> None:
            def whole() -> None:
                place = row * result_stride + lane
                _move(b, "tilestored64", register, result, place, result_stride * 4)

            def one(i: Value, found: Value) -> None:
                result.store_lanes((row + i) * result_stride + lane, found)

            b.if_(rows - row >= ROWS, whole, lambda: loops.each_row(register, row, one))

        loops.write(store)
        b.return_()


def _split(
    b: Builder,
    values: Buffer,
    stride: Value,
    terms: Value,
    steps: Value,
    parts: tuple[Buffer, Buffer],
    width: int,
) -> None:
    """Write the high and the low parts of the values, as pairs of terms: `[pair, lane]`."""
    pairs = terms >> 1

    def store(pair: Value, part: int, first: Value, second: Value) -> None:
        now = first, second
        for to in parts:
            rounded = _rounded(b, *now)
            places = [j for i in range(LANES) for j in (i, i + LANES)]
            word = _as_words(b, _shuffled(b, rounded, places))
            to.store_lanes(pair * width + part, word)
            whole = word << 16, word & np.int32(-(2**16))
            now = tuple(x - b.bitcast(y, F32) for x, y in zip(now, whole, strict=True))

    def one(pair: Value) -> None:
        for part in range(0, width, LANES):
            at = pair * 2 * stride + part
            store(pair, part, values.load_lanes(at), values.load_lanes(at + stride))

    b.for_(pairs, one)
    zero = b.constant(0, F32, of_lanes=True)

    def last() -> None:
        for part in range(0, width, LANES):
            store(pairs, part, values.load_lanes(pairs * 2 * stride + part), zero)

    b.if_((terms & 1).ne(0), last)
    filled = (terms + 1) >> 1

    def fill(i: Value) -> None:
        for part in range(0, width, LANES):
            for to in parts:
                to.store_lanes((filled + i) * width + part, b.constant(0, I32, of_lanes=True))

    b.for_(steps * (_TERMS // 2) - filled, fill)


class _Tiles:
    """Writes the loops over tiles."""

    def __init__(
        self,
        b: Builder,
        weights: Buffer,
        parts: tuple[Buffer, Buffer],
        steps: Value,
        rows: Value,
        width: int,
    ):
        self.b, self.weights, self.parts, self.steps = b, weights, parts, steps
        self.rows, self.width = rows, width
        self._one_tile = b.array(F32, _SIZE)

    def write(self, store: Callable[[int, Value, int], None]) -> None:
        """All rows, by blocks of as many tiles as there are sums. `store(register, row, lane)`
        stores the tile of sums from this row and this lane on."""
        b, tiles = self.b, _tiles(self.rows, ROWS)
        columns = min(2, self.width // LANES)
        most = len(_SUMS) // columns

        def block(first: Value, n: int) -> None:
            for lane in range(0, self.width, columns * LANES):
                for register, i, j in self._block(first, n, lane, columns):
                    store(register, (first + i) * ROWS, lane + j * LANES)

        whole = b.binary("udiv", tiles, b.constant(most, I64))
        b.for_(whole, lambda i: block(i * most, most))
        done, n = whole * most, most // 2
        while n:
            b.if_((tiles & n).ne(0), functools.partial(block, done, n))
            done, n = done + (tiles & n), n // 2

    def _block(self, first: Value, n: int, lane: int, columns: int) -> list[tuple[int, int, int]]:
        """Add up the products of `n` tiles of rows and the lanes of so many tiles. Returns the
        registers of the sums, with the numbers of their tiles."""
        b = self.b
        sums = {(i, j): _SUMS[i * columns + j] for i in range(n) for j in range(columns)}
        for x in sums.values():
            _call(b, "tilezero", x)

        def weights(step: Value, i: int, low: int) -> None:
            place = ((first + i) * self.steps + step) * (2 * _SIZE) + low * _SIZE
            _move(b, "tileloadd64", _WEIGHTS[i % 2], self.weights, place, 4 * LANES)

        def values(step: Value, register: int, j: int, low: int) -> None:
            place = step * (_TERMS // 2 * self.width) + (lane + j * LANES)
            _move(b, "tileloadd64", register, self.parts[low], place, 4 * self.width)

        def add(rows: range, register: Callable[[int], int]) -> None:
            for i in rows:
                for j in range(columns):
                    _call(b, "tdpbf16ps", sums[i, j], _WEIGHTS[i % 2], register(j))

        def one(step: Value) -> None:
            # Three passes, in this order for each sum: high times low, high, and low times high.
            # With two columns, high takes the registers of low.
            if columns == 1:
                values(step, _VALUES[1], 0, 1)
                values(step, _VALUES[0], 0, 0)
            for start in range(0, n, 2):
                rows = range(start, min(n, start + 2))
                for i in rows:
                    weights(step, i, 0)
                for low in (1, 0):
                    if columns == 2:
                        for j in range(columns):
                            values(step, _VALUES[j], j, low)
                    add(rows, lambda j, low=low: _VALUES[j if columns == 2 else low])
                for i in rows:
                    weights(step, i, 1)
                add(rows, lambda j: _VALUES[j])

        b.for_(self.steps, one)
        return [(x, i, j) for (i, j), x in sums.items()]

    def each_row(self, register: int, row: Value, body: Callable[[Value, Value], None]) -> None:
        """Call `body(i, sums)` for each row of a tile that begins with this row."""
        b = self.b
        _move(b, "tilestored64", register, self._one_tile, 0, 4 * LANES)
        left = b.minimum(self.rows - row, ROWS)
        b.for_(left, lambda i: body(i, self._one_tile.load_lanes(i * LANES)))


def _call(b: Builder, name: str, *registers: int) -> None:
    kinds = ", ".join(["i8"] * len(registers))
    b.module.declare(f"llvm.x86.{name}", f"void @llvm.x86.{name}({kinds})")
    b.emit(f"call void @llvm.x86.{name}({', '.join(f'i8 {x}' for x in registers)})")


def _move(
    b: Builder, name: str, register: int, buffer: Buffer, place: Value | int, stride: Value | int
) -> None:
    """Load or store a tile; `stride` is the distance of its rows in bytes."""
    b.module.declare(f"llvm.x86.{name}", f"void @llvm.x86.{name}(i8, ptr, i64)")
    stride = b.as_value(stride, I64)
    b.emit(f"call void @llvm.x86.{name}(i8 {register}, ptr {buffer.pointer(place)}, {stride})")


#
# Sums of outer products
#


# The columns whose sums are made together, of which there is a tile for each 16.
_COLUMNS = 2 * LANES


class Factors(NamedTuple):
    """Vectors of 16 lanes. Those of number `i` of call `k` lie side by side in memory, from
    `base[start + k * each + i * stride]` on."""

    base: Buffer
    each: int
    start: int
    stride: int


def outer_size(rows: int, vectors: int) -> int:
    """How many 32-bit numbers of memory `add_outer` needs for as many vectors of each number."""
    steps = -(-vectors * LANES // _TERMS)
    return packed_size(rows, vectors * LANES) + steps * _TERMS * _COLUMNS


def add_outer(
    b: Builder,
    left: Factors,
    right: Factors,
    calls: Value,
    parts: int,
    sums: tuple[Buffer, int],
    size: tuple[int, int],
    memory: Buffer,
) -> None:
    """Add to `sums[row, column]` the products of left's number `row` and right's number `column`,
    over the lanes of all vectors of all calls.

    **Arguments:** `sums`: where they are, and the distance from row to row. `size`: the rows and
    the columns. `memory`: see `outer_size`.
    """
    assert b.lanes == LANES
    name = f"add_outer_by_tiles_{parts}"
    if not b.module.has(name):
        _write_outer(b.module, name, parts)
    b.module.uses_tiles = True
    places = [x for f in (left, right) for x in (f.base, f.each, f.start, f.stride)]
    given = [*places, calls, *sums, *size, memory]
    args = (
        f"ptr {x.base}" if isinstance(x, Buffer) else f"i64 {x}" if isinstance(x, int) else str(x)
        for x in given
    )
    b.emit(f"call void @{name}({', '.join(args)})")


def _write_outer(module: Module, name: str, parts: int) -> None:
    factors = [
        f"{kind} %{side}{x}"
        for side in ("left", "right")
        for kind, x in (("ptr", ""), ("i64", "_each"), ("i64", "_start"), ("i64", "_stride"))
    ]
    parameters = [*factors, "i64 %calls", "ptr noalias %sums", "i64 %row_stride", "i64 %rows"]
    parameters += ["i64 %columns", "ptr noalias %memory"]
    with module.function(name, parameters, attributes="noinline") as b:
        b.lanes = LANES
        calls, row_stride, rows, columns = (
            b.parameter(f"%{x}", I64) for x in ("calls", "row_stride", "rows", "columns")
        )
        sums, packed = Buffer(b, "%sums", F32), Buffer(b, "%memory", I32)
        steps = (calls * parts + 1) >> 1
        high = packed.offset(_tiles(rows, ROWS) * steps * (2 * _SIZE))
        halves = high, high.offset(steps * (_TERMS // 2 * _COLUMNS))
        load = {side: _loader(b, side, calls, parts) for side in ("left", "right")}

        def pack_row(step: Value, row: Value) -> None:
            at = ((row >> 4) * steps + step) * (2 * _SIZE) + (row & (ROWS - 1)) * LANES
            for i, word in enumerate(_both(b, load["left"](step, row))):
                packed.store_lanes(at + i * _SIZE, word)

        b.for_(steps, lambda step: b.for_(rows, lambda row: pack_row(step, row)))
        loops = _Tiles(b, packed, halves, steps, rows, _COLUMNS)
        straight = [b.array(I32, _SIZE) for _ in halves]

        def pack_columns(first: Value, step: Value) -> None:
            for tile in range(0, _COLUMNS, LANES):

                def one(i: Value, tile=tile) -> None:
                    column = b.minimum(first + (i + tile), columns - 1)
                    words = _both(b, load["right"](step, column))
                    for to, word in zip(straight, words, strict=True):
                        to.store_lanes(i * LANES, word)

                b.for_(LANES, one)
                for start, to in zip(straight, halves, strict=True):
                    found = b.transposed([start.load_lanes(i * LANES) for i in range(LANES)])
                    for i, word in enumerate(found):
                        pair = step * (_TERMS // 2) + i
                        to.store_lanes(pair * _COLUMNS + tile, word)

        def some_columns(i: Value) -> None:
            first = i * _COLUMNS
            b.for_(steps, lambda step: pack_columns(first, step))

            def store(register: int, row: Value, lane: int) -> None:
                column = b.lane_numbers() + (first + lane)
                inside = column < columns

                def one(i: Value, found: Value) -> None:
                    place = (row + i) * row_stride + column
                    sums.scatter(place, inside, sums.gather(place, inside, 0.0) + found)

                def whole(i: Value, found: Value) -> None:
                    place = (row + i) * row_stride + (first + lane)
                    sums.store_lanes(place, sums.load_lanes(place) + found)

                b.if_(
                    first + (lane + LANES) <= columns,
                    lambda: loops.each_row(register, row, whole),
                    lambda: loops.each_row(register, row, one),
                )

            loops.write(store)

        b.for_(_tiles(columns, _COLUMNS), some_columns)
        b.return_()


def _loader(
    b: Builder, side: str, calls: Value, parts: int
) -> Callable[[Value, Value], tuple[Value, Value]]:
    """A function that returns the two vectors of a number that are terms of a step; the last one
    may be missing, and is zero."""
    base = Buffer(b, f"%{side}", F32)
    each, start, stride = (b.parameter(f"%{side}_{x}", I64) for x in ("each", "start", "stride"))

    def load(step: Value, number: Value) -> tuple[Value, Value]:
        if parts == 1:
            at = number * stride + start
            first = step * 2
            second = b.minimum(first + 1, calls - 1)
            x, y = (base.load_lanes(call * each + at) for call in (first, second))
            return x, b.where(second > first, y, 0.0)
        half = parts // 2
        call = step >> (half.bit_length() - 1)
        at = start + call * each + number * stride + (step & (half - 1)) * (2 * LANES)
        return base.load_lanes(at), base.load_lanes(at + LANES)

    return load


def _both(b: Builder, vectors: tuple[Value, Value]) -> list[Value]:
    """The high and the low parts of two vectors, as pairs of neighbours."""
    high = _rounded(b, *vectors)
    left = (x - y for x, y in zip(vectors, _halves(b, high), strict=True))
    return [_as_words(b, high), _as_words(b, _rounded(b, *left))]
