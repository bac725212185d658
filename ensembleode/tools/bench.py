"""Measures how fast ensembles are solved on this computer."""

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from ..problem.ensemble import EnsembleColumns, EnsembleGPUArray, EnsembleSerial, EnsembleThreads
from ..problem.problem import EnsembleProblem, ODEProblem, remake
from ..solvers import Tsit5
from ..solving import solve


def rows(trajectories: int, repeats: int) -> list[dict[str, Any]]:
    """For each ensemble algorithm: the seconds of the first call, which compiles, and of the
    fastest later call; and the trajectories per second."""
    algorithms = [EnsembleSerial(), EnsembleColumns(), EnsembleGPUArray()]
    if jax.default_backend() == "cpu":
        algorithms.append(EnsembleThreads())
    return [_row(alg, trajectories, repeats) for alg in algorithms]


def table(found: list[dict[str, Any]]) -> str:
    device = jax.devices()[0]
    lines = [
        f"{found[0]['trajectories']:,} Lorenz trajectories to t = 1, Tsit5 at 1e-6, "
        f"{found[0]['dtype']}, {len(jax.devices())} x {device.device_kind}",
        f"{'':24}{'first call, s':>14}{'then, s':>10}{'trajectories/s':>16}{'failed':>8}",
    ]
    lines += [
        f"{row['algorithm']:24}{row['first']:14.2f}{row['seconds']:10.4f}"
        f"{row['per_second']:16,.0f}{row['failed']:8}"
        for row in found
    ]
    return "\n".join(lines)


def _row(alg: Any, trajectories: int, repeats: int) -> dict[str, Any]:
    rhos = jnp.linspace(0.0, 28.0, trajectories)
    prob = ODEProblem(_lorenz, jnp.array([1.0, 0.0, 0.0]), (0.0, 1.0), 28.0)
    ens = EnsembleProblem(prob, lambda prob, ctx: remake(prob, p=rhos[ctx.index]))

    def once():
        started = time.perf_counter()
        options = {"trajectories": trajectories, "abstol": 1e-6, "reltol": 1e-6}
        sim = jax.block_until_ready(solve(ens, Tsit5(), alg, **options))
        return time.perf_counter() - started, sim

    first, sim = once()
    best = min(once()[0] for _ in range(repeats))
    return {
        "algorithm": str(alg),
        "trajectories": trajectories,
        "dtype": str(jax.tree.leaves(prob.u0)[0].dtype),
        "first": first,
        "seconds": best,
        "per_second": trajectories / best,
        "failed": len(sim.failed),
    }


def _lorenz(u: PyTree, p: PyTree, t: Array) -> Array:
    x, y, z = u
    return jnp.stack([10.0 * (y - x), x * (p - z) - y, x * y - 8.0 / 3.0 * z])
