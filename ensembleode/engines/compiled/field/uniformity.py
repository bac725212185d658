"""Finds the numbers of a field that are the same in all lanes, which become scalars, and the
branches that all lanes take together, which become jumps.

A branch or a loop that lanes take differently is a region. All lanes compute in it, and variables
from outside are written under a mask. A variable that is declared in the region isn't read
elsewhere, so it needs no mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ....fields import ir
from ....fields.walking import buffers, buffers_of, loads, statements


# The enclosing regions of a statement, from the outermost to the innermost.
Region: TypeAlias = tuple[tuple[int, int], ...]
_Visit: TypeAlias = Callable[[ir.Stmt, Region], None]


class Uniformity:
    """Which numbers and branches of a function are the same in all lanes. `has_lanes` says whether
    there are lanes at all, `own_time` whether the time differs from lane to lane."""

    def __init__(self, fn: ir.Function, *, has_lanes: bool, own_time: bool):
        self.has_lanes = has_lanes
        self.assigned = {s.var.name for s in statements(fn.body) if isinstance(s, ir.Assign)}
        self._places = {key: _joined(found) for key, found in _scratch(fn).items()}
        # The results are read at the end, outside of every region.
        read = (x.buffer for x in loads(fn.outputs))
        self._results: list[object] = [self.place_of(x) for x in read if x.group == "work"]
        self._results += [
            (*key, *part)
            for key, parts in self._places.items()
            if key[0] == "out"
            for part in parts
        ]
        self._varying: set[object] = {"t"} if own_time and has_lanes else set()
        self._declared: dict[str, Region] = {}
        self._homes: dict[object, Region] = {}
        while True:
            before = len(self._varying)
            self._homes = dict.fromkeys(self._results, ())
            # The first pass finds where everything is used, the later ones what follows from that.
            self._block(fn.body, (), self._used)
            self._block(fn.body, (), self._write)
            if len(self._varying) == before:
                break

    def place_of(self, buffer: ir.Buffer) -> tuple[str, np.dtype, int, int]:
        """The scratch memory that a buffer is a part of: its group, dtype, start and end."""
        key = buffer.group, buffer.dtype
        start, end = next(p for p in self._places[key] if p[0] <= buffer.start < p[1])
        return *key, start, end

    def in_lanes(self, buffer: ir.Buffer) -> bool:
        """Whether scratch memory has a number for each lane."""
        return self.place_of(buffer) in self._varying

    def varies(self, expr: ir.Expr) -> bool:
        """Whether the value of an expression differs from lane to lane."""
        match expr:
            case ir.Const():
                return False
            case ir.Var(name, _):
                return name in self._varying
            case ir.Load(buffer, index):
                return self._buffer_varies(buffer) or self._index_varies(index)
            case ir.Op(_, args, _, _):
                return any(map(self.varies, args))

    def is_local(self, target: ir.Var | ir.Buffer, region: Region) -> bool:
        """Whether a variable or buffer is only written in the region where it is declared."""
        if isinstance(target, ir.Var):
            return self._declared[target.name] == region
        return self._homes[self.place_of(target)] == region

    def _buffer_varies(self, buffer: ir.Buffer) -> bool:
        """Whether a buffer has a number for each lane."""
        if buffer.group in ("work", "out"):
            return self.in_lanes(buffer)
        return self.has_lanes and buffer.group not in ("shared", "table")

    def _index_varies(self, index: ir.Index) -> bool:
        return any(self.varies(e) for e, _ in index.terms)

    def _block(self, stmts: Sequence[ir.Stmt], region: Region, visit: _Visit) -> None:
        for stmt in stmts:
            visit(stmt, region)
            match stmt:
                case ir.For(_, _, body):
                    self._block(body, region, visit)
                case ir.While(test, condition, body):
                    inside = self.inside(stmt, condition, region)
                    self._block((*test, *body), inside, visit)
                case ir.Switch(which, cases):
                    for k, case in enumerate(cases):
                        self._block(case, self.inside(stmt, which, region, k), visit)

    def inside(self, stmt: ir.Stmt, by: ir.Expr, region: Region, k: int = 0) -> Region:
        """The region inside of part `k` of a statement that is controlled by the value of `by`."""
        return (*region, (id(stmt), k)) if self.varies(by) else region

    def _used(self, stmt: ir.Stmt, region: Region) -> None:
        for buffer in buffers(stmt):
            if buffer.group in ("work", "out"):
                place = self.place_of(buffer)
                self._homes[place] = _common(self._homes.get(place, region), region)
        if isinstance(stmt, ir.Let):
            self._declared[stmt.var.name] = region

    def _write(self, stmt: ir.Stmt, region: Region) -> None:
        match stmt:
            case ir.Let(var, expr) | ir.Assign(var, expr):
                if self.varies(expr) or not self.is_local(var, region):
                    self._varying.add(var.name)
            case ir.Store(buffer, index, expr):
                if self.varies(expr) or self._index_varies(index):
                    self._varying.add(self.place_of(buffer))
            case ir.Product(out, x, y):
                if self._buffer_varies(x.buffer) or self._buffer_varies(y.buffer):
                    self._varying.add(self.place_of(out.buffer))
        if isinstance(stmt, ir.Store | ir.Product):
            buffer = stmt.buffer if isinstance(stmt, ir.Store) else stmt.out.buffer
            if not self.is_local(buffer, region):
                self._varying.add(self.place_of(buffer))


def _common(first: Region, second: Region) -> Region:
    """The innermost region that contains both regions."""
    pairs = itertools.takewhile(lambda p: p[0] == p[1], zip(first, second, strict=False))
    return tuple(x for x, _ in pairs)


def _scratch(fn: ir.Function) -> dict[tuple[str, np.dtype], set[tuple[int, int]]]:
    """The start and the end of each buffer of scratch memory and of the result."""
    found: dict[tuple[str, np.dtype], set[tuple[int, int]]] = {}
    for buffer in buffers_of(fn):
        if buffer.group in ("work", "out"):
            ends = buffer.start, buffer.start + buffer.size
            found.setdefault((buffer.group, buffer.dtype), set()).add(ends)
    return found


def _joined(parts: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges, where overlapping ones are joined."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(parts):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
