"""A solve on each device of a mesh, which is differentiable. The devices don't communicate before
its end.

The libraries that a field may use (lineax, optimistix, diffrax) compare abstract values, which know
of the mesh inside `jax.shard_map`. So an engine's program is traced outside of `shard_map` and
evaluated inside, and so are its forward and its backward pass. The derivatives of this library's
own primitives, however, are JAX's, of any order.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from ..ground.devices.given_device import device_is_given, for_one_device
from ..plan.plan import Plan, Result
from ..plan.trajectory_numbers import TrajectoryNumbers
from ..problem import sensitivity


AXIS = "trajectories"
_SPLIT, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


def is_on_one_device() -> bool:
    """Whether the code that is being traced is for one device of several."""
    return bool(device_is_given.value or jax.sharding.get_abstract_mesh().manual_axes)


def on_each_device(
    plan: Plan, mesh: Mesh, numbers: tuple[TrajectoryNumbers, TrajectoryNumbers], mask: Array
) -> Result:
    """Solve the trajectories that each device holds; the result is split over the devices, and
    without `t` where all trajectories share it. The first of `numbers` differ between trajectories,
    and each device has its part of them; `mask` is false for places that hold copies."""
    if plan.method.value.direction == "reverse" and not plan.engine.closes(plan):
        label = type(plan.method.value.adjoint).__name__ + "()"
        return _with_adjoint(sensitivity.reverse_only(numbers, label), mask, plan, mesh)
    return _solved(numbers, mask, plan, mesh)


def _solve(plan: Plan) -> Callable:
    def local(every, shared, mask):
        lanes = eqx.combine(every, shared)
        result = plan.engine.solve_trajectories(plan, lanes, mask.shape[0], mask)
        return result if plan.own_times else result._replace(t=None)

    return local


def evaluated_on_each(
    mesh: Mesh,
    fn: Callable,
    in_specs: tuple,
    out_specs: Any,
    args: tuple,
    post: Callable | None = None,
) -> Any:
    """`fn` traced for the part of one device, on which ensembles inside of it are solved, too, and
    evaluated on each device; `post` runs there, too."""

    def part(spec, tree):
        def struct(x):
            x = jnp.asarray(x)
            shape = (x.shape[0] // mesh.size, *x.shape[1:]) if spec == _SPLIT else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return jax.tree.map(struct, tree)

    with for_one_device():
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*map(part, in_specs, args))
    tree = jtu.tree_structure(out)

    # A single call, so that it is mapped and differentiated outside of the mesh, too.
    evaluate = jax.jit(functools.partial(jax.core.eval_jaxpr, closed.jaxpr))

    def local(consts, *args):
        flat = evaluate(consts, *jtu.tree_leaves(args))
        result = jtu.tree_unflatten(tree, flat)
        return result if post is None else post(result)

    specs = {"in_specs": (_WHOLE, *in_specs), "out_specs": out_specs}
    return jax.shard_map(local, mesh=mesh, check_vma=False, **specs)(closed.consts, *args)


def _solved(numbers, mask, plan, mesh):
    return evaluated_on_each(mesh, _solve(plan), (_SPLIT, _WHOLE, _SPLIT), _SPLIT, (*numbers, mask))


_with_adjoint = eqx.filter_custom_vjp(_solved)


@_with_adjoint.def_fwd
def _(perturbed, numbers, mask, plan, mesh):
    (every, shared), (rest_every, rest_shared) = eqx.partition(numbers, perturbed)

    def forward(every, shared, rest_every, rest_shared, mask):
        def solve(every, shared):
            lanes = eqx.combine(every, rest_every), eqx.combine(shared, rest_shared)
            return eqx.partition(_solve(plan)(*lanes, mask), eqx.is_inexact_array)

        inexact, pullback, counts = jax.vjp(solve, every, shared, has_aux=True)
        # The arrays of the pullback get an axis of devices.
        return eqx.combine(inexact, counts), jax.tree.map(lambda x: x[None], pullback)

    result, pullback = evaluated_on_each(
        mesh,
        forward,
        (_SPLIT, _WHOLE, _SPLIT, _WHOLE, _SPLIT),
        _SPLIT,
        (every, shared, rest_every, rest_shared, mask),
    )
    return result, (pullback, eqx.filter(result, eqx.is_inexact_array))


@_with_adjoint.def_bwd
def _(residuals, cotangents, perturbed, numbers, mask, plan, mesh):
    del perturbed, numbers, mask, plan
    pullback, inexact = residuals
    cotangents = sensitivity.with_zeros(inexact, cotangents)

    def pull_back(pullback, cotangents):
        return jax.tree.map(lambda x: x[0], pullback)(cotangents)

    def summed(gradients):
        every, shared = gradients
        return every, jax.tree.map(lambda g: jax.lax.psum(g, AXIS), shared)

    return evaluated_on_each(
        mesh, pull_back, (_SPLIT, _SPLIT), (_SPLIT, _WHOLE), (pullback, cotangents), summed
    )
