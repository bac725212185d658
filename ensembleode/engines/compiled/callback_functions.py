"""The functions of callbacks within a kernel: conditions, affects and what else they have."""

import functools
from collections.abc import Callable
from typing import Any

from ...core.events import Part
from ...fields.ir import Function
from .balls import balls, has_balls
from .builder import Builder, Value
from .description import Description
from .equations import evaluated, HeldNumbers, translated, with_groups
from .field import evaluate_with_parts
from .numbers import Held


class CallbackFunctions:
    """Writes the evaluation of parts of callbacks."""

    def __init__(self, b: Builder, d: Description):
        assert d.events is not None
        self._b, self._inputs = b, d.layout.inputs
        self._names = {part: f"callback{i}" for i, part in enumerate(d.events.parts)}
        self._lowered = functools.cache(self._lower)

    def _lower(self, part: Part) -> Function:
        inputs = with_groups(self._inputs, *part.extras)
        return translated(part.program.jaxpr, inputs, "a condition or an affect of a callback")

    def __call__(
        self, part: Part, held: Held, y: tuple, t: Value, mask: Value, extras: dict[str, Any]
    ) -> tuple:
        """The components of a part, one a lane each, of the lanes of the mask."""
        numbers = HeldNumbers(held, u=y, **extras)
        return evaluated(self._b, self._lowered(part), numbers, t, mask, self._names[part])

    def has_balls(self, part: Part) -> bool:
        """Whether a part without extras has `balls`."""
        return has_balls(self._lowered(part))

    def balls(
        self,
        part: Part,
        held: Held,
        y: tuple,
        t: Value,
        mask: Value,
        of_state: Callable[[int], Value],
        of_time: Callable[[], Value],
    ) -> list[tuple[Value, Value | None]]:
        """The components likewise, and how far each is from them at most where a component of the
        state, and the time, are as far from these as `of_state` and `of_time` say: see
        `balls.balls`."""
        b, fn = self._b, self._lowered(part)
        numbers = HeldNumbers(held, u=y)
        _, at = evaluate_with_parts(b, fn, numbers, t, mask)
        return [(b.spread(x.centre), x.radius) for x in balls(b, fn, at, of_state, of_time)]
