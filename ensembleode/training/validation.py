"""The loss of data that a fit isn't trained with: it tells the best parameters, and when to end."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from ..problem.options import check_count
from .data import Arrays, Batches, gives_batches, source_of
from .parallel import Placement
from .processes import from_first, is_first, needed
from .step import TrainingState, UpdateStep


@dataclasses.dataclass(frozen=True)
class Validation:
    """How a fit is validated.

    - `source`: the data, whose mean loss is computed; or `function(params)`, which returns it.
    - `every`: the number of steps between two validations; None for each pass over the data.
    - `patience`: the number of validations in succession, none lower than the lowest before, after
        which the fit ends; None for no such end.
    """

    source: Arrays | Batches | None
    function: Callable | None
    every: int | None
    patience: int | None

    def is_due(self, step: int, ends_pass: bool) -> bool:
        """Whether there is a validation after this step."""
        return ends_pass if self.every is None else step % self.every == 0

    def why_no_more(self, validations: np.ndarray) -> str:
        """Why the fit ends after these validations `[validation, (step, loss)]`; empty where it
        goes on."""
        finite = np.where(np.isfinite(validations[:, 1]), validations[:, 1], np.inf)
        lowest = int(np.argmin(finite)) if np.isfinite(finite).any() else -1
        if self.patience is None or len(finite) - 1 - lowest < self.patience:
            return ""
        if lowest < 0:
            return f"None of the {self.patience} validation losses was finite."
        step, loss = validations[lowest]
        return (
            f"The validation loss was {loss:.4g} after {step:.0f} steps, and none of the "
            f"{self.patience} after it was lower."
        )

    def loss(self, step: UpdateStep, state: TrainingState, key: Array, given: Callable) -> float:
        """The validation loss of the parameters, the same in every process. `given()` are the
        arguments of a user's function."""
        if self.function is not None:
            value = _number(self.function(*given())) if is_first() else 0.0
            return float.fromhex(from_first(value.hex().encode()).decode())
        total, items = 0.0, 0
        assert self.source is not None
        for piece in self.source.in_order():
            with needed():
                mean = step.mean_loss(state.params, state.model_state, piece.batch, key)
                total += float(mean) * piece.count
            items += piece.count
        return total / items

    def identity(self) -> dict[str, str]:
        """A digest of each array by its name; a function can't be compared."""
        return {} if self.source is None else self.source.identity()


def validation_of(
    given: Any,
    training: Arrays | Batches | None,
    placed: Placement,
    every: int | None,
    patience: int | None,
    padded: bool,
) -> Validation | None:
    """The validation for these arguments of `fit`, which has the data `training`.

    **Raises:** `ValueError` and `TypeError` for arguments that contradict each other."""
    for name, count in {"validate_every": every, "patience": patience}.items():
        if count is None:
            continue
        check_count(name, count)
        if given is None:
            raise ValueError(
                f"{name} counts validations, and there is none: give validation=, data like those "
                "to train with, or a function of the parameters."
            )
    if given is None:
        return None
    if callable(given):
        return Validation(None, given, every, patience)
    if training is None:
        raise TypeError(
            "validation must be a function here, validation(params) -> number, as this fit has no "
            "data."
        )
    size = training.items_of_batch if isinstance(training, Arrays) else None
    size = None if gives_batches(given) else size
    source = source_of(given, size, placed, shuffle=False, padded=padded)
    if isinstance(source, Batches):
        if source.once:
            raise ValueError(
                "validation can be gone over once only: give an iterable that can begin anew, such "
                "as a list."
            )
    elif isinstance(training, Arrays) and source.names != training.names:
        raise ValueError(
            f"validation must be like data, which has {', '.join(training.names)}; it has "
            f"{', '.join(source.names)}."
        )
    return Validation(source, None, every, patience)


def _number(value: Any) -> float:
    try:
        return float(value)
    except TypeError as e:
        raise TypeError(f"validation(params) must return one number; it returned {value!r}.") from e
