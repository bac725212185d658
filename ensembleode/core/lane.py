"""The numbers of trajectories, as arrays."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..ground.state_tree import StateTree
from ..numbers import NUMBERS, of_kind
from ..tracing.program import Program
from ..tracing.written_numbers import with_numbers_apart
from .extended_state import Extension
from .given import Given


_CONSTANTS = of_kind("constants")


_NAMES = [x.name for x in NUMBERS]


class Lane(collections.namedtuple("Lane", _NAMES, defaults=[None] * len(_NAMES))):
    """The numbers of one trajectory, by the names of `core.numbers`; a leaf is None where it
    doesn't apply.

    `p` and `consts` are the array leaves of the parameters and the arrays that `f` closes over.
    `count` is how many of the times in `saveat` are meant (None: all). `stop` is where a flag lies
    that ends the solve early (see `core.interrupts`).
    """

    __slots__ = ()
    count: Any  # (Or type checkers take it for the method of tuples.)

    @property
    def parameters(self) -> tuple:
        """What `f` reads besides the state and the time, as `fields.parameters_of` has it."""
        return (*self.consts, *self.p)

    def with_parameters(self, values: Sequence) -> "Lane":
        n = len(self.consts)
        return self._replace(consts=tuple(values[:n]), p=tuple(values[n:]))


@dataclasses.dataclass
class Trajectories:
    """An ensemble as arrays.

    - `field`: the vector field, a program `field(consts, u, p, t)`.
    - `beside`: the other programs of the problem, each with the name of its function.
    - `saving`: what each trajectory saves.
    - `extension`: what the state has behind the user's components; None where there is nothing.
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
    - `given`: the starts and parameters as the user gave them, whatever becomes of the numbers.
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
    beside: tuple[tuple[str, Program], ...] = ()
    extension: Extension | None = None
    given: Given | None = None

    def __post_init__(self):
        self.made = self.made or self.lanes

    def changed(self, change: Callable[[Lane], Lane], **fields: Any) -> "Trajectories":
        """With these fields, and with the numbers of trajectories as `change` makes them."""

        def after(make: Callable[[Any, Any], Lane]) -> Callable[[Any, Any], Lane]:
            return lambda index, repeat: change(make(index, repeat))

        lanes, lane, made = map(after, (self.lanes, self.lane, self.made))
        return dataclasses.replace(self, lanes=lanes, lane=lane, made=made, **fields)

    def with_numbers_apart(self) -> "Trajectories":
        """With the numbers that are written in a program among its constants."""
        programs = {"f": self.field, **dict(self.beside)}
        apart = {name: with_numbers_apart(program) for name, program in programs.items()}
        more = {x.name: apart[x.option][1] for x in _CONSTANTS if x.option in apart}

        def added(lane: Lane, more: dict[str, list] = more) -> Lane:
            return lane._replace(**{name: (*getattr(lane, name), *x) for name, x in more.items()})

        batched = added(self.batched, {name: [False] * len(x) for name, x in more.items()})
        (_, field), *beside = ((name, program) for name, (program, _) in apart.items())
        changes = {"field": field, "beside": tuple(beside), "batched": batched}
        return self.changed(added, **changes, shared=added(self.shared))
