"""Forms: the computations that programs do for a number of trajectories, and computations derived
from these.

A form is a function of flat arrays: first those of each trajectory, then those that all
trajectories share. It returns arrays for each trajectory, and sums over trajectories, called parts.
Its results for a trajectory depend only on the numbers of that trajectory and on the shared ones,
and so do their tangents and cotangents. So tangents and cotangents are forms again, and can be
computed wherever their trajectories are.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ...core.job import codes_and_counts, solve_lanes
from ...core.plan import Outcome, Plan
from ...core.reductions import total
from ...ground.keys import is_key, raw


class Numbers(NamedTuple):
    """The inputs of a program besides its plan.

    - `every`: the numbers that differ between trajectories, and the indices; all leaves have a
        leading trajectory axis.
    - `shared`: the numbers that all trajectories share.
    """

    every: Any
    shared: Any


class Form(abc.ABC):
    """A form as described above; hashable, and compared by content. The structs of arrays that
    differ between trajectories are without the trajectory axis.

    - `every`, `shared`: the structs of its operands.
    - `each`, `parts`: the structs of its results.
    - `linear`: the numbers of those operands, the last of `every` and the last of `shared`, in
        which it is (jointly) linear.
    - `base`: the form that it is derived from in the end; `copies`: how many evaluations of that
        form it makes for each trajectory.
    """

    linear: tuple[int, int]
    copies: int

    @property
    @abc.abstractmethod
    def base(self) -> "Given": ...

    @property
    @abc.abstractmethod
    def every(self) -> tuple: ...

    @property
    @abc.abstractmethod
    def shared(self) -> tuple: ...

    @property
    @abc.abstractmethod
    def each(self) -> tuple: ...

    @property
    @abc.abstractmethod
    def parts(self) -> tuple: ...

    @abc.abstractmethod
    def of_unit(self, every: Sequence, mask: Any, shared: Sequence) -> tuple[list, list]:
        """The results of the trajectories of one unit, and their sums; trajectories that the mask
        excludes don't count."""

    @abc.abstractmethod
    def on(self, base: "Given | None") -> "Form":
        """The form derived in the same way from another base; with None as the base, it can be
        pickled."""

    def of_units(
        self, every: Sequence, mask: Any, shared: Sequence, units: int
    ) -> tuple[list, list]:
        """The results of several units of equally many trajectories, with a sum for each unit."""

        def split(x):
            return x.reshape(units, -1, *x.shape[1:])

        def unit(of_unit):
            every, mask = of_unit
            return self.of_unit(every, mask, shared)

        each, parts = jax.lax.map(unit, jax.tree.map(split, (list(every), mask)))
        return [x.reshape(len(mask), *x.shape[2:]) for x in each], parts


_NOTHING = jtu.tree_structure(None)


@dataclasses.dataclass(frozen=True)
class Given(Form):
    """A form that is not derived from another.

    - `kind`: `"solve"` returns the outcome of each trajectory. `"total"` returns the return codes
        and counts, and as a part the sum of the outputs; `"total and gradient"` also returns the
        gradient of that sum.
    - `structure`, `structs`: those of the numbers, flat; `keys`: for each number the kind of PRNG
        key that it is, or None.
    - `wanted`: the numbers with respect to which the gradient is taken.
    """

    kind: str
    plan_or_none: Plan | None = None
    structure: jtu.PyTreeDef = _NOTHING
    structs: tuple = ()
    keys: tuple = ()
    wanted: tuple = ()

    linear = (0, 0)
    copies = 1

    @property
    def plan(self) -> Plan:
        assert self.plan_or_none is not None  # it is None after `on(None)`
        return self.plan_or_none

    @property
    def base(self) -> "Given":
        return self

    @property
    def every(self) -> tuple:
        return tuple(jtu.tree_leaves(self.numbers.every))

    @property
    def shared(self) -> tuple:
        return tuple(jtu.tree_leaves(self.numbers.shared))

    @property
    def each(self) -> tuple:
        return tuple(_without_axis(map(raw_struct, jtu.tree_leaves(self.outputs[0]))))

    @property
    def parts(self) -> tuple:
        return tuple(jtu.tree_leaves(self.outputs[1]))

    @property
    def numbers(self) -> Numbers:
        """The structs of the numbers."""
        return jtu.tree_unflatten(self.structure, self.structs)

    @property
    def outputs(self) -> tuple[Any, Any]:
        """The structures of the results; those for each trajectory have a trajectory axis of length
        one."""
        return _outputs(self)

    def on(self, base: "Given | None") -> "Given":
        if base is None:
            return Given(self.kind, wanted=self.wanted)
        return dataclasses.replace(base, kind=self.kind, wanted=self.wanted)

    def of_unit(self, every: Sequence, mask: Any, shared: Sequence) -> tuple[list, list]:
        each, parts = _evaluated(self, every, mask, shared)
        return [raw(x) for x in jtu.tree_leaves(each)], jtu.tree_leaves(parts)

    def of_units(
        self, every: Sequence, mask: Any, shared: Sequence, units: int
    ) -> tuple[list, list]:
        if self.kind == "total and gradient":
            return super().of_units(every, mask, shared, units)
        # All units at once; only the sums are made for each unit.
        outcome = _outcome(self.plan, _unflattened(self, every, shared), mask)
        if self.kind == "solve":
            return [raw(x) for x in jtu.tree_leaves(outcome)], []
        chunks = (units, len(mask) // units)
        part = jax.tree.map(lambda x: x.reshape(*chunks, *x.shape[1:]), (outcome.u, mask))
        return jtu.tree_leaves(codes_and_counts(outcome)), jtu.tree_leaves(jax.vmap(_total)(*part))


def given(kind: str, plan: Plan, numbers: Numbers) -> Given:
    """The form for a plan with such numbers."""
    leaves, structure = jtu.tree_flatten(numbers)
    every = len(jtu.tree_leaves(numbers.every))
    keys = tuple(jax.random.key_impl(x) if is_key(x) else None for x in leaves)
    structs = [raw_struct(x) for x in leaves]
    structs = (*_without_axis(structs[:every]), *structs[every:])
    return Given(kind, plan, structure, structs, keys)


@functools.lru_cache(maxsize=256)
def _outputs(form: Given) -> tuple[Any, Any]:
    def outputs(every, mask, shared):
        return _evaluated(form, every, mask, shared)

    every = [jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for s in form.every]
    return jax.eval_shape(outputs, every, jax.ShapeDtypeStruct((1,), bool), list(form.shared))


def _unflattened(form: Given, every: Sequence, shared: Sequence) -> Numbers:
    leaves = [
        x if impl is None else jax.random.wrap_key_data(x, impl=impl)
        for x, impl in zip([*every, *shared], form.keys, strict=True)
    ]
    return jtu.tree_unflatten(form.structure, leaves)


def _evaluated(form: Given, every: Sequence, mask: Any, shared: Sequence) -> tuple[Any, Any]:
    numbers = _unflattened(form, every, shared)
    if form.kind == "solve":
        return _outcome(form.plan, numbers, mask), ()
    if form.kind == "total":
        outcome = _outcome(form.plan, numbers, mask)
        return codes_and_counts(outcome), _total(outcome.u, mask)
    moving, fixed = eqx.partition(numbers, jtu.tree_unflatten(form.structure, form.wanted))

    def primal(moving):
        outcome = _outcome(form.plan, eqx.combine(moving, fixed), mask)
        return _total(outcome.u, mask), codes_and_counts(outcome)

    added, pull_back, counts = jax.vjp(primal, moving, has_aux=True)
    (gradient,) = pull_back(jax.tree.map(jnp.ones_like, added))
    return (counts, gradient.every), (added, gradient.shared)


def _outcome(plan: Plan, numbers: Numbers, mask: Any) -> Outcome:
    every, indices = numbers.every
    shared, repeat, key, consts = numbers.shared
    lanes = eqx.combine(every, shared)
    return solve_lanes(plan, lanes, indices, repeat, key, consts, mask)


def _total(out: Any, mask: Any) -> Any:
    return jax.tree.map(lambda x: total(_of_rows(mask, x)), out)


#
# Derived forms
#


@dataclasses.dataclass(frozen=True)
class _Derived(Form):
    """- `of`: the form that it is derived from."""

    of: Form

    @property
    def base(self) -> Given:
        return self.of.base

    @property
    def copies(self) -> int:  # pyright: ignore
        return self.of.copies

    def on(self, base: Given | None) -> Form:
        return dataclasses.replace(self, of=self.of.on(base))


@dataclasses.dataclass(frozen=True)
class Tangent(_Derived):
    """The tangents of the real results. The tangents of operands are further operands, after those
    of the form.

    - `moving_every`, `moving_shared`: which operands have tangents.
    """

    moving_every: tuple[bool, ...]
    moving_shared: tuple[bool, ...]

    @property
    def linear(self) -> tuple[int, int]:  # pyright: ignore
        return sum(self.moving_every), sum(self.moving_shared)

    @property
    def every(self) -> tuple:
        return *self.of.every, *_those(self.of.every, self.moving_every)

    @property
    def shared(self) -> tuple:
        return *self.of.shared, *_those(self.of.shared, self.moving_shared)

    @property
    def each(self) -> tuple:
        return tuple(filter(is_real, self.of.each))

    @property
    def parts(self) -> tuple:
        return tuple(filter(is_real, self.of.parts))

    def of_unit(self, every: Sequence, mask: Any, shared: Sequence) -> tuple[list, list]:
        (every, d_every), (shared, d_shared) = _apart(self, every, shared)
        fn, at = self.moved(every, mask, shared)
        return jax.jvp(fn, at, (d_every, d_shared))[1]

    def moved(self, every: list, mask: Any, shared: list) -> tuple[Callable, tuple]:
        """The real results as a function of the operands that have tangents; and these operands."""

        def fn(some_every, some_shared):
            each, parts = self.of.of_unit(
                _filled(every, self.moving_every, some_every),
                mask,
                _filled(shared, self.moving_shared, some_shared),
            )
            return list(filter(is_real, each)), list(filter(is_real, parts))

        return fn, (_those(every, self.moving_every), _those(shared, self.moving_shared))


@dataclasses.dataclass(frozen=True)
class Transposed(_Derived):
    """The cotangents of operands in which a form is linear. The cotangents of its results are
    further operands, after the others.

    - `wanted_every`, `wanted_shared`: which of the operands in which it is linear.
    - `given_each`, `given_parts`: which results have cotangents; those of the others are zero.
    """

    wanted_every: tuple[bool, ...]
    wanted_shared: tuple[bool, ...]
    given_each: tuple[bool, ...]
    given_parts: tuple[bool, ...]

    @property
    def linear(self) -> tuple[int, int]:  # pyright: ignore
        return sum(self.given_each), sum(self.given_parts)

    @property
    def every(self) -> tuple:
        fixed = _apart(self.of, self.of.every, self.of.shared)[0][0]
        return *fixed, *_those(self.of.each, self.given_each)

    @property
    def shared(self) -> tuple:
        fixed = _apart(self.of, self.of.every, self.of.shared)[1][0]
        return *fixed, *_those(self.of.parts, self.given_parts)

    @property
    def each(self) -> tuple:
        linear = _apart(self.of, self.of.every, self.of.shared)[0][1]
        return tuple(_those(linear, self.wanted_every))

    @property
    def parts(self) -> tuple:
        linear = _apart(self.of, self.of.every, self.of.shared)[1][1]
        return tuple(_those(linear, self.wanted_shared))

    def of_unit(self, every: Sequence, mask: Any, shared: Sequence) -> tuple[list, list]:
        (every, c_each), (shared, c_parts) = _apart(self, every, shared)
        if isinstance(self.of, Tangent):
            fn, at = self.of.moved(every, mask, shared)
        else:
            # The form is linear in these operands, so its transpose is the same anywhere.
            (_, every_structs), (_, shared_structs) = _apart(self.of, self.of.every, self.of.shared)
            at = (
                [jnp.zeros((len(mask), *s.shape), s.dtype) for s in every_structs],
                [jnp.zeros(s.shape, s.dtype) for s in shared_structs],
            )

            def fn(of_each, of_all):
                return self.of.of_unit([*every, *of_each], mask, [*shared, *of_all])

        (each, parts), pull_back = jax.vjp(fn, *at)
        cotangents = (
            _filled(jax.tree.map(jnp.zeros_like, each), self.given_each, c_each),
            _filled(jax.tree.map(jnp.zeros_like, parts), self.given_parts, c_parts),
        )
        each, parts = pull_back(([_of_rows(mask, x) for x in cotangents[0]], cotangents[1]))
        return _those(each, self.wanted_every), _those(parts, self.wanted_shared)


@dataclasses.dataclass(frozen=True)
class Mapped(_Derived):
    """A form evaluated for several values of some operands at once. The axis of these is the first
    of shared operands, the second of operands of each trajectory, and likewise in all results.

    - `size`: the number of values; `mapped_every`, `mapped_shared`: which operands have several.
    """

    size: int
    mapped_every: tuple[bool, ...]
    mapped_shared: tuple[bool, ...]

    @property
    def linear(self) -> tuple[int, int]:  # pyright: ignore
        return self.of.linear

    @property
    def copies(self) -> int:  # pyright: ignore
        return self.size * self.of.copies

    def _several(self, structs: tuple, flags: Sequence[bool] | None = None) -> tuple:
        flags = flags or [True] * len(structs)
        return tuple(
            jax.ShapeDtypeStruct((self.size, *s.shape), s.dtype) if m else s
            for s, m in zip(structs, flags, strict=True)
        )

    @property
    def every(self) -> tuple:
        return self._several(self.of.every, self.mapped_every)

    @property
    def shared(self) -> tuple:
        return self._several(self.of.shared, self.mapped_shared)

    @property
    def each(self) -> tuple:
        return self._several(self.of.each)

    @property
    def parts(self) -> tuple:
        return self._several(self.of.parts)

    def of_unit(self, every: Sequence, mask: Any, shared: Sequence) -> tuple[list, list]:
        axes = [1 if m else None for m in self.mapped_every]
        shared_axes = [0 if m else None for m in self.mapped_shared]
        fn = jax.vmap(self.of.of_unit, (axes, None, shared_axes), (1, 0), axis_size=self.size)
        return fn(list(every), mask, list(shared))


#
# Helpers
#


def is_real(x: Any) -> bool:
    """Whether `x`, an array or the struct of one, has derivatives."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def raw_struct(x: Any) -> Any:
    return jax.eval_shape(raw, x)


def _without_axis(structs: Iterable) -> list:
    return [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in structs]


def _those(xs: Sequence, flags: Sequence[bool]) -> list:
    return [x for x, flag in zip(xs, flags, strict=True) if flag]


def _filled(xs: Sequence, flags: Sequence[bool], values: Sequence) -> list:
    """`xs` with these values in the places of the flags."""
    left = iter(values)
    return [next(left) if flag else x for x, flag in zip(xs, flags, strict=True)]


def _apart(form: Form, every: Sequence, shared: Sequence) -> list[tuple[list, list]]:
    """The operands of each trajectory, and the shared ones; both as those in which the form is not
    linear, and those in which it is."""
    found = []
    for xs, count in zip((every, shared), form.linear, strict=True):
        fixed = len(xs) - count
        found.append((list(xs[:fixed]), list(xs[fixed:])))
    return found


def _of_rows(mask: Any, x: Any) -> Any:
    """`x` for the trajectories of the mask, and zero for the others."""
    return jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))
