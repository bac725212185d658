"""The numbers of trajectories, as arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ..tracing.program import Program
from ..tracing.written_numbers import with_numbers_apart
from .state_tree import StateTree


class Lane(NamedTuple):
    """The numbers of one trajectory; a leaf is None where it doesn't apply.

    `p` and `consts` are the array leaves of the parameters and the arrays that `f` closes over.
    `count` is how many of the times in `saveat` are meant (None: all). `stop` is where a flag lies
    that ends the solve early (see `core.interrupts`).
    """

    u0: Any
    p: tuple
    consts: tuple
    t0: Any
    t1: Any
    saveat: Any
    count: Any
    abstol: Any
    reltol: Any
    dt: Any
    dtmin: Any = None
    dtmax: Any = None
    stop: Any = None


@dataclasses.dataclass
class Trajectories:
    """An ensemble as arrays.

    - `field`: the vector field, a program `field(consts, u, p, t)`.
    - `saving`: what each trajectory saves.
    - `tree`: what the state is made of where it is a pytree; None where it is an array.
    - `options`: the resolved solver options; those that every trajectory shares.
    - `batched`: a Lane of booleans, true where a leaf varies with the trajectory.
    - `lanes(indices, repeat)`: the numbers of several trajectories; the leaves that vary have a
        leading axis.
    - `lane(index, repeat)`: those of one, computed operation by operation, as the user's own
        Python would.
    - `shared`: a Lane with those leaves that are shared and known, the rest None.
    - `traced`: whether anything here is a tracer of an outer transformation.
    - `repeatable`: whether `repeat` may be traced (not when `prob_func` has to be called).
    - `made`: `lanes` as they were made, before the times of each were laid out.
    """

    field: Program
    saving: Any
    tree: StateTree | None
    options: dict
    batched: Lane
    lanes: Callable[[Any, Any], Lane]
    lane: Callable[[Any, Any], Lane]
    shared: Lane
    traced: bool
    repeatable: bool
    made: Any = None

    def __post_init__(self):
        self.made = self.made or self.lanes

    def changed(self, change: Callable[[Lane], Lane], **fields: Any) -> "Trajectories":
        """With these fields, and with the numbers of trajectories as `change` makes them."""

        def after(make: Callable[[Any, Any], Lane]) -> Callable[[Any, Any], Lane]:
            return lambda index, repeat: change(make(index, repeat))

        lanes, lane, made = map(after, (self.lanes, self.lane, self.made))
        return dataclasses.replace(self, lanes=lanes, lane=lane, made=made, **fields)

    def with_numbers_apart(self) -> "Trajectories":
        """With the numbers that are written in the field among its constants."""
        field, numbers = with_numbers_apart(self.field)

        def added(lane: Lane, values: list = numbers) -> Lane:
            return lane._replace(consts=(*lane.consts, *values))

        batched = added(self.batched, [False] * len(numbers))
        return self.changed(added, field=field, batched=batched, shared=added(self.shared))
