"""Random numbers; see [`philox`][ensembleode.solvers.philox].

A lane remembers the normal numbers of the group of steps that its last step was in.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from .....solvers.philox import box_muller, philox, steps_per_group, uniform
from ..builder import BOOL, Builder, ElementPointer, I64, Value
from .logarithms import log_of_normal
from .powers import sqrt


_WORD, _WIDE = np.dtype(np.uint32), np.dtype(np.uint64)
# What lanes remember at first: no number of a group, no start of a piece, and no stream.
NO_WORD = 2**32 - 1


class _Values:
    """The operations of a builder."""

    def __init__(self, b: Builder):
        self.cast, self.where, self.equal = b.cast, b.where, b.equal
        self.sqrt = lambda x: sqrt(b, x)


def philox_normal(b: Builder, operands: list[Value], dtype: np.dtype, which: int) -> Value:
    """Normal number `which` of the block of a counter."""
    words = _words(b, operands)
    radius, angle = (b.cast(x, _WORD) for x in words[which // 2 * 2 :][:2])
    xp: Any = _Values(b)
    return box_muller(xp, lambda x: log_of_normal(b, x), radius, angle, dtype)[which % 2]


def philox_normal_of_step(
    b: Builder, operands: list[Value], dtype: np.dtype, which: tuple[int, int]
) -> Value:
    """A normal number of a step, `which = (i, each)`."""
    i, each = which
    key = "philox_normal_of_step", *map(str, operands), dtype, each
    return b.once_for(key, lambda: _of_group(b, operands, dtype, each))[i]


def _of_group(b: Builder, words: list[Value], dtype: np.dtype, each: int) -> list[Value]:
    """The `each` numbers of a step, from those that the lanes remember."""
    group, width = steps_per_group(each), max(1, b.lanes)
    k0, k1, step, *others = words
    step = b.spread(step)
    number, phase = step >> (group.bit_length() - 1), step & (group - 1)
    # (What all lanes share doesn't change.)
    of = [x for x in (k0, k1, number, *others) if x.lanes or not b.lanes]
    owner = b.lasting_array(_WORD, len(of), fill=NO_WORD)
    numbers = b.lasting_array(dtype, group * each)

    def draw() -> None:
        # (In all lanes: those that have their numbers already get the same ones again.)
        for i in range(group * each):
            counter = [k0, k1, number, b.constant(i // 4, _WORD), *others]
            numbers.store_lanes(i * width, philox_normal(b, counter, dtype, i % 4))
        remember(b, owner, of)

    b.if_(b.any(differs(b, owner, of)), draw)
    first = b.cast(b.entry(phase, b.constant(0, I64)), I64)
    found = [b.variable(dtype) for _ in range(each)]

    def together() -> None:
        for i, x in enumerate(found):
            x.set(numbers.load_lanes((first * each + i) * width))

    def apart() -> None:
        everywhere = b.constant(True, BOOL, of_lanes=True)
        at = b.cast(phase * (each * width), I64) + b.lane_numbers()
        for i, x in enumerate(found):
            x.set(numbers.gather(at + i * width, everywhere, 0.0))

    if b.lanes:
        differ = phase.ne(b.spread(b.cast(first, _WORD)))
        b.if_(b.any(differ), apart, together, likely=False)
    else:
        together()
    return [x.get() for x in found]


def differs(b: Builder, remembered: ElementPointer, words: list[Value]) -> Value:
    """The lanes whose words are others than those remembered."""
    before = [remembered.load_lanes(i * max(1, b.lanes)) for i in range(len(words))]
    pairs = zip(before, words, strict=True)
    return functools.reduce(operator.or_, (x.ne(y) for x, y in pairs))


def remember(b: Builder, memory: ElementPointer, words: list[Value]) -> None:
    for i, x in enumerate(words):
        memory.store_lanes(i * max(1, b.lanes), x)


def philox_uniform(b: Builder, operands: list[Value], dtype: np.dtype, which: int) -> Value:
    """Number `which`, from 0 to 1, of the block of a counter."""
    xp: Any = _Values(b)
    return uniform(xp, b.cast(_words(b, operands)[which], _WORD), dtype)


def _words(b: Builder, operands: list[Value]) -> tuple:
    """The words of a key and a counter. (Instructions that several numbers of a block share are
    written once.)"""

    def product(x: Value, m: int) -> tuple[Value, Value]:
        # Words are in 64 bits, whose upper half counts for nothing. (Machines multiply so.)
        found = (x & 0xFFFFFFFF) * m
        return b.binary("lshr", found, 32), found

    # (A key that all trajectories share stays one number, and so do those of its rounds.)
    wide = [b.cast(x, _WIDE) for x in operands]
    return philox(product, (wide[0], wide[1]), tuple(wide[2:]))
