"""Gillespie's direct method."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from .arithmetic import Mask, Number
from .base import ODESolver
from .stochastic import OneStepMap


class Direct(ODESolver):
    """Gillespie's direct method, which makes each reaction of a
    [`JumpProblem`][ensembleode.JumpProblem] at its time. It is exact: the states at saved times
    have the distribution of the chemical master equation.

    Source: Gillespie, "Exact stochastic simulation of coupled chemical reactions", J. Phys. Chem.
    81 (1977).
    """

    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False
    stages: ClassVar[int | None] = None
    engines: ClassVar[tuple[str, ...]] = ("compiled",)
    references: ClassVar[tuple[str, ...]] = ("gillespie1977",)

    @property
    def method(self) -> OneStepMap:
        """The method as engines use it."""
        return OneStepMap(1.0, 1)


def reacted(
    rates: Number, draw: Number, changes: Number, u: Number, h: Number, most: Number
) -> tuple[Number, Number]:
    """The state `u [component]` after all reactions of the time `h`, and how often numbers were
    drawn for them. The state is NaN where that would be more than `most` times, and where a
    propensity is negative or NaN.

    **Arguments:**

    - `rates(u)`: the propensities `[reaction]` in a state.
    - `draw(i)`: two numbers from 0 to 1, `[2]`, the draw number `i`.
    - `changes [reaction, component]`: what each reaction adds to the state.
    """

    def goes_on(carry: tuple) -> Mask:
        _, s, i = carry
        return (s < h) & (i < most)

    def one(carry: tuple) -> tuple:
        u, s, i = carry
        waiting, chosen = draw(i)
        # Waiting times have no memory, so that one that is cut by the end is drawn anew.
        each = rates(u)
        ends = jnp.cumsum(each)
        total = ends[-1]
        after = s - jnp.log(1.0 - waiting) / total
        reached = ends > chosen * total
        is_next = reached & ~jnp.concatenate([jnp.zeros(1, bool), reached[:-1]])
        change = jnp.sum(jnp.where(is_next[:, None], changes, jnp.zeros_like(changes)), axis=0)
        is_rate = jnp.min(each) >= 0
        happens = (after < h) & (total > 0) & is_rate
        u = jnp.where(happens, u + change, jnp.where(is_rate, u, jnp.nan))
        return u, jnp.where(happens, after, h), i + 1

    u, _, count = jax.lax.while_loop(goes_on, one, (u, jnp.zeros_like(h), jnp.int32(0)))
    return jnp.where(count < most, u, jnp.nan), count
