"""Checks whether the columns of a matrix-valued ODE are independent of each other."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from ..ground.state_tree import refuse_tree
from ..problem.problem import ODEProblem


class ColumnReport(eqx.Module):
    """The result of [`check_columns`][ensembleode.check_columns]; true when the columns are
    independent.

    - `coupled`: None, or a pair `(i, j)`: column j of `f` depends on column i of `u`.
    - `leak`: the strength of the coupling: the largest derivative across columns that was found,
        relative to the largest one within columns.
    - `states`: the number of states that were probed.
    """

    coupled: tuple[int, int] | None
    leak: float
    states: int

    def __bool__(self) -> bool:
        return self.coupled is None

    def __repr__(self) -> str:
        if self.coupled is None:
            return f"columns are independent (at {self.states} states)"
        i, j = self.coupled
        return (
            f"columns are coupled: f(u)[..., {j}] depends on u[..., {i}] "
            f"(derivative {self.leak:.1e} of the largest)"
        )


def check_columns(
    prob: ODEProblem, *, states: int = 3, key: PRNGKeyArray | None = None
) -> ColumnReport:
    """Check that the columns of a matrix-valued problem do not influence each other.

    A matrix `u0` batches trajectories within one ODE only if `f` treats its columns (the last axis)
    independently. To check this, groups of columns are perturbed in random directions, by
    Jacobian-vector products at the initial state and at random states. A column outside of the
    group that responds is coupled. Groups by the binary digits of the column number separate every
    pair of columns, so the cost is about `2 log2(columns)` products for each state.

    **Arguments:**

    - `prob`: a problem whose `u0` has at least two axes; the last one is that of the columns.
    - `states`: the number of random states and times to probe, besides the initial ones.
    - `key`: a JAX PRNG key for these.

    **Returns:** a [`ColumnReport`][ensembleode.ColumnReport], true when no coupling was found.
    Couplings that show in no derivative at these states (behind a `jnp.where`, for example) are not
    found.

    **Raises:** `ValueError` when `u0` has no columns, or `f` is not finite at the initial state.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> u0 = jnp.ones((2, 4))
    >>> bool(eo.check_columns(eo.ODEProblem(lambda u, p, t: -u, u0, (0.0, 1.0))))
    True
    >>> bool(eo.check_columns(eo.ODEProblem(lambda u, p, t: -u / u.sum(), u0, (0.0, 1.0))))
    False
    """
    refuse_tree(prob.u0, "check_columns")
    if prob.u0.ndim < 2:
        raise ValueError(
            f"u0 must be a matrix whose columns are trajectories, got the shape {prob.u0.shape}."
        )
    columns = prob.u0.shape[-1]
    key = jax.random.key(0) if key is None else key
    probed = 0

    @jax.jit
    def strength(mask, u, t, v):
        """How strongly each column of f responds to a change of the masked columns."""
        direction = v * jnp.broadcast_to(mask, v.shape)
        du, tangent = jax.jvp(lambda u: prob.f(u, prob.p, t), (u,), (direction,))
        tangent = jnp.where(jnp.isfinite(du), tangent, jnp.nan)
        return jnp.max(jnp.abs(tangent), axis=tuple(range(tangent.ndim - 1)))

    for number in range(states + 1):
        u, t, v = _probe(prob, number, key)
        response = functools.partial(strength, u=u, t=t, v=v)
        full = np.asarray(response(jnp.ones(columns, v.dtype)))
        if not np.isfinite(full).all():
            if number == 0:
                raise ValueError("f, or its derivative, is not finite at the initial state.")
            continue
        probed += 1
        threshold = 100 * float(jnp.finfo(v.dtype).eps) * max(full.max(), 1e-30)
        for mask in _groups(columns):
            leak = np.where(mask, 0.0, np.asarray(response(jnp.asarray(mask, v.dtype))))
            target = int(leak.argmax())
            if leak[target] > threshold:
                source = _bisect(response, np.flatnonzero(mask), target, columns, v.dtype)
                relative = leak[target] / max(full.max(), leak[target])
                return ColumnReport((source, target), float(relative), probed)
    return ColumnReport(None, 0.0, probed)


def _probe(prob: ODEProblem, number: int, key: PRNGKeyArray):
    """A state, a time and a direction: the initial ones first, then random ones."""
    state_key, time_key, direction_key = jax.random.split(jax.random.fold_in(key, number), 3)
    u0 = prob.u0
    t0, t1 = (jnp.asarray(t, jnp.finfo(u0.dtype).dtype) for t in prob.tspan)
    v = jax.random.normal(direction_key, u0.shape, u0.dtype)
    if number == 0:
        return u0, t0, v
    spread = 1 + jnp.max(jnp.abs(u0))
    u = u0 + spread * jax.random.normal(state_key, u0.shape, u0.dtype)
    return u, t0 + (t1 - t0) * jax.random.uniform(time_key, (), t0.dtype), v


def _groups(columns: int):
    number = np.arange(columns)
    for bit in range((columns - 1).bit_length()):
        ones = (number >> bit) & 1 == 1
        yield ones
        yield ~ones


def _bisect(response, sources, target, columns, dtype) -> int:
    """The one of `sources` to which the column `target` responds most."""
    while len(sources) > 1:
        halves = np.array_split(sources, 2)
        masks = [jnp.zeros(columns, dtype).at[half].set(1) for half in halves]
        strengths = [float(response(mask)[target]) for mask in masks]
        sources = halves[int(np.argmax(strengths))]
    return int(sources[0])
