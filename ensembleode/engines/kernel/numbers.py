"""The numbers of trajectories as the arrays that a kernel reads.

What the trajectories share is one vector a dtype, `shared_<dtype>`; what each has of its own is one
array `[number, trajectory]` a dtype, `own_<dtype>`, in which neighbouring threads read neighbouring
places.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...plan import Plan
from ...trajectories import Lane
from ..codegen import Inputs


class Number(NamedTuple):
    """Where a number of a `Lane` lies: from `start` on in a group of a dtype.

    - `name`: that of the Lane's leaf; those of `consts` and `p` have none, as `inputs` says where
        they lie.
    """

    name: str | None
    group: str
    dtype: np.dtype
    start: int
    size: int


class Layout(NamedTuple):
    """Where everything lies: `numbers` in order of the leaves, those of the field in `inputs`.

    - `sizes`: of each group of a dtype, in the order of the kernel's parameters.
    """

    numbers: tuple[Number, ...]
    inputs: Inputs
    sizes: tuple[tuple[str, np.dtype, int], ...]

    def place_of(self, name: str) -> Number | None:
        return next((x for x in self.numbers if x.name == name), None)


def layout_of(plan: Plan, lanes: Lane) -> Layout:
    """**Arguments:** `lanes`: arrays, or abstract values, with the trajectories first where they
    are batched."""
    named = list(_leaves(plan, lanes))
    avals = [aval for _, aval, _ in named]
    groups = ["own" if batched else "shared" for _, _, batched in named]
    inputs = Inputs.as_they_are(avals, groups)
    numbers, sizes = [], {}
    for (name, aval, _), (group, start) in zip(named, inputs.places, strict=True):
        size, dtype = math.prod(aval.shape), np.dtype(aval.dtype)
        numbers.append(Number(name, group, dtype, start, size))
        sizes[group, dtype] = max(sizes.get((group, dtype), 0), start + size)
    of_field = [x for x, number in zip(inputs.places, numbers, strict=True) if number.name is None]
    ordered = tuple((*key, sizes[key]) for key in sorted(sizes, key=lambda k: (k[0], k[1].name)))
    return Layout(tuple(numbers), Inputs(tuple(of_field), None), ordered)


def arrays_of(layout: Layout, plan: Plan, lanes: Lane, n: int) -> list[Any]:
    """The arrays of `layout.sizes`."""
    parts: dict[tuple, list] = {(group, dtype): [] for group, dtype, _ in layout.sizes}
    leaves = [x for _, x, _ in _leaves(plan, lanes, values=True)]
    for number, x in zip(layout.numbers, leaves, strict=True):
        flat = x.reshape(n, -1).T if number.group == "own" else x.reshape(-1)
        parts[number.group, number.dtype].append(flat)
    return [jnp.concatenate(parts[group, dtype]) for group, dtype, _ in layout.sizes]


def _leaves(
    plan: Plan, lanes: Lane, *, values: bool = False
) -> Iterator[tuple[str | None, Any, bool]]:
    """The leaves of a Lane but for the times to save: name, value or that of one, batched?"""
    dtype = plan.state.dtype

    def of(name: str | None, x: Any, batched: bool, wanted: Any = None) -> tuple:
        if values:
            return name, jnp.asarray(x, wanted), batched
        shape = x.shape[1:] if batched else x.shape
        return name, jax.ShapeDtypeStruct(shape, x.dtype if wanted is None else wanted), batched

    for name in ("consts", "p"):
        for x, batched in zip(getattr(lanes, name), getattr(plan.batched, name), strict=True):
            yield of(None, x, batched)
    for name in ("u0", "t0", "t1", "abstol", "reltol", "dt", "count"):
        x = getattr(lanes, name)
        if x is not None:
            wanted = np.int32 if name == "count" else dtype
            yield of(name, x, getattr(plan.batched, name), wanted)
