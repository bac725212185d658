"""A solution as a function of its numbers, and that with tangents: what the primitives of
`derivatives.py` are of."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import ad

from ...core.lane import Lane
from ...fields import parameters_of
from ...tracing.program import equations, Program, trace
from .solves import Setup


@dataclasses.dataclass(frozen=True, repr=False)
class Flow:
    """What a primitive is of, but for the numbers.

    - `setup`: the solve, in which each trajectory has its own first state.
    - `tree`: the structure of its numbers, a `Lane`.
    - `moved`: of each real parameter, whether there is a tangent (None: there is not), and whether
        each trajectory has its own. (The first state has one always.)
    """

    setup: Setup
    tree: Any
    moved: tuple[bool | None, ...] = ()

    @property
    def n(self) -> int:
        return self.setup.n

    @property
    def real(self) -> list[int]:
        """Which of the constants and parameters of the field are real numbers."""
        avals = parameters_of(self.setup.plan.field)
        return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.floating)]

    def with_moved(self, moved: Sequence[bool | None] = (), **setup: Any) -> "Flow":
        return Flow(self.setup._replace(**setup), self.tree, tuple(moved))

    def __repr__(self) -> str:
        return f"Flow({self.setup.plan.field}, n={self.n})"


#
# Parameters
#


def each(x: Any, is_own: bool, n: int) -> Any:
    """One a trajectory, also of what they share."""
    x = jnp.asarray(x)
    return x if is_own else jnp.broadcast_to(x, (n, *x.shape))


def reals_of(flow: Flow, lanes: Lane) -> list:
    """The real parameters of these numbers (or flags, or tangents)."""
    every = (*lanes.consts, *lanes.p)
    return [every[i] for i in flow.real]


def with_reals(flow: Flow, lanes: Lane, reals: Sequence) -> Lane:
    """With these in their place."""
    every = [*lanes.consts, *lanes.p]
    for i, x in zip(flow.real, reals, strict=True):
        every[i] = x
    n = len(lanes.consts)
    return lanes._replace(consts=tuple(every[:n]), p=tuple(every[n:]))


def own_of(flow: Flow) -> list[bool]:
    """Which of the real parameters each trajectory has its own of."""
    batched = flow.setup.plan.batched
    return list(map(bool, reals_of(flow, batched)))


def with_own(flow: Flow, lanes: Lane, own: Sequence[bool]) -> tuple[Flow, Lane]:
    """With these parameters as each trajectory's own, too."""
    n, was = flow.n, own_of(flow)
    wanted = [a or bool(b) for a, b in zip(was, own, strict=True)]
    if wanted == was:
        return flow, lanes
    reals = [
        jnp.broadcast_to(x, (n, *x.shape)) if now and not before else x
        for x, now, before in zip(reals_of(flow, lanes), wanted, was, strict=True)
    ]
    plan = flow.setup.plan
    plan = dataclasses.replace(plan, batched=with_reals(flow, plan.batched, wanted))
    return flow.with_moved(flow.moved, plan=plan), with_reals(flow, lanes, reals)


#
# The field with tangents
#


@functools.lru_cache(maxsize=256)
def _field_with_tangents(field: Program, moved: tuple[int, ...]) -> tuple[Program, list]:
    """The field of a state and its tangent, `[2, *state]`, with the tangents of these parameters
    after the parameters (and all of them in `p`), and its constants."""
    avals = parameters_of(field)
    n = len(field.jaxpr.constvars)

    def both(u, p, t):
        numbers, tangents = p

        def at(state, *chosen):
            every = list(numbers)
            for i, x in zip(moved, chosen, strict=True):
                every[i] = x
            return field(every[:n], state, tuple(every[n:]), t)

        chosen = [numbers[i] for i in moved]
        return jnp.stack(jax.jvp(at, (u[0], *chosen), (u[1], *tangents)))

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    (out,) = field.out_avals
    state = jax.ShapeDtypeStruct((2, *out.shape), out.dtype)
    t: Any = field.jaxpr.invars[-1].aval
    p = (tuple(structs), tuple(structs[i] for i in moved))
    try:
        program, consts = trace(both, state, p, jax.ShapeDtypeStruct(t.shape, t.dtype), rules=True)
    except TypeError as e:
        if "forward-mode autodiff (jvp) to a custom_vjp" not in str(e):
            raise
        raise TypeError(_NO_TANGENT) from e
    if _is_reverse_only(program.jaxpr):
        raise TypeError(_NO_TANGENT)
    return program, consts


_NO_TANGENT = (
    "this solve is differentiated in forward mode or twice (jvp, jacfwd, hessian), but f calls a "
    "jax.custom_vjp function, which has no forward derivative: write it with jax.custom_jvp, which "
    "has both."
)


def _is_reverse_only(jaxpr: Any) -> bool:
    """Whether it has what JAX leaves in the place of a tangent that there is none of."""
    return any(eqn.primitive.name == "custom_lin" for eqn in equations(jaxpr))


def augmented(flow: Flow, lanes: Lane, v: Sequence) -> tuple[Flow, Lane]:
    """JF and its numbers, those of F and their tangents."""
    v0, *tangents = v
    plan = flow.setup.plan
    which = [i for i, m in zip(flow.real, flow.moved, strict=True) if m is not None]
    own = (*plan.batched.consts, *plan.batched.p, *(m for m in flow.moved if m is not None))
    program, consts = _field_with_tangents(plan.field, tuple(which))
    wide = dataclasses.replace(
        plan,
        field=program,
        state=jax.ShapeDtypeStruct((2, *plan.state.shape), plan.state.dtype),
        batched=plan.batched._replace(p=own, consts=(False,) * len(consts)),
    )
    lanes = lanes._replace(
        u0=jnp.stack([lanes.u0, v0], axis=1),
        p=(*lanes.consts, *lanes.p, *tangents),
        consts=tuple(consts),
    )
    tree = jax.tree.structure(lanes)
    return Flow(flow.setup._replace(plan=wide), tree), lanes


def augmented_tangents(flow: Flow, dlanes: Lane, dv: Sequence, wide: Flow) -> Lane:
    """The tangents of the numbers of JF."""
    dv0, *tangents = dv
    consts = wide.setup.plan.batched.consts
    return dlanes._replace(
        u0=stacked(dlanes.u0, dv0, axis=1),
        p=(*dlanes.consts, *dlanes.p, *tangents),
        # (Constants of a derivative rule.)
        consts=tuple(ad.Zero(jax.core.ShapedArray((), jnp.float32)) for _ in consts),
    )


def stacked(a: Any, b: Any, axis: int) -> Any:
    """Of tangents."""
    if is_zero(a) and is_zero(b):
        shape = (*a.aval.shape[:axis], 2, *a.aval.shape[axis:])
        return ad.Zero(jax.core.ShapedArray(shape, a.aval.dtype))
    return jnp.stack([ad.instantiate_zeros(a), ad.instantiate_zeros(b)], axis=axis)


def is_zero(x: Any) -> bool:
    return type(x) is ad.Zero
