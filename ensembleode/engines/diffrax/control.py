"""Our step-size controllers and norms within diffrax, which integrates forwards in time always."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ...solvers.arithmetic import ArrayArithmetic, Components
from ...solvers.controllers import AbstractController
from ...solvers.norms import AbstractNorm, RMSNorm
from ...solvers.step_size import initial_step, scaled, Tolerances
from ...solvers.time import StepBounds, underflows


class _Arithmetic(ArrayArithmetic):
    """The arrays of one trajectory as an [`Arithmetic`][ensembleode.solvers.arithmetic.Arithmetic]:
    a state is a tuple of arrays, and its numbers are `[]`."""

    def bitcast(self, x: Any, dtype: Any) -> Any:
        return jax.lax.bitcast_convert_type(x, dtype)

    def stopped(self, x: Any) -> Any:
        return jax.lax.stop_gradient(x)

    def mean(self, components: Components) -> Any:
        return self.total(components) / sum(x.size for x in components)

    def total(self, components: Components) -> Any:
        return super().total(tuple(map(jnp.sum, components)))

    def largest(self, components: Components) -> Any:
        return super().largest(tuple(map(jnp.max, components)))


ARRAYS: Any = _Arithmetic(jnp)


def norm_of_tree(norm: AbstractNorm) -> Callable[[Any], Any]:
    """The norm of a pytree, as diffrax has it."""
    return lambda tree: norm(ARRAYS, _sizes(tuple(jtu.tree_leaves(tree))))


def _sizes(components: Components) -> Components:
    """Without the arguments of complex numbers, which norms know nothing of."""
    return tuple(jnp.abs(x) if jnp.iscomplexobj(x) else x for x in components)


class OwnController(diffrax.AbstractAdaptiveStepSizeController):
    """A controller of ours.

    - `order`: of the method, for the first step.
    - `rtol`, `atol`, `norm`: as implicit methods of diffrax look for them.
    """

    controller: AbstractController = eqx.field(static=True)
    own_norm: AbstractNorm = eqx.field(static=True)
    order: int = eqx.field(static=True)
    rtol: Any
    atol: Any
    norm: Callable
    bounds: StepBounds

    @classmethod
    def of(
        cls,
        controller: AbstractController,
        norm: AbstractNorm | None,
        order: int,
        tol: Tolerances,
        bounds: StepBounds,
    ) -> "OwnController":
        norm = norm or RMSNorm()
        return cls(
            rtol=tol.reltol,
            atol=tol.abstol,
            norm=norm_of_tree(norm),
            controller=controller,
            own_norm=norm,
            order=order,
            bounds=bounds,
        )

    def wrap(self, direction):
        del direction  # (sizes are positive)
        return self

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        del error_order
        h, span = dt0, jnp.asarray(t1 - t0)
        if h is None:

            def field(y, t):
                return (sum(jtu.tree_leaves(func(terms, t, *y, args))),)

            def norm(xp, values):
                return self.own_norm(xp, _sizes(values))

            h = initial_step(
                ARRAYS, norm, _power_of_ten, field, t0, (y0,), field((y0,), t0), span, self._tol,
                self.order, self.bounds.dtmax,
            )  # fmt: skip
        h = self.bounds.first(ARRAYS, jax.lax.stop_gradient(jnp.abs(h)), t0, span)
        h = h.astype(span.dtype)
        memory = tuple(jnp.asarray(np.float32(x)) for x in self.controller.initial_memory())
        return t0 + h, (memory, jnp.array(True), t1, span)

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        del args, error_order
        memory, is_first, end, span = controller_state
        at = jax.lax.stop_gradient(((y_error,), (y0,), (y1_candidate,)))
        squared = self.own_norm.squared(ARRAYS, _sizes(scaled(ARRAYS, self._tol, *at)))
        accepted = self.controller.accepts(ARRAYS, squared, memory)
        size = jax.lax.stop_gradient(t1 - t0)
        next_h, memory = self.controller.next_step(
            ARRAYS, size, squared, memory, accepted, is_first
        )
        next_t0 = jnp.where(accepted, t1, t0)
        short = underflows(ARRAYS, self.bounds, next_h, next_t0, end, span, accepted)
        short = short & (next_t0 < end)
        result = diffrax.RESULTS.where(
            short, diffrax.RESULTS.dt_min_reached, diffrax.RESULTS.successful
        )
        next_t1 = next_t0 + self.bounds.bounded(ARRAYS, next_h)
        state = (memory, is_first & ~accepted, end, span)
        return accepted, next_t0, next_t1, jnp.array(False), state, result

    @property
    def _tol(self) -> Tolerances:
        return Tolerances(self.atol, self.rtol)


def _power_of_ten(x: Any, order: int) -> Any:
    return 10.0 ** (-(2.0 + jnp.log10(x)) / order)
