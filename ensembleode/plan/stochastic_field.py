"""Stochastic problems as fields: the step of a method, with the noise in it, as one program.

The time loop of an engine adds to the state what this program returns, and nothing else (see
[`OneStepMap`][ensembleode.solvers.stochastic.OneStepMap]). So the derivatives of a stochastic solve
are those of any other: they make the noise again, which is a function of the trajectory's key, of
the number of the step and of the component (see [`philox`][ensembleode.solvers.philox]).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..fields import staged
from ..solvers.arithmetic import JaxArithmetic
from ..solvers.brownian_tree import from_the_root, piece, SPREAD, units_of
from ..solvers.direct import reacted
from ..solvers.philox import normals_of_step, uniforms
from ..solvers.stochastic import (
    power_below,
    SDESolver,
    StochasticTerms,
    whole_number,
)
from ..tracing.program import Program, program_of, Static
from . import tuning
from .extended_state import Extension, integrals_of, rates
from .implicit_form import ImplicitForm
from .noise import JUMPS, NoiseNumbers, NoiseTerms


# The streams of random numbers that a trajectory has, of each of its runs. (Julia's `noise.jl` has
# the same increments, and draws seeds from stream 3.)
_INCREMENTS, _REACTIONS, _PIECES, _STREAMS = 0, 1, 2, 8


class StochasticField(NamedTuple):
    """The field of a stochastic problem for a method.

    - `field`: the change of the extended state in a step, `field(consts, u, p, h)`.
    - `extension`: the parts of that state.
    - `form`: with the rate of the drift.
    """

    field: Program
    extension: Extension
    form: ImplicitForm


@functools.lru_cache(maxsize=256)
def stochastic_field(
    drift: Program, noise: NoiseTerms, alg: Static, *, adaptive: bool, is_cut: bool
) -> StochasticField:
    """The field for the method `alg`. **Arguments:** `adaptive`: whether its steps are; `is_cut`:
    whether events may cut fixed steps."""
    if noise.kind == JUMPS:
        return _jumping_field(drift, noise)
    solver: SDESolver = alg.value
    (aval,) = drift.out_avals
    user = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    integral = None if noise.integrand is None else integrals_of(noise.integrand, user, noise.tree)
    paths = ("W", "Z")[: solver.draws] if noise.kept else ()
    kept = tuple((name, noise.shape) for name in paths)
    extension = Extension(user, integral, has_clock=True, noise=kept, has_errors=adaptive)
    units = units_of(user.dtype)

    def integrand(consts: list[Array], u: Array, p: tuple, t: Array) -> Any:
        return (
            None if noise.integrand is None else rates(noise.integrand, extension, consts, u, p, t)
        )

    def step(consts: list[Array], u: Array, p: tuple, h: Array) -> Array:
        y, (t, count) = extension.user_of(u), extension.clock_of(u)

        def diffusion(u: Array, t: Array) -> Array:
            return noise.rows(noise.diffusion(consts, u, p, t))

        terms = StochasticTerms(
            lambda u, t: drift(consts, u, p, t), diffusion, functools.partial(_times, noise.kind)
        )
        numbers = noise.numbers(consts)
        if adaptive:
            numbers = numbers._replace(span=jax.lax.stop_gradient(numbers.span))
            passed = _part(numbers.span, h) * units
            increments = _piece(noise, numbers, count, passed, h)
        else:
            whole = jnp.floor(count) if is_cut else count
            passed = whole + 1.0 - count if is_cut else 1.0
            rest = 1.0 - jax.lax.stop_gradient(count - whole) if is_cut else 1.0
            increments = _increments(noise, solver.draws, numbers, t, whole, h, rest)
        dw, dz = increments if solver.draws > 1 else (*increments, None)
        change, error = solver.step(terms, y, t, h, dw, dz)
        integrals = integrand(consts, y, p, t)
        if integrals is not None:
            integrals = h * 0.5 * (integrals + integrand(consts, y + change, p, t + h))
        kept = increments if noise.kept else ()
        errors = (error,) if adaptive else ()
        return extension.state(change, integrals, beside=(*kept, h, passed, *errors))

    def rate(consts: list[Array], u: Array, p: tuple, t: Array) -> Array:
        y = extension.user_of(u)
        errors = np.zeros(extension.controlled if adaptive else 0)
        beside = np.zeros(len(paths) * noise.size), np.array([1.0, 0.0]), errors
        return extension.state(drift(consts, y, p, t), integrand(consts, y, p, t), beside=beside)

    return _field_of(drift, extension, step, rate)


def _field_of(
    drift: Program, extension: Extension, step: Callable, rate: Callable
) -> StochasticField:
    """The field whose values are those of `step`."""
    field, of_drift = (
        program_of(staged(drift, fn, state=extension.vector), drift.out_tree, rules=True)
        for fn in (step, rate)
    )
    return StochasticField(field, extension, ImplicitForm(rate=of_drift))


def _jumping_field(drift: Program, noise: NoiseTerms) -> StochasticField:
    """The field of reactions, whose step are all those within its time."""
    (aval,) = drift.out_avals
    user = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    extension = Extension(user, has_clock=True)
    most = 2 ** min(31, jnp.finfo(user.dtype).nmant)

    def step(consts: list[Array], u: Array, p: tuple, h: Array) -> Array:
        y, (t, count) = extension.user_of(u), extension.clock_of(u)
        numbers = noise.numbers(consts)
        first = _whole(count)
        stream = _stream(numbers.repeat, _REACTIONS)

        def rates(u: Array) -> Array:
            return noise.diffusion(consts, u.reshape(user.shape), p, t)

        def draw(i: Array) -> Array:
            place = first + i.astype(jnp.uint32), numbers.index, stream
            return uniforms(numbers.key, place, 2, user.dtype)

        left = np.int32(most - 1) - first.astype(jnp.int32)
        changes = numbers.given["changes"].astype(user.dtype)
        after, drawn = reacted(rates, draw, changes, y.reshape(-1), h, left)
        beside = h, drawn.astype(user.dtype)
        return extension.state(after - y.reshape(-1), beside=beside)

    def rate(consts: list[Array], u: Array, p: tuple, t: Array) -> Array:
        y = extension.user_of(u)
        return extension.state(drift(consts, y, p, t), beside=(np.array([1.0, 0.0]),))

    return _field_of(drift, extension, step, rate)


def _times(kind: str, g: Any, w: Any) -> Any:
    """The product of a value of the diffusion with numbers like the noise; and of 0.0, a sum
    without terms (see `combined`)."""
    if isinstance(g, float):
        return g
    if kind == "general":
        return jnp.sum(g * w.reshape(*[1] * (g.ndim - 1), w.size), axis=-1)
    return g * w


def _increments(
    noise: NoiseTerms,
    draws: int,
    numbers: NoiseNumbers,
    t: Any,
    count: Any,
    h: Any,
    rest: Any,
) -> tuple:
    """The increments of the processes in the step of the number `count`, from `t`. It is the `rest`
    of a step that an event has cut, along the line that the path is within a step; 1.0 for a whole
    step."""
    given = numbers.given
    if "W" in given:
        times = given["t"].astype(t.dtype)
        paths = [given[name].astype(t.dtype) for name in ("W", "Z")[:draws]]
        return tuple(_interpolated(times, x, t + h) - _interpolated(times, x, t) for x in paths)
    place = _whole(count), numbers.index, _stream(numbers.repeat, _INCREMENTS)
    found = normals_of_step(numbers.key, place, draws * noise.size, t.dtype)
    # (The whole step had the size `h / rest`.)
    return _shaped(noise, given, jnp.sqrt(h * rest) * found.reshape(draws, noise.size))


def _shaped(noise: NoiseTerms, given: dict, numbers: Array) -> tuple:
    """Independent increments `[process, noise]` in the shape of the noise, multiplied by its
    factor."""
    if "factor" in given:
        factor = given["factor"].astype(numbers.dtype)
        numbers = jnp.sum(factor[None] * numbers[:, None], axis=-1)
    return tuple(x.reshape(noise.shape) for x in numbers)


def _stream(repeat: Array, which: int) -> Array:
    return repeat * np.uint32(_STREAMS) + np.uint32(which)


def _whole(x: Array) -> Array:
    """A whole number as an integer of 32 bits without sign."""
    return whole_number(JaxArithmetic(), x).astype(jnp.uint32)


def _part(span: Array, h: Array) -> Array:
    """The part of the time span, a power of two, that a step of the size `h` is."""
    # (Times are rounded, and parts are far from each other.)
    return power_below(JaxArithmetic(), h / span * 1.25)


def _piece(
    noise: NoiseTerms, numbers: NoiseNumbers, at: Array, size: Array, h: Array
) -> tuple[Array, Array]:
    """The increments of both processes in an adaptive step, which begins after `at` units of the
    time span and lasts `size` of them: a piece of the trajectory's tree."""
    place = numbers.key, numbers.index, _stream(numbers.repeat, _PIECES)
    how = piece if noise.size <= tuning.MOST_REMEMBERED else from_the_root
    w, a = how(*place, _whole(at), _whole(size), noise.size, h.dtype)
    found = jnp.sqrt(numbers.span) * jnp.stack([w, a / SPREAD])
    return _shaped(noise, numbers.given, found)


def _interpolated(times: Array, path: Array, t: Array) -> Array:
    """A path at the time `t`, linear between the given times, and constant outside of them."""
    i = jnp.clip(jnp.searchsorted(times, t, side="right") - 1, 0, len(times) - 2)
    start, end = times[i], times[i + 1]
    part = jnp.clip((t - start) / (end - start), 0, 1)
    return path[i] + part * (path[i + 1] - path[i])
