"""Evaluates a jaxpr component by component."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.typing import DTypeLike

from ...tracing.evaluation import is_jaxpr, params_of
from ..equations import bind, called, opened, reader, registers
from . import scalars
from .values import from_constant, Scalars


class SizeLimits(NamedTuple):
    """The sizes up to which a program is small.

    - `scalars`: components of a value that is computed, and multiplications of a product.
    - `moved`: components of a value that is only moved, which costs nothing.
    - `choice`: components among which a computed index chooses.
    - `operations`: operations of the program, and, as far as they can be estimated, of a loop that
        is unrolled.
    """

    scalars: int
    moved: int
    choice: int
    operations: int


class NotSmallError(Exception):
    """The program would be too long as scalars, or it has an operation on arrays that can't be
    taken apart."""


# How a primitive is evaluated: `rule(interpreter, equation, operands) -> results`.
Rule: TypeAlias = Callable[["Interpreter", Any, Sequence[Scalars]], list[Scalars]]

RULES: dict[str, Rule] = {}
rule = registers(RULES)


class Interpreter:
    """One pass over a program by a table of rules; primitives without a rule are
    [`mapped`][ensembleode.fields.scalarising.interpreter.mapped]."""

    def __init__(self, limits: SizeLimits, rules: dict[str, Rule] = RULES):
        self.limits = limits
        self.rules = rules
        self.operations = 0

    def evaluate(self, jaxpr: Any, ins: Sequence[Scalars]) -> list[Scalars]:
        """The outputs of a jaxpr, closed or not; for the arguments see `interpreted`.

        **Raises:** [`NotSmallError`][ensembleode.fields.scalarising.interpreter.NotSmallError].
        """
        inner, env = opened(jaxpr, ins, from_constant)
        read = reader(env, from_constant)
        for eqn in inner.eqns:
            args = [read(v) for v in eqn.invars]
            apply = self.rules.get(eqn.primitive.name)
            if apply is not None:
                outs = apply(self, eqn, args)
            elif (callee := called(eqn)) is not None:
                outs = self.evaluate(callee, args)
            else:
                outs = mapped(self, eqn, args)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in inner.outvars]

    def count(self, operations: int) -> None:
        self.operations += operations
        if self.operations > self.limits.operations:
            raise NotSmallError

    def check_size(self, size: int) -> None:
        """**Raises:** `NotSmallError` for a value of so many components."""
        if size > self.limits.scalars:
            raise NotSmallError

    def scalar(
        self, name: str, emit: Callable, args: Sequence, dtype: DTypeLike, params: Any = None
    ) -> Any:
        """One component of the elementwise primitive `name`: `emit(*args)`, or something
        simpler."""
        simple = scalars.simplify(name, args, dtype, params or {})
        if simple is not None:
            return simple
        self.count(1)
        if name == "integer_pow":
            return scalars.power(args[0], params["y"], dtype)
        return emit(*(scalars.level(args) if name in scalars.SAME_SHAPE else args))


def mapped(run: Interpreter, eqn: Any, ins: Sequence[Scalars]) -> list[Scalars]:
    """Evaluate any primitive whose operands and results are single components, by `jax.vmap`."""
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    if any(math.prod(shape) != 1 for shape in shapes):
        raise NotSmallError
    run.count(1 + sum(x.computed for x in ins))
    arrays = [_array(x) for x in ins]
    outs = [v.aval for v in eqn.outvars]
    if not any(x.computed for x in ins):
        found = bind(eqn, arrays)
        return [
            Scalars(a.shape, x.dtype, [x.reshape(())]) for a, x in zip(outs, found, strict=True)
        ]
    axes = [-1 if x.computed else None for x in ins]
    try:
        found = jax.vmap(lambda *xs: bind(eqn, xs), in_axes=axes, out_axes=-1)(*arrays)
    except NotImplementedError as e:
        raise NotSmallError from e
    return [Scalars(a.shape, x.dtype, [x.reshape(1)]) for a, x in zip(outs, found, strict=True)]


def _array(x: Scalars) -> Any:
    """A value of one component as an array, with a last axis if it is computed."""
    (entry,) = x.entries
    if x.constant:
        return x.numpy()
    last = (len(x.shape),) if entry.ndim else ()
    return lax.broadcast_in_dim(entry, (*x.shape, *entry.shape), last)


# Primitives that only move data cost nothing.
_FREE = (
    *("broadcast_in_dim", "concatenate", "iota", "reshape", "rev", "slice", "split", "squeeze"),
    *("stack", "tile", "transpose", "unstack"),
)


def cost(closed: Any) -> float:
    """About how many operations a jaxpr takes, component by component."""
    total = 0.0
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        name = eqn.primitive.name
        inner = [x for x in params_of(eqn) if is_jaxpr(x)]
        if name == "while":
            return math.inf
        if inner and not name.startswith("scatter"):
            total += eqn.params.get("length", 1) * sum(map(cost, inner))
        elif name not in _FREE:
            total += max(math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars))
    return total
