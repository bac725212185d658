"""The rules for reading and writing components whose numbers are computed."""

from jax.extend.core import JaxprEqn

from ..combining import SCATTERS
from ..ir import Const, Expr, Index, Load, Op, Store
from .passing import aval_of, Lowering, rule
from .values import elementwise, LoweredArray, stored


@rule("take")
def _take(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    x, numbers = ins
    x = run.stored(x)
    return [elementwise(aval_of(eqn).shape, x.dtype, [numbers], lambda i: x.at(_index(i)))]


@rule("put")
def _put(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    x, numbers, new, *masks = ins
    combined = SCATTERS[eqn.params["by"]]
    buffer = run.allocate(x.dtype, x.size)
    run.copy(x, buffer)
    with run.loops(*numbers.shape) as counters:
        where = _index(numbers.by_axes(counters))
        value = new.by_axes(counters)
        if combined or masks:
            old = run.variable(Load(buffer, where))
            value = Op(combined.name, (old, value), x.dtype) if combined else value
            for mask in masks:
                value = Op("select_n", (mask.by_axes(counters), old, value), x.dtype)
        run.emit(Store(buffer, where, value))
    return [stored(buffer, x.shape)]


def _index(number: Expr) -> Index:
    """A number as an `Index`, so that a printer can combine its sums and multiples."""
    match number:
        case Const(value):
            return Index(int(value))
        case Op("add", (x, y)):
            x, y = _index(x), _index(y)
            return Index(x.offset + y.offset, (*x.terms, *y.terms))
        case Op("mul", (x, Const(value))):
            return _index(x).shifted(0, int(value))
        case _:
            return Index().plus((number, 1))
