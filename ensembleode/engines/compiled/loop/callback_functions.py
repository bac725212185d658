"""The functions of callbacks within a kernel: conditions, affects, and their other functions."""

import functools
from collections.abc import Callable
from typing import Any

from ....fields.ir import Function
from ....plan.events import CallbackProgram
from ..field.field import evaluate_with_parts
from ..llvm.builder import Builder, Value
from ..steps.description import KernelDescription
from ..steps.equations import evaluated, FieldNumbers, translated, with_groups
from ..steps.layout import LaneNumbers
from .balls import balls, bounded


class CallbackFunctions:
    """Writes the evaluation of the parts of callbacks."""

    def __init__(self, b: Builder, d: KernelDescription):
        assert d.events is not None
        self._b, self._inputs = b, d.layout.inputs
        self._names = {part: f"callback{i}" for i, part in enumerate(d.events.parts)}
        self._lowered = functools.cache(self._lower)
        self._bounded = functools.cache(lambda part: bounded(self._lowered(part)))

    def _lower(self, part: CallbackProgram) -> Function:
        inputs = with_groups(self._inputs, *part.extras)
        return translated(part.program.jaxpr, inputs, "a condition or an affect of a callback")

    def __call__(
        self,
        part: CallbackProgram,
        held: LaneNumbers,
        y: tuple,
        t: Value,
        mask: Value,
        extras: dict[str, Any],
    ) -> tuple:
        """The components of a part in the lanes of the mask, each with an entry for each lane."""
        numbers = FieldNumbers(held, u=y, **extras)
        return evaluated(self._b, self._lowered(part), numbers, t, mask, self._names[part])

    def bounded(self, part: CallbackProgram) -> tuple[int, ...]:
        """The numbers of those components of a part without extras that `balls` bounds."""
        return self._bounded(part)[0]

    def balls(
        self,
        part: CallbackProgram,
        held: LaneNumbers,
        y: tuple,
        t: Value,
        mask: Value,
        of_state: Callable[[int], Value],
        of_time: Callable[[], Value],
    ) -> list[tuple[Value, Value | None]]:
        """The components that are `bounded`, each with a bound on how much it changes while the
        state and the time change by at most `of_state` and `of_time` (see `balls.balls`); None for
        one that doesn't change."""
        b, (_, fn) = self._b, self._bounded(part)
        numbers = FieldNumbers(held, u=y)
        _, at = evaluate_with_parts(b, fn, numbers, t, mask)
        return [(b.spread(x.centre), x.radius) for x in balls(b, fn, at, of_state, of_time)]
