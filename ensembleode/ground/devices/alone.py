"""Computations that each device of a mesh does by itself, as one operation of the program.

Inside of `jax.shard_map`, and on a mesh with explicit axes, the type of an array says over which
axes its values vary and how it is split. Time loops don't declare that, and libraries such as
diffrax compare these types. So a solve is traced without a mesh, and becomes one equation, whose
operands and results all vary over the same axes and aren't split. The operations that prepare the
operands have JAX's own transposes, such as the sum over devices of the cotangents of a shared
array.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.tree_util as jtu
from jax.extend.core import JaxprEqn
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ...tracing.evaluation import evaluated
from ...tracing.program import is_inexact, Program, program_of, substituted, trace, with_constants
from ..recent import jit_recent
from .given_device import for_one_device


def together(xs: Sequence) -> list:
    """The arrays as operands of one equation: they vary over the same axes of a mesh, and none is
    split over the devices."""
    types: list = list(map(jax.typeof, xs))
    varying = frozenset().union(*(a.manual_axis_type.varying for a in types))
    mesh: Any = next((a.sharding.mesh for a in types if a.sharding.mesh.explicit_axes), None)
    found = []
    for x, a in zip(xs, types, strict=True):
        if mesh is not None and a.sharding != (whole := _on_whole_mesh(mesh, a)):
            x = jax.sharding.reshard(x, whole)
        missing = varying - a.manual_axis_type.varying
        found.append(jax.lax.pcast(x, tuple(missing), to="varying") if missing else x)
    return found


def _on_whole_mesh(mesh: Any, aval: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))


def results_of(avals: Sequence, operands: Sequence) -> list:
    """The abstract values of results, given those of the operands, which are `together`."""
    like: Any = next((a for a in operands if not a.sharding.mesh.empty), None)
    if like is None:
        return list(avals)
    return [
        x.update(
            sharding=_on_whole_mesh(like.sharding.mesh, x), manual_axis_type=like.manual_axis_type
        )
        for x in avals
    ]


def lowered(fn: Callable) -> Callable:
    """The lowering of a primitive that computes `fn` on each device."""
    lower: Callable = mlir.lower_fun(fn, multiple_results=True)

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        inner = ctx.replace(avals_in=list(map(_bare, ctx.avals_in)))
        with for_one_device():
            outs = lower(inner, *operands, **params)
        ctx.set_tokens_out(inner.tokens_out)
        return outs

    return rule


def _bare(a: Any) -> Any:
    """An abstract value without a mesh."""
    return jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type)


def without_types(tree: PyTree) -> PyTree:
    """The abstract values of arrays, for one device."""
    return jax.tree.map(lambda x: _bare(jax.typeof(x)), tree)


def split_like(outs: Sequence, operands: Sequence, axes: Sequence) -> list:
    """Results whose first axis is the mapped axis of operands, split over the devices as that
    is."""
    at = [(jax.typeof(x).sharding, a) for x, a in zip(operands, axes, strict=True) if a is not None]
    split = next((s.update(spec=[s.spec[a]]) for s, a in at if s.spec[a] is not None), None)
    return list(outs) if split is None else [jax.sharding.reshard(x, split) for x in outs]


def without_mesh(program: Program) -> Program:
    """A program for one device, from one that was traced with arrays on a mesh."""
    jaxpr, n = program.jaxpr, len(program.jaxpr.constvars)
    given = [*jaxpr.constvars, *jaxpr.invars]
    every: Any = [*given, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    if not any(_tells(v.aval.sharding.mesh) for v in every):
        return program

    def evaluate(*xs):
        return evaluated(jaxpr, *xs[n:], consts=xs[:n], instead=_unsharded)

    with for_one_device():
        inner: Any = jax.make_jaxpr(evaluate)(*(_bare(v.aval) for v in given)).jaxpr
    jaxpr = with_constants(inner, inner.invars[:n], inner.invars[n:])
    return program_of(jaxpr, program.out_tree, rules=True)


def _unsharded(eqn: JaxprEqn, ins: Sequence) -> PyTree:
    """For `evaluated`: the outputs of an equation, which may name axes of a mesh, for one
    device."""
    prim, params = eqn.primitive, dict(eqn.params)
    if prim.name in ("pvary", "reshard"):
        return ins
    if prim.name == "jit":
        return evaluated(params["jaxpr"], *ins, instead=_unsharded)
    params |= {k: None for k in ("sharding", "out_sharding") if k in params}
    # (Bound here, since evaluating the equation would restore the mesh on which it was traced.)
    outs = prim.bind(*ins, **prim.get_bind_params(params))
    return outs if prim.multiple_results else [outs]


def alone(fn: Callable, *args: Any) -> Any:
    """`fn(*args)`; where the types of the arrays name axes of a mesh, each device computes it by
    itself."""
    leaves, structure = jtu.tree_flatten(args)
    if not is_on_mesh(leaves):
        return fn(*args)
    found: Any = None

    def flat(*leaves):
        nonlocal found
        outs, found = jtu.tree_flatten(fn(*jtu.tree_unflatten(structure, leaves)))
        return outs

    outs = _computed(flat, *leaves)
    return jtu.tree_unflatten(found, outs)


def operands_of(tree: PyTree) -> PyTree:
    """The arrays of a tree, as `alone` takes them as operands."""
    leaves, structure = jtu.tree_flatten(tree)
    return jtu.tree_unflatten(structure, together(leaves)) if is_on_mesh(leaves) else tree


def is_on_mesh(tree: PyTree) -> bool:
    """Whether the types of the arrays name axes of a mesh."""
    return any(_tells(jax.typeof(x).sharding.mesh) for x in jtu.tree_leaves(tree))


def _tells(mesh: Any) -> bool:
    return bool(mesh.manual_axes or mesh.explicit_axes)


def _computed(fn: Callable, *args: Any) -> list:
    """The list that `fn` returns; `args` are arrays, or lists of them."""
    with for_one_device():
        program, consts = trace(fn, *without_types(args))
    return _alone_p.bind(*together([*consts, *jtu.tree_leaves(args)]), program=program)


def _run(*operands: Any, program: Program) -> list:
    n = len(program.jaxpr.constvars)
    return program(operands[:n], *operands[n:])


_alone_p: Any = jex.Primitive("ensembleode_alone")
_alone_p.multiple_results = True
_eagerly = jit_recent(lambda program, *operands: _alone_p.bind(*operands, program=program))


def _results(*avals: Any, program: Program) -> tuple:
    return results_of(program.out_avals, avals), program.jaxpr.effects


def _jvp(primals: Sequence, tangents: Sequence, *, program: Program) -> tuple:
    outs = _alone_p.bind(*primals, program=program)
    moved = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def pushed(primals, tangents):
        def at(*chosen):
            every = substituted(primals, moved, chosen)
            return list(filter(is_inexact, _run(*every, program=program)))

        return jax.jvp(at, [primals[i] for i in moved], tangents)[1]

    found = iter(_computed(pushed, list(primals), [tangents[i] for i in moved]))
    avals: list = [jax.typeof(x).to_tangent_aval() for x in outs]
    dots = [next(found) if is_inexact(x) else ad.Zero(a) for x, a in zip(outs, avals, strict=True)]
    return outs, dots


def _transpose(cts: Sequence, *operands: Any, program: Program) -> list:
    linear = [ad.is_undefined_primal(x) for x in operands]

    def pulled(known, cts):
        def at(*chosen):
            rest, chosen = iter(known), iter(chosen)
            every = [next(chosen) if x else next(rest) for x in linear]
            return _run(*every, program=program)

        like = [_bare(x.aval) for x in operands if ad.is_undefined_primal(x)]
        return list(jax.linear_transpose(at, *like)(cts))

    known = [x for x, of in zip(operands, linear, strict=True) if not of]
    found = iter(_computed(pulled, known, list(map(ad.instantiate_zeros, cts))))
    return [next(found) if of else None for of in linear]


def _batch(operands: Sequence, axes: Sequence, *, program: Program) -> tuple:
    def mapped(*operands):
        return jax.vmap(lambda *xs: _run(*xs, program=program), in_axes=tuple(axes))(*operands)

    outs = split_like(_computed(mapped, *operands), operands, axes)
    return outs, [0] * len(outs)


_alone_p.def_impl(lambda *operands, program: _eagerly(program, *operands))
_alone_p.def_effectful_abstract_eval(_results)
ad.primitive_jvps[_alone_p] = _jvp
ad.primitive_transposes[_alone_p] = _transpose
batching.primitive_batchers[_alone_p] = _batch
mlir.register_lowering(_alone_p, lowered(_run))
