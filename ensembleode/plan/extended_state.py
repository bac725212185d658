"""States with components behind the user's: integrals, and held numbers.

An engine sees one vector,
`[user's components | integrals | noise | clock | errors | held numbers]`. Its step-size control,
its norms and its checks for failure look only at the first part, which has `Extension.controlled`
components. So the steps, and the bits of the user's components, are those of the problem without
the other parts.

- The integral of a function `q(u, p, t)` is a component whose derivative is `q`.
- The clock is the time and the number of the step (with adaptive steps, the part of the time span
    that has passed), which the step of a stochastic method reads; the noise is the path so far; the
    errors are those of an adaptive step. See `noise.py`.
- A held number is a constant or a parameter of the field that an event may change. Its derivative
    is zero, and the field reads it from the state.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr
from jaxtyping import PyTree

from ..fields import parameters_of, staged
from ..fields.complex_numbers import with_complex
from ..ground.state_tree import leaf_names, StateTree
from ..tracing.program import Program, program_of, structs_of, substituted, with_constants


@dataclasses.dataclass(frozen=True)
class Extension:
    """The parts of an engine's state. An extension is static, and a part of the plan.

    - `user`: the shape and dtype of the user's state, without the other parts (a pytree as a
        vector: see `ground.state_tree`).
    - `integral`: the structure of the integrals; None where there are none.
    - `has_clock`: whether there is a clock.
    - `noise`: the names and shapes of the paths that are kept.
    - `has_errors`: whether there are errors, of the user's components.
    - `held`: the held numbers, each with its place among the field's constants and parameters
        (constants first), its shape and its dtype.
    - `parameters`: the place of the first parameter in that list, and the structure of the
        parameters; None without held numbers.
    """

    user: jax.ShapeDtypeStruct
    integral: StateTree | None = None
    held: tuple[tuple[int, jax.ShapeDtypeStruct], ...] = ()
    parameters: tuple[int, Any] | None = None
    # (Not in the text of an extension, of which fingerprints of stores are made.)
    has_clock: bool = dataclasses.field(default=False, repr=False)
    noise: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(default=(), repr=False)
    has_errors: bool = dataclasses.field(default=False, repr=False)

    @property
    def controlled(self) -> int:
        """The number of components that step-size control looks at; they are the first ones."""
        return math.prod(self.user.shape)

    @property
    def size(self) -> int:
        """The number of all components."""
        return self._ends[-1]

    @property
    def vector(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the engine's state."""
        return jax.ShapeDtypeStruct((self.size,), self.user.dtype)

    @property
    def _ends(self) -> tuple[int, int, int, int, int, int]:
        """The places at which the parts end."""
        sizes = (
            self.controlled,
            0 if self.integral is None else self.integral.size,
            sum(math.prod(shape) for _, shape in self.noise),
            2 * self.has_clock,
            self.controlled if self.has_errors else 0,
            sum(math.prod(x.shape) for _, x in self.held),
        )
        one, two, three, four, five, six = itertools.accumulate(sizes)
        return one, two, three, four, five, six

    @property
    def errors(self) -> tuple[int, int] | None:
        """The places at which the errors begin and end; None where there are none."""
        return self._ends[3:5] if self.has_errors else None

    def user_of(self, u: Array) -> Array:
        """The user's part `[..., *state]` of states `[..., component]`."""
        return u[..., : self.controlled].reshape(*u.shape[:-1], *self.user.shape)

    def integral_of(self, u: Array) -> PyTree:
        """The integrals of states `[..., component]`, in the structure that the integrand returned;
        None where there are none."""
        if self.integral is None:
            return None
        first, end, *_ = self._ends
        return self.integral.unravel(u[..., first:end])

    def clock_of(self, u: Array) -> tuple[Array, Array]:
        """The time and the number of the step, of a vector `[component]`."""
        start = self._ends[2]
        return u[start], u[start + 1]

    @property
    def around_time(self) -> tuple[int, int]:
        """How many components are between those of the user and the time of the clock, and how many
        after it, but for held numbers."""
        return self._ends[2] - self._ends[0], self._ends[4] - self._ends[2] - 1

    def noise_of(self, u: Array) -> dict[str, Any] | None:
        """The paths of the noise in states `[..., component]`, by their names; None where none are
        kept."""
        if not self.noise:
            return None
        start, found = self._ends[1], {}
        for name, shape in self.noise:
            end = start + math.prod(shape)
            found[name] = u[..., start:end].reshape(*u.shape[:-1], *shape)
            start = end
        return found

    def held_of(self, u: Array) -> tuple:
        """The held numbers of states `[..., component]`, each with its shape and dtype."""
        start, found = self._ends[4], []
        for _, x in self.held:
            end = start + math.prod(x.shape)
            found.append(u[..., start:end].reshape(*u.shape[:-1], *x.shape).astype(x.dtype))
            start = end
        return tuple(found)

    def changing_of(self, u: Array) -> PyTree:
        """The held parameters in states `[..., component]`, in the structure of the parameters,
        with None for those that aren't held; None where none are."""
        if self.parameters is None:
            return None
        first, structure = self.parameters
        leaves = self.with_held([None] * (first + structure.num_leaves), u)[first:]
        return with_complex(jtu.tree_unflatten(structure, leaves))

    def with_held(self, numbers: Sequence, u: Array) -> list:
        """The field's constants and parameters, with the held ones taken from the state."""
        return substituted(numbers, [i for i, _ in self.held], self.held_of(u))

    def state(
        self, user: Any, integrals: Array | None = None, held: Sequence = (), beside: Sequence = ()
    ) -> Array:
        """The vector `[component]` from the user's state, the vector of the integrals (by default
        zeros, as at the start), the held numbers, and the numbers of the noise, the clock and the
        errors (by default zeros)."""
        first, second, *_, end, _ = self._ends
        if integrals is None:
            integrals = jnp.zeros(second - first, self.user.dtype)
        if not len(beside):
            beside = (jnp.zeros(end - second, self.user.dtype),)
        parts = [x for x in (user, integrals, *beside, *held) if np.size(x)]
        return jnp.concatenate([jnp.reshape(x, -1).astype(self.user.dtype) for x in parts])

    def integrals(self, u: Array) -> Array:
        """The integrals of a vector `[component]`, as a vector."""
        first, end, *_ = self._ends
        return u[first:end]

    def beside(self, u: Array) -> tuple:
        """The numbers of the noise, the clock and the errors of a vector `[component]`."""
        _, start, *_, end, _ = self._ends
        return (u[start:end],) if end > start else ()

    def tolerance(self, value: np.ndarray) -> Array | np.ndarray:
        """A tolerance (a number, or one for each component of the user's state), extended to the
        vector. Nothing uses the values for the other components."""
        if np.ndim(value) == 0:
            return value
        more = np.ones(self.size - self.controlled)
        return jnp.concatenate([jnp.reshape(value, -1), more.astype(value.dtype)])


@functools.lru_cache(maxsize=256)
def integrals_of(
    integrand: Program, state: jax.ShapeDtypeStruct, tree: StateTree | None
) -> StateTree:
    """The structure of the integrals of an integrand `q(consts, u, p, t)`, for a state that is the
    vector of this `tree`. They are complex if one of them is.

    **Raises:** `TypeError` where the integrand doesn't return numbers of the state's precision;
    `ValueError` where it returns nothing.
    """
    if not sum(math.prod(x.shape) for x in integrand.out_avals):
        raise ValueError(
            "integrand must return an array, or a pytree of arrays, whose integrals are wanted; it "
            "returned nothing. (Is a `return` missing?)"
        )
    dtypes = {np.dtype(state.dtype), *([] if tree is None else [tree.dtype])}
    for x in integrand.out_avals:
        is_number = x.weak_type and not jnp.issubdtype(x.dtype, jnp.complexfloating)
        if x.dtype not in dtypes and not is_number:
            dtype = " or ".join(map(str, sorted(dtypes, key=str, reverse=True)))
            raise TypeError(
                f"integrand must return the dtype of the state u, {dtype}; it returned "
                f"{x.dtype}. Cast what it returns, by .astype, or give u0 that dtype."
            )
    shapes = tuple(x.shape for x in integrand.out_avals)
    names = jtu.tree_unflatten(integrand.out_tree, list(integrand.out_avals))
    order = tuple(name for name, _ in leaf_names(names))
    found = dtypes & {np.dtype(x.dtype) for x in integrand.out_avals}
    dtype = np.result_type(state.dtype, *found)
    return StateTree(integrand.out_tree, shapes, dtype, order)


@functools.lru_cache(maxsize=256)
def with_integrand(field: Program, integrand: Program, extension: Extension) -> Program:
    """The field of the user's state followed by the integrals of `integrand`: a program
    `(consts, u, p, t)` of vectors. The integrand's constants follow those of the field."""
    more = structs_of(integrand.jaxpr.constvars)

    def both(consts: PyTree, u: Array, p: tuple, t: Array) -> Array:
        p, of_integrand = p[: len(p) - len(more)], p[len(p) - len(more) :]
        user = extension.user_of(u)
        found = rates(integrand, extension, of_integrand, user, p, t)
        return extension.state(field(consts, user, p, t), found)

    jaxpr = staged(field, both, state=extension.vector, extra=more)
    jaxpr = with_last_as_constants(jaxpr, len(more))
    return program_of(jaxpr, field.out_tree, rules=True)


def rates(
    integrand: Program, extension: Extension, consts: PyTree, u: Array, p: PyTree, t: Array
) -> Array:
    """The values of the integrand, as one vector."""
    assert extension.integral is not None
    leaves = jtu.tree_leaves(integrand(consts, u, p, t))
    return extension.integral.ravel([jnp.asarray(x, extension.integral.dtype) for x in leaves])


@functools.lru_cache(maxsize=256)
def with_held(field: Program, before: Extension | None, extension: Extension) -> Program:
    """The field of a state with held numbers behind it, which reads these numbers from the state.
    Its list of constants and parameters stays as it is. `before` are the parts of the state of
    `field`, which has no held numbers; None where it is the user's state alone."""
    n = len(field.jaxpr.constvars)

    def read(consts: Any, u: Array, p: tuple, t: Array) -> Array:
        numbers = extension.with_held([*consts, *p], u)
        state = extension.user_of(u) if before is None else u[: before.size]
        du = field(numbers[:n], state, tuple(numbers[n:]), t)
        still = jnp.zeros(extension.size - math.prod(du.shape), extension.user.dtype)
        return jnp.concatenate([du.reshape(-1), still])

    jaxpr = staged(field, read, state=extension.vector)
    return program_of(jaxpr, field.out_tree, rules=True)


@functools.lru_cache(maxsize=256)
def users_field(field: Program, extension: Extension) -> Program:
    """The field of the user's state alone, with the same constants and parameters. It reads all
    numbers from these, also those that `extension` holds."""

    def alone(consts: Any, u: Array, p: tuple, t: Array) -> Array:
        numbers = [*consts, *p]
        held = [numbers[i] for i, _ in extension.held]
        return extension.user_of(field(consts, extension.state(u, None, held), p, t))

    return program_of(staged(field, alone, state=extension.user), field.out_tree, rules=True)


def with_last_as_constants(jaxpr: Jaxpr, n: int) -> jex.Jaxpr:
    """The same program, with its last `n` parameters turned into its last constants."""
    u, *inputs, t = jaxpr.invars
    end = len(inputs) - n
    return with_constants(jaxpr, [*jaxpr.constvars, *inputs[end:]], [u, *inputs[:end], t])


def held_like(field: Program, places: Sequence[int]) -> tuple:
    """The `Extension.held` for these constants and parameters of a field."""
    avals = parameters_of(field)
    return tuple((i, jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype)) for i in places)
