"""The initial states and parameters of trajectories as the user gave them; they are computed again
when they are asked for."""

import dataclasses
import functools
import operator
import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..fields.complex_numbers import with_complex
from ..ground.on_disk import OnDisk
from ..ground.state_tree import StateTree
from ..tracing.program import is_tracer
from .extended_state import Extension


# (beartype refuses `typing.Self` where it checks single methods.)
_Record = TypeVar("_Record", bound="_TrajectoryInputs")


@dataclasses.dataclass(kw_only=True)
class _TrajectoryInputs:
    """The initial states and parameters of `n` trajectories, or only of the one with this
    `index`."""

    n: int
    index: Any = None

    def of_trajectory(self: _Record, index: Any) -> _Record:
        """The initial state and the parameters of one trajectory; a negative index counts from the
        end."""
        return dataclasses.replace(self, index=index % self.n)


@dataclasses.dataclass
class KnownInputs(_TrajectoryInputs):
    """The initial states and parameters of several trajectories, or of one.

    - `starts`, `parameters`: in the structure that the user gave. Values that all trajectories
        share have no trajectory axis.
    - `own_starts`: whether the trajectories have different initial states.
    - `own_parameters`: for each leaf of the parameters, whether it differs between trajectories;
        None for a leaf that is no number.
    """

    starts: Any
    parameters: Any
    own_starts: bool
    own_parameters: Any

    @property
    def u0(self) -> PyTree:
        """The initial states `[trajectory, ...]`, or that of one trajectory `[...]`."""
        return jax.tree.map(lambda x: self._shaped(x, self.own_starts), self.starts)

    @property
    def p(self) -> PyTree:
        """The parameters; numbers among them are `[trajectory, ...]`, or `[...]` for one
        trajectory."""
        return self.of_parameters(self._shaped, lambda x: x)

    def varying(self) -> dict[str, Any]:
        """`u0` and `p`, with None for values that all trajectories share, and for leaves that are
        no numbers."""
        p = self.of_parameters(lambda x, own: x if own else None, lambda _: None)
        return {"u0": self.starts if self.own_starts else None, "p": p}

    def of_trajectories(self, indices: np.ndarray) -> "KnownInputs":
        """The inputs of these trajectories."""
        p = self.of_parameters(lambda x, own: x[indices] if own else x, lambda x: x)
        starts = jax.tree.map(lambda x: x[indices] if self.own_starts else x, self.starts)
        return dataclasses.replace(self, starts=starts, parameters=p, n=len(indices))

    def portable(self) -> "KnownInputs | None":
        """This object if it can be pickled; None if something in the parameters can't."""
        try:
            pickle.dumps(self.of_parameters(lambda x, own: own, lambda x: x))
        except (pickle.PicklingError, AttributeError, TypeError):
            return None
        return self

    def of_parameters(self, of_number: Callable, of_other: Callable) -> Any:
        """The parameters with each leaf replaced: a number `x` by `of_number(x, is_own)`, any other
        leaf by `of_other(x)`."""

        def one(own: Any, x: Any) -> Any:
            return of_other(x) if own is None else of_number(x, own)

        return jax.tree.map(
            one, self.own_parameters, self.parameters, is_leaf=lambda own: own is None
        )

    def _shaped(self, x: Any, is_own: bool) -> Any:
        if self.index is not None:
            if isinstance(x, OnDisk):
                return x[self.index] if is_own else np.asarray(x)
            return jnp.asarray(x)[self.index] if is_own else jnp.asarray(x)
        if is_own:
            return x
        is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)
        shape = (self.n, *np.shape(x))
        # A broadcast view, so that shared values are in memory only once.
        as_jax = is_tracer(x) or is_key
        return jnp.broadcast_to(x, shape) if as_jax else np.broadcast_to(np.asarray(x), shape)


@dataclasses.dataclass
class GivenInputs(_TrajectoryInputs):
    """All that is needed to compute `KnownInputs`.

    - `lanes(indices, repeat)`: returns the numbers of several trajectories, `TrajectoryNumbers`.
    - `batched`: which of these numbers differ between trajectories.
    - `tree`, `extension`: the structure of the state.
    - `numbers`, `others`: the structure of the numbers in the parameters, of which a complex one is
        a `Pair`; and the parameters with None in the place of numbers.
    """

    lanes: Callable[[Any, Any], Any]
    batched: Any
    tree: StateTree | None
    extension: Extension | None
    numbers: Any
    others: Any

    @property
    def u0(self) -> PyTree:
        return self.known.u0

    @property
    def p(self) -> PyTree:
        return self.known.p

    def varying(self) -> dict[str, Any]:
        return self.known.varying()

    def portable(self) -> KnownInputs | None:
        return self.known.portable()

    def of_trajectories(self, indices: np.ndarray) -> "GivenInputs | KnownInputs":
        """The inputs of these trajectories."""
        if not len(indices):
            return self.known_of(jnp.arange(1)).of_trajectories(indices)
        chosen = jnp.asarray(indices)

        def lanes(places: Array, repeat: Any) -> Any:
            return self.lanes(chosen[places], repeat)

        return dataclasses.replace(self, lanes=lanes, n=len(indices))

    @functools.cached_property
    def known(self) -> KnownInputs:
        if self.index is not None:
            return self.known_of(jnp.asarray(self.index)[None]).of_trajectory(0)
        return self.known_of(jnp.arange(self.n))

    def known_of(self, indices: Array | np.ndarray) -> KnownInputs:
        """The initial states and parameters of several trajectories."""
        made = self.lanes(indices, 1)
        u0 = made.u0 if self.extension is None else self.extension.user_of(made.u0)
        u0 = u0 if self.tree is None else self.tree.unravel(u0)
        own = jtu.tree_unflatten(self.numbers, map(bool, self.batched.p))
        own = with_complex(own, operator.or_)
        return KnownInputs(u0, self.parameters(made.p), bool(self.batched.u0), own, n=len(indices))

    def parameters(self, leaves: Iterable) -> PyTree:
        """The parameters, from the numbers in them."""
        return eqx.combine(with_complex(jtu.tree_unflatten(self.numbers, leaves)), self.others)
