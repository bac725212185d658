"""Checks of the arguments of `solve`, before anything is traced."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..plan.trajectory_numbers import Trajectories
from ..problem.ensemble import EnsembleAlgorithm
from ..problem.options import as_count
from ..problem.problem import EnsembleProblem
from ..problem.unknown_options import solver_by_name
from ..tracing.program import is_tracer


def solver_and_algorithm(alg: Any, ensemblealg: Any) -> tuple[Any, Any]:
    """The solver (None for the default one) and the ensemble algorithm, from the first two
    arguments.

    **Raises:** `TypeError` for a class, a string or an ensemble algorithm in place of a solver.
    """
    if isinstance(alg, EnsembleAlgorithm):
        if ensemblealg is None:  # SciML allows it
            return None, alg
        raise TypeError(
            "the solver is the second argument, and the ensemble algorithm the third: "
            f"solve(ens, eo.Tsit5(), eo.{type(alg).__name__}()); got {alg!r}, {ensemblealg!r}."
        )
    if isinstance(alg, type):
        raise TypeError(
            f"alg must be a solver, got the class {alg.__name__}; give {alg.__name__}()."
        )
    if isinstance(alg, str):
        raise TypeError(f"alg must be a solver, got the string {alg!r}; {solver_by_name(alg)}.")
    return alg, ensemblealg


def check_trajectories(ens: EnsembleProblem, trajectories: Any) -> int:
    """The number of trajectories.

    **Raises:** `ValueError` where it isn't given, isn't positive, or is larger than the number of
    rows that the ensemble has.
    """
    rows = ens.rows
    if trajectories is None and rows is None:
        raise ValueError(
            "trajectories is missing: say how many, as in solve(..., trajectories=100)."
        )
    n = as_count("trajectories", rows if trajectories is None else trajectories)
    if rows is not None and n > rows:
        raise ValueError(
            f"trajectories={n}, and u0 and p of the EnsembleProblem have rows for {rows}: "
            "leave trajectories out to solve these."
        )
    return n


def check_direction(every: Trajectories, n: int) -> None:
    """**Raises:** `ValueError` for a step size whose sign is opposite to that of its trajectory's
    time span, as far as both are known."""
    lanes = every.shared
    if every.batched.dt is None or not (lanes.dt is None or is_tracer(lanes.dt) or lanes.dt < 0):
        return
    if any(x is None for x in (lanes.dt, lanes.t0, lanes.t1)):
        lanes = every.lanes(np.arange(n, dtype=np.int32), 1)
    if any(map(is_tracer, (lanes.dt, lanes.t0, lanes.t1))):
        return
    dt, t0, t1 = (np.broadcast_to(np.asarray(x), (n,)) for x in (lanes.dt, lanes.t0, lanes.t1))
    against = np.flatnonzero((dt < 0) & (t0 < t1))
    if len(against):
        which = f" (first of trajectory {against[0]})" if n > 1 else ""
        raise ValueError(
            f"dt={dt[against[0]]:g} is negative, and tspan runs forwards{which}; give its size."
        )


def refuse_ensemble_options(**options: Any) -> None:
    """**Raises:** `TypeError` for an option of ensembles that is given with a single problem."""
    for name, value in options.items():
        if value is not None:
            raise TypeError(
                f"{name} is given with a single ODEProblem; make it an ensemble with "
                "eo.EnsembleProblem(prob), or drop it."
            )


def check_store_key(store_key: Any, store: Any) -> None:
    """**Raises:** `TypeError` for a `store_key` that is no string, `ValueError` for one without a
    store."""
    if store_key is None:
        return
    if not isinstance(store_key, str) or not store_key:
        raise TypeError(f"store_key must be a string that is not empty, got {store_key!r}.")
    if store is None:
        raise ValueError("store_key is given without store; drop it, or give store='...' too.")


def key_from(seed: Any, key: Any) -> Array | None:
    """The PRNG key from which the keys of the trajectories are derived.

    **Raises:** `TypeError` for a `key` that is no PRNG key, and for a `seed` that is no integer.
    """
    if key is None:
        if not (eqx.is_array_like(seed) and jnp.issubdtype(jnp.result_type(seed), jnp.integer)):
            raise TypeError(f"seed must be an integer, got {seed!r}.")
        return jax.random.key(seed)
    dtype = getattr(key, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32):
        raise TypeError(f"key must be a JAX PRNG key, such as jax.random.key(0), got {key!r}.")
    return key


def refuse_traced(**options: bool) -> None:
    """**Raises:** `ValueError` for an option that is given (true) inside of `jit`."""
    for name, value in options.items():
        if value:
            what = name if name in ("store", "on_interrupt") else f"{name}=True"
            raise ValueError(
                f"{what} can't work inside jit, grad or vmap, where nothing has been computed "
                "yet; call solve outside of them, or drop it and look at sim.retcode."
            )
