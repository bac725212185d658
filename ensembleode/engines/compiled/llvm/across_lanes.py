"""Operations across the lanes of vectors, and on magnitudes, for which machines have shuffles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ....solvers.arithmetic import Components
from .builder import BOOL, Builder, F64, I64, Value


def sums_of_lanes(b: Builder, xs: Sequence[Value]) -> list[Value]:
    """The sum of each vector's entries as a scalar, by adding halves of vectors."""
    vectors, entries = list(xs), xs[0].lanes
    if not entries:
        return vectors
    while entries > 1:
        # In each vector, so many entries in a row belong to the same sum.
        lanes, half = vectors[0].lanes, entries // 2
        pairs = [(vectors[i], *vectors[i + 1 : i + 2]) for i in range(0, len(vectors), 2)]
        both = 2 if len(vectors) > 1 else 1
        firsts = [i + j for i in range(0, both * lanes, entries) for j in range(half)]
        halves = firsts, [i + half for i in firsts]
        vectors = [
            b.add(*(_shuffled(b, pair[0], pair[-1], places) for places in halves)) for pair in pairs
        ]
        entries = half
    each = vectors[0].lanes
    return [
        b.pure(f"extractelement {vectors[i // each]}, i32 {i % each}", x.dtype, 0)
        for i, x in enumerate(xs)
    ]


def transposed(b: Builder, xs: Sequence[Value]) -> list[Value]:
    """As many vectors as they have entries, whose rows and columns are exchanged."""
    n = xs[0].lanes
    assert len(xs) == n
    # (The halves of all entries are put between each other as often as it takes.)
    first = [i // 2 + n * (i % 2) for i in range(n)]
    second = [i + n // 2 for i in first]
    for _ in range(n.bit_length() - 1):
        pairs = list(zip(xs[: n // 2], xs[n // 2 :], strict=True))
        xs = [_shuffled(b, x, y, places) for x, y in pairs for places in (first, second)]
    return list(xs)


def _shuffled(b: Builder, x: Value, y: Value, places: Sequence[int]) -> Value:
    """The entries at these places of two vectors, of which the second follows the first."""
    mask = ", ".join(f"i32 {i}" for i in places)
    return b.pure(
        f"shufflevector {x}, {y.type} {y.name}, <{len(places)} x i32> <{mask}>",
        x.dtype,
        len(places),
    )


def largest_magnitude(b: Builder, components: Components) -> Value:
    """The largest absolute value. Where some are NaN, it is NaN or that of the others."""
    first = components[0]
    each = 64 // first.dtype.itemsize
    if not b.module.has_range or first.lanes % each or not first.lanes:
        return functools.reduce(b.maximum, map(abs, components))
    parts = [
        functools.reduce(
            functools.partial(_range, b), [_shuffled(b, x, x, places) for x in components]
        )
        for places in (range(i, i + each) for i in range(0, first.lanes, each))
    ]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_shuffled(b, x, y, range(2 * x.lanes)) for x, y in pairs]
    return parts[0]


def _range(b: Builder, x: Value, y: Value) -> Value:
    """The larger magnitude in each lane of two registers, by AVX-512."""
    type_, mask, kind = x.type, f"i{x.lanes}", "pd" if x.dtype == F64 else "ps"
    name = f"llvm.x86.avx512.mask.range.{kind}.512"
    b.module.declare(name, f"{type_} @{name}({type_}, {type_}, i32, {type_}, {mask}, i32)")
    # 11: the larger magnitude, without its sign; -1: in all lanes; 4: rounded as always.
    options = f"i32 11, {type_} zeroinitializer, {mask} -1, i32 4"
    return b.pure(f"call {type_} @{name}({x}, {y}, {options})", x.dtype, x.lanes)


def for_each_lane(b: Builder, mask: Value, body: Callable[[Value], None]) -> None:
    """Run `body(lane)` for each lane of the mask in turn; `lane` is a scalar int64."""
    if not mask.lanes:
        b.if_(mask, lambda: body(b.constant(0, I64)))
        return
    assert mask.lanes <= 64, mask.lanes
    bits = b.bits(mask)
    if mask.lanes < 64:
        wide = b.pure(f"zext {bits} to i64", I64, 0)
    else:
        wide = Value(b, bits.split()[1], I64, 0)
    left = b.variable(I64, wide, of_lanes=False)

    def one():
        now = left.get()
        body(b.call("llvm.cttz.i64", I64, 0, now, b.constant(True, BOOL)))
        left.set(now & (now - 1))

    b.while_(lambda: left.get().ne(0), one)
