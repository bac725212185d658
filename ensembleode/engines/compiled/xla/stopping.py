"""Reads the flag in memory that stops a solve, for loops that XLA compiles."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .call import call


# The operand makes no difference to the result; it makes XLA read the flag again in each turn.
_TEXT = """
define void @stopped(ptr noalias readonly %stop, ptr noalias readonly %turn, ptr noalias %out) {
  %address = load i64, ptr %stop, align 4
  %none = icmp eq i64 %address, 0
  %there = inttoptr i64 %address to ptr
  %flag = select i1 %none, ptr %stop, ptr %there
  %value = load volatile i8, ptr %flag
  %set = icmp ne i8 %value, 0
  %byte = zext i1 %set to i8
  store i8 %byte, ptr %out
  ret void
}
"""


def stopped(stop: Array, turn: Any) -> Array:
    """Whether the flag at this address, `TrajectoryNumbers.stop`, is set, for all trajectories that
    are mapped over; `turn` is a value that changes from turn to turn of the loop."""
    ask = jax.custom_batching.custom_vmap(_stopped)

    @ask.def_vmap
    def _(size, batched, stop, turn):
        return stopped(stop, turn[0] if batched[1] else turn), False

    return ask(stop, turn)


def _stopped(stop: Array, turn: Array) -> Array:
    (found,) = call(_TEXT, "stopped", [stop, turn], [jax.ShapeDtypeStruct((), jnp.bool)])
    return found
