"""The texts that describe solutions: their `repr`."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..ground.retcode import count_codes, ReturnCode, ReturnCodes
from ..ground.state_tree import leaf_names
from ..tracing.program import is_tracer


def text_of_solution(sol: Any) -> str:
    if is_tracer(sol.retcode):
        return f"ODESolution(u={_shape_of(sol.u)}, traced)"
    if not _has_numbers(sol.retcode, 0):
        return f"ODESolution(u={_shape_of(sol.u)}, mapped)"
    return "\n".join(
        [
            f"ODESolution: {len(sol)} times, {_state(sol, 1)}",
            f"  retcode  {ReturnCode(int(sol.retcode)).name}",
            f"  t        {_span(sol.t)}",
            f"  steps    {_steps(sol.stats)}",
            *_events(sol.events),
        ]
    )


def text_of_ensemble(sim: Any) -> str:
    if is_tracer(sim.retcode):
        return f"EnsembleSolution(u={_shape_of(sim.u)}, engine={sim.engine.name}, traced)"
    if not _has_numbers(sim.retcode, 1):
        return f"EnsembleSolution(u={_shape_of(sim.u)}, engine={sim.engine.name}, mapped)"
    n = len(sim)
    if sim.kind == "trajectories":
        rows = jax.tree.leaves(sim.u)[0].shape[1]
        what = f"{n} trajectories x {rows} times, {_state(sim, 2)}"
    else:
        what = f"{n} trajectories, {sim.kind} {_shape_of(sim.u)}"
    lines = [f"EnsembleSolution: {what}", f"  retcode  {count_codes(sim.retcode)}"]
    if sim.t is not None:
        lines.append(f"  t        {_span(sim.t)}")
    lines.append(f"  steps    {_steps(sim.stats)}")
    lines += _events(sim.events)
    if sim.kind == "reduced":
        lines.append(f"  converged {bool(sim.converged)}")
    lines += [f"  engine   {sim.engine}", f"  elapsed  {float(sim.elapsed):.3g} s"]
    return "\n".join(lines)


def _span(t: Array | np.ndarray) -> str:
    t = np.asarray(t)
    if t.ndim == 2:
        return f"own times for each, from {_range(t[:, 0])} on"
    return f"{t[0]:g} to {t[-1]:g}"


def _steps(stats: Any) -> str:
    return f"{_range(stats.naccept)} accepted, {_range(stats.nreject)} rejected"


def _events(events: Any) -> list[str]:
    return [] if events is None else [f"  events   {_range(events.count)}"]


def _range(x: Any) -> str:
    x = np.asarray(x)
    lo, hi = np.nanmin(x), np.nanmax(x)
    return f"{lo:g}" if lo == hi else f"{lo:g} to {hi:g}"


def _has_numbers(retcode: ReturnCodes, ndim: int) -> bool:
    """False for objects in place of numbers, which `vmap`, `eval_shape` or `tree_map` put into a
    solution."""
    has_numbers = eqx.is_array_like(retcode) or hasattr(retcode, "__array__")
    return has_numbers and np.ndim(retcode) == ndim


def _state(sol: Any, lead: int) -> str:
    """A text with the shape and dtype of a state, or of each of its leaves; and which components
    are saved, where `save_idxs` chose them."""
    u, leaves, names = sol.u, jax.tree.leaves(sol.u), sol._names
    if len(leaves) == 1 and leaves[0] is u:
        few = "" if names is None else f" of {', '.join(names[:4])}{', ...' * (len(names) > 4)}"
        return f"state {tuple(u.shape[lead:])} {u.dtype}{few}"
    shapes = [f"{name} {tuple(x.shape[lead:])}" for name, x in leaf_names(u, sol._order)]
    return f"state {{{', '.join(shapes)}}} {leaves[0].dtype}"


def _shape_of(tree: PyTree) -> dict[str, str] | str:
    def name(x):
        return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)

    if _is_solution(tree):
        return f"ODESolution of {name(tree.u)}"
    return jax.tree.map(name, tree, is_leaf=_is_solution)


def _is_solution(x: Any) -> bool:
    """Whether an output is the solution of its trajectory."""
    return isinstance(x, eqx.Module) and hasattr(x, "retcode")
