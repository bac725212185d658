"""Stochastic problems as fields: the step of a method, with the noise in it, as one program.

The time loop of an engine adds to the state what this program returns, and nothing else (see
[`OneStepMap`][ensembleode.solvers.stochastic.OneStepMap]). So the derivatives of a stochastic solve
are those of any other: they make the noise again, which is a function of the trajectory's key, of
the number of the step and of the component (see [`philox`][ensembleode.fields.philox]).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..fields import staged
from ..fields.derivatives.sparsity import structure
from ..fields.philox import normals, uniforms
from ..ground.state_tree import StateTree
from ..problem.jump_problem import JumpProblem
from ..problem.stochastic import NoiseGrid, SDEProblem, WienerProcess
from ..solvers import Direct, EM, SDESolver, SOSRA, SOSRI, Tsit5
from ..solvers.direct import reacted
from ..solvers.arithmetic import JaxArithmetic
from ..solvers.stochastic import power_below, StochasticTerms, units_of, whole_number
from ..tracing.evaluation import equations
from ..tracing.program import is_tracer, Program, program_of, Static
from .extended_state import Extension, integrals_of, rates
from .implicit_form import ImplicitForm


# Primitives through which a value depends on numbers that its derivative doesn't depend on.
_STEPS = {
    "argmax",
    "argmin",
    "ceil",
    "cond",
    "floor",
    "gather",
    "round",
    "select_n",
    "sign",
    "while",
}
# The streams of random numbers that a trajectory has, of each of its runs.
_INCREMENTS, _REACTIONS, _PIECES, _STREAMS = 0, 1, 2, 8
JUMPS = "jumps"


@dataclasses.dataclass(frozen=True)
class NoiseTerms:
    """What a stochastic problem has besides the drift, which is its field.

    All programs have the same constants, of which those from number `first` on are the key of all
    trajectories, the index, the run and the length of the time span of this one, and the numbers of
    the noise.

    - `diffusion`: the diffusion, `g(consts, u, p, t)`.
    - `integrand`: the integrand; None without one.
    - `kind`: `"diagonal"`, `"scalar"` or `"general"`; or `"jumps"`, where the diffusion are the
        propensities of reactions.
    - `shape`: the shape of the noise.
    - `tree`: the structure of a state that is a pytree; None for an array.
    - `given`: which numbers of the noise there are: any of `"factor"`, `"t"`, `"W"`, `"Z"` and
        `"changes"`.
    - `kept`: whether solutions keep the path.
    """

    diffusion: Program
    integrand: Program | None
    kind: str
    shape: tuple[int, ...]
    tree: StateTree | None
    given: tuple[str, ...]
    kept: bool
    first: int

    def mapped(self, change: Callable[[Program], Program], more: int = 0) -> "NoiseTerms":
        """The terms with changed programs, which have `more` constants before the key."""
        integrand = self.integrand and change(self.integrand)
        changes = {"diffusion": change(self.diffusion), "integrand": integrand}
        return dataclasses.replace(self, **changes, first=self.first + more)

    @property
    def size(self) -> int:
        """The number of components of the noise."""
        return math.prod(self.shape)

    @property
    def is_correlated(self) -> bool:
        return "factor" in self.given

    @property
    def is_additive(self) -> bool:
        """Whether the diffusion doesn't depend on the state, other than by products with zero."""
        inputs = [True] + [False] * (len(self.diffusion.jaxpr.invars) - 1)
        if not any(self.diffusion.depends_on(inputs)):
            return True
        steps = _STEPS.intersection(x.primitive.name for x in equations(self.diffusion.jaxpr))
        return not steps and not structure(self.diffusion).any()


def numbers_of(prob: SDEProblem | JumpProblem) -> dict[str, Any]:
    """The numbers of the noise of a problem, by their names."""
    if isinstance(prob, JumpProblem):
        leaves = (jnp.reshape(x, (len(x), -1)) for x in jtu.tree_leaves(prob.changes))
        return {"changes": jnp.concatenate(list(leaves), axis=1)}
    if isinstance(prob.noise, WienerProcess) and prob.noise.factor is not None:
        return {"factor": prob.noise.factor}
    if isinstance(prob.noise, NoiseGrid):
        named = {"t": prob.noise.t, "W": prob.noise.W, "Z": prob.noise.Z}
        return {name: x for name, x in named.items() if x is not None}
    return {}


def noise_of(
    prob: SDEProblem | JumpProblem, u0: Any, tree: StateTree | None, diffusion: Program
) -> tuple[str, tuple[int, ...]]:
    """The kind and the shape of the noise.

    **Raises:** `TypeError` or `ValueError` where `g`, `noise_rate_prototype` or `noise` have other
    structures, shapes or dtypes than the problem needs.
    """
    if isinstance(prob, JumpProblem):
        return _jumps(prob, diffusion)
    prototype, given = prob.noise_rate_prototype, numbers_of(prob)
    shape = u0.shape if tree is None else (tree.size,)
    kind = "scalar" if getattr(prob.noise, "scalar", False) else "diagonal"
    structure = jtu.tree_structure(0) if tree is None else tree.structure
    shapes = [shape] if tree is None else list(tree.shapes)
    noise: tuple[int, ...] = () if kind == "scalar" else shape
    if prototype is not None:
        kind, leaves = "general", jtu.tree_leaves(prototype)
        sizes = {np.shape(x)[-1] if np.ndim(x) else 0 for x in leaves}
        before = [np.shape(x)[:-1] for x in leaves]
        if jtu.tree_structure(prototype) != structure or before != shapes or len(sizes) != 1:
            raise ValueError(
                "noise_rate_prototype must be like u0, with one more axis, [*state, m], for m "
                f"noises; it has the shapes {jax.tree.map(np.shape, prototype)}, and u0 "
                f"{jax.tree.map(np.shape, prob.u0)}."
            )
        noise = (sizes.pop(),)
        shapes = [(*x, *noise) for x in shapes]
    if kind == "diagonal" and "W" in given:
        # A path without axes is that of a scalar noise.
        kind, noise = ("scalar", ()) if given["W"].ndim == 1 and shape != () else (kind, noise)
    _check_diffusion(diffusion, structure, shapes, u0.dtype)
    if "W" in given and given["W"].shape[1:] != noise:
        raise ValueError(
            f"W of NoiseGrid has the shape {given['W'].shape}; here it must be "
            f"{('grid', *noise)}, as the noise is {kind}."
        )
    if "factor" in given and given["factor"].shape[0] != math.prod(noise):
        raise ValueError(
            f"factor of WienerProcess has the shape {given['factor'].shape}, and there are "
            f"{math.prod(noise)} noises."
        )
    return kind, noise


def _jumps(prob: JumpProblem, rates: Program) -> tuple[str, tuple[int, ...]]:
    """The kind and the shape of the noise of reactions.

    **Raises:** `TypeError` or `ValueError` for rates of another shape or dtype.
    """
    count = len(jtu.tree_leaves(prob.changes)[0])
    dtype = jtu.tree_leaves(prob.u0)[0].dtype
    outs = [(x.shape, x.dtype) for x in rates.out_avals]
    if rates.out_tree != jtu.tree_structure(0) or outs[0][0] != (count,):
        raise ValueError(
            f"rates must return an array of the shape {(count,)}, a rate for each of the reactions "
            f"in changes; it returned {rates.out_tree} of {[x for x, _ in outs]}."
        )
    if outs[0][1] != dtype:
        raise TypeError(
            f"rates must return the dtype of the state u, {dtype}; it returned {outs[0][1]}: write "
            "out.astype(u.dtype) for the out that it returns."
        )
    return JUMPS, ()


def check_stochastic(prob: SDEProblem | JumpProblem, dtype: Any) -> None:
    """**Raises:** `ValueError` for what a stochastic problem can't have."""
    state, name = jax.tree.leaves(prob.u0)[0], type(prob).__name__
    if state.dtype != dtype:
        raise ValueError(f"the state of an {name} must be real, and u0 is {state.dtype}.")
    if getattr(prob.f, "mass_matrix", None) is not None:
        raise ValueError("f of an SDEProblem has no mass_matrix: multiply by its inverse.")
    t0, t1 = prob.tspan
    if not is_tracer(t0) and not is_tracer(t1) and t1 < t0:
        raise ValueError(
            f"tspan of an {name} must run forwards, got ({t0}, {t1}): noise has no past."
        )


def _check_diffusion(program: Program, structure: Any, shapes: Sequence, dtype: Any) -> None:
    if program.out_tree != structure:
        raise TypeError(
            f"g must return the structure of the state u, {structure}; it returned "
            f"{program.out_tree}."
        )
    for x, shape in zip(program.out_avals, shapes, strict=True):
        if x.shape != shape:
            hint = ""
            if x.shape[: len(shape)] == shape and len(x.shape) == len(shape) + 1:
                hint = " For a matrix of noises, give noise_rate_prototype=jnp.zeros([*state, m])."
            raise ValueError(
                f"g must return an array of the shape {shape}; it returned {x.shape}.{hint}"
            )
        if x.dtype != dtype:
            raise TypeError(
                f"g must return the dtype of the state u, {dtype}; it returned {x.dtype}: write "
                "out.astype(u.dtype) for the out that it returns."
            )


def method_for(alg: Any, noise: NoiseTerms | None) -> Any:
    """The method `alg`; where it is None, the default one for this noise, or for an ODE.

    **Raises:** `ValueError` for a method that isn't for this noise, or for no noise.
    """
    if noise is not None and noise.kind == JUMPS:
        if not isinstance(alg, Direct | None):
            raise ValueError(
                f"{type(alg).__name__} isn't for a JumpProblem: leave alg out, or pass eo.Direct()."
            )
        return Direct()
    if isinstance(alg, Direct):
        raise ValueError("Direct is for a JumpProblem: give one, or another method.")
    if alg is None and noise is not None:
        only_some = noise.kind == "general" or noise.is_correlated
        alg = SOSRA() if noise.is_additive else EM() if only_some else SOSRI()
    elif alg is None:
        alg = Tsit5()
    name = type(alg).__name__
    if noise is None:
        if isinstance(alg, SDESolver):
            raise ValueError(
                f"{name} is for stochastic problems: give an eo.SDEProblem(f, g, u0, tspan, p), or "
                "a method for ODEs, such as eo.Tsit5()."
            )
        return alg
    if not isinstance(alg, SDESolver):
        raise ValueError(
            f"{name} is for ODEs, and this is an SDEProblem: leave alg out, or pass eo.SOSRI() "
            "(diagonal or scalar noise), eo.SOSRA() (additive), or eo.EM() (any)."
        )
    if noise.kind not in alg.noises:
        raise ValueError(
            f"{name} is for {' or '.join(alg.noises)} noise, and this one is {noise.kind}: pass "
            "eo.EM(), or eo.EulerHeun() (Stratonovich)."
        )
    if noise.is_correlated and alg.order > 0.5 and not alg.additive:
        raise ValueError(
            f"{name} is for independent noises, and WienerProcess has a factor: pass eo.EM()."
        )
    if alg.additive and not noise.is_additive:
        raise ValueError(
            f"{name} is for additive noise, and g depends on the state u: pass eo.SOSRI(), or "
            "eo.EM()."
        )
    if alg.draws > 1 and "W" in noise.given and "Z" not in noise.given:
        raise ValueError(
            f"{name} uses a second process: NoiseGrid needs Z, too (sol.Z of a solve with "
            "save_noise=True)."
        )
    return alg


def is_adaptive(alg: Any, options: dict) -> bool:
    """Whether the steps of a method adapt to the tolerances."""
    wanted = options["adaptive"]
    return alg.adaptive if wanted is None else bool(wanted)


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
    drift: Program, noise: NoiseTerms, alg: Static, *, adaptive: bool
) -> StochasticField:
    """The field for the method `alg`; `adaptive`: whether its steps are."""
    if noise.kind == JUMPS:
        return _jumping_field(drift, noise)
    solver: SDESolver = alg.value
    (aval,) = drift.out_avals
    user = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    integral = None if noise.integrand is None else integrals_of(noise.integrand, user)
    paths = ("W", "Z")[: solver.draws] if noise.kept else ()
    kept = tuple((name, noise.shape) for name in paths)
    extension = Extension(user, integral, has_clock=True, noise=kept, has_errors=adaptive)
    units = units_of(user.dtype)

    def integrand(consts: Any, u: Any, p: tuple, t: Any) -> Any:
        return (
            None if noise.integrand is None else rates(noise.integrand, extension, consts, u, p, t)
        )

    def step(consts: Any, u: Any, p: tuple, h: Any) -> Any:
        y, (t, count) = extension.user_of(u), extension.clock_of(u)

        def diffusion(u: Any, t: Any) -> Any:
            return _flat(noise, noise.diffusion(consts, u, p, t), user.shape)

        terms = StochasticTerms(
            lambda u, t: drift(consts, u, p, t), diffusion, functools.partial(_times, noise.kind)
        )
        numbers = consts[noise.first :]
        if adaptive:
            increments = _piece(noise, numbers, count, h)
        else:
            increments = _increments(noise, solver.draws, numbers, t, count, h)
        dw, dz = increments if solver.draws > 1 else (*increments, None)
        change, error = solver.step(terms, y, t, h, dw, dz)
        integrals = integrand(consts, y, p, t)
        if integrals is not None:
            integrals = h * 0.5 * (integrals + integrand(consts, y + change, p, t + h))
        kept = increments if noise.kept else ()
        passed, errors = (_part(noise, numbers, h) * units, (error,)) if adaptive else (1.0, ())
        return extension.state(change, integrals, beside=(*kept, h, passed, *errors))

    def rate(consts: Any, u: Any, p: tuple, t: Any) -> Any:
        y = extension.user_of(u)
        errors = np.zeros(extension.controlled if adaptive else 0)
        beside = np.zeros(len(paths) * noise.size), np.array([1.0, 0.0]), errors
        return extension.state(drift(consts, y, p, t), integrand(consts, y, p, t), beside=beside)

    field, rate = (
        program_of(staged(drift, fn, state=extension.vector), drift.out_tree, rules=True)
        for fn in (step, rate)
    )
    return StochasticField(field, extension, ImplicitForm(rate=rate))


def _jumping_field(drift: Program, noise: NoiseTerms) -> StochasticField:
    """The field of reactions, whose step are all those within its time."""
    (aval,) = drift.out_avals
    user = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    extension = Extension(user, has_clock=True)
    most = 2 ** min(31, jnp.finfo(user.dtype).nmant)

    def step(consts: Any, u: Any, p: tuple, h: Any) -> Any:
        y, (t, count) = extension.user_of(u), extension.clock_of(u)
        key, index, repeat, _, changes, *_ = consts[noise.first :]
        first = _whole(count)
        stream = _stream(repeat, _REACTIONS)

        def rates(u: Any, s: Any) -> Any:
            return noise.diffusion(consts, u.reshape(user.shape), p, t + s)

        def draw(i: Any) -> Any:
            place = first + i.astype(jnp.uint32), index, stream
            return uniforms(key, place, 2, user.dtype)

        left = np.int32(most - 1) - first.astype(jnp.int32)
        after, drawn = reacted(rates, draw, changes.astype(user.dtype), y.reshape(-1), h, left)
        beside = h, drawn.astype(user.dtype)
        return extension.state(after - y.reshape(-1), beside=beside)

    def rate(consts: Any, u: Any, p: tuple, t: Any) -> Any:
        y = extension.user_of(u)
        return extension.state(drift(consts, y, p, t), beside=(np.array([1.0, 0.0]),))

    field, rate = (
        program_of(staged(drift, fn, state=extension.vector), drift.out_tree, rules=True)
        for fn in (step, rate)
    )
    return StochasticField(field, extension, ImplicitForm(rate=rate))


def _flat(noise: NoiseTerms, g: Any, shape: tuple[int, ...]) -> Any:
    """A value of the diffusion, for a state that is an array of this shape."""
    if noise.tree is None:
        return g
    if noise.kind != "general":
        return noise.tree.ravel(g)
    rows = [jnp.reshape(x, (-1, noise.size)) for x in jtu.tree_leaves(g)]
    return jnp.concatenate(rows)


def _times(kind: str, g: Any, w: Any) -> Any:
    """The product of a value of the diffusion, or of the number 0.0, with numbers like the
    noise."""
    if isinstance(g, float):
        return g
    if kind == "general":
        return jnp.sum(g * w.reshape(*[1] * (g.ndim - 1), w.size), axis=-1)
    return g * w


def _increments(
    noise: NoiseTerms, draws: int, numbers: Any, t: Any, count: Any, h: Any
) -> tuple[Any, ...]:
    """The increments of the processes in the step of the number `count`, from `t`."""
    key, index, repeat, _, *numbers = numbers
    given = dict(zip(noise.given, numbers, strict=False))
    if "W" in given:
        times = given["t"].astype(t.dtype)
        paths = [given[name].astype(t.dtype) for name in ("W", "Z")[:draws]]
        return tuple(_at(times, x, t + h) - _at(times, x, t) for x in paths)
    place = _whole(count), index, _stream(repeat, _INCREMENTS)
    found = normals(key, place, draws * noise.size, t.dtype)
    return _shaped(noise, given, jnp.sqrt(h) * found.reshape(draws, noise.size))


def _shaped(noise: NoiseTerms, given: dict, numbers: Any) -> tuple[Any, ...]:
    """Independent increments `[process, noise]` in the shape of the noise, multiplied by its
    factor."""
    if "factor" in given:
        factor = given["factor"].astype(numbers.dtype)
        numbers = jnp.sum(factor[None] * numbers[:, None], axis=-1)
    return tuple(x.reshape(noise.shape) for x in numbers)


def _stream(repeat: Any, which: int) -> Any:
    return repeat * np.uint32(_STREAMS) + np.uint32(which)


def _whole(x: Any) -> Any:
    """A whole number as an integer of 32 bits without sign."""
    return whole_number(JaxArithmetic(), x).astype(jnp.uint32)


def _part(noise: NoiseTerms, numbers: Any, h: Any) -> Any:
    """The part of the time span, a power of two, that a step of the size `h` is."""
    span = jax.lax.stop_gradient(numbers[3])
    # (Times are rounded, and parts are far from each other.)
    return power_below(JaxArithmetic(), h / span * 1.25)


def _piece(noise: NoiseTerms, numbers: Any, at: Any, h: Any) -> tuple[Any, Any]:
    """The increments of both processes in an adaptive step, which begins after `at` units of the
    time span: a piece of a dyadic tree, of which each piece has its increment `w` of the path, and
    `a`, the integral of the path within it less that of a straight line, over its length. These
    decide those of its halves, but for two normal numbers.

    Source: Foster, Lyons and Oberhauser, "An optimal polynomial approximation of Brownian motion",
    SIAM J. Numer. Anal. 58(3), 2020; Jelincic, Foster and Kidger, arXiv:2405.06464 (2024).
    """
    key, index, repeat, span, *more = numbers
    span, dtype = jax.lax.stop_gradient(span), h.dtype
    given = dict(zip(noise.given, more, strict=False))
    units, xp = units_of(dtype), JaxArithmetic()
    levels, stream, size = int(math.log2(units)), _stream(repeat, _PIECES), noise.size
    start, units_left = _whole(at), _whole(_part(noise, numbers, h) * units)

    def drawn(node: Any) -> Any:
        return normals(key, (node, index, stream), 2 * size, dtype).reshape(2, size)

    def goes_on(carry: tuple) -> Any:
        return carry[0] > units_left

    def halved(carry: tuple) -> tuple:
        length, node, root, w, a = carry
        first, second = drawn(node)
        half = length >> 1
        is_right = (start & half) != 0
        moved = 1.5 * a + (0.25 * root) * first
        # The sum of both halves' `a` is known, and their difference is drawn.
        rest, own = a - 0.5 * moved, (root * (1 / 48) ** 0.5) * second
        sign = jnp.where(is_right, -1.0, 1.0).astype(dtype)
        w = 0.5 * w + sign * moved
        node = (node << 1) + is_right.astype(jnp.uint32)
        return half, node, root * 0.5**0.5, w, rest + sign * own

    root = jnp.sqrt(span)
    w, a = drawn(jnp.uint32(0))
    whole = np.uint32(units), jnp.uint32(1), root, root * w, (root * (1 / 12) ** 0.5) * a
    *_, w, a = jax.lax.while_loop(goes_on, halved, whole)
    return _shaped(noise, given, jnp.stack([w, 12**0.5 * a]))


def _at(times: Any, path: Any, t: Any) -> Any:
    """A path at the time `t`, linear between the given times, and constant outside of them."""
    i = jnp.clip(jnp.searchsorted(times, t, side="right") - 1, 0, len(times) - 2)
    start, end = times[i], times[i + 1]
    part = jnp.clip((t - start) / (end - start), 0, 1)
    return path[i] + part * (path[i + 1] - path[i])
