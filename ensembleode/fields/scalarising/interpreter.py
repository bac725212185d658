"""Evaluates the jaxpr of one trajectory for all lanes at once."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util

from ...ground.placement import platform
from ...tracing.program import is_jaxpr, params_of
from ..equations import registers
from . import scalars
from .values import from_array, from_constant, pack, Scalars, Stacked, unpack, Value


# The largest number of components of a value that is kept as scalars, if the state is an array.
LARGEST_SCALARS_AMONG_ARRAYS = 4


class Limits(NamedTuple):
    """The sizes up to which values are kept as scalars, and operations are done scalar by scalar.

    - `scalars`: components of a value.
    - `moved`: components of a value that is only moved, which costs nothing.
    - `dot`: multiplications of a product of which all lanes share one factor.
    - `batched_dot`: multiplications of a product whose factors both have lanes.
    - `choice`: components to choose among by an index that differs from lane to lane.
    - `unrolled`: operations of an unrolled loop, as far as they can be estimated.
    """

    scalars: int = 64
    moved: int = 64
    dot: int = 9
    batched_dot: int = 36
    choice: int = 16
    unrolled: int = 128


# Primitives that take many instructions, or a branch for each element.
_COSTLY = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt concatenate cos cosh
    digamma div dynamic_update_slice erf erf_inv erfc exp exp2 expm1 igamma igammac lgamma log
    log1p log2 logistic pad polygamma pow regularized_incomplete_beta rem rsqrt scatter
    scatter-add scatter-max scatter-min scatter-mul scatter-sub sin sinh sqrt stack tan tanh
    zeta
"""
COMPUTED_ONCE = frozenset(_COSTLY.split())


# Limits that measurements showed to be fast.
_LANES = Limits()


class TooLong(Exception):
    """Taken apart into scalars, the program would be too long, or a matrix product would be taken
    apart."""


class NotInLanesError(Exception):
    """The field has an operation that can't be done for all lanes at once; the message says why."""

    def __init__(self, eqn: Any, why: str):
        name = eqn.primitive.name
        super().__init__(f"{name}, at {source_info_util.summarize(eqn.source_info)}: {why}")


# How a primitive is evaluated: `rule(interpreter, equation, operands) -> results`.
Rule: TypeAlias = Callable[["Interpreter", Any, Sequence[Value]], list[Value]]

RULES: dict[str, Rule] = {}
rule = registers(RULES)


class Interpreter:
    """One pass over a program.

    **Arguments:**

    - `scalarised`: whether the state is scalars. If so, all small values are scalars too; otherwise
        only very small ones are.
    - `budget`: how many operations may be emitted before [`TooLong`][] is raised.
    - `limits`: see [`Limits`][].
    """

    def __init__(self, scalarised: bool, budget: int | None = None, limits: Limits = _LANES):
        self.scalarised = scalarised
        self.limits = limits
        self.largest = limits.scalars if scalarised else LARGEST_SCALARS_AMONG_ARRAYS
        self.budget = budget
        self.operations = 0
        self.rules = RULES
        self.on_cpu = platform() == "cpu"
        self.differentiated = True

    def evaluate(self, jaxpr: Any, consts: Sequence[Value], ins: Sequence[Value]) -> list[Value]:
        """The outputs of a jaxpr.

        **Raises:** [`TooLong`][] past the budget.
        """
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *ins], strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, jex.Literal):
                aval: Any = atom.aval
                return from_constant(np.asarray(atom.val, aval.dtype))
            return env[atom]

        for eqn in jaxpr.eqns:
            apply = self.rules.get(eqn.primitive.name, mapped)
            outs = apply(self, eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def evaluate_closed(self, closed: Any, ins: Sequence[Value]) -> list[Value]:
        """The outputs of a jaxpr that is closed, or has no constants."""
        consts = [from_array(jnp.asarray(c), False) for c in getattr(closed, "consts", ())]
        return self.evaluate(getattr(closed, "jaxpr", closed), consts, ins)

    def is_apart(self, shape: tuple[int, ...]) -> bool:
        """Whether arguments and results of this shape are taken apart into scalars."""
        size = math.prod(shape)
        return size <= 1 or (self.scalarised and size <= self.largest)

    def count(self, operations: int) -> None:
        self.operations += operations
        if self.budget is not None and self.operations > self.budget:
            raise TooLong(f"more than {self.budget} operations")

    def scalar(self, name: str, emit: Callable, args: Sequence, dtype: Any, params: Any = None):
        """One component of the elementwise primitive `name`: `emit(*args)`, or something
        simpler."""
        simple = scalars.simplify(name, args, dtype, params or {})
        if simple is not None:
            return simple
        self.count(1)
        if name == "integer_pow":
            return self.computed_once(name, scalars.power(args[0], params["y"], dtype))
        args = scalars.level(args) if name in scalars.SAME_SHAPE else args
        return self.computed_once(name, emit(*args))

    def computed_once(self, name: str, x: Any) -> Any:
        """The result `x` of a primitive, behind a barrier so that it isn't recomputed at each use.

        XLA's CPU compiler fuses a computation into each of its uses, and the stages of a step are
        used often. Measured on steps of seven stages, the barrier makes a field with a sine two to
        eight times faster, and one with a `jnp.roll` of an array three to eight times.
        """
        if self.on_cpu and name in COMPUTED_ONCE and x.ndim:
            return lax.optimization_barrier(x)
        return x

    def as_scalars(self, ins: Sequence[Value], size: int) -> list[Scalars] | None:
        """The operands as scalars; None where `size` components are better computed from arrays."""
        if size > self.largest:
            return None
        arrays = [x for x in ins if isinstance(x, Stacked)]
        if arrays:
            # A small shared table next to scalars is taken apart; an array that has lanes is not.
            beside = any(isinstance(x, Scalars) and x.batched for x in ins)
            small = all(not x.batched and math.prod(x.shape) <= self.largest for x in arrays)
            if not (self.scalarised and beside and small):
                return None
        return [unpack(x) for x in ins]

    def results(self, arrays: Sequence, batched: bool) -> list[Value]:
        """Lanes-last arrays as values."""
        outs = [from_array(x, batched) for x in arrays]
        if self.scalarised and batched:
            # Where the state is scalars, small results become scalars again.
            for i, x in enumerate(outs):
                size = math.prod(x.shape)
                if 1 < size <= self.largest:
                    self.count(size)
                    outs[i] = unpack(x)
        return outs


def bind(eqn: Any, args: Sequence) -> list:
    """Evaluate one equation by JAX itself."""
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def mapped(run: Interpreter, eqn: Any, ins: Sequence[Value]) -> list[Value]:
    """Evaluate any primitive by `jax.vmap`, with the lanes last.

    A result that `jax.vmap` leaves without an axis stays shared by all lanes. Fields may rely on
    that: the error checks of Equinox do, whose branches are chosen by whether *any* lane is wrong.

    **Raises:** [`NotInLanesError`][] where JAX can't map the primitive.
    """
    run.count(1 + sum(len(x.entries) for x in ins if isinstance(x, Scalars) and x.batched))
    packed = [pack(x) for x in ins]
    arrays = [x.array for x in packed]
    if not any(x.batched for x in packed):
        return run.results(bind(eqn, arrays), False)
    axes = [-1 if x.batched else None for x in packed]
    results: list[Any] = [None] * len(eqn.outvars)

    def call(*args):
        lanes = args[axes.index(-1)]._trace
        with_lanes = []
        for i, x in enumerate(bind(eqn, args)):
            here = getattr(x, "_trace", None) is lanes
            if here and x.batch_dim is not None:
                with_lanes.append((i, x))
            else:
                results[i] = run.results([jnp.asarray(x.val if here else x)], False)[0]
        numbers.extend(i for i, _ in with_lanes)
        return [x for _, x in with_lanes]

    numbers: list[int] = []
    try:
        outs = jax.vmap(call, in_axes=axes, out_axes=-1)(*arrays)
    except NotImplementedError as e:
        raise NotInLanesError(eqn, str(e)) from e
    for i, x in zip(numbers, run.results(outs, True), strict=True):
        results[i] = x
    return results


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
