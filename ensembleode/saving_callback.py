"""A callback that changes nothing: it saves a function of the state beside the states."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .tracing.field_errors import check_signature


class SavingCallback(eqx.Module):
    """Saves the values of `fn(u, p, t)` at the times at which states are saved: `sim.saved`.

    It makes no events in `sim.events`, and engines don't see it: `fn` is evaluated on the rows of
    the solution, for any ensemble algorithm and engine. A solve can have at most one. Its `p` is
    that of the trajectory, so no other callback may change `p`. `fn` is the same for all
    trajectories, which may differ by `p`.

    **Arguments:** `fn`: `fn(u, p, t)`, which returns an array or a pytree of arrays.

    **Raises:** `TypeError` for anything else.

    >>> import ensembleode as eo
    >>> energy = eo.SavingCallback(lambda u, p, t: p * u[0] ** 2 / 2)
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), 2.0, callback=energy)
    >>> sol = eo.solve(prob, saveat=0.5)
    >>> sol.saved.t.tolist(), [f"{x:.3f}" for x in sol.saved.values]
    ([0.0, 0.5, 1.0], ['1.000', '0.135', '0.018'])
    """

    fn: Callable

    def __init__(self, fn: Callable):
        if not callable(fn):
            raise TypeError(f"fn of SavingCallback must be a function (u, p, t), got {fn!r}.")
        check_signature(fn, "fn")
        self.fn = fn


class Saved(eqx.Module):
    """The values that a [`SavingCallback`][ensembleode.SavingCallback] saved, with the same rows as
    the states.

    - `t`: the times, which are those of the solution, `[row]` or `[trajectory, row]`.
    - `values`: the values, in the structure that `fn` returned: leaves `[row, ...]` for a problem,
        `[trajectory, row, ...]` for an ensemble; NaN (integers: zero) where a trajectory had ended.
    """

    t: Any
    values: PyTree


def saving_function(callbacks: Sequence[Any]) -> Callable | None:
    """The `fn` of the `SavingCallback` among these callbacks; None where there is none.

    **Raises:** `ValueError` if there are several.
    """
    found = [x.fn for x in callbacks if isinstance(x, SavingCallback)]
    if len(found) > 1:
        raise ValueError(
            f"callback has {len(found)} SavingCallbacks, and a solve has one: let its fn return a "
            "dictionary of what each does."
        )
    return found[0] if found else None


def check_saving_function(
    fn: Callable, values: Sequence[Any], *, of_prob_func: bool, changes: tuple[int, ...]
) -> None:
    """Check that the values of `fn` can be saved.

    **Arguments:** `values`: the abstract values that `fn` returns; `of_prob_func`: whether
    `prob_func` made the callback; `changes`: the indices of the numbers of `p` that other callbacks
    change.

    **Raises:** `TypeError` and `ValueError`, which say what to do instead.
    """
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


def refuse_with_saving(*, output_func: bool, reduction: bool, store: bool) -> None:
    """**Raises:** `ValueError` for options that leave no rows in memory on which a `SavingCallback`
    could be evaluated."""
    for name, is_given in {
        "an output_func": output_func,
        "a reduction": reduction,
        "a store": store,
    }.items():
        if is_given:
            remedy = "apply fn to the arrays of open_ensemble, sim.u and sim.t"
            if not store:
                remedy = "let output_func return jax.vmap(lambda u, t: fn(u, p, t))(sol.u, sol.t)"
            raise ValueError(
                f"callback has a SavingCallback, which saves beside the states, and with {name} "
                f"these are not what is returned: {remedy}."
            )


def saved(fn: Callable, known: Any, u: Any, t: Any, lengths: Any, *, several: bool) -> Saved:
    """The values of `fn` on the rows of a solution.

    **Arguments:**

    - `known`: the initial states and parameters (`core.given.Known`).
    - `u`, `t`, `lengths`: as in a solution; for several trajectories with a leading axis of these,
        which `t` has only where trajectories don't share it.
    """

    def of_one(u: Any, t: Any, length: Any, start: Any, own: Any) -> Any:
        p = eqx.combine(own, shared)
        is_reached = jnp.arange(t.shape[0], dtype=length.dtype) < length
        # Where a trajectory had ended, `fn` is evaluated at the last row that was reached. That
        # value isn't used, but zero times a derivative at NaN would be NaN.
        last = jnp.maximum(length - 1, 0)
        u = jax.tree.map(
            lambda x, x0: _where(is_reached, x, jnp.where(length > 0, x[last], x0)), u, start
        )
        t = jnp.where(is_reached, t, jnp.nan_to_num(t[last]))
        values = jax.vmap(lambda u, t: jax.tree.map(jnp.asarray, fn(u, p, t)))(u, t)
        return jax.tree.map(lambda x: _where(is_reached, x, _nothing(x.dtype)), values)

    varying, lengths = known.varying()["p"], jnp.asarray(lengths)
    shared = _as_arrays(known.parameters, known.own_parameters)
    if several:
        axes = (0, 0 if jnp.ndim(t) == 2 else None, 0, 0, 0)
        values = jax.vmap(of_one, in_axes=axes)(u, t, lengths, known.u0, varying)
    else:
        own = jax.tree.map(lambda x: jnp.asarray(x)[known.index], varying)
        values = of_one(u, t, lengths, known.u0, own)
    return Saved(t, values)


def _as_arrays(parameters: Any, own: Any) -> Any:
    """The parameters, with numbers that all trajectories share as arrays; leaves that are no
    numbers have None in `own`."""

    def one(own: Any, x: Any) -> Any:
        return x if own is None else None if own else jnp.asarray(x)

    return jtu.tree_map(one, own, parameters, is_leaf=lambda own: own is None)


def _where(is_reached: Any, x: Any, other: Any) -> Any:
    """`x [row, ...]` where the row was reached, else `other [...]`."""
    mask = is_reached.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(mask, x, jnp.broadcast_to(other, x.shape).astype(x.dtype))


def _nothing(dtype: Any) -> Any:
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0
