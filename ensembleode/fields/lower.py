"""From a jaxpr to the small language of `ir.py`: a rule a primitive.

To add a primitive, write its [`rule`][ensembleode.fields.lower.rule] (or, where it acts
element by element, add its name to `ELEMENTWISE` and to the printers), and a case in
`tests/fields/test_primitives.py`.
"""

import collections
import dataclasses as dc
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend import source_info_util

from .ir import (
    Assign,
    Buffer,
    Const,
    Expr,
    For,
    Function,
    Index,
    Let,
    Load,
    Matrix,
    Op,
    Product,
    Stmt,
    Store,
    Switch,
    Var,
    While,
)
from .lanes.primitives import MOVEMENTS
from .scalarise import branch_here, called, scalarise, used


# A state of more components is an array, and its function stores the result.
LARGEST_RETURNED = 24
# A product of matrices with fewer multiplications is written out as loops.
LEAST_PRODUCT = 64
# An expression of more operations is stored before it is used in another one.
_DEEPEST = 40
_INT = np.dtype(np.int64)
_BOOL = np.dtype(bool)


class UntranslatableError(Exception):
    """A primitive that has no rule here: its name, and where in the user's source it comes from."""

    def __init__(self, what: str, where: str):
        super().__init__(f"{what} (at {where})")
        self.what = what
        self.where = where


class Inputs(NamedTuple):
    """Where a program's numbers lie.

    - `places`: of each constant, and then of each argument between the state and the time, the
        group and the place of its first component in it.
    - `storage`: the dtype of the groups `own` and `shared`; None where there is one of each for
        every dtype.
    """

    places: tuple[tuple[str, int], ...]
    storage: np.dtype | None

    @classmethod
    def laid_out(cls, shapes: Sequence, groups: Sequence[str], storage: Any) -> "Inputs":
        """One after the other in each group."""
        ends: collections.Counter = collections.Counter()
        places = []
        for shape, group in zip(shapes, groups, strict=True):
            places.append((group, ends[group]))
            ends[group] += math.prod(shape)
        return cls(tuple(places), np.dtype(storage))

    @classmethod
    def as_they_are(cls, avals: Sequence, groups: Sequence[str]) -> "Inputs":
        """One after the other in each group of a dtype."""
        ends: collections.Counter = collections.Counter()
        places = []
        for aval, group in zip(avals, groups, strict=True):
            key = group, np.dtype(aval.dtype)
            places.append((group, ends[key]))
            ends[key] += math.prod(aval.shape)
        return cls(tuple(places), None)


def lower(
    jaxpr: jex.Jaxpr,
    inputs: Inputs,
    largest_returned: int = LARGEST_RETURNED,
    *,
    apart: bool = True,
) -> Function:
    """Lower a function of a state, parameters and the time, whose result is one array.

    **Arguments:**

    - `jaxpr`: its constants are parameters, too; its arguments are the state, the parameters and
        the time.
    - `inputs`: where the parameters lie.
    - `largest_returned`: a result of more components is stored.
    - `apart`: whether a small one is taken apart into scalars.

    **Raises:** [`UntranslatableError`][] for a primitive that has no rule.
    """
    _check(jaxpr)
    outs: list[Any] = [v.aval for v in jaxpr.outvars]
    size, dtype = math.prod(outs[0].shape), np.dtype(outs[0].dtype)
    if not size:
        return Function((), (), 0, dtype, (), ())
    n_consts = len(jaxpr.constvars)
    avals: list[Any] = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    state, t = avals[n_consts], avals[-1]
    values = []
    parameters = [*avals[:n_consts], *avals[n_consts + 1 : -1]]
    for aval, (group, start) in zip(parameters, inputs.places, strict=True):
        storage = inputs.storage if group in ("own", "shared") else None
        values.append(_loaded(group, start, aval, storage or aval.dtype))
    u, time = _loaded("u", 0, state, state.dtype), scalar(Var("t", np.dtype(t.dtype)))
    consts, ins = values[:n_consts], [u, *values[n_consts:]]
    result = Buffer("out", dtype, 0, size)
    scalars = scalarise(jaxpr) if apart else None
    if scalars is not None:
        run = Lowering()
        components = [x for v in (*consts, *ins) for x in _apart(v)]
        exprs = [x.expr for x in run.evaluate(scalars, [], [*components, time])]
        if size <= largest_returned and not run.work:
            return run.function(tuple(exprs), size, dtype)
        if not run.work:
            for i, x in enumerate(exprs):
                run.emit(Store(result, Index(i), x))
            return run.function((), size, dtype)
    run = Lowering()
    (du,) = run.evaluate(jaxpr, consts, [*ins, time])
    run.copy(du, result)
    return run.function((), size, dtype)


def _check(jaxpr: Any, caller: str = "an unknown place") -> None:
    """Every primitive has a rule, also in what is called from `caller`."""
    for eqn in used(jaxpr)[0]:
        where = source_info_util.summarize(eqn.source_info) or caller
        inner = called(eqn)
        if inner is not None:
            _check(getattr(inner, "jaxpr", inner), where)
            continue
        why = _refused(eqn)
        if why is not None:
            raise UntranslatableError(f"the primitive {eqn.primitive.name}{why}", where)
        for key in ("jaxpr", "cond_jaxpr", "body_jaxpr"):
            if key in eqn.params:
                _check(eqn.params[key].jaxpr, where)
        for branch in eqn.params.get("branches", ()):
            _check(branch.jaxpr, where)


def _refused(eqn: Any) -> str | None:
    """What about an equation can't be translated; None if it can."""
    name, params = eqn.primitive.name, eqn.params
    if name not in RULES:
        return ""
    dtypes = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]
    for dtype in dtypes:
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            return " on PRNG keys"
        if np.dtype(dtype).kind not in "biuf":
            return f" on {dtype} numbers"
    if name == "round" and params["rounding_method"] not in (0, 1):
        return f" by {params['rounding_method']}"
    if name == "bitcast_convert_type" and dtypes[0].itemsize != dtypes[1].itemsize:
        return f" of {dtypes[0]} to {dtypes[1]}"
    return None


#
# Values
#


@dc.dataclass(frozen=True, slots=True)
class Value:
    """An array, as what its component is at an index into it in row-major order.

    - `buffer`: where it lies, if that is in memory as it is.
    - `depth`: how many operations are done for a component.
    - `along`: what its component is at a counter for each axis, of what has no `at`, as a slice of
        a matrix hasn't.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    at: Callable[[Index], Expr]
    buffer: Buffer | None = None
    depth: int = 0
    along: Callable[[Sequence[Expr]], Expr] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def expr(self) -> Expr:
        """Of a value with one component."""
        return self.at(Index())

    def by_axes(self, counters: Sequence[Expr]) -> Expr:
        """Its component at a counter for each axis; of a number, that number."""
        if self.along is not None:
            return self.along(counters)
        if self.size == 1:
            return self.expr
        return self.at(_position(counters, _strides(self.shape)))

    def reshaped(self, shape: tuple[int, ...]) -> "Value":
        assert self.along is None or shape == self.shape
        return dc.replace(self, shape=tuple(shape))


def scalar(expr: Expr, shape: tuple[int, ...] = ()) -> Value:
    return Value(shape, expr.dtype, lambda _: expr)


def number(value: Any, dtype: Any) -> Const:
    with np.errstate(all="ignore"):
        return Const(np.asarray(value).astype(dtype)[()])


def stored(buffer: Buffer, shape: tuple[int, ...]) -> Value:
    return Value(shape, buffer.dtype, lambda i: Load(buffer, i), buffer)


def converted(x: Expr, dtype: Any) -> Expr:
    dtype = np.dtype(dtype)
    if isinstance(x, Const) and (x.dtype.kind in "biu" or dtype.kind == "f"):
        return number(x.value, dtype)
    return x if x.dtype == dtype else Op("convert_element_type", (x,), dtype)


def only_by_axes(
    shape: Sequence[int], dtype: np.dtype, along: Callable[[Sequence[Expr]], Expr], depth: int
) -> Value:
    def at(_: Index) -> Expr:
        raise AssertionError("this array has no row-major order")

    return Value(tuple(shape), dtype, at, None, depth, along)


def elementwise(shape: Sequence[int], dtype: Any, ins: Sequence[Value], fn: Callable) -> Value:
    """`fn` of the components."""
    shape, dtype, depth = tuple(shape), np.dtype(dtype), 1 + sum(x.depth for x in ins)
    if any(x.along for x in ins):
        return only_by_axes(shape, dtype, lambda c: fn(*(x.by_axes(c) for x in ins)), depth)
    return Value(shape, dtype, lambda i: fn(*(x.at(i) for x in ins)), depth=depth)


def cast(value: Value, dtype: Any) -> Value:
    dtype = np.dtype(dtype)
    if value.dtype == dtype:
        return value
    return elementwise(value.shape, dtype, [value], lambda x: converted(x, dtype))


def _loaded(group: Any, start: int, aval: Any, storage: Any) -> Value:
    """A parameter, or the state."""
    buffer = Buffer(group, np.dtype(storage), start, math.prod(aval.shape))
    return cast(stored(buffer, aval.shape), aval.dtype)


def _apart(value: Value) -> list[Value]:
    return [scalar(value.at(Index(i)), (1,)) for i in range(value.size)]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _position(counters: Sequence[Expr], strides: Sequence[int], offset: int = 0) -> Index:
    return Index(offset).plus(*zip(counters, strides, strict=True))


#
# The pass
#


Rule: TypeAlias = Callable[["Lowering", Any, list[Value]], list[Value]]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers how the primitives of these names, with spaces between, are lowered."""

    def register(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), fn))
        return fn

    return register


class Lowering:
    """One pass over a program: the statements so far, and what has been named."""

    def __init__(self) -> None:
        self.blocks: list[list[Stmt]] = [[]]
        self.work: dict[np.dtype, int] = {}
        self.tables: list[int] = []
        self._names = itertools.count(1)
        self._counters = itertools.count(1)

    def function(self, outputs: tuple[Expr, ...], size: int, dtype: Any) -> Function:
        body = tuple(self.blocks[0])
        work = tuple(self.work.items())
        return Function(body, outputs, size, np.dtype(dtype), work, tuple(self.tables))

    def evaluate(self, jaxpr: Any, consts: Sequence[Value], ins: Sequence[Value]) -> list[Value]:
        eqns, uses = used(jaxpr)
        env: dict = {}
        for v, x in zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *ins], strict=True):
            env[v] = self.settled(x, uses[v]) if uses[v] > 1 else x

        def read(atom: Any) -> Value:
            if isinstance(atom, jex.Literal):
                aval: Any = atom.aval
                return self.constant(np.asarray(atom.val, aval.dtype))
            return env[atom]

        for eqn in eqns:
            inner, values = called(eqn), [read(v) for v in eqn.invars]
            if inner is None:
                outs = RULES[eqn.primitive.name](self, eqn, values)
            else:
                outs = self.closed(inner, values)
            for v, out in zip(eqn.outvars, outs, strict=True):
                env[v] = self.settled(out.reshaped(v.aval.shape), uses[v])
        return [read(v) for v in jaxpr.outvars]

    def closed(self, closed: Any, ins: Sequence[Value]) -> list[Value]:
        """The outputs of a jaxpr that is closed, or has no constants."""
        consts = [self.constant(np.asarray(c)) for c in getattr(closed, "consts", ())]
        return self.evaluate(getattr(closed, "jaxpr", closed), consts, ins)

    def settled(self, value: Value, uses: int) -> Value:
        """The value in a variable or in memory, where it would be computed more than once."""
        if value.size == 1:
            return scalar(self.let(value.expr), value.shape)
        return self.stored(value) if uses > 1 and value.depth else value

    def constant(self, array: np.ndarray) -> Value:
        first = array.reshape(-1)[:1]
        if array.tobytes() == first.tobytes() * array.size:
            return scalar(Const(first[0]) if array.size else number(0, array.dtype), array.shape)
        return self.table(array)

    def table(self, array: np.ndarray) -> Value:
        if array.dtype.kind not in "iub":
            raise UntranslatableError("a constant array", "an unknown place")
        buffer = Buffer("table", _INT, len(self.tables), array.size)
        self.tables += array.reshape(-1).astype(_INT).tolist()
        return cast(stored(buffer, array.shape), array.dtype)

    #
    # Statements
    #

    def emit(self, stmt: Stmt) -> None:
        self.blocks[-1].append(stmt)

    @contextmanager
    def block(self) -> Iterator[list[Stmt]]:
        self.blocks.append([])
        yield self.blocks[-1]
        self.blocks.pop()

    def fresh(self, dtype: Any) -> Var:
        return Var(f"x{next(self._names)}", np.dtype(dtype))

    def let(self, expr: Expr) -> Expr:
        if not isinstance(expr, Op):
            return expr
        return self.variable(expr)

    def variable(self, expr: Expr) -> Var:
        var = self.fresh(expr.dtype)
        self.emit(Let(var, expr))
        return var

    def allocate(self, dtype: Any, size: int) -> Buffer:
        dtype = np.dtype(dtype)
        start = self.work.get(dtype, 0)
        self.work[dtype] = start + size
        return Buffer("work", dtype, start, size)

    @contextmanager
    def loops(self, *sizes: int) -> Iterator[list[Expr]]:
        """Inside, one of each size: the counters."""
        counters: list[Expr] = []
        opened: list[tuple[Var, int]] = []
        for n in sizes:
            if n == 1:
                counters.append(number(0, _INT))
                continue
            var = Var(f"i{next(self._counters)}", _INT)
            counters.append(var)
            opened.append((var, n))
            self.blocks.append([])
        yield counters
        for var, n in reversed(opened):
            body = tuple(self.blocks.pop())
            self.emit(For(var, n, body))

    def copy(self, value: Value, buffer: Buffer, offset: Index | None = None) -> None:
        """Write a value to a buffer, from this index on."""
        if value.along is not None:
            with self.loops(*value.shape) as counters:
                target = (offset or Index()).plus(
                    *zip(counters, _strides(value.shape), strict=True)
                )
                self.emit(Store(buffer, target, value.along(counters)))
            return
        with self.loops(value.size) as (i,):
            target = (offset or Index()).plus((i, 1))
            self.emit(Store(buffer, target, value.at(Index().plus((i, 1)))))

    def stored(self, value: Value) -> Value:
        """The value in memory."""
        if value.buffer is not None or value.size <= 1:
            return value
        buffer = self.allocate(value.dtype, value.size)
        self.copy(value, buffer)
        return stored(buffer, value.shape)

    def flat(self, value: Value) -> Value:
        """The value in row-major order."""
        return value if value.along is None else self.stored(value)

    def built(self, shape: Sequence[int], dtype: Any, component: Callable) -> Value:
        """An array in memory, from `component(counters)`."""
        if math.prod(shape) == 1:
            return scalar(self.let(component([number(0, _INT)] * len(shape))), tuple(shape))
        buffer = self.allocate(dtype, math.prod(shape))
        with self.loops(*shape) as counters:
            expr = component(counters)
            self.emit(Store(buffer, _position(counters, _strides(shape)), expr))
        return stored(buffer, tuple(shape))


def _aval(eqn: Any) -> Any:
    return eqn.outvars[0].aval


#
# Elementwise
#


ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
    integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul ne neg
    nextafter not one_minus_square or polygamma population_count pow regularized_incomplete_beta
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square sub tan tanh xor zeta
"""
_SAME = {"add_any": "add"}
_PARAM = {"integer_pow": "y", "round": "rounding_method"}


@rule(ELEMENTWISE + "add_any")
def _elementwise(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    aval, name = _aval(eqn), str(eqn.primitive.name)
    param = int(eqn.params[_PARAM[name]]) if name in _PARAM else None
    name = _SAME.get(name, name)
    dtype = np.dtype(aval.dtype)
    return [_mapped(run, aval, ins, lambda *args: Op(name, args, dtype, param))]


def _mapped(run: Lowering, aval: Any, ins: Sequence[Value], fn: Callable) -> Value:
    """`fn` of the components."""
    ins = [_broadcast(run, x, aval.shape) for x in ins]
    if sum(x.depth for x in ins) > _DEEPEST:
        ins = [run.stored(x) for x in ins]
    size = math.prod(aval.shape)
    if size != 1:
        # What they share is computed before the loop.
        ins = [scalar(x.expr) if x.size == 1 else x for x in ins]
    return elementwise(aval.shape, aval.dtype, ins, fn)


def _broadcast(run: Lowering, x: Value, shape: Sequence[int]) -> Value:
    """`x` along its axes of length one, if it isn't a number."""
    if x.size == 1 or x.shape == tuple(shape):
        return x
    return _picked(run, [x], np.broadcast_to(np.arange(x.size).reshape(x.shape), shape))


@rule("polynomial")
def _polynomial(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    def horner(x, *coefficients):
        total = coefficients[-1]
        for c in coefficients[-2::-1]:
            total = Op("add", (Op("mul", (total, x), x.dtype), c), x.dtype)
        return total

    x, *coefficients = ins
    return [_mapped(run, _aval(eqn), [run.settled(x, 2), *coefficients], horner)]


@rule("convert_element_type")
def _convert(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    del run
    return [cast(ins[0], _aval(eqn).dtype)]


@rule("bitcast_convert_type")
def _bitcast(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    aval = _aval(eqn)
    return [_mapped(run, aval, ins, lambda x: Op(eqn.primitive.name, (x,), np.dtype(aval.dtype)))]


@rule("copy copy_p device_put optimization_barrier stop_gradient")
def _identity(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    del run, eqn
    return ins


@rule("empty empty2")
def _empty(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    del ins
    return [run.constant(np.zeros(_aval(eqn).shape, _aval(eqn).dtype))]


@rule("platform_index")
def _platform_index(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    del run, ins
    return [scalar(Const(branch_here(eqn)))]


#
# Data movement
#


@rule(" ".join(MOVEMENTS))
def _moved(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    starts = itertools.accumulate((x.size for x in ins), initial=0)
    numbers = [
        np.arange(start, start + x.size).reshape(x.shape)
        for start, x in zip(starts, ins, strict=False)
    ]
    outs = MOVEMENTS[eqn.primitive.name](np, numbers, eqn.params, ())
    return [
        _picked(run, ins, np.asarray(m).reshape(v.aval.shape))
        for m, v in zip(outs, eqn.outvars, strict=True)
    ]


def _picked(run: Lowering, sources: Sequence[Value], numbers: np.ndarray) -> Value:
    """An array of these components, numbered through all sources."""
    sources = [run.flat(x) for x in sources]
    ends = np.cumsum([x.size for x in sources])
    shape, dtype = numbers.shape, sources[0].dtype

    def source(n: int) -> tuple[Value, int]:
        k = int(np.searchsorted(ends, n, side="right"))
        return sources[k], n - int(ends[k]) + sources[k].size

    if numbers.size == 0:
        return Value(shape, dtype, lambda _: number(0, dtype))
    if numbers.size == 1:
        x, n = source(int(numbers.flat[0]))
        return scalar(x.at(Index(n)), shape)
    affine = _affine(numbers, ends)
    if affine is not None:
        x, first = source(int(numbers.flat[0]))
        linear = _linear(numbers)
        if linear is not None:
            if linear == 0:
                x = run.settled(x, 2)
                expr = x.at(Index(first))
                return Value(shape, dtype, lambda _: expr)
            whole = linear == 1 and first == 0 and numbers.size == x.size
            buffer = x.buffer if whole else None
            if linear == 1 and x.buffer is not None and not whole:
                buffer = dc.replace(x.buffer, start=x.buffer.start + first, size=numbers.size)
                return stored(buffer, shape)
            at = x.at
            return Value(shape, dtype, lambda i: at(i.shifted(first, linear)), buffer, x.depth)
        if numbers.size > x.size:
            x = run.stored(x)
        at = x.at
        return only_by_axes(shape, dtype, lambda c: at(_position(c, affine, first)), x.depth)
    if numbers.size > ends[-1]:
        sources = [run.stored(x) for x in sources]
    buffer = run.allocate(dtype, numbers.size)
    pieces = _pieces(numbers, ends)
    if pieces is None:
        place = run.table(numbers)
        joined = sources[0] if len(sources) == 1 else _joined(run, sources)
        joined = run.stored(joined)
        at = joined.at
        with run.loops(numbers.size) as (i,):
            where = Index().plus((i, 1))
            run.emit(Store(buffer, where, at(Index().plus((place.at(where), 1)))))
        return stored(buffer, shape)
    strides = _strides(shape)
    for axis, start, piece in pieces:
        x, first = source(int(piece.flat[0]))
        affine = _affine(piece, ends)
        assert affine is not None
        with run.loops(*piece.shape) as counters:
            where = _position(counters, strides, start * strides[axis])
            run.emit(Store(buffer, where, x.at(_position(counters, affine, first))))
    return stored(buffer, shape)


def _joined(run: Lowering, sources: Sequence[Value]) -> Value:
    buffer = run.allocate(sources[0].dtype, sum(x.size for x in sources))
    start = 0
    for x in sources:
        run.copy(x, buffer, Index(start))
        start += x.size
    return stored(buffer, (start,))


def _affine(numbers: np.ndarray, ends: np.ndarray) -> list[int] | None:
    """The strides with which numbers of one source run along each axis; None if they don't."""
    first = numbers.flat[0]
    strides = []
    expected = np.full((1,) * numbers.ndim, first)
    for axis, n in enumerate(numbers.shape):
        along = numbers[tuple(slice(0, 2) if a == axis else 0 for a in range(numbers.ndim))]
        stride = int(along[1] - along[0]) if n > 1 else 0
        strides.append(stride)
        steps = np.arange(n) * stride
        expected = expected + steps.reshape([-1 if a == axis else 1 for a in range(numbers.ndim)])
    source = np.searchsorted(ends, [numbers.min(), numbers.max()], side="right")
    if source[0] != source[1] or not (expected == numbers).all():
        return None
    return strides


def _linear(numbers: np.ndarray) -> int | None:
    """The one stride of all numbers in row-major order, if there is one."""
    flat = numbers.reshape(-1)
    steps = np.diff(flat)
    return int(steps[0]) if (steps == steps[0]).all() else None


def _pieces(numbers: np.ndarray, ends: np.ndarray) -> list[tuple[int, int, np.ndarray]] | None:
    """Cut along an axis so that each piece is affine, if few are enough."""
    for axis in range(numbers.ndim):
        pieces, start, n = [], 0, numbers.shape[axis]
        while start < n and len(pieces) < 16:
            low, high = start + 1, n
            while low < high:  # the longest piece from here on
                middle = (low + high + 1) // 2
                if _affine(numbers.take(range(start, middle), axis), ends) is None:
                    high = middle - 1
                else:
                    low = middle
            piece = numbers.take(range(start, low), axis)
            if _affine(piece, ends) is None:
                break
            pieces.append((axis, start, piece))
            start = low
        if start == n:
            return pieces
    return None


@rule("pad")
def _pad(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, fill = ins
    shape = _aval(eqn).shape
    x = run.stored(x)
    numbers = np.arange(x.size).reshape(x.shape)
    # Where each component goes, and which are cut off.
    inside: list = []
    outside = []
    config = [tuple(map(int, axis)) for axis in eqn.params["padding_config"]]
    for (low, _, interior), n, m in zip(config, x.shape, shape, strict=True):
        first = 0 if low >= 0 else -(low // (interior + 1))
        last = min(n, (m - low + interior) // (interior + 1))
        inside.append(slice(first, max(first, last)))
        outside.append((low + first * (interior + 1), interior + 1))
    kept = numbers[tuple(inside)]
    value = fill.expr
    buffer = run.allocate(x.dtype, math.prod(shape))
    run.copy(Value(shape, x.dtype, lambda _: value), buffer)
    if kept.size:
        strides = _strides(shape)
        offset = sum(start * s for (start, _), s in zip(outside, strides, strict=True))
        steps = [step * s for (_, step), s in zip(outside, strides, strict=True)]
        with run.loops(*kept.shape) as counters:
            source = _position(counters, _strides(x.shape), int(kept.flat[0]))
            run.emit(Store(buffer, _position(counters, steps, offset), x.at(source)))
    return [stored(buffer, shape)]


@rule("iota")
def _iota(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    del ins
    aval, d = _aval(eqn), eqn.params["dimension"]
    if math.prod(aval.shape) <= 1:
        return [run.constant(np.zeros(aval.shape, aval.dtype))]
    return [only_by_axes(aval.shape, aval.dtype, lambda c: converted(c[d], aval.dtype), 0)]


#
# Reductions
#


def _least(dtype: np.dtype) -> Any:
    return -np.inf if dtype.kind == "f" else False if dtype.kind == "b" else np.iinfo(dtype).min


def _most(dtype: np.dtype) -> Any:
    return np.inf if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max


# The operation, and what it starts from.
_REDUCE: dict[str, tuple[str, Callable]] = {
    "and": ("and", lambda dtype: True if dtype.kind == "b" else -1),
    "max": ("max", _least),
    "min": ("min", _most),
    "or": ("or", lambda dtype: 0),
    "prod": ("mul", lambda dtype: 1),
    "sum": ("add", lambda dtype: 0),
    "xor": ("xor", lambda dtype: 0),
}
_CUMULATE: dict[str, tuple[str, Callable]] = {"logsumexp": ("logaddexp", _least)}


@rule(" ".join(f"reduce_{name}" for name in _REDUCE))
def _reduce(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    (x,) = ins
    aval, axes = _aval(eqn), eqn.params["axes"]
    name, start = _REDUCE[eqn.primitive.name.removeprefix("reduce_")]
    dtype = np.dtype(aval.dtype)
    if x.size == math.prod(aval.shape):
        return [run.flat(x)]
    kept = [a for a in range(len(x.shape)) if a not in axes]

    def component(counters):
        total = run.variable(number(start(dtype), dtype))
        with run.loops(*(x.shape[a] for a in axes)) as inner:
            by_axis = dict(zip((*kept, *axes), (*counters, *inner), strict=True))
            element = x.by_axes([by_axis[a] for a in range(len(x.shape))])
            run.emit(Assign(total, Op(name, (total, element), dtype)))
        return total

    return [run.built(aval.shape, dtype, component)]


@rule(" ".join(f"cum{name}" for name in ("logsumexp", "max", "min", "prod", "sum")))
def _cumulate(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    (x,) = ins
    x, axis, reverse = run.flat(x), eqn.params["axis"], eqn.params["reverse"]
    name, start = (_REDUCE | _CUMULATE)[eqn.primitive.name.removeprefix("cum")]
    strides, n = _strides(x.shape), x.shape[axis]
    buffer = run.allocate(x.dtype, x.size)
    others = [a for a in range(len(x.shape)) if a != axis]
    with run.loops(*(x.shape[a] for a in others)) as counters:
        total = run.variable(number(start(x.dtype), x.dtype))
        with run.loops(n) as (k,):
            along = (n - 1) * strides[axis] if reverse else 0
            step = -strides[axis] if reverse else strides[axis]
            where = _position([*counters, k], [*(strides[a] for a in others), step], along)
            combine = _logaddexp if name == "logaddexp" else functools.partial(Op, name)
            run.emit(Assign(total, combine((total, run.let(x.at(where))), x.dtype)))
            run.emit(Store(buffer, where, total))
    return [stored(buffer, x.shape)]


def _logaddexp(args: tuple[Expr, Expr], dtype: np.dtype) -> Expr:
    """`log(exp(x) + exp(y))`, also of infinities."""
    x, _ = args
    below = Op("neg", (Op("abs", (Op("sub", args, dtype),), dtype),), dtype)
    more = Op("log1p", (Op("exp", (below,), dtype),), dtype)
    different = Op("add", (Op("max", args, dtype), more), dtype)
    equal = Op("add", (x, number(math.log(2), dtype)), dtype)
    return Op("select_n", (Op("eq", args, _BOOL), different, equal), dtype)


@rule("argmax argmin")
def _arg(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    (x,) = ins
    aval = _aval(eqn)
    (axis,) = eqn.params["axes"]
    better = "gt" if eqn.primitive.name == "argmax" else "lt"
    strides = _strides(x.shape)
    kept = [a for a in range(len(x.shape)) if a != axis]
    x = run.stored(x)

    def component(counters):
        start = _position(counters, [strides[a] for a in kept])
        best, at = run.variable(x.at(start)), run.variable(number(0, _INT))
        with run.loops(x.shape[axis]) as (k,):
            now = run.variable(x.at(start.plus((k, strides[axis]))))
            wins = Op(better, (now, best), _BOOL)
            if x.dtype.kind == "f":  # the first NaN wins
                nan, held = Op("ne", (now, now), _BOOL), Op("eq", (best, best), _BOOL)
                wins = Op("or", (wins, Op("and", (nan, held), _BOOL)), _BOOL)
            wins = run.let(wins)
            run.emit(Assign(at, Op("select_n", (wins, at, k), _INT)))
            run.emit(Assign(best, Op("select_n", (wins, best, now), x.dtype)))
        return converted(at, aval.dtype)

    return [run.built(aval.shape, aval.dtype, component)]


#
# Products
#


@rule("dot_general")
def _dot_general(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    aval = _aval(eqn)
    dtype = np.dtype(aval.dtype)
    (contracted, batch) = eqn.params["dimension_numbers"]
    free = [
        [a for a in range(len(x.shape)) if a not in c and a not in b]
        for x, c, b in zip(ins, contracted, batch, strict=True)
    ]
    inner = math.prod(ins[0].shape[a] for a in contracted[0])
    ins = [cast(x, dtype) for x in ins]
    if dtype.kind == "f" and not batch[0] and math.prod(aval.shape) * inner >= LEAST_PRODUCT:
        x, y = (run.stored(v) for v in ins)
        left = _matrix(x, free[0], contracted[0], first=False)
        right = _matrix(y, free[1], contracted[1], first=True)
        if left is not None and right is not None:
            out = run.allocate(dtype, math.prod(aval.shape))
            run.emit(Product(Matrix(out, left.rows, right.columns, False), left, right))
            return [stored(out, aval.shape)]
    # Of each component of the result, all of an operand's are used.
    x, y = (run.flat(run.settled(v, 2)) for v in ins)
    strides = [_strides(v.shape) for v in (x, y)]
    n_batch, n_x = len(batch[0]), len(free[0])
    times, plus = ("and", "or") if dtype == _BOOL else ("mul", "add")

    def component(counters):
        b, fx, fy = counters[:n_batch], counters[n_batch : n_batch + n_x], counters[n_batch + n_x :]
        total = run.variable(number(0, dtype))
        with run.loops(*(x.shape[a] for a in contracted[0])) as k:
            places = [
                _position([*b, *f, *k], [s[a] for a in (*bs, *fs, *cs)])
                for f, s, bs, fs, cs in zip((fx, fy), strides, batch, free, contracted, strict=True)
            ]
            product = Op(times, (x.at(places[0]), y.at(places[1])), dtype)
            run.emit(Assign(total, Op(plus, (total, product), dtype)))
        return total

    return [run.built(aval.shape, dtype, component)]


def _matrix(x: Value, free: Sequence[int], contracted: Sequence[int], first: bool) -> Matrix | None:
    """An operand as a matrix `[free, contracted]`, or with the contracted axes `first`."""
    if x.buffer is None:
        return None
    shape = [math.prod(x.shape[a] for a in axes) for axes in (free, contracted)]
    rows, columns = reversed(shape) if first else shape
    by_free, by_contracted = [*free, *contracted], [*contracted, *free]
    order = list(range(len(x.shape)))
    straight, swapped = (by_contracted, by_free) if first else (by_free, by_contracted)
    if straight == order:
        return Matrix(x.buffer, rows, columns, False)
    return Matrix(x.buffer, rows, columns, True) if swapped == order else None


#
# Indexing
#


def _clamped(run: Lowering, index: Expr, most: int) -> Expr:
    """As JAX does: what is outside of an array is moved to its edge."""
    index = converted(index, _INT)
    return run.let(Op("clamp", (number(0, _INT), index, number(most, _INT)), _INT))


@rule("dynamic_slice")
def _dynamic_slice(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, *starts = ins
    sizes = eqn.params["slice_sizes"]
    x = run.stored(x)
    strides = _strides(x.shape)
    firsts = [
        _clamped(run, s.expr, n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)
    ]
    start = _position(firsts, strides)
    return [run.built(sizes, x.dtype, lambda c: x.at(start.plus(*zip(c, strides, strict=True))))]


@rule("dynamic_update_slice")
def _dynamic_update_slice(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, update, *starts = ins
    update = run.flat(update)
    strides = _strides(x.shape)
    firsts = [
        _clamped(run, s.expr, n - size)
        for s, n, size in zip(starts, x.shape, update.shape, strict=True)
    ]
    buffer = run.allocate(x.dtype, x.size)
    run.copy(x, buffer)
    start = _position(firsts, strides)
    inner = _strides(update.shape)
    with run.loops(*update.shape) as counters:
        where = start.plus(*zip(counters, strides, strict=True))
        run.emit(Store(buffer, where, update.at(_position(counters, inner))))
    return [stored(buffer, x.shape)]


@rule("gather")
def _gather(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, indices = map(run.stored, ins)
    aval, dims, sizes = _aval(eqn), eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    fill = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    window = [
        d
        for d in range(len(x.shape))
        if d not in dims.collapsed_slice_dims and d not in dims.operand_batching_dims
    ]
    lead = [d for d in range(len(aval.shape)) if d not in dims.offset_dims]

    def component(counters):
        batch = [counters[d] for d in lead]
        place, inside = _window_start(
            run,
            x.shape,
            indices,
            batch,
            sizes,
            tuple(map(int, dims.start_index_map)),
            (dims.operand_batching_dims, dims.start_indices_batching_dims),
        )
        strides = _strides(x.shape)
        offsets = [(counters[o], strides[d]) for o, d in zip(dims.offset_dims, window, strict=True)]
        value = x.at(place.plus(*offsets))
        if not fill or not inside:
            return value
        nothing = number(_fill_value(x.dtype, eqn.params["fill_value"]), x.dtype)
        all_inside = functools.reduce(lambda a, b: Op("and", (a, b), _BOOL), inside)
        return Op("select_n", (all_inside, nothing, value), x.dtype)

    return [run.built(aval.shape, x.dtype, component)]


def _fill_value(dtype: np.dtype, value: Any) -> Any:
    """What JAX fills in where it reads outside of an array."""
    if value is not None:
        return value
    if dtype.kind == "f":
        return np.nan
    return _least(dtype) if dtype.kind == "i" else _most(dtype)


def _window_start(
    run: Lowering,
    shape: Sequence[int],
    indices: Value,
    batch: Sequence[Expr],
    sizes: Sequence[int],
    starts: Sequence[int],
    batching: tuple[Sequence[int], Sequence[int]],
) -> tuple[Index, list[Expr]]:
    """Where a window begins in an array of `shape`, and what is true if it is inside."""
    row = _position(batch, _strides(indices.shape)[:-1])
    place, inside = Index(), []
    for d, (n, stride) in enumerate(zip(shape, _strides(shape), strict=True)):
        if d in starts:
            asked = run.let(converted(indices.at(row.shifted(starts.index(d))), _INT))
            first = _clamped(run, asked, n - sizes[d])
            inside.append(Op("eq", (asked, first), _BOOL))
            place = place.plus((first, stride))
        elif d in batching[0]:
            place = place.plus((batch[batching[1][batching[0].index(d)]], stride))
    return place, inside


_SCATTER = {
    "scatter": None,
    "scatter-add": "add",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-mul": "mul",
    "scatter-sub": "sub",
}


@rule(" ".join(_SCATTER))
def _scatter(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    x, indices, updates = ins
    indices, updates = run.stored(indices), run.stored(updates)
    dims, name = eqn.params["dimension_numbers"], _SCATTER[eqn.primitive.name]
    drop = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    window = [
        d
        for d in range(len(x.shape))
        if d not in dims.inserted_window_dims and d not in dims.operand_batching_dims
    ]
    sizes = [1] * len(x.shape)
    for d, w in zip(window, dims.update_window_dims, strict=True):
        sizes[d] = updates.shape[w]
    lead = [d for d in range(len(updates.shape)) if d not in dims.update_window_dims]
    buffer = run.allocate(x.dtype, x.size)
    run.copy(x, buffer)
    strides = _strides(x.shape)
    with run.loops(*updates.shape) as counters:
        place, inside = _window_start(
            run,
            x.shape,
            indices,
            [counters[d] for d in lead],
            sizes,
            tuple(map(int, dims.scatter_dims_to_operand_dims)),
            (dims.operand_batching_dims, dims.scatter_indices_batching_dims),
        )
        offsets = [
            (counters[w], strides[d]) for d, w in zip(window, dims.update_window_dims, strict=True)
        ]
        where = place.plus(*offsets)
        old = run.variable(Load(buffer, where))
        new = updates.at(_position(counters, _strides(updates.shape)))
        new = Op(name, (old, new), x.dtype) if name else new
        if drop and inside:
            all_inside = functools.reduce(lambda a, b: Op("and", (a, b), _BOOL), inside)
            new = Op("select_n", (all_inside, old, new), x.dtype)
        run.emit(Store(buffer, where, new))
    return [stored(buffer, x.shape)]


#
# Branches and loops
#


@rule("cond")
def _cond(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    which, *operands = ins
    if isinstance(which.expr, Const):
        return run.closed(eqn.params["branches"][int(which.expr.value)], operands)
    operands = [run.settled(run.stored(x), 2) for x in operands]
    places = [_place(run, v.aval) for v in eqn.outvars]
    cases = []
    for branch in eqn.params["branches"]:
        with run.block() as body:
            for place, out in zip(places, run.closed(branch, operands), strict=True):
                _write(run, place, out)
        cases.append(tuple(body))
    run.emit(Switch(converted(which.expr, _INT), tuple(cases)))
    return [_read(place, v.aval) for place, v in zip(places, eqn.outvars, strict=True)]


Place: TypeAlias = Var | Buffer


def _place(run: Lowering, aval: Any, value: Value | None = None) -> Place:
    """A variable or a buffer that can be written again, with this value."""
    if math.prod(aval.shape) == 1:
        return run.variable(number(0, aval.dtype) if value is None else value.expr)
    buffer = run.allocate(aval.dtype, math.prod(aval.shape))
    if value is not None:
        run.copy(value, buffer)
    return buffer


def _write(run: Lowering, place: Place, value: Value) -> None:
    if isinstance(place, Var):
        run.emit(Assign(place, value.expr))
    elif value.buffer != place:
        run.copy(value, place)


def _read(place: Place, aval: Any) -> Value:
    if isinstance(place, Var):
        return scalar(place, aval.shape)
    return stored(place, aval.shape)


def _write_all(run: Lowering, places: Sequence[Place], values: Sequence[Value]) -> None:
    """At once: a value may be read from a place that is written."""
    ready = []
    for place, value in zip(places, values, strict=True):
        if isinstance(place, Var):
            value = scalar(run.variable(value.expr), value.shape)
        elif value.buffer != place:
            buffer = run.allocate(value.dtype, value.size)
            run.copy(value, buffer)
            value = stored(buffer, value.shape)
        ready.append(value)
    for place, value in zip(places, ready, strict=True):
        _write(run, place, value)


@rule("while")
def _while(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    params = eqn.params
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    consts = [run.settled(run.stored(x), 2) for x in ins[: n_test + n_body]]
    avals = [v.aval for v in eqn.outvars]
    carried = ins[n_test + n_body :]
    places = [_place(run, a, x) for a, x in zip(avals, carried, strict=True)]
    carry = [_read(place, a) for place, a in zip(places, avals, strict=True)]
    going: Any = params["cond_jaxpr"].out_avals[0]
    # A mapped loop has many conditions: it goes on where its own one holds.
    goes_on = run.allocate(_BOOL, math.prod(going.shape)) if math.prod(going.shape) > 1 else None
    with run.block() as test:
        (each,) = run.closed(params["cond_jaxpr"], [*consts[:n_test], *carry])
        if goes_on is not None:
            run.copy(each, goes_on)
            condition = run.variable(number(False, _BOOL))
            with run.loops(goes_on.size) as (i,):
                now = Load(goes_on, Index().plus((i, 1)))
                run.emit(Assign(condition, Op("or", (condition, now), _BOOL)))
        else:
            condition = run.let(each.expr)
    with run.block() as body:
        outs = run.closed(params["body_jaxpr"], [*consts[n_test:], *carry])
        if goes_on is not None:
            mask = stored(goes_on, going.shape)
            outs = [_where(run, mask, new, old) for new, old in zip(outs, carry, strict=True)]
        _write_all(run, places, outs)
    run.emit(While(tuple(test), condition, tuple(body)))
    return carry


def _where(run: Lowering, mask: Value, x: Value, y: Value) -> Value:
    """`x` or `y`, by a mask along their first axes."""
    numbers = np.arange(mask.size).reshape(*mask.shape, *[1] * (len(x.shape) - len(mask.shape)))
    masks = _picked(run, [mask], np.broadcast_to(numbers, x.shape))
    return elementwise(x.shape, x.dtype, [masks, y, x], lambda *args: Op("select_n", args, x.dtype))


@rule("scan")
def _scan(run: Lowering, eqn: Any, ins: list[Value]) -> list[Value]:
    params = eqn.params
    length, closed = params["length"], params["jaxpr"]
    body = closed.jaxpr
    pairs = list(zip(eqn.invars, body.invars, strict=True))
    n_xs = sum(len(o.aval.shape) > len(i.aval.shape) for o, i in pairs)
    pairs = list(zip(eqn.outvars, body.outvars, strict=True))
    n_carry = sum(len(o.aval.shape) == len(i.aval.shape) for o, i in pairs)
    n_consts = len(ins) - n_xs - n_carry
    ins = [run.settled(run.stored(x), 2) for x in ins]
    consts, carried, xs = ins[:n_consts], ins[n_consts : -n_xs or None], ins[len(ins) - n_xs :]
    avals = [v.aval for v in eqn.outvars]
    places = [_place(run, a, x) for a, x in zip(avals, carried, strict=False)]
    carry = [_read(place, a) for place, a in zip(places, avals, strict=False)]
    stacks = [run.allocate(a.dtype, math.prod(a.shape)) for a in avals[n_carry:]]
    with run.loops(length) as (i,):

        def row(size: int) -> Index:
            first = (length - 1) * size if params["reverse"] else 0
            return Index(first).plus((i, -size if params["reverse"] else size))

        rows = [
            _row(x, v.aval, row) for x, v in zip(xs, body.invars[len(ins) - n_xs :], strict=True)
        ]
        outs = run.closed(closed, [*consts, *carry, *rows])
        for stack, out in zip(stacks, outs[n_carry:], strict=True):
            run.copy(out, stack, row(out.size))
        _write_all(run, places, outs[:n_carry])
    stacked = [stored(s, a.shape) for s, a in zip(stacks, avals[n_carry:], strict=True)]
    return [*carry, *stacked]


def _row(x: Value, aval: Any, row: Callable[[int], Index]) -> Value:
    size = math.prod(aval.shape)
    start = row(size)

    def at(i: Index) -> Expr:
        return x.at(Index(start.offset + i.offset, (*start.terms, *i.terms)))

    return Value(aval.shape, x.dtype, at)
