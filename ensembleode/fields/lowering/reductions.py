"""The rules for reductions."""

import math

import numpy as np
from jax.extend.core import JaxprEqn

from ..combining import REDUCTIONS
from ..ir import Assign, Op
from .passing import aval_of, Lowering, rule
from .values import LoweredArray, number


@rule(" ".join(REDUCTIONS))
def _reduce(run: Lowering, eqn: JaxprEqn, ins: list[LoweredArray]) -> list[LoweredArray]:
    (x,) = ins
    aval, axes = aval_of(eqn), eqn.params["axes"]
    by = REDUCTIONS[eqn.primitive.name]
    dtype = np.dtype(aval.dtype)
    if x.size == math.prod(aval.shape):
        return [run.flat(x)]
    kept = [a for a in range(len(x.shape)) if a not in axes]

    def component(counters):
        total = run.variable(number(by.neutral(dtype), dtype))
        with run.loops(*(x.shape[a] for a in axes)) as inner:
            by_axis = dict(zip((*kept, *axes), (*counters, *inner), strict=True))
            element = x.by_axes([by_axis[a] for a in range(len(x.shape))])
            run.emit(Assign(total, Op(by.name, (total, element), dtype)))
        return total

    return [run.built(aval.shape, dtype, component)]
