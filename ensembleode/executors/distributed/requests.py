"""Requests to the workers of a pool: made at once, or inside a compiled program, as a JAX
primitive.

The primitive evaluates a form (see `forms.py`). Its derivatives of any order are the same primitive
for forms that are derived from it, so a derivative is computed by the same workers, chunk by chunk.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from ...ground.host import host_call
from ...ground.keys import as_before, raw
from ...ground.retcode import ReturnCode
from ...plan.plan import NO_CALLBACK, Outcome
from .dispatch import BatchNumbers, BatchResults, dispatch
from .forms import (
    Form,
    is_real,
    MappedForm,
    outputs_of,
    Pair,
    RootForm,
    SentArrays,
    TangentForm,
    TransposedForm,
)
from .pools import ClusterError, Pool
from .programs import ChunkProgram, exported, program_of, ShippedProgram


_STOP = jtu.GetAttrKey("stop")


@dataclasses.dataclass(frozen=True)
class FormRequest:
    """A form of `n` trajectories, to be evaluated by the workers of a pool, each of which has
    `threads` threads. `pickle` makes the shipped form of a program that can't be exported."""

    pool: Pool
    threads: int
    form: Form
    n: int
    pickle: Callable[[ChunkProgram], ShippedProgram] = dataclasses.field(compare=False, repr=False)

    @property
    def stands_for(self) -> tuple:
        return _stands_for(self.form)

    def bind(self, form: Form, operands: Pair, costs: Sequence) -> list:
        """The results of another form of these trajectories, from the primitive."""
        request = dataclasses.replace(self, form=form)
        return _request_p.bind(*itertools.chain(*operands, costs), request=request)

    def now(
        self, numbers: SentArrays, costs: Array | None, seen: Callable
    ) -> tuple[Any, Any, BatchResults]:
        """Evaluate a `RootForm` now: the results of each trajectory and of each unit, and the
        `BatchResults` of the dispatch."""
        form = self.form.base
        every, shared = ([np.asarray(raw(x)) for x in jtu.tree_leaves(x)] for x in numbers)
        paths, _ = jtu.tree_flatten_with_path(numbers.shared)
        stop = next((i for i, (path, _) in enumerate(paths) if path[-1] == _STOP), None)
        batch = BatchNumbers(every, shared, None if costs is None else np.asarray(costs), stop)

        def report(results, rows):
            seen(unflattened(form, results.each, results.parts)[0], results, rows)

        program = program_of(form, self.n)
        shipped = self._shipped(program)
        results = dispatch(self.pool, program, shipped, batch, threads=self.threads, report=report)
        return *unflattened(form, results.each, results.parts), results

    def in_program(self, numbers: SentArrays, costs: Any) -> tuple[PyTree, PyTree]:
        """Evaluate a `RootForm` in a compiled program: the results of each trajectory, and the sums
        over all."""
        operands = [[raw(x) for x in jtu.tree_leaves(x)] for x in numbers]
        outs = self.bind(self.form, operands, [] if costs is None else [costs])
        count = len(self.form.results[0])
        return unflattened(self.form.base, outs[:count], outs[count:])

    def __call__(self, *operands: Any) -> list:
        """Evaluate by a call of the host: the results of each trajectory, and the sums over all."""
        program = program_of(self.form, self.n)
        call = _FormCall(self.pool, self.threads, program, self._shipped(program))
        each, parts = program.results(self.n)
        outs = host_call(call, [*each, *parts], *operands)
        # Summed over the units in their order, whichever workers computed them.
        return [*outs[: len(each)], *(x.sum(0, dtype=x.dtype) for x in outs[len(each) :])]

    def avals(self) -> list:
        each, parts = self.form.results
        each = [jax.core.ShapedArray((self.n, *s.shape), s.dtype) for s in each]
        return [*each, *(jax.core.ShapedArray(s.shape, s.dtype) for s in parts)]

    def _shipped(self, program: ChunkProgram) -> ShippedProgram:
        return exported(program) or self.pickle(program)


@dataclasses.dataclass(frozen=True, repr=False)
class _FormCall:
    """The function of flat arrays that a compiled program calls; compared by content."""

    pool: Pool
    threads: int
    program: ChunkProgram
    shipped: ShippedProgram

    @property
    def stands_for(self) -> tuple:
        return _stands_for(self.program.form)

    def __call__(self, *operands: np.ndarray) -> list[np.ndarray]:
        (every, shared), costs = _shared_apart(self.program.form, operands)
        batch = BatchNumbers(every, shared, costs[0] if costs else None)
        results = dispatch(self.pool, self.program, self.shipped, batch, threads=self.threads)
        if results.cause is not None:
            raise results.cause
        if results.lost:
            form, (rows, why) = self.program.form, results.lost[0]
            if not isinstance(form, RootForm) or form.wanted:  # no return code could say so
                raise ClusterError(
                    f"the gradient of trajectories {rows[0]} to {rows[-1]} can't be computed: "
                    f"{why}."
                )
            fail_lost(unflattened(form, results.each, results.parts)[0], results)
        return [*results.each, *results.parts]


def _stands_for(form: Form) -> tuple:
    return form.on(None), form.base.plan.stands_for


def _shared_apart(form: Form, operands: Sequence) -> tuple[tuple[list, list], list]:
    """The operands of each trajectory, and those that all share; and the costs, if any."""
    every, shared = map(len, form.operands)
    end = every + shared
    return (list(operands[:every]), list(operands[every:end])), list(operands[end:])


def fail_lost(outcome: Outcome, results: BatchResults) -> None:
    """Set the return codes of trajectories whose workers died to failures, without events."""
    for rows, _ in results.lost:
        outcome.retcode[rows] = ReturnCode.Failure.value
        if outcome.events is not None:
            outcome.events.which[rows] = NO_CALLBACK


def unflattened(form: RootForm, each: Sequence, parts: Sequence) -> tuple[PyTree, PyTree]:
    """The results for each trajectory, and the others, in their structures, from flat arrays."""

    def filled(structs, leaves):
        structs, structure = jtu.tree_flatten(structs)
        return jtu.tree_unflatten(structure, map(as_before, structs, leaves))

    structs = outputs_of(form)
    return filled(structs[0], each), filled(structs[1], parts)


_request_p = jex.Primitive("ensembleode_request")
_request_p.multiple_results = True


def _is_zero(x: Any) -> bool:
    return type(x) is ad.Zero


def _without_zeros(tangents: Sequence) -> list:
    return [t for t in tangents if not _is_zero(t)]


def _jvp(primals, tangents, *, request):
    form = request.form
    operands, costs = _shared_apart(form, primals)
    tangents, _ = _shared_apart(form, tangents)
    moving = tuple(tuple(not _is_zero(t) for t in xs) for xs in tangents)
    moves = any(map(any, moving))
    if moves and isinstance(form, RootForm) and form.kind == "total":
        return _total_jvp(request, operands, costs, [*itertools.chain(*tangents)])
    outs = request.bind(form, operands, costs)
    zeros = [ad.Zero(a.to_tangent_aval()) for a in request.avals()]
    if not moves:
        return outs, zeros
    fixed = [len(xs) - k for xs, k in zip(moving, form.linear, strict=True)]
    if not any(any(xs[:k]) for xs, k in zip(moving, fixed, strict=True)):
        moved = [
            [*xs[:k], *map(ad.instantiate_zeros, ts[k:])]
            for xs, ts, k in zip(operands, tangents, fixed, strict=True)
        ]
        return outs, request.bind(form, moved, costs)
    both = [[*xs, *_without_zeros(ts)] for xs, ts in zip(operands, tangents, strict=True)]
    found = iter(request.bind(TangentForm(form, moving), both, costs))
    structs = itertools.chain(*form.results)
    return outs, [next(found) if is_real(s) else z for s, z in zip(structs, zeros, strict=True)]


def _total_jvp(request, operands, costs, tangents):
    """The derivative of a sum, whose gradient is computed together with it, at no further cost."""
    form = request.form
    wanted = tuple(not _is_zero(t) for t in tangents)
    with_gradient = dataclasses.replace(form, kind="total and gradient", wanted=wanted)
    outs = request.bind(with_gradient, operands, costs)
    counts = len(form.results[0])
    each, parts = with_gradient.results
    each, parts = outs[: len(each)], outs[len(each) :]
    gradient = [*each[counts:], *parts[1:]]
    terms = [jnp.sum(g * t) for g, t in zip(gradient, _without_zeros(tangents), strict=True)]
    along = sum(x.astype(parts[0].dtype) for x in terms)
    zeros = [ad.Zero(a.to_tangent_aval()) for a in request.avals()[:counts]]
    return [*each[:counts], parts[0]], [*zeros, along]


def _transpose(cts, *operands, request):
    form = request.form
    operands, costs = _shared_apart(form, operands)
    if all(map(_is_zero, cts)):
        return [None] * (sum(map(len, operands)) + len(costs))
    fixed = [len(xs) - k for xs, k in zip(operands, form.linear, strict=True)]
    wanted = tuple(
        tuple(map(ad.is_undefined_primal, xs[k:])) for xs, k in zip(operands, fixed, strict=True)
    )
    each = len(form.results[0])
    cts = cts[:each], cts[each:]
    given = tuple(tuple(not _is_zero(c) for c in cs) for cs in cts)
    flags = wanted
    if isinstance(form, TangentForm):  # with the tangents of the wanted operands alone
        pairs = zip(form.moving, map(iter, wanted), strict=True)
        moving = tuple(tuple(moves and next(w) for moves in xs) for xs, w in pairs)
        form = TangentForm(form.of, moving)
        flags = tuple((True,) * sum(xs) for xs in wanted)
    known = [[*xs[:k], *_without_zeros(cs)] for xs, k, cs in zip(operands, fixed, cts, strict=True)]
    found = iter(request.bind(TransposedForm(form, flags, given), known, costs))
    pulled = [
        [None] * k + [next(found) if w else None for w in xs]
        for k, xs in zip(fixed, wanted, strict=True)
    ]
    return [*itertools.chain(*pulled), *[None] * len(costs)]


def _batch(operands, axes, *, request):
    form = request.form
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    operands, costs = _shared_apart(form, [*zip(operands, axes, strict=True)])
    mapped = tuple(tuple(a is not None for _, a in xs) for xs in operands)
    every, shared = operands
    moved = (
        [x if a is None else jnp.moveaxis(x, a, 1) for x, a in every],
        [x if a is None else jnp.moveaxis(x, a, 0) for x, a in shared],
    )
    costs = [x if a is None else jnp.max(x, a) for x, a in costs]
    outs = request.bind(MappedForm(form, size, mapped), moved, costs)
    each = len(form.results[0])
    return outs, [1] * each + [0] * (len(outs) - each)


_request_p.def_impl(lambda *operands, request: request(*operands))
_request_p.def_abstract_eval(lambda *_, request: request.avals())
ad.primitive_jvps[_request_p] = _jvp
ad.primitive_transposes[_request_p] = _transpose
batching.primitive_batchers[_request_p] = _batch
_lower: Callable = mlir.lower_fun(
    lambda *operands, request: request(*operands), multiple_results=True
)
mlir.register_lowering(_request_p, _lower)
