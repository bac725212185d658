"""Stochastic problems by the methods of diffrax: the drift and the diffusion as its terms, with a
Brownian tree whose key is that of the trajectory."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
from jaxtyping import PyTree

from ...plan.noise import NoiseTerms
from ...plan.plan import Plan
from ...plan.trajectory_numbers import TrajectoryNumbers


# The part of a fixed step, or of the time span, below which the path is interpolated.
_OF_STEP, _OF_SPAN = 0.25, 2.0**-16


def stochastic_terms(plan: Plan, lane: TrajectoryNumbers, drift: Any) -> diffrax.MultiTerm:
    """The terms of a stochastic problem for the method of a plan; `drift` is its field."""
    noise, solver = plan.noise, plan.method.value.solver
    assert noise is not None
    numbers = noise.numbers(lane.consts)
    key = jax.random.wrap_key_data(numbers.key, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, numbers.index), numbers.repeat)
    levy = _levy_area(getattr(solver, "minimal_levy_area", diffrax.BrownianIncrement))
    dtype = plan.state.dtype
    t0, t1 = (jax.lax.stop_gradient(jnp.asarray(t, dtype)) for t in (lane.t0, lane.t1))
    tol = _OF_SPAN * (t1 - t0) if lane.dt is None else _OF_STEP * jnp.asarray(lane.dt, dtype)
    shape = jax.ShapeDtypeStruct(noise.shape, dtype)
    path = diffrax.VirtualBrownianTree(t0, t1, tol, shape, key, levy)
    factor = numbers.given.get("factor")
    diffusion = _Diffusion(noise, plan.state.shape, len(lane.consts), factor)
    return diffrax.MultiTerm(diffrax.ODETerm(drift), diffrax.ControlTerm(diffusion, path))


def _levy_area(least: Any) -> Any:
    """What the tree draws, for a method that needs at least this."""
    if issubclass(least, diffrax.AbstractSpaceTimeTimeLevyArea):
        return diffrax.SpaceTimeTimeLevyArea
    if issubclass(least, diffrax.AbstractSpaceTimeLevyArea):
        return diffrax.SpaceTimeLevyArea
    return diffrax.BrownianIncrement


class _Diffusion(eqx.Module):
    """The diffusion, as what diffrax multiplies the noise by."""

    noise: NoiseTerms = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True)
    n_consts: int = eqx.field(static=True)
    factor: Any

    def __call__(self, t: Any, u: PyTree, args: PyTree) -> PyTree:
        noise, n = self.noise, self.n_consts
        g = noise.rows(noise.diffusion(args[:n], u, args[n:], t))
        if noise.kind == "scalar":
            return g
        if noise.kind == "general":
            return g if self.factor is None else jnp.matmul(g, self.factor.astype(g.dtype))
        if self.factor is not None:
            matrix = g.reshape(-1, 1) * self.factor.astype(g.dtype)
            return matrix.reshape(*self.shape, *self.shape)
        if not self.shape:
            return g
        if len(self.shape) == 1:
            return lineax.DiagonalLinearOperator(g)
        return jnp.diag(g.reshape(-1)).reshape(*self.shape, *self.shape)
