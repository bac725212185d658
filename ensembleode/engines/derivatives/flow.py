"""A solve as a function of its numbers, and the solve of the field with tangents. The primitives of
`primitives.py` are defined by these, whichever engine computes them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array, Bool, Int, PyTree

from ...fields import parameters_of
from ...fields.derivatives.jacobian import leaves_no_tangent
from ...jumps.moving_jumps import with_tangents
from ...plan.implicit_form import ImplicitForm, with_constants_around
from ...plan.plan import Plan
from ...plan.rate import rate_of
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...tracing.program import is_inexact, Program, structs_of, substituted, trace
from ..base.results import numbers_of_each


class RecordedSolve(NamedTuple):
    """What is known from the solve, with the trajectories along the first axis: whether each
    succeeded (`ok`); how many saved times it `reached`, or would have with more rows; with
    callbacks, how many kept events `happened`, and whether an event `ended` it."""

    ok: Bool[Array, " lane"]
    reached: Int[Array, " lane"]
    happened: Int[Array, " lane"] | None = None
    ended: Bool[Array, " lane"] | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Flow:
    """The static part of a primitive: the solve of `n` trajectories, each of which has its own
    initial state. For the field with tangents, the plan is that of the extended field.

    - `groups`: the number of groups of equal size into which the trajectories fall. Each group has
        its own sum of the gradients with respect to shared parameters.
    - `moved`: for each inexact parameter, None if it has no tangent, and otherwise whether each
        trajectory has its own tangent. The initial state always has a tangent for each.
    - `wanted`: the numbers of those inexact parameters, among the field's constants and parameters,
        whose cotangents `pull` and `bend` compute, besides that of the initial state.
    - `tree`: the structure of the `TrajectoryNumbers` and of the `RecordedSolve`.
    """

    plan: Plan
    n: int
    groups: int = 1
    moved: tuple[bool | None, ...] = ()
    wanted: tuple[int, ...] = ()
    tree: PyTree = None

    def with_moved(self, moved: Sequence[bool | None] = (), **changes: Any) -> "Flow":
        return dataclasses.replace(self, moved=tuple(moved), tree=None, **changes)

    def wanted_of(self, lanes: TrajectoryNumbers) -> list:
        """The `wanted` parameters among the numbers of trajectories."""
        return [lanes.parameters[i] for i in self.wanted]

    @property
    def own(self) -> list[bool]:
        """For each of the `wanted` parameters, whether it differs between trajectories."""
        return list(map(bool, self.wanted_of(self.plan.batched)))

    def __repr__(self) -> str:
        return f"Flow({self.plan.field}, n={self.n})"


#
# Parameters
#


def inexact_of(field: Any) -> list[int]:
    """The indices of the field's constants and parameters that are real or complex."""
    return [i for i, a in enumerate(parameters_of(field)) if is_inexact(a)]


def own_and_shared(field: Any, batched: TrajectoryNumbers) -> tuple[int, int]:
    """How many inexact numbers each trajectory has for itself, and how many all share."""
    avals, is_own, sizes = parameters_of(field), batched.parameters, {True: 0, False: 0}
    for i in inexact_of(field):
        sizes[bool(is_own[i])] += avals[i].size
    return sizes[True], sizes[False]


def inexacts_of(plan: Plan, lanes: TrajectoryNumbers) -> list:
    """The inexact parameters among the numbers of trajectories, or among flags or tangents."""
    return [lanes.parameters[i] for i in inexact_of(plan.field)]


def with_wanted(flow: Flow, lanes: TrajectoryNumbers, values: Sequence) -> TrajectoryNumbers:
    """The numbers of trajectories with the `wanted` parameters replaced by these."""
    return lanes.with_parameters(substituted(lanes.parameters, flow.wanted, values))


def with_own(
    flow: Flow, lanes: TrajectoryNumbers, own: Sequence[bool]
) -> tuple[Flow, TrajectoryNumbers]:
    """The flow and its numbers, with the `wanted` parameters in `own` given to each trajectory."""
    plan, was = flow.plan, flow.own
    wanted = [a or bool(b) for a, b in zip(was, own, strict=True)]
    if wanted == was:
        return flow, lanes
    values = [
        numbers_of_each(x, before or not now, flow.n)
        for x, now, before in zip(flow.wanted_of(lanes), wanted, was, strict=True)
    ]
    lanes = with_wanted(flow, lanes, values)
    plan = dataclasses.replace(plan, batched=with_wanted(flow, plan.batched, wanted))
    return dataclasses.replace(flow, plan=plan), lanes


#
# The field with tangents
#


@functools.lru_cache(maxsize=256)
def _field_with_tangents(field: Program, moved: tuple[int, ...]) -> tuple[Program, list]:
    """The field of a state and its tangent, and its constants; `moved` have tangents in `p`."""

    def both(u, p, t):
        numbers, tangents = p
        at = at_numbers(field, field, numbers, moved, t)
        chosen = [numbers[i] for i in moved]
        return jnp.stack(jax.jvp(at, (u[0], *chosen), (u[1], *tangents)))

    state, *p, t = _inputs_with_tangents(field, moved)
    try:
        program, consts = trace(both, state, tuple(p), t, rules=True)
    except TypeError as e:
        if "forward-mode autodiff (jvp) to a custom_vjp" not in str(e):
            raise
        raise TypeError(_NO_TANGENT) from e
    if leaves_no_tangent(program.jaxpr):
        raise TypeError(_NO_TANGENT)
    return program, consts


def _form_with_tangents(
    form: ImplicitForm, field: Program, program: Program, consts: list, moved: tuple[int, ...]
) -> tuple[Program, ImplicitForm, list]:
    """The program, the form and the constants of the field with tangents. If the form has a
    product, the constants of the program and of the product are joined."""
    form = dataclasses.replace(form, mass=form.mass and form.mass.doubled())
    if form.rate is not None:
        rate, more = _field_with_tangents(form.rate, moved)
        before, after = (tuple((x.shape, x.dtype) for x in xs) for xs in (consts, more))
        form = dataclasses.replace(form, rate=with_constants_around(rate, before, ()))
        program = with_constants_around(program, (), after)
        consts = [*consts, *more]
    if form.product is None:
        return program, form, consts
    product, more = _product_with_tangents(form.product, field, moved)
    before, after = (tuple((x.shape, x.dtype) for x in xs) for xs in (consts, more))
    product = with_constants_around(product, before, ())
    program = with_constants_around(program, (), after)
    return program, dataclasses.replace(form, product=product), [*consts, *more]


@functools.lru_cache(maxsize=256)
def _product_with_tangents(
    product: Program, field: Program, moved: tuple[int, ...]
) -> tuple[Program, list]:
    """The product of the Jacobian with a direction for the field with tangents, and its constants;
    the direction is `[2, *state]`, too. That Jacobian is `[[J, 0], [dJ, J]]`."""

    def both(u, p, t):
        numbers, tangents, (first, second) = p
        chosen = [numbers[i] for i in moved]
        at = at_numbers(product, field, numbers, moved, t, first)
        out, tangent = jax.jvp(at, (u[0], *chosen), (u[1], *tangents))
        return jnp.stack([out, tangent + at_numbers(product, field, numbers, (), t, second)(u[0])])

    state, *p, t = _inputs_with_tangents(field, moved)
    return trace(both, state, (*p, state), t, rules=True)


def at_numbers(
    program: Callable,
    field: Program,
    numbers: Sequence,
    places: Sequence[int],
    t: Array,
    *more: Any,
) -> Callable:
    """A program of the field's numbers as a function of the state and of those at these places."""
    n = len(field.jaxpr.constvars)

    def at(state, *chosen):
        every = substituted(numbers, places, chosen)
        return program(every[:n], state, (*every[n:], *more), t)

    return at


def numbers_and_time(field: Program) -> tuple[tuple, jax.ShapeDtypeStruct]:
    """The abstract values of a field's constants and parameters, and of its time."""
    _, *parameters, t = field.jaxpr.invars
    *numbers, t = structs_of([*field.jaxpr.constvars, *parameters, t])
    return tuple(numbers), t


def _inputs_with_tangents(field: Program, moved: Sequence[int]) -> tuple:
    """The abstract values of a state with its tangent, of numbers, their tangents, the time."""
    (out,) = field.out_avals
    state = jax.ShapeDtypeStruct((2, *out.shape), out.dtype)
    numbers, t = numbers_and_time(field)
    return state, numbers, tuple(numbers[i] for i in moved), t


_NO_TANGENT = (
    "this solve is differentiated in forward mode or twice (jvp, jacfwd, hessian), but f calls a "
    "jax.custom_vjp function, which has no forward derivative: write it with jax.custom_jvp, which "
    "has both."
)


def augmented(flow: Flow, lanes: TrajectoryNumbers, v: Sequence) -> tuple[Flow, TrajectoryNumbers]:
    """The flow JF and its numbers, which are those of F and their tangents. JF computes the
    cotangents of the same numbers as F: the cotangent of a tangent isn't needed, as `bend` is
    linear in it."""
    v0, *tangents = v
    plan = flow.plan
    flags = zip(inexact_of(plan.field), flow.moved, strict=True)
    which = tuple(i for i, m in flags if m is not None)
    own = (*plan.batched.parameters, *(m for m in flow.moved if m is not None))
    program, consts = _field_with_tangents(plan.field, which)
    form, events = plan.form, plan.events
    if form is not None:
        assert isinstance(plan.field, Program)
        program, form, consts = _form_with_tangents(form, plan.field, program, consts, which)
    if events is not None:
        assert isinstance(plan.field, Program)
        events = with_tangents(events, rate_of(plan.field, plan.form), program, which)
    wide = dataclasses.replace(
        plan,
        field=program,
        events=events,
        form=form,
        state=jax.ShapeDtypeStruct((2, *plan.state.shape), plan.state.dtype),
        batched=plan.batched._replace(p=own, consts=(False,) * len(consts)),
    )
    lanes = lanes._replace(
        u0=jnp.stack([lanes.u0, v0], axis=1),
        p=(*lanes.parameters, *tangents),
        consts=tuple(consts),
    )
    wanted = tuple(len(consts) + i for i in flow.wanted)
    return flow.with_moved(plan=wide, wanted=wanted), lanes


def augmented_tangents(
    flow: Flow, dlanes: TrajectoryNumbers, dv: Sequence, wide: Flow
) -> TrajectoryNumbers:
    """The tangents of the numbers of JF."""
    dv0, *tangents = dv
    consts = parameters_of(wide.plan.field)[: len(wide.plan.batched.consts)]
    return dlanes._replace(
        u0=stacked(dlanes.u0, dv0, axis=1),
        p=(*dlanes.parameters, *tangents),
        # The constants come from derivative rules, and have no tangents.
        consts=tuple(ad.Zero(a.to_tangent_aval()) for a in consts),
    )


def stacked(a: Array, b: Any, axis: int) -> Any:
    """Two tangents stacked along a new axis; a symbolic Zero where both are."""
    if is_zero(a) and is_zero(b):
        shape = (*a.aval.shape[:axis], 2, *a.aval.shape[axis:])
        return ad.Zero(jax.core.ShapedArray(shape, a.aval.dtype))
    return jnp.stack([ad.instantiate_zeros(a), ad.instantiate_zeros(b)], axis=axis)


def is_zero(x: Any) -> bool:
    return type(x) is ad.Zero


#
# More trajectories
#


def widened(flow: Flow, size: int, batched: Any, lanes: TrajectoryNumbers, *more: Any) -> tuple:
    """For a mapped axis of this size, which comes first where `batched` says so, the flow and the
    operands of as many more trajectories. Shared numbers that differ along it become each
    trajectory's own."""
    n, own = flow.n, flow.plan.batched
    lanes_batched, *more_batched = batched

    fold = functools.partial(folded, size, n)
    now_own = jax.tree.map(lambda a, b: bool(a or b), own, lanes_batched)
    plan = dataclasses.replace(flow.plan, batched=now_own)
    wide = flow.with_moved(plan=plan, n=size * n, groups=size * flow.groups)
    lanes = jax.tree.map(fold, lanes, lanes_batched, own)
    every = [jax.tree.map(fold, x, b) for x, b in zip(more, more_batched, strict=True)]
    return (wide, lanes, *every)


def folded(size: int, n: int, x: Array, is_batched: bool, is_own: bool = True) -> Array:
    """The numbers `x` for `size` times `n` trajectories, with a mapped axis if `is_batched`."""
    if not is_own:
        return jnp.repeat(x, n, axis=0) if is_batched else x
    x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * n, *x.shape[2:])
