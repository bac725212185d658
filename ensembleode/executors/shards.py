"""A solve on each device of a mesh, differentiable, with no collective but at the end.

The lanes engine works inside `jax.shard_map` as it is. diffrax and lineax do not (they compare
abstract values, which know of the mesh there), so their program is traced outside and evaluated
inside, and so is its reverse pass.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..plan import Plan, Result
from ..trajectories import Lane


AXIS = "trajectories"
_SPLIT, _WHOLE = PartitionSpec(AXIS), PartitionSpec()
# (Known to JAX's caches of what was traced.)
_device_is_given = jax.make_user_context(default_value=False)


def is_on_one_device() -> bool:
    """Whether this is traced for one device of several."""
    return bool(_device_is_given.value or jax.sharding.get_abstract_mesh().manual_axes)


def on_each_device(plan: Plan, mesh: Mesh, numbers: tuple[Lane, Lane], mask: Any) -> Result:
    """Solve the trajectories that each device holds.

    **Arguments:**

    - `numbers`: what differs by trajectory, of which each device has its part, and what is shared.
    - `mask`: false for those that only fill a place.

    **Returns:** the result, split over the devices; without `t` where that is shared.
    """
    if plan.engine.chunked:
        return _mapped(mesh, _solve(plan), (_SPLIT, _WHOLE, _SPLIT), _SPLIT, (*numbers, mask))
    if plan.method.value.direction == "reverse":
        return _with_adjoint(numbers, mask, plan, mesh)
    return evaluated_on_each(mesh, _solve(plan), (_SPLIT, _WHOLE, _SPLIT), _SPLIT, (*numbers, mask))


def _solve(plan: Plan) -> Callable:
    def local(every, shared, mask):
        lanes = eqx.combine(every, shared)
        result = plan.engine.solve_trajectories(plan, lanes, mask.shape[0], mask)
        return result if plan.own_times else result._replace(t=None)

    return local


def _mapped(mesh: Mesh, fn: Callable, in_specs: Any, out_specs: Any, args: tuple) -> Any:
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        *args
    )


def evaluated_on_each(
    mesh: Mesh,
    fn: Callable,
    in_specs: tuple,
    out_specs: Any,
    args: tuple,
    post: Callable | None = None,
) -> Any:
    """`fn` traced for the part of one device, evaluated on each; `post` runs there, too.

    What solves ensembles in it does so on that device.
    """

    def part(spec, tree):
        ways = mesh.size if spec == _SPLIT else 1

        def struct(x):
            x = jnp.asarray(x)
            shape = (x.shape[0] // ways, *x.shape[1:]) if ways > 1 else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return jax.tree.map(struct, tree)

    structs = tuple(map(part, in_specs, args))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), _device_is_given(True):
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*structs)
    tree = jtu.tree_structure(out)

    def local(consts, *args):
        flat = jax.core.eval_jaxpr(closed.jaxpr, consts, *jtu.tree_leaves(args))
        result = jtu.tree_unflatten(tree, flat)
        return result if post is None else post(result)

    return _mapped(mesh, local, (_WHOLE, *in_specs), out_specs, (closed.consts, *args))


@eqx.filter_custom_vjp
def _with_adjoint(numbers, mask, plan, mesh):
    return evaluated_on_each(mesh, _solve(plan), (_SPLIT, _WHOLE, _SPLIT), _SPLIT, (*numbers, mask))


@_with_adjoint.def_fwd
def _(perturbed, numbers, mask, plan, mesh):
    del perturbed
    result = evaluated_on_each(
        mesh, _solve(plan), (_SPLIT, _WHOLE, _SPLIT), _SPLIT, (*numbers, mask)
    )
    return result, eqx.filter(result, eqx.is_inexact_array)


@_with_adjoint.def_bwd
def _(inexact, cotangents, perturbed, numbers, mask, plan, mesh):
    cotangents = jax.tree.map(
        lambda x, ct: jnp.zeros_like(x) if ct is None else ct, inexact, Result(*cotangents)
    )
    (every, shared), (rest_every, rest_shared) = eqx.partition(numbers, perturbed)

    def pull_back(every, shared, rest_every, rest_shared, mask, cotangents):
        def solve(every, shared):
            lanes = eqx.combine(every, rest_every), eqx.combine(shared, rest_shared)
            return eqx.filter(_solve(plan)(*lanes, mask), eqx.is_inexact_array)

        return jax.vjp(solve, every, shared)[1](cotangents)

    def summed(gradients):
        every, shared = gradients
        return every, jax.tree.map(lambda g: jax.lax.psum(g, AXIS), shared)

    return evaluated_on_each(
        mesh,
        pull_back,
        (_SPLIT, _WHOLE, _SPLIT, _WHOLE, _SPLIT, _SPLIT),
        (_SPLIT, _WHOLE),
        (every, shared, rest_every, rest_shared, mask, cotangents),
        summed,
    )
