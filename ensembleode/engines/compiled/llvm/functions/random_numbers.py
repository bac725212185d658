"""Random numbers; see [`philox`][ensembleode.fields.philox]."""

from __future__ import annotations

from typing import Any

import numpy as np

from .....fields.philox import box_muller, philox, uniform
from ..builder import Builder, Value
from .logarithms import log_of_normal
from .powers import sqrt


_WORD, _WIDE = np.dtype(np.uint32), np.dtype(np.uint64)


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

    wide = [b.spread(b.cast(x, _WIDE)) for x in operands]
    return philox(product, (wide[0], wide[1]), tuple(wide[2:]))
