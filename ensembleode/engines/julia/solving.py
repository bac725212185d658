"""Solving by Julia on the host: the numbers go to Julia, and the solutions come back."""

import dataclasses
from typing import Any

import jax.tree_util as jtu
import numpy as np

from ...ground.host import host_call
from ...plan.plan import Plan, Result
from ...plan.trajectory_numbers import TrajectoryNumbers
from . import methods, session
from .callbacks import callbacks_as_table
from .fields import JuliaField, translate
from .noise import field_with_noise, noise_as_table, parameters_read
from .numbers import read_arrays, result_of, written
from .requests import JuliaRequest


NO_DERIVATIVE = (
    "this solve is differentiated twice (hessian, jacfwd or jacrev of a gradient), and "
    "engine='julia' has first derivatives only. Leave engine out, or pass engine='compiled', which "
    "has derivatives of any order."
)


def field_of(plan: Plan) -> JuliaField:
    """The translated field of a plan.

    **Raises:** `ValueError` for a field that can't be translated, or that can't run on a GPU.
    """
    method = plan.method.value
    if plan.noise is not None:
        read = parameters_read(plan, plan.batched.parameters)
        return field_with_noise(plan.field, plan.noise, tuple(read))
    on_gpu = methods.is_gpu(method.place)
    # When an event cuts the step of a Rosenbrock method with static states, OrdinaryDiffEq
    # differentiates f itself, with dual numbers, which a translated function doesn't accept.
    in_place = plan.events is not None and bool(plan.events.continuous)
    implicit = method.implicit and not on_gpu
    product = None if plan.form is None else plan.form.product
    numbers = plan.batched.parameters
    field = translate(plan.field, numbers, implicit, product=product, in_place=in_place)
    if on_gpu and field.in_place:
        raise ValueError(
            f"{method.place[0]} runs fields of a few hundred operations on a state of a few "
            "components, and f is larger (or loops): use EnsembleThreads() or "
            "EnsembleDistributed()."
        )
    return field


def options_of(plan: Plan, n: int) -> dict[str, Any]:
    """The options of a solve in a request, which come beside its arrays."""
    method = plan.method.value
    place, options = method.place
    controller, norm = method.controller, method.norm
    return {
        "trajectories": n,
        "maxiters": plan.maxiters,
        "adaptive": method.adaptive,
        "method": methods.as_table(method.description),
        "controller": None if controller is None else methods.control_as_table(controller),
        "norm": None if norm is None else type(norm).__name__,
        "controlled": None if plan.extension is None else plan.controlled,
        "place": {"name": place, **dict(options)},
    }


def solve_on_host(plan: Plan, lanes: TrajectoryNumbers, n: int) -> dict[str, np.ndarray]:
    """Have Julia solve `n` trajectories.

    **Raises:** [`JuliaError`][] with Julia's message.
    """
    field = field_of(plan)
    room = {name: np.empty(x.shape, x.dtype) for name, x in written(plan, n).items()}
    saving = {"mode": plan.saving.mode, "start": plan.saving.start}
    options = {**options_of(plan, n), **saving, "field": field.as_table()}
    options["callbacks"] = callbacks_as_table(plan, field.inputs)
    options["noise"] = None if plan.noise is None else noise_as_table(plan, plan.noise)
    session.start().run(JuliaRequest("solve", options, read_arrays(plan, field, lanes, n), room))
    return room


@dataclasses.dataclass(frozen=True)
class _JuliaCall:
    """[`solve_on_host`][] for flat operands. Calls are compared by their content."""

    plan: Plan
    n: int
    structure: Any

    @property
    def stands_for(self) -> tuple:
        return self.plan.stands_for

    def __call__(self, *leaves: np.ndarray) -> list[np.ndarray]:
        lanes = jtu.tree_unflatten(self.structure, leaves)
        return list(solve_on_host(self.plan, lanes, self.n).values())


def solve_in_program(
    plan: Plan, lanes: TrajectoryNumbers, n: int, no_derivative: str = NO_DERIVATIVE
) -> Result:
    """`solve_on_host` inside a compiled program."""
    # So that a callback that can't be translated raises now, and not when the program runs.
    callbacks_as_table(plan, field_of(plan).inputs)
    leaves, structure = jtu.tree_flatten(lanes)
    room = written(plan, n)
    call = _JuliaCall(plan, n, structure)
    outs = host_call(call, list(room.values()), *leaves, no_derivative=no_derivative)
    return result_of(plan, lanes, dict(zip(room, outs, strict=True)), n)
