"""The rules for primitives that act component by component.

One more needs its name in `ELEMENTWISE` of `fields/equations.py` and a line in the engines (see
`fields/__init__.py`), and a rule here only if it has parameters.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from .. import tuning
from ..equations import branch_here, DRAWN, ELEMENTWISE
from ..ir import Const, Op
from .movement import picked
from .passing import aval_of, Lowering, rule
from .values import cast, elementwise, LoweredArray, operation, scalar


_SAME = {"add_any": "add"}
_PARAM = {
    "brownian_piece": ("which", "noises"),
    "integer_pow": ("y",),
    "philox_normal": ("which",),
    "philox_normal_of_step": ("which", "each"),
    "philox_uniform": ("which",),
    "round": ("rounding_method",),
}


@rule(ELEMENTWISE + DRAWN + "add_any")
def _elementwise(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    aval, name = aval_of(eqn), str(eqn.primitive.name)
    params = tuple(int(eqn.params[x]) for x in _PARAM.get(name, ()))
    param = params if len(params) > 1 else next(iter(params), None)
    name = _SAME.get(name, name)
    dtype = np.dtype(aval.dtype)
    return [mapped(run, aval, ins, lambda *args: operation(name, args, dtype, param))]


def mapped(run: Lowering, aval: Any, ins: Sequence[LoweredArray], fn: Callable) -> LoweredArray:
    """An array whose components are `fn` of the operands' components."""
    ins = [_broadcast(run, x, aval.shape) for x in ins]
    if sum(x.depth for x in ins) > tuning.DEEPEST:
        ins = [run.stored(x) for x in ins]
    size = math.prod(aval.shape)
    if size != 1:
        # An operand with a single component is computed before the loop.
        ins = [scalar(x.expr) if x.size == 1 else x for x in ins]
    return elementwise(aval.shape, aval.dtype, ins, fn)


def _broadcast(run: Lowering, x: LoweredArray, shape: Sequence[int]) -> LoweredArray:
    """`x` broadcast along its axes of length one; a scalar is left as it is."""
    if x.size == 1 or x.shape == tuple(shape):
        return x
    return picked(run, [x], np.broadcast_to(np.arange(x.size).reshape(x.shape), shape))


@rule("bitcast_convert_type")
def _bitcast(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    aval = aval_of(eqn)
    return [mapped(run, aval, ins, lambda x: Op(eqn.primitive.name, (x,), np.dtype(aval.dtype)))]


@rule("empty empty2")
def _empty(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    return [run.constant(np.zeros(aval_of(eqn).shape, aval_of(eqn).dtype))]


rule("convert_element_type")(lambda run, eqn, ins: [cast(ins[0], aval_of(eqn).dtype)])
# Primitives that change no values. (Some place arrays on the mesh of the trace; here the program
# runs on one device.)
_SAME_VALUES = """
    copy copy_p device_put optimization_barrier pvary reshard sharding_constraint stop_gradient
"""
rule(_SAME_VALUES)(lambda run, eqn, ins: ins)
rule("platform_index")(lambda run, eqn, ins: [scalar(Const(branch_here(eqn)))])
