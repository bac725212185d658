"""Requests to the workers of a pool: made at once, or inside a compiled program, as a JAX
primitive.

The primitive evaluates a form (see `forms.py`). Its derivatives of any order are the same primitive
for forms that are derived from it, so a derivative is computed by the same workers, chunk by chunk.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.interpreters import ad, batching, mlir

from ...core.plan import NO_CALLBACK, Outcome
from ...ground.host import host_call
from ...ground.keys import as_before, raw
from ...ground.retcode import ReturnCode
from .dispatch import Batch, dispatch, Results
from .forms import Form, Given, is_real, Mapped, Numbers, Tangent, Transposed
from .pools import ClusterError, Pool
from .programs import ChunkProgram, exported, program_of, Shipped


_STOP = jtu.GetAttrKey("stop")


@dataclasses.dataclass(frozen=True)
class Request:
    """A form of `n` trajectories, to be evaluated by the workers of a pool.

    - `threads`: the number of threads of each worker.
    - `pickle`: makes the shipped form of a program that can't be exported.
    """

    pool: Pool
    threads: int
    form: Form
    n: int
    pickle: Callable[[ChunkProgram], Shipped] = dataclasses.field(compare=False, repr=False)

    @property
    def stands_for(self) -> tuple:
        return self.form.on(None), self.form.base.plan.stands_for

    def of(self, form: Form) -> "Request":
        """The request for another form of these trajectories."""
        return dataclasses.replace(self, form=form)

    def now(self, numbers: Numbers, costs: Any, seen: Callable) -> tuple[Any, Any, Results]:
        """Evaluate now, for a form that is `Given`: the results of each trajectory and of each
        unit, and the `Results` of the dispatch."""
        form = self.form.base
        every, shared = ([np.asarray(raw(x)) for x in jtu.tree_leaves(x)] for x in numbers)
        paths, _ = jtu.tree_flatten_with_path(numbers.shared)
        stop = next((i for i, (path, _) in enumerate(paths) if path[-1] == _STOP), None)
        batch = Batch(every, shared, None if costs is None else np.asarray(costs), stop)

        def report(results, rows):
            seen(unflattened(form, results.each, results.parts)[0], results, rows)

        program = program_of(form, self.n)
        shipped = self._shipped(program)
        results = dispatch(self.pool, program, shipped, batch, threads=self.threads, report=report)
        return *unflattened(form, results.each, results.parts), results

    def in_program(self, numbers: Numbers, costs: Any) -> tuple[Any, Any]:
        """Evaluate inside a program, for a form that is `Given`: the results of each trajectory,
        and those of all."""
        every, shared = ([raw(x) for x in jtu.tree_leaves(x)] for x in numbers)
        costs = [] if costs is None else [costs]
        outs = _request_p.bind(*every, *shared, *costs, request=self)
        count = len(self.form.each)
        return unflattened(self.form.base, outs[:count], outs[count:])

    def __call__(self, *operands: Any) -> list:
        """Evaluate by a call of the host: the results of each trajectory, and those of all."""
        program = program_of(self.form, self.n)
        call = _Call(self.pool, self.threads, program, self._shipped(program))
        each, parts = program.results(self.n)
        outs = host_call(call, [*each, *parts], *operands)
        # Summed over the units in their order, whichever workers computed them.
        return [*outs[: len(each)], *(x.sum(0, dtype=x.dtype) for x in outs[len(each) :])]

    def avals(self) -> list:
        each = [jax.core.ShapedArray((self.n, *s.shape), s.dtype) for s in self.form.each]
        return [*each, *(jax.core.ShapedArray(s.shape, s.dtype) for s in self.form.parts)]

    def apart(self, operands: Sequence) -> tuple[list, list, list]:
        """The operands of each trajectory, those that all share, and the costs, if there are
        any."""
        every = len(self.form.every)
        shared = every + len(self.form.shared)
        return list(operands[:every]), list(operands[every:shared]), list(operands[shared:])

    def _shipped(self, program: ChunkProgram) -> Shipped:
        return exported(program) or self.pickle(program)


@dataclasses.dataclass(frozen=True, repr=False)
class _Call:
    """The function that a compiled program calls: flat arrays in, flat arrays out; compared by
    content."""

    pool: Pool
    threads: int
    program: ChunkProgram
    shipped: Shipped

    @property
    def stands_for(self) -> tuple:
        form = self.program.form
        return form.on(None), form.base.plan.stands_for

    def __call__(self, *operands: np.ndarray) -> list[np.ndarray]:
        form = self.program.form
        every, left = list(operands[: len(form.every)]), list(operands[len(form.every) :])
        shared, costs = left[: len(form.shared)], left[len(form.shared) :]
        batch = Batch(every, shared, costs[0] if costs else None)
        results = dispatch(self.pool, self.program, self.shipped, batch, threads=self.threads)
        if results.cause is not None:
            raise results.cause
        if results.lost:
            self._mark(results)
        return [*results.each, *results.parts]

    def _mark(self, results: Results) -> None:
        """**Raises:** `ClusterError` where a derivative was lost, since no return code could say
        so."""
        form, (rows, why) = self.program.form, results.lost[0]
        if not isinstance(form, Given) or form.wanted:
            raise ClusterError(
                f"the gradient of trajectories {rows[0]} to {rows[-1]} can't be computed: {why}."
            )
        fail_lost(unflattened(form, results.each, results.parts)[0], results)


def fail_lost(outcome: Outcome, results: Results) -> None:
    """Set the return codes of trajectories whose workers died to failures, without events."""
    for rows, _ in results.lost:
        outcome.retcode[rows] = ReturnCode.Failure.value
        if outcome.events is not None:
            outcome.events.which[rows] = NO_CALLBACK


def unflattened(form: Given, each: Sequence, parts: Sequence) -> tuple[Any, Any]:
    """The results for each trajectory, and those for all or for each unit, in their structures,
    from flat arrays."""

    def filled(structs, leaves):
        structs, structure = jtu.tree_flatten(structs)
        return jtu.tree_unflatten(structure, map(as_before, structs, leaves))

    structs = form.outputs
    return filled(structs[0], each), filled(structs[1], parts)


#
# The primitive
#


_request_p = jex.Primitive("ensembleode_request")
_request_p.multiple_results = True


def _is_zero(x: Any) -> bool:
    return type(x) is ad.Zero


def _jvp(primals, tangents, *, request):
    form = request.form
    every, shared, costs = request.apart(primals)
    d_every, d_shared, _ = request.apart(tangents)
    moving = [[not _is_zero(t) for t in xs] for xs in (d_every, d_shared)]
    is_total = isinstance(form, Given) and form.kind == "total"
    if is_total and any(map(any, moving)):
        return _total_jvp(request, primals, tangents)
    outs = _request_p.bind(*primals, request=request)
    zeros = [ad.Zero(a.to_tangent_aval()) for a in request.avals()]
    if not any(map(any, moving)):
        return outs, zeros
    fixed = [len(xs) - k for xs, k in zip(moving, form.linear, strict=True)]
    if not any(any(xs[:k]) for xs, k in zip(moving, fixed, strict=True)):
        d_every = [*every[: fixed[0]], *map(ad.instantiate_zeros, d_every[fixed[0] :])]
        d_shared = [*shared[: fixed[1]], *map(ad.instantiate_zeros, d_shared[fixed[1] :])]
        return outs, _request_p.bind(*d_every, *d_shared, *costs, request=request)
    tangent = Tangent(form, *map(tuple, moving))
    every += [t for t in d_every if not _is_zero(t)]
    shared += [t for t in d_shared if not _is_zero(t)]
    found = iter(_request_p.bind(*every, *shared, *costs, request=request.of(tangent)))
    structs = (*form.each, *form.parts)
    return outs, [next(found) if is_real(s) else z for s, z in zip(structs, zeros, strict=True)]


def _total_jvp(request, primals, tangents):
    """The derivative of a sum, one real number: its gradient is computed together with it, which
    costs no more than a solve."""
    form = request.form
    every, shared, _ = request.apart(tangents)
    tangents = [*every, *shared]
    wanted = tuple(not _is_zero(t) for t in tangents)
    with_gradient = dataclasses.replace(form, kind="total and gradient", wanted=wanted)
    outs = _request_p.bind(*primals, request=request.of(with_gradient))
    counts = len(form.each)
    each, parts = outs[: len(with_gradient.each)], outs[len(with_gradient.each) :]
    gradient = [*each[counts:], *parts[1:]]
    moving = [t for t in tangents if not _is_zero(t)]
    terms = [jnp.sum(g * t) for g, t in zip(gradient, moving, strict=True)]
    along = sum(x.astype(parts[0].dtype) for x in terms)
    zeros = [ad.Zero(a.to_tangent_aval()) for a in request.avals()[:counts]]
    return [*each[:counts], parts[0]], [*zeros, along]


def _transpose(cts, *operands, request):
    form = request.form
    every, shared, costs = request.apart(operands)
    none = [None] * len(operands)
    if all(map(_is_zero, cts)):
        return none
    fixed = [len(xs) - k for xs, k in zip((every, shared), form.linear, strict=True)]
    (x_every, l_every), (x_shared, l_shared) = (
        (xs[:k], xs[k:]) for xs, k in zip((every, shared), fixed, strict=True)
    )
    wanted = [tuple(map(ad.is_undefined_primal, xs)) for xs in (l_every, l_shared)]
    c_each, c_parts = cts[: len(form.each)], cts[len(form.each) :]
    given = [tuple(not _is_zero(c) for c in cs) for cs in (c_each, c_parts)]
    transposed = Transposed(_restricted(form, *wanted), *_flags_of(form, *wanted), *given)
    found = iter(
        _request_p.bind(
            *x_every,
            *(c for c in c_each if not _is_zero(c)),
            *x_shared,
            *(c for c in c_parts if not _is_zero(c)),
            *costs,
            request=request.of(transposed),
        )
    )
    to_every = [next(found) if w else None for w in wanted[0]]
    to_shared = [next(found) if w else None for w in wanted[1]]
    return [*[None] * fixed[0], *to_every, *[None] * fixed[1], *to_shared, *[None] * len(costs)]


def _restricted(form: Form, wanted_every: tuple, wanted_shared: tuple) -> Form:
    """The form with tangents of these operands alone."""
    if not isinstance(form, Tangent):
        return form

    def kept(moving, wanted):
        wanted = iter(wanted)
        return tuple(m and next(wanted) for m in moving)

    moving = kept(form.moving_every, wanted_every), kept(form.moving_shared, wanted_shared)
    return Tangent(form.of, *moving)


def _flags_of(form: Form, wanted_every: tuple, wanted_shared: tuple) -> tuple[tuple, tuple]:
    if not isinstance(form, Tangent):
        return wanted_every, wanted_shared
    return (True,) * sum(wanted_every), (True,) * sum(wanted_shared)


def _batch(operands, axes, *, request):
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    every, shared, costs = (
        list(zip(xs, at, strict=True))
        for xs, at in zip(request.apart(operands), request.apart(axes), strict=True)
    )
    flags = [tuple(a is not None for _, a in xs) for xs in (every, shared)]
    mapped = Mapped(request.form, size, *flags)
    outs = _request_p.bind(
        *(x if a is None else jnp.moveaxis(x, a, 1) for x, a in every),
        *(x if a is None else jnp.moveaxis(x, a, 0) for x, a in shared),
        *(x if a is None else jnp.max(x, a) for x, a in costs),
        request=request.of(mapped),
    )
    each = len(request.form.each)
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
