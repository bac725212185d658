"""Least squares: the Levenberg-Marquardt method, with sums over the items of Gauss-Newton
matrices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from .microbatch import free_bytes, SHARE
from .step import check_real, PaddedBatch, StepReport, TrainingState, UpdateStep


class LevenbergMarquardt(eqx.Module):
    """An optimiser for [`fit`][ensembleode.fit] where the loss is a sum of squares.

    With it, the loss function of `fit` returns residuals, and doesn't square them:
    `loss(params, batch, key) -> [item, ...]`, or, without data, `loss(params) -> [residual, ...]`.
    The loss of an item is the sum of the squares of its residuals. The residuals of an item may
    depend on its own row of the batch only.

    A step solves `(J^T J + damping D) change = -J^T r`, where `J` is the Jacobian of the residuals
    `r` of the batch, and `D` is the diagonal of `J^T J`, with a `floor`. If the loss of the batch
    gets larger, or isn't finite, the change is rejected, and the step tries others with more
    damping. If it rejects all, the parameters stay as they are. The damping of the next step
    depends on how well the linear model has foretold the loss.

    `J^T J` and `J^T r` are sums over the items, to which each device adds those of its own. Rows of
    `J` are computed some at a time, so that many items take no more memory than few. But a step
    takes the memory of several matrices `[parameter, parameter]`, and the time to factorise one:
    the method is for up to a few thousand parameters. As `J^T J` squares the condition of `J`,
    double precision finds more digits.

    **Arguments:**

    - `damping`: the damping of the first step.
    - `floor`: how often the mean of the diagonal is added to it. With 0 a step doesn't depend on
        the units of the parameters. With 1 a parameter that hardly matters doesn't go far: so
        networks don't get stuck.

    **Raises:** `ValueError` where `damping` is not positive and finite, or `floor` is negative or
    not finite.

    ??? cite "References"

        The method is that of D. W. Marquardt, "An algorithm for least-squares estimation of
        nonlinear parameters" (J. SIAM 11, 1963); how the damping changes is from K. Madsen,
        H. B. Nielsen and O. Tingleff, "Methods for Non-Linear Least Squares Problems" (2nd ed.,
        IMM, DTU, 2004), section 3.2.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> def rosenbrock(p):
    ...     return jnp.stack([10 * (p[1] - p[0] ** 2), 1 - p[0]])
    >>> how = eo.LevenbergMarquardt()
    >>> result = eo.fit(rosenbrock, jnp.array([-1.2, 1.0]), optimizer=how, maxiters=30)
    >>> [round(float(x), 4) for x in result.params]
    [1.0, 1.0]
    """

    damping: float = eqx.field(default=1e-3, static=True)
    floor: float = eqx.field(default=0.0, static=True)

    def __check_init__(self):
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"damping must be positive and finite, got {self.damping!r}.")
        if not 0 <= self.floor < float("inf"):
            raise ValueError(f"floor must be finite and not negative, got {self.floor!r}.")

    def init(self, params: PyTree) -> "Damping":
        """The state of the first step, for these `params`."""
        return Damping(jnp.asarray(self.damping, _dtype_of(params)))


class Damping(NamedTuple):
    """The state of the Levenberg-Marquardt method."""

    damping: Any


class _DampedStep(NamedTuple):
    """The parameters and the damping after `count` tries of a step."""

    params: PyTree
    damping: Any
    growth: Any  # of the damping, if the next try is rejected
    count: Any
    accepted: Any


_NAME = "LevenbergMarquardt"
# The most tries of a step; the damping grows by the factors 2, 4, 8, ... from one try to the next.
_TRIES = 8
# The most numbers of a Jacobian that a device holds at a time.
_ENTRIES = 2**22
# The number of matrices [parameter, parameter] that a step holds at a time: partial sums, J^T J,
# the same scaled, with damping, and factorised.
_MATRICES = 5


def check_params(params: PyTree, device: jax.Device) -> None:
    """**Raises:** `TypeError` for complex parameters, and `ValueError` where the memory has no room
    for the matrices."""
    if any(jnp.iscomplexobj(x) for x in jax.tree.leaves(params)):
        raise TypeError(
            f"with {_NAME}, params must be real: give the real and the imaginary parts apart."
        )
    count, free = _count(params), free_bytes(device)
    wanted = _MATRICES * count**2 * _dtype_of(params).itemsize
    if free is not None and wanted > SHARE * free:
        raise ValueError(
            f"optimizer={_NAME}() has matrices of the size [parameter, parameter], and params has "
            f"{count:,} numbers: that takes {wanted / 1e9:,.1f} GB of {free / 1e9:,.1f} GB that "
            "are free. Give a smaller model, or an optimizer of optax, such as optax.lbfgs()."
        )


@dataclasses.dataclass(frozen=True)
class LeastSquaresStep(UpdateStep):
    """A step by the Levenberg-Marquardt method: its loss function returns residuals."""

    def _step(
        self, state: TrainingState, batch: PaddedBatch | None, key: Array, number: Array
    ) -> tuple[TrainingState, Any, StepReport]:
        key = jax.random.fold_in(key, number)
        flat, unravel = ravel_pytree(state.params)
        sums = loss, gradient, matrix = self._normal_equations(state.params, batch, key)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in sums]))
        scale = _scale(jnp.diagonal(matrix), self.optimizer.floor)
        # (That of the sum of squares is 2 J^T r.)
        norm = 2 * jnp.linalg.norm(gradient)
        gradient, matrix = gradient / scale, matrix / jnp.outer(scale, scale)
        eps = jnp.finfo(matrix.dtype).eps

        def attempt(tried):
            damping = tried.damping
            damped = matrix + damping * jnp.eye(len(scale), dtype=matrix.dtype)
            # (The matrix is symmetric; to symmetrise it would take longer than to factorise it.)
            factor = jax.lax.linalg.cholesky(damped, symmetrize_input=False)
            change = -jax.scipy.linalg.cho_solve((factor, True), gradient)
            trial = flat + (change / scale).astype(flat.dtype)
            foretold = change @ (damping * change - gradient)
            gain = (loss - self._loss(unravel(trial), batch, key)) / foretold
            accepted = gain > 0  # (false for NaN)
            less = damping * jnp.maximum(1 / 3, 1 - (2 * gain - 1) ** 3)
            # A damping below eps is lost in rounding, and above 1 / eps the parameters don't
            # change.
            return _DampedStep(
                jnp.where(accepted, trial, flat),
                jnp.clip(jnp.where(accepted, less, tried.growth * damping), eps, 1 / eps),
                2 * tried.growth,
                tried.count + 1,
                accepted,
            )

        def goes_on(tried):
            return finite & ~tried.accepted & (tried.count < _TRIES)

        begin = _DampedStep(
            flat, state.optimizer.damping, jnp.full_like(loss, 2), 0, jnp.array(False)
        )
        found = jax.lax.while_loop(goes_on, attempt, begin)
        new = TrainingState(unravel(found.params), Damping(found.damping))
        report = StepReport(jnp.where(finite, loss, jnp.nan), norm, jnp.asarray(jnp.nan))
        return new, number + 1, report

    def losses(
        self,
        params: PyTree,
        model_state: PyTree,
        rows: PyTree,
        place: Any,
        key: Any,
    ) -> tuple[PyTree, PyTree]:
        return jnp.sum(self._residuals(params, rows, place, key) ** 2, axis=1), model_state

    def alone(self, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
        return jnp.sum(self._residuals_alone(params) ** 2), model_state

    def rows_at_a_time(self, params: PyTree, rows: PyTree, place: Any, key: Any) -> int:
        each = self._width(params, rows, place, key) * _count(params)
        size = max(1, _ENTRIES // max(1, each))
        return size if self.microbatch is None else min(size, self.microbatch)

    def _loss(self, params: PyTree, batch: PaddedBatch | None, key: Array) -> Array:
        dtype = _dtype_of(params)
        if batch is None:
            return self.alone(params, None)[0].astype(dtype)
        return self.mean_of_losses(params, None, batch, key, dtype)

    def _normal_equations(
        self, params: PyTree, batch: PaddedBatch | None, key: Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """The loss, `J^T r [parameter]` and `J^T J [parameter, parameter]`."""
        dtype = _dtype_of(params)
        if batch is None:
            count = jax.eval_shape(self._residuals_alone, params).size
            r, j = _linearised(self._residuals_alone, params, _is_tall(count, params))
            return _products(r.astype(dtype), j.astype(dtype))

        def part(params, model_state, rows, place, count, key):
            def masked(x):
                inside = jnp.expand_dims(place < count, range(1, x.ndim))
                return jnp.where(inside, x.astype(dtype), jnp.zeros((), dtype))

            r, j = map(masked, self._linearised_rows(params, rows, place, key))
            return _products(r.ravel(), j.reshape(r.size, j.shape[-1])), model_state

        zeros = tuple(jnp.zeros((_count(params),) * n, dtype) for n in range(3))
        return self.mean(part, zeros, params, None, batch, key)[0]

    def _linearised_rows(
        self, params: PyTree, rows: PyTree, place: Array, key: Array
    ) -> tuple[PyTree, PyTree]:
        """The residuals `[row, residual]`, and their Jacobian `[row, residual, parameter]`."""
        if _is_tall(self._width(params, rows, place, key), params):
            return _linearised(lambda p: self._residuals(p, rows, place, key), params, True)

        def of_row(row, place):
            one = jax.tree.map(lambda x: x[None], (row, place))
            return _linearised(lambda p: self._residuals(p, *one, key)[0], params, False)

        return jax.vmap(of_row)(rows, place)

    def _width(self, params: PyTree, rows: PyTree, place: Array, key: Array) -> int:
        """The number of residuals of a row."""
        return jax.eval_shape(self._residuals, params, rows, place, key).shape[1]

    def _residuals(self, params: PyTree, rows: PyTree, place: Array, key: Array) -> PyTree:
        """`[row, residual]`"""
        n, (residuals, _) = place.shape[0], self.returned(params, None, rows, place, key)
        if not eqx.is_array(residuals) or residuals.shape[:1] != (n,):
            raise TypeError(
                f"with {_NAME}, the loss must return the residuals of each item, an array of the "
                f"shape ({n},) or ({n}, ...) for the {n} items that it was given; it returned "
                f"{_said(residuals)}."
            )
        check_real(residuals)
        return residuals.reshape(n, -1)

    def _residuals_alone(self, params: PyTree) -> PyTree:
        """`[residual]`"""
        residuals, _ = self.loss(eqx.combine(params, self.static), None)
        if not eqx.is_array(residuals) or not residuals.shape:
            raise TypeError(
                f"with {_NAME}, the loss must return residuals, an array of them, and not the sum "
                f"of their squares; it returned {_said(residuals)}."
            )
        check_real(residuals)
        return residuals.ravel()


def _linearised(residuals: Callable, params: PyTree, forward: bool) -> tuple[PyTree, PyTree]:
    """The residuals `[...]`, and their Jacobian `[..., parameter]`."""
    flat, unravel = ravel_pytree(params)

    def twice(flat):
        values = residuals(unravel(flat))
        return values, values

    derivative = jax.jacfwd if forward else jax.jacrev
    jacobian, values = derivative(twice, has_aux=True)(flat)
    return values, jacobian


def _is_tall(residuals: int, params: PyTree) -> bool:
    """Whether forward mode takes less time than reverse mode: a column of `J` in forward mode takes
    about half as long as a row in reverse mode."""
    return _count(params) <= 2 * residuals


def _products(r: Array, j: Array) -> tuple[PyTree, PyTree, PyTree]:
    product = functools.partial(jnp.matmul, precision="highest")
    return product(r, r), product(r, j), product(j.T, j)


def _scale(squares: Array, floor: float) -> Array:
    """The roots of `D`, for the squares of the norms of the columns of `J`; none is zero."""
    squares = squares + floor * jnp.mean(squares)
    return jnp.sqrt(jnp.where(squares > 0, squares, jnp.ones_like(squares)))


def _count(params: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


def _dtype_of(params: PyTree) -> PyTree:
    """The dtype of the matrices. It has 32 bits at least, as LAPACK factorises no shorter ones."""
    return np.result_type(np.float32, *(x.dtype for x in jax.tree.leaves(params)))


def _said(x: Any) -> str:
    return f"the shape {x.shape}" if eqx.is_array(x) else repr(x)
