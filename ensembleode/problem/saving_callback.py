"""A callback that changes nothing: it saves a function of the state beside the states."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..tracing.field_errors import check_signature
from ..tracing.program import is_inexact


class SavingCallback(eqx.Module):
    """Saves the values of `fn(u, p, t)`: `sim.saved`.

    It makes no events in `sim.events`, and engines don't see it: `fn` is evaluated on saved states,
    for any ensemble algorithm and engine. A solve can have at most one. Its `p` is that of the
    trajectory, so no other callback may change `p`. `fn` is the same for all trajectories, which
    may differ by `p`.

    **Arguments:**

    - `fn`: `fn(u, p, t)`, which returns an array or a pytree of arrays.
    - `saveat`: the times, as in `solve`: an array of times, or a number, the spacing of times that
        include both ends. The states there are those of the method's dense output. All trajectories
        share these times, and need one time span for that. By default `fn` is evaluated at the
        times at which states are saved.

    **Raises:** `TypeError` for an `fn` that is no such function. `solve` checks `saveat`.

    >>> import ensembleode as eo
    >>> energy = eo.SavingCallback(lambda u, p, t: p * u[0] ** 2 / 2)
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), 2.0, callback=energy)
    >>> sol = eo.solve(prob, saveat=0.5)
    >>> sol.saved.t.tolist(), [f"{x:.3f}" for x in sol.saved.values]
    ([0.0, 0.5, 1.0], ['1.000', '0.135', '0.018'])
    """

    fn: Callable
    saveat: Any = None

    def __init__(self, fn: Callable, saveat: PyTree = None):
        if not callable(fn):
            raise TypeError(f"fn of SavingCallback must be a function (u, p, t), got {fn!r}.")
        check_signature(fn, "fn")
        self.fn, self.saveat = fn, saveat


class Saved(eqx.Module):
    """The values that a [`SavingCallback`][ensembleode.SavingCallback] saved.

    - `t`: the times, those of its `saveat`, `[row]`; or without that those of the solution, `[row]`
        or `[trajectory, row]`.
    - `values`: the values, in the structure that `fn` returned: leaves `[row, ...]` for a problem,
        `[trajectory, row, ...]` for an ensemble; NaN (integers: zero) where a trajectory had ended.
    - `has_own_times`: whether the times are those of the callback's `saveat`.
    """

    t: Any
    values: PyTree
    has_own_times: bool = eqx.field(static=True, default=False)


def saving_among(callbacks: Sequence) -> SavingCallback | None:
    """The `SavingCallback` among these callbacks; None where there is none.

    **Raises:** `ValueError` if there are several.
    """
    found = [x for x in callbacks if isinstance(x, SavingCallback)]
    if len(found) > 1:
        raise ValueError(
            f"callback has {len(found)} SavingCallbacks, and a solve has one: let its fn return a "
            "dictionary of what each does."
        )
    return found[0] if found else None


def check_saving_function(
    fn: Callable, values: Sequence, *, of_prob_func: bool, changes: tuple[int, ...]
) -> None:
    """**Raises:** `TypeError` and `ValueError` where the abstract values that `fn` returns can't be
    saved, where `prob_func` made the callback, and where other callbacks change numbers of `p`."""
    if not values:
        raise TypeError(
            "fn of SavingCallback must return an array or a pytree of arrays; it returned nothing. "
            "(Is a `return` missing?)"
        )
    if of_prob_func:
        raise ValueError(
            f"prob_func makes a SavingCallback with an fn of its own, {fn!r}; it is one for all "
            "trajectories: give it to ODEProblem or solve, and let fn read in p what differs."
        )
    if changes:
        raise ValueError(
            "callback has a SavingCallback beside one whose affect changes p, and fn is given the "
            "p that the trajectory began with: let the state have what changes, as a component "
            "whose derivative is zero."
        )


def values_at(
    fn: Callable,
    u: PyTree,
    t: Array,
    is_reached: Array,
    start: PyTree,
    p: PyTree,
) -> PyTree:
    """The values of `fn` in some rows of one trajectory, with leaves `[row, ...]`; NaN (integers:
    zero) in rows that were not reached. `start` is the initial state."""
    # In other rows, `fn` is evaluated at the last row that was reached. That value isn't used, but
    # zero times a derivative at NaN would be NaN.
    last = jnp.max(jnp.where(is_reached, jnp.arange(is_reached.size), 0))
    any_reached = jnp.any(is_reached)
    u = jax.tree.map(
        lambda x, x0: _where(is_reached, x, jnp.where(any_reached, x[last], x0)), u, start
    )
    t = jnp.where(is_reached, t, jnp.nan_to_num(t[last]))
    values = jax.vmap(lambda u, t: jax.tree.map(jnp.asarray, fn(u, p, t)))(u, t)
    return jax.tree.map(lambda x: _where(is_reached, x, jnp.nan if is_inexact(x) else 0), values)


def _where(is_reached: Array, x: Array, other: ArrayLike) -> Array:
    """`x [row, ...]` where the row was reached, else `other [...]`."""
    mask = is_reached.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(mask, x, jnp.broadcast_to(other, x.shape).astype(x.dtype))
