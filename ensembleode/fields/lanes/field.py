"""A vector field for a chunk of lanes: the work that is done once, and the work of each stage."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...tracing.program import Program
from . import control_flow as control_flow, indexing as indexing, primitives as primitives
from .interpreter import Interpreter, TooLong
from .values import fill, from_array, pack, Scalars, spread, Stacked, unpack


# A larger state is kept as one array; so is a state whose field takes too many operations.
LARGEST_SCALARISED_STATE = 24
MOST_OPERATIONS = 300


class LaneField:
    """The vector field of one trajectory, evaluated for a chunk of lanes at once.

    Values that differ between lanes have the lane as their last axis.

    **Arguments:**

    - `program`: `field(consts, u, p, t) -> du` of one trajectory, with `consts` and `p` flat.
    - `state`: an object with the `shape` and the `dtype` of one trajectory's `u`.
    - `batched_consts`, `batched_p`: for each of `consts` and `p`, whether it differs between lanes.
    - `form`: the pair of `scalarised` and `operations`; by default the form that is found to be
        best.

    **Attributes:**

    - `scalarised`: whether the state is a tuple of `[lane]` vectors, one for each component, in
        row-major order. Otherwise it is a tuple of one `[*state, lane]` array.
    - `operations`: about how many operations one call emits.
    - `batched`: for each of the constants and parameters, whether it differs between lanes.
    - `deciding`: for each of them, whether its value decides what is computed (through a predicate,
        for example).

    **Raises:** [`NotInLanesError`][ensembleode.fields.lanes.interpreter.NotInLanesError] for a
    field that can't be evaluated for several trajectories at once.
    """

    def __init__(
        self,
        program: Program,
        state: Any,
        batched_consts: tuple[bool, ...],
        batched_p: tuple[bool, ...],
        form: tuple[bool, int] | None = None,
    ):
        (out,) = program.out_avals
        self.shape: tuple[int, ...] = tuple(state.shape)
        self.dtype = np.dtype(state.dtype)
        if tuple(out.shape) != self.shape:
            raise ValueError(f"the field is of shape {out.shape}, the state of {self.shape}.")
        self.program = program
        self.size = math.prod(self.shape)
        self.batched = (*batched_consts, *batched_p)
        deciding = program.deciding()
        n = len(batched_consts)
        # The state and the time are left out.
        self.deciding = (*deciding[:n], *deciding[n + 1 : -1])
        self._n_consts = len(batched_consts)
        binders: list[Any] = [*program.jaxpr.constvars, *program.jaxpr.invars[1:]]
        *self._avals, self._t_aval = [v.aval for v in binders]
        self.scalarised, self.operations = form or _form_of(
            program, self.shape, self.dtype, batched_consts, batched_p
        )
        # All stages call the same function, so it is traced once.
        self._call = jax.jit(self._evaluate, inline=True)

    def __repr__(self) -> str:
        form = "scalars" if self.scalarised else "one array"
        return f"LaneField(state {self.shape} as {form}, {self.operations} operations)"

    def split(self, u: Any) -> tuple:
        """The leaves of a `[*state, lane]` array."""
        if not self.scalarised:
            return (u,)
        return tuple(unpack(from_array(u, True)).entries)

    def join(self, leaves: Sequence) -> Any:
        """The `[*state, lane]` array that the leaves make up."""
        if not self.scalarised:
            return leaves[0]
        return jnp.stack(leaves).reshape((*self.shape, *leaves[0].shape))

    def prepare(self, consts: Sequence, p: Sequence) -> tuple:
        """What a call needs besides the state and the time, from lanes-last `consts` and `p`.

        This is called once, outside of the loop over time, so that the loop doesn't take arrays
        apart.
        """
        run = Interpreter(self.scalarised)

        def prepared(x, batched):
            value = from_array(jnp.asarray(x), batched)
            if run.is_apart(value.shape):
                return tuple(unpack(value).entries)
            return pack(value).array

        return tuple(map(prepared, (*consts, *p), self.batched))

    def __call__(self, args: tuple, leaves: Sequence, t: Any) -> tuple:
        """The leaves of du/dt.

        **Arguments:**

        - `args`: what [`prepare`][] returned.
        - `leaves`: the state, as `split` returns it.
        - `t`: `[lane]`, or `[]` where the lanes share it.
        """
        return self._call(args, tuple(leaves), t)

    #
    # The evaluation
    #

    def _evaluate(self, args: tuple, leaves: tuple, t: Any) -> tuple:
        return self._run(Interpreter(self.scalarised), args, leaves, t)

    def _run(self, run: Interpreter, args: tuple, leaves: tuple, t: Any) -> tuple:
        values = [
            Scalars(v.shape, v.dtype, list(x)) if isinstance(x, tuple) else Stacked(x, batched)
            for v, x, batched in zip(self._avals, args, self.batched, strict=True)
        ]
        consts, p = values[: self._n_consts], values[self._n_consts :]
        if self.scalarised:
            u = Scalars(self.shape, self.dtype, list(leaves))
        else:
            u = from_array(leaves[0], True)
        time = Scalars((), t.dtype, [t])
        (du,) = run.evaluate(self.program.jaxpr, consts, [u, *p, time])
        tail = leaves[0].shape[-1:]
        if not self.scalarised:
            out = lax.convert_element_type(spread(du, tail), self.dtype)
            return (run.computed_once("stack", out) if isinstance(du, Scalars) else out,)
        entries = unpack(du).entries
        return tuple(lax.convert_element_type(fill(x, tail, du.dtype), self.dtype) for x in entries)

    def count(self, budget: int | None) -> int:
        """How many operations a call emits, found by tracing a call for a stand-in number of lanes.

        **Raises:** [`TooLong`][] past the budget.
        """
        run = Interpreter(self.scalarised, budget)
        lanes = 2

        def struct(shape, dtype, batched):
            return jax.ShapeDtypeStruct((*shape, lanes) if batched else shape, dtype)

        args = [
            (struct((), v.dtype, batched),) * math.prod(v.shape)
            if run.is_apart(v.shape)
            else struct(v.shape, v.dtype, batched)
            for v, batched in zip(self._avals, self.batched, strict=True)
        ]
        if self.scalarised:
            leaves = (struct((), self.dtype, True),) * self.size
        else:
            leaves = (struct(self.shape, self.dtype, True),)
        t = struct((), self._t_aval.dtype, True)
        jax.eval_shape(functools.partial(self._run, run), tuple(args), leaves, t)
        return run.operations


@functools.lru_cache(maxsize=256)
def _form_of(
    program: Program,
    shape: tuple[int, ...],
    dtype: Any,
    batched_consts: tuple[bool, ...],
    batched_p: tuple[bool, ...],
) -> tuple[bool, int]:
    """Whether a field is best scalarised, and how many operations a call then emits."""
    state = jax.ShapeDtypeStruct(shape, dtype)

    def count(scalarised, budget):
        field = LaneField(program, state, batched_consts, batched_p, (scalarised, 0))
        return field.count(budget)

    small = 0 < math.prod(shape) <= LARGEST_SCALARISED_STATE
    if small:
        try:
            return True, count(True, MOST_OPERATIONS)
        except TooLong:
            pass
    as_array = count(False, None)
    if small and 2 * as_array > MOST_OPERATIONS:
        # The program has many operations even on arrays: taken apart it may have hardly more.
        try:
            return True, count(True, 2 * as_array)
        except TooLong:
            pass
    return False, as_array
