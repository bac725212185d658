"""One step of a fit: the mean loss of a batch, its gradient, and the update by the optimiser."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ..tracing.evaluation import equations
from .parallel import Placement


class PaddedBatch(NamedTuple):
    """Rows of a batch, of which the first `count` are items, and the place of each among all
    rows."""

    rows: Any
    place: Any
    count: Any


class TrainingState(NamedTuple):
    """The variables that a step changes."""

    params: Any
    optimizer: Any


class StepReport(NamedTuple):
    """What is told of a step, as numbers on the devices.

    - `loss`: the loss before the step, NaN where it or its gradient isn't finite, so that there is
        one number to look at.
    - `gradient_norm`: the Euclidean norm of its gradient.
    - `learning_rate`: that of this step; NaN where the optimiser's state has none.
    """

    loss: Any
    gradient_norm: Any
    learning_rate: Any


@dataclasses.dataclass(frozen=True)
class UpdateStep:
    """`compiled(state, batch, key, number)` returns the next state, the next number, and a
    `StepReport`."""

    loss: Callable  # a function of the parameters alone without data; else also of a batch
    static: Any  # the part of the parameters that isn't trained
    optimizer: Any
    placement: Placement
    has_data: bool
    repeats: bool  # whether all steps have the same loss, so that a line search's values stay valid
    microbatch: int | None = None  # how many rows a device computes with at a time; None for all
    dtype: Any = None  # the dtype of the loss

    @functools.cached_property
    def compiled(self) -> Any:
        return jax.jit(self._step)

    @functools.cached_property
    def mean_loss(self) -> Any:
        """`mean_loss(params, batch, key)`: the mean loss of the items of a batch."""
        return jax.jit(functools.partial(self.mean_of_losses, dtype=self.dtype))

    def mean_of_losses(self, params: Any, batch: PaddedBatch, key: Any, dtype: Any) -> Any:
        """The mean loss of the items of a batch, added up in this dtype."""

        def part(params, *rows):
            return self.summed_losses(*rows, params)

        return self.mean(part, jnp.zeros((), dtype), params, batch, key)

    def _step(
        self, state: TrainingState, batch: Any, key: Any, number: Any
    ) -> tuple[TrainingState, Any, StepReport]:
        key = jax.random.fold_in(key, number)
        both = functools.partial(self.value_and_gradient, batch=batch, key=key)
        value, gradient = self._compiled_for(state, both)
        updates, optimizer = self.optimizer.update(
            jax.tree.map(jnp.conj, gradient),
            state.optimizer,
            state.params,
            value=value,
            grad=gradient,
            value_fn=_with_gradient(both),
        )
        finite = jnp.isfinite(value) & jnp.all(
            jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(gradient)])
        )
        new = TrainingState(optax.apply_updates(state.params, updates), optimizer)
        # Dtypes stay the same, whatever the optimiser mixes in, so that a step compiles only once.
        new = jax.tree.map(lambda old, x: jnp.asarray(x, jnp.result_type(old)), state, new)
        loss = jnp.where(finite, value, jnp.nan)
        report = StepReport(loss, optax.tree.norm(gradient), learning_rate_in(optimizer))
        return new, number + 1, report

    def _compiled_for(self, state: TrainingState, both: Callable) -> tuple[Any, Any]:
        found = [optax.tree.get_all_with_path(state.optimizer, x) for x in ("value", "grad")]
        value, gradient = (x[0][1] if len(x) == 1 else None for x in found)
        if not self.repeats or value is None or gradient is None:  # (which needn't be there)
            return both(state.params)
        known = value.astype(self.dtype), gradient
        return jax.lax.cond(jnp.isfinite(known[0]), lambda _: known, both, state.params)

    def value_and_gradient(
        self, params: Any, batch: PaddedBatch | None, key: Any
    ) -> tuple[Any, Any]:
        """The mean over the items and its gradient, however the items are split."""
        if not self.has_data:
            return jax.value_and_grad(self.alone)(params)
        assert batch is not None

        def part(params, rows, place, count, key):
            of = functools.partial(self.summed_losses, *(rows, place, count, key))
            return jax.value_and_grad(of)(params)

        zeros = jnp.zeros((), self.dtype), jax.tree.map(jnp.zeros_like, params)
        return self.mean(part, zeros, params, batch, key)

    def alone(self, params: Any) -> Any:
        """The loss without data."""
        return self.loss(eqx.combine(params, self.static))

    def mean(self, part: Callable, zeros: Any, params: Any, batch: PaddedBatch, key: Any) -> Any:
        """The mean over the items. `part(params, rows, place, count, key)` returns the sums over
        the items among some rows, in the structure of `zeros`."""

        def sums(shared, split):
            params, count, key = shared
            size = self.rows_at_a_time(params, *split, key)
            return _in_parts(lambda x: part(params, *x, count, key), zeros, split, size)

        sums = self.placement.summed(sums)((params, batch.count, key), (batch.rows, batch.place))
        return jax.tree.map(lambda x: x / batch.count.astype(x.real.dtype), sums)

    def rows_at_a_time(self, params: Any, rows: Any, place: Any, key: Any) -> int | None:
        """How many of these rows a device computes with at a time; None for all."""
        return self.microbatch

    def summed_losses(self, rows: Any, place: Any, count: Any, key: Any, params: Any) -> Any:
        """The sum of the losses of the items among these rows."""
        losses = self.losses(params, rows, place, key)
        return jnp.sum(jnp.where(place < count, losses, jnp.zeros((), losses.dtype)))

    def losses(self, params: Any, rows: Any, place: Any, key: Any) -> Any:
        """The loss of each row."""
        losses = self.returned(params, rows, place, key)
        _check_losses(losses, place.shape[0])
        return losses

    def returned(self, params: Any, rows: Any, place: Any, key: Any) -> Any:
        """The return value of the loss function for these rows."""
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(place)
        return self.loss(eqx.combine(params, self.static), rows, keys)


def learning_rate_in(optimizer: Any) -> Any:
    """The learning rate in the state of an optimiser; NaN where there is none, or are several."""
    found = [x for _, x in optax.tree.get_all_with_path(optimizer, "learning_rate")]
    # (That of a schedule may be there, too.)
    rates = [x for x in found if isinstance(x, jax.Array) and not x.shape]
    return jnp.asarray(rates[0], float) if len(rates) == 1 else jnp.asarray(jnp.nan)


def _in_parts(part: Callable, zeros: Any, split: tuple[Any, Any], size: int | None) -> Any:
    """The sum of `part` over pieces of the rows and their places, of `size` rows each."""

    def add(total, inputs):
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part(inputs)), None

    rows, place = split
    n = place.shape[0]
    if size is None or size >= n:
        return add(zeros, split)[0]
    missing = -n % size
    rows = jax.tree.map(lambda x: _extended(x, missing), rows)
    # (Padding rows get places after the last item.)
    place = jnp.concatenate([place, jnp.full(missing, jnp.iinfo(place.dtype).max)])
    split = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (rows, place))
    return jax.lax.scan(add, zeros, split)[0]


def checked(loss: Callable, has_data: bool) -> tuple[Callable, bool]:
    """The loss with one parameter without data, or with three with data; and whether it takes
    keys."""
    parameters = inspect.signature(loss).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(x.kind in positional and x.default is x.empty for x in parameters)
    if count == (3 if has_data else 1):
        return loss, has_data
    if has_data and count == 2:
        return (lambda params, batch, _: loss(params, batch)), False
    takes = f"it takes {count} required positional parameters."
    raise TypeError(
        f"with data, the loss must take (params, batch, key), or (params, batch); {takes}"
        if has_data
        else f"without data, the loss must take (params); {takes} Give the data with fit(loss, "
        "params, data)."
    )


def traced(step: UpdateStep, params: Any, batch: PaddedBatch | None, key: Any) -> tuple[Any, Any]:
    """The dtype of the loss, and the mesh of devices on which it is computed, if the loss itself
    solves on several devices; else None."""
    if batch is not None:
        of_rows = jax.make_jaxpr(step.losses, return_shape=True)
        jaxpr, value = of_rows(params, batch.rows, batch.place, key)
        return value.dtype, mesh_of(jaxpr.jaxpr)
    jaxpr, value = jax.make_jaxpr(step.alone, return_shape=True)(params)
    if not (eqx.is_array_like(value) or isinstance(value, jax.ShapeDtypeStruct)) or value.shape:
        raise TypeError(f"without data, the loss must return one number; it returned {value}.")
    check_real(value)
    return value.dtype, mesh_of(jaxpr.jaxpr)


def mesh_of(jaxpr: Any) -> Mesh | None:
    """The mesh that a part of a program runs on, at any depth; None without one."""
    meshes = (eqn.params.get("mesh") for eqn in equations(jaxpr))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _check_losses(losses: Any, n: int) -> None:
    if not eqx.is_array(losses):
        raise TypeError(
            f"the loss must return an array of one number for each item, got {losses!r}."
        )
    if losses.shape != (n,):
        hint = " Don't average in it: fit does." if losses.shape == () else ""
        raise TypeError(
            f"the loss must return one number for each item, an array of the shape ({n},) for the "
            f"{n} items that it was given; it returned the shape {losses.shape}.{hint}"
        )
    check_real(losses)


def check_real(value: Any) -> None:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"the loss must be real, of a floating-point dtype; it is {value.dtype}.")


def _extended(x: Any, missing: int) -> Any:
    return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])


def _with_gradient(both: Callable) -> Callable:
    """The value as a function that line searches can differentiate, from `both`, which returns the
    value and the gradient."""

    def forwards(params):
        value, gradient = both(params)
        # (In the dtype of Python's numbers: a line search may transpose its derivative with 1.0.)
        return value.astype(jnp.result_type(float)), gradient

    @jax.custom_vjp
    def value(params):
        return forwards(params)[0]

    def backward(gradient, cotangent):
        return (jax.tree.map(lambda g: g * jnp.asarray(cotangent, g.real.dtype), gradient),)

    value.defvjp(forwards, backward)
    return lambda params, **_: value(params)
