"""A `prob_func` that can't be traced: it is called once for each trajectory, and its results are
stacked."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike

from ..plan.trajectory_numbers import Trajectories, TrajectoryNumbers
from ..problem.number_table import of_kind
from ..tracing.program import is_tracer
from ..tracing.purity import contents
from .traced_prob_func import as_input
from .trajectory_maker import TrajectoryMaker


def called(maker: TrajectoryMaker, key: Any, n: int) -> Trajectories:
    """Call `maker` with every index, and stack the numbers of all trajectories."""

    def columns(lanes):
        """For each leaf, the sequence of its values for all trajectories."""
        return list(zip(*map(jtu.tree_leaves, lanes), strict=True))

    keep = _keeper()
    made = [keep(maker(i, 1, key)) for i in range(n)]
    structure = jtu.tree_structure(made[0])
    names = [
        n
        for n, x in zip(TrajectoryNumbers._fields, made[0], strict=True)
        for _ in jtu.tree_leaves(x)
    ]
    firsts = columns(made)
    # Arrays that all trajectories share in the first run may differ in a rerun.
    reruns = maker.ens.output_func is not None
    varies = [
        (reruns and name in _ARRAYS) or not _all_same(name, column)
        for name, column in zip(names, firsts, strict=True)
    ]
    table = [_stack(c) if v else as_input(c[0]) for c, v in zip(firsts, varies, strict=True)]

    def lanes(indices, repeat):
        if isinstance(repeat, int) and repeat > 1:
            again = columns([keep(maker(int(i), repeat, key)) for i in np.asarray(indices)])
            leaves = []
            for name, column, v, x in zip(names, again, varies, table, strict=True):
                if not v and not _all_same(name, [x, *column]):
                    raise ValueError(
                        f"prob_func changes {name} in a rerun, while it is the same for all "
                        "trajectories in the first run; write prob_func in JAX (see the log)."
                    )
                leaves.append(_stack(column) if v else x)
        else:
            leaves = [x[indices] if v else x for x, v in zip(table, varies, strict=True)]
        return jtu.tree_unflatten(structure, leaves)

    def lane(index, repeat):
        every = lanes(index[None] if is_tracer(index) else np.asarray([index]), repeat)
        return jax.tree.map(lambda x, v: x[0] if v else x, every, batched)

    batched = jtu.tree_unflatten(structure, varies)
    return maker.trajectories(
        batched=batched,
        lanes=lanes,
        lane=lane,
        shared=jax.tree.map(lambda x, v: None if v else x, lanes(np.arange(1), 1), batched),
        traced=any(map(is_tracer, table)),
        repeatable=False,
    )


def _keeper() -> Callable[[TrajectoryNumbers], TrajectoryNumbers]:
    """A function that copies NumPy arrays, since the next call of `prob_func` may write into these.
    Arrays of the same contents are one copy, which trajectories share."""
    copies: dict[Any, np.ndarray] = {}

    def kept(x: ArrayLike) -> ArrayLike:
        if not isinstance(x, np.ndarray):
            return x
        (content,) = contents([x])
        return copies[content] if content in copies else copies.setdefault(content, x.copy())

    return functools.partial(jax.tree.map, kept)


_ARRAYS = [x.name for x in of_kind("state", "parameters", "constants")]


def _all_same(name: str, column: Sequence) -> bool:
    """Whether all trajectories share a leaf: times and tolerances are compared by value, arrays by
    identity."""
    first = column[0]
    if all(x is first for x in column):
        return True
    if name in _ARRAYS or any(map(is_tracer, column)):
        return False
    return all(np.array_equal(np.asarray(x), np.asarray(first)) for x in column)


def _stack(column: Sequence) -> Any:
    if any(map(is_tracer, column)):
        return jnp.stack([jnp.asarray(x) for x in column])
    if jnp.issubdtype(jnp.result_type(column[0]), jax.dtypes.extended):  # PRNG keys
        return jnp.stack(column)
    return jnp.asarray(np.stack([np.asarray(x) for x in column]))
