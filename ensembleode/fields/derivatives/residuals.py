"""The transpose of a field in two programs: one for the way forwards, which evaluates the field and
returns the residuals, and one for the way back, which needs only these."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.extend.core as jex

from ...tracing.program import with_constants
from ..movements import MOVEMENTS
from ..scalarise import inlined


# Elementwise operations that are repeated on the way back: they cost no more than reading a kept
# result.
_OF_COMPONENTS = """
    abs add add_any and clamp convert_element_type copy eq ge gt integer_pow le lt max min mul ne
    neg not one_minus_square or select_n sign square stop_gradient sub
"""
_CHEAP = {"broadcast_in_dim", "iota", *_OF_COMPONENTS.split(), *MOVEMENTS}


class SplitTranspose(NamedTuple):
    """The two programs; their inputs are those of the transposed field.

    - `forward`: its results are the value of the field and the `residuals`, one after the other.
    - `backward`: its result is that of the transposed field. The residuals follow its parameters.
    - `residuals`: the shapes of the residuals.
    """

    forward: jex.Jaxpr
    backward: jex.Jaxpr
    residuals: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """How many numbers the residuals are."""
        return sum(map(math.prod, self.residuals))


def split(jaxpr: jex.Jaxpr) -> SplitTranspose | None:
    """Split the program of a transposed field. Its first argument is the cotangent; its results are
    those of the transposed field and the value of the field. None if a residual isn't real, or none
    is kept."""
    inner: Any = inlined(jaxpr)
    result, value = inner.outvars
    cotangent, *given, time = inner.invars
    from_inputs = {*inner.constvars, *given, time}
    known, made_by = set(from_inputs), {}
    forward, backward = [], []
    for eqn in inner.eqns:
        if known.issuperset(_variables(eqn.invars)):
            known.update(eqn.outvars)
            made_by |= dict.fromkeys(eqn.outvars, eqn)
            forward.append(eqn)
        else:
            backward.append(eqn)
    # What the way back reads is either kept as a residual or, where that is cheap, computed again.
    kept: dict[Any, None] = {}
    again: dict[int, Any] = {}
    wanted = [v for eqn in backward for v in _variables(eqn.invars)]
    wanted += _variables([result])
    while wanted:
        v = wanted.pop()
        if v not in known or v in from_inputs or v in kept:
            continue
        eqn = made_by[v]
        if eqn.primitive.name in _CHEAP:
            if id(eqn) not in again:
                again[id(eqn)] = eqn
                wanted += _variables(eqn.invars)
        else:
            kept[v] = None
    residuals = list(kept)
    dtype = value.aval.dtype
    if not residuals or any(v.aval.dtype != dtype for v in residuals):
        return None
    made_again = [eqn for eqn in forward if id(eqn) in again]
    there = inner.replace(eqns=forward, outvars=[value, *residuals])
    back = inner.replace(
        eqns=[*made_again, *backward],
        invars=[cotangent, *given, *residuals, time],
        outvars=[result],
    )
    return SplitTranspose(
        with_constants(there, inner.constvars, inner.invars),
        with_constants(back, inner.constvars, back.invars),
        tuple(v.aval.shape for v in residuals),
    )


def _variables(atoms: Any) -> list:
    return [x for x in atoms if not isinstance(x, jex.Literal)]
