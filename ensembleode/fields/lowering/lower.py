"""From a jaxpr to the small language of `ir.py`. (To add a primitive: see `fields/__init__.py`.)"""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from ...ground.keys import raw
from .. import tuning
from ..complex_numbers import NotInPairsError, without_complex
from ..ir import Buffer, Function, Index, Store, Var
from ..random_keys import without_keys
from ..scalarise import scalarise
from . import (
    control_flow as control_flow,
    elementwise as elementwise,
    memory as memory,
    movement as movement,
    products as products,
    reductions as reductions,
)
from .checking import check
from .errors import UntranslatableError
from .passing import Lowering
from .values import loaded, scalar


# The function of a larger state stores its result in memory instead of returning components.
LARGEST_RETURNED = 24


class Inputs(NamedTuple):
    """The layout of a program's parameters.

    - `places`: for each constant, and then for each argument between the state and the time, its
        group and the place of its first component there.
    - `storage`: the dtype of the groups `own` and `shared`; None where each dtype has groups of its
        own.
    """

    places: tuple[tuple[str, int], ...]
    storage: np.dtype | None

    @classmethod
    def laid_out(cls, avals: Sequence, groups: Sequence[str], storage: Any = None) -> "Inputs":
        """The layout in which the parameters of each group (without `storage`, of each group and
        dtype) lie one after the other."""
        ends: collections.Counter = collections.Counter()
        places = []
        for aval, group in zip(map(raw, avals), groups, strict=True):
            key = group, np.dtype(aval.dtype) if storage is None else None
            places.append((group, ends[key]))
            ends[key] += math.prod(aval.shape)
        return cls(tuple(places), None if storage is None else np.dtype(storage))


def lower(
    jaxpr: jex.Jaxpr,
    inputs: Inputs,
    largest_returned: int = LARGEST_RETURNED,
    *,
    apart: bool = True,
    most: int = tuning.MOST_SCALAR_OPERATIONS,
    functions: bool = False,
) -> Function:
    """Lower a function of a state, parameters and the time; its constants are parameters, too. Its
    result are arrays of one dtype, one after the other.

    **Arguments:**

    - `inputs`: the layout of the parameters.
    - `largest_returned`: the largest number of components that is returned; a larger result is
        stored.
    - `apart`: whether a function of at most `most` operations is taken apart into scalars.
    - `functions`: whether `plain.FUNCTIONS` are written out, as the target has none.

    **Raises:** [`UntranslatableError`][] for a primitive that has no rule.
    """
    try:
        jaxpr = without_complex(without_keys(jaxpr, inputs.storage))
    except NotInPairsError as e:
        raise UntranslatableError(e.what, e.where or "an unknown place") from e
    check(jaxpr, functions=functions)
    outs: list = [v.aval for v in jaxpr.outvars]
    sizes, dtype = [math.prod(out.shape) for out in outs], np.dtype(outs[0].dtype)
    size = sum(sizes)
    if not size:
        return Function((), (), 0, dtype, (), ())
    n_consts = len(jaxpr.constvars)
    avals: list = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    state, t = avals[n_consts], avals[-1]
    values = []
    parameters = [*avals[:n_consts], *avals[n_consts + 1 : -1]]
    for aval, (group, start) in zip(parameters, inputs.places, strict=True):
        storage = inputs.storage if group in ("own", "shared") else None
        # (Nothing reads a key, see `check`; as many integers take its place.)
        aval = jax.ShapeDtypeStruct(aval.shape, raw(aval).dtype)
        values.append(loaded(group, start, aval, storage or aval.dtype))
    u, time = loaded("u", 0, state, state.dtype), scalar(Var("t", np.dtype(t.dtype)))
    arrays = [*values[:n_consts], u, *values[n_consts:]]
    scalars = scalarise(jaxpr, most) if apart else None
    if scalars is not None:
        run = Lowering(functions=functions)
        components = [scalar(x.at(Index(i)), (1,)) for x in arrays for i in range(x.size)]
        exprs = [x.expr for x in run.evaluate(scalars, [*components, time])]
        if size <= largest_returned and not run.work:
            return run.function(tuple(exprs), size, dtype)
        if not run.work:
            result = Buffer("out", dtype, 0, size)
            for i, x in enumerate(exprs):
                run.emit(Store(result, Index(i), x))
            return run.function((), size, dtype)
    run = Lowering(functions=functions)
    starts = itertools.accumulate(sizes, initial=0)
    results = run.evaluate(jaxpr, [*arrays, time])
    for x, start, n in zip(results, starts, sizes, strict=False):
        run.copy(x, Buffer("out", dtype, start, n))
    return run.function((), size, dtype)
