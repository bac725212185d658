"""Forms: the computations that workers do for a number of trajectories, such as a solve, and their
derivatives.

A form is a function of flat arrays: first those of each trajectory, then those that all
trajectories share. It returns arrays for each trajectory, and sums over trajectories, called parts.
Its results for a trajectory depend only on the numbers of that trajectory and on the shared ones,
and so do their tangents and cotangents. So tangents and cotangents are forms again, and can be
computed wherever their trajectories are.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array
from jaxtyping import PyTree

from ...ground.keys import is_key, raw
from ...plan.plan import Outcome, Plan
from ...running.job import codes_and_counts, solve_lanes
from ...running.reductions import total


class SentArrays(NamedTuple):
    """The inputs of a program besides its plan.

    - `every`: the numbers that differ between trajectories, and the indices; all leaves have a
        leading trajectory axis.
    - `shared`: the numbers that all trajectories share.
    """

    every: Any
    shared: Any


# Two sequences: for each trajectory, and for all trajectories together.
Pair: TypeAlias = Sequence[Sequence]
Flags: TypeAlias = tuple[tuple[bool, ...], ...]


class Form(abc.ABC):
    """A form as described above; hashable, and compared by content.

    - `operands`, `results`: the shapes and dtypes of its operands and results, as pairs: of each
        trajectory, without the trajectory axis, and shared ones (of results, these are the parts).
    - `linear`: how many operands of either kind, the last ones, it is (jointly) linear in.
    - `base`: the `RootForm` that it is derived from, possibly in several steps; `copies`: how often
        it evaluates that for each trajectory.
    """

    operands: Pair
    results: Pair
    linear: tuple[int, ...]
    base: "RootForm"
    copies: int

    @abc.abstractmethod
    def of_unit(self, operands: Pair, mask: Any) -> tuple[list, list]:
        """The results of one unit's trajectories, and their sums, without those that are masked."""

    @abc.abstractmethod
    def on(self, base: "RootForm | None") -> "Form":
        """The form derived in the same way from another base; with None, it can be pickled."""

    def of_units(self, operands: Pair, mask: Array, units: int) -> tuple[list, list]:
        """The results of several units of equally many trajectories, with a sum for each unit."""
        every, shared = operands

        def split(x):
            return x.reshape(units, -1, *x.shape[1:])

        def unit(of_unit):
            every, mask = of_unit
            return self.of_unit((every, shared), mask)

        each, parts = jax.lax.map(unit, jax.tree.map(split, (list(every), mask)))
        return [x.reshape(len(mask), *x.shape[2:]) for x in each], parts


_NOTHING = jtu.tree_structure(None)


@dataclasses.dataclass(frozen=True)
class RootForm(Form):
    """A form that is not derived from another.

    - `kind`: `"solve"` returns the outcome of each trajectory. `"total"` returns the return codes
        and counts, and as a part the sum of the outputs; `"total and gradient"` also returns the
        gradient of that sum.
    - `plan`: None after `on(None)`.
    - `structure`, `structs`: the structure of the numbers, and the shapes and dtypes of their
        leaves; `keys`: for each number the kind of PRNG key that it is, or None.
    - `wanted`: the numbers with respect to which the gradient is taken.
    """

    kind: str
    plan: Plan = None  # pyright: ignore
    structure: jtu.PyTreeDef = _NOTHING
    structs: tuple = ()
    keys: tuple = ()
    wanted: tuple = ()

    linear = (0, 0)
    copies = 1

    @property
    def base(self) -> "RootForm":  # pyright: ignore
        return self

    @property
    def operands(self) -> Pair:  # pyright: ignore
        numbers = jtu.tree_unflatten(self.structure, self.structs)
        return [jtu.tree_leaves(x) for x in numbers]

    @property
    def results(self) -> Pair:  # pyright: ignore
        each, parts = map(jtu.tree_leaves, outputs_of(self))
        return _without_axis(map(raw_struct, each)), parts

    def on(self, base: "RootForm | None") -> "RootForm":
        return dataclasses.replace(base or RootForm(self.kind), kind=self.kind, wanted=self.wanted)

    def of_unit(self, operands: Pair, mask: Array) -> tuple[list, list]:
        each, parts = _evaluated(self, operands, mask)
        return [raw(x) for x in jtu.tree_leaves(each)], jtu.tree_leaves(parts)

    def of_units(self, operands: Pair, mask: Array, units: int) -> tuple[list, list]:
        if self.kind == "total and gradient":
            return super().of_units(operands, mask, units)
        # All units at once; only the sums are computed for each unit.
        outcome = _outcome(self.plan, _unflattened(self, operands), mask)
        if self.kind == "solve":
            return [raw(x) for x in jtu.tree_leaves(outcome)], []
        chunks = (units, len(mask) // units)
        part = jax.tree.map(lambda x: x.reshape(*chunks, *x.shape[1:]), (outcome.u, mask))
        return jtu.tree_leaves(codes_and_counts(outcome)), jtu.tree_leaves(jax.vmap(_total)(*part))


def form_of(kind: str, plan: Plan, numbers: SentArrays) -> RootForm:
    """The form for a plan with such numbers."""
    leaves, structure = jtu.tree_flatten(numbers)
    every = len(jtu.tree_leaves(numbers.every))
    keys = tuple(jax.random.key_impl(x) if is_key(x) else None for x in leaves)
    structs = [raw_struct(x) for x in leaves]
    structs = (*_without_axis(structs[:every]), *structs[every:])
    return RootForm(kind, plan, structure, structs, keys)


@functools.lru_cache(maxsize=256)
def outputs_of(form: RootForm) -> tuple[PyTree, PyTree]:
    """The structures of its results: with a trajectory axis of length one, and of the parts."""
    every, shared = form.operands
    every = [jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for s in every]
    mask = jax.ShapeDtypeStruct((1,), bool)
    return jax.eval_shape(functools.partial(_evaluated, form), (every, shared), mask)


def _unflattened(form: RootForm, operands: Pair) -> SentArrays:
    leaves = [
        x if impl is None else jax.random.wrap_key_data(x, impl=impl)
        for x, impl in zip(itertools.chain(*operands), form.keys, strict=True)
    ]
    return jtu.tree_unflatten(form.structure, leaves)


def _evaluated(form: RootForm, operands: Pair, mask: Array) -> tuple[PyTree, PyTree]:
    numbers = _unflattened(form, operands)
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


def _outcome(plan: Plan, numbers: SentArrays, mask: Array) -> Outcome:
    every, indices = numbers.every
    shared, repeat, key, consts = numbers.shared
    lanes = eqx.combine(every, shared)
    return solve_lanes(plan, lanes, indices, repeat, key, consts, mask)


def _total(out: PyTree, mask: Array) -> PyTree:
    return jax.tree.map(lambda x: total(_of_rows(mask, x)), out)


@dataclasses.dataclass(frozen=True)
class _DerivedForm(Form):
    """A form derived from the form `of`."""

    of: Form

    @property
    def base(self) -> RootForm:  # pyright: ignore
        return self.of.base

    @property
    def copies(self) -> int:  # pyright: ignore
        return self.of.copies

    def on(self, base: RootForm | None) -> Form:
        return dataclasses.replace(self, of=self.of.on(base))


@dataclasses.dataclass(frozen=True)
class TangentForm(_DerivedForm):
    """The tangents of the real results. The tangents of those operands that are `moving` are
    further operands, after those of the form."""

    moving: Flags

    @property
    def linear(self) -> tuple[int, ...]:  # pyright: ignore
        return tuple(map(sum, self.moving))

    @property
    def operands(self) -> Pair:  # pyright: ignore
        pairs = zip(self.of.operands, self.moving, strict=True)
        return [[*xs, *_those(xs, flags)] for xs, flags in pairs]

    @property
    def results(self) -> Pair:  # pyright: ignore
        return _real_ones(self.of.results)

    def of_unit(self, operands: Pair, mask: Array) -> tuple[list, list]:
        operands, tangents = _linear_apart(self, operands)
        fn, at = self.moved(operands, mask)
        return jax.jvp(fn, at, tangents)[1]

    def moved(self, operands: Pair, mask: Array) -> tuple[Callable, tuple]:
        """The real results as a function of the operands that have tangents; and these operands."""

        def fn(*moved):
            filled = [*map(_filled, operands, self.moving, moved)]
            return _real_ones(self.of.of_unit(filled, mask))

        return fn, tuple(map(_those, operands, self.moving))


@dataclasses.dataclass(frozen=True)
class TransposedForm(_DerivedForm):
    """The cotangents of operands in which a form is linear. The cotangents of its results are
    further operands, after the others.

    - `wanted`: which of the operands in which it is linear.
    - `given`: which results have cotangents; those of the others are zero.
    """

    wanted: Flags
    given: Flags

    @property
    def linear(self) -> tuple[int, ...]:  # pyright: ignore
        return tuple(map(sum, self.given))

    @property
    def operands(self) -> Pair:  # pyright: ignore
        fixed, _ = _linear_apart(self.of, self.of.operands)
        cotangents = map(_those, self.of.results, self.given)
        return [[*xs, *more] for xs, more in zip(fixed, cotangents, strict=True)]

    @property
    def results(self) -> Pair:  # pyright: ignore
        _, linear = _linear_apart(self.of, self.of.operands)
        return [*map(_those, linear, self.wanted)]

    def of_unit(self, operands: Pair, mask: Array) -> tuple[list, list]:
        operands, given = _linear_apart(self, operands)
        if isinstance(self.of, TangentForm):
            fn, at = self.of.moved(operands, mask)
        else:
            # The form is linear in these operands, so its transpose is the same anywhere.
            _, (every, shared) = _linear_apart(self.of, self.of.operands)
            at = (
                [jnp.zeros((len(mask), *s.shape), s.dtype) for s in every],
                [jnp.zeros(s.shape, s.dtype) for s in shared],
            )

            def fn(*linear):
                pairs = zip(operands, linear, strict=True)
                return self.of.of_unit([[*xs, *more] for xs, more in pairs], mask)

        results, pull_back = jax.vjp(fn, *at)
        zeros = jax.tree.map(jnp.zeros_like, results)
        each, parts = map(_filled, zeros, self.given, given)
        pulled = pull_back(([_of_rows(mask, x) for x in each], parts))
        every, shared = map(_those, pulled, self.wanted)
        return every, shared


@dataclasses.dataclass(frozen=True)
class MappedForm(_DerivedForm):
    """A form evaluated for `size` values of the operands that are `mapped`. Their axis is the first
    of shared operands, the second of operands of each trajectory, and likewise in all results."""

    size: int
    mapped: Flags

    @property
    def linear(self) -> tuple[int, ...]:  # pyright: ignore
        return self.of.linear

    @property
    def copies(self) -> int:  # pyright: ignore
        return self.size * self.of.copies

    def _several(self, s: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size, *s.shape), s.dtype)

    @property
    def operands(self) -> Pair:  # pyright: ignore
        return [
            [self._several(s) if flag else s for s, flag in zip(xs, flags, strict=True)]
            for xs, flags in zip(self.of.operands, self.mapped, strict=True)
        ]

    @property
    def results(self) -> Pair:  # pyright: ignore
        return [[*map(self._several, xs)] for xs in self.of.results]

    def of_unit(self, operands: Pair, mask: Array) -> tuple[list, list]:
        every, shared = self.mapped
        axes = [1 if flag else None for flag in every], [0 if flag else None for flag in shared]
        fn = jax.vmap(self.of.of_unit, (axes, None), (1, 0), axis_size=self.size)
        return fn(tuple(map(list, operands)), mask)


def is_real(x: Any) -> bool:
    """Whether `x`, an array or the struct of one, has derivatives."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def raw_struct(x: Any) -> Any:
    return jax.eval_shape(raw, x)


def _without_axis(structs: Iterable) -> list:
    return [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in structs]


def _real_ones(results: Pair) -> tuple[list, list]:
    each, parts = results
    return [*filter(is_real, each)], [*filter(is_real, parts)]


def _those(xs: Sequence, flags: Sequence[bool]) -> list:
    return [x for x, flag in zip(xs, flags, strict=True) if flag]


def _filled(xs: Sequence, flags: Sequence[bool], values: Sequence) -> list:
    """`xs` with these values in the places of the flags."""
    left = iter(values)
    return [next(left) if flag else x for x, flag in zip(xs, flags, strict=True)]


def _linear_apart(form: Form, operands: Pair) -> tuple[tuple, tuple]:
    """The operands in which the form is not linear, and those in which it is; both as pairs."""
    fixed = [len(xs) - count for xs, count in zip(operands, form.linear, strict=True)]
    pairs = [*zip(operands, fixed, strict=True)]
    return tuple(list(xs[:k]) for xs, k in pairs), tuple(list(xs[k:]) for xs, k in pairs)


def _of_rows(mask: Array, x: Array) -> Array:
    """`x` for the trajectories of the mask, and zero for the others."""
    return jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))
