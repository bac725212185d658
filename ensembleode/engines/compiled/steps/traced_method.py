"""The pull-back of a method's step: JAX traces the step, and a builder writes it backwards.

In the trace, the state is an array of a size that doesn't depend on the actual state's, and a call
of the vector field stays a call. On the way back, each equation of the trace adds to the cotangents
of its operands: by JAX's rules, or for a call by the transposed field, which needs only the state
and the time. Instructions that compute forward values are written where these are first needed.

Times, sizes and weights of a step have no cotangents: they are regarded as constants.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ....fields.equations import called, used
from ....ground.recursion import Call, result_of, results_of
from ....solvers.arithmetic import ArrayArithmetic
from ....solvers.explicit_runge_kutta import RungeKutta
from ....solvers.method import Equations, Method
from ..algebra.components import componentwise
from ..algebra.reading import LoadedNumbers
from ..field.operations import operation
from ..llvm.builder import Builder, Value


# The sizes in the trace of the state, of the entries of a Jacobian, and of the factors of a matrix.
# They are told apart by these sizes; any different numbers above one would do.
_SIZE, _ENTRIES, _FACTORS = 2, 3, 4
_XP = ArrayArithmetic(jnp)


def _call(name: str, *sizes: int) -> Any:
    prim: Any = jex.Primitive(f"equations_{name}")
    prim.multiple_results = True
    prim.def_abstract_eval(lambda y, *_: [jax.core.ShapedArray((n,), y.dtype) for n in sizes])
    return prim


_F, _JVP = _call("f", _SIZE), _call("jvp", _SIZE)
_LINEARISE, _FACTORISE = _call("linearise", _ENTRIES, _SIZE), _call("factorise", _FACTORS)
_SOLVE, _MASS = _call("solve", _SIZE), _call("mass", _SIZE)
_CALLS = (_F, _JVP, _LINEARISE, _FACTORISE, _SOLVE, _MASS)


def _like(y: tuple, number: Array) -> Array:
    """The number in the dtype of a state."""
    return jnp.asarray(number, y[0].dtype)


def _linearise(y: tuple, t: Array) -> tuple:
    entries, dfdt = _LINEARISE.bind(*y, _like(y, t))
    return (entries,), (dfdt,)


_EQUATIONS = Equations(
    lambda y, t: tuple(_F.bind(*y, _like(y, t))),
    lambda y, t, dy, dt: tuple(_JVP.bind(*y, _like(y, t), *dy, _like(y, dt))),
    _linearise,
    lambda jacobian, gamma_h: tuple(_FACTORISE.bind(*jacobian, gamma_h)),
    lambda factors, right: tuple(_SOLVE.bind(*factors, *right)),
)
_WITH_MASS = dataclasses.replace(_EQUATIONS, mass=lambda y: tuple(_MASS.bind(*y)))


class TracedMethod(NamedTuple):
    """A part of a method as equations of a jaxpr; `inputs` and `outputs` are trees of variables.
    `stages` has the variables of an explicit method's stages, which no equation need have."""

    eqns: list
    inputs: Any
    outputs: Any
    stages: tuple = ()

    def before(self, wanted: Any) -> list:
        """The equations that the outputs `wanted` depend on."""
        needed, found = set(variables_of(wanted)), []
        for eqn in reversed(self.eqns):
            if needed.intersection(eqn.outvars):
                found.append(eqn)
                needed.update(variables_of(eqn.invars))
        return found[::-1]


def variables_of(tree: PyTree) -> list:
    """The variables in the tree, which may also have literals."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jex.Literal))
    return [x for x in leaves if not isinstance(x, jex.Literal)]


def _traced(fn: Callable, *inputs: Any, has_stages: bool = False) -> TracedMethod:
    """The trace of a function; with `has_stages` it returns its stages behind the outputs."""
    closed, outputs = jax.make_jaxpr(fn, return_shape=True)(*inputs)
    jaxpr: Any = closed.jaxpr
    assert not closed.consts, closed.consts
    tree = jax.tree.structure(inputs)
    found = jax.tree.unflatten(jax.tree.structure(outputs), jaxpr.outvars)
    *found, stages = found if has_stages else (*found, ())
    wanted = jaxpr.replace(outvars=jax.tree.leaves(found))
    return TracedMethod(used(wanted)[0], tree.unflatten(jaxpr.invars), found, stages)


def _structs(dtype: np.dtype) -> tuple:
    """The abstract values of a state and of a number."""
    return (jax.ShapeDtypeStruct((_SIZE,), dtype),), jax.ShapeDtypeStruct((), dtype)


@functools.lru_cache(maxsize=256)
def step_of(
    method: Method, dtype: np.dtype, *, is_dense: bool, has_mass: bool = False
) -> TracedMethod:
    """The trace of `(y, carry, t, h)` to the state at the end, the carry that the next step gets,
    and, if `is_dense`, the data from which states within the step are interpolated. A carry that
    the method can recompute from the state is left out."""
    y, number = _structs(dtype)
    equations = _WITH_MASS if has_mass else _EQUATIONS

    def fn(y, carry, t, h):
        given = carry if method.remembers else method.init(_XP, equations, y, t)
        attempt = method.step(_XP, equations, y, given, t, h)
        dense = method.dense(_XP, equations, y, attempt.dense, t, h) if is_dense else ()
        stages = attempt.dense if isinstance(method, RungeKutta) else ()
        return attempt.y2, attempt.carry if method.remembers else (), dense, stages

    carry = jax.eval_shape(lambda y, t: method.init(_XP, _EQUATIONS, y, t), y, number)
    carry = carry if method.remembers else ()
    return _traced(fn, y, carry, number, number, has_stages=True)


@functools.lru_cache(maxsize=256)
def start_of(method: Method, dtype: np.dtype) -> TracedMethod:
    """The trace of `(y, t)` to the carry of a first step."""
    return _traced(lambda y, t: method.init(_XP, _EQUATIONS, y, t), *_structs(dtype))


@functools.lru_cache(maxsize=256)
def within_of(method: Method, dtype: np.dtype) -> TracedMethod:
    """The trace of `(y, dense, h, theta)` to the state within a step."""
    y, number = _structs(dtype)

    def dense(y, t, h):
        attempt = method.step(_XP, _EQUATIONS, y, method.init(_XP, _EQUATIONS, y, t), t, h)
        return method.dense(_XP, _EQUATIONS, y, attempt.dense, t, h)

    given = jax.eval_shape(dense, y, number, number)
    interpolate = functools.partial(method.interpolate, _XP)
    return _traced(interpolate, y, given, number, number)


class OuterProducts(NamedTuple):
    """`number (w1 x1' + w2 x2' + ...)` of many components, to be summed up by a loop.

    - `pairs`: the pairs `(w, x)`, each of two lists of components.
    - `number`: the common factor; None stands for one.
    """

    pairs: tuple[tuple[Sequence[Value], Sequence[Value]], ...]
    number: Value | None = None


class EquationCalls(NamedTuple):
    """The equations of some trajectories and their transposes, as functions of values, in the lanes
    of a mask.

    - `forwards`: the vector field, its derivative along a tangent, and the operations of implicit
        methods.
    - `f(y, t, cotangent, residuals)`, `jvp(y, t, dy, dt, cotangent)`: return the cotangents of
        states, followed by those of the parameters. The residuals of the field are None where they
        were not recorded.

    For implicit methods:

    - `linearise(y, t, cotangents)`: returns the same as `f`, from the cotangents of the Jacobian's
        entries and of the derivative with respect to time; None for one that has no cotangent.
    - `solve(factors, cotangent)`: returns the cotangent of the right-hand side.
    - `outer(w, x)`: returns the products `w_i x_j` in the places of the Jacobian's entries; or
        `OuterProducts`, which `linearise` takes as well.
    - `mass(cotangent)`: returns its product with the transposed mass matrix.
    """

    forwards: Equations
    f: Callable
    jvp: Callable
    linearise: Callable
    solve: Callable
    outer: Callable
    mass: Callable


# A list of values: one for each component, or a single one for all.
_Components = Sequence[Value]


class PulledCotangents:
    """Cotangents on their way back through a `TracedMethod`.

    **Arguments:**

    - `size`: how many values represent a state (see `KernelDescription.values`).
    - `inputs`: for each leaf of the trace's inputs a list of values, or a function that returns
        such a list.
    """

    def __init__(self, b: Builder, trace: TracedMethod, size: int, inputs: Sequence):
        self.b, self.size, self.trace = b, size, trace
        variables = variables_of(trace.inputs)
        self.values: dict = dict(zip(variables, inputs, strict=True))
        # The residuals of the calls whose results these variables are.
        self.residuals: dict[Any, LoadedNumbers | None] = {}
        self._made_by = {v: eqn for eqn in trace.eqns for v in eqn.outvars}
        self.cotangents: dict = {}
        self.gradient: Any = None
        # States have cotangents; numbers have none.
        self._active = {v for v in variables if v.aval.shape}
        for eqn in trace.eqns:
            if _is_call(eqn) or self._active.intersection(variables_of(eqn.invars)):
                self._active.update(v for v in eqn.outvars if v.aval.shape)

    def value(self, atom: Any, calls: EquationCalls) -> _Components:
        return result_of(self._value(atom, calls))

    def _value(self, atom: Any, calls: EquationCalls) -> Call[_Components]:
        if isinstance(atom, jex.Literal):
            return _literal(self.b, atom)
        if atom not in self.values:
            eqn = self._made_by[atom]
            args = yield results_of(self._value(x, calls) for x in eqn.invars)
            if _is_call(eqn):
                args = [self._whole(x, v) for x, v in zip(args, eqn.invars, strict=True)]
                outs = self._called(eqn, args, calls.forwards)
            else:
                outs = _written(self.b, eqn, args)
            self.values.update(zip(eqn.outvars, outs, strict=True))
        elif callable(self.values[atom]):
            return self.values[atom]()
        return self.values[atom]

    def _called(self, eqn: Any, args: Sequence, equations: Equations) -> list:
        """The results of a call; the factors of a matrix are whatever the equations return."""
        found: Any = getattr(equations, eqn.primitive.name.removeprefix("equations_"))(*args)
        if eqn.primitive is _FACTORISE:
            return [found]
        if eqn.primitive is not _LINEARISE:
            return [list(found)]
        entries, dfdt = found
        zero = [self.b.constant(0, eqn.invars[0].aval.dtype)]
        return [entries, zero if dfdt is None else list(dfdt)]

    def operands_of_calls(self, eqns: Sequence) -> list:
        """The operands that a pull-back needs at calls of these equations with known results."""
        found = []
        for eqn in filter(_is_call, eqns):
            if eqn.primitive is not _MASS:
                found += (eqn.invars[0], *eqn.outvars) if eqn.primitive is _SOLVE else eqn.invars
        return found

    def without_cotangents(self) -> PulledCotangents:
        """A copy without cotangents, whose new values are used only in one block."""
        other = copy.copy(self)
        other.values, other.cotangents, other.gradient = dict(self.values), {}, None
        return other

    def _whole(self, x: _Components, atom: Any) -> Any:
        """A list with a value for each component, or the single value of a number."""
        if not atom.aval.shape:
            return x[0]
        if atom.aval.shape != (_SIZE,):
            return x
        return tuple(x[i % len(x)] for i in range(self.size))

    def is_active(self, atom: Any) -> bool:
        return not isinstance(atom, jex.Literal) and atom in self._active

    def cotangent_of(self, variable: Any) -> tuple:
        """The cotangent of a variable."""
        zero = [self.b.constant(0, variable.aval.dtype)]
        return self._whole(self.cotangents.get(variable, zero), variable)

    def add(self, variable: Any, more: Any) -> None:
        """Add to the cotangent of a variable."""
        found: Any = self.cotangents.get(variable)
        if isinstance(found, OuterProducts):
            assert isinstance(more, OuterProducts)
            more = OuterProducts(found.pairs + more.pairs)
        elif found is not None:
            more = _zipped(lambda a, b: b + a, found, more)
        self.cotangents[variable] = more

    def back(self, eqns: Sequence, calls: EquationCalls) -> None:
        """Pull back through these equations, the last first."""
        for eqn in reversed(eqns):
            cts = [self.cotangents.pop(v, None) for v in eqn.outvars]
            if all(c is None for c in cts):
                continue
            if _is_call(eqn):
                self._through_call(eqn, cts, calls)
                continue
            rule = _TRANSPOSED.get(eqn.primitive.name, _by_jax)
            values = [functools.partial(self.value, x, calls) for x in eqn.invars]
            active = list(map(self.is_active, eqn.invars))
            for x, more in zip(eqn.invars, rule(self.b, eqn, active, values, cts), strict=True):
                if more is not None:
                    self.add(x, more)

    def _through_call(self, eqn: Any, cts: Sequence, calls: EquationCalls) -> None:
        pairs = zip(cts, eqn.outvars, strict=True)
        whole = [None if c is None else self._whole(c, v) for c, v in pairs]
        if eqn.primitive is _SOLVE:
            (factors, right), (x,) = eqn.invars, eqn.outvars
            to_right = calls.solve(self.value(factors, calls), whole[0])
            solution = self._whole(self.value(x, calls), x)
            self.add(right, list(to_right))
            self.add(factors, calls.outer(to_right, solution))
            return
        if eqn.primitive is _MASS:
            self.add(eqn.invars[0], list(calls.mass(whole[0])))
            return
        if eqn.primitive is _FACTORISE:
            jacobian, gamma_h = eqn.invars
            (number,) = self.value(gamma_h, calls)
            if isinstance(cts[0], OuterProducts):
                self.add(jacobian, cts[0]._replace(number=number))
            else:
                self.add(jacobian, [number * x for x in cts[0]])
            return
        args = [self._whole(self.value(x, calls), x) for x in eqn.invars]
        if eqn.primitive is _LINEARISE:
            found = calls.linearise(*args, whole)
        elif eqn.primitive is _F:
            found = calls.f(*args, whole[0], self.residuals.get(eqn.outvars[0]))
        else:
            found = calls.jvp(*args, whole[0])
        found = list(found)
        for x in eqn.invars:
            if x.aval.shape:
                if self.is_active(x):
                    self.add(x, found[: self.size])
                found = found[self.size :]
        if self.gradient is not None:
            found = [b + a for a, b in zip(self.gradient, found, strict=True)]
        self.gradient = found


def _literal(b: Builder, x: Any) -> _Components:
    return [b.constant(x.val, x.aval.dtype)]


def _is_call(eqn: JaxprEqn) -> bool:
    return eqn.primitive in _CALLS


def _zipped(op: Callable, *xs: _Components, dtype: DTypeLike | None = None) -> _Components:
    """Apply `op`, whose results have this dtype, component by component."""
    n = max(map(len, xs))
    return [componentwise(op, *(x[i % len(x)] for x in xs), dtype=dtype) for i in range(n)]


_THE_SAME = ("broadcast_in_dim", "copy", "reshape", "squeeze", "stop_gradient")


def _written(b: Builder, eqn: Any, args: Sequence[_Components]) -> list[_Components]:
    name, inner = eqn.primitive.name, called(eqn)
    if name in _THE_SAME:
        return [args[0]]
    if inner is not None:
        return _evaluated(b, getattr(inner, "jaxpr", inner), args)
    name, dtype = "add" if name == "add_any" else name, eqn.outvars[0].aval.dtype

    def write(*xs: Value) -> Value:
        return operation(b, name, list(xs), dtype, eqn.params.get("y"))

    return [_zipped(write, *args, dtype=dtype)]


def _evaluated(b: Builder, jaxpr: jex.Jaxpr, args: Sequence[_Components]) -> list[_Components]:
    values: dict = dict(zip(jaxpr.invars, args, strict=True))

    def value(x: Any) -> _Components:
        return _literal(b, x) if isinstance(x, jex.Literal) else values[x]

    for eqn in used(jaxpr)[0]:
        outs = _written(b, eqn, list(map(value, eqn.invars)))
        values.update(zip(eqn.outvars, outs, strict=True))
    return list(map(value, jaxpr.outvars))


#
# Pull-backs of equations: `rule(b, eqn, active, values, cotangents)` returns the cotangents of the
# active operands
#


def _linear(*signs: int) -> Callable:
    def rule(b, eqn, active, values, cts):
        by_sign = {1: cts[0], -1: [-x for x in cts[0]] if -1 in signs else []}
        return [by_sign[sign] if a else None for sign, a in zip(signs, active, strict=True)]

    return rule


def _product(b, eqn, active, values, cts):
    pairs = zip(values[::-1], active, strict=True)
    return [_zipped(operator.mul, other(), cts[0]) if a else None for other, a in pairs]


def _by_jax(b, eqn, active, values, cts):
    """The pull-back of one equation by JAX's own rules."""
    args = [x() for x in values]
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    outs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    pairs = zip(cts, eqn.outvars, strict=True)
    cts = [[b.constant(0, v.aval.dtype)] if c is None else c for c, v in pairs]

    def pulled(xs, cs):
        def of(*chosen):
            left = iter(chosen)
            every = [next(left) if a else x for a, x in zip(active, xs, strict=True)]
            out = eqn.primitive.bind(*every, **eqn.params)
            return out if eqn.primitive.multiple_results else [out]

        return jax.vjp(of, *(x for a, x in zip(active, xs, strict=True) if a))[1](list(cs))

    jaxpr = jax.make_jaxpr(pulled)(structs, outs).jaxpr
    found = iter(_evaluated(b, jaxpr, [*args, *cts]))
    return [next(found) if a else None for a in active]


_TRANSPOSED: dict[str, Callable] = {
    "add": _linear(1, 1),
    "add_any": _linear(1, 1),
    "mul": _product,
    "neg": _linear(-1),
    "sub": _linear(1, -1),
    **dict.fromkeys(_THE_SAME[:-1], _linear(1)),
}
