"""Traces of a `prob_func` that are used again: by what its functions reach, and by its problem."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from ..problem import EnsembleContext, EnsembleProblem
from ..tracing.program import is_tracer
from ..tracing.reach import abstract, reached, Unkeyed
from ..tracing.trace_cache import key_of, may_keep, Operand, traces
from .traced_prob_func import Impure, Made, taken_apart, Trace, trace_checked
from .trajectory_maker import Maker, with_operands


# What of a Lane is checked where it is known.
_CHECKED = ("t0", "t1", "saveat", "abstol", "reltol", "dt", "dtmin", "dtmax")
# Options that are objects.
_OBJECTS = ("stepsize_controller", "internalnorm", "sensealg")
_BY_VALUE = "by value"


class _ReadsValues(Exception):
    """What is traced by values of the problem that it could not see isn't what it would be."""


class Memory:
    """The traces of an ensemble, by what its functions reach and by its problem.

    The arrays in `f`, `u0` and `p` are traced without their values, so that one trace is for all of
    the same shapes; but where values decide about the trace, it is for these arrays only.
    """

    def __init__(self, maker: Maker, key: Any):
        """
        **Raises:** `Unkeyed` where it can't be told what the trace depends on.
        """
        ens = maker.ens
        self.operands = [x for x in _numbers_of(ens) if isinstance(x, jax.Array)]
        if any(map(is_tracer, (*self.operands, key))):
            raise Unkeyed("the problem is being traced")
        shapes = with_operands(ens, list(map(abstract, self.operands))).prob
        others = ("prob_func", ens.prob_func, maker.solve_options, abstract(key), maker.n)
        self._ens, self._others = ens, others
        given = ens.prob.options, {k: v for k, v in maker.solve_options.items() if v is not None}
        self._objects = {k: (given[0] | given[1]).get(k) for k in _OBJECTS}
        self._things: tuple = (shapes, *others)
        self._key = reached(*self._things)
        self.indexes_numpy = False

    def recall(self, maker: Maker, key: Any, n: int) -> tuple[Made, list, list]:
        """The trace of `maker` in three, as from `taken_apart`."""
        found = None if self.indexes_numpy else self._found()
        if found is None:
            return self._made(maker, key)
        values, made = found
        if made.indexes_numpy:
            check_last(self._ens, key, n)
        # (The objects of now: those of then may have been written into.)
        made = made._replace(options=made.options | self._objects)
        return self._filled(made, values)

    def _found(self) -> tuple[list, Any] | None:
        found = traces.find(self._key)
        if found is None or found[1] is not _BY_VALUE:
            return found
        by_value = key_of(*self._by_value())
        return None if by_value is None else traces.find(by_value)

    def _by_value(self) -> tuple:
        return (self._ens.prob, *self._others)

    def _made(self, maker: Maker, key: Any) -> tuple[Made, list, list]:
        try:
            made, drew = trace_checked(maker, key, self.operands)
            self._check_values_unread(made)
            things, reached_before = self._things, self._key
        except Impure:
            raise
        except Exception:
            # It may be the fault of what it could not see. (If not, this raises again.)
            maker = Maker(maker.ens, maker.solve_options, maker.n, remembers=True)
            things = self._by_value()
            reached_before = key_of(*things)
            made, drew = trace_checked(maker, key)
            if reached_before is not None and not drew:
                traces.keep(self._key, (), _BY_VALUE)
        apart, consts, values = taken_apart(maker, made, self.indexes_numpy)
        numbers = [*consts, *values]
        may = not drew and may_keep(numbers, made.program, apart.field)
        may &= all(apart.options[k] is x for k, x in self._objects.items())
        # (Not where it changed what it depends on: then it has to be called each time.)
        if may and reached_before is not None and key_of(*things) == reached_before:
            options = apart.options | dict.fromkeys(_OBJECTS)
            traces.keep(reached_before, numbers, apart._replace(options=options))
        return self._filled(apart, numbers)

    def _check_values_unread(self, made: Trace) -> None:
        """
        **Raises:** `_ReadsValues` where a time or a tolerance depends on an operand: its value is
        to be checked.
        """
        operand = [type(x) is Operand for x in made.consts]
        depends = iter(made.program.depends_on([False] * 3, operand))
        marks = [next(depends) if is_tracer(x) else type(x) is Operand for x in made.leaves]
        lane = jtu.tree_unflatten(made.structure, marks)
        if any(jtu.tree_leaves([getattr(lane, name) for name in _CHECKED])):
            raise _ReadsValues

    def _filled(self, made: Made, numbers: Sequence) -> tuple[Made, list, list]:
        numbers = [self.operands[x.index] if type(x) is Operand else x for x in numbers]
        count = len(made.program.jaxpr.constvars)
        return made, numbers[:count], numbers[count:]


def memory_of(maker: Maker, key: Any) -> Memory | None:
    try:
        return Memory(maker, key)
    except Unkeyed:
        return None


def _numbers_of(ens: EnsembleProblem) -> list:
    return jtu.tree_leaves((ens.prob.f, ens.prob.u0, ens.prob.p))


def check_last(ens: EnsembleProblem, key: Any, n: int) -> None:
    """Raise what NumPy does for an index past the end, where JAX takes the last row."""
    ens.make(EnsembleContext(n - 1, 1, key))
