"""One step of a fit: the mean loss of a batch, its gradient, and the update by the optimiser."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.extend.core import Jaxpr
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..tracing.evaluation import equations
from .parallel import Placement


class PaddedBatch(NamedTuple):
    """Rows of a batch, of which the first `count` are items, and the place of each among all
    rows."""

    rows: Any
    place: Any
    count: Any


class TrainingState(NamedTuple):
    """The variables that a step changes; the model's state is None where it has none."""

    params: PyTree
    optimizer: Any
    model_state: PyTree = None


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

    # `loss(params, model_state)` without data, else `loss(params, model_state, batch, keys)`, which
    # returns the losses and the next state of the model.
    loss: Callable
    static: Any  # the part of the parameters that isn't trained
    optimizer: Any
    placement: Placement
    has_data: bool
    repeats: bool  # whether all steps have the same loss, so that a line search's values stay valid
    microbatch: int | None = None  # how many rows a device computes with at a time; None for all
    dtype: DTypeLike | None = None  # the dtype of the loss

    @functools.cached_property
    def compiled(self) -> Any:
        return jax.jit(self._step)

    @functools.cached_property
    def mean_loss(self) -> Any:
        """`mean_loss(params, model_state, batch, key)`: the mean loss of the items of a batch, by
        the model as it is used when it is trained no more."""
        used = dataclasses.replace(self, static=eqx.nn.inference_mode(self.static))
        return jax.jit(functools.partial(used.mean_of_losses, dtype=self.dtype))

    def mean_of_losses(
        self,
        params: PyTree,
        model_state: PyTree,
        batch: PaddedBatch,
        key: Array,
        dtype: DTypeLike | None,
    ) -> Array:
        """The mean loss of the items of a batch, added up in this dtype."""
        zero = jnp.zeros((), dtype)
        return self.mean(self.summed_losses, zero, params, model_state, batch, key)[0]

    def _step(
        self, state: TrainingState, batch: PaddedBatch | None, key: Array, number: Array
    ) -> tuple[TrainingState, Any, StepReport]:
        key = jax.random.fold_in(key, number)

        def found(params):
            return self.value_and_gradient(params, state.model_state, batch, key)

        value, gradient, model_state = self._compiled_for(state, found)
        updates, optimizer = self.optimizer.update(
            jax.tree.map(jnp.conj, gradient),
            state.optimizer,
            state.params,
            value=value,
            grad=gradient,
            value_fn=_with_gradient(lambda params: found(params)[:2]),
        )
        finite = jnp.isfinite(value) & jnp.all(
            jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(gradient)])
        )
        new = TrainingState(optax.apply_updates(state.params, updates), optimizer)
        # Dtypes stay the same, whatever the optimiser mixes in, so that a step compiles only once.
        before = state._replace(model_state=None)
        new = jax.tree.map(lambda old, x: jnp.asarray(x, jnp.result_type(old)), before, new)
        loss = jnp.where(finite, value, jnp.nan)
        report = StepReport(loss, optax.tree.norm(gradient), learning_rate_in(optimizer))
        return new._replace(model_state=model_state), number + 1, report

    def _compiled_for(self, state: TrainingState, both: Callable) -> tuple[PyTree, PyTree, PyTree]:
        found = [optax.tree.get_all_with_path(state.optimizer, x) for x in ("value", "grad")]
        value, gradient = (x[0][1] if len(x) == 1 else None for x in found)
        if not self.repeats or value is None or gradient is None:  # (which needn't be there)
            return both(state.params)
        known = value.astype(self.dtype), gradient, state.model_state
        return jax.lax.cond(jnp.isfinite(known[0]), lambda _: known, both, state.params)

    def value_and_gradient(
        self, params: PyTree, model_state: PyTree, batch: PaddedBatch | None, key: Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """The mean over the items and its gradient, however the items are split; and the next state
        of the model."""
        if not self.has_data:
            of_params = jax.value_and_grad(self.alone, has_aux=True)
            (value, model_state), gradient = of_params(params, model_state)
            return value, gradient, model_state
        assert batch is not None

        def part(*args):
            of_params = jax.value_and_grad(self.summed_losses, has_aux=True)
            (value, model_state), gradient = of_params(*args)
            return (value, gradient), model_state

        zeros = jnp.zeros((), self.dtype), jax.tree.map(jnp.zeros_like, params)
        both, model_state = self.mean(part, zeros, params, model_state, batch, key)
        return *both, model_state

    def alone(self, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
        """The loss without data, and the next state of the model."""
        return self.loss(eqx.combine(params, self.static), model_state)

    def mean(
        self,
        part: Callable,
        zeros: PyTree,
        params: PyTree,
        model_state: PyTree,
        batch: PaddedBatch,
        key: Array,
    ) -> tuple[PyTree, PyTree]:
        """The mean over the items, and the next state of the model. `part(params, model_state,
        rows, place, count, key)` returns the sums over the items among some rows, in the structure
        of `zeros`, and the next state."""

        def sums(shared, split):
            params, model_state, count, key = shared
            size = self.rows_at_a_time(params, *split, key)

            def of_rows(split, model_state):
                return part(params, model_state, *split, count, key)

            return _in_parts(of_rows, zeros, model_state, split, size)

        shared = params, model_state, batch.count, key
        sums, model_state = self.placement.summed(sums)(shared, (batch.rows, batch.place))
        means = jax.tree.map(lambda x: x / batch.count.astype(x.real.dtype), sums)
        return means, model_state

    def rows_at_a_time(self, params: PyTree, rows: PyTree, place: Array, key: Array) -> int | None:
        """How many of these rows a device computes with at a time; None for all."""
        return self.microbatch

    def summed_losses(
        self,
        params: PyTree,
        model_state: PyTree,
        rows: PyTree,
        place: Array,
        count: Array,
        key: Array,
    ) -> tuple[PyTree, PyTree]:
        """The sum of the losses of the items among these rows, and the next state of the model."""
        losses, model_state = self.losses(params, model_state, rows, place, key)
        sum_ = jnp.sum(jnp.where(place < count, losses, jnp.zeros((), losses.dtype)))
        return sum_, model_state

    def losses(
        self,
        params: PyTree,
        model_state: PyTree,
        rows: PyTree,
        place: Array,
        key: Array,
    ) -> tuple[PyTree, PyTree]:
        """The loss of each row, and the next state of the model."""
        losses, model_state = self.returned(params, model_state, rows, place, key)
        _check_losses(losses, place.shape[0])
        return losses, model_state

    def returned(
        self,
        params: PyTree,
        model_state: PyTree,
        rows: PyTree,
        place: Array,
        key: Array,
    ) -> tuple[PyTree, PyTree]:
        """What the loss function returns for these rows, and the next state of the model."""
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(place)
        return self.loss(eqx.combine(params, self.static), model_state, rows, keys)


def learning_rate_in(optimizer: Any) -> Array:
    """The learning rate in the state of an optimiser; NaN where there is none, or are several."""
    found = [x for _, x in optax.tree.get_all_with_path(optimizer, "learning_rate")]
    # (That of a schedule may be there, too.)
    rates = [x for x in found if isinstance(x, jax.Array) and not x.shape]
    return jnp.asarray(rates[0], float) if len(rates) == 1 else jnp.asarray(jnp.nan)


def _in_parts(
    part: Callable,
    zeros: PyTree,
    model_state: PyTree,
    split: tuple[PyTree, PyTree],
    size: int | None,
) -> tuple[PyTree, PyTree]:
    """The sum of `part` over pieces of the rows and their places, of `size` rows each. The state of
    the model goes from piece to piece."""

    def add(before, split):
        total, model_state = before
        sums, model_state = part(split, model_state)
        return (jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, sums), model_state), None

    begin, n = (zeros, model_state), split[1].shape[0]
    if size is None or size >= n:
        return add(begin, split)[0]
    if jax.tree.leaves(model_state):  # which sees items only: the last piece may have fewer
        whole = n - n % size
        found = jax.lax.scan(add, begin, _pieces(_sliced(split, 0, whole), size))[0]
        return found if whole == n else add(found, _sliced(split, whole, n))[0]
    missing = -n % size
    rows = jax.tree.map(lambda x: _extended(x, missing), split[0])
    # (Padding rows get places after the last item.)
    place = jnp.concatenate([split[1], jnp.full(missing, jnp.iinfo(split[1].dtype).max)])
    return jax.lax.scan(add, begin, _pieces((rows, place), size))[0]


def _pieces(split: PyTree, size: int) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), split)


def _sliced(split: PyTree, begin: int, end: int) -> PyTree:
    return jax.tree.map(lambda x: x[begin:end], split)


def checked(loss: Callable, has_data: bool, has_state: bool = False) -> tuple[Callable, bool]:
    """The loss as an `UpdateStep` has it; and whether it takes keys."""
    parameters = inspect.signature(loss).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(x.kind in positional and x.default is x.empty for x in parameters)
    names = ["params", *["state"] * has_state, *["batch"] * has_data]
    takes_key = has_data and count == len(names) + 1
    if not takes_key and count != len(names):
        takes = f"it takes {count} required positional parameters."
        ways, with_state = ", ".join(names), " and state=" if has_state else ""
        raise TypeError(
            f"with data{with_state}, the loss must take ({ways}, key), or ({ways}); {takes}"
            if has_data
            else f"without data{with_state}, the loss must take ({ways}); {takes} Give the data "
            "with fit(loss, params, data)."
        )

    def of_state(params, model_state, *of_batch):
        of_batch = of_batch[: has_data + takes_key]
        if not has_state:
            return loss(params, *of_batch), model_state
        # (A copy, as an `equinox.nn.State` can be used only once.)
        returned = loss(params, jax.tree.map(lambda x: x, model_state), *of_batch)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                "with state=, the loss must return (loss, state), the losses and the next state of "
                f"the model; it returned {returned!r}."
            )
        return returned[0], _like(model_state, returned[1])

    return of_state, takes_key


def _like(before: Any, after: Any) -> Any:
    """The next state of a model, in the dtypes of that before."""
    then, now = jax.tree.structure(before), jax.tree.structure(after)
    arrays = [jnp.asarray(x) for x in jax.tree.leaves(after)]
    kept = then == now and all(
        x.shape == y.shape and (x.dtype == y.dtype or np.can_cast(y.dtype, x.dtype, "same_kind"))
        for x, y in zip(jax.tree.leaves(before), arrays, strict=True)
    )
    if not kept:
        was, is_now = (eqx.tree_pformat(x, struct_as_array=True) for x in (before, after))
        raise TypeError(
            "the loss must return a state like the one that it was given, with arrays of the same "
            f"shapes and dtypes, {was}; it returned {is_now}."
        )
    leaves = zip(jax.tree.leaves(before), arrays, strict=True)
    same = [y if x.dtype == y.dtype else y.astype(x.dtype) for x, y in leaves]
    return jax.tree.unflatten(then, same)


def traced(
    step: UpdateStep, state: TrainingState, batch: PaddedBatch | None, key: Array
) -> tuple[PyTree, PyTree]:
    """The dtype of the loss, and the mesh of devices on which it is computed, if the loss itself
    solves on several devices; else None."""
    given = state.params, state.model_state
    if batch is not None:
        of_rows = jax.make_jaxpr(step.losses, return_shape=True)
        jaxpr, (value, _) = of_rows(*given, batch.rows, batch.place, key)
        return value.dtype, mesh_of(jaxpr.jaxpr)
    jaxpr, (value, _) = jax.make_jaxpr(step.alone, return_shape=True)(*given)
    if not (eqx.is_array_like(value) or isinstance(value, jax.ShapeDtypeStruct)) or value.shape:
        raise TypeError(f"without data, the loss must return one number; it returned {value}.")
    check_real(value)
    return value.dtype, mesh_of(jaxpr.jaxpr)


def mesh_of(jaxpr: Jaxpr) -> Mesh | None:
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


def _extended(x: Array, missing: int) -> Array:
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
