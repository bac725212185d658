"""The structure of a program's Jacobian: which components of its result may depend on which
components of the state.

The program is evaluated with a set in place of each number: the components of the state that it
depends on, as the bits of an integer. Numbers that depend on no input, such as indices, are kept
beside the sets.
"""

import dataclasses as dc
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ...tracing.evaluation import scan_parts
from ...tracing.program import is_inexact, Program, tangents_of
from .. import tuning
from ..combining import REDUCTIONS
from ..equations import DRAWN, ELEMENTWISE, interpreted
from ..folding import FOLDED, FOLDED_INTEGERS
from ..gather_scatter import iota
from ..movements import MOVEMENTS
from ..products import layouts
from ..simplifying import written_out


_ELEMENTWISE = frozenset(
    [*(ELEMENTWISE + DRAWN).split(), "add_any", "convert_element_type", "stop_gradient"]
)


@dc.dataclass(frozen=True, slots=True)
class _DependentArray:
    """An array, described by what its components depend on.

    - `depends`: for each component, the set of components of the state by which its derivative may
        be nonzero.
    - `known`: the array itself, where it depends on no input.
    """

    depends: np.ndarray
    known: np.ndarray | None = None

    def __post_init__(self) -> None:
        # NumPy often returns the object itself in place of an array of objects without axes.
        object.__setattr__(self, "depends", np.asarray(self.depends, object))
        if self.known is not None:
            object.__setattr__(self, "known", np.asarray(self.known))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.depends.shape

    @property
    def all(self) -> int:
        """The union of the sets of all components."""
        return _union(self.depends.reshape(-1), (0,)).item()

    def where_not_zero(self, other: "_DependentArray") -> np.ndarray:
        """The sets that this factor contributes to a product: empty where the factor `other` is
        zero."""
        return self.depends if other.known is None else np.where(other.known != 0, self.depends, 0)


def structure(program: Program, consts: Sequence | None = None) -> np.ndarray:
    """The places where the Jacobian of a program with respect to its state may be nonzero, for any
    constants of the program or for these `consts`:
    `[component of the result, component of the state]`, booleans."""
    jaxpr = program.jaxpr
    avals: list = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    values = [_DependentArray(_nothing(a.shape)) for a in avals]
    n_consts = len(jaxpr.constvars)
    if consts is not None:
        values[:n_consts] = map(_known_array, consts)
    n = math.prod(avals[n_consts].shape)
    bits = np.array([1 << i for i in range(n)], object).reshape(avals[n_consts].shape)
    values[n_consts] = _DependentArray(bits)
    outs = _evaluate(jaxpr, values)
    depends = [d for out in outs for d in out.depends.reshape(-1)]
    return np.array([[bool(d >> i & 1) for i in range(n)] for d in depends], bool).reshape(-1, n)


def _nothing(shape: Sequence[int]) -> np.ndarray:
    return np.full(tuple(shape), 0, object)


def _mapped(x: _DependentArray, fn: Callable) -> _DependentArray:
    return _DependentArray(fn(x.depends), None if x.known is None else fn(x.known))


def _known_array(x: Any) -> _DependentArray:
    x = np.asarray(x)
    return _DependentArray(_nothing(x.shape), x)


def _union(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The union of the sets along these axes."""
    for axis in sorted(axes, reverse=True):
        x = np.asarray(np.bitwise_or.reduce(x, axis=axis, initial=0), object)
    return x


def _evaluate(jaxpr: ClosedJaxpr | Jaxpr, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    """The outputs of a jaxpr, from its constants and inputs."""
    return interpreted(jaxpr, ins, _known_array, _outputs)


def _outputs(eqn: Any, ins: list[_DependentArray]) -> list[_DependentArray]:
    outs = zip(eqn.outvars, _equation(eqn, ins), strict=True)
    return [
        x if is_inexact(v.aval) else _DependentArray(_nothing(v.aval.shape), x.known)
        for v, x in outs
    ]


def _equation(eqn: JaxprEqn, ins: list[_DependentArray]) -> list[_DependentArray]:
    name = eqn.primitive.name
    if name in _RULES:
        return _RULES[name](eqn, ins)
    if name in MOVEMENTS:
        return _moved(eqn, ins)
    if name in REDUCTIONS:
        return [_DependentArray(_union(ins[0].depends, eqn.params["axes"]))]
    if name == "custom_vjp_call":  # its derivative can be anything
        return _anything(eqn, ins)
    inner = written_out(eqn)
    if inner is not None:
        return _evaluate(inner, ins)
    return [_elementwise(eqn, ins)] if name in _ELEMENTWISE else _anything(eqn, ins)


def _anything(eqn: Any, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    depends = functools.reduce(operator.or_, (x.all for x in ins), 0)
    return [_DependentArray(np.full(v.aval.shape, depends, object)) for v in eqn.outvars]


def _elementwise(eqn: Any, ins: Sequence[_DependentArray]) -> _DependentArray:
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    shape = aval.shape
    which, *cases = ins
    if name == "select_n" and which.known is not None and which.shape == shape:
        # A boolean and an integer choose alike; an integer may choose among more than two cases.
        chosen = which.known.astype(int)
        picked = _DependentArray(_chosen(chosen, [x.depends for x in cases]))
        if all(x.known is not None for x in cases):
            return _DependentArray(picked.depends, _chosen(chosen, [x.known for x in cases]))
        return picked
    terms = [x.depends for x in ins]
    if name == "mul":
        x, y = ins
        terms = [x.where_not_zero(y), y.where_not_zero(x)]
    terms = [np.broadcast_to(x, shape) for x in terms]
    depends = np.asarray(functools.reduce(np.bitwise_or, terms), object)
    known = [x.known for x in ins if x.known is not None]
    folds = FOLDED if is_inexact(aval) else FOLDED_INTEGERS
    if name not in folds or len(known) < len(ins):
        return _DependentArray(depends)
    with np.errstate(all="ignore"):
        folded = np.broadcast_to(np.asarray(folds[name](*known)), shape)
        return _DependentArray(depends, folded.astype(aval.dtype))


def _chosen(which: np.ndarray, cases: Sequence) -> Any:
    stacked = np.stack([np.broadcast_to(x, which.shape) for x in cases])
    return np.take_along_axis(stacked, which[None], 0)[0]


def _moved(eqn: JaxprEqn, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    move = functools.partial(MOVEMENTS[eqn.primitive.name], np)
    depends = move([x.depends for x in ins], eqn.params, ())
    if any(x.known is None for x in ins):
        return [_DependentArray(d) for d in depends]
    known = move([x.known for x in ins], eqn.params, ())
    return [_DependentArray(d, k) for d, k in zip(depends, known, strict=True)]


def _iota(eqn: JaxprEqn, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    params = eqn.params
    return [_known_array(iota(np, params["shape"], params["dimension"]).astype(params["dtype"]))]


def _take(eqn: JaxprEqn, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    x, numbers = ins
    if numbers.known is None:
        return [_DependentArray(np.full(numbers.shape, x.all, object))]
    return [_mapped(x, lambda array: array[numbers.known])]


def _put(eqn: JaxprEqn, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    x, numbers, new, *masks = ins
    if numbers.known is None:
        return [_DependentArray(x.depends | new.all)]
    depends = x.depends.copy()
    # Each component also depends on its earlier contents, unless they are certainly overwritten.
    replaced = eqn.params["by"] == "scatter" and all(m.known is not None for m in masks)
    inside = np.ones(numbers.shape, bool)
    for mask in masks:
        inside = inside if mask.known is None else mask.known
    for i, d in zip(numbers.known[inside].flat, new.depends[inside].flat, strict=True):
        depends[i] = d if replaced else depends[i] | d
    return [_DependentArray(depends)]


def _dot_general(eqn: Any, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    x, y = ins
    numbers = layouts(eqn, x.shape, y.shape)  # [batch, free, contracted]
    x, y = (_mapped(v, lambda a, n=n: a.reshape(-1)[n]) for v, n in zip(ins, numbers, strict=True))
    total = np.zeros((*x.shape[:2], y.shape[1]), object)
    for k in range(x.shape[2]):
        row = _mapped(x, lambda a, k=k: a[:, :, None, k])
        column = _mapped(y, lambda a, k=k: a[:, None, :, k])
        total = total | row.where_not_zero(column) | column.where_not_zero(row)
    return [_DependentArray(total.reshape(eqn.outvars[0].aval.shape))]


def _custom_jvp_call(eqn: Any, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    """The dependence by the derivative rule of a function; the rule may call the function
    itself."""
    if not any(x.all for x in ins):
        return [_DependentArray(_nothing(v.aval.shape)) for v in eqn.outvars]
    primals = [_DependentArray(_nothing(x.shape), x.known) for x in ins]
    tangents = [
        _DependentArray(x.depends)
        for x, v in zip(ins, eqn.invars, strict=True)
        if is_inexact(v.aval)
    ]
    outs = _evaluate(tangents_of(eqn), [*primals, *tangents])
    return outs[len(eqn.outvars) :]


def _cond(eqn: JaxprEqn, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    which, *operands = ins
    branches = eqn.params["branches"]
    if which.known is not None:
        branches = [branches[max(0, min(int(which.known), len(branches) - 1))]]
    cases = [_evaluate(branch, operands) for branch in branches]
    return [functools.reduce(_joined, xs) for xs in zip(*cases, strict=True)]


def _joined(x: _DependentArray, y: _DependentArray) -> _DependentArray:
    """The dependence of a value that may be either of two."""
    depends = x.depends | y.depends
    if x.known is None or y.known is None or x.known.tobytes() != y.known.tobytes():
        return _DependentArray(depends)
    return _DependentArray(depends, x.known)


def _while(eqn: JaxprEqn, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    params = eqn.params
    n_test = params["cond_nconsts"]
    n_consts = n_test + params["body_nconsts"]
    consts, carry = ins[n_test:n_consts], ins[n_consts:]
    return _settled(lambda carry: _evaluate(params["body_jaxpr"], [*consts, *carry]), carry)


def _settled(turn: Callable, carry: Sequence[_DependentArray]) -> list[_DependentArray]:
    """The sets of the values that a loop carries, after any number of turns: iterates to a fixed
    point."""
    while True:
        after = [_joined(x, y) for x, y in zip(carry, turn(carry), strict=True)]
        if all(
            (x.known is None) == (y.known is None) and np.array_equal(x.depends, y.depends)
            for x, y in zip(carry, after, strict=True)
        ):
            return after
        carry = after


def _scan(eqn: Any, ins: Sequence[_DependentArray]) -> list[_DependentArray]:
    length, body = eqn.params["length"], eqn.params["jaxpr"]
    n_consts, n_carry = scan_parts(eqn)
    split = n_consts + n_carry
    consts, carry, xs = ins[:n_consts], ins[n_consts:split], ins[split:]
    if length * len(body.jaxpr.eqns) > tuning.MOST_UNROLLED:
        rows = [_DependentArray(_union(x.depends, (0,))) for x in xs]
        carry = _settled(lambda carry: _evaluate(body, [*consts, *carry, *rows])[:n_carry], carry)
        ys = _evaluate(body, [*consts, *carry, *rows])[n_carry:]
        return [*carry, *(_DependentArray(np.stack([y.depends] * length)) for y in ys)]
    stacks: list = [None] * length
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        rows = [_mapped(x, lambda a, i=i: a[i]) for x in xs]
        outs = _evaluate(body, [*consts, *carry, *rows])
        carry, stacks[i] = outs[:n_carry], [y.depends for y in outs[n_carry:]]
    avals = [v.aval for v in eqn.outvars[n_carry:]]
    stacked = [
        np.array([ys[k] for ys in stacks], object).reshape(a.shape) for k, a in enumerate(avals)
    ]
    return [*carry, *map(_DependentArray, stacked)]


_RULES: dict[str, Callable] = {
    "cond": _cond,
    "copy": lambda eqn, ins: ins,
    "custom_jvp_call": _custom_jvp_call,
    "dot_general": _dot_general,
    "iota": _iota,
    "optimization_barrier": lambda eqn, ins: ins,
    "put": _put,
    "scan": _scan,
    "take": _take,
    "while": _while,
}
