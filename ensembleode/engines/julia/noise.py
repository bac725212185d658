"""The noise of stochastic problems in requests: the diffusion in Julia, and the numbers that Julia
draws the noise with (see `julia/src/noise.jl`)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jax import Array

from ...fields import staged
from ...plan.noise import NoiseTerms
from ...plan.plan import Plan
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...solvers.julia_alg import draws
from ...tracing.program import Program, program_of, with_constants
from .fields import JuliaField, translate_stochastic


def parameters_read(plan: Plan, parameters: Sequence) -> list:
    """What `f` and `g` read of a trajectory's constants and parameters: all but the numbers of its
    noise."""
    if plan.noise is None:
        return list(parameters)
    n = len(plan.field.jaxpr.constvars)
    return [*parameters[: plan.noise.first], *parameters[n:]]


@functools.lru_cache(maxsize=256)
def field_with_noise(drift: Program, noise: NoiseTerms, batched: tuple[bool, ...]) -> JuliaField:
    """The translated drift and diffusion.

    **Arguments:** `batched`: for each of the numbers that they read, whether it differs by
    trajectory.

    **Raises:** `ValueError` for one that can't be translated.
    """
    drift = _without_numbers(drift, noise)
    diffusion = _without_numbers(noise.diffusion, noise)
    is_matrix = noise.kind == "general"

    def rows(consts: Sequence, u: Array, p: Sequence, t: Array) -> Array:
        found = noise.rows(diffusion(consts, u, p, t))
        return found.reshape(-1, noise.size).T if is_matrix else found

    values = program_of(staged(diffusion, rows), jtu.tree_structure(0), rules=True)
    return translate_stochastic(drift, values, batched, noise.size if is_matrix else None)


def _without_numbers(program: Program, noise: NoiseTerms) -> Program:
    """A program without the numbers of the noise among its constants, which it doesn't read."""
    jaxpr = program.jaxpr
    kept = with_constants(jaxpr, jaxpr.constvars[: noise.first], jaxpr.invars)
    return program_of(kept, program.out_tree, rules=True)


def noise_as_table(plan: Plan, noise: NoiseTerms) -> dict[str, Any]:
    """The table of the noise in a request."""
    method = plan.method.value
    about = {"kind": noise.kind, "size": noise.size}
    return {**about, "draws": draws(method.description), "adaptive": bool(method.adaptive)}


def noise_arrays(
    plan: Plan, noise: NoiseTerms, lanes: TrajectoryNumbers, n: int
) -> dict[str, np.ndarray]:
    """The numbers of the noise of `n` trajectories, as arrays of a request."""
    numbers, own = (noise.numbers(x.consts) for x in (lanes, plan.batched))
    words = {name: getattr(numbers, name) for name in ("key", "index", "repeat")}
    found: dict[str, np.ndarray] = {
        name: np.asarray(x, np.uint32).reshape(-1) for name, x in words.items()
    }
    for name, x in numbers.given.items():
        rows = [n] if own.given[name] else []
        shape = (*rows, -1, noise.size) if name in ("W", "Z", "factor") else (*rows, -1)
        found[name] = np.asarray(x, plan.state.dtype).reshape(shape)
    return {f"noise_{name}": np.ascontiguousarray(x) for name, x in found.items()}
