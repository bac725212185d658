"""Removes arrays that are only moved copies of others, such as rolled, padded or joined ones: what
reads them reads the originals instead.

A loop that reads an array whose parts come from different places is split where one part ends and
the next begins. All operations, and their order, stay the same.
"""

from __future__ import annotations

import dataclasses as dc
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .. import ir, tuning
from ..walking import expressions, is_flat, loads, statements


# Groups that are read as fast as scratch memory. (A trajectory's own numbers are gathered.)
_NEAR = ("u", "tangent", "forward", "shared", "table", "work")


def forwarded(fn: ir.Function) -> ir.Function:
    """The same function without arrays that are only moved copies of others."""
    forwarding = _Forwarding()
    body = [x for stmt in fn.body for x in forwarding.through(stmt)]
    return dc.replace(fn, body=tuple(_used(body, fn.outputs)))


@dc.dataclass(frozen=True)
class _Range:
    """The elements `start` to `end - 1` of the memory of a group and a dtype."""

    group: str
    dtype: np.dtype
    start: int
    end: int

    def _is_beside(self, other: _Range) -> bool:
        return self.group == other.group and self.dtype == other.dtype

    def meets(self, other: _Range) -> bool:
        return self._is_beside(other) and self.start < other.end and other.start < self.end

    def has(self, other: _Range) -> bool:
        return self._is_beside(other) and self.start <= other.start and other.end <= self.end

    def without(self, other: _Range) -> Iterator[_Range]:
        """What is left of this range without the other."""
        if not self.meets(other):
            yield self
            return
        if self.start < other.start:
            yield dc.replace(self, end=other.start)
        if other.end < self.end:
            yield dc.replace(self, start=other.end)


def _whole_buffer(buffer: ir.Buffer) -> _Range:
    return _Range(buffer.group, buffer.dtype, buffer.start, buffer.start + buffer.size)


def _range(buffer: ir.Buffer, index: ir.Index, var: ir.Var | None, n: int) -> _Range | None:
    """The elements with this index while `var` runs from 0 to `n - 1`; None where they don't lie
    side by side, or aren't known."""
    first = buffer.start + index.offset
    if index.terms and index.terms != ((var, 1),):
        return None
    return _Range(buffer.group, buffer.dtype, first, first + (n if index.terms else 1))


def _written(stmt: ir.Stmt) -> Iterator[_Range]:
    """The ranges of memory that a statement may write to."""
    var, n = (stmt.var, stmt.n) if isinstance(stmt, ir.For) else (None, 1)
    for x in statements([stmt]):
        match x:
            case ir.Store(buffer, index, _):
                yield _range(buffer, index, var, n) or _whole_buffer(buffer)
            case ir.Product(out, _, _):
                yield _whole_buffer(out.buffer)


class _MovedElements:
    """The elements `target`, to which a statement, or a loop with the counter `var`, has stored
    `expr`, which reads the elements `sources`."""

    def __init__(self, target: _Range, var: ir.Var | None, expr: ir.Expr, sources: list[_Range]):
        # The parts of the target that have not been overwritten since.
        self.left = [target]
        self.sources = sources
        self._start, self._var, self._expr = target.start, var, expr

    def element(self, start: int, counter: ir.Var | None) -> ir.Expr:
        """Element `start + counter` of the memory."""
        return _rewritten(self._expr, _shift(self._var, counter, start - self._start))


class _Forwarding:
    """The copies that scratch memory holds between two statements, as a pass over the function goes
    on."""

    def __init__(self):
        self._moved: list[_MovedElements] = []

    def through(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        """The statements that replace this one, and read the originals of moved elements."""
        written = list(_written(stmt))
        self._forget(written)
        found = [stmt]
        match stmt:
            case ir.For(_, _, body) if is_flat(body):
                found = self._split(stmt)
            case ir.Let() | ir.Assign() | ir.Store():
                found = [_mapped(stmt, self._reading(None, 1))]
        for x in found:
            self._learn(x, written)
        return found

    def _forget(self, written: Sequence[_Range]) -> None:
        for memory in written:
            self._moved = [
                x for x in self._moved if not any(source.meets(memory) for source in x.sources)
            ]
            for x in self._moved:
                x.left = [rest for part in x.left for rest in part.without(memory)]

    def _learn(self, stmt: ir.Stmt, written: Sequence[_Range]) -> None:
        var, n = None, 1
        if isinstance(stmt, ir.For) and len(stmt.body) == 1:
            var, n, (stmt,) = stmt.var, stmt.n, stmt.body
        if not isinstance(stmt, ir.Store) or stmt.buffer.group != "work":
            return
        target = _range(stmt.buffer, stmt.index, var, n)
        if target is None or not _is_moved(stmt.expr):
            return
        sources = [_range(x.buffer, x.index, var, n) for x in loads([stmt.expr])]
        known = [x for x in sources if x is not None]
        if len(known) == len(sources) and not any(x.meets(y) for x in known for y in written):
            self._moved.append(_MovedElements(target, var, stmt.expr, known))

    def _split(self, loop: ir.For) -> list[ir.Stmt]:
        """The loop in parts, in each of which the elements of an array all come from one place."""
        var, n = loop.var, loop.n
        ends = {0, n}
        for load in loads(e for stmt in loop.body for e in expressions(stmt)):
            place = _range(load.buffer, load.index, var, n)
            if place is None or not load.index.terms:
                continue
            for part in (part for x in self._moved for part in x.left if part.meets(place)):
                cuts = part.start - place.start, part.end - place.start
                ends.update(cut for cut in cuts if 0 < cut < n)
        if len(ends) - 1 > tuning.MOST_LOOPS:
            return [loop]
        found: list[ir.Stmt] = []
        for start, end in itertools.pairwise(sorted(ends)):
            body = [_mapped(stmt, _shift(var, var, start)) for stmt in loop.body]
            read = self._reading(var, end - start)
            found.append(ir.For(var, end - start, tuple(_mapped(stmt, read) for stmt in body)))
        return found

    def _reading(self, var: ir.Var | None, n: int) -> Callable[[ir.Expr], ir.Expr]:
        """The rule for an expression in a loop whose counter is `var`."""

        def read(expr: ir.Expr) -> ir.Expr:
            if isinstance(expr, ir.Load) and (place := _range(expr.buffer, expr.index, var, n)):
                for x in self._moved:
                    if any(part.has(place) for part in x.left):
                        return x.element(place.start, var if expr.index.terms else None)
            return expr

        return read


def _is_moved(expr: ir.Expr) -> bool:
    """Whether this is a loaded number or a constant, possibly negated."""
    match expr:
        case ir.Op("neg", (x,)):
            return _is_moved(x)
        case ir.Load(buffer, _):
            return buffer.group in _NEAR
    return isinstance(expr, ir.Const)


def _shift(var: ir.Var | None, counter: ir.Var | None, by: int) -> Callable[[ir.Expr], ir.Expr]:
    """The rule that makes `counter + by` of `var`; without a counter, `by`."""

    def shift(expr: ir.Expr) -> ir.Expr:
        if var is None or expr != var:
            return expr
        number = ir.Const(var.dtype.type(by))
        if counter is None:
            return number
        return ir.Op("add", (counter, number), var.dtype) if by else counter

    return shift


def _rewritten(expr: ir.Expr, rule: Callable[[ir.Expr], ir.Expr]) -> ir.Expr:
    """The expression with `rule` applied to each subexpression, the innermost first."""
    match expr:
        case ir.Load(buffer, index):
            return rule(ir.Load(buffer, _rewritten_index(index, rule)))
        case ir.Op(name, args, dtype, param):
            return rule(ir.Op(name, tuple(_rewritten(x, rule) for x in args), dtype, param))
    return rule(expr)


def _rewritten_index(index: ir.Index, rule: Callable[[ir.Expr], ir.Expr]) -> ir.Index:
    found = ir.Index(index.offset)
    for expr, stride in index.terms:
        match _rewritten(expr, rule):
            case ir.Op("add", (x, ir.Const() as number)):
                found = found.plus((x, stride), (number, stride))
            case x:
                found = found.plus((x, stride))
    return found


def _mapped(stmt: ir.Stmt, rule: Callable[[ir.Expr], ir.Expr]) -> ir.Stmt:
    match stmt:
        case ir.Let() | ir.Assign():
            return dc.replace(stmt, expr=_rewritten(stmt.expr, rule))
        case ir.Store(buffer, index, expr):
            return ir.Store(buffer, _rewritten_index(index, rule), _rewritten(expr, rule))
    raise AssertionError(stmt)


def _used(body: Sequence[ir.Stmt], outputs: Sequence[ir.Expr]) -> list[ir.Stmt]:
    """The statements without those whose results are never read."""
    live = [_whole_buffer(x.buffer) for x in loads(outputs)]
    found = []
    for stmt in reversed(body):
        loop = stmt if isinstance(stmt, ir.For) and is_flat(stmt.body) else None
        var, n = (loop.var, loop.n) if loop else (None, 1)
        inside = loop.body if loop else [stmt]
        stores = [x for x in inside if isinstance(x, ir.Store)]
        written = [_range(x.buffer, x.index, var, n) for x in stores]
        is_scratch = bool(stores) and all(x.buffer.group == "work" for x in stores)
        only_stores = is_scratch and all(isinstance(x, ir.Store | ir.Let) for x in inside)
        if only_stores and not any(w is None or w.meets(x) for w in written for x in live):
            continue
        found.append(stmt)
        for memory in written:
            if memory is not None and n:
                live = [rest for x in live for rest in x.without(memory)]
        for x in statements([stmt]):
            for load in loads(expressions(x)):
                live.append(_range(load.buffer, load.index, var, n) or _whole_buffer(load.buffer))
            if isinstance(x, ir.Product):
                live += [_whole_buffer(x.x.buffer), _whole_buffer(x.y.buffer)]
    return found[::-1]
