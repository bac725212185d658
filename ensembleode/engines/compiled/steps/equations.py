"""Writes the equations of a kernel: the field and its derivatives, their transposes, and the linear
equations of implicit methods."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from ....fields import Inputs, UntranslatableError
from ....fields.derivatives.elimination import eliminated
from ....fields.derivatives.jacobian import Jacobian, jacobian, tangent
from ....fields.derivatives.outer_products import taken_out
from ....fields.derivatives.transposes import transposed, transposed_jacobian
from ....fields.ir import Function
from ....fields.walking import length
from ....solvers.mass_matrix import MassMatrix, rows_for_pivots
from ....solvers.method import Equations
from ..algebra.components import Array, copied, numbers_of, StoredArray
from ..algebra.linear import LinearEquations
from ..algebra.parameter_sums import ParameterSums
from ..algebra.products import Strips
from ..algebra.reading import LoadedNumbers, Memory, OperandReader
from ..field.field import by_loops, evaluate, evaluate_apart, lowered
from ..field.operations import check
from ..llvm.branches import either
from ..llvm.builder import Builder, ElementPointer, Value
from . import tuning
from .description import KernelDescription, with_gradients
from .layout import LaneNumbers
from .traced_method import EquationCalls, OuterProducts


class FieldNumbers(OperandReader):
    """The numbers that a field reads: the state, and the parameters that the lanes hold."""

    def __init__(self, held: LaneNumbers, **groups: Sequence[Value] | Sequence[Array]):
        self.held = held
        self._groups = {name: numbers_of(x) for name, x in groups.items()}

    def load(self, group: str, dtype: np.dtype, index: int) -> Value:
        found = self._groups.get(group)
        return self.held.load(group, dtype, index) if found is None else found[index]

    def memory(self, group: str, dtype: np.dtype, start: int, end: int) -> Memory | None:
        found = self._groups.get(group)
        if found is None:
            return self.held.memory(group, dtype, start, end)
        return found.memory if isinstance(found, LoadedNumbers) else None

    def packed(self, strips: Strips) -> ElementPointer | None:
        return None if strips.weights.buffer.group in self._groups else self.held.packed(strips)


def equations_in(b: Builder, d: KernelDescription) -> Callable[[LaneNumbers, Value], Equations]:
    """The equations of the trajectories in `held`, in the form that `Loop` wants."""
    inputs, what = d.layout.inputs, "f, or a derivative of f,"
    fn = translated(d.field.jaxpr, inputs, what, in_memory=d.in_memory)

    @functools.cache
    def along() -> Function:
        return translated(tangent(d.field), with_groups(inputs, "tangent", "dt"), what)

    linear = _Linear(b, d)

    def of(held: LaneNumbers, mask: Value, checks: bool = True) -> Equations:
        def f(y: tuple, t: Value) -> tuple:
            return evaluated(b, fn, FieldNumbers(held, u=y), t, mask, "field")

        def jvp(y: tuple, t: Value, dy: tuple, dt: Value) -> tuple:
            dt = b.spread(b.as_value(dt, d.dtype))
            numbers = FieldNumbers(held, u=y, tangent=dy, dt=[dt])
            return evaluated(b, along(), numbers, t, mask, "tangent")

        def linearise(y: tuple, t: Value) -> tuple:
            fn, n = linear.function, len(linear.jacobian.pattern)
            apart = fn.size > tuning.MOST_INLINED
            entries = _called(b, fn, FieldNumbers(held, u=y), t, mask, "jacobian", apart=apart)
            dfdt = tuple(map(b.spread, entries[n:])) if linear.jacobian.has_dfdt else None
            if isinstance(entries, LoadedNumbers):
                return LoadedNumbers(entries.memory, n), dfdt
            return tuple(map(b.spread, entries[:n])), dfdt

        def factorise(jacobian: LoadedNumbers | tuple[Value, ...], gamma_h: Value) -> Any:
            return linear.solver.factorise(jacobian, b.spread(gamma_h), checks=checks)

        def solve(factors: Any, right: tuple) -> tuple:
            return linear.solver.solve(factors, right)

        def row_sums(jacobian: tuple) -> tuple:
            sums = [b.constant(0, d.dtype, of_lanes=True)] * d.size
            for (i, _), x in zip(linear.jacobian.pattern, jacobian, strict=True):
                sums[i] = sums[i] + abs(b.spread(x))
            return tuple(sums)

        def branch(here: Value, then: Callable, otherwise: Callable) -> Any:
            if b.lanes and not here.lanes:
                # All lanes are in the same branch.
                same = of(held, mask, checks)
                second = ~here, lambda: otherwise(same)
                return either(b, here, (here, lambda: then(same)), second)
            inside, others = mask & here, mask & ~here
            first = inside, lambda: then(of(held, inside, checks))
            return either(b, here, first, (others, lambda: otherwise(of(held, others, checks))))

        found = Equations(f, jvp, linearise, factorise, solve, row_sums, branch=branch)
        return found if d.mass is None else _with_mass(b, d, d.mass, found)

    return of


def keeping_in(
    b: Builder, d: KernelDescription, equations: Callable[[LaneNumbers, Value], Equations]
) -> Callable[[LaneNumbers, Value, Callable[[], Memory]], Equations] | None:
    """The equations whose field also stores its derivative and residuals, in the memory that the
    third argument returns. None where residuals are not recorded."""
    if (parts := d.parts) is None:
        return None
    inputs = with_groups(d.layout.inputs, "forward")
    fn = translated(parts.forward, inputs, "f", in_memory=d.in_memory)

    def of(held: LaneNumbers, mask: Value, place: Callable[[], Memory]) -> Equations:
        def f(y: tuple, t: Value) -> tuple:
            numbers, at = FieldNumbers(held, u=y, forward=y), (b.spread(t), b.spread(mask))
            found = evaluate_apart(b, fn, "field_in_parts", numbers, *at, result=place())
            return _components(d, found, d.size)

        return dataclasses.replace(equations(held, mask), f=f)

    return of


def _summed(b: Builder, products: OuterProducts, more: Sequence[Value]) -> LoadedNumbers:
    """The sum of products, row by row, and then more numbers."""
    first = products.pairs[0][0]
    n, dtype = len(first), first[0].dtype
    total = Memory.new(b, dtype, n * n + len(more), of_lanes=True)
    number = b.constant(1, dtype) if products.number is None else products.number
    pairs = [([number * y for y in w], x) for w, x in products.pairs]
    factors = [Memory.new(b, dtype, n, of_lanes=True) for _ in pairs for _ in range(2)]
    for memory, components in zip(factors, itertools.chain(*pairs), strict=True):
        for i, value in enumerate(components):
            memory.store(i, b.spread(value))

    def row(i: Value) -> None:
        left = [w.load(i) for w in factors[::2]]

        def column(j: Value) -> None:
            now = left[0] * factors[1].load(j)
            for w, x in zip(left[1:], factors[3::2], strict=True):
                now = b.mul_add(w, x.load(j), now)
            total.store(i * n + j, now)

        b.for_(n, column)

    b.for_(n, row)
    for i, value in enumerate(more):
        total.store(n * n + i, b.spread(value))
    return LoadedNumbers(total, n * n + len(more))


def _with_mass(
    b: Builder, d: KernelDescription, mass: MassMatrix, equations: Equations
) -> Equations:
    """The equations with a mass matrix."""
    zero = b.constant(0, d.dtype, of_lanes=True)
    rows = tuple(i for i in range(d.size) if i not in mass.algebraic_rows)

    def without(places: tuple[int, ...], y: tuple) -> tuple:
        return tuple(zero if i in places else x for i, x in enumerate(y))

    return dataclasses.replace(
        equations,
        mass=lambda y: mass.times(y, lambda _: zero),
        differential=functools.partial(without, mass.algebraic_columns),
        algebraic=functools.partial(without, rows),
    )


class _Linear:
    """The linear equations of implicit methods; each part is made when it is first asked for."""

    def __init__(self, b: Builder, d: KernelDescription):
        self.b, self.d = b, d

    @functools.cached_property
    def jacobian(self) -> Jacobian:
        return self._jacobian(apart=True)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the Jacobian is large, and none of its entries is known to be zero."""
        return self.d.size**2 == len(self.jacobian.pattern) > tuning.MOST_INLINED

    @functools.cached_property
    def in_arrays(self) -> Jacobian:
        """The same Jacobian, computed by operations on arrays, for loops."""
        return self._jacobian(apart=False)

    def _jacobian(self, *, apart: bool) -> Jacobian:
        product = None if self.d.form is None else self.d.form.product
        return jacobian(self.d.field, product, apart=apart)

    @functools.cached_property
    def function(self) -> Function:
        """The function that computes the entries of the Jacobian."""
        return translated(self.jacobian.jaxpr, self.d.layout.inputs, "the Jacobian of f")

    @functools.cached_property
    def solver(self) -> LinearEquations:
        pattern, mass = self.jacobian.pattern, self.d.mass
        if mass is None:
            return LinearEquations(self.b, eliminated(self.d.size, pattern), pattern)
        of_mass = {(i, j): x for i, j, x in mass.entries}
        places = (*pattern, *of_mass)
        plan = eliminated(self.d.size, places, rows_for_pivots(mass, pattern))
        return LinearEquations(self.b, plan, pattern, of_mass)


def calls_in(
    b: Builder, d: KernelDescription, equations: Callable, sums: ParameterSums | None
) -> Callable[[LaneNumbers, Value], EquationCalls]:
    """The equations and their transposes, in the form that `replay.Pullback` wants. With `sums`,
    the cotangents of parameters are added there; otherwise the transposes return them."""
    own, shared = with_gradients(d)

    @functools.cache
    def pulled(*groups: str) -> Callable:
        jaxpr = transposed(d.field, [*own, *shared], of_tangent=len(groups) > 1)
        name = "transposed" if len(groups) == 1 else "transposed_tangent"
        return called(jaxpr, groups, name, "the derivative of f", len(groups) // 2 + 1)

    linear = _Linear(b, d)

    @functools.cache
    def pulled_jacobian() -> Callable:
        made = linear.in_arrays if linear.is_whole else linear.jacobian
        jaxpr = transposed_jacobian(d.field, made, [*own, *shared])
        return called(jaxpr, ("forward",), "transposed_jacobian", "a derivative of f", 1)

    def called(
        jaxpr: jex.Jaxpr, groups: Sequence[str], name: str, what: str, states: int
    ) -> Callable[[FieldNumbers, Value, Value], tuple]:
        """The function that a program computes; its first `states` results are states."""
        inputs = with_groups(d.layout.inputs, *groups)
        return pulled_by(b, d, sums, jaxpr, inputs, name, what, states * d.size + d.returned)

    @functools.cache
    def pulled_part() -> Callable:
        parts = d.parts
        assert parts is not None
        inputs = with_groups(d.layout.inputs, "forward")
        *starts, _ = itertools.accumulate(map(math.prod, parts.residuals), initial=0)
        places = (("residuals", start) for start in starts)
        inputs = inputs._replace(places=(*inputs.places, *places))
        what = "transposed_part", "the derivative of f"
        return pulled_by(b, d, sums, parts.backward, inputs, *what, d.size + d.returned)

    def of(held: LaneNumbers, mask: Value) -> EquationCalls:
        def f(
            y: tuple, t: Value, cotangent: tuple, residuals: LoadedNumbers | None = None
        ) -> tuple:
            if residuals is None:
                numbers = FieldNumbers(held, u=cotangent, forward=y)
                return pulled("forward")(numbers, t, mask)
            numbers = FieldNumbers(held, u=cotangent, forward=y, residuals=residuals)
            return pulled_part()(numbers, t, mask)

        def jvp(y: tuple, t: Value, dy: tuple, dt: Value, cotangent: tuple) -> tuple:
            numbers = FieldNumbers(held, u=cotangent, forward=y, tangent=dy, dt=[b.spread(dt)])
            return pulled("forward", "tangent", "dt")(numbers, t, mask)

        def linearise(y: tuple, t: Value, cotangents: Sequence) -> tuple:
            zeros = [b.constant(0, d.dtype, of_lanes=True)] * d.size
            entries, dfdt = cotangents
            more = (zeros if dfdt is None else dfdt) if linear.jacobian.has_dfdt else ()
            if isinstance(entries, OuterProducts):
                given = _summed(b, entries, more)
            else:
                n = len(linear.jacobian.pattern)
                given = [*(zeros[:1] * n if entries is None else entries), *more]
            numbers = FieldNumbers(held, u=given, forward=y)
            return pulled_jacobian()(numbers, t, mask)

        def solve(factors: Any, cotangent: tuple) -> tuple:
            return linear.solver.solve_transposed(factors, cotangent)

        def outer(w: Sequence, x: Sequence) -> list | OuterProducts:
            if linear.is_whole:
                return OuterProducts(((w, x),))
            return [w[i] * x[j] for i, j in linear.jacobian.pattern]

        def mass(cotangent: tuple) -> tuple:
            assert d.mass is not None
            return d.mass.transposed().times(cotangent, lambda x: x * 0.0)

        return EquationCalls(
            equations(held, mask, checks=False), f, jvp, linearise, solve, outer, mass
        )

    return of


def pulled_by(
    b: Builder,
    d: KernelDescription,
    sums: ParameterSums | None,
    jaxpr: jex.Jaxpr,
    inputs: Inputs,
    name: str,
    what: str,
    kept: int,
) -> Callable[[FieldNumbers, Value, Value], tuple]:
    """The function of numbers, the time and the mask that computes a transposed program. The
    program's results after the first `kept` are cotangents of parameters. With `sums`, these are
    added there, and only the first `kept` are returned.

    **Raises:** `ValueError` that says `what` can't be translated.
    """
    if sums is None:
        fn = translated(jaxpr, inputs, what, in_memory=d.in_memory)
        return lambda numbers, t, mask: evaluated(b, fn, numbers, t, mask, name)
    program = taken_out(jaxpr, kept)
    fn = translated(program.jaxpr, inputs, what, in_memory=d.in_memory)
    collection = sums.collection(name, program, kept)

    def call(numbers: FieldNumbers, t: Value, mask: Value) -> tuple:
        at = b.spread(t), b.spread(mask)
        found = evaluate_apart(b, fn, name, numbers, *at, result=collection.next())
        # (Later calls store their results in the same memory.)
        results = tuple(map(copied, _components(d, found, kept)))
        collection.add(at[1])
        return results

    return call


def with_groups(inputs: Inputs, *groups: str) -> Inputs:
    """The layout with more inputs at the end of `p`, each in a group of its own."""
    return inputs._replace(places=(*inputs.places, *((group, 0) for group in groups)))


def translated(jaxpr: jex.Jaxpr, inputs: Inputs, what: str, *, in_memory: bool = False) -> Function:
    """A lowered function; `in_memory` says whether states are.

    **Raises:** `ValueError` for a program that can't be translated.
    """
    try:
        fn = (by_loops if in_memory else lowered)(jaxpr, inputs, tuning.LARGEST_RETURNED)
        check(fn)
    except UntranslatableError as e:
        raise ValueError(
            f"{what} can't be translated: it uses {e.what}, at {e.where}. Write that part "
            'otherwise, or use engine="diffrax", and on GPUs EnsembleGPUArray().'
        ) from e
    return fn


def evaluated(
    b: Builder, fn: Function, numbers: FieldNumbers, t: Value, mask: Value, name: str
) -> tuple:
    """The components of a function's result, one for each lane."""
    problem = numbers.held.problem
    if problem.in_memory:
        found = evaluate_apart(b, fn, name, numbers, b.spread(t), b.spread(mask))
        return _components(problem, found, len(found))
    return tuple(map(b.spread, _called(b, fn, numbers, t, mask, name)))


def _components(d: KernelDescription, found: LoadedNumbers, n: int) -> tuple:
    """The first `n` components of a result in memory, which begins with a state."""
    if d.in_memory:
        return StoredArray(found.memory, d.size), *found[d.size : n]
    return tuple(found[:n])


def _called(
    b: Builder,
    fn: Function,
    numbers: OperandReader,
    t: Value,
    mask: Value,
    name: str,
    *,
    apart: bool = False,
) -> Sequence[Value]:
    """The components of a function's result. A long or `apart` function is a separate one."""
    if apart or length(fn.body) > tuning.LONGEST_INLINED:
        return evaluate_apart(b, fn, name, numbers, b.spread(t), b.spread(mask))
    return evaluate(b, fn, numbers, t, mask)
